"""Reconstruction of surviving weights, against least squares and against doing nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from secateur.errors import FactError
from secateur.oneshot.reconstruct import COLUMNS, DAMPING, cheapest, damped, groups_of, inverse_factor, solve, sweep


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


def test_one_step_is_enough_where_inputs_are_independent() -> None:
    """The first direction is that of the preconditioner."""
    torch.manual_seed(0)
    product = torch.diag(torch.tensor([0.25, 3.0, 70.0]))
    weight, aim = torch.randn(2, 3), torch.randn(2, 3)
    mask = torch.tensor([[True, True, False], [False, True, True]])
    found = solve(aim, weight, mask, product, steps=1)
    torch.testing.assert_close(found, aim / product.diagonal() * mask)


def test_few_steps_are_much_better_than_none(layer: tuple[Tensor, Tensor]) -> None:
    weight, inputs = layer
    mask = torch.rand(7, 40) < 0.5
    product = damped(inputs.T @ inputs)

    def error(other: Tensor) -> float:
        return float(((other - weight) @ inputs.T).square().sum())

    few = solve(weight @ product, weight, mask, product, steps=30)
    swept = sweep(weight, inverse_factor(inputs.T @ inputs)[0], lambda part, *_: mask[:, : part.shape[1]])[0]
    assert error(few) < error(swept) < error(weight * mask)


def test_a_sweep_prunes_exactly_the_share_and_compensates() -> None:
    torch.manual_seed(1)
    weight = torch.randn(9, 300)  # more than two spans of columns, the last not whole
    wide = torch.randn(500, 40) @ torch.randn(40, 300) + 0.1 * torch.randn(500, 300)
    factor, damping = inverse_factor(wide.T @ wide)
    assert damping == DAMPING
    found, mask = sweep(weight, factor, cheapest(0.37, weight.numel()))
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
    found, _ = sweep(torch.tensor([[1.0, 5.0]]), factor, lambda *_: torch.tensor([[False, True]]))
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


def published(weight: Tensor, inputs: Tensor, sparsity: float, span: int = 128) -> tuple[Tensor, Tensor]:
    """SparseGPT as its authors' code has it, in fp64, but for two things that a layer alone does not tell: the mean
    that damps is over inputs that are not always zero, and exactly the asked share goes. Weights and mask."""
    weight, inputs = weight.double().clone(), inputs.double()
    product = inputs.T @ inputs
    dead = product.diagonal() == 0
    mean = product.diagonal()[~dead].mean()
    product[dead, dead] = mean
    weight[:, dead] = 0
    product += torch.diag(torch.where(dead, 0.0, 0.01 * mean))
    inverse = torch.linalg.inv(product)
    factor = torch.linalg.cholesky(inverse, upper=True)
    mask = torch.ones_like(weight, dtype=torch.bool)
    seen = gone = 0
    for begin in range(0, weight.shape[1], span):
        end = min(begin + span, weight.shape[1])
        costs = (weight[:, begin:end] / factor.diagonal()[begin:end]).square().flatten()
        seen += costs.numel()
        free = int((costs == 0).sum())
        count = max(round(sparsity * seen) - gone, min(free, round(sparsity * weight.numel()) - gone), 0)
        gone += count
        mask[:, begin:end].view(weight.shape[0], -1)
        part = torch.ones(costs.numel(), dtype=torch.bool)
        part[costs.argsort(stable=True)[:count]] = False
        mask[:, begin:end] = part.view(weight.shape[0], -1)
        for column in range(begin, end):
            error = weight[:, column].masked_fill(mask[:, column], 0) / factor[column, column]
            weight[:, column:] -= error[:, None] * factor[column, column:]
    return weight * mask, mask


@pytest.mark.parametrize("silent", [0, 40, 150])
def test_a_sweep_is_the_published_algorithm_also_where_inputs_are_always_zero(silent: int) -> None:
    torch.manual_seed(2)
    weight, inputs = torch.randn(12, 200), torch.randn(300, 60) @ torch.randn(60, 200)
    inputs[:, torch.randperm(200)[:silent]] = 0
    product = inputs.T @ inputs
    choose = cheapest(0.6, weight.numel())
    found, mask = sweep(weight, inverse_factor(product)[0], choose, silent=product.diagonal() == 0)
    right, kept = published(weight, inputs, 0.6)
    zero = inputs.abs().sum(0) == 0
    assert int((~mask).sum()) == round(0.6 * weight.numel())
    if silent * 12 <= round(0.6 * weight.numel()):
        assert not bool(mask[:, zero].any())
    assert float((mask[:, ~zero] != kept[:, ~zero]).float().mean()) < 0.01  # fp32 beside fp64 may swap neighbours
    same = (mask == kept)[:, ~zero]
    torch.testing.assert_close(found[:, ~zero][same].double(), right[:, ~zero][same], rtol=0.05, atol=0.05)
    assert torch.equal(found[:, zero], torch.where(mask, weight, 0.0)[:, zero])  # what is kept there keeps its value


def test_of_silent_inputs_the_smallest_weights_go_first() -> None:
    weight = torch.tensor([[3.0, -1.0, 2.0, 0.5], [1.0, 4.0, -2.0, 6.0]])
    silent = torch.tensor([True, False, True, False])
    product = torch.diag(torch.where(silent, 0.0, 1.0))
    _, mask = sweep(weight, inverse_factor(product)[0], cheapest(0.375, 8), silent=silent)
    assert mask.tolist() == [[True, True, False, True], [False, True, False, True]]


def test_how_far_damping_goes() -> None:
    """From a hundredth of the mean, ten times as much each time, to a thousand times the mean."""
    factor, damping = inverse_factor(torch.tensor([[1.0, 500.0], [500.0, 1.0]]))
    assert damping == pytest.approx(1000)
    assert bool(factor.isfinite().all())
    with pytest.raises(FactError, match="not positive definite"):
        inverse_factor(torch.tensor([[1.0, 5000.0], [5000.0, 1.0]]))


def test_an_input_that_was_always_zero_is_damped_by_the_mean() -> None:
    found = damped(torch.diag(torch.tensor([2.0, 0.0, 4.0])), damping=0.5)
    assert torch.equal(found, torch.diag(torch.tensor([3.5, 3.0, 5.5])))  # of inputs that are not always zero


def test_a_share_of_nothing_drops_nothing(layer: tuple[Tensor, Tensor]) -> None:
    weight, inputs = layer
    found, mask = sweep(weight, inverse_factor(inputs.T @ inputs)[0], cheapest(0.0, weight.numel()))
    assert bool(mask.all())
    assert torch.equal(found, weight)
