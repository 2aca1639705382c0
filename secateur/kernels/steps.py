"""Launches of the AdamW kernel. What they need is worked out once and kept while everything stays where it is."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.kernels.parts import Hyper, Part
from secateur.kernels.scoring import launch
from secateur.kernels.stepping import _adamw, address_rows, aligned
from secateur.kernels.table import mask_kind, to_device

GRADIENT = 1  # its place in a row
ONE = torch.tensor(1.0, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Batch:
    """Parameters that one launch takes: which, their rows of the table, the owners of its tiles, and what the kernel
    is compiled for."""

    members: list[int]
    rows: list[list[int]]
    owners: Tensor
    constants: tuple[Any, ...]


@dataclass(frozen=True)
class Ready:
    """A step over parameters of one device, ready to be taken again and again. It does not hold the gradients, which
    come and go, and mostly come back elsewhere."""

    device: torch.device
    members: list[int]  # numbers of the parameters, empty shards too: every rank must count alike
    batches: list[Batch]
    steps: list[Tensor]
    written: list[Tensor]


def prepare(parts: Sequence[Part], members: Sequence[int], hyper: Hyper) -> Ready:
    """Sort these of all parts, which are on one device, into launches."""

    def kind(part: Part) -> tuple[Any, ...]:
        types = part.parameter.dtype, part.gradient.dtype, part.exp_avg.dtype
        together = aligned((*part.tensors, part.gradient, part.mask))
        return (*types, mask_kind(part.mask), hyper.amsgrad, hyper.theta > 0, together)

    kinds: dict[tuple[Any, ...], list[int]] = {}
    for number in members:
        if parts[number].parameter.numel():
            kinds.setdefault(kind(parts[number]), []).append(number)
    batches = []
    for constants, found in kinds.items():
        alike = [parts[number] for number in found]
        addresses = [[p.parameter, p.gradient, p.exp_avg, p.exp_avg_sq, p.max_exp_avg_sq] for p in alike]
        batches.append(Batch(found, *address_rows(addresses, [part.mask for part in alike]), constants))
    written = [tensor for number in members for tensor in parts[number].tensors]
    steps = [parts[number].step for number in members]
    return Ready(parts[members[0]].parameter.device, list(members), batches, steps, written)


def take(ready: Ready, gradients: Sequence[Tensor], hyper: Hyper, soft: Tensor | None = None) -> None:
    """One step of AdamW, masks and SPAM's clipping inside. `gradients` are those of all parts, of the kinds they were
    of when the step was prepared; `soft` holds factors for both moments."""
    torch._foreach_add_(ready.steps, ONE, alpha=1.0)  # as torch does it: with a number it takes ten times as long
    taken = dict(zip(ready.members, map(float, ready.steps), strict=True))
    of_step = {step: numbers(hyper, step) for step in set(taken.values())}
    for batch in ready.batches:
        for row, number in zip(batch.rows, batch.members, strict=True):
            row[GRADIENT] = gradients[number].data_ptr()
        rows = to_device(batch.rows, torch.int64, ready.device)
        sent = to_device([of_step[taken[number]] for number in batch.members], torch.float32, ready.device)
        *constants, together = batch.constants
        arguments = (rows, batch.owners, sent, sent if soft is None else soft)
        launch(_adamw, batch.owners.numel(), arguments, (*constants, soft is not None, together))


def adamw(parts: Sequence[Part], hyper: Hyper, soft: Tensor | None = None) -> None:
    """One step over parts of one device."""
    take(prepare(parts, range(len(parts)), hyper), [part.gradient for part in parts], hyper, soft)


def numbers(hyper: Hyper, step: float) -> list[float]:
    """Decay, betas, step size, one over the root of v's bias, eps, sign, theta, 1 - each beta, limit where v is 0.

    Rounded to fp32 where torch's fused step does, powers of the betas too, so that both walk the same way but for what
    CUDA's power is off by; only the bias of v is a factor here and a divisor there, since a second quotient per weight
    would cost a fifth of the step.
    """
    rate, beta1, beta2 = _single(hyper.lr), _single(hyper.beta1), _single(hyper.beta2)
    size = rate / _bias(hyper.beta1, step)
    root = _single(_bias(hyper.beta2, step) ** 0.5)
    sign = -1.0 if hyper.maximize else 1.0
    decay = rate * _single(hyper.weight_decay)
    return [decay, beta1, beta2, size, 1 / root, hyper.eps, sign, hyper.theta, 1 - beta1, 1 - beta2, hyper.unseen]


def _bias(beta: float, step: float) -> float:
    """1 - beta^step in fp32; in double where fp32 would take beta for one and leave nothing to divide by."""
    return _single(1 - _single(_single(beta) ** step)) or 1 - beta**step


def _single(value: float) -> float:
    """Rounded to fp32."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
