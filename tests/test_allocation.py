"""Allocations: exact totals, monotone under a rising budget, and the rule each one states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from secateur.errors import PatternError, ScoreError
from secateur.selection import Target, check_choice, choose
from secateur.selection.allocation import ALLOCATIONS, Layers, Rule, rule_named, spread, uniform
from secateur.selection.exact import ALONE, ScoredTensor
from secateur.selection.tiles import Layout


def target(scores: Tensor, alive: Tensor | None = None) -> Target:
    flat, size = None if alive is None else alive.view(-1), scores.numel()
    scored = ScoredTensor("w", size, size, lambda where: scores.view(-1)[where], scores.device, flat)
    return Target(scored, tuple(scores.shape), tuple(scores.shape), Layout())


LAYERS = [(40, 30), (64, 64), (10, 100), (128, 16)]


def gone(name: str, sparsity: float, scores: list[Tensor], alive: list[Tensor] | None = None) -> list[int]:
    targets = [target(s, None if alive is None else a) for s, a in zip(scores, alive or scores, strict=True)]
    return [int((~mask).sum()) for mask in choose(targets, sparsity, allocation=name).masks]


@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize("sparsity", [0.0, 0.013, 0.5, 0.8, 0.97])
def test_the_total_is_exact(name: str, sparsity: float) -> None:
    scores = [torch.rand(shape) for shape in LAYERS]
    assert sum(gone(name, sparsity, scores)) == round(sparsity * sum(s.numel() for s in scores))


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_a_rising_budget_never_gives_back(name: str) -> None:
    scores = [torch.rand(shape) * scale for shape, scale in zip(LAYERS, (1, 3, 0.2, 1), strict=True)]
    alive = [torch.ones(shape, dtype=torch.bool) for shape in LAYERS]
    for sparsity in (0.1, 0.11, 0.4, 0.401, 0.9, 0.95, 0.99):
        targets = [target(s, a) for s, a in zip(scores, alive, strict=True)]
        masks = [m.view(a.shape) for m, a in zip(choose(targets, sparsity, allocation=name).masks, alive, strict=True)]
        assert not any(bool((new & ~old).any()) for new, old in zip(masks, alive, strict=True))
        assert sum(int((~mask).sum()) for mask in masks) == round(sparsity * sum(s.numel() for s in scores))
        alive = masks


def test_uniform_takes_the_same_share_everywhere() -> None:
    scores = [torch.rand(shape) * scale for shape, scale in zip(LAYERS, (1, 9, 9, 9), strict=True)]
    for count, tensor in zip(gone("uniform", 0.37, scores), scores, strict=True):
        assert abs(count - 0.37 * tensor.numel()) < 1


def test_depth_runs_from_07_to_13_and_hits_its_total() -> None:
    scores = [torch.rand(100, 100) for _ in range(5)]
    shares = [count / 10_000 for count in gone("depth", 0.5, scores)]
    assert shares == pytest.approx([0.35, 0.425, 0.5, 0.575, 0.65], abs=1e-3)
    uneven = [torch.rand(shape) for shape in ((10, 10), (400, 100))]  # the plain rule would give 0.648 in all
    first, last = gone("depth", 0.5, uneven)
    assert first + last == 20_050
    assert (first / 100) / (last / 40_000) == pytest.approx(0.7 / 1.3, rel=0.03)
    assert max(count / 10_000 for count in gone("depth", 0.9, scores)) <= 0.95


def test_erk_keeps_in_proportion_to_the_dimensions() -> None:
    scores = [torch.rand(shape) for shape in ((100, 100), (200, 400))]
    small, large = gone("erk", 0.9, scores)
    kept = 10_000 - small, 80_000 - large
    assert kept[0] / kept[1] == pytest.approx(200 / 600, rel=1e-3)
    small, large = gone("erk", 0.05, scores)  # the small layer would have to keep more than it has
    assert small == 0


def exact_lamp(scores: list[Tensor], budget: int) -> list[int]:
    """LAMP by the book: sort each layer, divide by what is at least as large, take the lowest of all."""
    values, owners = [], []
    for layer, tensor in enumerate(scores):
        squares = tensor.flatten().double().square().sort().values
        values.append(squares / squares.flip(0).cumsum(0).flip(0))
        owners.append(torch.full_like(squares, layer))
    order = torch.cat(values).argsort()[:budget]
    return torch.bincount(torch.cat(owners)[order].long(), minlength=len(scores)).tolist()


@pytest.mark.parametrize("sparsity", [0.3, 0.7, 0.95])
def test_lamp_is_what_the_paper_says_to_a_percent(sparsity: float) -> None:
    scores = [torch.randn(200, 300) * 0.02, torch.randn(100, 100).abs() * 5, torch.randn(300, 300).pow(3)]
    total = sum(s.numel() for s in scores)
    found = gone("lamp", sparsity, [s.abs() for s in scores])
    expected = exact_lamp(scores, round(sparsity * total))
    for mine, book, tensor in zip(found, expected, scores, strict=True):
        assert abs(mine - book) <= 0.01 * tensor.numel()


def test_lamp_refuses_signed_scores() -> None:
    with pytest.raises(PatternError, match="must not be negative"):
        gone("lamp", 0.5, [torch.randn(4, 4)])


def test_rows_follow_an_allocation() -> None:
    targets = [target(torch.rand(100, 100)) for _ in range(3)]
    masks = choose(targets, 0.5, scope="row", allocation="depth").masks
    per_row = [set((~mask.view(100, 100)).sum(1).tolist()) for mask in masks]
    assert per_row == [{35}, {50}, {65}]


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_spread_is_exact_inside_its_bounds(parts: list[tuple[float, int, int]], where: float) -> None:
    shares = [share for share, _, _ in parts]
    lower, upper = [low for _, low, _ in parts], [low + room for _, low, room in parts]
    assume(sum(upper) > 0)
    total = sum(lower) + round(where * (sum(upper) - sum(lower)))
    counts = spread(shares, lower, upper, total)
    assert sum(counts) == total
    assert all(low <= count <= high for low, count, high in zip(lower, counts, upper, strict=True))


@pytest.mark.parametrize("name", ["evenly", ["uniform"]])
def test_an_unknown_allocation_is_refused(name: Any) -> None:
    with pytest.raises(PatternError, match="No allocation .* Use one of 'uniform', 'erk'"):
        rule_named(name)
    with pytest.raises(PatternError, match="No allocation"):
        check_choice(0.5, "model", None, name)


def meets_the_contract(rule: Rule, sparsity: float) -> bool:
    """One whole count for each layer, none below what is gone or above what there is, and the budget in all."""
    scores = [torch.rand(shape) * scale for shape, scale in zip(LAYERS, (1, 3, 0.2, 1), strict=True)]
    alive = [torch.rand(shape) > share for shape, share in zip(LAYERS, (0.0, 0.3, 0.6, 0.1), strict=True)]
    dead = [int((~one).sum()) for one in alive]
    targets = [target(s, a) for s, a in zip(scores, alive, strict=True)]
    fans = [one.fan for one in targets]
    layers = Layers([one.scored for one in targets], fans, dead, sparsity, ALONE)
    counts = rule(layers)
    bounded = all(low <= count <= high for low, count, high in zip(dead, counts, layers.sizes, strict=True))
    return bounded and all(type(count) is int for count in counts) and sum(counts) == layers.budget


@pytest.mark.parametrize("rule", [pytest.param(rule, id=name) for name, rule in ALLOCATIONS.items()])
@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.5, 0.9, 0.999])
def test_every_rule_of_the_table_meets_one_contract(rule: Rule, sparsity: float) -> None:
    assert meets_the_contract(rule, sparsity)


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_one_layer_takes_the_whole_budget(name: str) -> None:
    assert gone(name, 0.5, [torch.rand(8, 8)]) == [32]


def test_the_contract_finds_a_rule_that_is_off_by_one() -> None:
    def off_by_one(layers: Layers) -> list[int]:
        first, *others = uniform(layers)
        return [first + 1, *others]

    assert not meets_the_contract(off_by_one, 0.9)
    assert ALLOCATIONS.keys() == {"uniform", "erk", "depth", "owl", "lamp"}


def test_lamp_calls_nan_by_its_name() -> None:
    scores = torch.ones(4, 4)
    scores[0, 0] = -torch.nan
    with pytest.raises(ScoreError, match="NaN scores in 'w'"):
        gone("lamp", 0.5, [scores])
