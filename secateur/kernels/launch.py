"""Launches of the selection kernels. Each function has a twin of the same name and meaning in reference.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from secateur.kernels import adamw, select_triton
from secateur.kernels.scores_triton import formula_of, launch_kernel
from secateur.kernels.table import BLOCK, RUN, TIES_PER_PROGRAM, TILE, Launch, SelectionState, Table, layout, to_device


def _tiles(table: Table, launch: Launch) -> Tensor:
    return table.owners if launch.tiles is None else launch.tiles


def sample_histogram(table: Table, state: SelectionState, launch: Launch, shift: int) -> None:
    runs = -(-launch.count * (TILE // RUN) >> shift)
    arguments = (
        table.rows, table.scales, table.owners, _tiles(table, launch), launch.first, launch.count, shift,
        launch.variant.plan.eps, state.ranges, state.histogram,
    )  # fmt: skip
    constants = (*formula_of(launch), launch.variant.alive, launch.tiles is not None, shift > 0)
    launch_kernel(select_triton._sample_histogram, -(-runs * RUN // BLOCK), arguments, constants, warps=4)


def add_scores(state: SelectionState, scores: Tensor, group: int) -> None:
    arguments = (scores, scores.numel(), group, state.ranges, state.histogram)
    launch_kernel(select_triton._add_scores, -(-scores.numel() // BLOCK), arguments, (), warps=4)


def narrow_ranges(
    state: SelectionState,
    *,
    sigmas: float | None = None,
    collected: bool = False,
    begin: bool = False,
    last: bool = False,
) -> None:
    arguments = (
        state.ranges, state.histogram, state.totals, state.wanted, state.fractions, state.failed, sigmas or 0.0
    )  # fmt: skip
    constants = (sigmas is not None, collected, begin, last)
    launch_kernel(select_triton._narrow_ranges, state.groups, arguments, constants, warps=16)


def sweep(
    table: Table, state: SelectionState, launch: Launch, given: Tensor | None = None, *, careful: bool = False
) -> None:
    arguments = (
        table.rows, table.scales, table.owners, _tiles(table, launch), launch.first,
        table.scales if given is None else given, launch.variant.plan.eps, state.ranges, state.counters, state.starts,
        state.words, state.positions, state.keys, state.inside, state.nan_counts,
    )  # fmt: skip
    how = (
        launch.variant.alive,
        launch.tiles is not None,
        table.mask_kind,
        launch.variant.aligned,
        launch.variant.plan.fast_math and not careful,
        careful,
    )
    launch_kernel(select_triton._sweep, launch.count, arguments, (*formula_of(launch), *how), warps=4)


def score_candidates(table: Table, state: SelectionState, launch: Launch) -> None:
    arguments = (
        table.rows, table.scales, table.owners, state.block_groups, state.counters, state.starts, state.words,
        state.positions, state.keys, state.nan_counts, state.ranges, launch.variant.plan.eps, launch.number,
    )  # fmt: skip
    constants = (*formula_of(launch), table.mask_kind)
    launch_kernel(select_triton._score_candidates, state.block_groups.numel(), arguments, constants)


def count_candidates(table: Table, state: SelectionState, peers: bool) -> None:
    arguments = (
        table.rows, table.owners, state.block_groups, state.counters, state.starts, state.positions, state.keys,
        state.ranges, state.histogram,
    )  # fmt: skip
    launch_kernel(select_triton._count_candidates, state.block_groups.numel(), arguments, (peers,))


def apply_cut(table: Table, state: SelectionState, peers: bool) -> None:
    arguments = (
        table.rows, table.owners, state.block_groups, state.counters, state.failed, state.starts, state.positions,
        state.keys, state.ranges, state.ties, state.tie_capacity, state.tie_counts,
    )  # fmt: skip
    launch_kernel(select_triton._apply_cut, state.block_groups.numel(), arguments, (table.mask_kind, peers))


def prune_ties(table: Table, state: SelectionState, quotas: Tensor | None) -> None:
    arguments = (
        table.rows, table.owners, state.counters, state.failed, state.ranges, state.ties, state.tie_capacity,
        state.ties if quotas is None else quotas,
    )  # fmt: skip
    programs = state.groups * (state.tie_capacity // TIES_PER_PROGRAM)
    launch_kernel(select_triton._prune_ties, programs, arguments, (table.mask_kind, quotas is not None), warps=4)


def prune_many_ties(
    table: Table, state: SelectionState, launch: Launch, before: Tensor, quotas: Tensor, given: Tensor | None = None
) -> None:
    arguments = (
        table.rows, table.scales, table.owners, _tiles(table, launch), launch.first,
        table.scales if given is None else given, launch.variant.plan.eps, state.ranges, before, quotas,
    )  # fmt: skip
    how = (launch.variant.alive, launch.tiles is not None, table.mask_kind, launch.variant.aligned)
    launch_kernel(select_triton._prune_many_ties, launch.count, arguments, (*formula_of(launch), *how))


def population(masks: Sequence[Tensor]) -> Tensor:
    return adamw.population(masks)


def rank(table: Table, state: SelectionState, widths: Sequence[int], gone: Sequence[int]) -> None:
    for number, launch in enumerate(table.launches):
        assert launch.tensor is None
        members = [n for n in range(len(table.tensors)) if table.launch_of(n) == number]
        for width in dict.fromkeys(widths[n] for n in members):
            mine = [n for n in members if widths[n] == width]
            _rank(table, state, launch, mine, width, [gone[n] for n in mine])


def _rank(table: Table, state: SelectionState, launch: Launch, members: list[int], width: int, gone: list[int]) -> None:
    """Rank the groups of one width in these tensors of a launch."""
    padded = triton.next_power_of_2(width)
    tiles = max(1, 4096 // padded, -(-RUN // padded))
    counts = tuple([table.tensors[n].numel // width for n in members])
    firsts, owners = layout(counts, tiles, table.device)
    size = len(members)
    sent = to_device([*firsts[:-1], *members, *gone], torch.int64, table.device).split([size, size, size])
    arguments = (
        table.rows, table.scales, owners, *sent, table.scales, launch.variant.plan.eps, width, state.nan_counts
    )  # fmt: skip
    constants = (*formula_of(launch), launch.variant.alive, table.mask_kind, tiles, padded)
    launch_kernel(select_triton._rank, owners.numel(), arguments, constants, 16 if padded * tiles > 8192 else 8)
