"""What a sampled threshold costs in truth: how far the count is off, and how far that drifts when pruning repeats.

    python -m benchmarks.sampling [--draws 5] [--updates 100]

Scores are |w| (v + 1e-8)^(1/4) of made-up weights and second moments. The drift repeats an update at a constant target
with a fresh sample each time, and nothing pruned returns, as in training: the sparsity creeps to the highest estimate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from benchmarks.record import save
from benchmarks.select import make
from secateur.registry import resolve
from secateur.report import text_table
from secateur.selection import sampled_cut

TARGETS = (0.001, 0.01, 0.1, 0.5, 0.9)
SIZES = {"61 thousand": (124, 4), "1 million": (512, 4), "12.6 million": (1024, 12)}


def scores_of(dim: int, layers: int) -> dict[str, Tensor]:
    """Scores of made-up layers, by name."""
    bitter7 = resolve("bitter7")
    return {str(n): bitter7(weight=w, exp_avg_sq=v) for n, (w, v) in enumerate(make(dim, layers))}


def share_below(scores: dict[str, Tensor], cut: float) -> float:
    """What pruning everything up to the cut removes."""
    total = sum(tensor.numel() for tensor in scores.values())
    return sum(int((tensor <= cut).sum()) for tensor in scores.values()) / total


def once(scores: dict[str, Tensor], target: float, draws: int) -> list[float]:
    """Achieved sparsities of single estimates."""
    return [share_below(scores, sampled_cut(scores, target, seed=seed)) for seed in range(draws)]


def drift(scores: dict[str, Tensor], target: float, updates: int) -> float:
    """Sparsity after many updates: a weight is gone once any cut was above its score."""
    return share_below(scores, max(sampled_cut(scores, target, seed=seed) for seed in range(updates)))


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--updates", type=int, default=100)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for size, (dim, layers) in SIZES.items():
        scores = scores_of(dim, layers)
        for target in TARGETS:
            achieved = once(scores, target, options.draws)
            final = drift(scores, target, options.updates)
            results.append({"weights": size, "target": target, "achieved": achieved, "after_updates": final})
    print(text_table(*table(results, options.updates)))
    print(save("sampling", {"updates": options.updates, "results": results}))


def table(results: list[dict[str, Any]], updates: int) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows."""
    header = ("weights", "asked", "one estimate, worst of the draws", f"after {updates} updates", "exact, always")
    rows = []
    for result in results:
        worst = max(result["achieved"], key=lambda value: abs(value - result["target"]))
        asked = f"{result['target']:.2%}"
        rows.append((result["weights"], asked, f"{worst:.3%}", f"{result['after_updates']:.3%}", asked))
    return header, rows


if __name__ == "__main__":
    main()
