"""Schedules: plain callables from the number of optimizer steps taken to the sparsity asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """From zero at `begin` to `target` at `end` along `curve`; the Pruner makes its last update exactly at `end`."""

    target: float
    begin: int
    end: int
    curve: Callable[[float], float]

    def __call__(self, step: int) -> float:
        progress = min(1.0, max(0.0, (step - self.begin) / (self.end - self.begin)))
        return self.target * self.curve(progress)

    def __str__(self) -> str:
        return f"{self.curve.__name__.lstrip('_')}({self.target}, begin={self.begin}, end={self.end})"


@dataclass(frozen=True)
class Constant:
    """The same sparsity at every step."""

    target: float

    def __call__(self, step: int) -> float:
        return self.target

    def __str__(self) -> str:
        return f"constant({self.target})"


def check_sparsity(value: float) -> float:
    """The value as a float in [0, 1), or an error that says what to do."""
    item = getattr(value, "item", None)
    value = item() if callable(item) and getattr(value, "ndim", 1) == 0 else value  # a number of torch's or NumPy's
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        number = isinstance(value, int | float) and value > 1
        percent = f" For {value:g} percent write {value / 100:g}." if number else ""
        raise ScheduleError(f"Sparsity is the fraction of weights to remove, in [0, 1); got {value!r}.{percent}")
    return float(value)


def check_rising(value: float, before: float, step: int) -> None:
    """Raise if a schedule asks for less than it did before: masks never return without regrowth, and regrowth exchanges
    weights at the same sparsity. So the sparsity achieved would not be the one asked for."""
    if value < before - 1e-9:
        raise ScheduleError(
            f"The schedule falls: it asks for sparsity {value:g} at step {step}, after {before:g}. Pruned weights do"
            " not come back, so a schedule must never fall; regrow=... exchanges weights at the same sparsity. No mask"
            " was changed."
        )


def described(schedule: Schedule) -> str:
    """The schedule in words that are the same in every process: without addresses in memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(schedule))


def _ramp(target: float, begin: int, end: int, curve: Callable[[float], float]) -> Ramp:
    if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin < end):
        raise ScheduleError(f"A ramp needs 0 <= begin < end, whole optimizer steps; got begin={begin}, end={end}.")
    return Ramp(check_sparsity(target), begin, end, curve)


def constant(sparsity: float) -> Constant:
    """The whole sparsity from the first update on."""
    return Constant(check_sparsity(sparsity))


def linear(sparsity: float, *, begin: int, end: int) -> Ramp:
    """s p, where p runs from 0 at step `begin` to 1 at step `end`."""
    return _ramp(sparsity, begin, end, _linear)


def cubic(sparsity: float, *, begin: int, end: int) -> Ramp:
    """s (1 - (1 - p)^3): fast first, gentle at the end (Zhu and Gupta 2017)."""
    return _ramp(sparsity, begin, end, _cubic)


def late_cubic(sparsity: float, *, begin: int, end: int) -> Ramp:
    """s p^3: gentle first, fast at the end."""
    return _ramp(sparsity, begin, end, _late_cubic)


def as_schedule(sparsity: float | Schedule) -> Schedule:
    """A number as a constant schedule; a callable as it is."""
    return sparsity if callable(sparsity) else constant(sparsity)


class Clock:
    """Counts optimizer steps. Updates fall due every so many, and where the schedule ends.

    Of several optimizers a step counts when every one of them has stepped since the last that counted.
    """

    def __init__(self, every: int, end: int | None, optimizers: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ScheduleError(f"every is a number of optimizer steps, at least 1; got {every!r}.")
        self.every, self.end = every, end
        self.taken = self.seen = self.settled = 0  # the last: steps by which no update is owed
        self.counts = [0] * optimizers  # steps of each optimizer in this process
        self._ahead: set[int] = set()  # those that have stepped since the last step that counted

    def tick(self, number: int = 0) -> None:
        """This optimizer has completed a step."""
        self.counts[number] += 1
        self._ahead.add(number)
        if len(self._ahead) == len(self.counts):
            self.taken += 1
            self._ahead.clear()

    @property
    def midway(self) -> bool:
        """Whether some optimizers have taken the next step and others have not."""
        return bool(self._ahead)

    def behind(self) -> int:
        """How many steps were taken that have not been acted on; from now on they have."""
        behind, self.seen = self.taken - self.seen, self.taken
        return behind

    def due(self, held: bool) -> bool:
        """Whether an update falls due now, or fell due while updates were held back. While `held`, it stays owed."""
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
