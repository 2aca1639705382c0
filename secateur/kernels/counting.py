"""Triton kernels that count scores by key and shrink the ranges in which cuts lie. See reference.py for each."""

from __future__ import annotations

import triton
import triton.language as tl

from secateur.kernels.constants import (
    BELOW,
    BINS,
    BLOCK,
    COLUMNS,
    COUNTED,
    COUNTERS,
    DIGIT,
    FIRST,
    GROUP,
    HIGH,
    LOW,
    NUMEL,
    OVER,
    RANK,
    RUN,
    SHIFT,
    SLOTS,
    TILE,
)
from secateur.kernels.scoring import alive_at, key_of, score_at


@triton.jit
def _add_to_histogram(keys, valid, group, ranges, counts):
    """Count keys by their digit in the group's range; those outside do not count."""
    low = tl.load(ranges + group * 4 + LOW)
    inside = valid & (keys >= low) & (keys <= tl.load(ranges + group * 4 + HIGH))
    digit = (keys.to(tl.int64) - low) >> tl.load(ranges + group * 4 + SHIFT)
    tl.atomic_add(counts + group * SLOTS + digit, tl.full(keys.shape, 1, tl.int64), mask=inside, sem="relaxed")


@triton.jit
def _add_outside(keys, valid, group, ranges, counts):
    """Count keys below and above the range: only few different addresses, so programs of one group add up first."""
    below = valid & (keys < tl.load(ranges + group * 4 + LOW))
    above = valid & (keys > tl.load(ranges + group * 4 + HIGH))
    first = tl.min(group)
    if first == tl.max(group):
        ends = counts + first * SLOTS + BINS
        tl.atomic_add(ends, tl.sum(below.to(tl.int32)).to(tl.int64), sem="relaxed")
        tl.atomic_add(ends + 1, tl.sum(above.to(tl.int32)).to(tl.int64), sem="relaxed")
    else:
        ones = tl.full(keys.shape, 1, tl.int64)
        tl.atomic_add(counts + group * SLOTS + BINS + tl.zeros(keys.shape, tl.int64), ones, mask=below, sem="relaxed")
        tl.atomic_add(
            counts + group * SLOTS + BINS + 1 + tl.zeros(keys.shape, tl.int64), ones, mask=above, sem="relaxed"
        )


@triton.jit(do_not_specialize=["first", "count", "shift"])
def _survey(
    rows, scales, owners, tiles, first, count, shift, eps, ranges, counts,
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
    _add_to_histogram(keys, valid, group, ranges, counts)
    _add_outside(keys, valid, group, ranges, counts)


@triton.jit(do_not_specialize=["size", "group"])
def _count(scores, size, group, ranges, counts):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + place, mask=place < size, other=float("nan"))
    keys = key_of(score)
    groups = tl.full((1,), group, tl.int64)
    _add_to_histogram(keys, score == score, groups, ranges, counts)
    _add_outside(keys, score == score, groups, ranges, counts)


@triton.jit
def _narrow(
    ranges, counts, totals, wanted, shares, failed, sigmas,
    SAMPLED: tl.constexpr, COLLECTED: tl.constexpr, BEGIN: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    mine = ranges + group * 4
    low, high, shift, first = tl.load(mine + LOW), tl.load(mine + HIGH), tl.load(mine + SHIFT), tl.load(mine + RANK)
    bins = counts + group * SLOTS + tl.arange(0, BINS)
    ends = counts + group * SLOTS + BINS
    here = tl.load(bins)
    upto = tl.cumsum(here, 0)
    seen = tl.sum(here)
    last = first
    if SAMPLED:
        below = tl.load(ends)
        share = tl.load(shares + group)
        size = (seen + below + tl.load(ends + 1)).to(tl.float64)
        margin = sigmas * tl.sqrt(share * size * (1.0 - share)) + 1.0
        first = tl.floor(share * size - margin).to(tl.int64) - below
        last = tl.ceil(share * size + margin).to(tl.int64) - below
    elif BEGIN:
        first = tl.load(wanted + group) - tl.load(totals + group * COUNTERS + BELOW)
        last = first
    begin = tl.minimum(tl.sum((upto < first).to(tl.int64)), BINS - 1)
    end = tl.sum((upto < last).to(tl.int64))
    before = tl.max(tl.where(upto < first, upto, 0))
    tl.store(bins, tl.zeros((BINS,), tl.int64))  # clean for the next turn
    tl.store(ends, first * 0)
    tl.store(ends + 1, first * 0)
    new_high = tl.where(end < BINS, tl.minimum(high, low + ((end + 1) << shift) - 1), high)
    new_low = tl.minimum(low + (begin << shift), new_high)
    if COLLECTED:
        bad = (first < 1) | (first > seen) | (tl.load(totals + group * COUNTERS + OVER) != 0)
        if LAST:
            bad = bad | (new_low < new_high)
        bad = bad | (tl.load(failed + group) != 0)  # stays so at the next turn
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
