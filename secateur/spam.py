"""SPAM: spike-aware Adam with momentum reset (Huang et al. 2025), as pure functions of settings and step count.

Three parts, each of which can be turned off. Clipping limits a gradient to sqrt(theta v), where v is Adam's second
moment before the step. Every `every` steps both moments are reset, and the learning rate warms up again along a cosine
over `warmup` steps. A gradient norm far above the last hundred shrinks both moments (AdamWPrune's; not in the paper).

`taken` is the number of steps already taken, so the next step is number `taken + 1`. Which steps clip, reset or warm up
follows from that number alone: the host never reads the device to decide.
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
    """Settings. The defaults follow the paper and its authors' code (docs/kernels.md says where the two differ)."""

    theta: float = 5000.0  # clip where g^2 > theta v; 0: no clipping
    every: int = 500  # steps between resets; 0: none
    warmup: int = 150  # steps over which the learning rate returns after a reset
    spike: float | None = None  # standard deviations above the mean norm that make a spike; None: not watched
    quiet: int = 20  # clip only from this step on, and from as many steps after a reset
    floor: float = 0.01  # factor on the learning rate at a reset, from which the cosine rises to 1
    clip_unseen: bool = True  # where v is zero any gradient is a spike and clipped to zero; False: it is left alone
    restart_bias: bool = False  # bias correction restarts with the moments; False: it keeps counting all steps
    warm_decay: bool = False  # the warm-up scales weight decay too; False: only the update

    def __post_init__(self) -> None:
        whole = all(type(count) is int for count in (self.every, self.warmup, self.quiet))
        numbers = self.theta, self.floor, self.spike or 1.0
        if not whole or not all(type(n) in (int, float) and not math.isnan(n) for n in numbers):
            raise ScheduleError(
                "SPAM takes whole numbers of steps (every, warmup, quiet) and numbers for theta, floor and spike;"
                f" got {self}."
            )
        if self.theta < 0 or self.every < 0 or self.warmup < 0 or (self.spike is not None and self.spike <= 0):
            raise ScheduleError(f"SPAM's settings must not be negative; got {self}.")
        if self.every and self.warmup > self.every:
            raise ScheduleError(
                f"warmup={self.warmup} is longer than every={self.every}: the learning rate would never return."
            )
        self._check_clipping()

    def _check_clipping(self) -> None:
        """The settings of what was published beyond theta, reset and warm-up."""
        if self.quiet < 0 or not 0 < self.floor <= 1:
            raise ScheduleError(
                f"quiet is a number of steps, 0 or more, and floor a factor above 0 and at most 1; got"
                f" quiet={self.quiet!r} and floor={self.floor!r}."
            )
        if self.theta and 0 < self.every <= self.quiet:
            raise ScheduleError(
                f"With quiet={self.quiet} and a reset every={self.every} steps nothing would ever be clipped. Pass a"
                " quiet below every, or theta=0 to turn clipping off."
            )
        flags = self.clip_unseen, self.restart_bias, self.warm_decay
        if not all(isinstance(flag, bool) for flag in flags):
            raise ScheduleError(f"clip_unseen, restart_bias and warm_decay are True or False; got {self}.")


PRESETS = {
    "paper": Spam(),
    "seeds": Spam(
        theta=50.0, every=1000, warmup=1000, spike=2.0, quiet=0, floor=0.001, clip_unseen=False, restart_bias=True,
        warm_decay=True,
    ),
}  # fmt: skip


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
    """Whether the moments are reset before the next step: step `every`, 2 `every`, and so on."""
    return spam.every > 0 and (taken + 1) % spam.every == 0


def since_reset(spam: Spam, taken: int) -> int | None:
    """Steps from the last reset to the next step; 0 if the reset comes right before it, None if there was none yet."""
    return (taken + 1) % spam.every if spam.every and taken + 1 >= spam.every else None


def clips(spam: Spam, taken: int) -> bool:
    """Whether the next step clips: v must hold some gradients, from the start as from a reset on."""
    age = since_reset(spam, taken)
    return spam.theta > 0 and (taken + 1 if age is None else age) >= spam.quiet


def warmth(spam: Spam, taken: int) -> float:
    """The factor on the group's learning rate in the next step."""
    age = since_reset(spam, taken)
    if age is None or age >= spam.warmup:
        return 1.0
    return spam.floor + (1 - spam.floor) * 0.5 * (1 - math.cos(math.pi * age / (spam.warmup + 1)))


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
    return taken >= spam.every and taken % spam.every < hold(spam)


def soften(spam: Spam, norms: Tensor, norm: Tensor, taken: int) -> Tensor:
    """Factors for both moments, computed on the device without a sync; records the norm."""
    seen = min(taken, HISTORY)
    factors = torch.ones(2, dtype=torch.float32, device=norm.device)
    if spam.spike is not None and seen >= ENOUGH:
        past = norms[:seen]
        stands_out = (norm - past.mean()) > spam.spike * past.std()
        factors = torch.where(stands_out, torch.tensor(SHRINK, dtype=torch.float32, device=norm.device), factors)
    last = norms[(taken - 1) % HISTORY] if taken else torch.zeros_like(norm)
    norms[taken % HISTORY] = torch.where(norm.isfinite(), norm, last)  # one overflow must not blind it for good
    return factors
