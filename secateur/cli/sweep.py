"""Train every combination of some settings, in folders that `secateur compare` reads.

The grid is a TOML file: [base] has settings of `secateur train`, or recipe = "FILE"; [axes] has lists of values, such
as score = ["variance", "magnitude", "dense"] and seed = [0, 1, 2]. Several [[axes]] add up. A sweep that was
interrupted continues with the same command.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from secateur.cli.options import add_out, add_training_device, import_torch, positive, seconds, training_on_cpu
from secateur.errors import SecateurError
from secateur.files import check_file
from secateur.settings import parse

SUMMARY = "train a grid of runs that differ only in named settings"
EXAMPLE = "secateur sweep recipes/sweeps/lenet5-digits.toml --device cpu --out sweeps/digits"
ENGINES = ("local", "ray")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("grid", type=Path, help="a .toml file with tables [base] (settings) and [axes] (lists)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="a setting of all runs",
    )
    add_out(parser, "folder of the runs (sweeps/NAME)")
    add_training_device(parser)
    parser.add_argument("--dry-run", action="store_true", help="try every run in seconds, on random data, and count")
    parser.add_argument(
        "--max-time", type=seconds, metavar="SECONDS", help="stop after this; the same command continues"
    )
    parser.add_argument(
        "--workers", type=positive, default=1, metavar="N", help="runs at a time, each in a process of its own (1)"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write all numbers after each run; runs in it are not repeated",
    )
    parser.add_argument("--engine", choices=ENGINES, default="local", help="ray: on a Ray cluster (local)")
    parser.add_argument("--cpus", type=float, help="CPUs of each run, with --engine ray (1)")
    parser.add_argument("--gpus", type=float, help="GPUs of each run, with --engine ray (0)")
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
    _check(options)
    import_torch()
    import torch

    from secateur.lab import record
    from secateur.lab.sweep import Record, cells_of, dry_run_cells, run_cells

    axes, cells = cells_of(options.grid, parse(options.changes))
    share, shares = options.part or (1, 1)
    cells = cells[share - 1 :: shares]
    cpu = training_on_cpu(options.device)
    if options.dry_run:
        print(dry_run_cells(cells, cpu))
        return 0
    out, ray = options.out or Path("sweeps") / options.grid.stem, options.engine == "ray"
    kept = None
    if options.record is not None:
        check_file(options.record)
        device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
        kept = Record(options.record, out, axes, record.about("sweep", options, device))
    left = run_cells(
        cells, out, cpu=cpu, checkpoint_every=options.checkpoint_every, numbers_only=options.numbers_only,
        max_seconds=options.max_time, workers=options.workers, record=kept,
        resources=(1.0 if options.cpus is None else options.cpus, options.gpus or 0.0) if ray else None,
    )  # fmt: skip
    if left:
        print(f"The time is up: {left} of {len(cells)} runs are not finished; the same command continues.")
        return 0
    what = options.record or out
    print(f"secateur compare {what} --by {','.join(axes)}" if axes else f"secateur compare {what}")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse options that do not go together, before torch is imported."""
    ray = options.engine == "ray"
    if ray and options.device not in ("auto", "cpu"):
        raise SecateurError(f"--device {options.device} does not go with --engine ray: Ray places each run (--gpus).")
    if ray and options.workers > 1:
        raise SecateurError("--workers does not go with --engine ray, which runs as many at a time as fit (--cpus).")
    if not ray and (options.cpus is not None or options.gpus is not None):
        raise SecateurError("--cpus and --gpus go with --engine ray. Here, --workers N runs N at a time.")
