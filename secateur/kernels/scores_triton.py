"""Scores in Triton: formulas, keys, masked loads; and `launch_kernel`, by which every kernel of this package runs.

The constants of table.py are repeated here as `tl.constexpr`, since a kernel can read no other globals.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from secateur.kernels import table
from secateur.kernels.table import Launch

BITTER0 = tl.constexpr(table.BITTER0)
BITTER6 = tl.constexpr(table.BITTER6)
GIVEN = tl.constexpr(table.GIVEN)
MAGNITUDE = tl.constexpr(table.MAGNITUDE)
MOMENTUM = tl.constexpr(table.MOMENTUM)
VARIANCE = tl.constexpr(table.VARIANCE)
BARE = tl.constexpr(table.BARE)
WANDA = tl.constexpr(table.WANDA)

ALIVE = tl.constexpr(table.ALIVE)
BITS = tl.constexpr(table.BITS)
BOOL = tl.constexpr(table.BOOL)
COLUMNS = tl.constexpr(table.COLUMNS)
COUNTED = tl.constexpr(table.COUNTED)
DIVISOR = tl.constexpr(table.DIVISOR)
FACT0 = tl.constexpr(table.FACT0)
FACT1 = tl.constexpr(table.FACT1)
FACT2 = tl.constexpr(table.FACT2)
FIRST = tl.constexpr(table.FIRST)
GROUP = tl.constexpr(table.GROUP)
LAUNCH = tl.constexpr(table.LAUNCH)
MASK = tl.constexpr(table.MASK)
MODULUS = tl.constexpr(table.MODULUS)
NUMEL = tl.constexpr(table.NUMEL)
TILE = tl.constexpr(table.TILE)

BELOW = tl.constexpr(table.BELOW)
BINS = tl.constexpr(table.BINS)
BLOCK = tl.constexpr(table.BLOCK)
COUNTERS = tl.constexpr(table.COUNTERS)
TOO_MANY_TIES = tl.constexpr(table.TOO_MANY_TIES)
DIGIT = tl.constexpr(table.DIGIT)
EQUAL = tl.constexpr(table.EQUAL)
HIGH = tl.constexpr(table.HIGH)
INSIDE = tl.constexpr(table.INSIDE)
LISTED = tl.constexpr(table.LISTED)
LOW = tl.constexpr(table.LOW)
TIES_PER_PROGRAM = tl.constexpr(table.TIES_PER_PROGRAM)
OVER = tl.constexpr(table.OVER)
RANK = tl.constexpr(table.RANK)
RUN = tl.constexpr(table.RUN)
SHIFT = tl.constexpr(table.SHIFT)
SLOTS = tl.constexpr(table.SLOTS)
WHOLE = tl.constexpr(table.WHOLE)
WORDS = tl.constexpr(table.WORDS)


@triton.jit
def read(address, start, lane, valid, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load from an address of the table. The compiler cannot know its alignment, so ALIGNED states it."""
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
    """Which weights at `start + lane` compete."""
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
    """fp32 scores at `start + lane` of the tensor of this row. `given` holds the scores if FORMULA is GIVEN.

    ROUGH uses the fast square root and division, a few units in the last place off (see `roughly`).
    """
    if FORMULA == GIVEN:
        score = tl.load(given + lane, mask=valid, other=0.0)
    else:
        weight = read(tl.load(row + FACT0), start, lane, valid, TYPE0, ALIGNED).to(tl.float32)
        score = tl.abs(weight)
        if FORMULA == VARIANCE:
            second = read(tl.load(row + FACT1), start, lane, valid, TYPE1, ALIGNED).to(tl.float32)
            score = tl.abs(_power(second + eps, SIXTEENTHS, ROUGH) * weight)
        elif FORMULA == BARE:
            second = read(tl.load(row + FACT1), start, lane, valid, TYPE1, ALIGNED).to(tl.float32)
            score = tl.abs(_power(second, SIXTEENTHS, ROUGH) * weight)
            if ROUGH:  # the fast root flushes subnormals: NaN leaves them to the exact pass
                score = tl.where((second > 0.0) & (second < 1.1754943508222875e-38), float("nan"), score)
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
            if SIXTEENTHS % (16 >> place) != 0:  # otherwise no lower bit is set
                root = _root(root, ROUGH)
                if SIXTEENTHS & (8 >> place):
                    result = result * root
    return result


@triton.jit
def roughly(value, SIGN: tl.constexpr):
    """Move a bound outwards (SIGN: down or up) by more than the error of a fast-math score.

    That is 2^-17 of it, about 60 units in the last place, plus the numbers that the fast sqrt flushes to zero.
    """
    return value + SIGN * (tl.abs(value) * 7.62939453125e-06 + 1e-36)


@triton.jit
def key_of(score):
    """int32 keys that sort as the scores do; -0.0 equals 0.0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The score of a key, which is int64 here."""
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


def launch_kernel(
    kernel: Any,
    grid: int | tuple[int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    warps: int = 8,
    *,
    fused: bool = False,
) -> None:
    """Launch a kernel with its arguments and, after them, its compile-time constants.

    torch dtypes among the constants become Triton's. Integer arguments must stay below 2^31. Triton takes tens of
    microseconds to find the compiled kernel for a launch, and a mask update is a dozen launches in a millisecond; so
    compiled kernels are cached here by everything they depend on. `fused` allows fused multiply-add, which would change
    the last bit of a score.
    """
    programs = (grid, 1) if isinstance(grid, int) else grid
    if not all(programs):
        return
    tensors = tuple([(one.dtype, one.data_ptr() & 15 == 0) for one in arguments if one.__class__ is Tensor])
    key = kernel, arguments[0].device, constants, tensors, warps
    found = _COMPILED.get(key)
    if found is not None:
        compiled, translated = found
        # Triton asks the driver about every pointer that comes as a tensor, which takes longer than the launch.
        plain = [one.data_ptr() if one.__class__ is Tensor else one for one in arguments]
        compiled[(*programs, 1)](*plain, *translated)
        return
    translated = [TYPES[value] if isinstance(value, torch.dtype) else value for value in constants]
    named = dict(zip(kernel.arg_names[len(arguments) :], translated, strict=True))
    if isinstance(kernel, InterpretedFunction):
        kernel[programs](*arguments, **named)
        return
    _COMPILED[key] = kernel[programs](*arguments, **named, num_warps=warps, enable_fp_fusion=fused), translated


def formula_of(launch: Launch) -> tuple[Any, ...]:
    """The constants FORMULA, SIXTEENTHS and TYPE0 to TYPE2 of a launch."""
    plan, types = launch.variant.plan, launch.variant.dtypes
    return plan.formula, plan.sixteenths, *types
