"""`prune`: make a trained model sparse from a few batches of data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import PatternError, ScheduleError
from secateur.model.distributed import told_to_all
from secateur.model.prunable import Globs, unfit_for
from secateur.oneshot.batches import Batch, Loss
from secateur.oneshot.calibration import Subject, scope_for, undone_on_error
from secateur.oneshot.gradients import on_host
from secateur.oneshot.reconstruct import repair, sparsegpt, sparsegpt_unfit
from secateur.report import Outcome
from secateur.schedules import cubic
from secateur.scores import Score, resolve
from secateur.selection import Select, Selection, check_choice, selector
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
    """Prune a trained model in place to exactly this sparsity, and say what was done.

    `batches` are drawn once (the first `limit`): token ids, (inputs, targets), or mappings a Hugging Face model takes.
    `loss(model, batch)` replaces the usual one. `score` is any registered score; those that read Adam's moments are fed
    with means over the batches of gradients and their squares, `wanda` with norms of inputs. `scope` defaults to that
    of the score's paper: rows for wanda (the whole model in convolutional networks), layers for magnitude, otherwise
    the whole model. Positions that an attention mask marks as padding are no inputs. With `rounds`, sparsity rises
    along a cubic and everything is measured anew in between. `reconstruct=True` repairs the surviving weights at the
    end, "every" after every round, so that the next round measures the repaired ones. `method="sparsegpt"` is SparseGPT
    itself, which chooses by its own rule. On a GPU a model in fp32 is measured in bf16 (autocast), unless `loss` is
    given. `memory` ("24GB") limits what the GPU holds in all, weights included. A model on the host is streamed to
    `device` block by block, if that is another. The report has the masks (`report.masks`). Ranks of a model in
    DistributedDataParallel or fully_shard, and those of the default group with `distributed=True`, share the batches:
    every rank is given all of them and gets the masks that one process would.

    Any error, and Ctrl-C, leaves the model as it was, to the bit. For that the host keeps the weights that are pruned,
    or, with `reconstruct` or "sparsegpt", a copy of all prunable weights.
    """
    with told_to_all(model, distributed):
        shape, chosen = parse_pattern(pattern), resolve(score)
        _check(rounds, reconstruct, method, scope is None and allocation is None)
        if method is None:
            check_choice(sparsity, scope or "model", shape, allocation)
    settings: dict[str, Any] = {
        "loss": loss, "skip": skip, "only": only, "limit": limit, "memory": memory, "device": device,
        "progress": progress, "swift": True, "distributed": distributed,
        "unfit": sparsegpt_unfit(shape) if method == SPARSEGPT else unfit_for(shape),
    }  # fmt: skip
    if method == SPARSEGPT:
        with undone_on_error() as undo, Subject(model, batches, **settings) as subject:
            undo.append(subject.undoing(_on_host(subject)))
            return _by_sparsegpt(subject, sparsity, shape)
    with undone_on_error() as undo, Subject(model, batches, **settings) as subject:
        scope = scope_for(chosen, scope, shape, allocation, subject.sites)
        wanted, select = selector(scope, shape, allocation, sparsity)
        how = f"{rounds} round{'s' if rounds > 1 else ''}" + (f", repaired ({reconstruct})" if reconstruct else "")
        dense = _on_host(subject) if reconstruct else None
        undo.append(subject.undoing(dense))
        _in_rounds(subject, chosen, select, wanted, rounds, reconstruct, dense or {})
        return subject.outcome(
            score=str(chosen), schedule=how, scope=scope, pattern=pattern, allocation=allocation, asked=wanted
        )


def _on_host(subject: Subject) -> dict[str, Tensor]:
    """A copy of the dense weights on the host."""
    return {site.name: on_host(site.parameter.detach()) for site in subject.sites}


def _check(rounds: int, reconstruct: bool | str, method: str | None, plain: bool) -> None:
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ScheduleError(f"rounds is how many times to measure and select, at least 1; got {rounds!r}.")
    if reconstruct not in (False, True, "every"):
        raise ScheduleError(f"reconstruct is False, True or 'every', not {reconstruct!r}.")
    if method not in (None, SPARSEGPT):
        raise PatternError(f"No method {method!r}. Use {SPARSEGPT!r}, or None and a score.")
    if method == SPARSEGPT and not (plain and rounds == 1 and reconstruct is False):
        raise PatternError(f"{SPARSEGPT!r} has its own scope, rounds and repair. Leave those settings out.")


def _in_rounds(
    subject: Subject,
    score: Score,
    select: Select,
    wanted: float,
    rounds: int,
    reconstruct: bool | str,
    dense: Mapping[str, Tensor],
) -> None:
    """Measure, select, apply and perhaps repair, so many times."""
    ramp = cubic(wanted, begin=0, end=rounds)
    for number in range(1, rounds + 1):
        facts = subject.facts(score)
        began = time.perf_counter()
        with subject.stages.stage("selection"), torch.no_grad():
            asked = wanted if number == rounds else ramp(number)
            picked = select(subject.targets(score, facts, asked, select.together), asked, subject.held.packed)
        del facts
        subject.take(picked, asked, time.perf_counter() - began)
        if reconstruct == "every" or (reconstruct and number == rounds):
            repair(subject, dense)


def _by_sparsegpt(subject: Subject, sparsity: float | None, pattern: Pattern | None) -> Outcome:
    wanted = check_choice(sparsity, "layer", pattern, None)
    if pattern is not None and pattern.kept is None:
        raise PatternError(f"{SPARSEGPT!r} knows n:m patterns, not {pattern.text!r}.")
    began = time.perf_counter()
    masks = sparsegpt(subject, wanted, pattern)
    masks = [to_bits(mask) for mask in masks] if subject.held.packed else masks
    subject.take(Selection(masks, [None] * len(masks)), wanted, time.perf_counter() - began)
    text = None if pattern is None else pattern.text
    return subject.outcome(score=SPARSEGPT, schedule="1 round", scope="layer", pattern=text, asked=wanted)
