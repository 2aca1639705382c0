"""Training GPT-2 (124 M, bf16 autocast, 1024 tokens): what pruning costs, eager and compiled, beside dense training.

Every cell is a process of its own with the same weights, tokens and batch; they share only the folder of compiled code,
so that all run the same kernels. A cell warms up over two mask updates, then times all steps together,
with one wait for the device at the end, none in between. Peak memory is that of those steps, recompiles are counted
over them, and a shorter pass afterwards waits around the optimizer and the pruner to find their shares of the time.
Dense cells come first and last, and ratios are to their mean. None is printed for a cell whose loss was not finite or
whose sparsity was not exactly what was asked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from secateur.bench.cell import DENSE, METHODS, MODES, OWN, Plan, load_gpt2, measure
from secateur.bench.measuring import add_device, device_of, positive, times
from secateur.errors import SecateurError
from secateur.lab import record
from secateur.report import text_table

DEFAULTS = {"full": {"batch": 16, "steps": 200, "every": 50}, "tiny": {"batch": 2, "steps": 6, "every": 3}}

LABELS = {OWN: "bitter7, secateur.optim.AdamW"}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    parser.add_argument("--repeats", type=positive, default=2, help="dense cells in each mode, to show the noise (2)")
    record.add_options(parser)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """What is trained and how: also for `secateur bench pace`."""
    add_device(parser)
    parser.add_argument("--batch", type=positive, help="sequences in a step (16)")
    parser.add_argument("--steps", type=positive, help="timed steps (200)")
    parser.add_argument("--every", type=positive, help="steps between mask updates (50)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(both)")
    parser.add_argument(
        "--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="besides dense (all)"
    )
    parser.add_argument("--tiny", action="store_true", help="two layers of width 64 and a few steps: does it run?")


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that was asked for, once it is known that it can be carried out."""
    device = device_of(options)
    chosen = {
        name: getattr(options, name) or value for name, value in DEFAULTS["tiny" if options.tiny else "full"].items()
    }
    plan = Plan(device=device.type, tiny=options.tiny, **chosen)
    if plan.device == "cpu" and not plan.tiny:
        print("secateur: 124 M weights on a CPU take hours; --tiny takes a minute", file=sys.stderr)
    if plan.steps % plan.every:
        raise SecateurError(
            f"--steps {plan.steps} must be a multiple of --every {plan.every}: whole periods are timed."
        )
    load_gpt2()  # says what is lacking before anything starts
    return plan


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    plan = plan_of(options)
    others = [method for method in options.methods if method != DENSE]
    order = [DENSE, *others, *[DENSE] * (options.repeats - 1)]
    with tempfile.TemporaryDirectory() as folder:
        cells = [_apart(plan, mode, method, Path(folder)) for mode in options.modes for method in order]
    data = {"seed": 0, "plan": asdict(plan), "tokens": plan.tokens, "cells": cells}
    print(text_table(*table(cells)), end="\n\n")
    theme = "train" if set(options.modes) == set(MODES) else f"train-{options.modes[0]}"
    print(record.save(theme, data, options, device_of(options)))
    return 0


def _apart(plan: Plan, mode: str, method: str, folder: Path) -> dict[str, Any]:
    """A cell measured in a fresh process: nothing another left on the device or in Dynamo's cache is there."""
    print(f"secateur: {mode}, {method} ...", file=sys.stderr)
    told = json.dumps({"plan": asdict(plan), "mode": mode, "method": method, "out": str(folder / "cell.json")})
    shared = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    path = os.pathsep.join([str(record.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **shared, "PYTHONPATH": path}
    command = [sys.executable, "-m", "secateur.bench.train", "--cell", told]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SecateurError(f"The cell {mode}, {method} failed:\n{done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
    print(f"secateur:   {found['step_ms']:.2f} ms a step, {found['recompiles']} recompiles", file=sys.stderr)
    return found


def one_cell(told: str) -> None:
    """What the fresh process does."""
    wanted = json.loads(told)
    found = measure(Plan(**wanted["plan"]), wanted["mode"], wanted["method"])
    Path(wanted["out"]).write_text(json.dumps(found), encoding="utf-8")


def table(cells: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows; each mode is compared with its own dense cells."""
    columns = ("ms a step", "to dense", "tokens/s", "allocated MiB", "reserved MiB", "bytes/weight to dense")
    header = ("mode, method", *columns, "in pruner", "in optimizer", "recompiles", "pruned")
    rows = []
    for cell in cells:
        dense = [other for other in cells if (other["mode"], other["method"]) == (cell["mode"], DENSE)]
        right = all(c["finite"] and c["exact"] for c in (cell, *dense))
        mean = statistics.mean(c["step_ms"] for c in dense)
        rows.append(
            (
                f"{cell['mode']}, {LABELS.get(cell['method'], cell['method'])}",
                f"{cell['step_ms']:.2f}",
                times(cell["step_ms"] / mean, right, "not comparable", digits=3),
                f"{cell['tokens_per_second']:,.0f}",
                *(_mib(cell[key]) for key in ("peak_allocated", "peak_reserved")),
                _more_bytes(cell, dense),
                *(f"{cell['shares'][key]:.2%}" for key in ("pruner", "optimizer")),
                str(cell["recompiles"]),
                f"{cell['pruned']:,}",
            )
        )
    return header, rows


def _mib(number: int | None) -> str:
    return "-" if number is None else f"{number / 2**20:,.0f}"


def _more_bytes(cell: dict[str, Any], dense: Sequence[dict[str, Any]]) -> str:
    """Peak memory beyond dense training's, for each prunable weight."""
    if cell["peak_allocated"] is None or not cell["prunable"]:
        return "-"
    more = cell["peak_allocated"] - statistics.mean(c["peak_allocated"] for c in dense)
    return f"{more / cell['prunable']:+.3f}"


if __name__ == "__main__":
    if sys.argv[1:2] != ["--cell"] or len(sys.argv) != 3:
        sys.exit("Run `secateur bench train`; this starts one of its cells.")
    one_cell(sys.argv[2])
