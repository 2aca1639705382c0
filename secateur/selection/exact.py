"""The heart: which weights go, exactly, in bounded scratch.

Scores are ordered through their float bits, read as int32 keys. A sample brackets the cut; one pass over all scores
then settles every weight outside the bracket and collects the few inside, which decide the exact cut and its ties.
If the sample misled, or too many scores tie to be collected, histograms over the keys narrow the bracket to one key
and a last pass applies it. Both ways give the same mask, the one a full stable sort would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.errors import ScoreError
from secateur.selection.pieces import (
    ALONE,
    CHUNK,
    DEAD_KEY,
    HIGHEST_KEY,
    LOWEST_KEY,
    Peers,
    Piece,
    Where,
    at_least,
    at_most,
    count_of,
    keys_of,
    places_of,
    value_of,
)
from secateur.selection.sampling import sampled_cut as sampled_cut

Part = Iterable[tuple[Where, Tensor]]  # places and their keys, in flat order; may be walked through again

COLLECTED = 1 << 20  # scores that may be collected inside the bracket, 12 bytes each
SAMPLED = 1 / 200  # share of the scores that is sampled: balances its cost against that of a wide bracket
SAMPLE_MAX = 1 << 20
RUN = 16  # neighbours sampled together: one cache line costs as much as one number
SIGMAS = 3  # half-width of the bracket, in standard deviations of the sampled rank
DIGIT = 11  # bits of the key resolved by one histogram: 16 KiB of int64 counts


@dataclass(frozen=True)
class Cut:
    """Prune every score below `value` and the first `ties` of those equal to it, in (tensor, flat index) order."""

    value: float
    ties: int


def locate(
    population: Callable[[], Iterable[Tensor]],
    rank: int,
    peers: Peers = ALONE,
    low: int = LOWEST_KEY,
    high: int = HIGHEST_KEY,
) -> tuple[int, int]:
    """The key of the rank-th smallest (from 1) within [low, high], and how many equal to it are within that rank."""
    key, _, rank = _narrow(population, rank, peers, low, high)
    return key, rank


def _narrow(
    population: Callable[[], Iterable[Tensor]], rank: int, peers: Peers, low: int, high: int, width: int = 0
) -> tuple[int, int, int]:
    """An interval of keys, at most `width` wide, that holds the rank-th smallest in [low, high]; and its rank there.

    Each turn counts the population by the next bits of the key and keeps one bin; only the counts are summed.
    """
    while high - low > width:
        shift = max(0, (high - low).bit_length() - DIGIT)
        bins = 2 + (1 << DIGIT)  # one at each end for what is out of range
        counts = torch.zeros(bins, dtype=torch.int64, device="cpu")
        for keys in population():
            digits = ((keys.to(torch.int64) - low) >> shift).clamp_(-1, 1 << DIGIT).add_(1)
            counts += torch.bincount(digits, minlength=bins).cpu()
        upto = peers.sum(counts[1:-1]).cumsum(0)
        digit = int(torch.searchsorted(upto, rank))
        rank -= int(upto[digit - 1]) if digit else 0
        low, high = low + (digit << shift), min(high, low + ((digit + 1) << shift) - 1)
    return low, high, rank


def prune_exactly(pieces: Sequence[Piece], count: int, peers: Peers = ALONE) -> tuple[Cut | None, list[Tensor]]:
    """Flat bool masks (True = kept) with exactly `count` of the living weights gone, those of lowest score."""
    living = peers.totals([sum(piece.living() for piece in pieces if piece.counted(peers))])[0]
    count = min(max(count, 0), living)
    if count == 0:
        return None, [_everything(p) if p.alive is None else p.alive.clone() for p in pieces]
    bracket = _bracket(pieces, count / living, peers)
    swept: list[_Swept] = []
    room, ends = COLLECTED, (value_of(bracket[0]), value_of(bracket[1]))
    buffers: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for piece in pieces:
        swept.append(_sweep(piece, *ends, room, buffers))
        room -= swept[-1].middle
    below, middle, complete = _tally(pieces, swept, room, peers)
    masks, parts = [sweep.mask for sweep in swept], [sweep.collected for sweep in swept]
    if not (complete and below < count <= below + middle):
        swept.clear()  # frees what was collected
        parts = [_Stream(piece) for piece in pieces]
    low, high, rank = narrowed(bracket, count, below, middle)
    counted = [part for piece, part in zip(pieces, parts, strict=True) if piece.counted(peers)]
    key, ties = locate(lambda: (keys for part in counted for _, keys in part), rank, peers, low, high)
    equal = [sum(int((keys == key).count_nonzero()) for _, keys in part) for part in parts]
    for mask, part, quota in zip(masks, parts, _quotas(pieces, equal, ties, peers), strict=True):
        _settle(mask, part, key, quota)
    return Cut(value_of(key), ties), masks


def _everything(piece: Piece) -> Tensor:
    return torch.ones(piece.numel, dtype=torch.bool, device=piece.device)


def narrowed(bracket: tuple[int, int], count: int, below: int, middle: int) -> tuple[int, int, int]:
    """Where the cut must lie, given what is below and inside the bracket, and its rank there."""
    low, high = bracket
    if count <= below:
        return LOWEST_KEY, low - 1, count
    if count > below + middle:
        return high + 1, HIGHEST_KEY, count - below - middle
    return low, high, count - below


def _bracket(pieces: Sequence[Piece], fraction: float, peers: Peers) -> tuple[int, int]:
    """Two keys that hold the cut between them, most likely; everything when all of it can be collected anyway."""
    total = sum(piece.total for piece in pieces)
    if total <= COLLECTED // 2:
        return LOWEST_KEY, HIGHEST_KEY
    to_collect_all = int(2 * (SIGMAS * total / COLLECTED) ** 2)
    wanted = min(max(int(SAMPLED * total), to_collect_all), SAMPLE_MAX)
    samples = [_sample(piece, wanted / total).cpu() for piece in pieces if piece.counted(peers)]
    sample = torch.cat([torch.empty(0, dtype=torch.int32, device="cpu"), *samples])
    size = peers.totals([sample.numel()])[0]
    margin = SIGMAS * math.sqrt(size * fraction * (1 - fraction)) + 1
    first, last = math.floor(fraction * size - margin), math.ceil(fraction * size + margin)

    def around(rank: int) -> tuple[int, int, int]:
        return _narrow(lambda: [sample], rank, peers, LOWEST_KEY, HIGHEST_KEY, width=1 << 10)  # 1e-4 of a value

    return around(first)[0] if first > 0 else LOWEST_KEY, around(last)[1] if last <= size else HIGHEST_KEY


def _sample(piece: Piece, share: float) -> Tensor:
    """Keys of about `share` of the piece, in short runs spread evenly with a fixed jitter: no random state is used."""
    runs = min(math.ceil(share * piece.numel / RUN), piece.numel // RUN)
    number = torch.arange(runs, dtype=torch.float64, device="cpu")
    spread = (number + (number * 0.6180339887498949) % 1.0) / max(1, runs) * (piece.numel - RUN)
    where = (spread.to(torch.int64)[:, None] + torch.arange(RUN, device="cpu")).flatten()
    keys = torch.cat([piece.keys(part) for part in where.split(CHUNK // 4)])
    return keys if piece.alive is None else keys[keys != DEAD_KEY]


@dataclass(frozen=True)
class _Stream:
    """All of a piece, evaluated again each time it is walked through."""

    piece: Piece

    def __iter__(self) -> Iterator[tuple[Where, Tensor]]:
        return ((chunk, self.piece.keys(chunk)) for chunk in self.piece.chunks())


@dataclass(frozen=True)
class _Swept:
    mask: Tensor  # keeps what is at or above the bracket's lower end
    below: int  # living scores under the bracket
    middle: int  # living scores inside it
    spoiled: int  # living scores that are NaN
    collected: Part  # positions and keys of those inside, complete if there was room


def _sweep(
    piece: Piece, least: float, most: float, room: int, buffers: dict[torch.device, tuple[Tensor, Tensor]]
) -> _Swept:
    """One pass over a piece: settle what is outside [least, most], collect what is inside.

    The buffers are made once for all pieces of a device.
    """
    mask = torch.empty(piece.numel, dtype=torch.bool, device=piece.device)
    if piece.device not in buffers:
        spare = torch.empty(CHUNK, dtype=torch.float32, device=piece.device)
        buffers[piece.device] = spare, torch.empty_like(spare, dtype=torch.bool)
    spare, flags = buffers[piece.device]
    positions: list[Tensor] = []
    keys: list[Tensor] = []
    below = middle = spoiled = 0
    for chunk in piece.chunks():
        scores = piece.score(chunk)
        size = scores.numel()
        kept = at_least(scores, least, mask[chunk], spare[:size])
        if piece.alive is None:
            below += size - int(spare[:size].sum())  # ones and zeros, fewer than fp32 can count
        else:
            below += piece.living(chunk) - count_of(kept.logical_and_(piece.alive[chunk]))
        spoiled += piece.spoiled(chunk, scores)
        inside = places_of(at_most(scores, most, flags[:size], spare[:size]).logical_and_(kept))
        middle += inside.numel()
        if middle <= room:
            positions.append(inside + chunk.start)
            keys.append(keys_of(scores.index_select(0, inside)))
    collected = [(torch.cat(positions), torch.cat(keys))] if positions else []
    return _Swept(mask, below, middle, spoiled, collected)


def _tally(pieces: Sequence[Piece], swept: Sequence[_Swept], room: int, peers: Peers) -> tuple[int, int, bool]:
    """Below, inside, and whether every peer had room, over all peers. NaN raises on every one of them alike."""
    counted = [sweep for piece, sweep in zip(pieces, swept, strict=True) if piece.counted(peers)]
    here = [sum(s.below for s in counted), sum(s.middle for s in counted), int(room < 0)]
    totals = peers.totals(here + [s.spoiled for s in swept])
    refuse_nan([piece.name for piece in pieces], totals[3:])
    return totals[0], totals[1], totals[2] == 0


def refuse_nan(names: Sequence[str], counts: Sequence[int]) -> None:
    """Raise when any tensor's count of NaN scores is above zero, naming those tensors."""
    spoiled = [f"{name!r} ({count})" for name, count in zip(names, counts, strict=True) if count]
    if spoiled:
        raise ScoreError(
            f"NaN scores in {', '.join(spoiled)}. A weight, a gradient statistic or the score itself is not a number:"
            " check the loss for divergence before pruning. No mask was changed."
        )


def _quotas(pieces: Sequence[Piece], equal: Sequence[int], ties: int, peers: Peers) -> list[int]:
    """How many of the scores equal to the cut each piece here gives up, taking them in (tensor, rank) order."""
    columns = [0 if piece.replicated else peers.rank for piece in pieces]
    table = torch.zeros(len(pieces), peers.size, dtype=torch.int64, device="cpu")
    for row, (piece, column) in enumerate(zip(pieces, columns, strict=True)):
        table[row, column] = equal[row] if piece.counted(peers) else 0
    table = peers.sum(table)
    before = table.flatten().cumsum(0).view_as(table) - table
    quotas = (ties - before).clamp(min=0).minimum(table)
    return [int(quotas[row, column]) for row, column in enumerate(columns)]


def _settle(mask: Tensor, part: Part, key: int, quota: int) -> None:
    """Write the final mask where the part says: gone below the key, and for the first `quota` equal to it."""
    for where, keys in part:
        kept = keys > key
        equal = (keys == key).nonzero().flatten()
        kept[equal[quota:]] = True
        quota = max(0, quota - equal.numel())
        mask[where] = kept
