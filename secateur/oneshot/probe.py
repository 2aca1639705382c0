"""`probe`: prune what a score proposes and the gradients agree to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from secateur import kernels
from secateur.errors import PatternError, ScheduleError
from secateur.model.distributed import told_to_all
from secateur.model.prunable import Globs, unfit_for
from secateur.oneshot.batches import Batch, Loss
from secateur.oneshot.calibration import Subject, scope_for, undone_on_error
from secateur.oneshot.gradients import on_host
from secateur.oneshot.offload import fits_twice
from secateur.oneshot.veto import Probe, Trial
from secateur.report import Outcome
from secateur.scores import Score, resolve
from secateur.selection import check_choice, selector
from secateur.selection.tiles import parse_pattern

ORDERS = ("joint", "reverse", "forward", "size")
Metric = Callable[[nn.Module], float]
JUDGED = 1 << 15  # tokens (or numbers) that the loss is taken over when no other measure is given
EXACT_POOL = 1.1  # candidates for each weight that is to go, when exactly so many are to go


def mean_loss(subject: Subject) -> float:
    """The loss over the first of the subject's own batches: something to compare masks by, no measure of quality."""
    losses = subject.losses(JUDGED)
    return sum(losses) / len(losses)


class Wardrobe:
    """The dense weights, kept where there is room, so that a model can be looked at in other masks and be as it was
    again."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        weights = [site.parameter.detach() for site in subject.sites]
        keep = torch.clone if fits_twice(weights, subject.memory) else on_host
        with subject.stages.stage("a copy of the weights"):
            self._dense = [keep(weight) for weight in weights]

    @torch.no_grad()
    def put_on(self, masks: Sequence[Tensor] | None) -> None:
        """The dense weights, in these flat masks if any, for good."""
        weights = [site.parameter.detach() for site in self._subject.sites]
        for weight, dense in zip(weights, self._dense, strict=True):
            weight.copy_(dense, non_blocking=True)
        if masks is not None:
            bits = [m if m.dtype != torch.bool else m.view(w.shape) for m, w in zip(masks, weights, strict=True)]
            kernels.zero(weights, bits)

    @contextmanager
    def wearing(self, masks: Sequence[Tensor] | None) -> Iterator[None]:
        """The dense weights in these masks; afterwards, in those the subject holds."""
        try:
            self.put_on(masks)
            yield
        finally:
            self.put_on(self._subject.held.masks)

    def take_off(self) -> None:
        """The dense weights again."""
        self.put_on(None)


def alone(work: Probe, wardrobe: Wardrobe, what: str, metric: Metric, anew: bool = False) -> tuple[str, float]:
    """The score without the veto at the sparsity that was achieved with it: what it is named, and its figure. `anew`
    reads the dense model again, where facts are of a pruned one by now."""
    subject = work.subject
    with wardrobe.wearing(None):
        masks = work.kept_at(subject.sparsity, refresh=anew, anew=True)
    with wardrobe.wearing(masks):
        name = f"{what}{work.score.name} alone at sparsity {share_gone(masks, subject):.4f}"
        return name, subject.judge(metric)


def share_gone(masks: Sequence[Tensor], subject: Subject) -> float:
    """The sparsity of some masks of a subject's sites."""
    return 1 - sum(kernels.population(masks)) / sum(shape.numel() for shape in subject.held.shapes)


def probe(
    model: nn.Module,
    batches: Iterable[Batch] | Tensor,
    *,
    score: str | Callable[..., Tensor] | Score = "wanda",
    sparsity: float | None = 0.5,
    shrink: float = 0.1,
    tolerance: float = 0.0,
    order: str = "joint",
    exact: bool = False,
    group: int | str = 1,
    refresh: bool = False,
    scope: str | None = None,
    pattern: str | None = None,
    allocation: str | None = None,
    tolerances: Sequence[float] = (),
    evaluate: Metric | None = None,
    loss: Loss | None = None,
    skip: Globs = (),
    only: Globs | None = None,
    limit: int | None = None,
    memory: str | int | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    distributed: bool | None = None,
) -> Outcome:
    """Prune what a score proposes and the gradients agree to (GradProbe).

    The score's candidates at `sparsity` are multiplied by `shrink`; one whose largest gradient over the batches grew by
    more than `tolerance` is left as it was, to the bit, the others are pruned. `order` is "joint" (all layers at once:
    two passes over the batches) or layer after layer, "reverse", "forward" or largest first ("size"), `group` layers at
    a time or "block" by block, gradients measured anew for each; candidates come from one look at the dense model
    unless `refresh`. With `exact`, a tenth more candidates are tried, and those whose score times the root of their
    gradient's growth is lowest go until the asked sparsity is met. The report sets the score alone beside it, at the
    sparsity that was achieved, by `evaluate(model)` or else by the loss over the batches; `tolerances` are tried on the
    gradients of a joint probe and reported too. `distributed` is as in `prune`; what `evaluate` says on the first rank
    counts. Any error, and Ctrl-C, leaves the model as it was, to the bit.
    """
    with told_to_all(model, distributed):
        check_probe(order, group, shrink, tolerance, exact)
        chosen, shape = resolve(score), parse_pattern(pattern)
        check_choice(sparsity, scope or "model", shape, allocation)
        if shape is not None and not exact:
            raise PatternError(
                "The veto lets single weights go, which breaks a pattern: pass exact=True, or no pattern."
            )
        if tolerances and order != "joint":
            raise PatternError("tolerances are tried on the gradients of one joint probe; use order='joint'.")
    with undone_on_error() as undo, Subject(
        model, batches, loss=loss, skip=skip, only=only, limit=limit, memory=memory, device=device, progress=progress,
        unfit=unfit_for(shape), distributed=distributed,
    ) as subject:  # fmt: skip
        scope = scope_for(chosen, scope, shape, allocation, subject.sites)
        if exact and order != "joint" and scope == "model":
            raise PatternError('exact=True layer by layer needs a sparsity for each layer: scope="layer" or "row".')
        wanted, select = selector(scope, shape, allocation, sparsity)
        work = Probe(subject, chosen, select, shrink=shrink, order=order, group=group)
        pool = min(0.999, EXACT_POOL * wanted) if exact else wanted
        wardrobe = Wardrobe(subject)
        undo.append(wardrobe.take_off)
        found = _judged(work, wardrobe, evaluate, tolerances, refresh, pool, tolerance, wanted if exact else None)
        return subject.outcome(
            score=str(chosen), schedule=f"{order} probe, shrink {shrink:g}, tolerance {tolerance:g}", scope=scope,
            pattern=pattern, allocation=allocation, asked=wanted, found=tuple(found),
        )  # fmt: skip


def _judged(
    work: Probe,
    wardrobe: Wardrobe,
    evaluate: Metric | None,
    tolerances: Sequence[float],
    refresh: bool,
    pool: float,
    tolerance: float,
    exactly: float | None,
) -> list[tuple[str, float]]:
    """Probe, and say how the model does before and after, in the score's own masks, and at other tolerances."""
    subject = work.subject
    metric = evaluate or (lambda _: mean_loss(subject))
    what = "" if evaluate else "loss on the first batches, "
    found = [(f"{what}before", subject.judge(metric))]
    began = time.perf_counter()
    trials = work.level(pool, tolerance, refresh, exactly)
    subject.record(pool, time.perf_counter() - began)
    found.append((f"{what}after", subject.judge(metric)))
    found.append(alone(work, wardrobe, what, metric, refresh))
    for other in tolerances:
        worn = [work.without(trial, other) for trial in trials]
        with wardrobe.wearing(worn):
            gone = share_gone(worn, subject)
            found.append((f"{what}tolerance {other:g}, sparsity {gone:.4f}", subject.judge(metric)))
    return found


def check_probe(order: str, group: int | str, shrink: float, tolerance: float, exact: bool) -> None:
    if order not in ORDERS:
        raise PatternError(f"No order {order!r}. Use one of {', '.join(map(repr, ORDERS))}.")
    if group != "block" and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise PatternError(f"group is a number of layers, at least 1, or 'block'; got {group!r}.")
    if not 0 <= shrink < 1:
        raise ScheduleError(f"shrink must be in [0, 1): candidates are multiplied by it; got {shrink!r}.")
    if not tolerance >= 0:
        raise ScheduleError(f"tolerance must be at least 0: by how much a gradient may grow; got {tolerance!r}.")
    if exact and tolerance:
        raise ScheduleError("exact=True ranks by score and growth and knows no tolerance. Leave one of them out.")


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
