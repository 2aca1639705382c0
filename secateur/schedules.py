"""Schedules: functions from the number of optimizer steps to the sparsity asked for, and the clock they run on."""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from secateur.errors import ScheduleError

Schedule = Callable[[int], float]


def _late_cubic(progress: float) -> float:
    return progress**3


def _cubic(progress: float) -> float:
    return 1 - (1 - progress) ** 3


def _linear(progress: float) -> float:
    return progress


@dataclass(frozen=True)
class Ramp:
    """From zero at step `begin` to `target` at `end` along `curve`. The Pruner's last update is exactly at `end`."""

    target: float
    begin: int
    end: int
    curve: Callable[[float], float]

    def __call__(self, step: int) -> float:
        progress = min(1.0, max(0.0, (step - self.begin) / (self.end - self.begin)))
        return self.target * self.curve(progress)

    def __repr__(self) -> str:
        return f"{self.curve.__name__.lstrip('_')}({self.target}, begin={self.begin}, end={self.end})"


@dataclass(frozen=True)
class Constant:
    """The same sparsity at every step."""

    target: float

    def __call__(self, step: int) -> float:
        return self.target

    def __repr__(self) -> str:
        return f"constant({self.target})"


@dataclass(frozen=True)
class Hold:
    """Asks for nothing, so that the masks a Pruner was given stay as they are."""

    def __call__(self, step: int) -> float:
        return 0.0

    def __repr__(self) -> str:
        return "hold"


def check_sparsity(value: float) -> float:
    """The value as a float in [0, 1), or an error."""
    item = getattr(value, "item", None)
    value = item() if callable(item) and getattr(value, "ndim", 1) == 0 else value  # a scalar of torch or NumPy
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        number = isinstance(value, int | float) and 1 < value < math.inf
        percent = f" For {value:g} percent write {value / 100:g}." if number else ""
        raise ScheduleError(f"Sparsity is the fraction of weights to remove, in [0, 1); got {value!r}.{percent}")
    return float(value)


def whole_steps(value: Any) -> int | None:
    """A whole number of Python, NumPy or torch as an int; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_rising(value: float, before: float, step: int) -> None:
    """Raise if a schedule asks for less than before. Pruned weights do not come back, and regrowth exchanges weights at
    the same sparsity, so the sparsity achieved would not be the one asked for."""
    if value < before - 1e-9:
        raise ScheduleError(
            f"The schedule falls: it asks for sparsity {value:g} at step {step}, after {before:g}. Pruned weights do"
            " not come back, so a schedule must never fall; regrow=... exchanges weights at the same sparsity. No mask"
            " was changed."
        )


def described(schedule: Schedule) -> str:
    """The schedule as text that is the same in every process: without memory addresses."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(schedule))


def _ramp(target: float, begin: int, end: int, curve: Callable[[float], float]) -> Ramp:
    first, last = whole_steps(begin), whole_steps(end)
    if first is None or last is None or not 0 <= first < last:
        raise ScheduleError(
            f"A schedule needs 0 <= begin < end, whole optimizer steps; got begin={begin!r}, end={end!r}."
        )
    return Ramp(check_sparsity(target), first, last, curve)


def constant(sparsity: float) -> Constant:
    """The full sparsity from the first update on."""
    return Constant(check_sparsity(sparsity))


def linear(sparsity: float, *, begin: int, end: int) -> Ramp:
    """Sparsity s p, where p rises from 0 at step `begin` to 1 at step `end`."""
    return _ramp(sparsity, begin, end, _linear)


def cubic(sparsity: float, *, begin: int, end: int) -> Ramp:
    """Sparsity s (1 - (1 - p)^3): fast at first, slow at the end (Zhu and Gupta 2017)."""
    return _ramp(sparsity, begin, end, _cubic)


def late_cubic(sparsity: float, *, begin: int, end: int) -> Ramp:
    """Sparsity s p^3: slow at first, fast at the end."""
    return _ramp(sparsity, begin, end, _late_cubic)


RAMPS: dict[str, Callable[..., Ramp]] = {"cubic": cubic, "late_cubic": late_cubic, "linear": linear}


def as_schedule(sparsity: float | Schedule) -> Schedule:
    """A number as a constant schedule; a callable that takes a step unchanged."""
    if not callable(sparsity):
        return constant(sparsity)
    try:
        inspect.signature(sparsity).bind(0)
    except TypeError as error:
        name = getattr(sparsity, "__name__", type(sparsity).__name__)
        raise ScheduleError(
            f"A schedule is called with the number of optimizer steps alone, and {name} cannot be ({error})."
            " Pass a number or, for example, sc.cubic(0.8, begin=100, end=1000)."
        ) from error
    except ValueError:  # written in C, without a signature
        pass
    return sparsity


class Clock:
    """Counts optimizer steps and says when a mask update is due: every `every` steps, and where the schedule ends.

    With several optimizers a step counts once each of them has stepped since the last one that counted.
    """

    def __init__(self, every: int, end: int | None, optimizers: int = 1) -> None:
        period = whole_steps(every)
        if period is None or period < 1:
            raise ScheduleError(f"every must be a number of optimizer steps, at least 1; got {every!r}.")
        if end is not None and whole_steps(end) is None and not isinstance(end, Real):
            raise ScheduleError(
                f"The schedule has an attribute `end` that is no number of optimizer steps: {end!r}. The last update of"
                " the masks is made there. Give it a number, or another name."
            )
        self.every, self.end = period, end
        self.taken = self.seen = 0  # steps completed, and those of them that pruner.step() has acted on
        self.settled = 0  # last step at which the masks were current
        self.counts = [0] * optimizers  # steps of each optimizer in this process
        self._ahead: set[int] = set()  # optimizers that have stepped since the last step that counted

    def tick(self, number: int = 0) -> None:
        """Count one completed step of this optimizer."""
        self.counts[number] += 1
        self._ahead.add(number)
        if len(self._ahead) == len(self.counts):
            self.taken += 1
            self._ahead.clear()

    @property
    def midway(self) -> bool:
        """Whether some optimizers have taken the next step and others not yet."""
        return bool(self._ahead)

    def behind(self) -> int:
        """How many steps were taken since the last call."""
        behind, self.seen = self.taken - self.seen, self.taken
        return behind

    def due(self, held: bool) -> bool:
        """Whether an update is due now, or was due while updates were held back. While `held`, it stays due."""
        now, last = self.taken, self.settled
        due = now // self.every > last // self.every or (self.end is not None and last < self.end <= now)
        if due and held:
            return False
        self.settled = now
        return due

    def saved(self) -> list[int]:
        return [self.taken, self.seen, self.settled]

    def restore(self, saved: Sequence[int]) -> None:
        self.taken, self.seen, self.settled = saved
