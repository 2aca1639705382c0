"""How a budget is spread over layers. Every rule returns whole counts that add up to the budget exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from secateur.errors import PatternError
from secateur.selection.exact import Peers, ScoredTensor, keys_of, refuse_nan, values_of

ALLOCATIONS = ("uniform", "erk", "depth", "owl", "lamp")

DEPTH_SCALE = (0.7, 1.3)  # relative sparsity of the first and the last layer
DEPTH_CAP = 0.95

OWL_OUTLIER = 5.0  # times the mean score of its layer
OWL_SPREAD = 0.08  # by which a layer's sparsity may differ from the asked one

LAMP_SHIFT = 18  # key bits dropped: 32 bins an octave, 3 % wide
LAMP_BINS = 0x7F800000 >> LAMP_SHIFT


def allocate(
    name: str,
    pieces: Sequence[ScoredTensor],
    fans: Sequence[int],
    gone: Sequence[int],
    sparsity: float,
    peers: Peers,
) -> list[int]:
    """Weights to be gone from each piece, `round(sparsity * all)` together and never fewer than are gone already.

    `fans` are the sums of a weight's dimensions (times its number of matrices), which only "erk" reads.
    """
    sizes = [piece.total for piece in pieces]
    budget = max(round(sparsity * sum(sizes)), sum(gone))
    if name == "uniform":
        return spread(sizes, gone, sizes, budget)
    if name == "depth":
        return spread(*depth_shares(sizes, gone, sparsity), budget)
    if name == "erk":
        room = [size - dead for size, dead in zip(sizes, gone, strict=True)]
        kept = spread(fans, [0] * len(sizes), room, sum(sizes) - budget)
        return [size - keep for size, keep in zip(sizes, kept, strict=True)]
    if name == "owl":
        shares = owl([lamp_histogram(piece, peers) for piece in pieces], sparsity)
        return spread([share * size for share, size in zip(shares, sizes, strict=True)], gone, sizes, budget)
    if name == "lamp":
        extra = lamp([lamp_histogram(piece, peers) for piece in pieces], budget - sum(gone))
        return [dead + more for dead, more in zip(gone, extra, strict=True)]
    raise PatternError(f"No allocation {name!r}. Use one of {', '.join(map(repr, ALLOCATIONS))}, or None.")


def depth_shares(
    sizes: Sequence[int], gone: Sequence[int], sparsity: float
) -> tuple[list[float], list[int], list[int]]:
    """Shares, lower and upper bounds of the depth rule: sparsity grows with position, at most 0.95 of a layer."""
    first, last = DEPTH_SCALE
    steps = max(1, len(sizes) - 1)
    shares = [size * (first + (last - first) * place / steps) for place, size in enumerate(sizes)]
    cap = max(DEPTH_CAP, sparsity)  # above the cap no layer can make up for another
    upper = [max(dead, math.ceil(cap * size)) for size, dead in zip(sizes, gone, strict=True)]
    return shares, list(gone), upper


def spread(shares: Sequence[float], lower: Sequence[int], upper: Sequence[int], total: int) -> list[int]:
    """Integers in proportion to the shares, inside their bounds, that add up to `total` exactly.

    One factor is sought for all; those it drives past a bound stay at the bound. The rest of the rounding goes to the
    largest fractions, earlier entries first.
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


def lamp_histogram(piece: ScoredTensor, peers: Peers) -> Tensor:
    """Living scores of a piece by the leading bits of their keys, over all peers."""
    counts = torch.zeros(LAMP_BINS + 3, dtype=torch.int64, device="cpu")  # the last two count negatives and NaN
    piece = piece.unpacked()
    for chunk in piece.chunks() if piece.counted(peers) else ():
        scores = piece.score(chunk)
        keys = keys_of(scores if piece.alive is None else scores[piece.alive[chunk]])
        bins = torch.where(keys >= 0, (keys >> LAMP_SHIFT).clamp(max=LAMP_BINS), LAMP_BINS + 1)
        counts += torch.bincount(bins, minlength=LAMP_BINS + 3).cpu()
        counts[-1] += piece.spoiled(chunk, scores)
    counts = peers.sum(counts)
    refuse_nan([piece.name], [int(counts[-1])])
    if counts[-2]:
        raise PatternError(f"Allocation 'lamp' squares scores, so they must not be negative; {piece.name!r} has some.")
    return counts[:-2]


def owl(histograms: Sequence[Tensor], sparsity: float) -> list[float]:
    """Sparsities of layers, lower where more scores are outliers (Yin et al. 2023), each layer for itself."""
    outliers = []
    for histogram in histograms:
        values = values_of(torch.arange(len(histogram), device="cpu") << LAMP_SHIFT).double()
        count = histogram.double()
        mean = (values * count).sum() / count.sum().clamp(min=1)
        outliers.append(float(count[values > OWL_OUTLIER * mean].sum() / count.sum().clamp(min=1)))
    low, high = min(outliers), max(outliers)
    more = [2 * OWL_SPREAD * (share - low) / (high - low) if high > low else 0.0 for share in outliers]
    mean_more = sum(more) / len(more)
    return [min(max(sparsity - extra + mean_more, 0.0), 1.0) for extra in more]


def lamp(histograms: Sequence[Tensor], budget: int) -> list[int]:
    """How many of each layer a global threshold on LAMP scores removes (Lee et al. 2021).

    LAMP is x^2 over the sum of all x^2 at least as large in the layer. It rises with x inside a layer, so the binned
    counts are all it takes to know how many go; scores are rounded to 3 % for this, the budget is met exactly.
    """
    values, owners, counts = [], [], []
    for layer, histogram in enumerate(histograms):
        bins = histogram.nonzero().flatten()
        count = histogram[bins].double()
        squares = values_of(bins << LAMP_SHIFT).double().square()
        mass = squares * count
        # The weight in the middle of a bin has half of that bin above it.
        at_least = mass.flip(0).cumsum(0).flip(0) - mass + squares * (count + 1) / 2
        values.append(torch.where(squares > 0, squares / at_least, 0.0))
        owners.append(torch.full_like(bins, layer))
        counts.append(histogram[bins])
    order = torch.sort(torch.cat(values), stable=True).indices
    owner, count = torch.cat(owners)[order], torch.cat(counts)[order]
    taken = (budget - (count.cumsum(0) - count)).clamp(min=0).minimum(count)
    return torch.zeros(len(histograms), dtype=torch.int64, device="cpu").index_add_(0, owner, taken).tolist()
