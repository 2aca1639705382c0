"""Measure the time overhead of pruning in GPT-2 training: all methods take turns in one process.

Every method trains for a period of steps with one mask update, then the next method does. Differences between
processes and machines, which can exceed the overhead of pruning, are thus the same for all. The ratio of a period is to
the dense period of the same round. The bar: a median of at most 1.01 times dense training. `secateur bench train`
measures memory and recompiles.

Example: secateur bench pace --tiny --device cpu --modes eager --scores variance
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from secateur.bench.measuring import ratio
from secateur.bench.train import BAR, DENSE, Plan, Training, bar, label, methods_of, plan_of, pruned_as_asked
from secateur.lab import record
from secateur.report import text_table


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    plan = plan_of(options)
    methods = [DENSE, *methods_of(options.scores, options.optimizers)]
    rows = [row for mode in dict.fromkeys(options.modes) for row in side_by_side(plan, mode, methods)]
    print(text_table(*table(rows)), end="\n\n")
    data = {"seed": plan.seed, "plan": asdict(plan), "tokens": plan.tokens, "rows": rows}
    print(record.save("pace", data, options, options.device))
    return 0


def side_by_side(plan: Plan, mode: str, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Milliseconds per step of every method, period by period. Two untimed periods come before; one comes after, at the
    end of which the masks must have the sparsity asked for."""
    _reset()
    trainings = {method: Training(plan, mode, method) for method in methods}
    for training in trainings.values():
        training.run(2 * plan.every)
    found: dict[str, list[float]] = {method: [] for method in methods}
    for turn in range(plan.steps // plan.every):
        for place in range(len(methods)):
            method = methods[(turn + place) % len(methods)]  # rotate, so that each comes first once
            found[method].append(round(trainings[method].seconds(plan.every) / plan.every * 1e3, 4))
    for training in trainings.values():
        training.run(plan.every)
    return [
        {
            "mode": mode,
            "method": method,
            "step_ms": found[method],
            "finite": bool(torch.stack(training.losses).isfinite().all()),
            **pruned_as_asked(training.pruner, plan.sparsity),
        }
        for method, training in trainings.items()
    ]


def _reset() -> None:
    """Drop the compiled graphs and cached memory of the mode before."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(rows: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows; each mode is compared with its own dense training, round by round."""
    header = ("mode, method", "ms per step", "to dense", "lowest", "highest", f"bar {BAR}x", "rounds", "pruned")
    lines = []
    for row in rows:
        (dense,) = [other for other in rows if (other["mode"], other["method"]) == (row["mode"], DENSE)]
        right = all(one["finite"] and one["exact"] for one in (row, dense))
        ratios = [ours / theirs for ours, theirs in zip(row["step_ms"], dense["step_ms"], strict=True)]
        median = statistics.median(ratios)
        lines.append(
            (
                label(row["mode"], row["method"]),
                f"{statistics.median(row['step_ms']):.2f}",
                *(ratio(one, right, "not comparable", digits=3) for one in (median, min(ratios), max(ratios))),
                bar(row, median, right),
                str(len(ratios)),
                f"{row['pruned']:,}",
            )
        )
    return header, lines
