"""What one parameter brings to a step of AdamW."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Hyper:
    """Settings of a step, shared by the parameters of a group.

    `theta` and `unseen` are SPAM's: gradients are clipped to sqrt(theta v), and to `unseen` where v is zero. A theta of
    0 turns clipping off; infinity clips nothing in this step, by the same kernel as the steps that clip.
    """

    lr: Any  # a number, or a tensor where torch takes one
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False
    amsgrad: bool = False
    theta: float = 0.0
    unseen: float = math.inf


@dataclass(frozen=True)
class Part:
    """A parameter as this process holds it, its gradient and state, and the mask it is held to."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    step: Tensor  # how many steps were taken; kernels want it on the host
    mask: Tensor | None  # bool in the parameter's shape, or flat bits

    @property
    def tensors(self) -> list[Tensor]:
        """What the mask holds at zero."""
        return [t for t in (self.parameter, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq) if t is not None]
