"""Reconstruction: surviving weights changed so that a layer's outputs stay what they were, given X^T X of its inputs.

Pure functions on matrices `[outputs, inputs]`. `sweep` goes over the columns once and makes up for each weight that is
dropped in those to its right (optimal brain surgeon in the form of SparseGPT, Frantar and Alistarh 2023). `solve` finds
the best surviving weights for a mask, by conjugate gradients over all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from secateur.errors import FactError
from secateur.selection.pieces import DEAD_KEY, keys_of, without_lowest

COLUMNS = 128  # that a sweep finishes before it brings all to their right up to date
DAMPING = 0.01  # of the mean of the diagonal, added to it
ATTEMPTS = 6  # each with ten times the damping of the one before

# Columns, the diagonal of the factor there, which of their weights are alive (None: all), and which columns have
# inputs that are always zero, to a mask.
Choice = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


def damped(product: Tensor, damping: float = DAMPING) -> Tensor:
    """X^T X with a share of its mean diagonal added to the diagonal. An input that was always zero gets the mean, so
    that its weights do not move, and counts for no mean."""
    diagonal = product.diagonal()
    silent = diagonal == 0
    mean = (diagonal.sum() / (~silent).sum().clamp(min=1)).clamp(min=1e-30)
    return product + torch.diag(torch.where(silent, mean, damping * mean))


def inverse_factor(product: Tensor, damping: float = DAMPING) -> tuple[Tensor, float]:
    """The upper factor U of the inverse, U^T U, and the damping it took to make the matrix positive definite."""
    for _ in range(ATTEMPTS):
        lower, failed = torch.linalg.cholesky_ex(damped(product, damping))
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(factor.isfinite().all()):
                return factor, damping
        damping *= 10
    raise FactError(
        "X^T X of a layer's inputs is not positive definite even when damped by ten times its mean: look for infinities"
        " or NaN among the activations."
    )


def sweep(
    weight: Tensor,
    factor: Tensor,
    choose: Choice,
    span: int = COLUMNS,
    alive: Tensor | None = None,
    silent: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weight with some dropped and the others to their right made up for it; and the mask, which is chosen for
    every `span` columns (a divisor of `COLUMNS`) once those to their left are done. What is not `alive` stays gone.
    `silent` columns have inputs that are always zero: nothing is lost with their weights."""
    weight, width = weight.clone(), weight.shape[1]
    silent = torch.zeros(width, dtype=torch.bool, device=weight.device) if silent is None else silent
    kept = torch.ones_like(weight, dtype=torch.bool)
    for begin in range(0, width, COLUMNS):
        end = min(begin + COLUMNS, width)
        part, mine = weight[:, begin:end], factor[begin:end, begin:end]
        errors = torch.zeros_like(part)
        for column in range(end - begin):
            if column % span == 0:
                chosen = slice(column, column + span)
                living = None if alive is None else alive[:, begin:end][:, chosen]
                idle = silent[begin:end][chosen]
                kept[:, begin:end][:, chosen] = choose(part[:, chosen], mine.diagonal()[chosen], living, idle)
            dropped = part[:, column].masked_fill(kept[:, begin + column], 0)
            errors[:, column] = dropped / mine[column, column]
            part[:, column:] -= errors[:, column, None] * mine[column, None, column:]
        weight[:, end:] -= errors @ factor[begin:end, end:]
    return weight.masked_fill_(~kept, 0), kept


def cheapest(sparsity: float, total: int) -> Choice:
    """A choice that drops this share of `total` weights exactly, those whose loss costs least. Weights that cost
    nothing go at once, up to the whole share; then fewer go later."""
    seen = gone = 0

    def choose(part: Tensor, diagonal: Tensor, alive: Tensor | None, silent: Tensor) -> Tensor:
        nonlocal seen, gone
        seen += part.numel()
        free = silent.expand_as(part) if alive is None else silent | ~alive
        count = max(0, round(sparsity * seen) - gone, min(int(free.sum()), round(sparsity * total) - gone))
        mask = without_lowest(_costs(part, diagonal, alive, silent).view(1, -1), count).view_as(part)
        gone += count if alive is None else part.numel() - int(mask.sum())
        return mask

    return choose


def groups_of(kept: int, of: int) -> Choice:
    """A choice that keeps the `kept` dearest of every `of` neighbours (a span of so many columns)."""

    def choose(part: Tensor, diagonal: Tensor, alive: Tensor | None, silent: Tensor) -> Tensor:
        return without_lowest(_costs(part, diagonal, alive, silent).view(-1, of), of - kept).view_as(part)

    return choose


def _costs(part: Tensor, diagonal: Tensor, alive: Tensor | None, silent: Tensor) -> Tensor:
    """What it costs to lose each weight, as keys. Weights that are gone already come first, then those of silent
    inputs, smallest first."""
    costs = torch.where(silent, -1 / (1 + part.abs()), (part / diagonal).square())
    keys = keys_of(costs.contiguous())
    return keys if alive is None else keys.masked_fill_(~alive, DEAD_KEY)


def solve(aim: Tensor, start: Tensor, mask: Tensor, product: Tensor, steps: int) -> Tensor:
    """Weights inside the mask that minimise |W' X - Y|^2, where `aim` is Y X^T and `product` is X X^T.

    Conjugate gradients with a diagonal preconditioner, every row for itself, all rows at once: `steps` products of the
    size of the weight with `product`, no inverse. `start` is where it begins.
    """
    scale = product.diagonal().reciprocal()
    found = start * mask
    residual = (aim - found @ product) * mask
    direction = residual * scale
    power = (residual * direction).sum(1, keepdim=True)
    for _ in range(steps):
        moved = (direction @ product) * mask
        step = power / (direction * moved).sum(1, keepdim=True).clamp(min=1e-30)
        found += step * direction
        residual -= step * moved
        turned = residual * scale
        before, power = power, (residual * turned).sum(1, keepdim=True)
        direction = turned + (power / before.clamp(min=1e-30)) * direction
    return found
