"""Measure the error of a sampled threshold, and how it drifts when pruning repeats.

Scores are of made-up weights and second moments. Each draw is one sample; its relative error is that of the sampled
threshold against the exact one. The drift repeats an update at a constant target with a new sample each time. Pruned
weights do not return, as in training, so the sparsity rises to the highest estimate.

Example: secateur bench accuracy --up-to 100000 --draws 5 --updates 20
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.bench.select import Case, check_score, make
from secateur.errors import SecateurError
from secateur.lab import record
from secateur.report import text_table
from secateur.scores import Score
from secateur.selection.exact import sampled_cut

SIZES = {"61 thousand": (124, 4), "1 million": (512, 4), "12.6 million": (1024, 12)}


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device: torch.device = options.device
    sizes = {name: shape for name, shape in SIZES.items() if shape[0] ** 2 * shape[1] <= options.up_to}
    if not sizes:
        raise SecateurError(f"--up-to {options.up_to} leaves nothing: the smallest size is {124**2 * 4:,} weights.")
    results = []
    for score in [check_score(name) for name in options.scores]:
        for size, (dim, layers) in sizes.items():
            scores = scores_of(dim, layers, score, device, options.seed)
            for target in options.sparsity:
                measured = measure(scores, target, options.draws, options.updates)
                results.append({"score": str(score), "weights": size, **measured})
    print(text_table(*table(results, options.updates)))
    data = {
        "seed": options.seed, "scores": options.scores, "draws": options.draws, "updates": options.updates,
        "results": results,
    }  # fmt: skip
    print(record.save("accuracy", data, options, device))
    return 0


def scores_of(dim: int, layers: int, score: Score, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Scores of made-up layers, by name."""
    case = Case(make([(dim, dim)] * layers, device, seed=seed), score)
    return {str(number): score(**case.facts(w, v)) for number, (w, v) in enumerate(case.layers)}


def exact_cut(scores: dict[str, Tensor], target: float) -> float:
    """The score of the last weight that is pruned, from all scores."""
    flat = torch.cat([tensor.flatten() for tensor in scores.values()])
    return float(flat.kthvalue(max(1, round(target * flat.numel()))).values)


def share_below(scores: dict[str, Tensor], cut: float) -> float:
    """The sparsity when every score up to the cut is pruned."""
    total = sum(tensor.numel() for tensor in scores.values())
    return sum(int((tensor <= cut).sum()) for tensor in scores.values()) / total


def measure(scores: dict[str, Tensor], target: float, draws: int, updates: int) -> dict[str, Any]:
    """Single estimates, and the sparsity after many: a weight is pruned once any cut was above its score."""
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
    """Header and rows. The score is named only where there are several."""
    errors = ("threshold error, mean", "largest")
    header = ("weights", "asked", *errors, "one estimate, worst", f"after {updates} updates", "exact, always")
    several = len({result.get("score") for result in results}) > 1
    rows = []
    for result in results:
        worst = max(result["achieved"], key=lambda value: abs(value - result["target"]))
        mean, most = statistics.mean(result["relative_errors"]), max(result["relative_errors"])
        asked = f"{result['target']:.2%}"
        achieved = f"{worst:.3%}", f"{result['after_updates']:.3%}"
        weights = f"{result['weights']}, {result['score']}" if several else result["weights"]
        rows.append((weights, asked, f"{mean:.2%}", f"{most:.2%}", *achieved, asked))
    return header, rows
