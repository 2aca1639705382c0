"""SPAM: spike-aware Adam with momentum reset (Huang et al. 2025), as pure functions of settings and step.

Three parts, each of which can be left out. Clipping holds a gradient to sqrt(theta v), v being Adam's second moment
before the step. Every `every` steps both moments start over, bias correction with them, and the learning rate climbs
back along a cosine for `warmup` steps. A gradient norm that stands out from the last hundred shrinks both moments
(not in the paper; AdamWPrune has it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.errors import ScheduleError

HISTORY = 100  # gradient norms remembered
ENOUGH = 10  # of them before a spike can be told
SHRINK = (0.5, 0.9)  # what a spike leaves of the moments


@dataclass(frozen=True)
class Spam:
    """Settings. The defaults are the paper's."""

    theta: float = 5000.0  # 0: no clipping
    every: int = 500  # steps between resets; 0: none
    warmup: int = 150  # steps over which the learning rate returns after a reset
    spike: float | None = None  # standard deviations above the mean norm that make a spike; None: not watched

    def __post_init__(self) -> None:
        if self.theta < 0 or self.every < 0 or self.warmup < 0 or (self.spike is not None and self.spike <= 0):
            raise ScheduleError(f"SPAM's settings must not be negative; got {self}.")
        if self.every and self.warmup > self.every:
            raise ScheduleError(
                f"warmup={self.warmup} is longer than every={self.every}: the learning rate would never return."
            )


PRESETS = {"paper": Spam(), "seeds": Spam(theta=50.0, every=1000, warmup=1000, spike=2.0)}


def as_spam(wanted: Spam | str | Mapping[str, Any] | bool | None) -> Spam | None:
    """Settings by name ("paper", "seeds"), as a mapping, or as they are."""
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        return Spam()
    if isinstance(wanted, Spam):
        return wanted
    if isinstance(wanted, str) and wanted in PRESETS:
        return PRESETS[wanted]
    if isinstance(wanted, Mapping) and wanted.keys() <= asdict(Spam()).keys():
        return Spam(**wanted)
    raise ScheduleError(
        f"spam is one of {', '.join(map(repr, PRESETS))}, a secateur.optim.Spam, or None; got {wanted!r}."
    )


def resets(spam: Spam, taken: int) -> bool:
    """Whether the moments start over before the next step, `taken` steps having been taken."""
    return spam.every > 0 and taken > 0 and taken % spam.every == 0


def since_reset(spam: Spam, taken: int) -> int | None:
    """Steps taken since the last reset; None if there was none."""
    return taken % spam.every if spam.every and taken >= spam.every else None


def warmth(spam: Spam, taken: int) -> float:
    """The factor on the learning rate of the next step: from the group's own, so that nothing compounds."""
    age = since_reset(spam, taken)
    if age is None or age >= spam.warmup:
        return 1.0
    return 0.5 * (1 - math.cos(math.pi * (age + 1) / (spam.warmup + 1)))


def hold(spam: Spam) -> int:
    """Steps after a reset during which nothing is ranked by the moments.

    As long as the learning rate is held back, v averages few gradients: after n steps its relative error is about
    sqrt(2 / n), 12 % at the paper's 150, which a score |w| v^(1/4) sees as 3 %. At most half of the time between
    resets, so that masks can be updated at all.
    """
    return min(spam.warmup, spam.every // 2)


def is_cold(spam: Spam, taken: int) -> bool:
    """Whether the moments are too young to rank weights by, after `taken` steps."""
    if not spam.every:
        return False
    return taken >= spam.every and (taken - 1) % spam.every < hold(spam)


def soften(spam: Spam, norms: Tensor, norm: Tensor, taken: int) -> Tensor:
    """Factors for both moments, on the device, and the norm written down: no spike is looked at by the host."""
    seen = min(taken, HISTORY)
    factors = torch.ones(2, device=norm.device)
    if spam.spike is not None and seen >= ENOUGH:
        past = norms[:seen]
        stands_out = (norm - past.mean()) > spam.spike * past.std()
        factors = torch.where(stands_out, torch.tensor(SHRINK, device=norm.device), factors)
    last = norms[(taken - 1) % HISTORY] if taken else torch.zeros_like(norm)
    norms[taken % HISTORY] = torch.where(norm.isfinite(), norm, last)  # one overflow must not blind it for good
    return factors
