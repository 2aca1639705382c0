"""The approximate threshold of AdamWPrune, kept for comparison and for who wants it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def sampled_cut(
    scores: Mapping[str, Tensor],
    sparsity: float,
    *,
    fraction: float | None = None,
    per_tensor: bool = False,
    seed: int = 0,
) -> float:
    """The approximate threshold AdamWPrune used, for comparison: the k-th value of a sample drawn with replacement.

    `per_tensor` draws the same fraction (1 %) of each tensor, otherwise 2 % of all together. Prune `score <= cut`.
    The count it prunes is off by what the sample happened to hold; docs/why-exact.md has figures.
    """
    flat = [tensor.flatten() for tensor in scores.values()]
    total = sum(tensor.numel() for tensor in flat)
    share = fraction if fraction is not None else 0.01 if per_tensor else 0.02
    generator = torch.Generator().manual_seed(seed)

    def draw(limit: int) -> Tensor:
        return torch.randint(0, limit, (max(1, int(limit * share)),), generator=generator)

    if per_tensor:
        drawn = torch.cat([tensor[draw(tensor.numel()).to(tensor.device)] for tensor in flat])
    else:
        where, parts = draw(total), []
        for tensor in flat:
            mine = where[(where >= 0) & (where < tensor.numel())]
            parts.append(tensor[mine.to(tensor.device)])
            where = where - tensor.numel()
        drawn = torch.cat(parts)
    rank = max(1, int(int(sparsity * total) * drawn.numel() / total))
    return float(drawn.float().kthvalue(rank).values)
