"""Tiles: an output row, an n:m group and a block are all a tile size for each dimension of a tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.errors import PatternError
from secateur.selection.exact import CHUNK, Where


@dataclass(frozen=True)
class Layout:
    """Which dimensions of a weight count its output rows, and which one its inputs; the rest is kernel extent.

    `groups` is how many groups of a transposed convolution follow each other along the input dimension.
    """

    rows: tuple[int, ...] = (0,)
    inputs: int = 1
    groups: int = 1


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern: `kept` of every `inputs` consecutive inputs (n:m), or blocks of `rows` x `inputs`."""

    text: str
    rows: int
    inputs: int
    kept: int | None = None  # None for blocks

    @property
    def sparsity(self) -> float | None:
        return None if self.kept is None else 1 - self.kept / self.inputs


def parse_pattern(text: str | None) -> Pattern | None:
    """The Pattern of a text such as "2:4" or "block:16x16"; None stays None."""
    if text is None:
        return None
    if not isinstance(text, str):
        raise PatternError(f'A pattern is a string such as "2:4"; got {text!r}.')
    if found := re.fullmatch(r"(\d+):(\d+)", text):
        kept, group = int(found[1]), int(found[2])
        if 0 < kept < group:
            return Pattern(text, 1, group, kept)
    elif found := re.fullmatch(r"block:(\d+)x(\d+)", text):
        rows, inputs = int(found[1]), int(found[2])
        if rows and inputs:
            return Pattern(text, rows, inputs)
    raise PatternError(
        f'No pattern {text!r}. Use "n:m" with 0 < n < m, such as "2:4", or "block:RxC", such as "block:16x16".'
    )


@dataclass(frozen=True)
class Tiling:
    """A tensor divided into equal tiles; tiles, and places inside one, are numbered in storage order."""

    shape: tuple[int, ...]
    tile: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.tile)

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(s // t for s, t in zip(self.shape, self.tile, strict=True))

    @property
    def count(self) -> int:
        return math.prod(self.grid)

    def slabs(self, tiles: Where | None = None) -> Iterator[Where]:
        """These tiles (by default all) in portions of about one chunk of weights."""
        step = max(1, CHUNK // self.size)
        if isinstance(tiles, Tensor):
            yield from tiles.split(step)
            return
        first, end = (0, self.count) if tiles is None else (tiles.start, tiles.stop)
        yield from (slice(start, min(start + step, end)) for start in range(first, end, step))

    @property
    def solid(self) -> bool:
        """Whether a tile is contiguous in memory; then tiles follow each other without a gap."""
        broken = [dim for dim, (size, tile) in enumerate(zip(self.shape, self.tile, strict=True)) if tile != size]
        return all(tile == 1 for tile in self.tile[: broken[-1]]) if broken else True

    def members(self, tiles: Where, places: Where | None = None) -> Where:
        """Flat indices of these tiles, tile by tile, or of some places of one tile. A slice where contiguous."""
        if self.solid and isinstance(tiles, slice) and not isinstance(places, Tensor):
            first = tiles.start * self.size
            return (
                slice(first, tiles.stop * self.size)
                if places is None
                else slice(first + places.start, first + places.stop)
            )
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        corner_strides = [t * s for t, s in zip(self.tile, strides, strict=True)]
        corners = _offsets(_numbers(tiles), self.grid, corner_strides)
        inside = _offsets(_numbers(slice(0, self.size) if places is None else places), self.tile, strides)
        return (corners[:, None] + inside.to(corners.device)).flatten()


def _numbers(where: Where) -> Tensor:
    return torch.arange(where.start, where.stop, device="cpu") if isinstance(where, slice) else where


def _offsets(numbers: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Flat offsets of places numbered row by row in a box of these sizes and strides."""
    offsets = torch.zeros_like(numbers)
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        offsets += numbers % size * stride
        numbers = numbers // size
    return offsets


def tile_of(
    name: str, whole: Sequence[int], layout: Layout, pattern: Pattern | None, shape: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The tile of a pattern in a tensor of shape `whole`: an n:m group, a block, or without a pattern a row.

    `shape` is that of the local shard, whose rows may be fewer.
    """
    if pattern is None:
        row = [1 if dim in layout.rows else size for dim, size in enumerate(shape or whole)]
        if layout.groups > 1:
            row[layout.inputs] = whole[layout.inputs] // layout.groups
        return tuple(row)
    if len(whole) < 2:
        raise PatternError(f"Pattern {pattern.text!r} needs a matrix; {name!r} has shape {tuple(whole)}. Leave it out.")
    tile = [1] * len(whole)
    tile[layout.rows[-1]], tile[layout.inputs] = pattern.rows, pattern.inputs
    if not fits(whole, layout, pattern):
        raise PatternError(
            f"{name!r} of shape {tuple(whole)} cannot be tiled by {pattern.text!r}: its outputs must be divisible by"
            f" {pattern.rows} and its inputs by {pattern.inputs}. Leave it out with skip={name!r}."
        )
    return tuple(tile)


def fits(whole: Sequence[int], layout: Layout, pattern: Pattern) -> bool:
    """Whether a tensor of this shape divides into the pattern's tiles."""
    rows, inputs = whole[layout.rows[-1]], whole[layout.inputs] // layout.groups
    return rows % pattern.rows == 0 and inputs % pattern.inputs == 0


def pairwise_sum(rows: Tensor) -> Tensor:
    """Sum of each row by halving. Additions are elementwise, so the result does not depend on the number of rows."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        summed = rows[:, :half] + rows[:, half : 2 * half]
        rows = torch.cat((summed, rows[:, 2 * half :]), dim=1) if rows.shape[1] % 2 else summed
    return rows[:, 0]
