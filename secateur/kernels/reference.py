"""The specification: what each kernel does, in plain torch. Simple before fast; tests compare, kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from secateur.kernels.board import BELOW, BINS, CROWDED, DIGIT, EQUAL, FEW, LOW, OVER, RANK, RUN, SLOTS, TAKEN, Board
from secateur.kernels.table import TILE, Launch, Table
from secateur.masks import from_bits, to_bits
from secateur.pieces import keys_of, values_of


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


def _tiles(table: Table, numbers: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Each tile with the piece it is of and the flat places it covers."""
    for tile in numbers.tolist():
        piece = int(table.owners[tile])
        start = (tile - table.first[piece]) * TILE
        yield tile, piece, slice(start, min(start + TILE, table.pieces[piece].numel))


def _places(table: Table, board: Board, group: int) -> tuple[Tensor, Tensor]:
    """Positions and keys collected for a group."""
    begin, end = board.rooms[group : group + 2].tolist()
    end = min(end, begin + int(board.counters.view(-1, 4)[group, TAKEN]))
    return board.positions[begin:end], board.keys[begin:end]


def _add(board: Board, keys: Tensor, group: int) -> None:
    low, high, shift, _ = board.ranges.view(-1, 4)[group].tolist()
    digits = (keys.long() - low) >> shift
    slots = torch.where(keys < low, BINS, torch.where(keys > high, BINS + 1, digits))
    board.counts.view(-1, SLOTS)[group] += torch.bincount(slots, minlength=SLOTS)


def survey(table: Table, board: Board, launch: Launch, stride: int) -> None:
    """Count scores by key in their group's range, one of every `stride` runs of neighbours; NaN and the dead do not
    count."""
    run = torch.arange(-(-launch.tiles.numel() * (TILE // RUN) // stride), device=table.device)
    place = (run * stride + (((run * 0x9E3779B1) & 0xFFFFFFFF) >> 8) % stride) * RUN
    place = place[place < launch.tiles.numel() * TILE]
    tiles = launch.tiles.long()[place // TILE]
    for piece in tiles.new_tensor(table.owners.tolist())[tiles].unique().tolist():
        mine = table.owners[tiles] == piece
        index = ((tiles - table.first[piece]) * TILE + place % TILE)[mine][:, None] + torch.arange(RUN)
        index = index[index < table.pieces[piece].numel]
        scores = table.pieces[piece].score(index)
        valid = _alive(table, piece)[index] & ~scores.isnan()
        if table.counted[piece]:
            _add(board, keys_of(scores[valid]), table.groups[piece])


def count(board: Board, scores: Tensor, group: int) -> None:
    """The same for scores that are given; NaN marks those that do not count."""
    _add(board, keys_of(scores[~scores.isnan()]), group)


def narrow(board: Board, *, sigmas: float | None = None, collected: bool = False, begin: bool = False) -> None:
    """Shrink every group's range to the bins that hold a rank, and clear the histogram.

    Sampled, the rank is that of the wanted share, give or take some standard deviations; otherwise it is the exact
    rank, which then counts from the new range. `begin` takes it from what was wanted and what the sweep found below.
    """
    for group in range(board.groups):
        low, high, shift, first = board.ranges.view(-1, 4)[group].tolist()
        bins = board.counts.view(-1, SLOTS)[group]
        last = first
        if sigmas is not None:
            share, size = board.shares[group], bins.sum().double()
            margin = sigmas * (share * size * (1 - share)).sqrt() + 1
            first = int((share * size - margin).floor()) - int(bins[BINS])
            last = int((share * size + margin).ceil()) - int(bins[BINS])
        elif begin:
            first = last = int(board.wanted[group] - board.totals.view(-1, 4)[group, BELOW])
        upto = bins[:BINS].cumsum(0)
        digit, end = int((upto < first).sum()), int((upto < last).sum())
        before = int(upto[digit - 1]) if digit else 0
        new_high = min(high, low + ((end + 1) << shift) - 1) if end < BINS else high
        new_low = min(low + (min(digit, BINS - 1) << shift), new_high)
        if collected:
            over = bool(board.totals.view(-1, 4)[group, OVER])
            bad = first < 1 or first > int(upto[-1]) or over or bool(board.failed[group])
            board.failed[group] = int(bad)
            new_low, new_high = (low, high) if bad else (new_low, new_high)
        bins.zero_()
        new_shift = max(0, (new_high - new_low).bit_length() - DIGIT)
        board.ranges.view(-1, 4)[group] = torch.tensor([new_low, new_high, new_shift, first - before])


def sweep(
    table: Table, board: Board, launch: Launch, given: Tensor | None = None, tiles: Tensor | None = None, first: int = 0
) -> None:
    """Write the mask of everything outside its group's range, keep what is inside and collect it, and count."""
    counters = board.counters.view(-1, 4)
    for tile, number, where in _tiles(table, launch.tiles if tiles is None else tiles):
        group, scores, alive = table.groups[number], table.pieces[number].score(where), _alive(table, number)[where]
        low, high = values_of(board.ranges.view(-1, 4)[group, :2])
        kept = alive & (scores >= low)
        middle = (kept & (scores <= high)).nonzero().flatten()
        _write(table, number, where, kept)
        board.inside[tile] = middle.numel()
        board.spoiled[number] += (alive & scores.isnan()).sum()
        counters[group, BELOW] += (alive.sum() - kept.sum()) * table.counted[number]
        begin, end = board.rooms[group : group + 2].tolist()
        slot = begin + int(counters[group, TAKEN])
        counters[group, TAKEN] += middle.numel()
        if slot + middle.numel() > end:
            counters[group, OVER] = 1
        else:
            board.positions[slot : slot + middle.numel()] = tile * TILE + middle
            board.keys[slot : slot + middle.numel()] = keys_of(scores[middle])


def tally(table: Table, board: Board, peers: bool) -> None:
    """Count the collected keys in their group's range, without those another process counts."""
    counted = torch.tensor(table.counted, device=table.device)
    for group in range(board.groups):
        positions, keys = _places(table, board, group)
        _add(board, keys[counted[table.owners[positions // TILE].long()]], group)


def settle(table: Table, board: Board, peers: bool) -> None:
    """Clear the mask where a collected key is below the cut; note the places and number of those equal to it."""
    for group in range(board.groups):
        positions, keys = _places(table, board, group)
        if board.failed[group] or not keys.numel():
            continue
        cut = board.ranges.view(-1, 4)[group, LOW]
        _drop(table, positions[keys < cut])
        same = positions[keys == cut]
        board.counters.view(-1, 4)[group, EQUAL] = same.numel()
        board.few.view(-1, FEW)[group, : min(FEW, same.numel())] = same[:FEW]
        board.equal += torch.bincount(table.owners[same // TILE], minlength=len(table.pieces)) if peers else 0


def _drop(table: Table, positions: Tensor) -> None:
    owners = table.owners[positions // TILE]
    for piece in owners.unique().tolist():
        _write(table, piece, positions[owners == piece] - table.first[piece] * TILE, False)


def order(table: Table, board: Board, quotas: Tensor | None) -> None:
    """Clear the first of those equal to the cut: as many as its rank says in the group, or each piece's quota."""
    for group in range(board.groups):
        found = int(board.counters.view(-1, 4)[group, EQUAL])
        if found > FEW and not board.failed[group]:
            board.failed[group] = CROWDED
        if board.failed[group]:
            continue
        places = board.few.view(-1, FEW)[group, :found].sort().values
        if quotas is None:
            _drop(table, places[: int(board.ranges.view(-1, 4)[group, RANK])])
            continue
        owners = table.owners[places // TILE]
        for piece in owners.unique().tolist():
            _drop(table, places[owners == piece][: int(quotas[piece])])


def give_up(
    table: Table, board: Board, launch: Launch, before: Tensor, quotas: Tensor,
    given: Tensor | None = None, tiles: Tensor | None = None, first: int = 0,
) -> None:  # fmt: skip
    """Rewrite masks so that each piece loses the first of its scores equal to the cut, up to its quota. `before` says
    how many of them come before a tile."""
    for tile, number, where in _tiles(table, launch.tiles if tiles is None else tiles):
        if before[tile] >= quotas[number]:
            continue
        scores, alive = table.pieces[number].score(where), _alive(table, number)[where]
        cut = values_of(board.ranges.view(-1, 4)[table.groups[number], LOW])
        same = alive & (scores == cut)
        _write(table, number, where, alive & (scores > cut) | same & (before[tile] + same.cumsum(0) > quotas[number]))
