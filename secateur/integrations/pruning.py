"""What the Trainer's and Lightning's callbacks share: settings that become a Pruner once the number of steps is known.

`begin`, `end` and `every` may be given relative to the length of the training; `ramp` turns them into a schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import ScheduleError, nearest
from secateur.model.distributed import unwrap
from secateur.model.prunable import Globs
from secateur.pruner import Pruner
from secateur.regrowth import DROP
from secateur.schedules import RAMPS, Clock, Schedule, check_sparsity
from secateur.scores import Score, resolve
from secateur.selection import check_choice
from secateur.selection.tiles import parse_pattern

logger = logging.getLogger("secateur")

BEGIN, END, SHAPE = 0.05, 0.6, "cubic"
UPDATES = 50  # mask updates over a ramp, unless `every` says otherwise


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """How to prune a training run whose length is not known yet. The fields are those of `Pruner`, but `begin`, `end`
    and `until` are steps (int) or fractions of all steps (float), and `schedule` is the shape of the ramp."""

    score: str | Callable[..., Tensor] | Score = "variance"
    sparsity: float | Schedule | None = 0.8
    begin: float = BEGIN
    end: float = END
    every: int | None = None
    schedule: str | Callable[..., Schedule] = SHAPE
    scope: str = "model"
    pattern: str | None = None
    allocation: str | None = None
    skip: Globs = ()
    only: Globs | None = None
    regrow: str | None = None
    drop: float = DROP
    until: float | None = None
    masks: Any = None

    def __post_init__(self) -> None:
        """Refuse what cannot work with any model, before data is loaded and training begins."""
        resolve(self.score)
        if not self.holds:
            check_choice(self._target(), self.scope, parse_pattern(self.pattern), self.allocation)
        if callable(self.sparsity) and (self.begin, self.end, self.schedule) != (BEGIN, END, SHAPE):
            raise ScheduleError(
                f"sparsity={self.sparsity} is a schedule, which says itself when it begins and ends. Leave out begin,"
                " end and schedule, or pass sparsity as a number."
            )
        shape_named(self.schedule)
        _check_point("begin", self.begin)
        _check_point("end", self.end)
        if self.until is not None:
            _check_point("until", self.until)
        if self.every is not None:
            Clock(self.every, None)

    @property
    def holds(self) -> bool:
        """Whether given masks are held and nothing more is pruned."""
        return self.masks is not None and self.sparsity is None

    def _target(self) -> float | None:
        """The final sparsity; None if the pattern decides."""
        if callable(self.sparsity):
            return getattr(self.sparsity, "target", None if self.pattern else 0.0)
        return self.sparsity

    def pruner(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: float, before: Pruner | None = None
    ) -> Pruner:
        """A Pruner for a run of this many optimizer steps (infinity if it has no end).

        It keeps what a Pruner of an earlier run has pruned in the same model, unless weights may regrow anyway.
        """
        sparsity, every = self.sparsity, self.every
        if not self.holds and not callable(sparsity):
            pattern = parse_pattern(self.pattern)
            target = check_choice(sparsity, self.scope, pattern, self.allocation)
            sparsity = ramp(target, steps, self.begin, self.end, self.schedule)
        if callable(sparsity):
            every = every or spacing(sparsity, steps)
            _warn_if_cut_short(sparsity, steps)
        masks = self.masks
        if (
            masks is None
            and before is not None
            and before.model is unwrap(model)
            and before.sparsity
            and self.regrow is None
        ):
            logger.info("The model was pruned to sparsity %.4f by an earlier run; this one goes on from there.",
                        before.sparsity)  # fmt: skip
            masks = before.masks
        given = {} if masks is None else {"masks": masks}
        return Pruner(
            model, optimizer, score=self.score, sparsity=sparsity, every=every or 1, scope=self.scope,
            pattern=self.pattern, allocation=self.allocation, skip=self.skip, only=self.only, regrow=self.regrow,
            drop=self.drop, until=None if self.until is None else _step("until", self.until, steps), **given,
        )  # fmt: skip


def ramp(
    sparsity: float,
    steps: float,
    begin: float = BEGIN,
    end: float = END,
    schedule: str | Callable[..., Schedule] = SHAPE,
) -> Schedule:
    """A schedule that reaches `sparsity` between `begin` and `end` of a run of `steps` optimizer steps.

    `begin` and `end` are steps if they are ints (1 is the first step) and fractions of `steps` if they are floats (1.0
    is the last step). `schedule` is "cubic", "linear", "late_cubic", or a function like `secateur.cubic`.
    """
    first, last = (_step(name, point, steps) for name, point in (("begin", begin), ("end", end)))
    if first >= last:
        raise ScheduleError(
            f"begin={begin!r} and end={end!r} are steps {first} and {last} of a run of {steps} optimizer steps; begin"
            " must come before end. A float is a fraction of the run, an int is a step. Train for more steps, or move"
            " them apart."
        )
    try:
        made = shape_named(schedule)(check_sparsity(sparsity), begin=first, end=last)
    except TypeError as error:
        name = getattr(schedule, "__name__", schedule)
        raise ScheduleError(
            f"schedule={name} cannot be called as schedule(sparsity, begin=..., end=...): {error}. A ready schedule,"
            " such as secateur.constant(0.5), goes into sparsity=..."
        ) from error
    if not callable(made):
        raise ScheduleError(f"schedule={schedule!r} must return a function of the step; it returned {made!r}.")
    return made


def spacing(schedule: Schedule, steps: float) -> int:
    """Optimizer steps between mask updates, by default: about 50 updates over the ramp, or over the run where the
    schedule does not say where it begins and ends."""
    begin, end = getattr(schedule, "begin", 0), getattr(schedule, "end", None)
    length = steps if end is None else end - begin
    return max(1, int(length) // UPDATES) if length != float("inf") else 100


def shape_named(schedule: str | Callable[..., Schedule]) -> Callable[..., Schedule]:
    """The function that makes a ramp of this name; a function unchanged."""
    if callable(schedule):
        return schedule
    if schedule not in RAMPS:
        raise ScheduleError(
            f"There is no schedule {schedule!r}.{nearest(str(schedule), RAMPS)} Use {', '.join(map(repr, RAMPS))}, or a"
            " function that is called as schedule(sparsity, begin=..., end=...), such as secateur.cubic. A ready"
            " schedule goes into sparsity=..."
        )
    return RAMPS[schedule]


def _check_point(name: str, value: Any) -> None:
    good = not isinstance(value, bool) and isinstance(value, int | float)
    if not good or value < 0 or (isinstance(value, float) and not value <= 1):
        raise ScheduleError(
            f"{name} must be a step (an int, at least 0) or a fraction of the run (a float in [0, 1]); got {value!r}."
        )


def _step(name: str, point: float, steps: float) -> int:
    _check_point(name, point)
    if isinstance(point, int):
        return point
    if steps == float("inf") or steps < 0:
        raise ScheduleError(
            f"{name}={point!r} is a fraction of the run, but the run has no known number of steps. Set its maximum"
            " number of steps, or pass begin and end as steps (ints)."
        )
    return round(point * steps)


def _warn_if_cut_short(schedule: Schedule, steps: float) -> None:
    end = getattr(schedule, "end", None)
    if end is not None and end > steps:
        logger.warning(
            "The schedule ends at step %d, and training at step %d: the model will reach sparsity %.3f, not %.3f.",
            end, steps, schedule(int(steps)), schedule(end),
        )  # fmt: skip
