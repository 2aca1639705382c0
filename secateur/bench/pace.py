"""The pace of training GPT-2, dense and pruned, side by side: a price of a hundredth.

All methods of a mode train in one process, in turn: a period of steps with its mask update of one, then of the next.
So what differs between processes and machines, which may be more than the price of pruning, is the same for all. The
ratio of a period is to the dense period of the same round. `secateur bench train` measures memory and recompiles.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from secateur.bench.measuring import device_of, times
from secateur.bench.train import DENSE, LABELS, Plan, Training, plan_of, pruned_as_asked
from secateur.lab import record
from secateur.report import text_table


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    plan = plan_of(options)
    methods = [DENSE, *(method for method in options.methods if method != DENSE)]
    rows = [row for mode in dict.fromkeys(options.modes) for row in side_by_side(plan, mode, methods)]
    print(text_table(*table(rows)), end="\n\n")
    data = {"seed": 0, "plan": asdict(plan), "tokens": plan.tokens, "rows": rows}
    print(record.save("pace", data, options, device_of(options)))
    return 0


def side_by_side(plan: Plan, mode: str, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Milliseconds a step of every method, period by period; two periods before do not count, nor one after, by which
    the masks must be what was asked for."""
    _forget()
    trainings = {method: Training(plan, mode, method) for method in methods}
    for training in trainings.values():
        training.run(2 * plan.every)
    found: dict[str, list[float]] = {method: [] for method in methods}
    for turn in range(plan.steps // plan.every):
        for place in range(len(methods)):
            method = methods[(turn + place) % len(methods)]  # each comes first in its turn
            found[method].append(round(trainings[method].seconds(plan.every) / plan.every * 1e3, 4))
    for training in trainings.values():
        training.run(plan.every)
    return [
        {
            "mode": mode,
            "method": method,
            "step_ms": found[method],
            "finite": bool(torch.stack(training.losses).isfinite().all()),
            **pruned_as_asked(training.pruner),
        }
        for method, training in trainings.items()
    ]


def _forget() -> None:
    """Graphs and memory of the mode before."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(rows: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows; each mode is compared with its own dense training, round by round."""
    header = ("mode, method", "ms a step", "to dense", "least", "most", "rounds", "pruned")
    lines = []
    for row in rows:
        (dense,) = [other for other in rows if (other["mode"], other["method"]) == (row["mode"], DENSE)]
        right = all(one["finite"] and one["exact"] for one in (row, dense))
        ratios = [ours / theirs for ours, theirs in zip(row["step_ms"], dense["step_ms"], strict=True)]
        told = statistics.median(ratios), min(ratios), max(ratios)
        lines.append(
            (
                f"{row['mode']}, {LABELS.get(row['method'], row['method'])}",
                f"{statistics.median(row['step_ms']):.2f}",
                *(times(ratio, right, "not comparable", digits=3) for ratio in told),
                str(len(ratios)),
                f"{row['pruned']:,}",
            )
        )
    return header, lines
