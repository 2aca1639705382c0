"""Masks packed to one bit a weight: row by row where they are saved, flat where kernels read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def pack(mask: Tensor) -> Tensor:
    """One bit per weight, row by row: uint8 [rows, ceil(rest / 8)], which shards along dim 0 as the weight does."""
    rows = mask.flatten(1)
    packed = torch.zeros(rows.shape[0], -(-rows.shape[1] // 8), dtype=torch.uint8, device=mask.device)
    for bit in range(8):
        part = rows[:, bit::8].to(torch.uint8)
        packed[:, : part.shape[1]] |= part << bit
    return packed


def packed_bytes(shape: Sequence[int]) -> int:
    """How many bytes `pack` makes of a mask of this shape."""
    return shape[0] * -(-math.prod(shape[1:]) // 8)


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The bool mask of this shape that `pack` was given."""
    mask = torch.empty(tuple(shape), dtype=torch.bool, device=packed.device)
    rows = mask.flatten(1)
    for bit in range(8):
        part = rows[:, bit::8]
        part.copy_((packed[:, : part.shape[1]] >> bit) & 1)
    return mask


def to_bits(mask: Tensor) -> Tensor:
    """A flat bool mask as kernels take it: one bit a weight, in whole words of 32."""
    padded = torch.nn.functional.pad(mask, (0, -mask.numel() % 32))
    return pack(padded.view(1, -1)).view(-1)


def from_bits(bits: Tensor, numel: int) -> Tensor:
    """The flat bool mask that `to_bits` was given."""
    return unpack(bits.view(1, -1), (1, 8 * bits.numel())).view(-1)[:numel]


def inverted(mask: Tensor, numel: int) -> Tensor:
    """What a flat mask of so many weights removes, stored as the mask is. Bits past the end stay unset."""
    flipped = ~mask
    if mask.dtype != torch.bool and numel % 32:
        spare = torch.arange(32, device=mask.device) < numel % 32
        flipped[-4:] &= to_bits(spare)
    return flipped


def as_bool(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """A mask in this shape, whether it is bool already or flat bits."""
    return (mask if mask.dtype == torch.bool else from_bits(mask, math.prod(shape))).view(tuple(shape))
