"""Train every combination of some settings, in folders that `secateur compare` reads.

The grid is a TOML file: [base] has settings of `secateur train`, or recipe = "FILE"; [axes] has lists of values, such
as score = ["variance", "magnitude", "dense"] and seed = [0, 1, 2]. A sweep that was interrupted continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from secateur.cli.options import add_out, add_training_device, import_torch, positive, training_on_cpu
from secateur.errors import SecateurError

SUMMARY = "train a grid of runs that differ only in named settings"
EXAMPLE = "secateur sweep recipes/sweeps/lenet5-digits.toml --device cpu --out sweeps/digits"
ENGINES = ("local", "ray")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("grid", type=Path, help="a .toml file with tables [base] (settings) and [axes] (lists)")
    add_out(parser, "folder of the runs (sweeps/NAME)")
    add_training_device(parser)
    parser.add_argument("--engine", choices=ENGINES, default="local", help="local: one after another (local)")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of each run, with --engine ray (1)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each run, with --engine ray (0)")
    parser.add_argument("--part", type=part, metavar="K/N", help="only the K-th of N equal shares of the runs")
    parser.add_argument(
        "--checkpoint-every", type=positive, default=500, metavar="STEPS", help="steps between checkpoints (500)"
    )
    parser.add_argument("--numbers-only", action="store_true", help="delete the weights of finished runs")


def part(text: str) -> tuple[int, int]:
    """ "2/3" as numbers, for `--part`."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"a share such as 2/3, the second of three, not {text!r}")
    return int(number), int(count)


def run(options: argparse.Namespace) -> int:
    import_torch()
    from secateur.lab.sweep import cells_of, run_cells

    if options.engine == "ray" and options.device not in ("auto", "cpu"):
        raise SecateurError(f"--device {options.device} does not go with --engine ray: Ray places each run (--gpus).")
    axes, cells = cells_of(options.grid)
    share, shares = options.part or (1, 1)
    cells = cells[share - 1 :: shares]
    out = options.out or Path("sweeps") / options.grid.stem
    run_cells(
        cells, out, cpu=training_on_cpu(options.device), checkpoint_every=options.checkpoint_every,
        numbers_only=options.numbers_only, resources=(options.cpus, options.gpus) if options.engine == "ray" else None,
    )  # fmt: skip
    print(f"secateur compare {out} --by {','.join(axes)}" if axes else f"secateur compare {out}")
    return 0
