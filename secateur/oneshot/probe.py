"""`probe` and `probe_until` (GradProbe): prune the candidates of a score that pass a veto by gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur import kernels
from secateur.errors import PatternError, ScheduleError
from secateur.model.distributed import told_to_all
from secateur.model.prunable import Globs, unfit_for
from secateur.oneshot.batches import Batch, Loss, restore_on_error
from secateur.oneshot.calibration import CalibratedModel, CalibrationSettings, scope_for
from secateur.oneshot.gradients import on_host
from secateur.oneshot.offload import fits_copy
from secateur.oneshot.veto import Probe, Trial
from secateur.report import Outcome
from secateur.scores import Score, resolve
from secateur.selection import Select, check_choice
from secateur.selection.tiles import Pattern, parse_pattern

ORDERS = ("joint", "reverse", "forward", "size")
Metric = Callable[[nn.Module], float]
LOSS_ELEMENTS = 1 << 15  # input elements (tokens) of the batches that the default metric is computed on
EXACT_POOL = 1.1  # candidates per weight to prune, with exact=True
MAX_POOL = 0.999  # sparsity
TRIES = 7  # tolerances tried when a level fails: 0 first, then a bisection for the largest that holds
PLATEAU = 2  # consecutive levels that may prune nothing more
MIN_RISE = 1e-4  # of sparsity, for a level to count as having pruned something


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
    """Prune the candidates of a score whose gradients do not grow when they shrink (GradProbe).

    The score's candidates at `sparsity` are multiplied by `shrink`. A candidate whose largest gradient over the batches
    grows by more than `tolerance` is kept, unchanged to the bit; the others are pruned. Any error, also Ctrl-C, leaves
    the model as it was, to the bit. Arguments that are not listed are those of `prune`.

    Args:
        order: "joint" probes all layers at once, with two passes over the batches. "reverse", "forward" and "size"
            (largest first) probe layer by layer, `group` layers at a time or "block" by block, with new gradients each.
        refresh: choose candidates anew for every group, not once from the dense model.
        exact: try a tenth more candidates and prune those with the lowest score times the root of the growth of their
            gradient, until the sparsity is met.
        evaluate: `evaluate(model)`, called in evaluation mode, compares the result with the score alone at the same
            sparsity in the report; the default is the loss of the first calibration batches, which the veto lowers
            even where it makes the model worse (a note says so): pass a metric of held-out data. On several ranks the
            first one's value counts.
        tolerances: further tolerances to report, from the gradients of a joint probe.
    """
    settings = CalibrationSettings(
        loss=loss, skip=skip, only=only, limit=limit, memory=memory, device=device, progress=progress,
        distributed=distributed,
    )  # fmt: skip
    with told_to_all(model, distributed):
        job = Job(
            score=resolve(score), scope=scope, shrink=shrink, tolerance=tolerance, order=order, group=group,
            refresh=refresh, pattern=parse_pattern(pattern), allocation=allocation,
        )  # fmt: skip
        job.check(exact, tolerances)
        if refresh and order == "joint":
            raise PatternError(
                "A joint probe chooses its candidates once: refresh has no effect. Leave it out, or use"
                " order='reverse', 'forward' or 'size'."
            )
        check_choice(sparsity, scope or "model", job.pattern, allocation)
        if evaluate is not None:
            check_metric(evaluate)
    return _probe(model, batches, job, settings, _Target(sparsity, exact, tolerances, evaluate))


def check_number(name: str, value: Any, fits: Callable[[Any], bool], wanted: str) -> None:
    """Refuse an argument that is no number, or none that fits."""
    try:
        fitting = bool(fits(value))
    except TypeError:
        fitting = False
    if not fitting:
        raise ScheduleError(f"{name} must be {wanted}; got {value!r}.")


def check_metric(evaluate: object) -> None:
    """Refuse a metric that cannot be called."""
    if not callable(evaluate):
        raise ScheduleError(f"evaluate must be a function of the model that returns a number; got {evaluate!r}.")


@dataclass(frozen=True)
class Job:
    """The arguments of `probe` and `probe_until` that say how to probe."""

    score: Score
    scope: str | None
    shrink: float
    tolerance: float
    order: str
    group: int | str
    refresh: bool
    pattern: Pattern | None = None
    allocation: str | None = None

    def check(self, exact: bool = False, tolerances: Sequence[float] = ()) -> None:
        if self.order not in ORDERS:
            raise PatternError(f"No order {self.order!r}. Use one of {', '.join(map(repr, ORDERS))}.")
        group = self.group
        if group != "block" and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
            raise PatternError(f"group is a number of layers, at least 1, or 'block'; got {group!r}.")
        check_number("shrink", self.shrink, lambda x: 0 <= x < 1, "in [0, 1): candidates are multiplied by it")
        check_number("tolerance", self.tolerance, lambda x: x >= 0, "at least 0: how much a gradient may grow")
        if isinstance(tolerances, str) or not isinstance(tolerances, Sequence):
            raise ScheduleError(f"tolerances must be several numbers, such as (0, 0.5); got {tolerances!r}.")
        if exact and (self.tolerance or tolerances):
            raise ScheduleError("exact=True ranks by score and growth without a tolerance. Leave one of them out.")
        for other in tolerances:
            check_number("tolerances", other, lambda x: x >= 0, "at least 0, all of them")
        if self.pattern is not None and not exact:
            raise PatternError("The veto keeps single weights, which breaks a pattern: pass exact=True, or no pattern.")
        if tolerances and self.order != "joint":
            raise PatternError("tolerances are tried on the gradients of one joint probe; use order='joint'.")
        if self.order == "joint" and group != 1:
            raise PatternError(
                f"A joint probe takes all layers at once: group={group!r} has no effect. Leave it out, or use"
                " order='reverse', 'forward' or 'size'."
            )


@dataclass(frozen=True)
class _Target:
    """The arguments of `probe` alone: the sparsity to reach, and what to report."""

    sparsity: float | None
    exact: bool
    tolerances: Sequence[float]
    evaluate: Metric | None


def _probe(
    model: nn.Module, batches: Iterable[Batch] | Tensor, job: Job, settings: CalibrationSettings, target: _Target
) -> Outcome:
    settings = replace(settings, unfit=unfit_for(job.pattern))
    with restore_on_error(model) as undo, CalibratedModel(model, batches, settings) as calibrated:
        scope = scope_for(job.score, job.scope, job.pattern, job.allocation, calibrated.prunables)
        if target.exact and job.order != "joint" and scope == "model":
            raise PatternError('exact=True layer by layer needs a sparsity for each layer: scope="layer" or "row".')
        sparsity = check_choice(target.sparsity, scope, job.pattern, job.allocation)
        select = Select(scope, job.pattern, job.allocation)
        prober = Probe(calibrated, job.score, select, shrink=job.shrink, order=job.order, group=job.group)
        snapshots = MaskSnapshots(calibrated)
        undo.append(snapshots.restore_dense)
        found = _probe_and_compare(prober, snapshots, job, target, sparsity)
        schedule = f"{job.order} probe, shrink {job.shrink:g}, tolerance {job.tolerance:g}"
        return calibrated.outcome(
            score=str(job.score), schedule=schedule, scope=scope, allocation=job.allocation, asked=sparsity,
            pattern=None if job.pattern is None else job.pattern.text, found=tuple(found),
        )  # fmt: skip


def _probe_and_compare(
    prober: Probe, snapshots: MaskSnapshots, job: Job, target: _Target, sparsity: float
) -> list[tuple[str, float]]:
    """Probe, and return the metric before, after, for the score's own masks, and at other tolerances."""
    calibrated, tolerances = prober.calibrated, target.tolerances
    metric = target.evaluate or (lambda _: mean_loss(calibrated))
    if target.evaluate is None:
        calibrated.notes["metric"] = (
            "The losses are of calibration batches, which the veto fits: they do not show how good the model is. Pass"
            " evaluate= with held-out data to compare."
        )
    prefix = "" if target.evaluate else "loss on the first batches, "
    pool = min(MAX_POOL, EXACT_POOL * sparsity) if target.exact else sparsity
    found = [(f"{prefix}before", calibrated.evaluate(metric))]
    began = time.perf_counter()
    trials = prober.level(pool, job.tolerance, job.refresh, sparsity if target.exact else None)
    calibrated.record_update(pool, time.perf_counter() - began)
    found.append((f"{prefix}after", calibrated.evaluate(metric)))
    name, value = score_alone(prober, snapshots, metric, job.refresh)
    found.append((prefix + name, value))
    for tolerance in tolerances:
        masks = [prober.mask_at(trial, tolerance) for trial in trials]
        with snapshots.applied(masks):
            sparsity_there = sparsity_of(masks, calibrated)
            name = f"{prefix}tolerance {tolerance:g}, sparsity {sparsity_there:.4f}"
            found.append((name, calibrated.evaluate(metric)))
    return found


def mean_loss(calibrated: CalibratedModel) -> float:
    """The mean loss of the first calibration batches: it compares masks, and is no measure of quality."""
    losses = calibrated.losses(LOSS_ELEMENTS)
    return sum(losses) / len(losses)


class MaskSnapshots:
    """Keeps a dense copy of the weights, on the device if it fits, to evaluate alternative masks."""

    def __init__(self, calibrated: CalibratedModel) -> None:
        self._calibrated = calibrated
        weights = [prunable.parameter.detach() for prunable in calibrated.prunables]
        copy = torch.clone if fits_copy(weights, calibrated.memory) else on_host
        with calibrated.stages.stage("a copy of the weights"):
            self._dense = [copy(weight) for weight in weights]

    @torch.no_grad()
    def apply(self, masks: Sequence[Tensor] | None) -> None:
        """Set the weights to the dense ones with these flat masks, or without masks."""
        weights = [prunable.parameter.detach() for prunable in self._calibrated.prunables]
        for weight, dense in zip(weights, self._dense, strict=True):
            weight.copy_(dense, non_blocking=True)
        if masks is not None:
            shaped = [m if m.dtype != torch.bool else m.view(w.shape) for m, w in zip(masks, weights, strict=True)]
            kernels.zero(weights, shaped)

    @contextmanager
    def applied(self, masks: Sequence[Tensor] | None) -> Iterator[None]:
        """Applies these masks temporarily; restores the current ones on exit."""
        try:
            self.apply(masks)
            yield
        finally:
            self.apply(self._calibrated.held.masks)

    def restore_dense(self) -> None:
        """Set the weights to the dense ones."""
        self.apply(None)


def score_alone(prober: Probe, snapshots: MaskSnapshots, metric: Metric, refresh: bool) -> tuple[str, float]:
    """The name and metric of the score without the veto, at the sparsity that the probe achieved.

    `refresh` gathers the facts of the dense model again, after later facts have replaced them.
    """
    calibrated = prober.calibrated
    with snapshots.applied(None):
        masks = prober.kept_at(calibrated.sparsity, refresh=refresh, anew=True)
    with snapshots.applied(masks):
        name = f"{prober.score.name} alone at sparsity {sparsity_of(masks, calibrated):.4f}"
        return name, calibrated.evaluate(metric)


def sparsity_of(masks: Sequence[Tensor], calibrated: CalibratedModel) -> float:
    """The sparsity of masks of the calibrated weights."""
    return 1 - sum(kernels.population(masks)) / sum(shape.numel() for shape in calibrated.held.shapes)


def probe_until(
    model: nn.Module,
    batches: Iterable[Batch] | Tensor,
    evaluate: Metric,
    *,
    start: float = 0.1,
    step: float = 0.1,
    end: float = 0.99,
    max_drop: float = 1.0,
    tune: bool | str | None = None,
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
    """Probe at rising sparsity while `evaluate(model)` stays within `max_drop` of the dense model.

    `evaluate` returns a metric where higher is better, on data that is not among the batches, and is called in
    evaluation mode; on several ranks the first one's value decides. The search also ends when `PLATEAU` consecutive
    levels prune nothing more. The report lists every level. Arguments that are not listed are those of `probe`.

    Args:
        start: sparsity of the first level; each further level asks for `step` more, up to `end`.
        tune: try a failed level again with smaller tolerances and keep the sparsest result that holds. "both" goes back
            one level further and repeats that one too. If none holds, the model stays as after the last good level, or
            dense. It needs a tolerance above 0, and is on by default where there is one.
    """
    settings = CalibrationSettings(
        loss=loss, skip=skip, only=only, limit=limit, memory=memory, device=device, progress=progress,
        distributed=distributed,
    )  # fmt: skip
    with told_to_all(model, distributed):
        job = Job(
            score=resolve(score), scope=scope, shrink=shrink, tolerance=tolerance, order=order, group=group,
            refresh=refresh,
        )  # fmt: skip
        job.check()
        levels = Levels(evaluate, start, step, end, max_drop, tolerance > 0 if tune is None else tune)
        levels.check(tolerance)
        check_choice(start, scope or "model", None, None)
    return _probe_levels(model, batches, job, settings, levels)


@dataclass(frozen=True)
class Levels:
    """The arguments of `probe_until` alone: the levels to try, and when one fails."""

    evaluate: Metric
    start: float
    step: float
    end: float
    max_drop: float
    tune: bool | str

    def check(self, tolerance: float) -> None:
        check_metric(self.evaluate)
        check_number("end", self.end, lambda x: 0 < x < 1, "a sparsity above 0 and below 1")
        check_number("start", self.start, lambda x: 0 < x <= self.end, f"above 0 and at most end, {self.end:g}")
        check_number("step", self.step, lambda x: x > 0, "above 0: how much each level adds")
        check_number("max_drop", self.max_drop, lambda x: x >= 0, "at least 0: how much of the metric may be lost")
        if self.tune not in (False, True, "both"):
            raise ScheduleError(f"tune is False, True or 'both', not {self.tune!r}.")
        if self.tune and tolerance == 0:
            raise ScheduleError(
                "tune tries smaller tolerances when a level fails, and there is none below 0. Pass a tolerance above 0,"
                " or leave tune out."
            )


def _probe_levels(
    model: nn.Module, batches: Iterable[Batch] | Tensor, job: Job, settings: CalibrationSettings, levels: Levels
) -> Outcome:
    with restore_on_error(model) as undo, CalibratedModel(model, batches, settings) as calibrated:
        scope = scope_for(job.score, job.scope, None, None, calibrated.prunables)
        select = Select(scope, None, None)
        prober = Probe(calibrated, job.score, select, shrink=job.shrink, order=job.order, group=job.group)
        search = _Search(prober, MaskSnapshots(calibrated), levels, job.refresh)
        undo.append(search.snapshots.restore_dense)
        search.run(job.tolerance)
        found = (*search.history, score_alone(prober, search.snapshots, levels.evaluate, job.refresh))
        schedule = (
            f"{job.order} probes from {levels.start:g} by {levels.step:g}, shrink {job.shrink:g}, tolerance"
            f" {job.tolerance:g}"
        )
        return calibrated.outcome(score=str(job.score), schedule=schedule, scope=scope, asked=search.asked, found=found)


@dataclass
class _Search:
    """The levels of `probe_until` so far. `good` holds the masks before and after the last accepted level."""

    prober: Probe
    snapshots: MaskSnapshots
    levels: Levels
    refresh: bool
    asked: float = 0.0
    history: list[tuple[str, float]] = field(default_factory=list)
    good: list[list[Tensor]] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def run(self, tolerance: float) -> None:
        calibrated, levels = self.prober.calibrated, self.levels
        dense = calibrated.evaluate(levels.evaluate)
        if not math.isfinite(dense):
            raise ScheduleError(
                f"evaluate(model) returned {dense} for the dense model: nothing can be compared with it."
            )
        self.history.append(("dense", dense))
        self.good.append(self._masks())
        flat, number = 0, 0
        while (level := min(levels.end, levels.start + number * levels.step)) and flat < PLATEAU:
            began, before = time.perf_counter(), calibrated.sparsity
            trials = self.prober.level(level, tolerance, self.refresh)
            if not dense - self._measure(level, tolerance) <= levels.max_drop:  # NaN is a failure too
                tuned = self._tune(level, tolerance, trials, dense)
                if tuned is None:
                    self._set(self.good[-1])
                    name = f"back to sparsity {calibrated.sparsity:.4f}"
                    self.history.append((name, calibrated.evaluate(levels.evaluate)))
                    return
                tolerance = tuned
            self.good = [*self.good[-1:], self._masks()]
            self.accepted.append(level)
            self.asked = level
            calibrated.record_update(level, time.perf_counter() - began)
            flat = 0 if calibrated.sparsity > before + MIN_RISE else flat + 1
            number += 1
            if level == levels.end:
                return

    def _masks(self) -> list[Tensor]:
        return [mask.clone() for mask in self.prober.calibrated.held.masks]

    def _set(self, masks: list[Tensor]) -> None:
        """Hold these masks over the dense weights."""
        self.snapshots.apply(None)
        self.prober.set_masks(masks)

    def _measure(self, level: float, tolerance: float) -> float:
        value = self.prober.calibrated.evaluate(self.levels.evaluate)
        name = f"level {level:.3g}, tolerance {tolerance:.4g}, sparsity {self.prober.calibrated.sparsity:.4f}"
        self.history.append((name, value))
        return value

    def _tune(self, level: float, tolerance: float, trials: list[Trial], dense: float) -> float | None:
        """A tolerance below the failed one: of those tried at which the level holds, the one with the most zeros, since
        layer by layer a larger tolerance may prune less. Its masks are set then."""
        if not self.levels.tune:
            return None
        sparsest = sparsity_of(self.good[-1], self.prober.calibrated)
        holds, fails, best = 0.0, tolerance, None
        kept: list[Tensor] = []
        for attempt in range(TRIES):
            middle = 0.0 if attempt == 0 else (holds * fails) ** 0.5 if holds else fails / 4
            self._retry(level, middle, trials)
            if dense - self._measure(level, middle) <= self.levels.max_drop:
                holds = middle
                if self.prober.calibrated.sparsity > sparsest:
                    best, kept, sparsest = middle, self._masks(), self.prober.calibrated.sparsity
            elif middle == 0.0:
                return None
            else:
                fails = middle
        if best is not None:
            self._set(kept)
        return best

    def _retry(self, level: float, tolerance: float, trials: list[Trial]) -> None:
        """Repeat the level from the last good masks, or with tune="both" from those before them."""
        both = self.levels.tune == "both" and len(self.good) > 1
        self._set(self.good[0] if both else self.good[-1])
        if both:
            self.prober.level(self.accepted[-1], tolerance, self.refresh)
        if trials and not both:
            self.prober.remove((trial.number, trial.agreed(tolerance)) for trial in trials)
        else:
            self.prober.level(level, tolerance, self.refresh)
