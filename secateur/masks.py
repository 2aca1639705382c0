"""Masks: True is kept. Kept as bool beside the weights, packed to one bit a weight when saved."""

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


@torch.no_grad()
def apply(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zero, in place, what the masks say is gone. Tensors keep their memory, so compiled graphs need not know."""
    if tensors:
        torch._foreach_mul_(list(tensors), list(masks))


def checksum(masks: Sequence[Tensor]) -> int:
    """A number that differs when masks do, in all likelihood: the sum of the positions of what is gone."""
    total = 0
    for number, mask in enumerate(masks, start=1):
        for start, part in enumerate(mask.flatten().split(1 << 20)):
            gone = (~part).to(torch.int64) * torch.arange(1, part.numel() + 1, device=part.device)
            total += number * (int(gone.sum()) + start * int((~part).count_nonzero()))
    return total % (1 << 62)
