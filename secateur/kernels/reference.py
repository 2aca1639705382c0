"""Plain-torch twins of every kernel, with the same names and arguments: what the kernels are tested against.

First `population` and `adamw`, which also runs where there is no Triton; the twin of zeroing is `apply` in
selection/masks.py. Then the steps of a selection (`SelectionOps` in select.py) in the order in which a selection takes
them, and `rank`. The steps read and write a `SelectionState` tensor by tensor, so they are slow and only run in tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from secateur.kernels.table import (
    BELOW,
    BINS,
    COLUMNS,
    EQUAL,
    INSIDE,
    LAUNCH,
    LISTED,
    LOW,
    OVER,
    RANK,
    RUN,
    SLOTS,
    TILE,
    TOO_MANY_TIES,
    WORDS,
    Launch,
    SelectionState,
    Table,
    jitter,
    range_of,
)
from secateur.selection.exact import DEAD_KEY, keys_of, values_of, without_lowest
from secateur.selection.masks import apply, from_bits, to_bits


@dataclass(frozen=True)
class Hyper:
    """Settings of an AdamW step, shared by the parameters of a group.

    `theta` and `unseen` belong to SPAM: gradients are clipped to sqrt(theta v), and to `unseen` where v is zero. A
    theta of 0 turns clipping off. A theta of infinity clips nothing but runs the clipping kernel, so that steps with
    and without clipping share one compiled kernel.
    """

    lr: Any  # a number; a tensor only for torch's own step
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False
    amsgrad: bool = False
    theta: float = 0.0
    unseen: float = math.inf


@dataclass(frozen=True)
class AdamWTensors:
    """A parameter (the local shard), its gradient, its Adam state and its mask."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    step: Tensor  # steps taken so far; on the CPU for the kernel
    mask: Tensor | None  # bool in the parameter's shape, or flat bits

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the mask zeroes."""
        return [t for t in (self.parameter, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq) if t is not None]


def population(masks: Sequence[Tensor]) -> Tensor:
    """How many weights each mask keeps."""
    return torch.stack(
        [mask.sum() if mask.dtype == torch.bool else from_bits(mask, 8 * mask.numel()).sum() for mask in masks]
    )


def adamw(parts: Sequence[AdamWTensors], hyper: Hyper, group: Mapping[str, Any], soft: Tensor | None = None) -> None:
    """One AdamW step for parameters of one group by torch's own function, with SPAM before and masks after it."""
    if soft is not None:
        for part in parts:
            part.exp_avg.mul_(soft[0].to(part.exp_avg.device))
            part.exp_avg_sq.mul_(soft[1].to(part.exp_avg.device))
    gradients = [part.gradient for part in parts]
    if 0 < hyper.theta < math.inf:
        gradients = [clip(p.gradient.detach(), p.exp_avg_sq, hyper.theta, hyper.unseen) for p in parts]
    adam(
        [part.parameter for part in parts], gradients, [part.exp_avg for part in parts],
        [part.exp_avg_sq for part in parts],
        [part.max_exp_avg_sq for part in parts if part.max_exp_avg_sq is not None],
        [part.step for part in parts],
        foreach=group["foreach"], capturable=group["capturable"], differentiable=group["differentiable"],
        fused=group["fused"], has_complex=any(part.parameter.is_complex() for part in parts),
        decoupled_weight_decay=True, amsgrad=hyper.amsgrad, beta1=hyper.beta1, beta2=hyper.beta2, lr=hyper.lr,
        weight_decay=hyper.weight_decay, eps=hyper.eps, maximize=hyper.maximize,
    )  # fmt: skip
    masked = [(tensor.detach(), part.mask) for part in parts if part.mask is not None for tensor in part.tensors]
    apply([tensor for tensor, _ in masked], [mask for _, mask in masked])


def clip(gradient: Tensor, second: Tensor, theta: float, unseen: float = math.inf) -> Tensor:
    """Clip a gradient to sqrt(theta v), and to `unseen` where v is zero."""
    limit = torch.where(second > 0, (theta * second).sqrt(), unseen).to(gradient.dtype)
    return torch.where(gradient.abs() > limit, limit * gradient.sign(), gradient)


def _alive(table: Table, number: int) -> Tensor:
    alive, numel = table.tensors[number].alive, table.tensors[number].numel
    if alive is None:
        return torch.ones(numel, dtype=torch.bool, device=table.device)
    return alive if alive.dtype == torch.bool else from_bits(alive, numel)


def _write(table: Table, number: int, where: slice | Tensor, kept: Tensor | bool) -> None:
    mask, numel = table.masks[number], table.tensors[number].numel
    whole = mask if mask.dtype == torch.bool else from_bits(mask, numel)
    whole[where] = kept
    if mask.dtype != torch.bool:
        mask.copy_(to_bits(whole))


def _tiles(table: Table, launch: Launch) -> Iterator[tuple[int, int, slice]]:
    """Each tile of a launch: its number, its tensor, and the flat indices it covers."""
    for tile in _numbers(launch).tolist():
        tensor = int(table.owners[tile])
        start = (tile - table.first[tensor]) * TILE
        yield tile, tensor, slice(start, min(start + TILE, table.tensors[tensor].numel))


def _numbers(launch: Launch) -> Tensor:
    return torch.arange(launch.first, launch.first + launch.count) if launch.tiles is None else launch.tiles.long()


def _collected(state: SelectionState, group: int, column: int) -> slice:
    """Where the collected words (or keys) of a group are; empty if they overflowed."""
    begin, counters = int(state.starts[group]), state.by_group("counters")[group]
    return slice(begin, begin if counters[OVER] else begin + int(counters[column]))


def _add(state: SelectionState, keys: Tensor, group: int, outside: bool = True) -> None:
    """Add keys to the histogram of their group; keys below and above the range go to the last two slots."""
    low, high, shift, _ = state.by_group("ranges")[group].tolist()
    slots = torch.where(keys < low, BINS, torch.where(keys > high, BINS + 1, (keys.long() - low) >> shift))
    state.by_group("histogram")[group] += torch.bincount(slots if outside else slots[slots < BINS], minlength=SLOTS)


def sample_histogram(table: Table, state: SelectionState, launch: Launch, shift: int) -> None:
    """Add one of every `1 << shift` runs of scores to the histogram of their group.

    NaN, pruned weights and replicas that another process counts are left out.
    """
    run = torch.arange(-(-launch.count * (TILE // RUN) >> shift))
    place = ((run << shift) + jitter(run, shift)) * RUN
    place = place[place < launch.count * TILE]
    tiles = _numbers(launch)[place // TILE]
    owners = table.owners[tiles]
    for tensor in owners.unique().tolist():
        mine = owners == tensor
        index = ((tiles - table.first[tensor]) * TILE + place % TILE)[mine][:, None] + torch.arange(RUN)
        index = index[index < table.tensors[tensor].numel]
        scores = table.tensors[tensor].score(index)
        if table.counted[tensor]:
            _add(state, keys_of(scores[_alive(table, tensor)[index] & ~scores.isnan()]), table.groups[tensor])


def add_scores(state: SelectionState, scores: Tensor, group: int) -> None:
    """Add these scores to the histogram of a group; NaN marks scores to leave out."""
    _add(state, keys_of(scores[~scores.isnan()]), group)


def narrow_ranges(
    state: SelectionState,
    *,
    sigmas: float | None = None,
    collected: bool = False,
    begin: bool = False,
    last: bool = False,
) -> None:
    """Shrink every group's range to the histogram bins that hold the wanted rank, and clear the histogram.

    With `sigmas` the histogram is a sample: the bins must hold the wanted fraction plus and minus that many standard
    deviations. Otherwise the rank is exact and becomes relative to the new range; `begin` computes it from the wanted
    count and what the sweep found below the range. With `collected`, a group fails if its candidates do not hold the
    rank or overflowed, and, in the `last` pass, if its range is not a single key.
    """
    for group in range(state.groups):
        low, high, shift, first = state.by_group("ranges")[group].tolist()
        bins = state.by_group("histogram")[group]
        end_rank = first
        if sigmas is not None:
            fraction, size = state.fractions[group], bins.sum().double()
            margin = sigmas * (fraction * size * (1 - fraction)).sqrt() + 1
            first = int((fraction * size - margin).floor()) - int(bins[BINS])
            end_rank = int((fraction * size + margin).ceil()) - int(bins[BINS])
        elif begin:
            first = end_rank = int(state.wanted[group] - state.totals.view(state.groups, -1)[group, BELOW])
        upto = bins[:BINS].cumsum(0)
        digit, end = int((upto < first).sum()), int((upto < end_rank).sum())
        before = int(upto[digit - 1]) if digit else 0
        new_high = min(high, low + ((end + 1) << shift) - 1) if end < BINS else high
        new_low = min(low + (min(digit, BINS - 1) << shift), new_high)
        if collected:
            bad = first < 1 or first > int(upto[-1]) or bool(state.totals.view(state.groups, -1)[group, OVER])
            bad = bad or (last and new_low < new_high) or bool(state.failed[group])
            state.failed[group] = int(bad)
            new_low, new_high = (low, high) if bad else (new_low, new_high)
        bins.zero_()
        state.by_group("ranges")[group] = torch.tensor(range_of(new_low, new_high, first - before))


def sweep(
    table: Table, state: SelectionState, launch: Launch, given: Tensor | None = None, *, careful: bool = False
) -> None:
    """Write the masks: prune below the range of the group, keep the rest. Collect what is inside the range.

    Candidates are collected as words of 16 flags, and `given` scores directly as positions and keys, since a kernel
    cannot compute them again. A careful sweep collects nothing; it counts what is inside, tile by tile, and NaN.
    """
    counters = state.by_group("counters")
    for tile, number, where in _tiles(table, launch):
        group, scores, alive = table.groups[number], table.tensors[number].score(where), _alive(table, number)[where]
        low, high = values_of(state.by_group("ranges")[group, :2])
        if launch.variant.plan.fast_math and not careful:  # the fast sqrt is off by a little: widen the range
            low, high = low - margin(low), high + margin(high)
        kept = alive & ~(scores < low)
        middle = kept & ~(scores > high)
        _write(table, number, where, kept)
        counters[group, BELOW] += (alive.sum() - kept.sum()) * table.counted[number]
        places = middle.nonzero().flatten()
        if careful:
            counters[group, INSIDE] += places.numel() * table.counted[number]
            state.inside[tile] = places.numel()
            state.nan_counts[number] += (alive & scores.isnan()).sum()
        elif given is not None:
            _collect(state, group, tile * TILE + places, keys_of(scores[places]))
        else:
            flags = torch.nn.functional.pad(middle, (0, TILE - middle.numel())).view(-1, RUN).long()
            words = (flags << torch.arange(RUN)).sum(1)
            some = words.nonzero().flatten()
            _store(state, group, WORDS, [(state.words, (tile * (TILE // RUN) + some) << 16 | words[some])])


def margin(bound: Tensor) -> Tensor:
    """More than the error of a fast-math score: 2^-17 of it, plus the numbers that the fast sqrt flushes to zero."""
    return bound.abs() * 2.0**-17 + 1e-36


def _store(state: SelectionState, group: int, column: int, values: list[tuple[Tensor, Tensor]]) -> None:
    counters = state.by_group("counters")
    begin, end = state.starts[group : group + 2].tolist()
    slot, size = begin + int(counters[group, column]), values[0][1].numel()
    counters[group, column] += size
    if slot + size > end:
        counters[group, OVER] = 1
        return
    for memory, value in values:
        memory[slot : slot + size] = value


def _collect(state: SelectionState, group: int, positions: Tensor, keys: Tensor) -> None:
    _store(state, group, LISTED, [(state.positions, positions), (state.keys, keys)])


def score_candidates(table: Table, state: SelectionState, launch: Launch) -> None:
    """Score the collected words exactly and list the positions and keys of the candidates.

    Weights that turn out to be below the range are pruned; NaN is counted.
    """
    for group in range(state.groups):
        words = state.words[_collected(state, group, WORDS)]
        flags = (words[:, None] >> torch.arange(RUN)) & 1
        places = ((words >> 16) * RUN)[:, None] + torch.arange(RUN)
        positions = places[flags != 0]
        owners = table.owners[positions // TILE].long()
        for tensor in owners.unique().tolist():
            if int(table.rows.view(-1, COLUMNS)[tensor, LAUNCH]) != launch.number:
                continue
            mine = positions[owners == tensor]
            scores = table.tensors[tensor].score(mine - table.first[tensor] * TILE)
            state.nan_counts[tensor] += scores.isnan().sum()
            keys, (low, high) = keys_of(scores), state.by_group("ranges")[group, :2].tolist()
            _clear(table, mine[keys < low])
            state.by_group("counters")[group, BELOW] += (keys < low).sum() * table.counted[tensor]
            inside = (keys >= low) & (keys <= high)
            _collect(state, group, mine[inside], keys[inside])


def count_candidates(table: Table, state: SelectionState, peers: bool) -> None:
    """Add the candidates to the histogram of their group, except replicas that another process counts."""
    counted = torch.tensor(table.counted)
    for group in range(state.groups):
        listed = _collected(state, group, LISTED)
        mine = counted[table.owners[state.positions[listed] // TILE].long()]
        _add(state, state.keys[listed][mine], group, outside=False)


def apply_cut(table: Table, state: SelectionState, peers: bool) -> None:
    """Prune the candidates below the cut; store the positions and the number of those equal to it."""
    for group in range(state.groups):
        listed = _collected(state, group, LISTED)
        if state.failed[group]:
            continue
        positions, keys, cut = state.positions[listed], state.keys[listed], state.by_group("ranges")[group, LOW]
        _clear(table, positions[keys < cut])
        same = positions[keys == cut]
        state.by_group("counters")[group, EQUAL] = same.numel()
        state.by_group("ties")[group, : min(state.tie_capacity, same.numel())] = same[: state.tie_capacity]
        state.tie_counts += torch.bincount(table.owners[same // TILE], minlength=len(table.tensors)) if peers else 0


def _clear(table: Table, positions: Tensor) -> None:
    owners = table.owners[positions // TILE]
    for tensor in owners.unique().tolist():
        _write(table, tensor, positions[owners == tensor] - table.first[tensor] * TILE, False)


def prune_ties(table: Table, state: SelectionState, quotas: Tensor | None) -> None:
    """Prune the first ties: as many as the rank of the cut says, or with peers up to the quota of each tensor."""
    for group in range(state.groups):
        found = int(state.by_group("counters")[group, EQUAL])
        if found > state.tie_capacity and not state.failed[group]:
            state.failed[group] = TOO_MANY_TIES
        if state.failed[group]:
            continue
        places = state.by_group("ties")[group, :found].sort().values
        if quotas is None:
            _clear(table, places[: int(state.by_group("ranges")[group, RANK])])
            continue
        owners = table.owners[places // TILE]
        for tensor in owners.unique().tolist():
            _clear(table, places[owners == tensor][: int(quotas[tensor])])


def prune_many_ties(
    table: Table, state: SelectionState, launch: Launch, before: Tensor, quotas: Tensor, given: Tensor | None = None
) -> None:
    """Prune ties in a pass over all scores: each tensor loses its first ties, up to its quota.

    `before` holds for each tile how many ties of its tensor come before it.
    """
    for tile, number, where in _tiles(table, launch):
        if before[tile] >= quotas[number]:
            continue
        scores, alive = table.tensors[number].score(where), _alive(table, number)[where]
        cut = values_of(state.by_group("ranges")[table.groups[number], LOW])
        same = alive & (scores == cut)
        _write(table, number, where, alive & (scores > cut) | same & (before[tile] + same.cumsum(0) > quotas[number]))


def rank(table: Table, state: SelectionState, widths: Sequence[int], gone: Sequence[int]) -> None:
    """Prune the lowest of every `widths[i]` neighbours of tensor i until `gone[i]` are gone, dead ones included."""
    for number, (tensor, width, count) in enumerate(zip(table.tensors, widths, gone, strict=True)):
        scores, alive = tensor.score(slice(0, tensor.numel)), _alive(table, number)
        state.nan_counts[number] += (alive & scores.isnan()).sum()
        keys = keys_of(scores).masked_fill_(~alive, DEAD_KEY)
        _write(table, number, slice(0, tensor.numel), without_lowest(keys.view(-1, width), count).flatten())
