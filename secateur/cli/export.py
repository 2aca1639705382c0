"""Write a model in another form: packed (a bit mask and the values that are not zero), dense (every value), or for
another program: 24 (torch's 2:4 tensors, for NVIDIA GPUs), onnx, openvino.

Folders are converted tensor by tensor, without building the model, so a model larger than memory can be exported. A
packed folder loads in transformers after `import secateur`; a dense one in every program that reads safetensors. With
--compress zstd the files are smaller for transport, and are read by `secateur export` and `secateur.load` alone.

For onnx and openvino the model is built and its logits are compared with those of the exported one before anything is
kept. These programs store zeros like other values; the last lines say what a format brings.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from secateur.cli.options import MODELS, add_out, check_other, import_torch
from secateur.errors import SecateurError
from secateur.files import check_folder, megabytes

if TYPE_CHECKING:
    from secateur.inference.convert import Converted

SUMMARY = "write a model packed, dense or for another program, and show the sizes"
FORMATS = ("packed", "dense", "24", "onnx", "openvino")
EXAMPLE = "secateur export pruned-smollm2 --format packed --out packed-smollm2"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODELS)
    parser.add_argument("--format", choices=FORMATS, default="packed", help="form of the weights (packed)")
    parser.add_argument(
        "--values", choices=("int8",), help="round packed values to int8, with a scale a row (as they are)"
    )
    parser.add_argument("--compress", choices=("zstd",), help="compress the files for transport (not compressed)")
    add_out(parser, "folder for the exported model", required=True)
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")


def run(options: argparse.Namespace) -> int:
    if options.values and options.format != "packed":
        raise SecateurError("--values int8 needs --format packed: dense weights keep their dtype.")
    if options.compress and options.format not in ("packed", "dense"):
        raise SecateurError("--compress zstd needs --format packed or dense: other programs do not read such files.")
    check_folder(options.out)
    import_torch()

    source = Path(options.model).expanduser()
    check_other(options.out, options.model, "exported")
    done = _for_other_programs(options) if options.format not in ("packed", "dense") else _converted(options, source)
    print("\n".join(done))
    print(f"\nSaved in {options.out}")
    return 0


def _for_other_programs(options: argparse.Namespace) -> list[str]:
    """Build the model and write it; the sizes, in sentences."""
    from secateur.inference.exporters import check_export, export_for
    from secateur.integrations.folder import load

    check_export(options.format, options.out, overwrite=options.overwrite)  # before the model is loaded
    model, tokenizer = load(options.model, packed=False)
    done = export_for(options.format, model, options.out, tokenizer=tokenizer, overwrite=options.overwrite)
    checked = (
        [] if done.difference is None else [f"Largest difference of its logits: {done.difference:.1e} (relative)."]
    )
    return [
        f"Parameters {megabytes(done.dense_bytes)} dense, model files {megabytes(done.bytes)}"
        f" ({_share(done.bytes, done.dense_bytes)}).",
        *checked,
        done.said,
    ]


def _converted(options: argparse.Namespace, source: Path) -> list[str]:
    """Convert the files; the sizes, in sentences."""
    from secateur.inference.saving import export
    from secateur.integrations.folder import load, save

    settings = {
        "packed": options.format == "packed",
        "int8": options.values == "int8",
        "compress": options.compress is not None,
        "overwrite": options.overwrite,
    }
    if source.is_dir():
        done = export(source, options.out, **settings)
    else:  # a name on the hub, or smollm2
        import tempfile

        model, tokenizer = load(options.model)
        with tempfile.TemporaryDirectory(prefix="secateur-") as made:
            done = export(save(model, tokenizer, Path(made) / "model", {}, {}), options.out, **settings)
    return summary(done, options.format == "packed")


def summary(done: Converted, packed: bool) -> list[str]:
    """Sizes before and after, in sentences."""
    lines = [
        f"{done.weights} tensors: {megabytes(done.dense_bytes)} dense, {megabytes(done.bytes)} as written"
        f" ({_share(done.bytes, done.dense_bytes)}).",
    ]
    if done.packed:
        lines.append(
            f"{done.packed} packed weights: {megabytes(done.packed_dense_bytes)} dense,"
            f" {megabytes(done.packed_bytes)} packed ({_share(done.packed_bytes, done.packed_dense_bytes)})."
        )
    elif packed:
        lines.append("No linear layer has enough zeros to be smaller packed: the weights are dense.")
    if done.compressed_bytes is not None:
        lines.append(
            f"Compressed for transport: {megabytes(done.compressed_bytes)}"
            f" ({_share(done.compressed_bytes, done.dense_bytes)} of dense)."
        )
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
