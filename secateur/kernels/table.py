"""Tables: many tensors as one launch sees them. Each is cut into tiles, and a tile's number says which tensor it is of.

A position in a table is `tile * TILE + offset`, so positions run in (tensor, flat index) order, the order of ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from secateur.kernels.fusing import GIVEN, Fused, fuse
from secateur.pieces import Piece

TILE = 8192  # weights per program: few enough programs that one shared counter serves them all

# Columns of a table's rows, one row per tensor; all int64.
FACT0, FACT1, FACT2, ALIVE, MASK, NUMEL, FIRST, GROUP, COUNTED, DIVISOR, MODULUS = range(11)
COLUMNS = 12

NOTHING, BOOL, BITS = range(3)  # how a mask is stored: not at all, a byte a weight, a bit a weight


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for, and its constants. Tensors of one kind share a launch."""

    formula: int
    sixteenths: int
    eps: float
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    alive: int
    aligned: bool  # all addresses and sizes are multiples of 16, so that loads may be wide


@dataclass(frozen=True)
class Launch:
    """Tiles that are handled together: their numbers, and what they have in common."""

    kind: Kind
    tiles: Tensor  # int32
    piece: int | None = None  # the only one, if its scores must be evaluated by torch and handed over


def new_mask(numel: int, kind: int, device: torch.device) -> Tensor:
    """Memory for a flat mask. Bits come in whole words of 32, since single ones are cleared by atomic operations."""
    if kind == BITS:
        return torch.zeros(-(-numel // 32) * 4, dtype=torch.uint8, device=device)
    return torch.empty(numel, dtype=torch.bool, device=device)


def mask_kind(mask: Tensor | None) -> int:
    """How this mask is stored."""
    return NOTHING if mask is None else BOOL if mask.dtype == torch.bool else BITS


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor made on the host and sent without waiting."""
    here = torch.as_tensor(values, dtype=dtype, device="cpu")
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


class Table:
    """The pieces of one or more selections (groups), ready for launches on one device."""

    def __init__(self, pieces: Sequence[Piece], groups: Sequence[int], masks: Sequence[Tensor], rank: int = 0) -> None:
        self.pieces, self.groups, self.masks, self.device = pieces, groups, masks, pieces[0].device
        self.mask_kind = mask_kind(masks[0])
        self.counted = [not piece.replicated or rank == 0 for piece in pieces]
        fused = [None if piece.source is None else fuse(*piece.source) for piece in pieces]
        counts = [-(-piece.numel // TILE) for piece in pieces]
        self.first = [0, *accumulate(counts)]
        self.tiles = self.first[-1]
        rows = [self._row(number, fused[number]) for number in range(len(pieces))]
        self.rows = to_device(rows, torch.int64, self.device)
        self.scales = _scales(fused, self.device)
        self.owners = to_device(
            torch.arange(len(pieces), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu")),
            torch.int32,
            self.device,
        )
        self.launches = self._launches(fused)

    def _row(self, number: int, fused: Fused | None) -> list[int]:
        piece, mask = self.pieces[number], self.masks[number]
        facts = fused.facts if fused is not None else ()
        addresses = [*(fact.data_ptr() for fact in facts), 0, 0, 0][:3]
        alive = 0 if piece.alive is None else piece.alive.data_ptr()
        group, counted = self.groups[number], int(self.counted[number])
        spread = fused.spread if fused is not None else (1, 1)
        return [*addresses, alive, mask.data_ptr(), piece.numel, self.first[number], group, counted, *spread, 0]

    def _launches(self, fused: Sequence[Fused | None]) -> list[Launch]:
        together: dict[Kind, list[int]] = {}
        launches = []
        for number, (piece, known) in enumerate(zip(self.pieces, fused, strict=True)):
            kind = _kind(piece, self.masks[number], known)
            if known is None:
                launches.append(Launch(kind, self._numbers([number]), number))
            else:
                together.setdefault(kind, []).append(number)
        return [*(Launch(kind, self._numbers(members)) for kind, members in together.items()), *launches]

    def _numbers(self, members: Sequence[int]) -> Tensor:
        """The tiles of these pieces."""
        ranges = [torch.arange(self.first[n], self.first[n + 1], device="cpu") for n in members]
        return to_device(torch.cat(ranges), torch.int32, self.device)

    def tiles_of(self, piece: int) -> slice:
        """The numbers of a piece's tiles."""
        return slice(self.first[piece], self.first[piece + 1])


def _kind(piece: Piece, mask: Tensor, fused: Fused | None) -> Kind:
    facts = fused.facts if fused is not None else ()
    stored = [*(fact.dtype for fact in facts), torch.float32, torch.float32, torch.float32]
    addresses = [tensor.data_ptr() for tensor in (*facts, mask, piece.alive) if tensor is not None]
    aligned = piece.numel % 16 == 0 and not any(address % 16 for address in addresses)
    alive = mask_kind(piece.alive)
    if fused is None:
        return Kind(GIVEN, 0, 0.0, (stored[0], stored[1], stored[2]), alive, aligned)
    return Kind(fused.formula, fused.sixteenths, fused.eps, (stored[0], stored[1], stored[2]), alive, aligned)


def _scales(fused: Sequence[Fused | None], device: torch.device) -> Tensor:
    """The scale of every piece; those that are tensors on the device never visit the host."""
    scales = [1.0 if known is None else known.scale for known in fused]
    if not any(isinstance(scale, Tensor) for scale in scales):
        return to_device(scales, torch.float32, device)
    tensors = [torch.as_tensor(scale, dtype=torch.float64).to(device, non_blocking=True) for scale in scales]
    return torch.stack(tensors).float()
