"""What one parameter brings to a step of AdamW."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Hyper:
    """Settings of a step, shared by the parameters of a group. `theta` is SPAM's: 0 clips nothing."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False
    amsgrad: bool = False
    theta: float = 0.0


@dataclass(frozen=True)
class Part:
    """A parameter as this process holds it, its gradient and state, the mask it is held to, and its settings."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    step: Tensor  # on the host: how many steps were taken
    mask: Tensor | None  # bool in the parameter's shape, or flat bits
    hyper: Hyper

    @property
    def tensors(self) -> list[Tensor]:
        """What the mask holds at zero."""
        return [t for t in (self.parameter, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq) if t is not None]
