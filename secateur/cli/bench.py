"""Measure on this machine: print a table and write a record with every sample, the command, versions and hardware.

`secateur bench NAME --help` describes a benchmark and shows an example.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from secateur.bench import NAMES
from secateur.cli.options import (
    MODELS,
    TEXTS,
    add_device,
    add_out,
    context_length,
    demo_steps,
    import_torch,
    pick_device,
    positive,
    seed,
    sparsity,
    wrapped,
)
from secateur.errors import SecateurError
from secateur.files import PAGE, check_folder

SUMMARY = "measure on this machine, print a table, record every sample"
EXAMPLE = "secateur bench select --device cpu --dims 512 --scores variance"
SCORES = ("variance", "bitter7")  # the default score, and the one of AdamWPrune


def _add_common(
    parser: argparse.ArgumentParser,
    scores: Sequence[str] = SCORES,
    sparsities: Sequence[float] = (),
    seeded: bool = True,
) -> None:
    """The options that mean the same in every benchmark; `sparsities`: several of them may be given."""
    add_device(parser)
    several = " ".join(f"{one:g}" for one in sparsities)
    parser.add_argument(
        "--sparsity",
        type=sparsity,
        nargs="+" if sparsities else None,
        default=list(sparsities) or 0.5,
        help=f"fraction of the weights to prune ({several or 0.5})",
    )
    if scores:
        parser.add_argument(
            "--scores", nargs="+", default=list(scores), help=f"scores to prune by ({' '.join(scores)})"
        )
    if seeded:
        parser.add_argument("--seed", type=seed, default=0, help="of everything random (0)")


def _select(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument(
        "--dims", "--dim", type=positive, nargs="+", help="sizes: layers of DIM x DIM (CPU: 1024 2048, GPU: 4096)"
    )
    parser.add_argument("--layers", type=positive, help="number of layers (CPU: 12, GPU: 24)")
    parser.add_argument("--calls", type=positive, help="calls of each form in a round (CPU: 5, GPU: 30)")
    parser.add_argument("--rounds", type=positive, help="rounds in which the forms take turns (CPU: 4, GPU: 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and moments")


def _accuracy(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, ("bitter7",), (0.001, 0.01, 0.1, 0.5, 0.9))
    parser.set_defaults(device="cpu")
    parser.add_argument("--draws", type=positive, default=20, help="single estimates at each size and sparsity (20)")
    parser.add_argument("--updates", type=positive, default=100, help="updates of the drift (100)")
    parser.add_argument("--up-to", type=positive, default=10**8, metavar="N", help="leave out sizes above N weights")


def _step(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, scores=())
    parser.add_argument("--dim", type=positive, help="layers of DIM x DIM (CPU: 512, GPU: 4096)")
    parser.add_argument("--layers", type=positive, help="number of layers (CPU: 4, GPU: 24)")
    parser.add_argument("--calls", type=positive, help="timed calls of each form in a round (CPU: 10, GPU: 30)")
    parser.add_argument("--rounds", type=positive, default=2, help="rounds in which the forms take turns (2)")


def _pace(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    optimizers, modes = ("torch", "secateur"), ("eager", "compile")
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=optimizers,
        default=list(optimizers),
        help="AdamW of each score: torch's fused one, secateur's (both)",
    )
    parser.add_argument("--modes", nargs="+", choices=modes, default=list(modes), help="(both)")
    parser.add_argument("--batch", type=positive, help="sequences in a step (16)")
    parser.add_argument("--steps", type=positive, help="timed steps (200)")
    parser.add_argument("--every", type=positive, help="steps between mask updates (50)")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 64 and a few steps, to try it out")


def _train(parser: argparse.ArgumentParser) -> None:
    _pace(parser)
    parser.add_argument("--repeats", type=positive, default=2, help="dense cells in each mode, to show the noise (2)")


def _scale(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--up-to", type=positive, metavar="N", help="largest size (CPU: 10 million, GPU: all)")
    parser.add_argument("--calls", type=positive, default=10, help="timed updates at each size (10)")


def _probe(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, ("variance",))
    parser.add_argument("--shape", choices=("mistral-7b", "tiny"), default="mistral-7b", help="(mistral-7b)")
    parser.add_argument("--sequences", type=positive, default=128, help="sequences to calibrate on (128)")
    parser.add_argument("--length", type=positive, default=2048, help="tokens in each (2048)")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 2, 4], help="batch sizes to try (1 2 4)")
    parser.add_argument("--memory", default="24GB", help="memory limit of the second run of each job on a GPU (24GB)")
    parser.add_argument("--quick", action="store_true", help="only the passes, no jobs")


def _quality(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, ("variance",), (0.5, 0.6), seeded=False)
    parser.add_argument("--model", default="smollm2", help=f"{MODELS} (smollm2)")
    parser.add_argument("--text", required=True, help=TEXTS)
    parser.add_argument("--context", type=context_length, default=1024, help="tokens in a window (1024)")
    parser.add_argument("--windows", type=positive, help="windows in all (as many as the text has)")
    parser.add_argument("--batch", type=positive, default=8, help="windows at a time (8)")
    parser.add_argument("--patterns", nargs="*", default=["2:4"], help="(2:4)")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="(all)")


def _decode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODELS} (made-up layers of the --shapes)")
    add_device(parser)
    parser.add_argument(
        "--sparsity",
        type=sparsity,
        nargs="+",
        help="zeros by magnitude (made-up: 0.5 0.8 0.9, a model: its own zeros)",
    )
    parser.add_argument("--shapes", nargs="+", metavar="ROWSxCOLUMNS", help="made-up layers (4096x4096 8192x8192)")
    dtypes = ("bfloat16", "float32", "float16")
    parser.add_argument("--dtype", nargs="+", choices=dtypes, help="(made-up: bfloat16, a model: its own)")
    parser.add_argument("--int8", action="store_true", help="made-up layers also with int8 values")
    shapes = ("mistral-7b", "tiny")
    parser.add_argument("--whole", choices=shapes, help="decode with a model of this shape and random weights")
    parser.add_argument("--threads", type=positive, help="torch's threads on a CPU (as many as torch takes)")
    parser.add_argument("--calls", type=positive, default=30, help="timed calls of each form of a layer (30)")
    parser.add_argument("--tokens", type=positive, default=48, help="timed tokens of each form of a model (48)")


def _patterns(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--model", default="smollm2", help=f"{MODELS} (smollm2)")
    parser.add_argument("--text", required=True, help=TEXTS)
    parser.add_argument(
        "--models", type=Path, required=True, metavar="FOLDER", help="where pruned models are kept and found again"
    )
    parser.add_argument("--patterns", nargs="*", default=["2:4", "8:16", "16:32", "4:16"], help="(2:4 8:16 16:32 4:16)")
    parser.add_argument("--sparsity", type=sparsity, nargs="*", default=[0.5, 0.75], help="unstructured (0.5 0.75)")
    parser.add_argument("--context", type=context_length, default=256, help="tokens in a window (256)")
    parser.add_argument("--windows", type=positive, default=24, help="windows in all (24)")
    parser.add_argument("--batch", type=positive, default=4, help="windows at a time (4)")
    parser.add_argument("--threads", type=positive, help="torch's threads on a CPU (as many as torch takes)")
    parser.add_argument("--tokens", type=positive, default=48, help="timed tokens of each model (48)")


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=demo_steps, help="training steps of each run (450)")


OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "select": _select,
    "accuracy": _accuracy,
    "step": _step,
    "train": _train,
    "pace": _pace,
    "scale": _scale,
    "probe": _probe,
    "quality": _quality,
    "decode": _decode,
    "patterns": _patterns,
    "demo": _demo,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True, title="benchmarks")
    for name, summary in NAMES.items():
        one = names.add_parser(
            name, help=summary, description=description(name), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        OPTIONS[name](one)
        add_out(
            one,
            "folder of the record (the current one; in a clone, its benchmarks/results)",
            metavar="FOLDER",
        )


def description(name: str) -> str:
    """The docstring of a benchmark, read from its source: importing the module would import torch."""
    source = resources.files("secateur.bench").joinpath(f"{name}.py").read_text(encoding="utf-8")
    return wrapped(source.split('"""')[1])


def run(options: argparse.Namespace) -> int:
    import_torch()
    from secateur.lab.record import results_folder

    check_folder(options.out or results_folder(), PAGE, replaced=False)  # measure only what can be recorded
    if hasattr(options, "device"):
        options.device = pick_device(options.device)
    _check_sparsity(getattr(options, "sparsity", None))
    return int(importlib.import_module(f"secateur.bench.{options.name}").run(options))


def _check_sparsity(given: float | list[float] | None) -> None:
    for one in given if isinstance(given, list) else [given]:
        if one is not None and not 0 < one < 1:
            percent = f" Write {one / 100:g} for {one:g} %." if 1 < one < 100 else ""
            raise SecateurError(f"--sparsity {one:g}: benchmarks prune a fraction between 0 and 1.{percent}")
