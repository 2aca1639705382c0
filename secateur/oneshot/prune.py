"""`prune`: make a trained model sparse from a few batches of data; and the named recipes for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from secateur.errors import PatternError, ScheduleError
from secateur.model.distributed import told_to_all
from secateur.model.prunable import Globs, unfit_for
from secateur.oneshot.batches import Batch, Loss, restore_on_error
from secateur.oneshot.calibration import CalibratedModel, CalibrationSettings, scope_for
from secateur.oneshot.gradients import on_host
from secateur.oneshot.reconstruct import reconstruct_weights, sparsegpt, sparsegpt_unfit
from secateur.report import Outcome
from secateur.schedules import cubic
from secateur.scores import Score, resolve
from secateur.selection import Select, Selection, check_choice
from secateur.selection.masks import to_bits
from secateur.selection.tiles import Pattern, parse_pattern

SPARSEGPT = "sparsegpt"


def prune(
    model: nn.Module,
    batches: Iterable[Batch] | Tensor,
    *,
    score: str | Callable[..., Tensor] | Score = "variance",
    sparsity: float | None = 0.5,
    scope: str | None = None,
    pattern: str | None = None,
    allocation: str | None = None,
    rounds: int = 1,
    reconstruct: bool | str = False,
    loss: Loss | None = None,
    skip: Globs = (),
    only: Globs | None = None,
    method: str | None = None,
    limit: int | None = None,
    memory: str | int | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    distributed: bool | None = None,
) -> Outcome:
    """Prune a trained model in place to exactly this sparsity, and return a report with the masks (`report.masks`).

    Any error, also Ctrl-C, leaves the model as it was, to the bit. For that the host keeps the pruned values, or, with
    `reconstruct` or "sparsegpt", a copy of all prunable weights.

    Args:
        batches: token ids, (inputs, targets), or mappings for a Hugging Face model; read once, the first `limit`.
            Positions that an attention mask marks as padding do not count as inputs.
        score: any registered score. Scores that read Adam's moments get means of gradients and their squares over the
            batches; `wanda` gets norms of inputs.
        scope: by default that of the score's paper: rows for wanda (the whole model in convolutional networks), layers
            for magnitude, otherwise the whole model.
        rounds: how many rounds the sparsity rises in, along a cubic; every round measures anew.
        reconstruct: True reconstructs the surviving weights at the end, "every" after every round, so that the next
            round measures reconstructed weights.
        loss: `loss(model, batch)` instead of the default. Without it, an fp32 model on a GPU is measured in bf16
            (autocast).
        method: "sparsegpt" runs SparseGPT, which chooses masks and weights together, instead of a score.
        memory: limit of CUDA memory in all, weights included, such as "24GB".
        device: any torch device. A model on another one is streamed to it block by block.
        distributed: ranks of a model in DistributedDataParallel or fully_shard, and those of the default group with
            True, share the batches. Pass all batches to every rank; the masks are those of one process.
    """
    settings = CalibrationSettings(
        loss=loss, skip=skip, only=only, limit=limit, memory=memory, device=device, progress=progress,
        distributed=distributed, autocast=True,
    )  # fmt: skip
    with told_to_all(model, distributed):
        shape = parse_pattern(pattern)
        job = _Job(
            score=resolve(score), sparsity=sparsity, scope=scope, pattern=shape, allocation=allocation, rounds=rounds,
            reconstruct=reconstruct, method=method,
        )  # fmt: skip
        job.check()
    work = _by_score if method is None else _by_sparsegpt
    return work(model, batches, job, settings)


@dataclass(frozen=True)
class _Job:
    """The arguments of `prune` that say what to prune."""

    score: Score
    sparsity: float | None
    scope: str | None
    pattern: Pattern | None
    allocation: str | None
    rounds: int
    reconstruct: bool | str
    method: str | None

    def check(self) -> None:
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int) or self.rounds < 1:
            raise ScheduleError(f"rounds is how many times to measure and select, at least 1; got {self.rounds!r}.")
        if self.reconstruct not in (False, True, "every"):
            raise ScheduleError(f"reconstruct is False, True or 'every', not {self.reconstruct!r}.")
        if self.method not in (None, SPARSEGPT):
            raise PatternError(f"No method {self.method!r}. Use {SPARSEGPT!r}, or None and a score.")
        if self.method is None:
            check_choice(self.sparsity, self.scope or "model", self.pattern, self.allocation)
        elif self.scope is not None or self.allocation is not None or self.rounds != 1 or self.reconstruct:
            raise PatternError(f"{SPARSEGPT!r} has its own scope, rounds and reconstruction. Leave those settings out.")

    @property
    def schedule(self) -> str:
        """The rounds as the report names them."""
        rounds = f"{self.rounds} round{'s' if self.rounds > 1 else ''}"
        return rounds + (f", reconstructed ({self.reconstruct})" if self.reconstruct else "")


def _by_score(model: nn.Module, batches: Iterable[Batch] | Tensor, job: _Job, settings: CalibrationSettings) -> Outcome:
    settings = replace(settings, unfit=unfit_for(job.pattern))
    with restore_on_error(model) as undo, CalibratedModel(model, batches, settings) as calibrated:
        scope = scope_for(job.score, job.scope, job.pattern, job.allocation, calibrated.prunables)
        sparsity = check_choice(job.sparsity, scope, job.pattern, job.allocation)
        dense = _dense_copy(calibrated) if job.reconstruct else None
        undo.append(calibrated.undo(dense))
        _run_rounds(calibrated, job, Select(scope, job.pattern, job.allocation), sparsity, dense or {})
        return calibrated.outcome(
            score=str(job.score), schedule=job.schedule, scope=scope, allocation=job.allocation, asked=sparsity,
            pattern=None if job.pattern is None else job.pattern.text,
        )  # fmt: skip


def _dense_copy(calibrated: CalibratedModel) -> dict[str, Tensor]:
    """Host copies of the prunable weights by name."""
    return {prunable.name: on_host(prunable.parameter.detach()) for prunable in calibrated.prunables}


def _run_rounds(
    calibrated: CalibratedModel, job: _Job, select: Select, sparsity: float, dense: Mapping[str, Tensor]
) -> None:
    """Measure, select, apply and perhaps reconstruct, in every round."""
    ramp = cubic(sparsity, begin=0, end=job.rounds)
    for number in range(1, job.rounds + 1):
        facts = calibrated.facts(job.score, soften=True)
        began = time.perf_counter()
        with calibrated.stages.stage("selection"), torch.no_grad():
            asked = sparsity if number == job.rounds else ramp(number)
            targets = calibrated.targets(job.score, facts, asked)
            chosen = select(targets, asked, calibrated.held.packed)
        del facts, targets
        calibrated.set_masks(chosen, asked, time.perf_counter() - began)
        if job.reconstruct == "every" or (job.reconstruct and number == job.rounds):
            reconstruct_weights(calibrated, dense)


def _by_sparsegpt(
    model: nn.Module, batches: Iterable[Batch] | Tensor, job: _Job, settings: CalibrationSettings
) -> Outcome:
    settings = replace(settings, unfit=sparsegpt_unfit(job.pattern))
    with restore_on_error(model) as undo, CalibratedModel(model, batches, settings) as calibrated:
        undo.append(calibrated.undo(_dense_copy(calibrated)))
        sparsity = check_choice(job.sparsity, "layer", job.pattern, None)
        if job.pattern is not None and job.pattern.kept is None:
            raise PatternError(f"{SPARSEGPT!r} supports n:m patterns, not {job.pattern.text!r}.")
        began = time.perf_counter()
        masks = sparsegpt(calibrated, sparsity, job.pattern)
        masks = [to_bits(mask) for mask in masks] if calibrated.held.packed else masks
        calibrated.set_masks(Selection(masks, [None] * len(masks)), sparsity, time.perf_counter() - began)
        text = None if job.pattern is None else job.pattern.text
        return calibrated.outcome(score=SPARSEGPT, schedule="1 round", scope="layer", pattern=text, asked=sparsity)
