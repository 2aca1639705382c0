"""Repair of surviving weights: against least squares, and against doing nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from secateur.errors import FactError
from secateur.reconstruction import (
    COLUMNS,
    DAMPING,
    cheapest,
    damped,
    groups_of,
    inverse_factor,
    solve,
    sweep,
)


@pytest.fixture
def layer() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(400, 40) @ torch.randn(40, 40)  # features that depend on each other
    return torch.randn(7, 40), inputs


def test_solve_finds_the_least_squares_of_every_row(layer: tuple[Tensor, Tensor]) -> None:
    weight, inputs = layer
    mask = torch.rand(7, 40) < 0.5
    product = damped(inputs.T @ inputs, 1e-4)
    found = solve(weight @ product, weight, mask, product, steps=400)
    assert bool((found[~mask] == 0).all())
    for row in range(7):
        kept = mask[row]
        best = torch.linalg.solve(product.double()[kept][:, kept], (product.double() @ weight[row].double())[kept])
        assert torch.allclose(found[row][kept].double(), best, rtol=2e-3, atol=2e-3)


def test_few_steps_are_much_better_than_none(layer: tuple[Tensor, Tensor]) -> None:
    weight, inputs = layer
    mask = torch.rand(7, 40) < 0.5
    product = damped(inputs.T @ inputs)

    def error(other: Tensor) -> float:
        return float(((other - weight) @ inputs.T).square().sum())

    few = solve(weight @ product, weight, mask, product, steps=30)
    swept = sweep(weight, inverse_factor(inputs.T @ inputs)[0], lambda part, _, alive: mask[:, : part.shape[1]])[0]
    assert error(few) < error(swept) < error(weight * mask)


def test_a_sweep_drops_exactly_the_share_and_makes_up_for_it() -> None:
    torch.manual_seed(1)
    weight = torch.randn(9, 300)  # more than two spans of columns, the last not whole
    wide = torch.randn(500, 40) @ torch.randn(40, 300) + 0.1 * torch.randn(500, 300)
    factor, damping = inverse_factor(wide.T @ wide)
    assert damping == DAMPING
    found, mask = sweep(weight, factor, cheapest(0.37))
    assert int((~mask).sum()) == round(0.37 * weight.numel())
    assert bool((found[~mask] == 0).all())
    plain = ((weight * mask - weight) @ wide.T).square().sum()
    assert float(((found - weight) @ wide.T).square().sum()) < 0.2 * float(plain)
    found, mask = sweep(weight, factor, groups_of(2, 4), 4)
    assert bool((mask.view(9, -1, 4).sum(-1) == 2).all())
    assert COLUMNS % 4 == 0


def test_the_first_columns_of_a_sweep_by_hand() -> None:
    """Dropping one weight of two: the other takes over what the first did, as far as the inputs agree."""
    product = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    factor, _ = inverse_factor(product, damping=1e-9)
    found, _ = sweep(torch.tensor([[1.0, 5.0]]), factor, lambda part, _, alive: torch.tensor([[False, True]]))
    assert torch.allclose(found, torch.tensor([[0.0, 5.5]]), atol=1e-4)


def test_singular_products_are_damped_until_they_work() -> None:
    inputs = torch.randn(3, 20)  # fewer inputs than features
    product = inputs.T @ inputs
    product[5] = product[:, 5] = 0  # and one that never fires
    factor, damping = inverse_factor(product, damping=1e-7)
    assert damping > 1e-7
    assert bool(factor.isfinite().all())
    with pytest.raises(FactError, match="not positive definite"):
        inverse_factor(torch.full((4, 4), float("nan")))


def test_how_far_damping_goes() -> None:
    """From a hundredth of the mean, ten times as much each time, to a thousand times the mean."""
    factor, damping = inverse_factor(torch.tensor([[1.0, 500.0], [500.0, 1.0]]))
    assert damping == pytest.approx(1000)
    assert bool(factor.isfinite().all())
    with pytest.raises(FactError, match="not positive definite"):
        inverse_factor(torch.tensor([[1.0, 5000.0], [5000.0, 1.0]]))


def test_an_input_that_was_always_zero_is_damped_by_the_mean() -> None:
    found = damped(torch.diag(torch.tensor([2.0, 0.0, 4.0])), damping=0.5)
    assert torch.equal(found, torch.diag(torch.tensor([3.0, 2.0, 5.0])))
