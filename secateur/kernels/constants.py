"""The numbers kernels are compiled with, each stated once in plain Python and lent to Triton here."""

from __future__ import annotations

import triton.language as tl

from secateur.kernels import board, fusing, table

BITTER0 = tl.constexpr(fusing.BITTER0)
BITTER6 = tl.constexpr(fusing.BITTER6)
GIVEN = tl.constexpr(fusing.GIVEN)
MAGNITUDE = tl.constexpr(fusing.MAGNITUDE)
MOMENTUM = tl.constexpr(fusing.MOMENTUM)
VARIANCE = tl.constexpr(fusing.VARIANCE)
WANDA = tl.constexpr(fusing.WANDA)

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

BELOW = tl.constexpr(board.BELOW)
BINS = tl.constexpr(board.BINS)
BLOCK = tl.constexpr(board.BLOCK)
COUNTERS = tl.constexpr(board.COUNTERS)
CROWDED = tl.constexpr(board.CROWDED)
DIGIT = tl.constexpr(board.DIGIT)
EQUAL = tl.constexpr(board.EQUAL)
HIGH = tl.constexpr(board.HIGH)
INSIDE = tl.constexpr(board.INSIDE)
LISTED = tl.constexpr(board.LISTED)
LOW = tl.constexpr(board.LOW)
ORDERED = tl.constexpr(board.ORDERED)
OVER = tl.constexpr(board.OVER)
RANK = tl.constexpr(board.RANK)
RUN = tl.constexpr(board.RUN)
SHIFT = tl.constexpr(board.SHIFT)
SLOTS = tl.constexpr(board.SLOTS)
WORDS = tl.constexpr(board.WORDS)
