"""The numbers kernels are compiled with, each stated once in plain Python and lent to Triton here."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from secateur.kernels import table as layout
from secateur.kernels.table import Launch

BITTER0 = tl.constexpr(layout.BITTER0)
BITTER6 = tl.constexpr(layout.BITTER6)
GIVEN = tl.constexpr(layout.GIVEN)
MAGNITUDE = tl.constexpr(layout.MAGNITUDE)
MOMENTUM = tl.constexpr(layout.MOMENTUM)
VARIANCE = tl.constexpr(layout.VARIANCE)
WANDA = tl.constexpr(layout.WANDA)

ALIVE = tl.constexpr(layout.ALIVE)
BITS = tl.constexpr(layout.BITS)
BOOL = tl.constexpr(layout.BOOL)
COLUMNS = tl.constexpr(layout.COLUMNS)
COUNTED = tl.constexpr(layout.COUNTED)
DIVISOR = tl.constexpr(layout.DIVISOR)
FACT0 = tl.constexpr(layout.FACT0)
FACT1 = tl.constexpr(layout.FACT1)
FACT2 = tl.constexpr(layout.FACT2)
FIRST = tl.constexpr(layout.FIRST)
GROUP = tl.constexpr(layout.GROUP)
LAUNCH = tl.constexpr(layout.LAUNCH)
MASK = tl.constexpr(layout.MASK)
MODULUS = tl.constexpr(layout.MODULUS)
NUMEL = tl.constexpr(layout.NUMEL)
TILE = tl.constexpr(layout.TILE)

BELOW = tl.constexpr(layout.BELOW)
BINS = tl.constexpr(layout.BINS)
BLOCK = tl.constexpr(layout.BLOCK)
COUNTERS = tl.constexpr(layout.COUNTERS)
CROWDED = tl.constexpr(layout.CROWDED)
DIGIT = tl.constexpr(layout.DIGIT)
EQUAL = tl.constexpr(layout.EQUAL)
HIGH = tl.constexpr(layout.HIGH)
INSIDE = tl.constexpr(layout.INSIDE)
LISTED = tl.constexpr(layout.LISTED)
LOW = tl.constexpr(layout.LOW)
ORDERED = tl.constexpr(layout.ORDERED)
OVER = tl.constexpr(layout.OVER)
RANK = tl.constexpr(layout.RANK)
RUN = tl.constexpr(layout.RUN)
SHIFT = tl.constexpr(layout.SHIFT)
SLOTS = tl.constexpr(layout.SLOTS)
WORDS = tl.constexpr(layout.WORDS)


@triton.jit
def read(address, start, lane, valid, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Numbers at an address that came out of a table, which is where the compiler's knowledge of it was lost."""
    pointer = address.to(tl.pointer_type(DTYPE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer + lane, mask=valid, other=0)


@triton.jit
def bit_at(address, start, lane, valid):
    """The bits of a packed mask, 0 or 1; `start` is a multiple of 8."""
    return (read(address, start >> 3, lane >> 3, valid, tl.uint8, False).to(tl.int32) >> (lane & 7).to(tl.int32)) & 1


@triton.jit
def alive_at(row, start, lane, valid, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Which of the places `start + lane` compete."""
    alive = valid
    if KIND == BOOL:
        alive = valid & (read(tl.load(row + ALIVE), start, lane, valid, tl.int8, ALIGNED) != 0)
    elif KIND == BITS:
        alive = valid & (bit_at(tl.load(row + ALIVE), start, lane, valid) != 0)
    return alive


@triton.jit
def score_at(
    row, scale, start, lane, valid, given, eps,
    FORMULA: tl.constexpr, SIXTEENTHS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr,
    ALIGNED: tl.constexpr, ROUGH: tl.constexpr,
):  # fmt: skip
    """fp32 scores at the places `start + lane` of the tensor, or tensors, of this row of the table.

    ROUGH takes the quick square roots and quotients, off by a few units in the last place (see `roughly`).
    """
    if FORMULA == GIVEN:
        score = tl.load(given + lane, mask=valid, other=0.0)
    else:
        weight = read(tl.load(row + FACT0), start, lane, valid, TYPE0, ALIGNED).to(tl.float32)
        score = tl.abs(weight)
        if FORMULA == VARIANCE:
            second = read(tl.load(row + FACT1), start, lane, valid, TYPE1, ALIGNED).to(tl.float32)
            score = tl.abs(_power(second + eps, SIXTEENTHS, ROUGH) * weight)
        elif FORMULA == MOMENTUM:
            moment = read(tl.load(row + FACT1), start, lane, valid, TYPE1, ALIGNED).to(tl.float32)
            score = score * _root(tl.abs(moment * scale) + eps, ROUGH)
        elif FORMULA == BITTER0:
            moment = read(tl.load(row + FACT1), start, lane, valid, TYPE1, ALIGNED).to(tl.float32)
            second = read(tl.load(row + FACT2), start, lane, valid, TYPE2, ALIGNED).to(tl.float32)
            score = _quotient(weight * weight * tl.abs(moment), _root(second, ROUGH) + eps, ROUGH)
        elif FORMULA == BITTER6:
            moment = read(tl.load(row + FACT1), start, lane, valid, TYPE1, ALIGNED).to(tl.float32)
            second = read(tl.load(row + FACT2), start, lane, valid, TYPE2, ALIGNED).to(tl.float32)
            score = score * _root(tl.abs(moment) + eps, ROUGH)
            score = score * _root(_quotient(moment * moment, second + eps, ROUGH), ROUGH)
        elif FORMULA == WANDA:
            where = ((start + lane) // tl.load(row + DIVISOR)) % tl.load(row + MODULUS)
            score = score * read(tl.load(row + FACT1), 0, where, valid, TYPE1, False).to(tl.float32)
    return score


@triton.jit
def _root(value, ROUGH: tl.constexpr):
    return tl.sqrt(value) if ROUGH else tl.sqrt_rn(value)


@triton.jit
def _quotient(above, below, ROUGH: tl.constexpr):
    return above / below if ROUGH else tl.div_rn(above, below)


@triton.jit
def _power(value, SIXTEENTHS: tl.constexpr, ROUGH: tl.constexpr):
    """value ** (SIXTEENTHS / 16) by square roots, in the order of secateur.scores.power."""
    result = value
    if SIXTEENTHS != 16:
        result = tl.full(value.shape, 1.0, tl.float32)
        root = value
        for place in tl.static_range(4):
            if SIXTEENTHS % (16 >> place) != 0:  # nothing is left below this bit otherwise
                root = _root(root, ROUGH)
                if SIXTEENTHS & (8 >> place):
                    result = result * root
    return result


@triton.jit
def roughly(value, SIGN: tl.constexpr):
    """A bound moved outwards (down or up) by more than a rough score can be off: 2^-17 of it, about sixty units in the
    last place, and what a quick square root may lose when it takes the smallest numbers for zero."""
    return value + SIGN * (tl.abs(value) * 7.62939453125e-06 + 1e-36)


@triton.jit
def key_of(score):
    """int32 keys in the order of the scores; -0.0 equals 0.0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The score a key (int64 here) stands for."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


_COMPILED: dict[Any, Any] = {}


def launch(kernel: Any, grid: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], warps: int = 8) -> None:
    """Launch with arguments and, after them, compile-time constants (torch's dtypes among them stand for Triton's).
    Integers among the arguments stay below 2^31.

    Triton spends tens of microseconds on working out which compiled kernel is meant; a mask update is a dozen
    launches in a millisecond. So what it found is remembered, by all that it may depend on here.
    """
    if not grid:
        return
    aligned = tuple([value.data_ptr() & 15 == 0 for value in arguments if value.__class__ is Tensor])
    key = kernel, arguments[0].device, constants, aligned
    found = _COMPILED.get(key)
    if found is not None:
        compiled, meant = found
        compiled[(grid, 1, 1)](*arguments, *meant)
        return
    meant = [TYPES[value] if isinstance(value, torch.dtype) else value for value in constants]
    named = dict(zip(kernel.arg_names[len(arguments) :], meant, strict=True))
    if isinstance(kernel, InterpretedFunction):
        kernel[(grid,)](*arguments, **named)
        return
    # A product and a sum contracted into one rounding would change the last bit of a score.
    _COMPILED[key] = kernel[(grid,)](*arguments, **named, num_warps=warps, enable_fp_fusion=False), meant


def formula_of(launch: Launch) -> tuple[Any, ...]:
    plan, types = launch.kind.plan, launch.kind.dtypes
    return plan.formula, plan.sixteenths, *types
