"""The exact selection on the device: sample, sweep once, settle. The host looks once, at the end.

The same way as secateur.selection goes on CPUs, and the same masks; but for many selections at once, with every count
left on the device until all is done. Where a sample misled or too many scores tie, the slow way is taken, which needs
no luck: histograms of all scores until one key is left, then one pass that gives up its ties in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.kernels.board import BELOW, CROWDED, DIGIT, EQUAL, FEW, HIGH, LOW, RANK, RUN, Board, range_of
from secateur.kernels.table import TILE, Launch, Table, to_device
from secateur.pieces import Piece, value_of
from secateur.selection import Cut, narrowed, refuse_nan
from secateur.shards import Peers

SMALL = 1 << 18  # weights up to which a selection collects them all
SAMPLE = 1 << 18  # scores sampled at least
STRIDE = 64  # one run of every so many is sampled for the bracket
TWICE = 1 << 27  # weights from which a first, small sample tells the second, larger one where to look closely
SIGMAS = 4.0  # half-width of the bracket, in standard deviations of the sampled rank
ROOM = 1 << 22  # scores collected in one batch of selections, 12 bytes each
BATCH = 32  # selections in one batch; a histogram takes half a MiB
GIVEN_TILES = 128  # tiles whose scores torch evaluates at a time, for scores without a kernel


@dataclass(frozen=True)
class Wish:
    """A selection: which pieces compete (numbers, in order), how many weights go, out of how many living."""

    pieces: Sequence[int]
    wanted: int
    living: int
    total: int


def room_for(wish: Wish) -> int:
    """How many scores the bracket is expected to hold, and half as many again."""
    if wish.total <= SMALL:
        return wish.total
    if wish.total <= TWICE:
        return max(SMALL, wish.total // 64)
    return int(1.5 * SIGMAS * (STRIDE * wish.total) ** 0.5)


def batches(wishes: Sequence[Wish]) -> Iterator[list[int]]:
    """Selections of about the same size together, as many as there is room for."""
    for sampled in (False, True):
        batch: list[int] = []
        room = 0
        for number, wish in enumerate(wishes):
            if (wish.total > SMALL) != sampled or wish.wanted == 0:
                continue
            if batch and (len(batch) == BATCH or room + room_for(wish) > ROOM):
                yield batch
                batch, room = [], 0
            batch.append(number)
            room += room_for(wish)
        if batch:
            yield batch


@dataclass
class Round:
    """A batch under way: what is needed to read its outcome, and to go on where it failed."""

    numbers: list[int]
    table: Table
    board: Board


class Engine:
    """Runs selections over pieces that share a device, with kernels (or their twins)."""

    def __init__(self, ops: Any, pieces: Sequence[Piece], masks: Sequence[Tensor], peers: Peers) -> None:
        self.ops, self.pieces, self.masks, self.peers = ops, pieces, masks, peers
        self.many = peers.size > 1

    def table(self, wishes: Sequence[Wish]) -> Table:
        members = [number for wish in wishes for number in wish.pieces]
        groups = [group for group, wish in enumerate(wishes) for _ in wish.pieces]
        return Table(
            [self.pieces[n] for n in members], groups, [self.masks[n] for n in members], rank=self.peers.rank
        )

    def begin(self, numbers: list[int], wishes: Sequence[Wish]) -> Round:
        """Everything up to the masks, without looking at any of it."""
        table = self.table(wishes)
        here = [sum(self.pieces[n].numel for n in wish.pieces) for wish in wishes]
        rooms = [min(room_for(wish), numel) for wish, numel in zip(wishes, here, strict=True)]
        board = Board(table, [wish.wanted for wish in wishes], [wish.living for wish in wishes], rooms)
        total = max(wish.total for wish in wishes)
        if total > TWICE:
            self.survey(table, board, max(STRIDE, total // SAMPLE))
            self.ops.narrow(board, sigmas=SIGMAS)
        if total > SMALL:
            self.survey(table, board, max(1, min(STRIDE, min(wish.total for wish in wishes) // SAMPLE)))
            self.ops.narrow(board, sigmas=SIGMAS)
        self.sweep(table, board)
        if self.many:
            board.totals = self.peers.sum(board.counters)
        for turn in range(2):
            self.ops.tally(table, board, self.many)
            self.sum_counts(board)
            self.ops.narrow(board, collected=True, begin=turn == 0)
        self.ops.settle(table, board, self.many)
        if self.many:
            crowded = self.peers.sum((board.counters.view(-1, 4)[:, EQUAL] > FEW).long())
            board.failed.copy_(torch.where((board.failed == 0) & (crowded > 0), CROWDED, board.failed))
        self.ops.order(table, board, self.quotas(table, board, board.equal) if self.many else None)
        board.release()
        return Round(numbers, table, board)

    def survey(self, table: Table, board: Board, stride: int) -> None:
        for launch in table.launches:
            if launch.piece is None:
                self.ops.survey(table, board, launch, stride)
            elif table.counted[launch.piece]:
                piece = table.pieces[launch.piece]
                for where in sampled_places(piece.numel, stride, table.device):
                    scores = piece.score(where)
                    if piece.alive is not None:
                        scores = scores.masked_fill(~piece.living_at(where), float("nan"))
                    self.ops.count(board, scores.contiguous(), table.groups[launch.piece])
        self.sum_counts(board)

    def sum_counts(self, board: Board) -> None:
        if self.many:
            board.counts.copy_(self.peers.sum(board.counts))

    def each(self, table: Table) -> Iterator[tuple[Launch, dict[str, Any]]]:
        """Every launch; one whose scores must be handed over comes in parts, each with its scores."""
        for launch in table.launches:
            if launch.piece is None:
                yield launch, {}
                continue
            piece, first = table.pieces[launch.piece], table.first[launch.piece]
            for start in range(0, launch.tiles.numel(), GIVEN_TILES):
                tiles = launch.tiles[start : start + GIVEN_TILES]
                where = slice(start * TILE, min((start + tiles.numel()) * TILE, piece.numel))
                yield launch, {"given": piece.score(where).contiguous(), "tiles": tiles, "first": first + start}

    def sweep(self, table: Table, board: Board) -> None:
        for launch, given in self.each(table):
            self.ops.sweep(table, board, launch, **given)

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
        ties = board.ranges.view(-1, 4)[groups, RANK]
        quotas = (ties[:, None] - before).clamp(min=0).minimum(grid)
        return quotas[rows, columns]


    def finish(self, done: Round, wishes: Sequence[Wish], told: Sequence[int]) -> list[Cut]:
        """Read a round's outcome; where it failed, go the slow way."""
        groups = len(wishes)
        failed = told[4 * groups : 5 * groups]
        ranges = torch.tensor(told[-4 * groups :], device="cpu").view(-1, 4)
        cuts = []
        for group, wish in enumerate(wishes):
            key, ties = int(ranges[group, LOW]), int(ranges[group, RANK])
            if failed[group]:
                key, ties = self.slowly(wish, done if groups == 1 else None, failed[group] == CROWDED)
            cuts.append(Cut(value_of(key), ties))
        return cuts

    def slowly(self, wish: Wish, done: Round | None, crowded: bool) -> tuple[int, int]:
        """The way that needs no luck: histograms of everything, then one pass for the ties. The key and its ties.

        `crowded` says that a round has found the cut and only its ties were too many for it.
        """
        if done is not None:
            table, board = done.table, done.board
        else:
            table, crowded = self.table([wish]), False
            board = Board(table, [wish.wanted], [wish.living], [0])
            self.sweep(table, board)
        turns = 0
        if not crowded:
            low, high, rank = self.bracket(wish, table, board)
            turns = -(-(high - low).bit_length() // DIGIT)
            board.ranges.copy_(to_device(range_of(low, high, rank), torch.int64, table.device))
        for _ in range(turns):
            self.survey(table, board, 1)
            self.ops.narrow(board)
        if turns or crowded:
            self.sweep(table, board)
        firsts = torch.tensor(table.first, device=table.device)
        upto = torch.cat((firsts.new_zeros(1), board.inside.cumsum(0)))
        equal = upto[firsts[1:]] - upto[firsts[:-1]]
        before = upto[:-1] - upto[firsts[table.owners.long()]]
        quotas = self.quotas(table, board, equal)
        for launch, given in self.each(table):
            self.ops.give_up(table, board, launch, before, quotas, **given)
        ranges = board.ranges.tolist()
        return ranges[LOW], ranges[RANK]

    def bracket(self, wish: Wish, table: Table, board: Board) -> tuple[int, int, int]:
        """The range in which the cut must lie, given what the last sweep counted, and its rank there."""
        counted = torch.tensor(table.counted, device=table.device)[table.owners.long()]
        inside = int((board.inside * counted).sum())
        below, inside = self.peers.totals([int(board.counters[BELOW]), inside])
        ranges = board.ranges.tolist()
        return narrowed((ranges[LOW], ranges[HIGH]), wish.wanted, below, inside)


def sampled_places(numel: int, stride: int, device: torch.device) -> Iterator[Tensor | slice]:
    """Runs of neighbours spread over a tensor, one of every `stride`, some tiles' worth at a time."""
    size = GIVEN_TILES * TILE
    if stride == 1:
        yield from (slice(start, min(start + size, numel)) for start in range(0, numel, size))
        return
    runs = max(1, numel // (RUN * stride))
    for start in range(0, runs, size // RUN):
        run = torch.arange(start, min(start + size // RUN, runs), device=device)
        jitter = (((run * 0x9E3779B1) & 0xFFFFFFFF) >> 8) % stride
        places = ((run * stride + jitter) * RUN)[:, None] + torch.arange(RUN, device=device)
        yield places.flatten().clamp_(max=numel - 1)


def prune_groups(
    ops: Any, pieces: Sequence[Piece], wishes: Sequence[Wish], masks: Sequence[Tensor], peers: Peers
) -> list[Cut | None]:
    """Write masks that remove exactly what is wished for. One look at the device for all, unless some must go slowly."""
    engine = Engine(ops, pieces, masks, peers)
    rounds = [engine.begin(numbers, [wishes[n] for n in numbers]) for numbers in batches(wishes)]
    cuts: list[Cut | None] = [None] * len(wishes)
    if not rounds:
        return cuts
    words = torch.cat([part for done in rounds for part in (done.board.told, done.board.ranges)]).tolist()
    read = []
    for done in rounds:
        size = done.board.told.numel() + done.board.ranges.numel()
        read.append(words[:size])
        words = words[size:]
    names = [piece.name for done in rounds for piece in done.table.pieces]
    refuse_nan(names, peers.totals([n for done, told in zip(rounds, read, strict=True) for n in _spoiled(done, told)]))
    for done, told in zip(rounds, read, strict=True):
        found = engine.finish(done, [wishes[n] for n in done.numbers], told)
        for number, cut in zip(done.numbers, found, strict=True):
            cuts[number] = cut
    return cuts


def _spoiled(done: Round, told: Sequence[int]) -> Sequence[int]:
    first = 5 * done.board.groups
    return told[first : first + len(done.table.pieces)]
