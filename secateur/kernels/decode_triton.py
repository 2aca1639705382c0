"""Triton kernels of packed layers: few inputs times streams (decode.py), and unpacking a weight for many.

A program of `_decode` owns some rows of the weight. Segment by segment it stages the inputs of the segment's columns in
shared memory, reads the streams of its rows, 16 values a thread, and gathers the inputs they need. Sums are in fp32 and
in a fixed order; no program waits for another. Up to four inputs travel in one number per column, so that one gather
serves them all. decode.py has the twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from secateur.kernels import decode
from secateur.kernels.decode import Form
from secateur.kernels.scores_triton import launch_kernel

CELL_COLUMNS = tl.constexpr(decode.CELL)
ENTRIES = tl.constexpr(decode.ENTRIES)
STARTS = tl.constexpr(decode.STARTS)
SHORT = tl.constexpr(decode.SHORT)
BEGIN = tl.constexpr((1 << decode.STARTS) - 1)
BYTES = 512  # of a mask that a program of `_unpack` reads at a time


@triton.jit
def _half(word, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """One of the two 16-bit numbers of an int32, as fp32."""
    if tl.bfloat16 == DTYPE:
        bits = (word & -65536) if HIGH else (word << 16)
        result = bits.to(tl.float32, bitcast=True)
    else:
        bits = ((word >> 16) if HIGH else word).to(tl.int16)
        result = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return result


@triton.jit
def _read(x, lane, left, WHOLE: tl.constexpr):
    """An input in these columns, zero beyond the last of them."""
    return tl.load(x + lane) if WHOLE else tl.load(x + lane, mask=lane < left, other=0.0)


@triton.jit
def _bits(value):
    """The bits of a number, in an int64."""
    if value.dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    else:
        bits = value.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    return bits


@triton.jit
def _staged(x, more, lane, left, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, WHOLE: tl.constexpr):
    """INPUTS rows of x in these columns, one number a column: fp32 for one input, otherwise their bits side by side.

    There are only `more` rows after the first; the last one is repeated.
    """
    if INPUTS == 1:
        staged = _read(x, lane, left, WHOLE).to(tl.float32)
    else:
        SHIFT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
        staged = _bits(_read(x, lane, left, WHOLE))
        for number in tl.static_range(1, INPUTS):
            there = x + tl.minimum(more, number) * COLUMNS
            staged = staged | (_bits(_read(there, lane, left, WHOLE)) << (SHIFT * number))
        if SHIFT * INPUTS == 32:
            staged = staged.to(tl.int32)
    return staged


@triton.jit
def _input(gathered, NUMBER: tl.constexpr, INPUTS: tl.constexpr, DTYPE: tl.constexpr):
    """Input NUMBER of what `_staged` put together, as fp32."""
    if INPUTS == 1:
        result = gathered
    elif tl.float32 == DTYPE:
        result = (gathered >> (32 * NUMBER)).to(tl.int32).to(tl.float32, bitcast=True)
    elif INPUTS == 2:
        result = _half(gathered, NUMBER == 1, DTYPE)
    else:
        result = _half((gathered >> (NUMBER // 2 * 32)).to(tl.int32), NUMBER % 2 == 1, DTYPE)
    return result


@triton.jit
def _columns(word, SHIFT: tl.constexpr, before, quarter, ENTRY: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr):
    """Columns of four neighbouring entries of each group [rows, groups, 4], and the last of them [rows, groups, 1].

    `before`: the column before them, or where the group's cells begin; ENTRY: the first of the four in its group. Gaps
    are added up one after another: tl.cumsum made Triton 3.6 move everything between threads (docs/LOG.md).
    """
    mask: tl.constexpr = (1 << BITS) - 1
    if CELL:
        code = (word >> (SHIFT + BITS * quarter)) & mask
        result = before + (ENTRY + quarter) // CELL * CELL_COLUMNS + code
        last = before
    else:
        first = before + ((word >> SHIFT) & mask)
        second = first + ((word >> (SHIFT + BITS)) & mask)
        third = second + ((word >> (SHIFT + 2 * BITS)) & mask)
        last = third + ((word >> (SHIFT + 3 * BITS)) & mask)
        front = tl.where(quarter == 0, first, second)  # each thread holds all four, so the
        back = tl.where(quarter == 2, third, last)  # compiler resolves these
        result = tl.where(quarter < 2, front, back)
    return result, last


@triton.jit
def _quarters(first, second, third, fourth, place, valid, base, quarter, BITS: tl.constexpr, CELL: tl.constexpr):
    """The columns of all entries, in four quarters [rows, groups, 4]."""
    word0 = tl.load(first + place, mask=valid, other=0)
    word1 = tl.load(second + place, mask=valid, other=0)
    if BITS == 4:
        one, before = _columns(word0, 0, base, quarter, 0, BITS, CELL)
        two, before = _columns(word0, 16, before, quarter, 4, BITS, CELL)
        three, before = _columns(word1, 0, before, quarter, 8, BITS, CELL)
        four, before = _columns(word1, 16, before, quarter, 12, BITS, CELL)
    else:
        one, before = _columns(word0, 0, base, quarter, 0, BITS, CELL)
        two, before = _columns(word1, 0, before, quarter, 4, BITS, CELL)
        three, before = _columns(tl.load(third + place, mask=valid, other=0), 0, before, quarter, 8, BITS, CELL)
        four, before = _columns(tl.load(fourth + place, mask=valid, other=0), 0, before, quarter, 12, BITS, CELL)
    return one, two, three, four


@triton.jit
def _weights(first, second, third, fourth, place, valid, quarter, VALUES: tl.constexpr):
    """The values of all entries, in the same quarters, as fp32."""
    where, mask = place * 4 + quarter, valid
    if tl.bfloat16 == VALUES or tl.float16 == VALUES:
        low, high = tl.load(first + where, mask=mask, other=0), tl.load(second + where, mask=mask, other=0)
        one, two = _half(low, False, VALUES), _half(low, True, VALUES)
        three, four = _half(high, False, VALUES), _half(high, True, VALUES)
    else:
        one = tl.load(first + where, mask=mask, other=0).to(tl.float32)
        two = tl.load(second + where, mask=mask, other=0).to(tl.float32)
        three = tl.load(third + where, mask=mask, other=0).to(tl.float32)
        four = tl.load(fourth + where, mask=mask, other=0).to(tl.float32)
    return one, two, three, four


@triton.jit
def _store(out, total, scale, bias, row, end, SCALED: tl.constexpr, BIASED: tl.constexpr):
    """Add up what the threads of a row have, and finish the rows before `end`."""
    live = row < end
    result = tl.sum(tl.sum(total, 2), 1)
    if SCALED:
        result = result * tl.load(scale + row, mask=live, other=0.0)
    if BIASED:
        result = result + tl.load(bias + row, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows", "inputs"])
def _decode(
    x, values0, values1, values2, values3, indices0, indices1, indices2, indices3, bases, starts, scale, bias, out,
    rows, inputs,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, STAGED: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    CELL: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    SEGMENTS: tl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    WHOLE: tl.constexpr = COLUMNS % WIDTH == 0 and STAGED == WIDTH
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = row < rows
    given = tl.program_id(1) * INPUTS
    x += given.to(tl.int64) * COLUMNS
    group = tl.arange(0, GROUPS)[None, :, None]
    quarter = tl.arange(0, 4)[None, None, :]
    lane = tl.arange(0, STAGED)
    total0 = tl.zeros((TILE, GROUPS, 4), tl.float32)
    total1, total2, total3 = total0, total0, total0
    for segment in tl.range(0, SEGMENTS, num_stages=STAGES):
        stream = tl.load(starts + row.to(tl.int64) * SEGMENTS + segment, mask=live, other=0)[:, None, None]
        valid = group < (stream >> STARTS).to(tl.int32)
        place = (stream & BEGIN) + group
        left = COLUMNS - segment * WIDTH
        staged = _staged(x + segment * WIDTH, inputs - 1 - given, lane, left, COLUMNS, INPUTS, WHOLE)
        if CELL:
            base = tl.where(valid, group * (ENTRIES // CELL * CELL_COLUMNS), 0)
        else:
            base = tl.load(bases + place, mask=valid, other=0).to(tl.int32)
            base = tl.where(valid, (base & 0xFFFF if COLUMNS <= SHORT else base) - segment * WIDTH, 0)
        one, two, three, four = _quarters(
            indices0, indices1, indices2, indices3, place, valid, base, quarter, BITS, CELL
        )
        both = tl.join(tl.join(one, three), tl.join(two, four))
        found = tl.gather(staged, tl.reshape(both, (TILE * GROUPS * ENTRIES,)), 0)
        left_half, right_half = tl.split(tl.reshape(found, (TILE, GROUPS, 4, 2, 2)))
        x0, x2 = tl.split(left_half)
        x1, x3 = tl.split(right_half)
        w0, w1, w2, w3 = _weights(values0, values1, values2, values3, place, valid, quarter, VALUES)
        total0 += w0 * _input(x0, 0, INPUTS, DTYPE)
        total0 += w1 * _input(x1, 0, INPUTS, DTYPE)
        total0 += w2 * _input(x2, 0, INPUTS, DTYPE)
        total0 += w3 * _input(x3, 0, INPUTS, DTYPE)
        if INPUTS > 1:
            total1 += w0 * _input(x0, 1, INPUTS, DTYPE)
            total1 += w1 * _input(x1, 1, INPUTS, DTYPE)
            total1 += w2 * _input(x2, 1, INPUTS, DTYPE)
            total1 += w3 * _input(x3, 1, INPUTS, DTYPE)
        if INPUTS > 2:
            total2 += w0 * _input(x0, 2, INPUTS, DTYPE)
            total2 += w1 * _input(x1, 2, INPUTS, DTYPE)
            total2 += w2 * _input(x2, 2, INPUTS, DTYPE)
            total2 += w3 * _input(x3, 2, INPUTS, DTYPE)
            total3 += w0 * _input(x0, 3, INPUTS, DTYPE)
            total3 += w1 * _input(x1, 3, INPUTS, DTYPE)
            total3 += w2 * _input(x2, 3, INPUTS, DTYPE)
            total3 += w3 * _input(x3, 3, INPUTS, DTYPE)
    out += given.to(tl.int64) * rows
    _store(out, total0, scale, bias, row, rows, SCALED, BIASED)
    if INPUTS > 1:
        _store(out + rows, total1, scale, bias, row, tl.where(given + 1 < inputs, rows, 0), SCALED, BIASED)
    if INPUTS > 2:
        _store(out + 2 * rows, total2, scale, bias, row, tl.where(given + 2 < inputs, rows, 0), SCALED, BIASED)
        _store(out + 3 * rows, total3, scale, bias, row, tl.where(given + 3 < inputs, rows, 0), SCALED, BIASED)


@triton.jit
def _unpack(
    values, mask, offsets, scale, weight, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """One row of a dense weight: a thread expands whole bytes of the mask, eight columns each."""
    STRIDE: tl.constexpr = (COLUMNS + 7) // 8
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(offsets + row)
    byte = tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)[None, :]
    for start in range(0, STRIDE, BLOCK):
        bits = tl.load(mask + row * STRIDE + start + byte, mask=start + byte < STRIDE, other=0).to(tl.int32)
        spread = (bits | (bits << 12)) & 0x000F000F  # bit k to the lowest bit of digit k, in 8 digits of 4 bits
        spread = (spread | (spread << 6)) & 0x03030303
        spread = (spread | (spread << 3)) & 0x11111111
        upto = spread * 0x11111111  # digit k counts the bits up to k
        number = (upto >> 28) & 15
        before = tl.cumsum(number, 0) - number
        kept = (bits[:, None] >> bit) & 1
        inside = before[:, None] + (((upto << 4)[:, None] >> (4 * bit)) & 15)
        value = tl.load(values + place + inside, mask=kept != 0, other=0)
        if SCALED:
            value = value.to(tl.float32) * tl.load(scale + row)
        column = (start + byte)[:, None] * 8 + bit
        tl.store(weight + row * COLUMNS + column, value.to(weight.dtype.element_ty), mask=column < COLUMNS)
        place += tl.sum(number)


def linear(
    x: Tensor, values: Sequence[Tensor], indices: Sequence[Tensor], bases: Tensor, starts: Tensor, shares: Tensor,
    scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype, numbers: Sequence[int],
) -> Tensor:  # fmt: skip
    """x @ weight.T * scale + bias for few inputs, of the streams with the form that has these numbers."""
    form = Form(*numbers)
    x = x.contiguous()
    inputs = x.numel() // form.columns
    out = x.new_empty((*x.shape[:-1], form.rows))
    together = inputs_together(inputs, x.dtype)
    grid = (-(-form.rows // form.tile), -(-inputs // together))
    arguments = (
        x, *_four(values), *_four(indices), bases, starts, starts if scale is None else scale,
        starts if bias is None else bias.detach(), out, form.rows, inputs,
    )  # fmt: skip
    constants = constants_of(form, dtype, together, scale, bias)
    launch_kernel(_decode, grid, arguments, constants, warps=form.warps, fused=True)
    return out


def _four(planes: Sequence[Tensor]) -> list[Tensor]:
    """Planes for all arguments; those that a kernel does not read repeat the first."""
    return [*planes, *[planes[0]] * (4 - len(planes))]


def inputs_together(inputs: int, dtype: torch.dtype) -> int:
    """How many inputs one program multiplies: what fits into 64 bits a column, or fewer."""
    return min(8 // dtype.itemsize, 1 if inputs == 1 else 2 if inputs == 2 else 4)


def constants_of(
    form: Form, dtype: torch.dtype, together: int, scale: object | None, bias: object | None
) -> tuple[Any, ...]:
    """The compile-time constants of `_decode`."""
    staged = 1 << (form.width - 1).bit_length()
    return (form.columns, form.width, staged, form.groups, form.bits, form.cell, dtype, form.tile, together,
            form.stages, scale is not None, bias is not None)  # fmt: skip


def unpack(values: Tensor, mask: Tensor, offsets: Tensor, scale: Tensor | None, columns: int, weight: Tensor) -> None:
    """Write the dense weight into `weight`, contiguous [rows, columns], as `unpacked` of inference/format.py does."""
    arguments = (values, mask, offsets, offsets if scale is None else scale, weight)
    launch_kernel(_unpack, mask.shape[0], arguments, (columns, BYTES, scale is not None), warps=4)
