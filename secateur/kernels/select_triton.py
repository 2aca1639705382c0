"""Triton kernels of the selection, in the order in which a selection launches them; last the one that ranks neighbours.

reference.py has a plain-torch twin of each kernel `_name` under `name`, which documents it; launch.py launches them.
Every program handles one tile of one tensor (`_tile`), one block of collected candidates (`_collected`), or one group.
Constants in capitals are compile-time constants; KIND and STORED say how masks are stored (NOTHING, BOOL or BITS).
"""

from __future__ import annotations

import triton
import triton.language as tl

from secateur.kernels.scores_triton import (
    ALIVE,
    BELOW,
    BINS,
    BITS,
    BLOCK,
    BOOL,
    COLUMNS,
    COUNTED,
    COUNTERS,
    DIGIT,
    EQUAL,
    FIRST,
    GIVEN,
    GROUP,
    HIGH,
    INSIDE,
    LAUNCH,
    LISTED,
    LOW,
    MASK,
    NUMEL,
    OVER,
    RANK,
    RUN,
    SHIFT,
    SLOTS,
    TIES_PER_PROGRAM,
    TILE,
    TOO_MANY_TIES,
    WHOLE,
    WORDS,
    alive_at,
    key_of,
    read,
    roughly,
    score_at,
    value_of,
)
from secateur.selection import exact


@triton.jit
def _add_to_histogram(keys, valid, group, ranges, histogram):
    """Add keys inside the range of their group to its histogram."""
    low = tl.load(ranges + group * 4 + LOW)
    inside = valid & (keys >= low) & (keys <= tl.load(ranges + group * 4 + HIGH))
    digit = (keys.to(tl.int64) - low) >> tl.load(ranges + group * 4 + SHIFT)
    tl.atomic_add(histogram + group * SLOTS + digit, tl.full(keys.shape, 1, tl.int64), mask=inside, sem="relaxed")


@triton.jit
def _add_outside(keys, valid, group, ranges, histogram):
    """Count keys below and above the range. All go to two addresses, so they are summed before the atomic add."""
    below = valid & (keys < tl.load(ranges + group * 4 + LOW))
    above = valid & (keys > tl.load(ranges + group * 4 + HIGH))
    first = tl.min(group)
    if first == tl.max(group):
        ends = histogram + first * SLOTS + BINS
        tl.atomic_add(ends, tl.sum(below.to(tl.int32)).to(tl.int64), sem="relaxed")
        tl.atomic_add(ends + 1, tl.sum(above.to(tl.int32)).to(tl.int64), sem="relaxed")
    else:
        ones = tl.full(keys.shape, 1, tl.int64)
        tl.atomic_add(
            histogram + group * SLOTS + BINS + tl.zeros(keys.shape, tl.int64), ones, mask=below, sem="relaxed"
        )
        tl.atomic_add(
            histogram + group * SLOTS + BINS + 1 + tl.zeros(keys.shape, tl.int64), ones, mask=above, sem="relaxed"
        )


@triton.jit(do_not_specialize=["first", "count", "shift"])
def _sample_histogram(
    rows, scales, owners, tiles, first, count, shift, eps, ranges, histogram,
    FORMULA: tl.constexpr, SIXTEENTHS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr,
    KIND: tl.constexpr, LISTS: tl.constexpr, ROUGH: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0).to(tl.int64) * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
    jitter = ((run * 0x9E3779B1) >> 8) & ((1 << shift) - 1)
    place = ((run << shift) + jitter) * RUN
    inside = place < count.to(tl.int64) * TILE
    tile = first + place // TILE
    if LISTS:
        tile = tl.load(tiles + place // TILE, mask=inside, other=0).to(tl.int64)
    owner = tl.load(owners + tile, mask=inside, other=0).to(tl.int64)
    row = rows + owner * COLUMNS
    start = ((tile - tl.load(row + FIRST)) * TILE + place % TILE)[:, None]
    lane = tl.arange(0, RUN)[None, :]
    valid = inside[:, None] & (start + lane < tl.load(row + NUMEL)[:, None]) & (tl.load(row + COUNTED)[:, None] != 0)
    valid = alive_at(row[:, None], start, lane, valid, KIND, False)
    scale = tl.load(scales + owner)[:, None]
    score = score_at(
        row[:, None], scale, start, lane, valid, scales, eps, FORMULA, SIXTEENTHS, TYPE0, TYPE1, TYPE2, False, ROUGH
    )
    valid = valid & (score == score)
    keys = key_of(score)
    group = tl.load(row + GROUP)[:, None]
    _add_to_histogram(keys, valid, group, ranges, histogram)
    _add_outside(keys, valid, group, ranges, histogram)


@triton.jit(do_not_specialize=["size", "group"])
def _add_scores(scores, size, group, ranges, histogram):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + place, mask=place < size, other=float("nan"))
    keys = key_of(score)
    groups = tl.full((1,), group, tl.int64)
    _add_to_histogram(keys, score == score, groups, ranges, histogram)
    _add_outside(keys, score == score, groups, ranges, histogram)


@triton.jit
def _narrow_ranges(
    ranges, histogram, totals, wanted, fractions, failed, sigmas,
    SAMPLED: tl.constexpr, COLLECTED: tl.constexpr, BEGIN: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    mine = ranges + group * 4
    low, high, shift, first = tl.load(mine + LOW), tl.load(mine + HIGH), tl.load(mine + SHIFT), tl.load(mine + RANK)
    bins = histogram + group * SLOTS + tl.arange(0, BINS)
    ends = histogram + group * SLOTS + BINS
    here = tl.load(bins)
    upto = tl.cumsum(here, 0)
    seen = tl.sum(here)
    last = first
    if SAMPLED:
        below = tl.load(ends)
        fraction = tl.load(fractions + group)
        size = (seen + below + tl.load(ends + 1)).to(tl.float64)
        margin = sigmas * tl.sqrt(fraction * size * (1.0 - fraction)) + 1.0
        first = tl.floor(fraction * size - margin).to(tl.int64) - below
        last = tl.ceil(fraction * size + margin).to(tl.int64) - below
    elif BEGIN:
        first = tl.load(wanted + group) - tl.load(totals + group * COUNTERS + BELOW)
        last = first
    begin = tl.minimum(tl.sum((upto < first).to(tl.int64)), BINS - 1)
    end = tl.sum((upto < last).to(tl.int64))
    before = tl.max(tl.where(upto < first, upto, 0))
    tl.store(bins, tl.zeros((BINS,), tl.int64))  # clear for the next pass
    tl.store(ends, first * 0)
    tl.store(ends + 1, first * 0)
    new_high = tl.where(end < BINS, tl.minimum(high, low + ((end + 1) << shift) - 1), high)
    new_low = tl.minimum(low + (begin << shift), new_high)
    if COLLECTED:
        bad = (first < 1) | (first > seen) | (tl.load(totals + group * COUNTERS + OVER) != 0)
        if LAST:
            bad = bad | (new_low < new_high)
        bad = bad | (tl.load(failed + group) != 0)  # a failure stays
        tl.store(failed + group, bad.to(tl.int64))
        new_low, new_high = tl.where(bad, low, new_low), tl.where(bad, high, new_high)
    tl.store(mine + LOW, new_low)
    tl.store(mine + HIGH, new_high)
    tl.store(mine + RANK, first - before)
    width = new_high - new_low
    bits = first * 0
    for place in tl.static_range(33):
        bits += ((width >> place) > 0).to(tl.int64)
    tl.store(mine + SHIFT, tl.maximum(bits - DIGIT, 0))


@triton.jit
def _ones_in(bits):
    """Population counts of the lower and the upper 16 bits, again in these halves."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return (bits + (bits >> 8)) & 0x001F001F


@triton.jit
def _flag(lane):
    """The bit of a weight in its word of 16 weights."""
    return 1 << (lane & 15)


@triton.jit
def _in_words(flags):
    """Join the flags of a tile to words of 16 weights; a flag may have a second one 16 bits above it.

    The sum leaves each word in four threads, and Triton would do all that follows four times. A scan along an axis of
    one changes nothing but that: Triton spreads its operand first.
    """
    words = tl.sum(tl.reshape(flags, (TILE // RUN, RUN)), axis=1)
    return tl.reshape(tl.cumsum(tl.reshape(words, (TILE // RUN, 1)), 1), (TILE // RUN,))


@triton.jit
def _words_alive(row, start, left, KIND: tl.constexpr):
    """Which weights of a tile exist and, if the mask is packed, compete; 16 per word."""
    place = tl.arange(0, TILE // RUN)
    word = (1 << tl.maximum(tl.minimum(left - place * RUN, RUN), 0)) - 1
    if KIND == BITS:
        pointer = tl.load(row + ALIVE).to(tl.pointer_type(tl.uint16)) + start // RUN
        word = word & tl.load(pointer + place, mask=place * RUN < left, other=0).to(tl.int32)
    return word


@triton.jit
def _write_mask(row, start, lane, kept, words, left, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Store a tile of a mask, as bytes or as bits. Packed masks end on a whole 32-bit word."""
    address = tl.load(row + MASK)
    if KIND == BITS:
        place = tl.arange(0, TILE // RUN)
        pointer = address.to(tl.pointer_type(tl.uint16)) + start // RUN
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
        tl.store(pointer + place, words.to(tl.uint16), mask=place // 2 * (2 * RUN) < left)
    else:
        pointer = address.to(tl.pointer_type(tl.int8)) + start
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
        tl.store(pointer + lane, kept.to(tl.int8), mask=lane < left)


@triton.jit
def _tile(rows, owners, tiles, first, LISTS: tl.constexpr, ALIGNED: tl.constexpr):
    """The tile of this program: its number, its tensor and row, its first index there, and its number of weights."""
    tile = first + tl.program_id(0).to(tl.int64)
    if LISTS:
        tile = tl.load(tiles + tl.program_id(0)).to(tl.int64)
    owner = tl.load(owners + tile).to(tl.int64)
    row = rows + owner * COLUMNS
    start = (tile - tl.load(row + FIRST)) * TILE
    left = TILE
    if ALIGNED != WHOLE:
        left = tl.minimum(tl.load(row + NUMEL) - start, TILE).to(tl.int32)
        if ALIGNED:
            left = tl.multiple_of(left, 16)
    return tile, owner, row, start, left


@triton.jit
def _list(count, tile, lane, middle, found, score, begin, capacity, positions, keys):
    """Collect positions and keys, for scores a kernel cannot compute again. True if the buffer is full."""
    slot = tl.atomic_add(count + LISTED, found.to(tl.int64), sem="relaxed")
    where = begin + slot + tl.cumsum(middle.to(tl.int32), 0) - 1
    fits = middle & (where < begin + capacity)
    tl.store(positions + where, tile * TILE + lane, mask=fits)
    tl.store(keys + where, key_of(score), mask=fits)
    return slot + found > capacity


@triton.jit
def _note(count, tile, inside, some, found, begin, capacity, words):
    """Collect words of 16 weights with any inside: 16 times fewer stores. True if the buffer is full."""
    slot = tl.atomic_add(count + WORDS, found.to(tl.int64), sem="relaxed")
    where = begin + slot + tl.cumsum(some, 0) - 1
    word = ((tile * (TILE // RUN) + tl.arange(0, TILE // RUN)) << 16) | inside
    tl.store(words + where, word, mask=(some != 0) & (where < begin + capacity))
    return slot + found > capacity


@triton.jit(do_not_specialize=["first"])
def _sweep(
    rows, scales, owners, tiles, first, given, eps, ranges, counters, rooms, words, positions, keys, inside_of, spoiled,
    FORMULA: tl.constexpr, SIXTEENTHS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr,
    KIND: tl.constexpr, LISTS: tl.constexpr, STORED: tl.constexpr, ALIGNED: tl.constexpr,
    ROUGH: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    tile, owner, row, start, left = _tile(rows, owners, tiles, first, LISTS, ALIGNED)
    lane = tl.arange(0, TILE)
    valid = lane < left
    group = tl.load(row + GROUP)
    low = value_of(tl.load(ranges + group * 4 + LOW))
    high = value_of(tl.load(ranges + group * 4 + HIGH))
    if ROUGH:
        low, high = roughly(low, -1.0), roughly(high, 1.0)
    mine = given + tl.program_id(0).to(tl.int64) * TILE
    score = score_at(
        row, tl.load(scales + owner), start, lane, valid, mine, eps,
        FORMULA, SIXTEENTHS, TYPE0, TYPE1, TYPE2, ALIGNED, ROUGH,
    )  # fmt: skip
    # Not below and not above, so that NaN is inside: it is found out when that is looked at. Both go through one
    # reduction; what is dead or past the end is taken away from words of sixteen, not from each weight.
    alive = _words_alive(row, start, left, KIND)
    if KIND == BOOL:
        living = read(tl.load(row + ALIVE), start, lane, valid, tl.int8, ALIGNED)
        alive = alive & _in_words(tl.where(living != 0, _flag(lane), 0))
    both = _in_words(tl.where(score < low, 0, _flag(lane)) | tl.where(score > high, 0, _flag(lane) << 16))
    stay = both & alive
    inside = (both >> 16) & stay
    kept = score < low
    if STORED != BITS:
        kept = alive_at(row, start, lane, valid, KIND, ALIGNED) & ((score < low) == 0)
    _write_mask(row, start, lane, kept, stay, left, STORED, ALIGNED)
    if CAREFUL:
        nan = _in_words(tl.where(score != score, _flag(lane), 0)) & alive
        tl.atomic_add(spoiled + owner, tl.sum(_ones_in(nan)).to(tl.int64), sem="relaxed")
    some = (inside != 0).to(tl.int32)
    if CAREFUL or FORMULA == GIVEN:
        counts = tl.sum(_ones_in((alive ^ stay) | (inside << 16)))
    else:  # words with any inside are counted, since words are what is collected
        counts = tl.sum(_ones_in(alive ^ stay) | (some << 16))
    counted = tl.load(row + COUNTED)
    count = counters + group * COUNTERS
    found = counts >> 16
    tl.atomic_add(count + BELOW, (counts & 0xFFFF).to(tl.int64) * counted, sem="relaxed")
    if CAREFUL:
        tl.atomic_add(count + INSIDE, found.to(tl.int64) * counted, sem="relaxed")
        tl.store(inside_of + tile, found)
    elif found > 0:
        begin = tl.load(rooms + group)
        room = tl.load(rooms + group + 1) - begin
        if FORMULA == GIVEN:
            middle = ((score < low) == 0) & ((score > high) == 0) & alive_at(row, start, lane, valid, KIND, ALIGNED)
            over = _list(count, tile, lane, middle, found, score, begin, room, positions, keys)
        else:
            over = _note(count, tile, inside, some, found, begin, room, words)
        if over:
            tl.store(count + OVER, tl.full((), 1, tl.int64))


@triton.jit(do_not_specialize=["first"])
def _prune_many_ties(
    rows, scales, owners, tiles, first, given, eps, ranges, before, quotas,
    FORMULA: tl.constexpr, SIXTEENTHS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr,
    KIND: tl.constexpr, LISTS: tl.constexpr, STORED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tile, owner, row, start, left = _tile(rows, owners, tiles, first, LISTS, ALIGNED)
    quota = tl.load(quotas + owner)
    earlier = tl.load(before + tile)
    if earlier < quota:
        lane = tl.arange(0, TILE)
        valid = lane < left
        alive = alive_at(row, start, lane, valid, KIND, ALIGNED)
        mine = given + tl.program_id(0).to(tl.int64) * TILE
        score = score_at(
            row, tl.load(scales + owner), start, lane, valid, mine, eps,
            FORMULA, SIXTEENTHS, TYPE0, TYPE1, TYPE2, ALIGNED, False,
        )  # fmt: skip
        cut = value_of(tl.load(ranges + tl.load(row + GROUP) * 4 + LOW))
        same = alive & (score == cut)
        rank = earlier + tl.cumsum(same.to(tl.int32), 0)
        kept = (alive & (score > cut)) | (same & (rank > quota))
        _write_mask(row, start, lane, kept, _in_words(tl.where(kept, _flag(lane), 0)), left, STORED, ALIGNED)


TIE_CHUNK: tl.constexpr = tl.constexpr(64)  # ties that a program compares its own with at a time
PAST_END: tl.constexpr = tl.constexpr(1 << 62)  # sorts after every position


@triton.jit
def _collected(block_groups, counters, starts, COLUMN: tl.constexpr):
    """The block of collected words or keys that this program reads: its group, its indices, and which are filled."""
    block = tl.program_id(0)
    group = tl.load(block_groups + block).to(tl.int64)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    over = tl.load(counters + group * COUNTERS + OVER) != 0  # some entries were never written: read none
    filled = tl.load(starts + group) + tl.where(over, 0, tl.load(counters + group * COUNTERS + COLUMN))
    return group, place, place < filled


@triton.jit
def _clear(rows, owners, position, gone, STORED: tl.constexpr):
    """Clear the mask at these positions, where `gone`."""
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
def _score_candidates(
    rows, scales, owners, block_groups, counters, starts, words, positions, keys, nan_counts, ranges, eps, launch,
    FORMULA: tl.constexpr, SIXTEENTHS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    group, place, valid = _collected(block_groups, counters, starts, WORDS)
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
        begin = tl.load(starts + group)
        capacity = tl.load(starts + group + 1) - begin
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
                tl.atomic_add(nan_counts + owner, tl.full(owner.shape, 1, tl.int64), mask=bad, sem="relaxed")
            key = key_of(score)
            below = some & (key < low)  # the fast-math score was inside, the exact one is below
            if tl.max(below.to(tl.int32)) > 0:
                _clear(rows, owners, start + lane, below, STORED)
                counted = tl.sum(tl.where(below, tl.load(row + COUNTED), 0))
                tl.atomic_add(count + BELOW, counted, sem="relaxed")
            some = some & (key >= low) & (key <= high)
            found = tl.sum(some.to(tl.int32))
            slot = tl.atomic_add(count + LISTED, found.to(tl.int64), sem="relaxed")
            where = slot + tl.cumsum(some.to(tl.int32), 0) - 1
            fits = some & (where < capacity)
            tl.store(positions + begin + where, start + lane, mask=fits)
            tl.store(keys + begin + where, key, mask=fits)
            if slot + found > capacity:
                tl.store(count + OVER, tl.full((), 1, tl.int64))


@triton.jit
def _count_candidates(
    rows, owners, block_groups, counters, starts, positions, keys, ranges, histogram, PEERS: tl.constexpr
):  # fmt: skip
    group, place, valid = _collected(block_groups, counters, starts, LISTED)
    if tl.max(valid.to(tl.int32)) > 0:
        if PEERS:
            tile = tl.load(positions + place, mask=valid, other=0) // TILE
            owner = tl.load(owners + tile, mask=valid, other=0).to(tl.int64)
            valid = valid & (tl.load(rows + owner * COLUMNS + COUNTED, mask=valid, other=0) != 0)
        _add_to_histogram(tl.load(keys + place, mask=valid, other=0), valid, group, ranges, histogram)


@triton.jit(do_not_specialize=["tie_capacity"])
def _apply_cut(
    rows, owners, block_groups, counters, failed, starts, positions, keys, ranges, ties, tie_capacity, tie_counts,
    STORED: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    group, place, valid = _collected(block_groups, counters, starts, LISTED)
    if (tl.load(failed + group) == 0) & (tl.max(valid.to(tl.int32)) > 0):
        cut = tl.load(ranges + group * 4 + LOW)
        key = tl.load(keys + place, mask=valid, other=0)
        position = tl.load(positions + place, mask=valid, other=0)
        _clear(rows, owners, position, valid & (key < cut), STORED)
        same = valid & (key == cut)
        found = tl.sum(same.to(tl.int32))
        if found > 0:
            slot = tl.atomic_add(counters + group * COUNTERS + EQUAL, found.to(tl.int64), sem="relaxed")
            where = slot + tl.cumsum(same.to(tl.int32), 0) - 1
            tl.store(ties + group * tie_capacity + where, position, mask=same & (where < tie_capacity))
            if PEERS:
                owner = tl.load(owners + position // TILE, mask=same, other=0).to(tl.int64)
                tl.atomic_add(tie_counts + owner, tl.full(owner.shape, 1, tl.int64), mask=same, sem="relaxed")


@triton.jit(do_not_specialize=["tie_capacity"])
def _prune_ties(
    rows, owners, counters, failed, ranges, ties, tie_capacity, quotas, STORED: tl.constexpr, PEERS: tl.constexpr
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) // (tie_capacity // TIES_PER_PROGRAM)
    block = tl.program_id(0) % (tie_capacity // TIES_PER_PROGRAM)
    found = tl.load(counters + group * COUNTERS + EQUAL)
    if (found > tie_capacity) & (tl.load(failed + group) == 0):
        tl.store(failed + group, tl.full((), TOO_MANY_TIES, tl.int64))  # every program stores the same
    elif (block * TIES_PER_PROGRAM < found) & (tl.load(failed + group) == 0):
        place = block * TIES_PER_PROGRAM + tl.arange(0, TIES_PER_PROGRAM)
        valid = place < found
        position = tl.load(ties + group * tie_capacity + place, mask=valid, other=0)
        owner = tl.load(owners + position // TILE, mask=valid, other=0).to(tl.int64)
        quota = tl.zeros((TIES_PER_PROGRAM,), tl.int64) + tl.load(ranges + group * 4 + RANK)
        if PEERS:
            quota = tl.load(quotas + owner, mask=valid, other=0)
        earlier = tl.zeros((TIES_PER_PROGRAM,), tl.int32)
        for first in range(0, found, TIE_CHUNK):
            other = first + tl.arange(0, TIE_CHUNK)
            theirs = tl.load(ties + group * tie_capacity + other, mask=other < found, other=PAST_END)
            before = theirs[None, :] < position[:, None]
            if PEERS:
                owner_of = tl.load(owners + theirs // TILE, mask=other < found, other=-1).to(tl.int64)
                before = before & (owner_of[None, :] == owner[:, None])
            earlier += tl.sum(before.to(tl.int32), 1)
        _clear(rows, owners, position, valid & (earlier < quota), STORED)


DEAD_KEY = tl.constexpr(exact.DEAD_KEY)


@triton.jit(do_not_specialize=["width"])
def _rank(
    rows, scales, owners, firsts, members, gone, given, eps, width, nan_counts,
    FORMULA: tl.constexpr, SIXTEENTHS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr,
    KIND: tl.constexpr, STORED: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    place = tl.load(owners + tl.program_id(0)).to(tl.int64)
    owner = tl.load(members + place)
    row = rows + owner * COLUMNS
    tile = (tl.program_id(0) - tl.load(firsts + place)) * TILES + tl.arange(0, TILES)
    lane = tl.arange(0, PADDED)
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
        tl.atomic_add(nan_counts + owner, nan.to(tl.int64), sem="relaxed")
    keys = tl.where(alive, key_of(score), tl.where(valid, DEAD_KEY, 0x7FFFFFFF))
    count = tl.load(gone + place).to(tl.int32)
    # Find the count-th lowest key bit by bit from the top: the largest key with fewer than `count` keys below it.
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
        bits = tl.reshape(kept.to(tl.int32) << (offset & 15).to(tl.int32), (TILES * PADDED // RUN, RUN))
        where = tl.reshape(start + offset, (TILES * PADDED // RUN, RUN))
        inside = tl.reshape(valid.to(tl.int32), (TILES * PADDED // RUN, RUN))
        words = address.to(tl.pointer_type(tl.uint16)) + tl.min(where, axis=1) // RUN
        tl.store(words, tl.sum(bits, axis=1).to(tl.uint16), mask=tl.max(inside, axis=1) > 0)
    else:
        pointer = address.to(tl.pointer_type(tl.int8)) + start
        tl.store(pointer + offset, kept.to(tl.int8), mask=valid)
