"""`probe_until`: probe at rising levels until quality falls past a limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from secateur.errors import ScheduleError
from secateur.model.distributed import told_to_all
from secateur.model.prunable import Globs
from secateur.oneshot.batches import Batch, Loss
from secateur.oneshot.probe import Metric, Wardrobe, alone, check_probe, share_gone
from secateur.oneshot.subject import Subject, scope_for, undone_on_error
from secateur.oneshot.veto import Probe, Trial
from secateur.registry import Score, resolve
from secateur.report import Outcome
from secateur.selection import check_choice, selector

TRIES = 7  # tolerances that are tried when a level fails: none, then ever closer to the largest that will do
PLATEAU = 2  # levels in a row that may prune nothing more
LEAST_RISE = 1e-4  # of sparsity, for a level to count as having pruned something
HIGHEST = 0.99


def probe_until(
    model: nn.Module,
    batches: Iterable[Batch] | Tensor,
    evaluate: Metric,
    *,
    start: float = 0.1,
    step: float = 0.1,
    max_drop: float = 1.0,
    tune: bool | str = True,
    tolerance: float = 0.0,
    score: str | Callable[..., Tensor] | Score = "wanda",
    shrink: float = 0.1,
    order: str = "joint",
    group: int | str = 1,
    refresh: bool = False,
    scope: str | None = None,
    loss: Loss | None = None,
    skip: Globs = (),
    only: Globs | None = None,
    limit: int | None = None,
    memory: str | int | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    distributed: bool | None = None,
) -> Outcome:
    """Probe at `start`, then at `step` more, and so on, while `evaluate(model)` (higher is better, on data that is not
    among the batches) is at most `max_drop` below what it was.

    A level that falls further is tried again with smaller tolerances (`tune`; "both" goes back one level further and
    repeats that one too); if none will do, the model is as after the last good level, dense if there was none. The
    search also ends when `PLATEAU` levels in a row prune nothing more. The report lists every level. `distributed` is
    as in `prune`; what `evaluate` says on the first rank decides.
    """
    with told_to_all(model, distributed):
        check_probe(order, group, shrink, tolerance, exact=False)
        if not (0 < start < 1 and step > 0 and max_drop >= 0):
            raise ScheduleError(
                f"Need 0 < start < 1, step > 0 and max_drop >= 0; got {start!r}, {step!r}, {max_drop!r}."
            )
        if tune not in (False, True, "both"):
            raise ScheduleError(f"tune is False, True or 'both', not {tune!r}.")
        chosen = resolve(score)
        check_choice(start, scope or "model", None, None)
    with undone_on_error() as undo, Subject(
        model, batches, loss=loss, skip=skip, only=only, limit=limit, memory=memory, device=device, progress=progress,
        distributed=distributed,
    ) as subject:  # fmt: skip
        scope = scope_for(chosen, scope, None, None, subject.sites)
        _, select = selector(scope, None, None, start)
        work = Probe(subject, chosen, select, shrink=shrink, order=order, group=group)
        search = _Search(work, Wardrobe(subject), evaluate, max_drop, tune, refresh)
        undo.append(search.wardrobe.take_off)
        search.run(start, step, tolerance)
        found = [*search.history, alone(work, search.wardrobe, "", evaluate, refresh)]
        how = f"{order} probes from {start:g} by {step:g}, shrink {shrink:g}, tolerance {tolerance:g}"
        return subject.outcome(score=str(chosen), schedule=how, scope=scope, asked=search.asked, found=tuple(found))


@dataclass
class _Search:
    """Levels gone through so far. `good` are the masks after each level that was accepted, dense first."""

    work: Probe
    wardrobe: Wardrobe
    evaluate: Metric
    max_drop: float
    tune: bool | str
    refresh: bool
    asked: float = 0.0
    history: list[tuple[str, float]] = field(default_factory=list)
    good: list[list[Tensor]] = field(default_factory=list)
    levels: list[float] = field(default_factory=list)

    def run(self, start: float, step: float, tolerance: float) -> None:
        subject = self.work.subject
        initial = subject.judge(self.evaluate)
        if not math.isfinite(initial):
            raise ScheduleError(f"evaluate(model) gave {initial} before anything was pruned: nothing can be compared.")
        self.history.append(("dense", initial))
        self.good.append(self._masks())
        flat, number = 0, 0
        while (level := min(HIGHEST, start + number * step)) and flat < PLATEAU:
            began, before = time.perf_counter(), subject.sparsity
            trials = self.work.level(level, tolerance, self.refresh)
            figure = self._measure(level, tolerance)
            if not initial - figure <= self.max_drop:  # NaN is a failure too
                better = self._tuned(level, tolerance, trials, initial)
                if better is None:
                    self._wear(self.good[-1])
                    self.history.append((f"back to sparsity {subject.sparsity:.4f}", subject.judge(self.evaluate)))
                    return
                tolerance = better
            self.good = [*self.good[-1:], self._masks()]
            self.levels.append(level)
            self.asked = level
            subject.record(level, time.perf_counter() - began)
            flat = 0 if subject.sparsity > before + LEAST_RISE else flat + 1
            number += 1
            if level == HIGHEST:
                return

    def _masks(self) -> list[Tensor]:
        return [mask.clone() for mask in self.work.subject.held.masks]

    def _wear(self, masks: list[Tensor]) -> None:
        """Hold these masks over the dense weights."""
        self.wardrobe.put_on(None)
        self.work.wear(masks)

    def _measure(self, level: float, tolerance: float) -> float:
        figure = self.work.subject.judge(self.evaluate)
        name = f"level {level:.3g}, tolerance {tolerance:.4g}, sparsity {self.work.subject.sparsity:.4f}"
        self.history.append((name, figure))
        return figure

    def _tuned(self, level: float, tolerance: float, trials: list[Trial], initial: float) -> float | None:
        """The largest tolerance found, below the one that failed, at which the level holds; it is then in force."""
        if not self.tune or tolerance == 0:
            return None
        last = share_gone(self.good[-1], self.work.subject)
        below, above, best = 0.0, tolerance, None
        kept: list[Tensor] = []
        for attempt in range(TRIES):
            middle = 0.0 if attempt == 0 else (below * above) ** 0.5 if below else above / 4
            self._again(level, middle, trials)
            if initial - self._measure(level, middle) <= self.max_drop:
                below = middle
                if self.work.subject.sparsity > last:
                    best, kept = middle, self._masks()
            elif middle == 0.0:
                return None
            else:
                above = middle
        if best is not None:
            self._wear(kept)
        return best

    def _again(self, level: float, tolerance: float, trials: list[Trial]) -> None:
        """The level once more from the last good masks, or, tuning both, from those before them."""
        both = self.tune == "both" and len(self.good) > 1
        self._wear(self.good[0] if both else self.good[-1])
        if both:
            self.work.level(self.levels[-1], tolerance, self.refresh)
        if trials and not both:
            self.work.hold((trial.number, trial.going(tolerance)) for trial in trials)
        else:
            self.work.level(level, tolerance, self.refresh)
