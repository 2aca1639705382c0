"""Measure on this machine: print a table and write a record with every sample, the command, versions and hardware."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from types import ModuleType

from secateur.bench import NAMES
from secateur.cli.options import MODELS, TEXTS, add_device, add_out, demo_steps, import_torch, pick_device, positive
from secateur.errors import SecateurError, nearest
from secateur.files import PAGE, check_folder

SUMMARY = "measure on this machine, print a table, record every sample"
EXAMPLE = "secateur bench select --device cpu --out results"


def _select(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--dims", "--dim", type=positive, nargs="+", help="sizes: layers of DIM x DIM (GPU: 4096)")
    parser.add_argument("--layers", type=positive, help="number of layers (CPU: 12, GPU: 24)")
    parser.add_argument("--calls", type=positive, help="calls of each form in a round (CPU: 5, GPU: 30)")
    parser.add_argument("--rounds", type=positive, help="rounds in which the forms take turns (CPU: 4, GPU: 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and moments")


def _accuracy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draws", type=positive, default=20, help="single estimates at each size and target (20)")
    parser.add_argument("--updates", type=positive, default=100, help="updates of the drift (100)")
    parser.add_argument("--up-to", type=positive, default=10**8, metavar="N", help="leave out sizes above N weights")


def _step(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--dim", type=positive, help="layers of DIM x DIM (CPU: 512, GPU: 4096)")
    parser.add_argument("--layers", type=positive, help="number of layers (CPU: 4, GPU: 24)")
    parser.add_argument("--calls", type=positive, help="timed steps of each form in a round (CPU: 10, GPU: 30)")
    parser.add_argument("--rounds", type=positive, default=2, help="rounds in which the forms take turns (2)")


def _pace(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--batch", type=positive, help="sequences in a step (16)")
    parser.add_argument("--steps", type=positive, help="timed steps (200)")
    parser.add_argument("--every", type=positive, help="steps between mask updates (50)")
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="eager, compile (both)")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="besides dense (all)")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 64 and a few steps, to try it out")


def _train(parser: argparse.ArgumentParser) -> None:
    _pace(parser)
    parser.add_argument("--repeats", type=positive, default=2, help="dense cells in each mode, to show the noise (2)")


def _scale(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--up-to", type=positive, metavar="N", help="largest size (CPU: 10 million, GPU: all)")
    parser.add_argument("--calls", type=positive, default=10, help="timed updates at each size (10)")


def _probe(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--shape", default="mistral-7b", help="shape of the model (mistral-7b)")
    parser.add_argument("--sequences", type=positive, default=128, help="sequences to calibrate on (128)")
    parser.add_argument("--length", type=positive, default=2048, help="tokens in each (2048)")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 2, 4], help="batch sizes to try (1 2 4)")
    parser.add_argument("--memory", default="24GB", help="memory limit of the second pass (24GB)")
    parser.add_argument("--quick", action="store_true", help="only the passes, no jobs")


def _quality(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--model", default="smollm2", help=f"{MODELS} (smollm2)")
    parser.add_argument("--text", required=True, help=TEXTS)
    parser.add_argument("--context", type=positive, default=1024, help="tokens in a window (1024)")
    parser.add_argument("--windows", type=positive, help="windows in all (as many as the text has)")
    parser.add_argument("--batch", type=positive, default=8, help="windows at a time (8)")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.6], help="(0.5 0.6)")
    parser.add_argument("--patterns", nargs="*", default=["2:4"], help="(2:4)")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="(all)")


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
    "demo": _demo,
}
# Options that take names from a table of a benchmark's own: its module and the table.
CHOICES = {
    "train": (("methods", "train", "METHODS"), ("modes", "train", "MODES")),
    "pace": (("methods", "train", "METHODS"), ("modes", "train", "MODES")),
    "probe": (("shape", "probe", "SHAPES"),),
    "quality": (("methods", "quality", "METHODS"),),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True, title="benchmarks")
    for name, summary in NAMES.items():
        one = names.add_parser(name, help=summary, description=f"Measure {summary}.")
        OPTIONS[name](one)
        add_out(one, "folder of the record (benchmarks/results)", metavar="FOLDER")


def run(options: argparse.Namespace) -> int:
    import_torch()
    from secateur.lab.record import results_folder

    check_folder(options.out or results_folder(), PAGE, replaced=False)  # measure only what can be recorded
    if hasattr(options, "device"):
        options.device = pick_device(options.device)
        if options.device.type not in ("cpu", "cuda"):
            raise SecateurError(f"Benchmarks run on cpu and cuda devices, not on {options.device}.")
    module = _module(options.name)
    for option, home, table in CHOICES.get(options.name, ()):
        _check_names(options, option, getattr(_module(home), table))
    return int(module.run(options))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"secateur.bench.{name}")


def _check_names(options: argparse.Namespace, option: str, known: dict[str, object] | tuple[str, ...]) -> None:
    """Refuse a name that is not in the table; where none was given, take all of them."""
    given = getattr(options, option)
    for name in [given] if isinstance(given, str) else given or ():
        if name not in known:
            raise SecateurError(f"--{option} {name} is not known.{nearest(name, known)} Known: {', '.join(known)}.")
    if given is None:
        setattr(options, option, list(known))
