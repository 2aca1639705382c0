"""Launches of the selection's kernels. Every function here has a twin of the same name and meaning in reference.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from secateur.kernels import select_triton
from secateur.kernels import table as host
from secateur.kernels.scores_triton import formula_of, launch
from secateur.kernels.table import Board, Launch, Table


def _tiles(table: Table, of: Launch) -> Tensor:
    return table.owners if of.tiles is None else of.tiles


def survey(table: Table, board: Board, of: Launch, shift: int) -> None:
    runs = -(-of.count * (host.TILE // host.RUN) >> shift)
    arguments = (
        table.rows, table.scales, table.owners, _tiles(table, of), of.first, of.count, shift, of.kind.plan.eps,
        board.ranges, board.counts,
    )  # fmt: skip
    constants = (*formula_of(of), of.kind.alive, of.tiles is not None, shift > 0)
    launch(select_triton._survey, -(-runs * host.RUN // host.BLOCK), arguments, constants, warps=4)


def count(board: Board, scores: Tensor, group: int) -> None:
    arguments = (scores, scores.numel(), group, board.ranges, board.counts)
    launch(select_triton._count, -(-scores.numel() // host.BLOCK), arguments, (), warps=4)


def narrow(
    board: Board, *, sigmas: float | None = None, collected: bool = False, begin: bool = False, last: bool = False
) -> None:
    arguments = (
        board.ranges, board.counts, board.totals, board.wanted, board.shares, board.failed, sigmas or 0.0
    )  # fmt: skip
    launch(select_triton._narrow, board.groups, arguments, (sigmas is not None, collected, begin, last), warps=16)


def sweep(table: Table, board: Board, of: Launch, given: Tensor | None = None, *, careful: bool = False) -> None:
    arguments = (
        table.rows, table.scales, table.owners, _tiles(table, of), of.first, table.scales if given is None else given,
        of.kind.plan.eps, board.ranges, board.counters, board.rooms, board.words, board.positions, board.keys,
        board.inside, board.spoiled,
    )  # fmt: skip
    how = (
        of.kind.alive,
        of.tiles is not None,
        table.mask_kind,
        of.kind.aligned,
        of.kind.plan.rough and not careful,
        careful,
    )
    launch(select_triton._sweep, of.count, arguments, (*formula_of(of), *how), warps=4)


def unfold(table: Table, board: Board, of: Launch) -> None:
    arguments = (
        table.rows, table.scales, table.owners, board.block_groups, board.counters, board.rooms, board.words,
        board.positions, board.keys, board.spoiled, board.ranges, of.kind.plan.eps, of.number,
    )  # fmt: skip
    launch(select_triton._unfold, board.block_groups.numel(), arguments, (*formula_of(of), table.mask_kind))


def tally(table: Table, board: Board, peers: bool) -> None:
    arguments = (
        table.rows, table.owners, board.block_groups, board.counters, board.rooms, board.positions, board.keys,
        board.ranges, board.counts,
    )  # fmt: skip
    launch(select_triton._tally, board.block_groups.numel(), arguments, (peers,))


def settle(table: Table, board: Board, peers: bool) -> None:
    arguments = (
        table.rows, table.owners, board.block_groups, board.counters, board.failed, board.rooms, board.positions,
        board.keys, board.ranges, board.few, board.few_room, board.equal,
    )  # fmt: skip
    launch(select_triton._settle, board.block_groups.numel(), arguments, (table.mask_kind, peers))


def order(table: Table, board: Board, quotas: Tensor | None) -> None:
    arguments = (
        table.rows, table.owners, board.counters, board.failed, board.ranges, board.few, board.few_room,
        board.few if quotas is None else quotas,
    )  # fmt: skip
    programs = board.groups * (board.few_room // host.ORDERED)
    launch(select_triton._order, programs, arguments, (table.mask_kind, quotas is not None), warps=4)


def give_up(
    table: Table, board: Board, of: Launch, before: Tensor, quotas: Tensor, given: Tensor | None = None
) -> None:
    arguments = (
        table.rows, table.scales, table.owners, _tiles(table, of), of.first, table.scales if given is None else given,
        of.kind.plan.eps, board.ranges, before, quotas,
    )  # fmt: skip
    how = (of.kind.alive, of.tiles is not None, table.mask_kind, of.kind.aligned)
    launch(select_triton._give_up, of.count, arguments, (*formula_of(of), *how))


def population(masks: Sequence[Tensor]) -> Tensor:
    from secateur.kernels import adamw

    return adamw.population(masks)
