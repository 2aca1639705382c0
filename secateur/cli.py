"""The command line: parse, call one function. Results go to stdout, progress to stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from secateur.errors import SecateurError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    parser = argparse.ArgumentParser(prog="secateur", description="Sparse PyTorch networks, exact to the weight.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small GPT dense and pruned, compare, write report.html")
    demo.add_argument("--out", type=Path, default=Path("report.html"), help="where the page goes (report.html)")
    demo.add_argument("--steps", type=_positive, help="training steps of each run (450)")
    options = parser.parse_args(arguments)
    try:
        return _demo(options)
    except SecateurError as error:
        print(f"secateur: {error}", file=sys.stderr)
        return 2


def _demo(options: argparse.Namespace) -> int:
    if not options.out.resolve().parent.is_dir():
        raise SecateurError(f"There is no folder {options.out.resolve().parent} to write {options.out.name} into.")
    try:
        from secateur.lab.demo import demo
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        raise SecateurError(f"The demo needs {package}: pip install 'secateur[demo]'.") from missing
    demo(options.out, options.steps)
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 20:
        raise argparse.ArgumentTypeError(f"a run needs at least 20 steps to ramp and recover, got {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
