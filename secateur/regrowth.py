"""Regrowth: some kept weights are pruned, and as many pruned ones come back.

Chosen by gradient this is RigL (Evci et al. 2020), at random it is SET (Mocanu et al. 2018). One exchange is two exact
selections: the score prunes the lowest weights beyond what the schedule asks; then all pruned weights compete, and as
many of the best come back.
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
from secateur.model.facts import dense, target_of
from secateur.model.prunable import Prunable
from secateur.schedules import Schedule, whole_steps
from secateur.scores import Score, resolve
from secateur.selection import Quota, Selection, Target, fulfil
from secateur.selection.exact import Peers
from secateur.selection.masks import inverted
from secateur.selection.tiles import Pattern

KINDS = ("gradient", "random")
DROP = 0.3  # share of the kept weights exchanged at first


@dataclass(frozen=True)
class Regrowth:
    """What ranks the weights that come back, the share of kept weights exchanged at first, and the step it ends at."""

    kind: str
    drop: float
    until: int

    @property
    def by_gradient(self) -> bool:
        return self.kind == "gradient"

    def share(self, step: int) -> float:
        """The share of kept weights exchanged at step t: drop/2 (1 + cos(pi t / until)), none from `until` on."""
        return self.drop / 2 * (1 + math.cos(math.pi * step / self.until)) if step < self.until else 0.0

    def __str__(self) -> str:
        return f"{self.kind}(drop={self.drop}, until={self.until})"


def regrowth_for(
    kind: str | None, drop: float, until: int | None, schedule: Schedule, pattern: Pattern | None, given: bool = False
) -> Regrowth | None:
    """The regrowth these settings mean, or an error where they contradict each other. `given`: masks were given, whose
    zeros must stay."""
    if kind is None:
        if drop != DROP:
            raise RegrowthError(
                f"drop={drop!r} is the share of weights that regrowth exchanges, but regrow is None. Pass regrow=..."
                " too."
            )
        if until is not None:
            raise RegrowthError(
                f"until={until!r} is the last step of regrowth, but regrow is None. Pass regrow=... too."
            )
        return None
    if kind not in KINDS:
        raise RegrowthError(f"No regrowth {kind!r}. Use one of {', '.join(map(repr, KINDS))}, or None.")
    if given:
        raise RegrowthError(
            f"masks=... keeps the given weights at zero, and regrow={kind!r} brings pruned weights back. Leave one of"
            " them out; to start regrowth from saved masks, load them: load_state_dict(state, strict=False)."
        )
    if pattern is not None:
        raise RegrowthError(
            f"With regrow={kind!r} weights come back one by one, which would break the pattern {pattern.text!r}. Pass"
            " pattern=None; scope 'row' keeps every row at the same sparsity."
        )
    if isinstance(drop, bool) or not isinstance(drop, int | float) or not 0 < drop < 1:
        raise RegrowthError(f"drop must be the share of kept weights exchanged at first, in (0, 1); got {drop!r}.")
    end = getattr(schedule, "end", None) if until is None else until
    if end is None:
        raise RegrowthError(
            f"The schedule {schedule} has no end, so regrowth needs one: pass until=..., the optimizer step after which"
            " no weight comes back (RigL uses three quarters of training)."
        )
    last = whole_steps(end)
    if last is None or last < 1:
        raise RegrowthError(f"until must be a number of optimizer steps, at least 1; got {end!r}.")
    return Regrowth(kind, float(drop), last)


def exchange(
    regrowth: Regrowth,
    step: int,
    prunables: Sequence[Prunable],
    targets: Sequence[Target],
    quota: Quota,
    peers: Peers,
    packed: bool,
) -> Selection:
    """Masks that meet the quota, after a share of the kept weights was exchanged for as many pruned ones.

    One selection prunes to the quota and beyond it by the same scores. A weight it has just pruned may come back at
    once; it then keeps its value.
    """
    share = regrowth.share(step)
    moved = [round(share * (size - gone)) for size, gone in zip(quota.sizes, quota.gone, strict=True)]
    lower = replace(quota, gone=[gone + count for gone, count in zip(quota.gone, moved, strict=True)])
    left = fulfil(targets, lower, peers, packed)
    all_but = replace(quota, gone=[size - count for size, count in zip(quota.sizes, moved, strict=True)])
    back = fulfil(candidates(regrowth, step, prunables, left, peers), all_but, peers, packed)
    for mask, more in zip(left.masks, back.masks, strict=True):
        mask.bitwise_or_(more)
    kept = None
    if left.kept is not None and back.kept is not None:
        kept = [stayed + came for stayed, came in zip(left.kept, back.kept, strict=True)]
    return Selection(left.masks, left.cuts, kept)


def candidates(
    regrowth: Regrowth, step: int, prunables: Sequence[Prunable], left: Selection, peers: Peers
) -> list[Target]:
    """The tensors for a selection in which pruned weights compete and those that `left` keeps do not."""
    check_gradients(regrowth, prunables, peers, zeros_count=False)
    score = resolve("magnitude") if regrowth.by_gradient else lot(step)
    kept = kernels.population(left.masks) if left.kept is None else left.kept
    found = []
    for prunable, mask, living in zip(prunables, left.masks, kept, strict=True):
        facts: dict[str, Any] = {"weight": _gradient(prunable)} if regrowth.by_gradient else {"index": None}
        gone = inverted(mask, local(prunable.parameter.detach()).numel())
        found.append(target_of(prunable, score, facts, gone, living, peers))
    return found


def lot(step: int) -> Score:
    """Score `random` with a seed for this step, negative so that it never equals one that a user chose."""
    return replace(resolve("random"), options={"seed": -1 - step})


def _gradient(prunable: Prunable) -> Tensor:
    """The local shard of the current gradient; zeros for a tensor without one."""
    if prunable.parameter.grad is not None:
        return dense(local(prunable.parameter.grad))
    part = local(prunable.parameter.detach())
    return torch.zeros((), dtype=torch.float32, device=part.device).expand(part.shape)


def check_gradients(regrowth: Regrowth | None, prunables: Sequence[Prunable], peers: Peers, zeros_count: bool) -> None:
    """Raise where gradients are needed and no tensor has one. Unless `zeros_count`, gradients that are all zero do not
    count: `zero_grad(set_to_none=False)` leaves those."""
    if regrowth is None or not regrowth.by_gradient:
        return
    gradients = (dense(local(prunable.parameter.grad)) for prunable in prunables if prunable.parameter.grad is not None)
    here = any(zeros_count or bool(gradient.any()) for gradient in gradients)
    if peers.totals([int(here)])[0] == 0:
        raise FactError(
            "regrow='gradient' reads parameter.grad inside pruner.step(), and no prunable tensor has a gradient there."
            " Call pruner.step() after optimizer.step() and before optimizer.zero_grad(), or use regrow='random'."
        )
