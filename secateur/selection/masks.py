"""Masks: True is kept. Held beside the weights, as bits where kernels read them and as bools elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from secateur.registry import mixed

PART = 1 << 22  # weights masked at a time
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def apply(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zero, in place, what the masks say is gone. Tensors keep their memory, so compiled graphs need not know.

    Their bits are multiplied, not their values: infinity times zero would be NaN. Large tensors go in parts, because
    on CPUs torch widens a mask to the type it multiplies, and that copy must not have the size of a weight.
    """
    bits, kept = [], []
    for tensor, mask in zip(tensors, masks, strict=True):
        rows = max(1, PART * mask.shape[0] // max(1, mask.numel()))
        bits += tensor.view(_BITS[tensor.element_size()]).split(rows)
        kept += mask.split(rows)
    if bits:
        torch._foreach_mul_(bits, kept)


def checksum(masks: Sequence[Tensor]) -> int:
    """A number that differs when masks do, in all likelihood: the sum of hashed positions of what is gone."""
    total, first = 0, 0
    for mask in masks:
        for part in mask.flatten().split(1 << 18):
            positions = torch.arange(first, first + part.numel(), device=part.device)
            total += int(mixed(positions)[~part].sum())
            first += part.numel()
    return total % (1 << 62)
