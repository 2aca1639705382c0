"""The specification of what walks over weights and state, in plain torch; part of reference.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from secateur.kernels.parts import Hyper, Part
from secateur.selection.bits import from_bits
from secateur.selection.masks import apply


def zero(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zero, in place, what the masks (bool in the tensor's shape, or flat bits) say is gone."""
    whole = [m if m.dtype == torch.bool else from_bits(m, t.numel()) for t, m in zip(tensors, masks, strict=True)]
    apply(tensors, [mask.view(tensor.shape) for mask, tensor in zip(whole, tensors, strict=True)])


def population(masks: Sequence[Tensor]) -> Tensor:
    """How many weights each mask keeps."""
    return torch.stack(
        [mask.sum() if mask.dtype == torch.bool else from_bits(mask, 8 * mask.numel()).sum() for mask in masks]
    )


def adamw(parts: Sequence[Part], hyper: Hyper, group: Mapping[str, Any], soft: Tensor | None = None) -> None:
    """One step of AdamW for parts of one parameter group, by torch's own function; SPAM before it, masks after it."""
    if soft is not None:
        for part in parts:
            part.exp_avg.mul_(soft[0].to(part.exp_avg.device))
            part.exp_avg_sq.mul_(soft[1].to(part.exp_avg.device))
    gradients = [part.gradient for part in parts]
    if 0 < hyper.theta < math.inf:
        gradients = [clip(p.gradient.detach(), p.exp_avg_sq, hyper.theta, hyper.unseen) for p in parts]
    adam(
        [part.parameter for part in parts], gradients, [part.exp_avg for part in parts],
        [part.exp_avg_sq for part in parts],
        [part.max_exp_avg_sq for part in parts if part.max_exp_avg_sq is not None],
        [part.step for part in parts],
        foreach=group["foreach"], capturable=group["capturable"], differentiable=group["differentiable"],
        fused=group["fused"], has_complex=any(part.parameter.is_complex() for part in parts),
        decoupled_weight_decay=True, amsgrad=hyper.amsgrad, beta1=hyper.beta1, beta2=hyper.beta2, lr=hyper.lr,
        weight_decay=hyper.weight_decay, eps=hyper.eps, maximize=hyper.maximize,
    )  # fmt: skip
    masked = [(tensor.detach(), part.mask) for part in parts if part.mask is not None for tensor in part.tensors]
    zero([tensor for tensor, _ in masked], [mask for _, mask in masked])


def clip(gradient: Tensor, second: Tensor, theta: float, unseen: float = math.inf) -> Tensor:
    """The gradient limited to sqrt(theta v), and to `unseen` where v is zero."""
    limit = torch.where(second > 0, (theta * second).sqrt(), unseen).to(gradient.dtype)
    return torch.where(gradient.abs() > limit, limit * gradient.sign(), gradient)
