"""Tables: many tensors as one launch sees them. Each is cut into tiles, and a tile's number says which tensor it is of.

A position in a table is `tile * TILE + offset`, so positions run in (tensor, flat index) order, the order of ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.kernels.fusing import GIVEN, Fused, Plan, fuse, plan_for
from secateur.selection.pieces import Piece, sent

TILE = 4096  # weights per program: 32 for each of 128 threads

# Columns of a table's rows, one row per tensor; all int64.
FACT0, FACT1, FACT2, ALIVE, MASK, NUMEL, FIRST, GROUP, COUNTED, DIVISOR, MODULUS, LAUNCH = range(12)
COLUMNS = 12

GIVEN_PLAN = Plan(GIVEN, ())
NO_TYPES: tuple[torch.dtype, ...] = (torch.float32,)

NOTHING, BOOL, BITS = range(3)  # how a mask is stored: not at all, a byte a weight, a bit a weight


class Kind(NamedTuple):
    """What a kernel is compiled for, and its constants. Tensors of one kind share a launch."""

    plan: Plan
    dtypes: tuple[torch.dtype, ...]
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


def new_masks(sizes: Sequence[int], kind: int, device: torch.device) -> list[Tensor]:
    """Memory for flat masks, in one piece. Bits come in whole words, since single ones are cleared atomically."""
    used = list(sizes) if kind == BOOL else [-(-size // 32) * 4 for size in sizes]
    room = [-(-size // 16) * 16 for size in used]
    parts = torch.empty(sum(room), dtype=torch.bool if kind == BOOL else torch.uint8, device=device).split(room)
    return [part if size == part.numel() else part[:size] for part, size in zip(parts, used, strict=True)]


def mask_kind(mask: Tensor | None) -> int:
    """How this mask is stored."""
    return NOTHING if mask is None else BOOL if mask.dtype == torch.bool else BITS


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor made on the host and sent without waiting."""
    if isinstance(values, Tensor):
        here = values.to(dtype)
        here = here.pin_memory() if device.type == "cuda" else here
    else:
        here = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return sent(here, device)


class Laid(NamedTuple):
    """What a table has on the device, for tensors at these addresses: it holds none of them, so it can be kept."""

    rows: Tensor
    launches: list[Launch]
    launch_of: list[int]


class Table:
    """The pieces of one or more selections (groups), ready for launches on one device."""

    def __init__(self, pieces: Sequence[Piece], groups: Sequence[int], masks: Sequence[Tensor], rank: int = 0) -> None:
        self.pieces, self.groups, self.masks, self.device = pieces, groups, masks, pieces[0].device
        self.mask_kind = mask_kind(masks[0])
        self.counted = [not piece.replicated or rank == 0 for piece in pieces]
        self.first, self.owners = layout(tuple([piece.numel for piece in pieces]), TILE, self.device)
        self.tiles = self.first[-1]
        plans: dict[int, Plan | None] = {}
        scales: list[Any] = []
        entries = []
        for number, piece in enumerate(pieces):
            fused = None
            if piece.source is not None:
                score, facts = piece.source
                plan = plans[id(score)] if id(score) in plans else plans.setdefault(id(score), plan_for(score))
                fused = None if plan is None else fuse(plan, facts)
            scales.append(1.0 if fused is None else fused[2])
            entries.append(self._describe(number, piece, fused))
        self.rows, self.launches, self._launch_of = _lay(tuple(entries), self.device)
        self.scales = _scales(scales, self.device)

    def launch_of(self, piece: int) -> int:
        """The number of the launch a piece belongs to."""
        return self._launch_of[piece]

    def _describe(self, number: int, piece: Piece, fused: Fused | None) -> Entry:
        """All that kernels are told of a piece: what it has in common with those it shares a launch with (the fields
        of a Kind, and its own number if it goes alone), and its row of the table but for that launch."""
        alive, numel, place = piece.alive, piece.numel, self.masks[number].data_ptr()
        address = 0 if alive is None else alive.data_ptr()
        row = (address, place, numel, self.first[number], self.groups[number], self.counted[number])
        if fused is None:
            aligned = (address | place | numel) & 15 == 0
            return (GIVEN_PLAN, NO_TYPES, mask_kind(alive), aligned, number), (0, 0, 0, *row, 1, 1)
        plan, facts, _, spread = fused
        found = [fact.data_ptr() for fact in facts]
        aligned = (address | place | numel | found[0] | found[-1] | found[len(found) // 2]) & 15 == 0
        key = plan, tuple([fact.dtype for fact in facts]), mask_kind(alive), aligned, -1
        return key, (*found, *(0, 0, 0)[len(found) :], *row, *spread)


Entry = tuple[tuple[Any, ...], tuple[int, ...]]


@lru_cache(maxsize=8)
def _lay(entries: tuple[Entry, ...], device: torch.device) -> Laid:
    """Rows and launches for pieces so described. Masks are updated many times with everything in the same place."""
    members: dict[Any, list[int]] = {}
    numbers: list[int] = []
    launch_of = []
    places: dict[Any, int] = {}
    for number, (key, row) in enumerate(entries):
        members.setdefault(key, []).append(number)
        launch_of.append(places.setdefault(key, len(places)))
        numbers += (*row, launch_of[-1])
    launches = [_launch(place, key, found, entries, device) for place, (key, found) in enumerate(members.items())]
    return Laid(to_device(numbers, torch.int64, device), launches, launch_of)


def _launch(place: int, key: Any, members: list[int], entries: tuple[Entry, ...], device: torch.device) -> Launch:
    plan, types, alive, aligned, alone = key
    kind = Kind(plan, (*types, torch.float32, torch.float32)[:3], alive, aligned)
    piece = None if alone < 0 else alone
    starts = [entries[number][1][FIRST] for number in members]
    counts = [-(-entries[number][1][NUMEL] // TILE) for number in members]
    if len(members) == members[-1] + 1 - members[0]:
        return Launch(kind, place, None, starts[0], sum(counts), piece)
    ranges = [torch.arange(s, s + count, device="cpu") for s, count in zip(starts, counts, strict=True)]
    tiles = to_device(torch.cat(ranges), torch.int32, device)
    return Launch(kind, place, tiles, 0, tiles.numel(), piece)


@lru_cache(maxsize=8)
def layout(sizes: tuple[int, ...], tile: int, device: torch.device) -> tuple[list[int], Tensor]:
    """First tile of each tensor, and which tensor each tile is of (int32). The same every time, so it is kept."""
    counts = [-(-size // tile) for size in sizes]
    owners = torch.arange(len(sizes), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
    return [0, *accumulate(counts)], to_device(owners, torch.int32, device)


def _scales(scales: Sequence[Any], device: torch.device) -> Tensor:
    """The scale of every piece; those that are tensors on the device never visit the host."""
    if not any(isinstance(scale, Tensor) for scale in scales):
        return _numbers(tuple(scales), device)
    tensors = [sent(torch.as_tensor(scale, dtype=torch.float64), device) for scale in scales]
    return torch.stack(tensors).float()


@lru_cache(maxsize=8)
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    return to_device(values, torch.float32, device)
