"""What seeds can tell, against scipy's paired t-test."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from secateur.lab.statistics import Difference, difference, percent, ratio, scatter, spread, verdict

VALUES = st.lists(st.tuples(*[st.floats(-10, 10, allow_subnormal=False)] * 2), min_size=2, max_size=8)


@given(VALUES)
def test_differences_are_those_of_the_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    values, base = (dict(enumerate(column)) for column in zip(*pairs, strict=True))
    found = difference(values, base)
    assert found is not None
    apart = numpy.subtract(list(values.values()), list(base.values()))
    assert math.isclose(found.mean, apart.mean(), abs_tol=1e-12)
    if apart.std() > 1e-9 * max(1, abs(apart.mean())):  # scipy gives NaN or warns where all differences are equal
        assert found.interval is not None
        expected = stats.ttest_rel(list(values.values()), list(base.values())).confidence_interval(0.95)
        assert numpy.allclose(found.interval, expected, rtol=1e-9, atol=1e-9)
        if min(abs(expected.low), abs(expected.high)) > 1e-9:  # nearer to zero, rounding decides
            assert (verdict(found, True) == "inconclusive") == (expected.low < 0 < expected.high)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_spread_is_mean_and_deviation(values: list[float]) -> None:
    found = spread(values)
    assert math.isclose(found.mean, numpy.mean(values), abs_tol=1e-12)
    assert found.deviation is not None
    assert math.isclose(found.deviation, numpy.std(values, ddof=1), abs_tol=1e-9)
    assert found.count == len(values)


def test_verdicts_follow_the_interval_and_the_direction() -> None:
    for low, high, if_higher, if_lower in (
        (0.1, 0.2, "better", "worse"),
        (-0.2, -0.1, "worse", "better"),
        (-0.1, 0.2, "inconclusive", "inconclusive"),
        (0.0, 0.2, "inconclusive", "inconclusive"),
    ):
        found = Difference((low + high) / 2, (low, high), 3, 1.0)
        assert verdict(found, True) == if_higher
        assert verdict(found, False) == if_lower
    assert verdict(Difference(5.0, None, 1, 1.0), True) == verdict(None, True) == "inconclusive"


def test_only_common_seeds_are_paired() -> None:
    found = difference({1: 3.0, 2: 5.0, 3: 100.0}, {0: -100.0, 1: 1.0, 2: 2.0})
    assert found is not None
    assert (found.mean, found.pairs, found.base) == (2.5, 2, 1.5)
    assert difference({1: 1.0}, {2: 1.0}) is None


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_differences_without_any_spread_are_no_evidence(seeds: int) -> None:
    """0.3 - 0.2 and 0.2 - 0.1 differ in their last bit: equal but for rounding."""
    ours, theirs = ({seed: 0.1 * (seed + more) for seed in range(seeds)} for more in (2, 1))
    found = difference(ours, theirs)
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert (found.interval, found.pairs) == (None, seeds)
    assert verdict(found, True) == verdict(found, False) == "inconclusive"
    assert scatter({"ours": ours, "theirs": theirs}) is None
    assert difference(ours, ours) == Difference(0.0, None, seeds, pytest.approx(0.1 * (seeds + 3) / 2))


@pytest.mark.parametrize("step", [0.0, 0.1, 1.0])
def test_equals_are_told_apart_in_one_comparison_of_twenty_at_most(step: float) -> None:
    """Two seeds of two rows that are equal, measured to whole steps: with the steps of an accuracy on few examples, a
    difference is often the same at both seeds, here in up to one of nine cases, none of which is evidence."""
    draws = numpy.random.default_rng(0).normal(100, size=(2000, 2, 2))
    draws = draws if not step else numpy.round(draws / step) * step
    found = [difference(dict(enumerate(ours)), dict(enumerate(theirs))) for ours, theirs in draws]
    assert sum(verdict(one, True) != "inconclusive" for one in found) <= 0.06 * len(found)


def test_infinite_differences_have_no_interval() -> None:
    ruined = difference({0: math.inf, 1: 3.0}, {0: 1.0, 1: 2.0})
    assert ruined is not None
    assert ruined.interval is None


def test_scales() -> None:
    found = Difference(math.log(2), (0.0, math.log(4)), 3, 5.0)
    assert ratio(found).mean == pytest.approx(2)
    assert ratio(found).interval == pytest.approx((1, 4))
    assert percent(found, logarithmic=True).interval == pytest.approx((0, 300))
    assert percent(Difference(-0.1, (-0.2, 0.0), 3, 0.5), logarithmic=False).interval == pytest.approx((-40, 0))
    assert ratio(Difference(1e9, None, 1, 1.0)).mean == math.inf


@given(st.integers(2, 5), st.integers(2, 4), st.integers(0, 99))
def test_scatter_is_what_a_fit_by_row_and_seed_leaves(rows: int, seeds: int, draw: int) -> None:
    values = numpy.random.default_rng(draw).normal(size=(rows, seeds))
    found = scatter({f"row {number}": dict(enumerate(row, 7)) for number, row in enumerate(values)})
    assert found is not None
    values = values[[number for number in range(rows) if f"row {number}" not in found.left_out]]
    rows = len(values)
    design = [[*numpy.eye(rows)[row], *numpy.eye(seeds)[seed]] for row in range(rows) for seed in range(seeds)]
    fitted = numpy.array(design) @ numpy.linalg.lstsq(numpy.array(design), values.ravel(), rcond=None)[0]
    left = float(((values.ravel() - fitted) ** 2).sum())
    assert found.freedom == rows * seeds - numpy.linalg.matrix_rank(design)
    assert math.isclose(found.deviation, math.sqrt(left / found.freedom), rel_tol=1e-6)
    assert math.isclose(found.reach, stats.t.ppf(0.975, found.freedom) * found.deviation * math.sqrt(2 / seeds))


def test_scatter_of_two_rows_is_that_of_their_paired_difference() -> None:
    ours, theirs = {0: 1.0, 1: 2.5, 2: 2.0}, {0: 1.5, 1: 2.0, 2: 3.0}
    apart, found = difference(ours, theirs), scatter({"ours": ours, "theirs": theirs})
    assert apart is not None
    assert apart.interval is not None
    assert found is not None
    assert apart.interval == pytest.approx((apart.mean - found.reach, apart.mean + found.reach))


def test_scatter_takes_the_seeds_all_rows_have_and_needs_two_of_both() -> None:
    rows = {"a": {0: 1.0, 1: 2.0, 2: 9.0}, "b": {1: 3.0, 0: 1.0}}
    found = scatter(rows)
    assert found is not None
    assert (found.seeds, found.freedom, found.left_out) == (2, 1, ())
    assert found.deviation == pytest.approx(0.5)
    assert scatter({"a": rows["a"]}) is None
    assert scatter({}) is None
    assert scatter({"a": {0: 1.0}, "b": {0: 2.0}}) is None
    assert scatter({"a": {0: 1.0, 1: 2.0}, "b": {2: 1.0, 3: 1.0}}) is None


def test_rows_that_scatter_far_more_or_say_nothing_do_not_count() -> None:
    calm = {f"row {n}": {seed: n + seed + 0.01 * (-1) ** (n * seed + seed // 2) for seed in range(3)} for n in range(6)}
    alone, wild = scatter(calm), {"wild": {0: 5.0, 1: 9.0, 2: 1.0}}
    silent = {"ruined": {0: math.inf, 1: 1.0, 2: 1.0}, "single": {0: 1.0}}
    assert alone is not None
    assert scatter(calm | silent) == replace(alone, left_out=("ruined", "single"))
    assert scatter(wild | calm) == replace(alone, left_out=("wild",))
