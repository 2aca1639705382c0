"""Triton kernels of the exact selection. reference.py states what each does, in torch; pipeline.py, in which order."""

from __future__ import annotations

import triton
import triton.language as tl

from secateur.kernels import board, table
from secateur.kernels.scoring import BITS, alive_at, key_of, score_at, value_of

TILE = tl.constexpr(table.TILE)
COLUMNS = tl.constexpr(table.COLUMNS)
MASK = tl.constexpr(table.MASK)
NUMEL = tl.constexpr(table.NUMEL)
FIRST = tl.constexpr(table.FIRST)
GROUP = tl.constexpr(table.GROUP)
COUNTED = tl.constexpr(table.COUNTED)
LOW, HIGH, SHIFT, RANK = (tl.constexpr(column) for column in range(4))
BELOW, TAKEN, OVER, EQUAL = (tl.constexpr(column) for column in range(4))
BINS = tl.constexpr(board.BINS)
SLOTS = tl.constexpr(board.SLOTS)
BLOCK = tl.constexpr(board.BLOCK)
FEW = tl.constexpr(board.FEW)
CROWDED = tl.constexpr(board.CROWDED)
RUN = tl.constexpr(board.RUN)


@triton.jit
def _add_to_histogram(keys, valid, group, ranges, counts):
    """Count keys by their digit in the group's range; what lies below or above it in the last two slots."""
    low = tl.load(ranges + group * 4 + LOW)
    high = tl.load(ranges + group * 4 + HIGH)
    digit = (keys.to(tl.int64) - low) >> tl.load(ranges + group * 4 + SHIFT)
    slot = tl.where(keys < low, BINS, tl.where(keys > high, BINS + 1, digit))
    tl.atomic_add(counts + group * SLOTS + slot, tl.full(keys.shape, 1, tl.int64), mask=valid, sem="relaxed")


@triton.jit
def _survey(
    rows, scales, owners, tiles, count, stride, eps, ranges, counts,
    FORMULA: tl.constexpr, SIXTEENTHS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0).to(tl.int64) * (TILE // RUN) + tl.arange(0, TILE // RUN)
    jitter = ((run * 0x9E3779B1) & 0xFFFFFFFF) >> 8
    place = (run * stride + jitter % stride) * RUN
    inside = place < count * TILE
    tile = tl.load(tiles + place // TILE, mask=inside, other=0).to(tl.int64)
    row = rows + tl.load(owners + tile, mask=inside, other=0).to(tl.int64) * COLUMNS
    start = (tile - tl.load(row + FIRST)) * TILE + place % TILE
    index = start[:, None] + tl.arange(0, RUN)[None, :]
    valid = inside[:, None] & (index < tl.load(row + NUMEL)[:, None]) & (tl.load(row + COUNTED)[:, None] != 0)
    wide = row[:, None]
    scale = tl.load(scales + tl.load(owners + tile, mask=inside, other=0))[:, None]
    valid = alive_at(wide, index, valid, KIND, False)
    score = score_at(wide, scale, index, valid, scales, 0, eps, FORMULA, SIXTEENTHS, TYPE0, TYPE1, TYPE2, False)
    _add_to_histogram(key_of(score), valid & (score == score), tl.load(row + GROUP)[:, None], ranges, counts)


@triton.jit
def _count(scores, size, group, ranges, counts):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + place, mask=place < size, other=float("nan"))
    _add_to_histogram(key_of(score), score == score, tl.full((1,), group, tl.int64), ranges, counts)


@triton.jit
def _narrow(
    ranges, counts, totals, wanted, shares, failed, sigmas,
    SAMPLED: tl.constexpr, COLLECTED: tl.constexpr, BEGIN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    mine = ranges + group * 4
    bins = counts + group * SLOTS
    low, high, shift, first = tl.load(mine + LOW), tl.load(mine + HIGH), tl.load(mine + SHIFT), tl.load(mine + RANK)
    lanes = tl.arange(0, STEP)
    last = first
    if SAMPLED:
        size = tl.load(bins + BINS) + tl.load(bins + BINS + 1)
        for start in range(0, BINS, STEP):
            size += tl.sum(tl.load(bins + start + lanes))
        share = tl.load(shares + group)
        middle = share * size.to(tl.float64)
        margin = sigmas * tl.sqrt(middle * (1.0 - share)) + 1.0
        first = tl.floor(middle - margin).to(tl.int64) - tl.load(bins + BINS)
        last = tl.ceil(middle + margin).to(tl.int64) - tl.load(bins + BINS)
    elif BEGIN:
        first = tl.load(wanted + group) - tl.load(totals + group * 4 + BELOW)
        last = first
    seen = first * 0
    before = first * 0
    begin = first * 0
    end = first * 0
    for start in range(0, BINS, STEP):
        here = tl.load(bins + start + lanes)
        upto = seen + tl.cumsum(here, 0)
        begin += tl.sum((upto < first).to(tl.int64))
        end += tl.sum((upto < last).to(tl.int64))
        before = tl.maximum(before, tl.max(tl.where(upto < first, upto, 0)))
        seen += tl.sum(here)
        tl.store(bins + start + lanes, tl.zeros((STEP,), tl.int64))  # clean for the next turn
    tl.store(bins + BINS, seen * 0)
    tl.store(bins + BINS + 1, seen * 0)
    begin = tl.minimum(begin, BINS - 1)
    new_high = tl.where(end < BINS, tl.minimum(high, low + ((end + 1) << shift) - 1), high)
    new_low = tl.minimum(low + (begin << shift), new_high)
    if COLLECTED:
        bad = (first < 1) | (first > seen) | (tl.load(totals + group * 4 + OVER) != 0)
        bad = bad | (tl.load(failed + group) != 0)  # stays MISSED at the second turn
        tl.store(failed + group, bad.to(tl.int64))
        new_low, new_high = tl.where(bad, low, new_low), tl.where(bad, high, new_high)
    tl.store(mine + LOW, new_low)
    tl.store(mine + HIGH, new_high)
    tl.store(mine + RANK, first - before)
    width = new_high - new_low
    bits = first * 0
    for place in tl.static_range(33):
        bits += ((width >> place) > 0).to(tl.int64)
    tl.store(mine + SHIFT, tl.maximum(bits - 16, 0))


@triton.jit
def _write_mask(address, index, kept, valid, start, numel, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """A tile of a mask, as bytes or as bits."""
    if KIND == BITS:
        bits = tl.reshape(kept.to(tl.int32), (TILE // 8, 8)) << tl.arange(0, 8)[None, :]
        place = (start >> 3) + tl.arange(0, TILE // 8)
        pointer = address.to(tl.pointer_type(tl.uint8))
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
        tl.store(pointer + place, tl.sum(bits, axis=1).to(tl.uint8), mask=place * 8 < numel)
    else:
        pointer = address.to(tl.pointer_type(tl.int8))
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
        tl.store(pointer + index, kept.to(tl.int8), mask=valid)


@triton.jit
def _sweep(
    rows, scales, owners, tiles, given, given_tile, eps, ranges, counters, inside_of, spoiled, rooms, positions, keys,
    FORMULA: tl.constexpr, SIXTEENTHS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr,
    KIND: tl.constexpr, STORED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tile = tl.load(tiles + tl.program_id(0)).to(tl.int64)
    owner = tl.load(owners + tile).to(tl.int64)
    row = rows + owner * COLUMNS
    numel = tl.load(row + NUMEL)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    first = tl.load(row + FIRST)
    start = (tile - first) * TILE
    index = start + tl.arange(0, TILE)
    valid = index < numel
    group = tl.load(row + GROUP)
    alive = alive_at(row, index, valid, KIND, ALIGNED)
    given_start = (given_tile - first) * TILE
    score = score_at(
        row, tl.load(scales + owner), index, valid, given, given_start, eps,
        FORMULA, SIXTEENTHS, TYPE0, TYPE1, TYPE2, ALIGNED,
    )  # fmt: skip
    kept = alive & (score >= value_of(tl.load(ranges + group * 4 + LOW)))
    middle = kept & (score <= value_of(tl.load(ranges + group * 4 + HIGH)))
    _write_mask(tl.load(row + MASK), index, kept, valid, start, numel, STORED, ALIGNED)
    found = tl.sum(middle.to(tl.int32))
    below = tl.sum(alive.to(tl.int32)) - tl.sum(kept.to(tl.int32))
    nan = tl.sum((alive & (score != score)).to(tl.int32))
    if nan > 0:
        tl.atomic_add(spoiled + owner, nan.to(tl.int64), sem="relaxed")
    tl.store(inside_of + tile, found)
    mine = counters + group * 4
    counted = tl.load(row + COUNTED)
    tl.atomic_add(mine + BELOW, below.to(tl.int64) * counted, sem="relaxed")
    if found > 0:
        begin = tl.load(rooms + group)
        room = tl.load(rooms + group + 1) - begin
        slot = tl.atomic_add(mine + TAKEN, found.to(tl.int64), sem="relaxed")
        if slot + found > room:
            tl.store(mine + OVER, 1)
        else:
            where = begin + slot + tl.cumsum(middle.to(tl.int32), 0) - 1
            tl.store(positions + where, tile * TILE + tl.arange(0, TILE), mask=middle)
            tl.store(keys + where, key_of(score), mask=middle)


@triton.jit
def _collected(block_groups, counters, rooms):
    """The block of collected keys this program looks at: its group, its places, and which of them are filled."""
    block = tl.program_id(0)
    group = tl.load(block_groups + block).to(tl.int64)
    begin = tl.load(rooms + group)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    filled = tl.minimum(begin + tl.load(counters + group * 4 + TAKEN), tl.load(rooms + group + 1))
    return group, place, place < filled


@triton.jit
def _tally(rows, owners, block_groups, counters, rooms, positions, keys, ranges, counts, PEERS: tl.constexpr):
    group, place, valid = _collected(block_groups, counters, rooms)
    if tl.max(valid.to(tl.int32)) > 0:
        if PEERS:
            tile = tl.load(positions + place, mask=valid, other=0) // TILE
            owner = tl.load(owners + tile, mask=valid, other=0).to(tl.int64)
            valid = valid & (tl.load(rows + owner * COLUMNS + COUNTED, mask=valid, other=0) != 0)
        _add_to_histogram(tl.load(keys + place, mask=valid, other=0), valid, group, ranges, counts)


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


@triton.jit
def _settle(
    rows, owners, block_groups, counters, failed, rooms, positions, keys, ranges, few, equal,
    STORED: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    group, place, valid = _collected(block_groups, counters, rooms)
    if (tl.load(failed + group) == 0) & (tl.max(valid.to(tl.int32)) > 0):
        cut = tl.load(ranges + group * 4 + LOW)
        key = tl.load(keys + place, mask=valid, other=0)
        position = tl.load(positions + place, mask=valid, other=0)
        _drop(rows, owners, position, valid & (key < cut), STORED)
        same = valid & (key == cut)
        found = tl.sum(same.to(tl.int32))
        if found > 0:
            slot = tl.atomic_add(counters + group * 4 + EQUAL, found.to(tl.int64), sem="relaxed")
            where = slot + tl.cumsum(same.to(tl.int32), 0) - 1
            tl.store(few + group * FEW + where, position, mask=same & (where < FEW))
            if PEERS:
                owner = tl.load(owners + position // TILE, mask=same, other=0).to(tl.int64)
                tl.atomic_add(equal + owner, tl.full(owner.shape, 1, tl.int64), mask=same, sem="relaxed")


@triton.jit
def _order(rows, owners, counters, failed, ranges, few, quotas, STORED: tl.constexpr, PEERS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    found = tl.load(counters + group * 4 + EQUAL)
    if found > FEW:
        if tl.load(failed + group) == 0:
            tl.store(failed + group, tl.full((), CROWDED, tl.int64))
    elif tl.load(failed + group) == 0:
        lane = tl.arange(0, FEW)
        valid = lane < found
        position = tl.load(few + group * FEW + lane, mask=valid, other=0)
        owner = tl.load(owners + position // TILE, mask=valid, other=0).to(tl.int64)
        quota = tl.zeros((FEW,), tl.int64) + tl.load(ranges + group * 4 + RANK)
        if PEERS:
            quota = tl.load(quotas + owner, mask=valid, other=0)
        earlier = tl.zeros((FEW,), tl.int64)
        for other in range(found):
            rival = tl.load(few + group * FEW + other)
            before = rival < position
            if PEERS:
                before = before & (tl.load(owners + rival // TILE) == owner)
            earlier += before.to(tl.int64)
        _drop(rows, owners, position, valid & (earlier < quota), STORED)


@triton.jit
def _give_up(
    rows, scales, owners, tiles, given, given_tile, eps, ranges, before, quotas,
    FORMULA: tl.constexpr, SIXTEENTHS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr,
    KIND: tl.constexpr, STORED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tile = tl.load(tiles + tl.program_id(0)).to(tl.int64)
    owner = tl.load(owners + tile).to(tl.int64)
    quota = tl.load(quotas + owner)
    earlier = tl.load(before + tile)
    if earlier < quota:
        row = rows + owner * COLUMNS
        numel = tl.load(row + NUMEL)
        first = tl.load(row + FIRST)
        start = (tile - first) * TILE
        index = start + tl.arange(0, TILE)
        valid = index < numel
        alive = alive_at(row, index, valid, KIND, ALIGNED)
        score = score_at(
            row, tl.load(scales + owner), index, valid, given, (given_tile - first) * TILE, eps,
            FORMULA, SIXTEENTHS, TYPE0, TYPE1, TYPE2, ALIGNED,
        )  # fmt: skip
        cut = value_of(tl.load(ranges + tl.load(row + GROUP) * 4 + LOW))
        same = alive & (score == cut)
        rank = earlier + tl.cumsum(same.to(tl.int32), 0)
        kept = (alive & (score > cut)) | (same & (rank > quota))
        _write_mask(tl.load(row + MASK), index, kept, valid, start, numel, STORED, ALIGNED)
