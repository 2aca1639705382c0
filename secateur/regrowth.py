"""Regrowth: living weights give way, and as many that were gone come back.

By gradient that is RigL (Evci et al. 2020), by lot it is SET (Mocanu et al. 2018). One exchange is two exact selections
of the kind that prunes: scores drop the lowest of the living, past what the schedule asks; then all that is gone
competes for coming back, and all but so many lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from secateur import kernels
from secateur.errors import FactError, RegrowthError
from secateur.model.distributed import local
from secateur.model.facts import target_of
from secateur.model.prunable import Prunable
from secateur.schedules import Schedule
from secateur.scores import Score, resolve
from secateur.selection import Quota, Selection, Target, fulfil
from secateur.selection.exact import Peers
from secateur.selection.masks import inverted
from secateur.selection.tiles import Pattern

KINDS = ("gradient", "random")


@dataclass(frozen=True)
class Regrowth:
    """By what weights come back, the share of the living that gives way at first, and the step at which all is over."""

    kind: str
    drop: float
    until: int

    def share(self, step: int) -> float:
        """drop/2 (1 + cos(pi t / until)): the share of the living weights exchanged at this step, none from `until`."""
        return self.drop / 2 * (1 + math.cos(math.pi * step / self.until)) if step < self.until else 0.0

    def __str__(self) -> str:
        return f"{self.kind}(drop={self.drop}, until={self.until})"


def regrowth_for(
    kind: str | None, drop: float, until: int | None, schedule: Schedule, pattern: Pattern | None
) -> Regrowth | None:
    """The regrowth these settings mean, or an error where they make no sense together."""
    if kind is None:
        if until is not None:
            raise RegrowthError(f"until={until!r} says how long weights come back, but none do. Pass regrow=... too.")
        return None
    if kind not in KINDS:
        raise RegrowthError(f"No regrowth {kind!r}. Use one of {', '.join(map(repr, KINDS))}, or None.")
    if pattern is not None:
        raise RegrowthError(
            f"With regrow={kind!r} weights come back one by one, which would break the pattern {pattern.text!r}. Pass"
            " pattern=None; scope 'row' keeps every row at the same sparsity."
        )
    if isinstance(drop, bool) or not isinstance(drop, int | float) or not 0 < drop < 1:
        raise RegrowthError(f"drop is the share of living weights exchanged at first, in (0, 1); got {drop!r}.")
    end = getattr(schedule, "end", None) if until is None else until
    if end is None:
        raise RegrowthError(
            f"The schedule {schedule} has no end, so regrowth needs one: pass until=..., the optimizer step after which"
            " no weight comes back (RigL takes three quarters of the training)."
        )
    if isinstance(end, bool) or not isinstance(end, int) or end < 1:
        raise RegrowthError(f"until is a number of optimizer steps, at least 1; got {end!r}.")
    return Regrowth(kind, float(drop), end)


def exchange(
    regrowth: Regrowth,
    step: int,
    sites: Sequence[Prunable],
    targets: Sequence[Target],
    quota: Quota,
    peers: Peers,
    packed: bool,
) -> Selection:
    """Masks that meet the quota, after a share of the living has given way to as many of the gone.

    Going to the quota and past it by the same scores is one selection. What has just been dropped may come back; then
    it was never away, and keeps its value.
    """
    share = regrowth.share(step)
    moved = [round(share * (size - gone)) for size, gone in zip(quota.sizes, quota.gone, strict=True)]
    lower = replace(quota, gone=[gone + count for gone, count in zip(quota.gone, moved, strict=True)])
    left = fulfil(targets, lower, peers, packed)
    all_but = replace(quota, gone=[size - count for size, count in zip(quota.sizes, moved, strict=True)])
    back = fulfil(candidates(regrowth, step, sites, left, peers), all_but, peers, packed)
    for mask, more in zip(left.masks, back.masks, strict=True):
        mask.bitwise_or_(more)
    kept = None
    if left.kept is not None and back.kept is not None:
        kept = [stayed + came for stayed, came in zip(left.kept, back.kept, strict=True)]
    return Selection(left.masks, left.cuts, kept)


def candidates(regrowth: Regrowth, step: int, sites: Sequence[Prunable], left: Selection, peers: Peers) -> list[Target]:
    """The sites as a selection sees them in which what `left` keeps is dead and what is gone competes."""
    by_gradient = regrowth.kind == "gradient"
    check_gradients(regrowth, sites, peers, zeros_count=False)
    score = resolve("magnitude") if by_gradient else lot(step)
    kept = kernels.population(left.masks) if left.kept is None else left.kept
    found = []
    for site, mask, living in zip(sites, left.masks, kept, strict=True):
        facts: dict[str, Any] = {"weight": _gradient(site)} if by_gradient else {"index": None}
        gone = inverted(mask, local(site.parameter.detach()).numel())
        found.append(target_of(site, score, facts, gone, living, peers))
    return found


def lot(step: int) -> Score:
    """Score `random` with a seed of this step's own. It is negative: those from zero on are for scores users choose."""
    return replace(resolve("random"), options={"seed": -1 - step})


def _gradient(site: Prunable) -> Tensor:
    """This process's part of the gradient as it is now; zeros for a tensor the loss did not reach."""
    if site.parameter.grad is not None:
        return local(site.parameter.grad)
    part = local(site.parameter.detach())
    return torch.zeros((), dtype=torch.float32, device=part.device).expand(part.shape)


def check_gradients(regrowth: Regrowth | None, sites: Sequence[Prunable], peers: Peers, zeros_count: bool) -> None:
    """Raise where gradients are needed and no site has one; `zero_grad(set_to_none=False)` leaves zeros behind."""
    if regrowth is None or regrowth.kind != "gradient":
        return
    gradients = (local(site.parameter.grad) for site in sites if site.parameter.grad is not None)
    here = any(zeros_count or bool(gradient.any()) for gradient in gradients)
    if peers.totals([int(here)])[0] == 0:
        raise FactError(
            "regrow='gradient' reads parameter.grad inside pruner.step(), and no prunable tensor has a gradient there."
            " Call pruner.step() after optimizer.step() and before optimizer.zero_grad(), or use regrow='random'."
        )
