"""Selections under way on a device: sample, sweep once, settle; and the slow way, where that failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from secateur.kernels import table as layout
from secateur.kernels.table import (
    BELOW,
    BITS,
    BOOL,
    CROWDED,
    DIGIT,
    EQUAL,
    INSIDE,
    LOW,
    RANK,
    RUN,
    TILE,
    Board,
    Launch,
    Table,
    Wish,
    batches,
    mask_kind,
    new_masks,
    range_of,
    to_device,
)
from secateur.selection.exact import Cut, Peers, ScoredTensor, Where, count_of, narrowed, refuse_nan, value_of
from secateur.selection.masks import as_bool, to_bits


@dataclass
class Round:
    """A batch under way: what is needed to read its outcome, and to go on where it failed."""

    numbers: list[int]
    table: Table
    board: Board


class Engine:
    """Runs selections over pieces that share a device, with kernels (or their twins)."""

    def __init__(self, ops: Any, pieces: Sequence[ScoredTensor], masks: Sequence[Tensor], peers: Peers) -> None:
        self.ops, self.pieces, self.masks, self.peers = ops, pieces, masks, peers
        self.many = peers.size > 1

    def table(self, wishes: Sequence[Wish]) -> Table:
        members = [number for wish in wishes for number in wish.pieces]
        groups = [group for group, wish in enumerate(wishes) for _ in wish.pieces]
        return Table([self.pieces[n] for n in members], groups, [self.masks[n] for n in members], rank=self.peers.rank)

    def begin(self, numbers: list[int], wishes: Sequence[Wish]) -> Round:
        """Everything up to the masks, without looking at any of it."""
        table = self.table(wishes)
        board = Board(table, [wish.wanted for wish in wishes], [wish.living for wish in wishes])
        smallest, largest = min(wish.total for wish in wishes), max(wish.total for wish in wishes)
        if largest > layout.SMALL:
            self.survey(table, board, max(0, (smallest // layout.FIRST_LOOK).bit_length() - 1))
            self.ops.narrow(board, sigmas=layout.SIGMAS)
            self.survey(table, board, layout.sampling(smallest))
            self.ops.narrow(board, sigmas=layout.SIGMAS)
        here = [sum(self.pieces[n].numel for n in wish.pieces) for wish in wishes]
        rooms = [min(layout.room_for(wish), numel) for wish, numel in zip(wishes, here, strict=True)]
        board.collect(rooms, layout.few_for(largest, len(wishes)))
        self.sweep(table, board)
        if self.many:
            board.totals = self.peers.sum(board.counters)
        turns = 3 if largest <= layout.SMALL else 2  # a bracket is at most 2^26 keys wide, unless the sample misled
        for turn in range(turns):
            self.ops.tally(table, board, self.many)
            self.sum_counts(board)
            self.ops.narrow(board, collected=True, begin=turn == 0, last=turn == turns - 1)
        self.ops.settle(table, board, self.many)
        if self.many:
            crowded = self.peers.sum((board.table_of("counters")[:, EQUAL] > board.few_room).long())
            board.failed.copy_(torch.where((board.failed == 0) & (crowded > 0), CROWDED, board.failed))
        self.ops.order(table, board, self.quotas(table, board, board.equal) if self.many else None)
        board.release()
        return Round(numbers, table, board)

    def survey(self, table: Table, board: Board, shift: int) -> None:
        for launch in table.launches:
            if launch.piece is None:
                self.ops.survey(table, board, launch, shift)
            elif table.counted[launch.piece]:
                piece = table.pieces[launch.piece]
                for where in sampled_places(piece.numel, shift, table.device):
                    scores = piece.score(where)
                    if piece.alive is not None:
                        scores = scores.masked_fill(~alive_at(piece, where), float("nan"))
                    self.ops.count(board, scores.contiguous(), table.groups[launch.piece])
        self.sum_counts(board)

    def sum_counts(self, board: Board) -> None:
        if self.many:
            board.counts.copy_(self.peers.sum(board.counts))

    def each(self, table: Table) -> Iterator[tuple[Launch, Tensor | None]]:
        """Every launch; one whose scores must be handed over comes in parts, each with its scores."""
        for launch in table.launches:
            if launch.piece is None:
                yield launch, None
                continue
            piece = table.pieces[launch.piece]
            for start in range(0, launch.count, layout.GIVEN_TILES):
                part = replace(launch, first=launch.first + start, count=min(layout.GIVEN_TILES, launch.count - start))
                where = slice(start * TILE, min((start + part.count) * TILE, piece.numel))
                yield part, piece.score(where).contiguous()

    def sweep(self, table: Table, board: Board, careful: bool = False) -> None:
        if careful:
            board.counters.zero_()
            board.inside = torch.empty(table.tiles, dtype=torch.int32, device=table.device)
        for launch, given in self.each(table):
            self.ops.sweep(table, board, launch, given, careful=careful)
        for launch in table.launches:
            if launch.piece is None and not careful:
                self.ops.unfold(table, board, launch)

    def quotas(self, table: Table, board: Board, equal: Tensor) -> Tensor:
        """How many of the scores equal to the cut each piece here gives up, in (tensor, rank) order."""
        device, size, rank = table.device, self.peers.size, self.peers.rank
        columns = torch.tensor([0 if piece.replicated else rank for piece in table.pieces], device=device)
        rows = torch.arange(len(table.pieces), device=device)
        grid = torch.zeros(len(table.pieces), size, dtype=torch.int64, device=device)
        grid[rows, columns] = equal * torch.tensor(table.counted, device=device)
        grid = self.peers.sum(grid)
        groups = torch.tensor(table.groups, device=device)
        before = grid.flatten().cumsum(0).view_as(grid) - grid
        starts = torch.tensor([table.groups.index(group) for group in range(board.groups)], device=device)
        before = before - before[starts[groups], 0][:, None]
        ties = board.table_of("ranges")[groups, RANK]
        quotas = (ties[:, None] - before).clamp(min=0).minimum(grid)
        return quotas[rows, columns]

    def finish(self, wishes: Sequence[Wish], board: Board, told: Sequence[int]) -> list[Cut]:
        """Read a round's outcome; where it failed, go the slow way."""
        cuts = []
        for group, (wish, failed) in enumerate(zip(wishes, board.failed_in(told), strict=True)):
            low, high, _, rank = told[-4 * (board.groups - group) :][:4]
            if failed:
                low, rank = self.slowly(wish, low, high)
            cuts.append(Cut(value_of(low), rank))
        return cuts

    def slowly(self, wish: Wish, low: int, high: int) -> tuple[int, int]:
        """The way that needs no luck: histograms of everything, then one pass for the ties. The key and its ties.

        `low` and `high` are where the cut was looked for, or, if only its ties were too many, the cut itself.
        """
        table = self.table([wish])
        board = Board(table, [wish.wanted], [wish.living])
        board.ranges.copy_(to_device(range_of(low, high), torch.int64, table.device))
        self.sweep(table, board, careful=True)
        counts = self.peers.totals([*board.counters[: INSIDE + 1].tolist(), *board.spoiled.tolist()])
        refuse_nan([piece.name for piece in table.pieces], counts[2:])
        low, high, rank = narrowed((low, high), wish.wanted, counts[BELOW], counts[INSIDE])
        board.ranges.copy_(to_device(range_of(low, high, rank), torch.int64, table.device))
        turns = -(-(high - low).bit_length() // DIGIT)
        for _ in range(turns):
            self.survey(table, board, 0)
            self.ops.narrow(board)
        if turns:
            self.sweep(table, board, careful=True)
        firsts = torch.tensor(table.first, device=table.device)
        upto = torch.cat((firsts.new_zeros(1), board.inside.cumsum(0)))
        equal = upto[firsts[1:]] - upto[firsts[:-1]]
        before = upto[:-1] - upto[firsts[table.owners.long()]]
        quotas = self.quotas(table, board, equal)
        for launch, given in self.each(table):
            self.ops.give_up(table, board, launch, before, quotas, given)
        found = board.ranges.tolist()
        return found[LOW], found[RANK]


def alive_at(piece: ScoredTensor, where: Where) -> Tensor:
    """Which of some places of a piece compete."""
    assert piece.alive is not None
    if piece.alive.dtype == torch.bool:
        return piece.alive[where]
    index = torch.arange(where.start, where.stop, device=piece.device) if isinstance(where, slice) else where
    return (piece.alive[index >> 3] >> (index & 7) & 1).bool()


def sampled_places(numel: int, shift: int, device: torch.device) -> Iterator[Where]:
    """Runs of neighbours spread over a tensor, one of every `1 << shift`, some tiles' worth at a time."""
    size = layout.GIVEN_TILES * TILE
    if shift == 0 or numel <= RUN:
        yield from (slice(start, min(start + size, numel)) for start in range(0, numel, size))
        return
    runs = max(1, numel // (RUN << shift))
    for start in range(0, runs, size // RUN):
        run = torch.arange(start, min(start + size // RUN, runs), device=device)
        jitter = ((run * 0x9E3779B1) >> 8) & ((1 << shift) - 1)
        places = (((run << shift) + jitter) * RUN)[:, None] + torch.arange(RUN, device=device)
        yield places.flatten().clamp_(max=numel - 1)


def prune_groups(
    ops: Any, groups: Sequence[Sequence[ScoredTensor]], counts: Sequence[int], peers: Peers, packed: bool
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


def wishes_for(groups: Sequence[Sequence[ScoredTensor]], counts: Sequence[int], peers: Peers) -> list[Wish]:
    """What each group asks for, with what lives in it over all peers."""
    here = [sum(living_in(piece) for piece in group if piece.counted(peers)) for group in groups]
    living = peers.totals(here)
    wishes, first = [], 0
    for group, count, alive in zip(groups, counts, living, strict=True):
        members = range(first, first + len(group))
        wishes.append(Wish(members, min(max(count, 0), alive), alive, sum(piece.total for piece in group)))
        first += len(group)
    return wishes


def living_in(piece: ScoredTensor) -> int:
    """How many of the piece's weights compete."""
    if piece.alive is None or piece.dead is not None:
        return piece.living()
    return count_of(as_bool(piece.alive, (piece.numel,)))


def keep_all(piece: ScoredTensor, mask: Tensor) -> None:
    """A mask that removes nothing but what is dead."""
    alive = torch.ones(piece.numel, dtype=torch.bool, device=piece.device) if piece.alive is None else piece.alive
    if mask_kind(mask) != mask_kind(alive):
        alive = to_bits(alive) if mask_kind(mask) == BITS else as_bool(alive, (piece.numel,))
    mask.copy_(alive)


def rank_tiles(
    ops: Any, pieces: Sequence[ScoredTensor], widths: Sequence[int], gone: Sequence[int], packed: bool
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
