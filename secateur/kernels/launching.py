"""Launches of the selection's kernels. Every function here has a twin of the same name and meaning in reference.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from secateur.kernels import counting, settling, sweeping
from secateur.kernels.board import BLOCK, ORDERED, RUN, Board
from secateur.kernels.table import TILE, Launch, Table

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


def _formula(launch: Launch) -> tuple[Any, ...]:
    plan, types = launch.kind.plan, launch.kind.dtypes
    return plan.formula, plan.sixteenths, *types


def _tiles(table: Table, of: Launch) -> Tensor:
    return table.owners if of.tiles is None else of.tiles


def survey(table: Table, board: Board, of: Launch, shift: int) -> None:
    runs = -(-of.count * (TILE // RUN) >> shift)
    arguments = (
        table.rows, table.scales, table.owners, _tiles(table, of), of.first, of.count, shift, of.kind.plan.eps,
        board.ranges, board.counts,
    )  # fmt: skip
    constants = (*_formula(of), of.kind.alive, of.tiles is not None, shift > 0)
    launch(counting._survey, -(-runs * RUN // BLOCK), arguments, constants, warps=4)


def count(board: Board, scores: Tensor, group: int) -> None:
    arguments = (scores, scores.numel(), group, board.ranges, board.counts)
    launch(counting._count, -(-scores.numel() // BLOCK), arguments, (), warps=4)


def narrow(
    board: Board, *, sigmas: float | None = None, collected: bool = False, begin: bool = False, last: bool = False
) -> None:
    arguments = (
        board.ranges, board.counts, board.totals, board.wanted, board.shares, board.failed, sigmas or 0.0
    )  # fmt: skip
    launch(counting._narrow, board.groups, arguments, (sigmas is not None, collected, begin, last), warps=16)


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
    launch(sweeping._sweep, of.count, arguments, (*_formula(of), *how), warps=4)


def unfold(table: Table, board: Board, of: Launch) -> None:
    arguments = (
        table.rows, table.scales, table.owners, board.block_groups, board.counters, board.rooms, board.words,
        board.positions, board.keys, board.spoiled, board.ranges, of.kind.plan.eps, of.number,
    )  # fmt: skip
    launch(settling._unfold, board.block_groups.numel(), arguments, (*_formula(of), table.mask_kind))


def tally(table: Table, board: Board, peers: bool) -> None:
    arguments = (
        table.rows, table.owners, board.block_groups, board.counters, board.rooms, board.positions, board.keys,
        board.ranges, board.counts,
    )  # fmt: skip
    launch(settling._tally, board.block_groups.numel(), arguments, (peers,))


def settle(table: Table, board: Board, peers: bool) -> None:
    arguments = (
        table.rows, table.owners, board.block_groups, board.counters, board.failed, board.rooms, board.positions,
        board.keys, board.ranges, board.few, board.few_room, board.equal,
    )  # fmt: skip
    launch(settling._settle, board.block_groups.numel(), arguments, (table.mask_kind, peers))


def order(table: Table, board: Board, quotas: Tensor | None) -> None:
    arguments = (
        table.rows, table.owners, board.counters, board.failed, board.ranges, board.few, board.few_room,
        board.few if quotas is None else quotas,
    )  # fmt: skip
    programs = board.groups * (board.few_room // ORDERED)
    launch(settling._order, programs, arguments, (table.mask_kind, quotas is not None), warps=4)


def give_up(
    table: Table, board: Board, of: Launch, before: Tensor, quotas: Tensor, given: Tensor | None = None
) -> None:
    arguments = (
        table.rows, table.scales, table.owners, _tiles(table, of), of.first, table.scales if given is None else given,
        of.kind.plan.eps, board.ranges, before, quotas,
    )  # fmt: skip
    how = (of.kind.alive, of.tiles is not None, table.mask_kind, of.kind.aligned)
    launch(sweeping._give_up, of.count, arguments, (*_formula(of), *how))


def population(masks: Sequence[Tensor]) -> Tensor:
    from secateur.kernels import stepping  # which builds on this module

    return stepping.population(masks)
