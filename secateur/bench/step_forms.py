"""Forms of a masked AdamW step: torch's own, masked from outside, and ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur import optim

Weights = list[nn.Parameter]

RATE = 1e-4
DECAY = 0.1
THETA = 5000.0  # SPAM's own bound on g^2 / v

FUSED = "torch fused, dense"
FOREACH = "torch foreach, dense"
DENSE, MASKED, CLIPPED = "secateur, dense", "secateur, masked", "secateur, masked, SPAM clipping"
FORMS = (
    FUSED,
    "torch fused, then _foreach_mul_",
    FOREACH,
    DENSE,
    MASKED,
    CLIPPED,
)


def make(dim: int, layers: int, device: torch.device) -> tuple[Weights, list[Tensor]]:
    """Weights with gradients, and masks that keep a random half, from a fixed seed on the device."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(scale: float) -> Tensor:
        return torch.empty(dim, dim, device=device).normal_(generator=generator).mul_(scale)

    weights = [nn.Parameter(normal(0.02)) for _ in range(layers)]
    for weight in weights:
        weight.grad = normal(1e-3)
    return weights, [normal(1.0) > 0 for _ in range(layers)]


def build(name: str, weights: Weights, masks: list[Tensor]) -> Callable[[], Any]:
    """A form's step, ready to be called."""
    if name.startswith("secateur"):
        return own(name, weights, masks).step
    optimizer = torchs(weights, fused=name != FOREACH)
    return optimizer.step if name in (FUSED, FOREACH) else partial(step_and_mask, optimizer, weights, masks)


def torchs(weights: Weights, fused: bool) -> torch.optim.AdamW:
    """torch's own, fused or foreach."""
    return torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY, fused=fused, foreach=not fused)


def own(name: str, weights: Weights, masks: list[Tensor]) -> torch.optim.Optimizer:
    """Ours, set up as the form is called."""
    spam = optim.Spam(theta=THETA, every=0, warmup=0, quiet=0, clip_unseen=False) if name == CLIPPED else None
    optimizer = optim.AdamW(weights, lr=RATE, weight_decay=DECAY, spam=spam)
    if name != DENSE:
        optimizer.set_masks(dict(zip(weights, masks, strict=True)))
    return optimizer


def masked_by(optimizer: torch.optim.Optimizer, weights: Weights) -> list[Tensor]:
    """Everything a mask zeroes: weights, then first moments, then second."""
    moments = [optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq") for weight in weights]
    return [*(weight.detach() for weight in weights), *moments]


def step_and_mask(optimizer: torch.optim.Optimizer, weights: Weights, masks: list[Tensor]) -> None:
    """Masking from outside the step: one more read and write of the weights and both moments."""
    optimizer.step()
    torch._foreach_mul_(masked_by(optimizer, weights), masks * 3)
