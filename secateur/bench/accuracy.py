"""What a sampled threshold costs in truth: how far it and the count are off, and how that drifts when pruning repeats.

Scores are |w| (v + 1e-8)^(1/4) of made-up weights and second moments. A draw is one sample; its relative error is that
of the threshold against the exact one. The drift repeats an update at a constant target with a fresh sample each time,
and nothing pruned returns, as in training: the sparsity creeps to the highest estimate.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.bench.forms import make
from secateur.errors import SecateurError
from secateur.lab import record
from secateur.report import text_table
from secateur.scores import resolve
from secateur.selection.exact import sampled_cut

TARGETS = (0.001, 0.01, 0.1, 0.5, 0.9)
SIZES = {"61 thousand": (124, 4), "1 million": (512, 4), "12.6 million": (1024, 12)}
CPU = torch.device("cpu")  # sampled_cut draws there, so that a seed gives the same sample everywhere


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    sizes = {name: shape for name, shape in SIZES.items() if shape[0] ** 2 * shape[1] <= options.up_to}
    if not sizes:
        raise SecateurError(f"--up-to {options.up_to} leaves nothing: the smallest size is {124**2 * 4:,} weights.")
    results = []
    for size, (dim, layers) in sizes.items():
        scores = scores_of(dim, layers)
        for target in TARGETS:
            results.append({"weights": size, **measure(scores, target, options.draws, options.updates)})
    print(text_table(*table(results, options.updates)))
    data = {"seed": 0, "draws": options.draws, "updates": options.updates, "results": results}
    print(record.save("accuracy", data, options, CPU))
    return 0


def scores_of(dim: int, layers: int) -> dict[str, Tensor]:
    """Scores of made-up layers, by name."""
    bitter7 = resolve("bitter7")
    return {str(n): bitter7(weight=w, exp_avg_sq=v) for n, (w, v) in enumerate(make([(dim, dim)] * layers, CPU))}


def exact_cut(scores: dict[str, Tensor], target: float) -> float:
    """The score of the last weight that goes, from all scores."""
    flat = torch.cat([tensor.flatten() for tensor in scores.values()])
    return float(flat.kthvalue(max(1, round(target * flat.numel()))).values)


def share_below(scores: dict[str, Tensor], cut: float) -> float:
    """What pruning everything up to the cut removes."""
    total = sum(tensor.numel() for tensor in scores.values())
    return sum(int((tensor <= cut).sum()) for tensor in scores.values()) / total


def measure(scores: dict[str, Tensor], target: float, draws: int, updates: int) -> dict[str, Any]:
    """Single estimates, and where repeated ones end: a weight is gone once any cut was above its score."""
    cuts = [sampled_cut(scores, target, seed=seed) for seed in range(max(draws, updates))]
    exact = exact_cut(scores, target)
    return {
        "target": target,
        "exact_cut": exact,
        "cuts": cuts[:draws],
        "relative_errors": [abs(cut - exact) / exact for cut in cuts[:draws]],
        "achieved": [share_below(scores, cut) for cut in cuts[:draws]],
        "after_updates": share_below(scores, max(cuts[:updates])),
    }


def table(results: list[dict[str, Any]], updates: int) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows."""
    errors = ("threshold off by, mean", "at most")
    header = ("weights", "asked", *errors, "one estimate, worst", f"after {updates} updates", "exact, always")
    rows = []
    for result in results:
        worst = max(result["achieved"], key=lambda value: abs(value - result["target"]))
        mean, most = statistics.mean(result["relative_errors"]), max(result["relative_errors"])
        asked = f"{result['target']:.2%}"
        achieved = f"{worst:.3%}", f"{result['after_updates']:.3%}"
        rows.append((result["weights"], asked, f"{mean:.2%}", f"{most:.2%}", *achieved, asked))
    return header, rows
