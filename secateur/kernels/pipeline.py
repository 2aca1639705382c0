"""The exact selection on the device: sample, sweep once, settle. The host looks once, at the end.

The same way as `selection.exact` goes on CPUs, and the same masks; but for many selections at once, with every count
left on the device until all is done. Where a sample misled or too many scores tie, the slow way is taken, which needs
no luck: histograms of all scores until one key is left, then one pass that gives up its ties in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from secateur.kernels.board import Board
from secateur.kernels.engine import Engine
from secateur.kernels.sizing import Wish, batches
from secateur.kernels.table import BITS, BOOL, Table, mask_kind, new_masks
from secateur.selection.bits import as_bool, to_bits
from secateur.selection.exact import Cut, refuse_nan
from secateur.selection.pieces import Peers, Piece, count_of


def prune_groups(
    ops: Any, groups: Sequence[Sequence[Piece]], counts: Sequence[int], peers: Peers, packed: bool
) -> tuple[list[Cut | None], list[Tensor], list[int] | None]:
    """Selections over pieces that share a device; see secateur.kernels. One look at the device for all of them, unless
    some must go slowly."""
    pieces = [piece for group in groups for piece in group]
    masks = new_masks([piece.numel for piece in pieces], BITS if packed else BOOL, pieces[0].device)
    wishes = wishes_for(groups, counts, peers)
    engine = Engine(ops, pieces, masks, peers)
    rounds = [engine.begin(numbers, [wishes[n] for n in numbers]) for numbers in batches(wishes)]
    for wish in wishes:
        for number in wish.pieces if wish.wanted == 0 else ():
            keep_all(pieces[number], masks[number])
    # Bits are counted in passing; bytes are eight times as many, and not everybody asks.
    counted = ops.population(masks) if packed else torch.empty(0, dtype=torch.int64, device=masks[0].device)
    parts = [counted, *(part for done in rounds for part in (done.board.told, done.board.ranges))]
    numbers = iter(torch.cat(parts).tolist())
    kept, *told = [list(islice(numbers, part.numel())) for part in parts]
    read = [[*counted, *ranges] for counted, ranges in zip(told[::2], told[1::2], strict=True)]
    names = [piece.name for done in rounds for piece in done.table.pieces]
    spoiled = [count for done, words in zip(rounds, read, strict=True) for count in done.board.spoiled_in(words)]
    refuse_nan(names, peers.totals(spoiled))
    cuts: list[Cut | None] = [None] * len(wishes)
    slow = False
    for done, words in zip(rounds, read, strict=True):
        slow = slow or any(done.board.failed_in(words))
        found = engine.finish([wishes[n] for n in done.numbers], done.board, words)
        for number, cut in zip(done.numbers, found, strict=True):
            cuts[number] = cut
    if not packed:
        return cuts, masks, None
    return cuts, masks, ops.population(masks).tolist() if slow else kept


def wishes_for(groups: Sequence[Sequence[Piece]], counts: Sequence[int], peers: Peers) -> list[Wish]:
    """What each group asks for, with what lives in it over all peers."""
    here = [sum(living_in(piece) for piece in group if piece.counted(peers)) for group in groups]
    living = peers.totals(here)
    wishes, first = [], 0
    for group, count, alive in zip(groups, counts, living, strict=True):
        members = range(first, first + len(group))
        wishes.append(Wish(members, min(max(count, 0), alive), alive, sum(piece.total for piece in group)))
        first += len(group)
    return wishes


def living_in(piece: Piece) -> int:
    """How many of the piece's weights compete."""
    if piece.alive is None or piece.dead is not None:
        return piece.living()
    return count_of(as_bool(piece.alive, (piece.numel,)))


def keep_all(piece: Piece, mask: Tensor) -> None:
    """A mask that removes nothing but what is dead."""
    alive = torch.ones(piece.numel, dtype=torch.bool, device=piece.device) if piece.alive is None else piece.alive
    if mask_kind(mask) != mask_kind(alive):
        alive = to_bits(alive) if mask_kind(mask) == BITS else as_bool(alive, (piece.numel,))
    mask.copy_(alive)


def rank_tiles(
    ops: Any, pieces: Sequence[Piece], widths: Sequence[int], gone: Sequence[int], packed: bool
) -> tuple[list[Tensor], list[int]] | None:
    """Masks without the lowest of every `width` neighbours, and how many scores are NaN. None if a kernel cannot."""
    if any(width > ops.LONGEST or (packed and not ops.packs(width)) for width in widths):
        return None
    masks = new_masks([piece.numel for piece in pieces], BITS if packed else BOOL, pieces[0].device)
    for piece, mask in zip(pieces, masks, strict=True):
        if packed and piece.numel % 32:
            mask[-4:].zero_()  # bits past the end are never set, so that masks can be counted and compared
    table = Table(pieces, [0] * len(pieces), masks)
    if any(launch.piece is not None for launch in table.launches):
        return None
    board = Board(table, [0], [1])
    ops.rank(table, board, widths, gone)
    return masks, board.spoiled.tolist()
