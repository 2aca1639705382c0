"""Launches of the selection's kernels. Every function here has a twin of the same name and meaning in reference.py."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from secateur.kernels import selecting
from secateur.kernels.board import BLOCK, RUN, Board
from secateur.kernels.table import TILE, Launch, Table

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# A product and a sum contracted into one rounding would change the last bit of a score.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}


def _formula(launch: Launch) -> dict[str, Any]:
    kind = launch.kind
    types = {f"TYPE{place}": TYPES[dtype] for place, dtype in enumerate(kind.dtypes)}
    return {"FORMULA": kind.formula, "SIXTEENTHS": kind.sixteenths, **types, **EXACT}


def survey(table: Table, board: Board, launch: Launch, shift: int) -> None:
    runs = -(-launch.count * (TILE // RUN) >> shift)
    tiles = board.keys if launch.tiles is None else launch.tiles
    selecting._survey[(-(-runs * RUN // TILE),)](
        table.rows, table.scales, table.owners, tiles, launch.first, launch.count, shift, launch.kind.eps,
        board.ranges, board.counts, **_formula(launch), KIND=launch.kind.alive, LISTS=launch.tiles is not None,
        ROUGH=shift > 0, num_warps=8,
    )  # fmt: skip


def count(board: Board, scores: Tensor, group: int) -> None:
    selecting._count[(-(-scores.numel() // BLOCK),)](scores, scores.numel(), group, board.ranges, board.counts)


def narrow(
    board: Board, *, sigmas: float | None = None, collected: bool = False, begin: bool = False, last: bool = False
) -> None:
    selecting._narrow[(board.groups,)](
        board.ranges, board.counts, board.totals, board.wanted, board.shares, board.failed, sigmas or 0.0,
        SAMPLED=sigmas is not None, COLLECTED=collected, BEGIN=begin, LAST=last, num_warps=16, **EXACT,
    )  # fmt: skip


def sweep(table: Table, board: Board, launch: Launch, given: Tensor | None = None, *, careful: bool = False) -> None:
    rough = given is None and not careful
    selecting._sweep[(launch.count,)](
        table.rows, table.scales, table.owners, board.keys if launch.tiles is None else launch.tiles, launch.first,
        table.scales if given is None else given, launch.kind.eps, board.ranges, board.counters, board.rooms,
        board.words, board.positions, board.keys, board.inside, board.spoiled, **_formula(launch),
        KIND=launch.kind.alive, LISTS=launch.tiles is not None, STORED=table.mask_kind, ALIGNED=launch.kind.aligned,
        ROUGH=rough, CAREFUL=careful, num_warps=8,
    )  # fmt: skip


def unfold(table: Table, board: Board, launch: Launch) -> None:
    selecting._unfold[(board.block_groups.numel(),)](
        table.rows, table.scales, table.owners, board.block_groups, board.counters, board.rooms, board.words,
        board.positions, board.keys, board.spoiled, board.ranges, launch.kind.eps, launch.number, **_formula(launch),
        STORED=table.mask_kind, num_warps=8,
    )  # fmt: skip


def tally(table: Table, board: Board, peers: bool) -> None:
    selecting._tally[(board.block_groups.numel(),)](
        table.rows, table.owners, board.block_groups, board.counters, board.rooms, board.positions, board.keys,
        board.ranges, board.counts, PEERS=peers, num_warps=8,
    )  # fmt: skip


def settle(table: Table, board: Board, peers: bool) -> None:
    selecting._settle[(board.block_groups.numel(),)](
        table.rows, table.owners, board.block_groups, board.counters, board.failed, board.rooms, board.positions,
        board.keys, board.ranges, board.few, board.equal, STORED=table.mask_kind, PEERS=peers, num_warps=8,
    )  # fmt: skip


def order(table: Table, board: Board, quotas: Tensor | None) -> None:
    selecting._order[(board.groups,)](
        table.rows, table.owners, board.counters, board.failed, board.ranges, board.few,
        board.few if quotas is None else quotas, STORED=table.mask_kind, PEERS=quotas is not None,
    )  # fmt: skip


def give_up(
    table: Table, board: Board, launch: Launch, before: Tensor, quotas: Tensor, given: Tensor | None = None
) -> None:
    selecting._give_up[(launch.count,)](
        table.rows, table.scales, table.owners, board.keys if launch.tiles is None else launch.tiles, launch.first,
        table.scales if given is None else given, launch.kind.eps, board.ranges, before, quotas, **_formula(launch),
        KIND=launch.kind.alive, LISTS=launch.tiles is not None, STORED=table.mask_kind, ALIGNED=launch.kind.aligned,
        num_warps=8,
    )  # fmt: skip
