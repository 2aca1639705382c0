"""Triton kernels that walk over all scores and write masks. See reference.py for each."""

from __future__ import annotations

import triton
import triton.language as tl

from secateur.kernels.constants import (
    ALIVE,
    BELOW,
    BITS,
    BOOL,
    COLUMNS,
    COUNTED,
    COUNTERS,
    FIRST,
    GIVEN,
    GROUP,
    HIGH,
    INSIDE,
    LISTED,
    LOW,
    MASK,
    NUMEL,
    OVER,
    RUN,
    TILE,
    WORDS,
)
from secateur.kernels.scoring import alive_at, key_of, read, roughly, score_at, value_of


@triton.jit
def _ones_in(bits):
    """How many of 16 bits are set."""
    bits = bits - ((bits >> 1) & 0x5555)
    bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
    bits = (bits + (bits >> 4)) & 0x0F0F
    return (bits + (bits >> 8)) & 0x1F


@triton.jit
def _in_words(values, lane):
    """Flags of a tile (two of them, in bits 0 and 16), sixteen to a word."""
    return tl.sum(tl.reshape(values << (lane & 15), (TILE // RUN, RUN)), axis=1)


@triton.jit
def _words_alive(row, start, left, KIND: tl.constexpr):
    """Which of a tile's places exist and, where the mask is packed, compete; sixteen to a word."""
    place = tl.arange(0, TILE // RUN)
    word = (1 << tl.maximum(tl.minimum(left - place * RUN, RUN), 0)) - 1
    if KIND == BITS:
        pointer = tl.load(row + ALIVE).to(tl.pointer_type(tl.uint16)) + start // RUN
        word = word & tl.load(pointer + place, mask=place * RUN < left, other=0).to(tl.int32)
    return word


@triton.jit
def _write_mask(row, start, lane, kept, words, left, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """A tile of a mask, as bytes or as bits. Masks of bits end with a whole word of 32."""
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
    """This program's tile: its number, its tensor and row, where it starts there, and how much of it there is."""
    tile = first + tl.program_id(0).to(tl.int64)
    if LISTS:
        tile = tl.load(tiles + tl.program_id(0)).to(tl.int64)
    owner = tl.load(owners + tile).to(tl.int64)
    row = rows + owner * COLUMNS
    start = (tile - tl.load(row + FIRST)) * TILE
    left = tl.minimum(tl.load(row + NUMEL) - start, TILE).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
    return tile, owner, row, start, left


@triton.jit
def _list(count, tile, lane, middle, found, score, begin, room, positions, keys):
    """Collect positions and keys of single weights, whose scores nobody could compute again. True if room ran out."""
    slot = tl.atomic_add(count + LISTED, found.to(tl.int64), sem="relaxed")
    where = begin + slot + tl.cumsum(middle.to(tl.int32), 0) - 1
    fits = middle & (where < begin + room)
    tl.store(positions + where, tile * TILE + lane, mask=fits)
    tl.store(keys + where, key_of(score), mask=fits)
    return slot + found > room


@triton.jit
def _note(count, tile, inside, begin, room, words):
    """Collect words of sixteen weights of which some are inside: a sixteenth of the work. True if room ran out."""
    some = (inside != 0).to(tl.int32)
    wanted = tl.sum(some)
    slot = tl.atomic_add(count + WORDS, wanted.to(tl.int64), sem="relaxed")
    where = begin + slot + tl.cumsum(some, 0) - 1
    word = ((tile * (TILE // RUN) + tl.arange(0, TILE // RUN)) << 16) | inside
    tl.store(words + where, word, mask=(inside != 0) & (where < begin + room))
    return slot + wanted > room


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
        alive = alive & _in_words(read(tl.load(row + ALIVE), start, lane, valid, tl.int8, ALIGNED).to(tl.int32), lane)
    both = _in_words(tl.where(score < low, 0, 1) + tl.where(score > high, 0, 1 << 16), lane)
    stay = both & alive
    inside = (both >> 16) & stay
    kept = score < low
    if STORED != BITS:
        kept = alive_at(row, start, lane, valid, KIND, ALIGNED) & ((score < low) == 0)
    _write_mask(row, start, lane, kept, stay, left, STORED, ALIGNED)
    if CAREFUL:
        nan = _in_words(tl.where(score != score, 1, 0), lane) & alive
        tl.atomic_add(spoiled + owner, tl.sum(_ones_in(nan)).to(tl.int64), sem="relaxed")
    counts = tl.sum((_ones_in(alive) - _ones_in(stay)) | (_ones_in(inside) << 16))
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
            over = _note(count, tile, inside, begin, room, words)
        if over:
            tl.store(count + OVER, tl.full((), 1, tl.int64))


@triton.jit(do_not_specialize=["first"])
def _give_up(
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
        _write_mask(row, start, lane, kept, _in_words(kept.to(tl.int32), lane), left, STORED, ALIGNED)
