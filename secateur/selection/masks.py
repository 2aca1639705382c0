"""Masks: True is kept. Apply them, store them as bits, count and compare them.

Two forms of bits: `pack` keeps rows apart, so that a saved mask shards along dim 0 as its weight does; `to_bits` is
flat, in words of 32, as kernels read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from secateur.scores import mixed

PART = 1 << 22  # weights masked at a time
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


@torch.no_grad()
def apply(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zero the masked values in place. A mask is bool in its tensor's shape, or flat bits. Tensors keep their memory,
    so compiled graphs stay valid.

    Multiplies the bits as integers, because infinity times zero is NaN. Large tensors go in parts: on CPUs torch casts
    the mask to the type it multiplies, and that copy must not reach the size of a weight.
    """
    bits, kept = [], []
    for tensor, mask in zip(tensors, masks, strict=True):
        mask = as_bool(mask, tensor.shape)
        rows = max(1, PART * mask.shape[0] // max(1, mask.numel()))
        bits += tensor.view(INTEGERS[tensor.element_size()]).split(rows)
        kept += mask.split(rows)
    if bits:
        torch._foreach_mul_(bits, kept)


def checksum(masks: Sequence[Tensor]) -> int:
    """A number that almost surely differs when masks do: the sum of hashed positions of the pruned weights."""
    total, first = 0, 0
    for mask in masks:
        for part in mask.flatten().split(1 << 18):
            positions = torch.arange(first, first + part.numel(), device=part.device)
            total += int(mixed(positions)[~part].sum())
            first += part.numel()
    return total % (1 << 62)


def pack(mask: Tensor) -> Tensor:
    """One bit per weight, row by row: uint8 [rows, ceil(rest / 8)], which shards along dim 0 as the weight does."""
    rows = mask.flatten(1)
    packed = torch.zeros(rows.shape[0], -(-rows.shape[1] // 8), dtype=torch.uint8, device=mask.device)
    for bit in range(8):
        part = rows[:, bit::8].to(torch.uint8)
        packed[:, : part.shape[1]] |= part << bit
    return packed


def packed_bytes(shape: Sequence[int]) -> int:
    """How many bytes `pack` needs for a mask of this shape."""
    return shape[0] * -(-math.prod(shape[1:]) // 8)


def can_unpack(packed: Tensor, shape: Sequence[int]) -> bool:
    """Whether this can be the packed mask of a weight of this shape."""
    rows = packed.ndim == 2 and packed.shape[0] == shape[0]
    return packed.dtype == torch.uint8 and rows and packed.numel() == packed_bytes(shape)


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The bool mask of this shape that `pack` was given."""
    mask = torch.empty(tuple(shape), dtype=torch.bool, device=packed.device)
    rows = mask.flatten(1)
    for bit in range(8):
        part = rows[:, bit::8]
        part.copy_((packed[:, : part.shape[1]] >> bit) & 1)
    return mask


def to_bits(mask: Tensor) -> Tensor:
    """A flat bool mask as kernels read it: one bit a weight, in whole words of 32."""
    padded = torch.nn.functional.pad(mask, (0, -mask.numel() % 32))
    return pack(padded.view(1, -1)).view(-1)


def from_bits(bits: Tensor, numel: int) -> Tensor:
    """The flat bool mask that `to_bits` was given."""
    return unpack(bits.view(1, -1), (1, 8 * bits.numel())).view(-1)[:numel]


def inverted(mask: Tensor, numel: int) -> Tensor:
    """The complement of a flat mask, in the same form, bool or bits. Bits past the end stay zero."""
    flipped = ~mask
    if mask.dtype != torch.bool and numel % 32:
        spare = torch.arange(32, device=mask.device) < numel % 32
        flipped[-4:] &= to_bits(spare)
    return flipped


def as_bool(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """A mask as bools in this shape, from bools or flat bits."""
    return (mask if mask.dtype == torch.bool else from_bits(mask, math.prod(shape))).view(tuple(shape))
