"""Triton kernels over weights and optimizer state: zeroing, counting masks, and AdamW with masks and SPAM.

Many tensors share a launch, as in table.py, with a smaller row: up to five addresses, the mask, the size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from secateur.kernels.reference import AdamWTensors, Hyper
from secateur.kernels.scores_triton import BITS, BOOL, bit_at, launch_kernel, read
from secateur.kernels.table import layout, mask_kind, to_device

SPAN: tl.constexpr = tl.constexpr(2048)  # weights per program
COLUMNS: tl.constexpr = tl.constexpr(8)  # of a row: up to five addresses, then
MASK: tl.constexpr = tl.constexpr(5)
NUMEL: tl.constexpr = tl.constexpr(6)
FIRST: tl.constexpr = tl.constexpr(7)  # its first tile
NUMBERS: tl.constexpr = tl.constexpr(11)  # scalars per tensor, see `numbers`
GRADIENT = 1  # column of the gradient's address in the rows of a step

BIT_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _place(rows, owners, ALIGNED: tl.constexpr):
    tile = tl.program_id(0)
    owner = tl.load(owners + tile).to(tl.int64)
    row = rows + owner * COLUMNS
    start = (tile - tl.load(row + FIRST)) * SPAN
    left = tl.minimum(tl.load(row + NUMEL) - start, SPAN).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
    lane = tl.arange(0, SPAN)
    return owner, row, start, lane, lane < left


@triton.jit
def _kept(row, start, lane, valid, MASKED: tl.constexpr, ALIGNED: tl.constexpr):
    kept = valid
    if MASKED == BITS:
        kept = bit_at(tl.load(row + MASK), start, lane, valid) != 0
    elif MASKED == BOOL:
        kept = read(tl.load(row + MASK), start, lane, valid, tl.int8, ALIGNED) != 0
    return kept


@triton.jit
def _write(address, start, lane, values, valid, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    tl.store(pointer + lane, values.to(DTYPE), mask=valid)


@triton.jit
def _zero(rows, owners, DTYPE: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr):
    _, row, start, lane, valid = _place(rows, owners, ALIGNED)
    gone = valid & (_kept(row, start, lane, valid, MASKED, ALIGNED) == 0)
    _write(tl.load(row), start, lane, tl.zeros((SPAN,), DTYPE), gone, DTYPE, False)


@triton.jit
def _population(rows, owners, counts, DTYPE: tl.constexpr):
    owner, row, start, lane, valid = _place(rows, owners, False)
    bits = read(tl.load(row), start, lane, valid, DTYPE, False).to(tl.int32)  # a byte of a bool mask has one bit
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    found = tl.sum(((bits * 0x01010101) >> 24) & 0xFF)
    tl.atomic_add(counts + owner, found.to(tl.int64), sem="relaxed")


@triton.jit
def _adamw(
    rows, owners, numbers, soft,
    PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, STATE: tl.constexpr, MASKED: tl.constexpr,
    AMSGRAD: tl.constexpr, CLIPPED: tl.constexpr, SOFT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    owner, row, start, lane, valid = _place(rows, owners, ALIGNED)
    mine = numbers + owner * NUMBERS
    parameter = read(tl.load(row), start, lane, valid, PARAMETER, ALIGNED).to(tl.float32)
    gradient = read(tl.load(row + 1), start, lane, valid, GRADIENT, ALIGNED).to(tl.float32) * tl.load(mine + 6)
    first = read(tl.load(row + 2), start, lane, valid, STATE, ALIGNED).to(tl.float32)
    second = read(tl.load(row + 3), start, lane, valid, STATE, ALIGNED).to(tl.float32)
    if SOFT:
        first = first * tl.load(soft)
        second = second * tl.load(soft + 1)
    if CLIPPED:
        limit = tl.where(second > 0, tl.sqrt_rn(tl.load(mine + 7) * second), tl.load(mine + 10))
        gradient = tl.where(gradient > limit, limit, tl.where(gradient < -limit, -limit, gradient))
    parameter = tl.fma(-tl.load(mine), parameter, parameter)
    first = tl.fma(tl.load(mine + 1), first, tl.load(mine + 8) * gradient)
    second = tl.fma(tl.load(mine + 2), second, tl.load(mine + 9) * (gradient * gradient))
    largest = second
    if AMSGRAD:
        largest = tl.maximum(read(tl.load(row + 4), start, lane, valid, STATE, ALIGNED).to(tl.float32), second)
    divisor = tl.sqrt_rn(largest) * tl.load(mine + 4) + tl.load(mine + 5)
    parameter = parameter - tl.div_rn(tl.load(mine + 3) * first, divisor)
    if MASKED != 0:
        kept = _kept(row, start, lane, valid, MASKED, ALIGNED)
        parameter = tl.where(kept, parameter, 0.0)
        first = tl.where(kept, first, 0.0)
        second = tl.where(kept, second, 0.0)
        largest = tl.where(kept, largest, 0.0)
    _write(tl.load(row), start, lane, parameter, valid, PARAMETER, ALIGNED)
    _write(tl.load(row + 2), start, lane, first, valid, STATE, ALIGNED)
    _write(tl.load(row + 3), start, lane, second, valid, STATE, ALIGNED)
    if AMSGRAD:
        _write(tl.load(row + 4), start, lane, largest, valid, STATE, ALIGNED)


def aligned(tensors: Sequence[Tensor | None]) -> bool:
    return all(t is None or (t.data_ptr() % 16 == 0) for t in tensors) and tensors[0].numel() % 16 == 0  # type: ignore[union-attr]


def address_rows(
    tensors: Sequence[Sequence[Tensor | None]], masks: Sequence[Tensor | None]
) -> tuple[list[list[int]], Tensor]:
    """Rows for tensors that share a launch (up to five addresses each), and the owners of their tiles."""
    leading = [found[0] for found in tensors]
    sizes = tuple([t.numel() for t in leading if t is not None])
    first, owners = layout(sizes, SPAN.value, leading[0].device)  # type: ignore[union-attr]
    rows = []
    for number, (found, mask) in enumerate(zip(tensors, masks, strict=True)):
        addresses = [*(0 if t is None else t.data_ptr() for t in found), 0, 0, 0, 0][:5]
        rows.append([*addresses, 0 if mask is None else mask.data_ptr(), sizes[number], first[number]])
    return rows, owners


def address_table(tensors: Sequence[Sequence[Tensor | None]], masks: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """The same with the rows on the device."""
    rows, owners = address_rows(tensors, masks)
    return _sent_rows(tuple([number for row in rows for number in row]), owners.device), owners


@lru_cache(maxsize=8)
def _sent_rows(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Rows on the device. Cached: masks and weights mostly stay where they are, and an upload takes as long as many
    launches."""
    return to_device(numbers, torch.int64, device)


def zero(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zero pruned entries of contiguous tensors in place; masks are bool or flat bits."""
    kinds = [(t.element_size(), mask_kind(m), aligned((t, m))) for t, m in zip(tensors, masks, strict=True)]
    for kind in dict.fromkeys(kinds):
        members = [number for number, found in enumerate(kinds) if found == kind and tensors[number].numel()]
        if members:
            rows, owners = address_table([[tensors[n]] for n in members], [masks[n] for n in members])
            launch_kernel(_zero, owners.numel(), (rows, owners), (BIT_TYPES[kind[0]], kind[1], kind[2]))


def population(masks: Sequence[Tensor]) -> Tensor:
    """How many weights each mask (bool or bits) keeps, as a tensor on the device."""
    counts = torch.zeros(len(masks), dtype=torch.int64, device=masks[0].device)
    words = all(mask.nbytes % 4 == 0 and mask.data_ptr() % 4 == 0 for mask in masks)
    rows, owners = address_table([[mask.view(torch.int32) if words else mask] for mask in masks], [None] * len(masks))
    launch_kernel(_population, owners.numel(), (rows, owners, counts), (torch.int32 if words else torch.uint8,))
    return counts


ONE = torch.tensor(1.0, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Batch:
    """The parameters of one launch: their numbers, their rows, the owners of its tiles, and its constants."""

    members: list[int]
    rows: list[list[int]]
    owners: Tensor
    constants: tuple[Any, ...]


@dataclass(frozen=True)
class PreparedStep:
    """A step over the parameters of one device, prepared once and taken many times.

    It does not hold the gradients: they are freed and allocated again, mostly at other addresses.
    """

    device: torch.device
    members: list[int]  # parameter numbers, empty shards included: every rank must count steps alike
    batches: list[Batch]
    steps: list[Tensor]
    written: list[Tensor]


def prepare(parts: Sequence[AdamWTensors], members: Sequence[int], hyper: Hyper) -> PreparedStep:
    """Group the parameters `members`, all on one device, into launches."""

    def kind(part: AdamWTensors) -> tuple[Any, ...]:
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
    return PreparedStep(parts[members[0]].parameter.device, list(members), batches, steps, written)


def take(ready: PreparedStep, gradients: Sequence[Tensor], hyper: Hyper, soft: Tensor | None = None) -> None:
    """One AdamW step with masks and SPAM's clipping.

    `gradients` are those of all parts, in the dtype and alignment they had when the step was prepared; `soft` holds
    SPAM's factors for both moments.
    """
    torch._foreach_add_(ready.steps, ONE, alpha=1.0)  # as torch does: a number takes ten times as long
    taken = dict(zip(ready.members, map(float, ready.steps), strict=True))
    of_step = {step: numbers(hyper, step) for step in set(taken.values())}
    for batch in ready.batches:
        for row, number in zip(batch.rows, batch.members, strict=True):
            row[GRADIENT] = gradients[number].data_ptr()
        rows = to_device(batch.rows, torch.int64, ready.device)
        sent = to_device([of_step[taken[number]] for number in batch.members], torch.float32, ready.device)
        *constants, together = batch.constants
        arguments = (rows, batch.owners, sent, sent if soft is None else soft)
        launch_kernel(_adamw, batch.owners.numel(), arguments, (*constants, soft is not None, together))


def adamw(parts: Sequence[AdamWTensors], hyper: Hyper, soft: Tensor | None = None) -> None:
    """One AdamW step over parameters of one device."""
    take(prepare(parts, range(len(parts)), hyper), [part.gradient for part in parts], hyper, soft)


def numbers(hyper: Hyper, step: float) -> list[float]:
    """The scalars of a step: decay, betas, step size, 1 / sqrt(bias of v), eps, sign, theta, 1 - betas, limit at v = 0.

    They are rounded to fp32 where torch's fused step rounds, powers of the betas included, so both agree up to the
    error of CUDA's pow. Only the bias of v differs: a factor here, a divisor there, since a second division per weight
    would add a fifth to the time.
    """
    rate, beta1, beta2 = _single(hyper.lr), _single(hyper.beta1), _single(hyper.beta2)
    size = rate / _bias(hyper.beta1, step)
    root = _single(_bias(hyper.beta2, step) ** 0.5)
    sign = -1.0 if hyper.maximize else 1.0
    decay = rate * _single(hyper.weight_decay)
    return [decay, beta1, beta2, size, 1 / root, hyper.eps, sign, hyper.theta, 1 - beta1, 1 - beta2, hyper.unseen]


def _bias(beta: float, step: float) -> float:
    """1 - beta^step in fp32; in double where fp32 rounds beta to one and the difference would be zero."""
    return _single(1 - _single(_single(beta) ** step)) or 1 - beta**step


def _single(value: float) -> float:
    """Rounded to fp32."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
