"""Triton kernels over what a sweep collected: exact keys, the cut among them, its ties. See reference.py for each."""

from __future__ import annotations

import triton
import triton.language as tl

from secateur.kernels.constants import (
    BELOW,
    BITS,
    BLOCK,
    COLUMNS,
    COUNTED,
    COUNTERS,
    CROWDED,
    EQUAL,
    FIRST,
    HIGH,
    LAUNCH,
    LISTED,
    LOW,
    MASK,
    ORDERED,
    OVER,
    RANK,
    RUN,
    TILE,
    WORDS,
)
from secateur.kernels.counting import _add_to_histogram
from secateur.kernels.scoring import key_of, score_at

RIVALS: tl.constexpr = tl.constexpr(64)  # others that those in order are compared with at a time
NOWHERE: tl.constexpr = tl.constexpr(1 << 62)  # a position after all others


@triton.jit
def _collected(block_groups, counters, rooms, COLUMN: tl.constexpr):
    """The block of what was collected that this program looks at: its group, its places, and which are filled."""
    block = tl.program_id(0)
    group = tl.load(block_groups + block).to(tl.int64)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    over = tl.load(counters + group * COUNTERS + OVER) != 0  # some of it was never written: take none
    filled = tl.load(rooms + group) + tl.where(over, 0, tl.load(counters + group * COUNTERS + COLUMN))
    return group, place, place < filled


@triton.jit
def _drop(rows, owners, position, gone, STORED: tl.constexpr):
    """Clear the mask at these positions of the table."""
    tile = position // TILE
    row = rows + tl.load(owners + tile, mask=gone, other=0).to(tl.int64) * COLUMNS
    index = (tile - tl.load(row + FIRST, mask=gone, other=0)) * TILE + position % TILE
    address = tl.load(row + MASK, mask=gone, other=0)
    if STORED == BITS:
        word = address.to(tl.pointer_type(tl.int32)) + (index >> 5)
        rest = ~(tl.full(index.shape, 1, tl.int32) << (index & 31).to(tl.int32))
        tl.atomic_and(word, rest, mask=gone, sem="relaxed")
    else:
        tl.store(address.to(tl.pointer_type(tl.int8)) + index, tl.zeros(index.shape, tl.int8), mask=gone)


@triton.jit(do_not_specialize=["launch"])
def _unfold(
    rows, scales, owners, block_groups, counters, rooms, words, positions, keys, spoiled, ranges, eps, launch,
    FORMULA: tl.constexpr, SIXTEENTHS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    group, place, valid = _collected(block_groups, counters, rooms, WORDS)
    if tl.max(valid.to(tl.int32)) > 0:
        word = tl.load(words + place, mask=valid, other=0)
        start = (word >> 16) * RUN
        owner = tl.load(owners + start // TILE, mask=valid, other=0).to(tl.int64)
        row = rows + owner * COLUMNS
        valid = valid & (tl.load(row + LAUNCH) == launch)
        base = start - tl.load(row + FIRST) * TILE
        scale = tl.load(scales + owner)
        low, high = tl.load(ranges + group * 4 + LOW), tl.load(ranges + group * 4 + HIGH)
        count = counters + group * COUNTERS
        begin = tl.load(rooms + group)
        room = tl.load(rooms + group + 1) - begin
        bits = tl.where(valid, word & 0xFFFF, 0).to(tl.int32)
        while tl.max(bits) > 0:
            some = bits > 0
            lowest = bits & -bits
            lane = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # the exponent of a power of two
            bits = bits ^ lowest
            score = score_at(
                row, scale, base, lane, some, scales, eps, FORMULA, SIXTEENTHS, TYPE0, TYPE1, TYPE2, False, False
            )
            bad = some & (score != score)
            if tl.max(bad.to(tl.int32)) > 0:
                tl.atomic_add(spoiled + owner, tl.full(owner.shape, 1, tl.int64), mask=bad, sem="relaxed")
            key = key_of(score)
            below = some & (key < low)  # a rough score kept it; the exact one does not
            if tl.max(below.to(tl.int32)) > 0:
                _drop(rows, owners, start + lane, below, STORED)
                counted = tl.sum(tl.where(below, tl.load(row + COUNTED), 0))
                tl.atomic_add(count + BELOW, counted, sem="relaxed")
            some = some & (key >= low) & (key <= high)
            found = tl.sum(some.to(tl.int32))
            slot = tl.atomic_add(count + LISTED, found.to(tl.int64), sem="relaxed")
            where = slot + tl.cumsum(some.to(tl.int32), 0) - 1
            fits = some & (where < room)
            tl.store(positions + begin + where, start + lane, mask=fits)
            tl.store(keys + begin + where, key, mask=fits)
            if slot + found > room:
                tl.store(count + OVER, tl.full((), 1, tl.int64))


@triton.jit
def _tally(rows, owners, block_groups, counters, rooms, positions, keys, ranges, counts, PEERS: tl.constexpr):
    group, place, valid = _collected(block_groups, counters, rooms, LISTED)
    if tl.max(valid.to(tl.int32)) > 0:
        if PEERS:
            tile = tl.load(positions + place, mask=valid, other=0) // TILE
            owner = tl.load(owners + tile, mask=valid, other=0).to(tl.int64)
            valid = valid & (tl.load(rows + owner * COLUMNS + COUNTED, mask=valid, other=0) != 0)
        _add_to_histogram(tl.load(keys + place, mask=valid, other=0), valid, group, ranges, counts)


@triton.jit(do_not_specialize=["few_room"])
def _settle(
    rows, owners, block_groups, counters, failed, rooms, positions, keys, ranges, few, few_room, equal,
    STORED: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    group, place, valid = _collected(block_groups, counters, rooms, LISTED)
    if (tl.load(failed + group) == 0) & (tl.max(valid.to(tl.int32)) > 0):
        cut = tl.load(ranges + group * 4 + LOW)
        key = tl.load(keys + place, mask=valid, other=0)
        position = tl.load(positions + place, mask=valid, other=0)
        _drop(rows, owners, position, valid & (key < cut), STORED)
        same = valid & (key == cut)
        found = tl.sum(same.to(tl.int32))
        if found > 0:
            slot = tl.atomic_add(counters + group * COUNTERS + EQUAL, found.to(tl.int64), sem="relaxed")
            where = slot + tl.cumsum(same.to(tl.int32), 0) - 1
            tl.store(few + group * few_room + where, position, mask=same & (where < few_room))
            if PEERS:
                owner = tl.load(owners + position // TILE, mask=same, other=0).to(tl.int64)
                tl.atomic_add(equal + owner, tl.full(owner.shape, 1, tl.int64), mask=same, sem="relaxed")


@triton.jit(do_not_specialize=["few_room"])
def _order(rows, owners, counters, failed, ranges, few, few_room, quotas, STORED: tl.constexpr, PEERS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) // (few_room // ORDERED)
    block = tl.program_id(0) % (few_room // ORDERED)
    found = tl.load(counters + group * COUNTERS + EQUAL)
    if (found > few_room) & (tl.load(failed + group) == 0):
        tl.store(failed + group, tl.full((), CROWDED, tl.int64))  # by every program alike
    elif (block * ORDERED < found) & (tl.load(failed + group) == 0):
        place = block * ORDERED + tl.arange(0, ORDERED)
        valid = place < found
        position = tl.load(few + group * few_room + place, mask=valid, other=0)
        owner = tl.load(owners + position // TILE, mask=valid, other=0).to(tl.int64)
        quota = tl.zeros((ORDERED,), tl.int64) + tl.load(ranges + group * 4 + RANK)
        if PEERS:
            quota = tl.load(quotas + owner, mask=valid, other=0)
        earlier = tl.zeros((ORDERED,), tl.int32)
        for first in range(0, found, RIVALS):
            other = first + tl.arange(0, RIVALS)
            rival = tl.load(few + group * few_room + other, mask=other < found, other=NOWHERE)
            before = rival[None, :] < position[:, None]
            if PEERS:
                theirs = tl.load(owners + rival // TILE, mask=other < found, other=-1).to(tl.int64)
                before = before & (theirs[None, :] == owner[:, None])
            earlier += tl.sum(before.to(tl.int32), 1)
        _drop(rows, owners, position, valid & (earlier < quota), STORED)
