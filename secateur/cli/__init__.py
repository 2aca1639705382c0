"""The command line: parse, call one function. Results go to stdout, progress to stderr."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from secateur.bench.demo import load_demo, training_steps
from secateur.cli import bench
from secateur.cli.jobs import add_probe, add_prune
from secateur.cli.train import add_train
from secateur.errors import SecateurError
from secateur.files import check_file, claimed
from secateur.lab.compare import add_compare
from secateur.lab.prepare import add_data
from secateur.lab.sweep import add_sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="secateur", description="Sparse PyTorch networks, exact to the weight.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small GPT dense and pruned, compare, write report.html")
    demo.add_argument("--out", type=Path, default=Path("report.html"), help="where the page goes (report.html)")
    demo.add_argument("--steps", type=training_steps, help="training steps of each run (450)")
    demo.set_defaults(run=_demo)
    add_prune(commands.add_parser("prune", help="prune a trained model, judge it on other text, save it"))
    add_probe(commands.add_parser("probe", help="prune only what the gradients agree to (GradProbe)"))
    add_train(commands.add_parser("train", help="train a network, pruned or dense, from a recipe"))
    add_sweep(commands.add_parser("sweep", help="train a grid of networks that differ in named settings alone"))
    add_data(commands.add_parser("data", help="turn text into a folder of tokens to train on"))
    add_compare(commands.add_parser("compare", help="tables and pictures of finished runs, with intervals over seeds"))
    measure = commands.add_parser("bench", help=bench.SUMMARY)
    bench.add_options(measure)
    measure.set_defaults(run=bench.run)
    options = parser.parse_args(arguments)
    options.invocation = shlex.join(["secateur", *arguments])
    try:
        code: int = options.run(options)
        return code
    except (SecateurError, OSError) as error:
        print(f"secateur: {' '.join(str(error).split())}", file=sys.stderr)  # one line, whatever a library wrote
        return 2
    except KeyboardInterrupt:
        print("secateur: interrupted", file=sys.stderr)
        return 130


def _demo(options: argparse.Namespace) -> int:
    demo = load_demo().demo
    check_file(options.out)
    with claimed(options.out):
        demo(options.out, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
