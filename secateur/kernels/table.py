"""Tables: many tensors as one launch sees them. Each is cut into tiles, and a tile's number says which tensor it is of.

A position in a table is `tile * TILE + offset`, so positions run in (tensor, flat index) order, the order of ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from secateur.kernels.fusing import GIVEN, Fused, fuse
from secateur.pieces import Piece

TILE = 4096  # weights per program: 16 a thread, so that loads are wide and registers leave room for other programs

# Columns of a table's rows, one row per tensor; all int64.
FACT0, FACT1, FACT2, ALIVE, MASK, NUMEL, FIRST, GROUP, COUNTED, DIVISOR, MODULUS, LAUNCH = range(12)
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
    number: int
    tiles: Tensor | None  # int32; None when they are `first`, `first + 1`, ...
    first: int
    count: int
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
        self.first, self.owners = layout(tuple(piece.numel for piece in pieces), TILE, self.device)
        self.tiles = self.first[-1]
        self.launches = self._launches(fused)
        of_piece = {number: launch.number for launch in self.launches for number in self._members[launch.number]}
        rows = [self._row(n, known, of_piece[n]) for n, known in enumerate(fused)]
        self.rows = to_device(rows, torch.int64, self.device)
        self.scales = _scales(fused, self.device)

    def _row(self, number: int, fused: Fused | None, launch: int) -> list[int]:
        piece, mask = self.pieces[number], self.masks[number]
        facts = fused.facts if fused is not None else ()
        addresses = [*(fact.data_ptr() for fact in facts), 0, 0, 0][:3]
        alive = 0 if piece.alive is None else piece.alive.data_ptr()
        group, counted = self.groups[number], int(self.counted[number])
        spread = fused.spread if fused is not None else (1, 1)
        return [*addresses, alive, mask.data_ptr(), piece.numel, self.first[number], group, counted, *spread, launch]

    def _launches(self, fused: Sequence[Fused | None]) -> list[Launch]:
        members: dict[object, list[int]] = {}
        kinds: dict[object, Kind] = {}
        for number, (piece, known) in enumerate(zip(self.pieces, fused, strict=True)):
            kind = _kind(piece, self.masks[number], known)
            key: object = kind if known is not None else number
            members.setdefault(key, []).append(number)
            kinds[key] = kind
        self._members = list(members.values())
        return [self._launch(place, kinds[key], found) for place, (key, found) in enumerate(members.items())]

    def _launch(self, place: int, kind: Kind, members: list[int]) -> Launch:
        first, end = self.first[members[0]], self.first[members[-1] + 1]
        piece = members[0] if kind.formula == GIVEN else None
        if members == list(range(members[0], members[-1] + 1)):
            return Launch(kind, place, None, first, end - first, piece)
        ranges = [torch.arange(self.first[n], self.first[n + 1], device="cpu") for n in members]
        tiles = to_device(torch.cat(ranges), torch.int32, self.device)
        return Launch(kind, place, tiles, 0, tiles.numel(), piece)


@lru_cache(maxsize=32)
def layout(sizes: tuple[int, ...], tile: int, device: torch.device) -> tuple[list[int], Tensor]:
    """First tile of each tensor, and which tensor each tile is of (int32). The same from step to step, so it is kept."""
    counts = [-(-size // tile) for size in sizes]
    owners = torch.arange(len(sizes), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
    return [0, *accumulate(counts)], to_device(owners, torch.int32, device)


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
