"""What one parameter brings to a step of AdamW."""

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
    CROWDED,
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
    WORDS,
    Board,
    Launch,
    Table,
    range_of,
)
from secateur.selection.exact import DEAD_KEY, keys_of, values_of, without_lowest
from secateur.selection.masks import apply, from_bits, to_bits


@dataclass(frozen=True)
class Hyper:
    """Settings of a step, shared by the parameters of a group.

    `theta` and `unseen` are SPAM's: gradients are clipped to sqrt(theta v), and to `unseen` where v is zero. A theta of
    0 turns clipping off; infinity clips nothing in this step, by the same kernel as the steps that clip.
    """

    lr: Any  # a number, or a tensor where torch takes one
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False
    amsgrad: bool = False
    theta: float = 0.0
    unseen: float = math.inf


@dataclass(frozen=True)
class Part:
    """A parameter as this process holds it, its gradient and state, and the mask it is held to."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    step: Tensor  # how many steps were taken; kernels want it on the host
    mask: Tensor | None  # bool in the parameter's shape, or flat bits

    @property
    def tensors(self) -> list[Tensor]:
        """What the mask holds at zero."""
        return [t for t in (self.parameter, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq) if t is not None]


def zero(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zero, in place, what the masks (bool in the tensor's shape, or flat bits) say is gone."""
    whole = [m if m.dtype == torch.bool else from_bits(m, t.numel()) for t, m in zip(tensors, masks, strict=True)]
    apply(tensors, [mask.view(tensor.shape) for mask, tensor in zip(whole, tensors, strict=True)])


def population(masks: Sequence[Tensor]) -> Tensor:
    """How many weights each mask keeps."""
    return torch.stack(
        [mask.sum() if mask.dtype == torch.bool else from_bits(mask, 8 * mask.numel()).sum() for mask in masks]
    )


def adamw(parts: Sequence[Part], hyper: Hyper, group: Mapping[str, Any], soft: Tensor | None = None) -> None:
    """One step of AdamW for parts of one parameter group, by torch's own function; SPAM before it, masks after it."""
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
    zero([tensor for tensor, _ in masked], [mask for _, mask in masked])


def clip(gradient: Tensor, second: Tensor, theta: float, unseen: float = math.inf) -> Tensor:
    """The gradient limited to sqrt(theta v), and to `unseen` where v is zero."""
    limit = torch.where(second > 0, (theta * second).sqrt(), unseen).to(gradient.dtype)
    return torch.where(gradient.abs() > limit, limit * gradient.sign(), gradient)


def _alive(table: Table, number: int) -> Tensor:
    alive, numel = table.pieces[number].alive, table.pieces[number].numel
    if alive is None:
        return torch.ones(numel, dtype=torch.bool, device=table.device)
    return alive if alive.dtype == torch.bool else from_bits(alive, numel)


def _write(table: Table, number: int, where: slice | Tensor, kept: Tensor | bool) -> None:
    mask, numel = table.masks[number], table.pieces[number].numel
    whole = mask if mask.dtype == torch.bool else from_bits(mask, numel)
    whole[where] = kept
    if mask.dtype != torch.bool:
        mask.copy_(to_bits(whole))


def _tiles(table: Table, launch: Launch) -> Iterator[tuple[int, int, slice]]:
    """Each tile with the piece it is of and the flat places it covers."""
    for tile in _numbers(launch).tolist():
        piece = int(table.owners[tile])
        start = (tile - table.first[piece]) * TILE
        yield tile, piece, slice(start, min(start + TILE, table.pieces[piece].numel))


def _numbers(launch: Launch) -> Tensor:
    return torch.arange(launch.first, launch.first + launch.count) if launch.tiles is None else launch.tiles.long()


def _collected(board: Board, group: int, column: int) -> slice:
    """Where the words or the keys of a group are."""
    begin, counters = int(board.rooms[group]), board.table_of("counters")[group]
    return slice(begin, begin if counters[OVER] else begin + int(counters[column]))


def _add(board: Board, keys: Tensor, group: int, outside: bool = True) -> None:
    """Count keys by their digit in the group's range; what lies below or above it in the last two slots."""
    low, high, shift, _ = board.table_of("ranges")[group].tolist()
    slots = torch.where(keys < low, BINS, torch.where(keys > high, BINS + 1, (keys.long() - low) >> shift))
    board.table_of("counts")[group] += torch.bincount(slots if outside else slots[slots < BINS], minlength=SLOTS)


def survey(table: Table, board: Board, launch: Launch, shift: int) -> None:
    """Count scores by key in their group's range, one of every `1 << shift` runs of neighbours. NaN, the dead and
    what another process counts do not count."""
    run = torch.arange(-(-launch.count * (TILE // RUN) >> shift))
    place = ((run << shift) + (((run * 0x9E3779B1) >> 8) & ((1 << shift) - 1))) * RUN
    place = place[place < launch.count * TILE]
    tiles = _numbers(launch)[place // TILE]
    owners = table.owners[tiles]
    for piece in owners.unique().tolist():
        mine = owners == piece
        index = ((tiles - table.first[piece]) * TILE + place % TILE)[mine][:, None] + torch.arange(RUN)
        index = index[index < table.pieces[piece].numel]
        scores = table.pieces[piece].score(index)
        if table.counted[piece]:
            _add(board, keys_of(scores[_alive(table, piece)[index] & ~scores.isnan()]), table.groups[piece])


def count(board: Board, scores: Tensor, group: int) -> None:
    """The same for scores that are given; NaN marks those that do not count."""
    _add(board, keys_of(scores[~scores.isnan()]), group)


def narrow(
    board: Board, *, sigmas: float | None = None, collected: bool = False, begin: bool = False, last: bool = False
) -> None:
    """Shrink every group's range to the bins that hold a rank, and clear the histogram.

    Sampled, the rank is that of the wanted share, give or take some standard deviations; otherwise it is the exact
    rank, which then counts from the new range. `begin` takes it from what was wanted and what the sweep found below.
    A group fails whose collected keys do not hold that rank, or, at the `last` turn, whose range is not a single key.
    """
    for group in range(board.groups):
        low, high, shift, first = board.table_of("ranges")[group].tolist()
        bins = board.table_of("counts")[group]
        end_rank = first
        if sigmas is not None:
            share, size = board.shares[group], bins.sum().double()
            margin = sigmas * (share * size * (1 - share)).sqrt() + 1
            first = int((share * size - margin).floor()) - int(bins[BINS])
            end_rank = int((share * size + margin).ceil()) - int(bins[BINS])
        elif begin:
            first = end_rank = int(board.wanted[group] - board.totals.view(board.groups, -1)[group, BELOW])
        upto = bins[:BINS].cumsum(0)
        digit, end = int((upto < first).sum()), int((upto < end_rank).sum())
        before = int(upto[digit - 1]) if digit else 0
        new_high = min(high, low + ((end + 1) << shift) - 1) if end < BINS else high
        new_low = min(low + (min(digit, BINS - 1) << shift), new_high)
        if collected:
            bad = first < 1 or first > int(upto[-1]) or bool(board.totals.view(board.groups, -1)[group, OVER])
            bad = bad or (last and new_low < new_high) or bool(board.failed[group])
            board.failed[group] = int(bad)
            new_low, new_high = (low, high) if bad else (new_low, new_high)
        bins.zero_()
        board.table_of("ranges")[group] = torch.tensor(range_of(new_low, new_high, first - before))


def sweep(table: Table, board: Board, launch: Launch, given: Tensor | None = None, *, careful: bool = False) -> None:
    """Write the mask of everything outside its group's range; keep and collect what is inside, in words of sixteen
    weights (given scores: at once as positions and keys); count what is below.

    A careful sweep collects nothing, but counts what is inside, tile by tile, and NaN.
    """
    counters = board.table_of("counters")
    for tile, number, where in _tiles(table, launch):
        group, scores, alive = table.groups[number], table.pieces[number].score(where), _alive(table, number)[where]
        low, high = values_of(board.table_of("ranges")[group, :2])
        if launch.kind.plan.rough and not careful:  # a kernel takes quick roots, so what is near the range is inside
            low, high = low - margin(low), high + margin(high)
        kept = alive & ~(scores < low)
        middle = kept & ~(scores > high)
        _write(table, number, where, kept)
        counters[group, BELOW] += (alive.sum() - kept.sum()) * table.counted[number]
        places = middle.nonzero().flatten()
        if careful:
            counters[group, INSIDE] += places.numel() * table.counted[number]
            board.inside[tile] = places.numel()
            board.spoiled[number] += (alive & scores.isnan()).sum()
        elif given is not None:
            _list(board, group, tile * TILE + places, keys_of(scores[places]))
        else:
            flags = torch.nn.functional.pad(middle, (0, TILE - middle.numel())).view(-1, RUN).long()
            words = (flags << torch.arange(RUN)).sum(1)
            some = words.nonzero().flatten()
            _store(board, group, WORDS, [(board.words, (tile * (TILE // RUN) + some) << 16 | words[some])])


def margin(bound: Tensor) -> Tensor:
    """More than a rough score can be off: 2^-17 of it, and what a quick root loses of the smallest numbers."""
    return bound.abs() * 2.0**-17 + 1e-36


def _store(board: Board, group: int, column: int, values: list[tuple[Tensor, Tensor]]) -> None:
    counters = board.table_of("counters")
    begin, end = board.rooms[group : group + 2].tolist()
    slot, size = begin + int(counters[group, column]), values[0][1].numel()
    counters[group, column] += size
    if slot + size > end:
        counters[group, OVER] = 1
        return
    for memory, value in values:
        memory[slot : slot + size] = value


def _list(board: Board, group: int, positions: Tensor, keys: Tensor) -> None:
    _store(board, group, LISTED, [(board.positions, positions), (board.keys, keys)])


def unfold(table: Table, board: Board, launch: Launch) -> None:
    """List positions and keys of the weights in collected words. What is below the range after all goes; NaN counts."""
    for group in range(board.groups):
        words = board.words[_collected(board, group, WORDS)]
        flags = (words[:, None] >> torch.arange(RUN)) & 1
        places = ((words >> 16) * RUN)[:, None] + torch.arange(RUN)
        positions = places[flags != 0]
        owners = table.owners[positions // TILE].long()
        for piece in owners.unique().tolist():
            if int(table.rows.view(-1, COLUMNS)[piece, LAUNCH]) != launch.number:
                continue
            mine = positions[owners == piece]
            scores = table.pieces[piece].score(mine - table.first[piece] * TILE)
            board.spoiled[piece] += scores.isnan().sum()
            keys, (low, high) = keys_of(scores), board.table_of("ranges")[group, :2].tolist()
            _drop(table, mine[keys < low])
            board.table_of("counters")[group, BELOW] += (keys < low).sum() * table.counted[piece]
            inside = (keys >= low) & (keys <= high)
            _list(board, group, mine[inside], keys[inside])


def tally(table: Table, board: Board, peers: bool) -> None:
    """Count the listed keys in their group's range, without those another process counts."""
    counted = torch.tensor(table.counted)
    for group in range(board.groups):
        listed = _collected(board, group, LISTED)
        mine = counted[table.owners[board.positions[listed] // TILE].long()]
        _add(board, board.keys[listed][mine], group, outside=False)


def settle(table: Table, board: Board, peers: bool) -> None:
    """Clear the mask where a listed key is below the cut; note the places and number of those equal to it."""
    for group in range(board.groups):
        listed = _collected(board, group, LISTED)
        if board.failed[group]:
            continue
        positions, keys, cut = board.positions[listed], board.keys[listed], board.table_of("ranges")[group, LOW]
        _drop(table, positions[keys < cut])
        same = positions[keys == cut]
        board.table_of("counters")[group, EQUAL] = same.numel()
        board.table_of("few")[group, : min(board.few_room, same.numel())] = same[: board.few_room]
        board.equal += torch.bincount(table.owners[same // TILE], minlength=len(table.pieces)) if peers else 0


def _drop(table: Table, positions: Tensor) -> None:
    owners = table.owners[positions // TILE]
    for piece in owners.unique().tolist():
        _write(table, piece, positions[owners == piece] - table.first[piece] * TILE, False)


def order(table: Table, board: Board, quotas: Tensor | None) -> None:
    """Clear the first of those equal to the cut: as many as its rank says in the group, or each piece's quota."""
    for group in range(board.groups):
        found = int(board.table_of("counters")[group, EQUAL])
        if found > board.few_room and not board.failed[group]:
            board.failed[group] = CROWDED
        if board.failed[group]:
            continue
        places = board.table_of("few")[group, :found].sort().values
        if quotas is None:
            _drop(table, places[: int(board.table_of("ranges")[group, RANK])])
            continue
        owners = table.owners[places // TILE]
        for piece in owners.unique().tolist():
            _drop(table, places[owners == piece][: int(quotas[piece])])


def give_up(
    table: Table, board: Board, launch: Launch, before: Tensor, quotas: Tensor, given: Tensor | None = None
) -> None:
    """Rewrite masks so that each piece loses the first of its scores equal to the cut, up to its quota. `before` says
    how many of them come before a tile."""
    for tile, number, where in _tiles(table, launch):
        if before[tile] >= quotas[number]:
            continue
        scores, alive = table.pieces[number].score(where), _alive(table, number)[where]
        cut = values_of(board.table_of("ranges")[table.groups[number], LOW])
        same = alive & (scores == cut)
        _write(table, number, where, alive & (scores > cut) | same & (before[tile] + same.cumsum(0) > quotas[number]))


def rank(table: Table, board: Board, widths: Sequence[int], gone: Sequence[int]) -> None:
    """In every tile of `widths[piece]` neighbours, drop the lowest scores until `gone[piece]` are; the dead count."""
    for number, (piece, width, count) in enumerate(zip(table.pieces, widths, gone, strict=True)):
        scores, alive = piece.score(slice(0, piece.numel)), _alive(table, number)
        board.spoiled[number] += (alive & scores.isnan()).sum()
        keys = keys_of(scores).masked_fill_(~alive, DEAD_KEY)
        _write(table, number, slice(0, piece.numel), without_lowest(keys.view(-1, width), count).flatten())
