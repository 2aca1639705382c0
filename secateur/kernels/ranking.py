"""A Triton kernel that ranks weights on the spot: rows, n:m groups, any tiles that lie in one stretch of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from secateur.kernels.board import Board
from secateur.kernels.constants import BITS, COLUMNS, MASK, NUMEL, RUN
from secateur.kernels.scoring import alive_at, formula_of, key_of, launch, score_at
from secateur.kernels.table import Table, layout, to_device
from secateur.selection.pieces import DEAD_KEY as DEAD

DEAD_KEY = tl.constexpr(DEAD)
LONGEST = 1 << 14  # weights of a tile that fit a program's registers


@triton.jit(do_not_specialize=["width"])
def _rank(
    rows, scales, owners, firsts, members, gone, given, eps, width, spoiled,
    FORMULA: tl.constexpr, SIXTEENTHS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr,
    KIND: tl.constexpr, STORED: tl.constexpr, TILES: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    place = tl.load(owners + tl.program_id(0)).to(tl.int64)
    owner = tl.load(members + place)
    row = rows + owner * COLUMNS
    tile = (tl.program_id(0) - tl.load(firsts + place)) * TILES + tl.arange(0, TILES)
    lane = tl.arange(0, ROOM)
    start = tl.min(tile) * width
    offset = (tl.arange(0, TILES) * width)[:, None] + lane[None, :]
    valid = (start + offset < tl.load(row + NUMEL)) & (lane < width)[None, :]
    alive = alive_at(row, start * 0, start + offset, valid, KIND, False)
    score = score_at(
        row, tl.load(scales + owner), start * 0, start + offset, valid, given, eps,
        FORMULA, SIXTEENTHS, TYPE0, TYPE1, TYPE2, False, False,
    )  # fmt: skip
    nan = tl.sum((alive & (score != score)).to(tl.int32))
    if nan > 0:
        tl.atomic_add(spoiled + owner, nan.to(tl.int64), sem="relaxed")
    keys = tl.where(alive, key_of(score), tl.where(valid, DEAD_KEY, 0x7FFFFFFF))
    count = tl.load(gone + place).to(tl.int32)
    # The count-th lowest key, bit by bit from the top: the largest with fewer than `count` below it.
    cut = tl.full((TILES,), -0x80000000, tl.int32)
    for bit in tl.static_range(31, -1, -1):
        candidate = cut ^ (-0x80000000 if bit == 31 else 1 << bit)
        fewer = tl.sum((keys < candidate[:, None]).to(tl.int32), axis=1) < count
        cut = tl.where(fewer, candidate, cut)
    below = tl.sum((keys < cut[:, None]).to(tl.int32), axis=1)
    same = keys == cut[:, None]
    rank = below[:, None] + tl.cumsum(same.to(tl.int32), 1)
    kept = alive & ((keys > cut[:, None]) | (same & (rank > count)) | (tl.zeros_like(keys) == count))
    address = tl.load(row + MASK)
    if STORED == BITS:
        bits = tl.reshape(kept.to(tl.int32) << (offset & 15).to(tl.int32), (TILES * ROOM // RUN, RUN))
        where = tl.reshape(start + offset, (TILES * ROOM // RUN, RUN))
        inside = tl.reshape(valid.to(tl.int32), (TILES * ROOM // RUN, RUN))
        words = address.to(tl.pointer_type(tl.uint16)) + tl.min(where, axis=1) // RUN
        tl.store(words, tl.sum(bits, axis=1).to(tl.uint16), mask=tl.max(inside, axis=1) > 0)
    else:
        pointer = address.to(tl.pointer_type(tl.int8)) + start
        tl.store(pointer + offset, kept.to(tl.int8), mask=valid)


def packs(width: int) -> bool:
    """Whether tiles of this width can be written as bits: words of sixteen must not be shared by programs."""
    return width % RUN.value == 0 or (width & (width - 1)) == 0


def rank(table: Table, board: Board, widths: Sequence[int], gone: Sequence[int]) -> None:
    """In every tile of `widths[piece]` neighbours, drop the lowest scores until `gone[piece]` are; the dead count."""
    for number, of in enumerate(table.launches):
        assert of.piece is None
        members = [n for n in range(len(table.pieces)) if table.launch_of(n) == number]
        for width in dict.fromkeys(widths[n] for n in members):
            mine = [n for n in members if widths[n] == width]
            _launch(table, board, number, mine, width, [gone[n] for n in mine])


def _launch(table: Table, board: Board, number: int, members: list[int], width: int, gone: list[int]) -> None:
    room = triton.next_power_of_2(width)
    tiles = max(1, 4096 // room, -(-RUN.value // room))
    counts = tuple([table.pieces[n].numel // width for n in members])
    firsts, owners = layout(counts, tiles, table.device)
    size = len(members)
    sent = to_device([*firsts[:-1], *members, *gone], torch.int64, table.device).split([size, size, size])
    of = table.launches[number]
    arguments = (
        table.rows, table.scales, owners, *sent, table.scales, of.kind.plan.eps, width, board.spoiled
    )  # fmt: skip
    warps = 16 if room * tiles > 8192 else 8
    launch(_rank, owners.numel(), arguments, (*formula_of(of), of.kind.alive, table.mask_kind, tiles, room), warps)
