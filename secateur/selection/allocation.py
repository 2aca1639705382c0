"""Allocation: how many weights each layer loses when the budget for the whole model is given.

Each rule is one function from `Layers` to whole counts, one for each layer, that add up to the budget exactly. A new
rule is that function and one entry in `ALLOCATIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from secateur.errors import PatternError
from secateur.selection.exact import Peers, ScoredTensor, keys_of, refuse_nan, values_of

DEPTH_SCALE = (0.7, 1.3)  # relative sparsity of the first and the last layer
DEPTH_CAP = 0.95

OWL_OUTLIER = 5.0  # times the mean score of its layer
OWL_SPREAD = 0.08  # largest difference between a layer's sparsity and the asked one

BIN_SHIFT = 18  # key bits dropped by a histogram: 32 bins an octave, 3 % wide
BINS = 0x7F800000 >> BIN_SHIFT


@dataclass(frozen=True)
class Layers:
    """What a rule may read. `fans` are sums of a weight's dimensions, times its number of matrices; `gone` counts the
    weights of each layer that are pruned already, over all peers."""

    tensors: Sequence[ScoredTensor]
    fans: Sequence[int]
    gone: Sequence[int]
    sparsity: float
    peers: Peers

    @cached_property
    def sizes(self) -> list[int]:
        return [tensor.total for tensor in self.tensors]

    @cached_property
    def budget(self) -> int:
        """Weights to be gone in all: `round(sparsity * all)`, and never fewer than are gone already."""
        return max(round(self.sparsity * sum(self.sizes)), sum(self.gone))

    def histograms(self) -> list[Tensor]:
        return [histogram(tensor, self.peers) for tensor in self.tensors]


Rule = Callable[[Layers], list[int]]


def uniform(layers: Layers) -> list[int]:
    """The same sparsity for every layer."""
    return spread(layers.sizes, layers.gone, layers.sizes, layers.budget)


def erk(layers: Layers) -> list[int]:
    """Layers keep weights in proportion to the sum of their dimensions (Evci et al. 2020)."""
    room = [size - dead for size, dead in zip(layers.sizes, layers.gone, strict=True)]
    kept = spread(layers.fans, [0] * len(room), room, sum(layers.sizes) - layers.budget)
    return [size - keep for size, keep in zip(layers.sizes, kept, strict=True)]


def depth(layers: Layers) -> list[int]:
    """Sparsity grows linearly with a layer's position, to at most 0.95 of a layer (AdamWPrune)."""
    first, last = DEPTH_SCALE
    steps = max(1, len(layers.sizes) - 1)
    shares = [size * (first + (last - first) * place / steps) for place, size in enumerate(layers.sizes)]
    cap = max(DEPTH_CAP, layers.sparsity)  # above the cap no layer can make up for another
    upper = [max(dead, math.ceil(cap * size)) for size, dead in zip(layers.sizes, layers.gone, strict=True)]
    return spread(shares, layers.gone, upper, layers.budget)


def owl(layers: Layers) -> list[int]:
    """Lower sparsity where more scores are outliers (Yin et al. 2023), here layer by layer instead of by block."""
    shares = owl_shares(layers.histograms(), layers.sparsity)
    wanted = [share * size for share, size in zip(shares, layers.sizes, strict=True)]
    return spread(wanted, layers.gone, layers.sizes, layers.budget)


def lamp(layers: Layers) -> list[int]:
    """One global threshold on LAMP scores (Lee et al. 2021)."""
    more = lamp_counts(layers.histograms(), layers.budget - sum(layers.gone))
    return [dead + extra for dead, extra in zip(layers.gone, more, strict=True)]


ALLOCATIONS: dict[str, Rule] = {rule.__name__: rule for rule in (uniform, erk, depth, owl, lamp)}


def rule_named(name: str) -> Rule:
    """The rule of this name, or an error that lists them."""
    if not isinstance(name, str) or name not in ALLOCATIONS:
        raise PatternError(f"No allocation {name!r}. Use one of {', '.join(map(repr, ALLOCATIONS))}, or None.")
    return ALLOCATIONS[name]


def spread(shares: Sequence[float], lower: Sequence[int], upper: Sequence[int], total: int) -> list[int]:
    """Integers in proportion to the shares, inside their bounds, that add up to `total` exactly.

    Bisects for the one factor on all shares at which the clamped values add up. What rounding down leaves over goes to
    the largest fractions, earlier entries first.
    """
    assert sum(lower) <= total <= sum(upper)

    def at(factor: float) -> list[float]:
        return [min(max(factor * s, low), high) for s, low, high in zip(shares, lower, upper, strict=True)]

    below, above = 0.0, 1.0
    while sum(at(above)) < total:
        above *= 2
    for _ in range(100):
        middle = (below + above) / 2
        below, above = (below, middle) if sum(at(middle)) >= total else (middle, above)
    exact = at(above)
    counts = [math.floor(value) for value in exact]
    by_fraction = sorted(range(len(counts)), key=lambda i: (counts[i] - exact[i], i))
    while (rest := total - sum(counts)) != 0:
        unit = 1 if rest > 0 else -1
        movable = [i for i in by_fraction if lower[i] <= counts[i] + unit <= upper[i]]
        for i in movable[: abs(rest)]:
            counts[i] += unit
    return counts


def histogram(tensor: ScoredTensor, peers: Peers) -> Tensor:
    """Scores of the living weights counted by the leading bits of their keys, over all peers."""
    counts = torch.zeros(BINS + 3, dtype=torch.int64, device="cpu")  # the last two count negatives and NaN
    tensor = tensor.unpacked()
    for chunk in tensor.chunks() if tensor.counted(peers) else ():
        scores = tensor.score(chunk)
        keys = keys_of(scores if tensor.alive is None else scores[tensor.alive[chunk]])
        bins = torch.where(keys >= 0, (keys >> BIN_SHIFT).clamp(max=BINS), BINS + 1)
        counts += torch.bincount(bins, minlength=BINS + 3).cpu()
        counts[-1] += tensor.spoiled(chunk, scores)
    counts = peers.sum(counts)
    refuse_nan([tensor.name], [int(counts[-1])])
    if counts[-2]:
        raise PatternError(
            f"Allocations 'lamp' and 'owl' read scores as magnitudes, so they must not be negative; {tensor.name!r} has"
            " negative ones. Choose another score or allocation."
        )
    return counts[:-2]


def owl_shares(histograms: Sequence[Tensor], sparsity: float) -> list[float]:
    """Sparsity of each layer: lower the larger its share of scores above five times its mean."""
    outliers = []
    for counts in histograms:
        values = values_of(torch.arange(len(counts), device="cpu") << BIN_SHIFT).double()
        count = counts.double()
        mean = (values * count).sum() / count.sum().clamp(min=1)
        outliers.append(float(count[values > OWL_OUTLIER * mean].sum() / count.sum().clamp(min=1)))
    low, high = min(outliers), max(outliers)
    more = [2 * OWL_SPREAD * (share - low) / (high - low) if high > low else 0.0 for share in outliers]
    mean_more = sum(more) / len(more)
    return [min(max(sparsity - extra + mean_more, 0.0), 1.0) for extra in more]


def lamp_counts(histograms: Sequence[Tensor], budget: int) -> list[int]:
    """How many weights of each layer a global threshold on LAMP scores removes.

    LAMP divides x^2 by the sum of all x^2 at least as large in the layer. It rises with x inside a layer, so counts by
    bin are enough. Scores are rounded to 3 % for this; the budget is met exactly.
    """
    values, owners, counts = [], [], []
    for layer, binned in enumerate(histograms):
        bins = binned.nonzero().flatten()
        count = binned[bins].double()
        squares = values_of(bins << BIN_SHIFT).double().square()
        mass = squares * count
        # The weight in the middle of a bin has half of that bin above it.
        at_least = mass.flip(0).cumsum(0).flip(0) - mass + squares * (count + 1) / 2
        values.append(torch.where(squares > 0, squares / at_least, 0.0))
        owners.append(torch.full_like(bins, layer))
        counts.append(binned[bins])
    order = torch.sort(torch.cat(values), stable=True).indices
    owner, count = torch.cat(owners)[order], torch.cat(counts)[order]
    taken = (budget - (count.cumsum(0) - count)).clamp(min=0).minimum(count)
    return torch.zeros(len(histograms), dtype=torch.int64, device="cpu").index_add_(0, owner, taken).tolist()
