"""Ranking on the spot: the lowest of every row or n:m group go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from secateur import kernels
from secateur.selection.bits import to_bits
from secateur.selection.exact import prune_exactly, refuse_nan
from secateur.selection.pieces import CHUNK, Peers, Piece, Where, without_lowest
from secateur.selection.targets import Selection, Target
from secateur.selection.tiles import Pattern, Tiling


def rank(
    targets: Sequence[Target], gone: Sequence[int], pattern: Pattern | None, peers: Peers, packed: bool
) -> Selection:
    """In every tile, the weights of lowest score go until `gone` are; those already gone count."""
    tilings = [target.tiling(pattern) for target in targets]
    if all(tiling.solid for tiling in tilings):
        sizes = [tiling.size for tiling in tilings]
        if (ready := kernels.rank_tiles([target.piece for target in targets], sizes, gone, peers, packed)) is not None:
            return Selection(ready, [None] * len(ready))
    masks, spoiled = [], []
    for target, tiling, count in zip(targets, tilings, gone, strict=True):
        piece = target.piece.unpacked()
        mask = torch.empty(piece.numel, dtype=torch.bool, device=piece.device)
        nan = 0
        for slab in tiling.slabs() if piece.numel else ():
            if tiling.size > 2 * CHUNK:
                nan += _rank_long_tile(piece, tiling, slab, count, mask)
                continue
            where = tiling.members(slab)
            scores = piece.score(where)
            nan += piece.spoiled(where, scores)
            mask[where] = without_lowest(piece.keys(where, scores).view(-1, tiling.size), count).flatten()
        masks.append(to_bits(mask) if packed else mask)
        spoiled.append(nan)
    refuse_nan([target.piece.name for target in targets], peers.totals(spoiled))
    return Selection(masks, [None] * len(masks))


def _rank_long_tile(piece: Piece, tiling: Tiling, tile: Where, count: int, mask: Tensor) -> int:
    """A tile too long to rank in one go is a little model of its own. Returns how many of its scores are NaN."""

    def score(places: Where) -> Tensor:
        return piece.score(tiling.members(tile, places))

    alone = Piece(piece.name, tiling.size, tiling.size, score, piece.device)
    if piece.alive is not None:
        alive = torch.cat([piece.alive[tiling.members(tile, chunk)] for chunk in alone.chunks()])
        alone = replace(alone, alive=alive)
    nan = sum(alone.spoiled(chunk, score(chunk)) for chunk in alone.chunks())
    if nan == 0:  # otherwise every rank must hear of it first
        kept = prune_exactly([alone], count - (alone.numel - alone.living()))[1][0]
        for chunk in alone.chunks():
            mask[tiling.members(tile, chunk)] = kept[chunk]
    return nan
