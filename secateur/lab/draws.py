"""Chance that depends on what is named and on nothing else, so that a resumed run draws what it would have drawn."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

SLICES, SLICE = 64, 1 << 16  # of a tensor that are read for its fingerprint, and numbers in each


def generator(*words: int | str) -> torch.Generator:
    """A generator for exactly these words: the same again in any process, unrelated to that of any other words."""
    digest = hashlib.sha256(repr(words).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def fingerprint_of(*tensors: Tensor) -> str:
    """Some letters that differ when the data does: sizes and slices from all over, not to read gigabytes each time."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.reshape(-1)
        digest.update(repr((tensor.shape, tensor.dtype)).encode())
        starts = torch.linspace(0, max(0, flat.numel() - SLICE), SLICES).long().unique().tolist()
        for start in starts:
            digest.update(flat[start : start + SLICE].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
