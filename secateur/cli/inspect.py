"""Show the zeros of a model: sparsity by layer, patterns (n:m, blocks, whole rows), agreement with masks, bytes, and
what the zeros of its linear layers buy on this device: each kind of layer is timed for a moment, dense and packed.

Folders of safetensors files are read tensor by tensor, without building the model: those that `secateur prune` and
`secateur export` save, packed or not, runs of `secateur train`, and any Hugging Face folder. Packed means a bit mask
and the values that are not zero.
"""

from __future__ import annotations

import argparse
import html
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from secateur.cli.options import MODELS, add_device, add_out, import_torch, pick_device
from secateur.errors import ModelError, SecateurError
from secateur.files import check_file, megabytes, write

if TYPE_CHECKING:
    from torch import Tensor, nn

    from secateur.bench.decode import Gains
    from secateur.model.inspect import Inspected

Linear = tuple["set[str] | None", "set[str]"]  # weights of linear layers (None: any may be), and which are transposed
SUMMARY = "sparsity by layer, patterns, masks, bytes and speed of a saved model"
EXAMPLE = "secateur inspect pruned-smollm2 --out zeros.html"
MASKS = "masks.safetensors"
BEST = "best"  # where a run of `secateur train` keeps its best weights
BUYS = "What the zeros buy on this device"
HEADER = ("tensor", "shape", "zeros", "sparsity", "patterns", "dense", "packed")


@dataclass(frozen=True)
class Source:
    """What is inspected."""

    tensors: Iterable[tuple[str, Tensor]]
    linear: Linear
    masks: Mapping[str, Tensor]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODELS)
    add_device(parser)
    add_out(parser, "also write a page with a heat map of layers by kinds, such as zeros.html")


def run(options: argparse.Namespace) -> int:
    if options.out:
        check_file(options.out)
    import_torch()
    from secateur.bench.decode import Gains
    from secateur.model.inspect import inspect_tensors
    from secateur.model.masks import load_masks
    from secateur.report import collapse, text_table

    folder = Path(options.model).expanduser()
    masks = load_masks(folder) if (folder / MASKS).is_file() else None
    device = pick_device(options.device)
    with _stored(folder, masks or {}) if folder.is_dir() else nullcontext(_loaded(options.model)) as source:
        gains = Gains(device, *source.linear)
        found, left_out, apart = inspect_tensors(gains.watched(source.tensors), source.masks)
    found.sort(key=_natural)
    if not found:
        raise ModelError(f"{options.model} has no weights of two or more dimensions: there is nothing to inspect.")
    print(text_table(HEADER, collapse([_row(one) for one in found])), end="\n\n")
    lines = summary(found, left_out, None if masks is None else apart)
    print("\n".join(lines))
    print(f"\n{BUYS}\n")
    if rows := gains.rows():
        print(text_table(gains.HEADER, rows), end="\n\n")
    print("\n".join(gains.lines()))
    if options.out:
        write(options.out, page(options.model, found, lines, gains))
        print(f"\nPage: {options.out.resolve()}")
    return 0


def _loaded(model: str) -> Source:
    """Named weights of a model that Hugging Face loads, and which of them belong to linear layers."""
    from secateur.inference.saving import packable_names
    from secateur.integrations.folder import load

    found = load(model, packed=False)[0]
    return Source(found.named_parameters(), packable_names(found), {})


@contextmanager
def _stored(folder: Path, masks: Mapping[str, Tensor]) -> Iterator[Source]:
    """Named weights from the files of a folder, one at a time, with the masks under the same names."""
    from secateur.inference.convert import CONFIG, expanded
    from secateur.inference.format import Packed, WeightFiles, no_weights, weight_files
    from secateur.inference.saving import packable_names, without_values

    model: nn.Module | None = None
    linear: Linear = None, set()
    with suppress(SecateurError):  # zeros can be counted without building the model
        if (folder / CONFIG).is_file():
            model = without_values(folder)
            linear = packable_names(model)
    with expanded(folder) as whole:
        files = next((found for place in (whole, folder / BEST) if (found := weight_files(place))), [])
        if not files:
            raise no_weights(folder)
        with WeightFiles(files) as weights:
            dense = ((name, one.dense() if isinstance(one, Packed) else one) for name, one in weights.items())
            yield Source(dense, linear, masks if model is None else _by_file_name(model, masks, weights))


def _by_file_name(model: nn.Module, masks: Mapping[str, Tensor], weights: Collection[str]) -> Mapping[str, Tensor]:
    """The masks by names in the files, split or joined like the weights there; as they are if that is not possible."""
    from secateur.inference.convert import as_in_files
    from secateur.oneshot.batches import is_out_of_memory

    here = {name: mask for name, mask in masks.items() if name in weights}
    try:
        return here | as_in_files(model, {name: mask for name, mask in masks.items() if name not in here})
    except Exception as error:  # conversions of transformers raise almost any type for masks of another model
        if is_out_of_memory(error):
            raise
        return masks


def _natural(one: Inspected) -> list[tuple[int, str]]:
    """A key that puts layer 2 before layer 10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in one.name.split(".")]


def _row(one: Inspected) -> tuple[str, ...]:
    return (
        one.name, "x".join(map(str, one.shape)), f"{one.zeros:,}", f"{one.sparsity:.2%}",
        ", ".join(one.patterns) or "-", megabytes(one.dense_bytes), megabytes(one.packed_bytes),
    )  # fmt: skip


def summary(found: list[Inspected], left_out: int, apart: list[str] | None) -> list[str]:
    """Totals, and how zeros and masks agree, in sentences; `apart` names masks without a weight (None: no masks)."""
    weights, zeros = sum(one.numel for one in found), sum(one.zeros for one in found)
    dense, packed = sum(one.dense_bytes for one in found), sum(min(one.dense_bytes, one.packed_bytes) for one in found)
    lines = [
        f"{zeros:,} of {weights:,} weights in {len(found)} tensors are zero: {zeros / weights:.4%}."
        + (f" {left_out:,} weights in vectors and other tensors were not counted." if left_out else ""),
        f"Dense {megabytes(dense)}; packed {megabytes(packed)}, tensors that packing would enlarge left dense.",
    ]
    if apart is None:
        return [*lines, "No masks were saved with it, so zeros were not compared with masks."]
    return lines + _agreement([one for one in found if one.returned is not None], apart)


def _agreement(with_mask: list[Inspected], apart: list[str]) -> list[str]:
    """How zeros and masks agree, in sentences."""
    lines = []
    returned, unmasked = sum(one.returned or 0 for one in with_mask), sum(one.unmasked or 0 for one in with_mask)
    if returned:
        names = ", ".join(one.name for one in with_mask if one.returned)
        lines.append(f"WARNING: {returned:,} weights that the masks remove are not zero, in {names}.")
    elif with_mask:
        lines.append(f"Every weight that the {len(with_mask)} masks remove is zero.")
    if unmasked:
        lines.append(f"{unmasked:,} weights are zero although their masks keep them.")
    if apart:
        lines.append(
            f"{len(apart)} masks were not compared with the zeros: the files have no weight of the same name and shape,"
            f" such as {apart[0]}."
        )
    return lines


def page(model: str, found: list[Inspected], lines: list[str], gains: Gains) -> str:
    """The page of --out."""
    from secateur.report import collapse, heat_map, html_page, html_table

    share = sum(one.zeros for one in found) / sum(one.numel for one in found)
    said = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    heat = heat_map([(one.name, one.sparsity) for one in found])
    whole = [_row(one) for one in found]
    alike = collapse(whole)
    table = html_table(HEADER, alike)
    if len(alike) < len(whole):
        table += f"<details><summary>Every tensor</summary>{html_table(HEADER, whole)}</details>"
    bought = "".join(f"<p>{html.escape(line)}</p>" for line in gains.lines())
    bought = re.sub("`(.+?)`", r"<code>\1</code>", bought)
    rows = gains.rows()
    bought += html_table(gains.HEADER, rows) if rows else ""
    body = f"{said}<h2>{BUYS}</h2>{bought}<h2>Sparsity by layer</h2>{heat}<h2>Tensors</h2>{table}"
    return html_page(f"{model}: {share:.1%} of the weights are zero", body)
