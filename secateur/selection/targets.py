"""Targets: tensors to select in, and what comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from secateur.selection.exact import Cut
from secateur.selection.pieces import Piece
from secateur.selection.tiles import Layout, Pattern, Tiling, tile_of


@dataclass(frozen=True)
class Target:
    """A tensor to select in: its piece, its shape here and over all peers, and how rows and inputs lie in it."""

    piece: Piece
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    layout: Layout

    def tiling(self, pattern: Pattern | None) -> Tiling:
        return Tiling(self.shape, tile_of(self.piece.name, self.whole, self.layout, pattern, self.shape))

    @property
    def fan(self) -> int:
        """Outputs plus inputs plus kernel extents, for every matrix the tensor holds."""
        stacked = self.layout.rows[:-1]
        dims = [size for dim, size in enumerate(self.whole) if dim not in stacked]
        return sum(dims) * math.prod(self.whole[dim] for dim in stacked)


@dataclass(frozen=True)
class Selection:
    """Flat masks in the order of the targets, with the cut of each: one for all in scope "model", none for tiles."""

    masks: list[Tensor]
    cuts: list[Cut | None]
    kept: list[int] | None = None  # how many weights each mask keeps, where that is known already
