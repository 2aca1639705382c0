"""The plainest statement of what a selection is: a stable sort. Every fast path is compared with this."""

from __future__ import annotations

import torch
from torch import Tensor


def remove_lowest(scores: Tensor, count: int, alive: Tensor) -> Tensor:
    """A flat mask without the dead and without the `count` lowest of the living; the first of equals goes first."""
    order = torch.argsort(scores.float() + 0.0, stable=True)
    order = order[alive[order]]
    mask = alive.clone()
    mask[order[: max(0, count)]] = False
    return mask


def select_model(scores: dict[str, Tensor], sparsity: float, alive: dict[str, Tensor]) -> dict[str, Tensor]:
    flat = torch.cat([t.float().flatten() for t in scores.values()])
    living = torch.cat([alive[name].flatten() for name in scores])
    count = round(sparsity * flat.numel()) - int((~living).sum())
    parts = remove_lowest(flat, count, living).split([t.numel() for t in scores.values()])
    return {name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


def select_groups(scores: Tensor, count: int, alive: Tensor) -> Tensor:
    """The same for every row of a matrix by itself; `count` includes the dead."""
    rows = [remove_lowest(s, count - int((~a).sum()), a) for s, a in zip(scores, alive, strict=True)]
    return torch.stack(rows) if rows else torch.ones_like(alive)
