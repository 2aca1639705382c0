"""Schedules: shapes, ends, and refusals that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import secateur as sc
from secateur.errors import ScheduleError
from secateur.schedules import check_sparsity


@pytest.mark.parametrize(("ramp", "middle"), [(sc.linear, 0.4), (sc.cubic, 0.8 * 0.875), (sc.late_cubic, 0.8 * 0.125)])
def test_ramps(ramp: Callable[..., Any], middle: float) -> None:
    schedule = ramp(0.8, begin=100, end=300)
    assert [schedule(step) for step in (0, 100)] == [0.0, 0.0]
    assert schedule(200) == pytest.approx(middle)
    assert [schedule(step) for step in (300, 10_000)] == [0.8, 0.8]
    rising = [schedule(step) for step in range(0, 400, 7)]
    assert rising == sorted(rising)


def test_constant() -> None:
    assert [sc.constant(0.3)(step) for step in (0, 5)] == [0.3, 0.3]


@pytest.mark.parametrize(("begin", "end"), [(10, 10), (20, 10), (-1, 10), (0.1, 0.8)])
def test_a_ramp_must_end_after_it_begins(begin: float, end: float) -> None:
    for ramp in (sc.linear, sc.cubic, sc.late_cubic):
        with pytest.raises(
            ScheduleError, match=rf"0 <= begin < end, whole optimizer steps; got begin={begin}, end={end}"
        ):
            ramp(0.5, begin=begin, end=end)


@pytest.mark.parametrize("make", [sc.constant, lambda s: sc.linear(s, begin=0, end=1)])
def test_percent_is_not_a_fraction(make: Callable[[float], Any]) -> None:
    with pytest.raises(ScheduleError, match=r"in \[0, 1\); got 80. For 80 percent write 0.8"):
        make(80)
    with pytest.raises(ScheduleError, match=r"got 1\."):
        make(1)


@pytest.mark.parametrize(
    "text",
    [
        "constant(0.5)", "linear(0.25, begin=3, end=4)", "cubic(0.8, begin=100, end=1000)",
        "late_cubic(0.5, begin=1, end=9)",
    ],
)  # fmt: skip
def test_they_print_as_a_user_would_type_them(text: str) -> None:
    schedule = eval(f"sc.{text}")
    assert repr(schedule) == str(schedule) == text
    assert eval(f"sc.{schedule!r}") == schedule


def test_numbers_of_torch_and_numpy_are_numbers() -> None:
    assert check_sparsity(torch.tensor(0.5)) == 0.5  # type: ignore[arg-type]
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    assert check_sparsity(np.float32(0.25)) == 0.25
    with pytest.raises(ScheduleError, match=r"For 1.1 percent write 0.011\."):
        check_sparsity(1.1)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_steps_may_be_whole_numbers_of_numpy_and_torch(library: str) -> None:
    found = pytest.importorskip(library, reason=f"{library} is not installed")
    kind = found.int64 if library == "numpy" else found.tensor
    assert sc.cubic(0.5, begin=kind(2), end=kind(10)) == sc.cubic(0.5, begin=2, end=10)
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    schedule = sc.cubic(0.5, begin=kind(2), end=kind(10))
    assert sc.Pruner(layer, optimizer, sparsity=schedule, every=kind(3), only="*").every == 3
    pruner = sc.Pruner(layer, optimizer, regrow="random", until=kind(7), only="*")
    assert str(pruner.regrowth) == "random(drop=0.3, until=7)"


def test_an_end_that_is_no_number_is_refused() -> None:
    class Mine:
        def __call__(self, step: int) -> float:
            return 0.5

        def end(self) -> int:
            return 10

    layer = torch.nn.Linear(4, 4)
    with pytest.raises(ScheduleError, match="attribute `end` that is no number of optimizer steps"):
        sc.Pruner(layer, torch.optim.AdamW(layer.parameters()), sparsity=Mine(), only="*")
