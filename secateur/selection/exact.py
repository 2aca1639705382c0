"""The exact cut: masks that prune exactly the asked number of weights, those of lowest score, storing no scores.

A score's fp32 bits are ordered as an int32 key. One pass samples the keys and brackets the cut; the next writes the
mask for all that lies outside the bracket and collects the few keys inside it; the k-th of those is the cut. If the
bracket missed or did not fit, the pass is repeated by histograms of the keys. Only counts are summed over peers, so the
mask does not depend on chunking, device or number of processes. Ties go in (tensor, rank, flat index) order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from secateur.errors import ScoreError
from secateur.scores import SCALAR_FACTS, Score
from secateur.selection.masks import from_bits

Where = slice | Tensor  # a flat range, or flat indices
Part = Iterable[tuple[Where, Tensor]]  # places and their keys, in flat order; can be iterated more than once

CHUNK = 1 << 19  # scores evaluated at a time: 2 MiB of fp32, small enough to stay in cache between operations
COLLECTED = 1 << 20  # scores that may be collected inside the bracket, 12 bytes each
SAMPLED = 1 / 200  # share of the scores that is sampled: balances its cost against that of a wide bracket
SAMPLE_MAX = 1 << 20
RUN = 16  # neighbours sampled together: one cache line costs as much as one number
SIGMAS = 3  # half-width of the bracket, in standard deviations of the sampled rank
DIGIT = 11  # bits of the key resolved by one histogram: 16 KiB of int64 counts

LOWEST_KEY, HIGHEST_KEY = -0x7F800001, 0x7F800000  # of -inf and +inf; NaN lies outside
MINUS_ZERO_KEY = -1  # no score has it: -0.0 gets the key of 0.0
DEAD_KEY = LOWEST_KEY - 1  # of a weight that does not compete: below all that do, outside every bracket


@dataclass(frozen=True)
class Cut:
    """Prune every score below `value` and the first `ties` of those equal to it, in (tensor, flat index) order."""

    value: float
    ties: int


class Peers:
    """The processes that hold the shards of one model: here a single one. `model.distributed` has several."""

    rank, size = 0, 1
    bytes_sent = 0  # by this process, over the network

    def sum(self, counts: Tensor) -> Tensor:
        """Elementwise sum of an integer tensor over all peers."""
        return counts

    def totals(self, counts: Sequence[int]) -> list[int]:
        """The same for plain numbers."""
        return list(counts)


ALONE = Peers()


@dataclass(frozen=True)
class ScoredTensor:
    """One tensor in a selection: flat, in chunks, its scores evaluated on demand. Sizes are of this process's shard."""

    name: str
    numel: int  # of the local shard
    total: int  # over all peers
    score: Callable[[Where], Tensor]
    device: torch.device
    alive: Tensor | None = None  # flat mask, bool or bits; False for weights that do not compete
    replicated: bool = False  # every peer holds all of it, so only the first counts it
    source: tuple[Any, Mapping[str, Any]] | None = None  # the Score and its facts, for kernels that know the formula
    dead: int | None = None  # how many of the local weights do not compete, where already counted

    def counted(self, peers: Peers) -> bool:
        return not self.replicated or peers.rank == 0

    def unpacked(self) -> ScoredTensor:
        """The same with its mask as bools, which torch can index."""
        if self.alive is None or self.alive.dtype == torch.bool:
            return self
        return replace(self, alive=from_bits(self.alive, self.numel))

    def chunks(self) -> Iterable[slice]:
        return (slice(start, min(start + CHUNK, self.numel)) for start in range(0, self.numel, CHUNK))

    def living(self, where: Where | None = None) -> int:
        """How many weights compete, in the local shard or in one part of it."""
        if where is None and self.dead is not None:
            return self.numel - self.dead
        if self.alive is not None:
            return count_of(self.alive if where is None else self.alive[where])
        return self.numel if where is None else where.stop - where.start if isinstance(where, slice) else where.numel()

    def keys(self, where: Where, scores: Tensor | None = None) -> Tensor:
        """Keys in the order of the scores (evaluated unless given), dead weights below all others."""
        keys = keys_of(self.score(where) if scores is None else scores)
        return keys if self.alive is None else keys.masked_fill_(~self.alive[where], DEAD_KEY)

    def spoiled(self, where: Where, scores: Tensor) -> int:
        """How many of these scores are NaN and belong to a living weight."""
        if not scores.numel() or not scores.amax().isnan():
            return 0
        nan = scores.isnan()
        return int((nan if self.alive is None else nan & self.alive[where]).count_nonzero())


def prune_exactly(tensors: Sequence[ScoredTensor], count: int, peers: Peers = ALONE) -> tuple[Cut | None, list[Tensor]]:
    """Flat bool masks (True = kept) with exactly `count` of the living weights gone, those of lowest score."""
    living = peers.totals([sum(scored.living() for scored in tensors if scored.counted(peers))])[0]
    count = min(max(count, 0), living)
    if count == 0:
        return None, [_everything(p) if p.alive is None else p.alive.clone() for p in tensors]
    low, high = _bracket(tensors, count / living, peers)
    bracket = low, 0 if high == MINUS_ZERO_KEY else high  # the sweep compares values, and -0.0 equals 0.0
    swept: list[_Swept] = []
    room, ends = COLLECTED, (value_of(bracket[0]), value_of(bracket[1]))
    buffers: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for scored in tensors:
        swept.append(_sweep(scored, *ends, room, buffers))
        room -= swept[-1].middle
    below, middle, complete = _tally(tensors, swept, room, peers)
    masks, parts = [sweep.mask for sweep in swept], [sweep.collected for sweep in swept]
    if not (complete and below < count <= below + middle):
        swept.clear()  # frees what was collected
        parts = [_Stream(scored) for scored in tensors]
    low, high, rank = narrowed(bracket, count, below, middle)
    counted = [part for scored, part in zip(tensors, parts, strict=True) if scored.counted(peers)]
    key, ties = locate(lambda: (keys for part in counted for _, keys in part), rank, peers, low, high)
    equal = [sum(int((keys == key).count_nonzero()) for _, keys in part) for part in parts]
    for mask, part, quota in zip(masks, parts, _quotas(tensors, equal, ties, peers), strict=True):
        _settle(mask, part, key, quota)
    return Cut(value_of(key), ties), masks


def _everything(scored: ScoredTensor) -> Tensor:
    return torch.ones(scored.numel, dtype=torch.bool, device=scored.device)


def _bracket(tensors: Sequence[ScoredTensor], fraction: float, peers: Peers) -> tuple[int, int]:
    """Two keys that most likely enclose the cut; the whole range when everything can be collected anyway."""
    total = sum(scored.total for scored in tensors)
    if total <= COLLECTED // 2:
        return LOWEST_KEY, HIGHEST_KEY
    to_collect_all = int(2 * (SIGMAS * total / COLLECTED) ** 2)
    wanted = min(max(int(SAMPLED * total), to_collect_all), SAMPLE_MAX)
    samples = [_sample(scored, wanted / total).cpu() for scored in tensors if scored.counted(peers)]
    sample = torch.cat([torch.empty(0, dtype=torch.int32, device="cpu"), *samples])
    size = peers.totals([sample.numel()])[0]
    margin = SIGMAS * math.sqrt(size * fraction * (1 - fraction)) + 1
    first, last = math.floor(fraction * size - margin), math.ceil(fraction * size + margin)

    def around(rank: int) -> tuple[int, int, int]:
        return _narrow(lambda: [sample], rank, peers, LOWEST_KEY, HIGHEST_KEY, width=1 << 10)  # 1e-4 of a value

    return around(first)[0] if first > 0 else LOWEST_KEY, around(last)[1] if last <= size else HIGHEST_KEY


def _sample(scored: ScoredTensor, share: float) -> Tensor:
    """Keys of about `share` of a tensor, in short runs spread evenly with a fixed jitter: no random state is used."""
    runs = min(math.ceil(share * scored.numel / RUN), scored.numel // RUN)
    number = torch.arange(runs, dtype=torch.float64, device="cpu")
    spread = (number + (number * 0.6180339887498949) % 1.0) / max(1, runs) * (scored.numel - RUN)
    where = (spread.to(torch.int64)[:, None] + torch.arange(RUN, device="cpu")).flatten()
    keys = torch.cat([scored.keys(part) for part in where.split(CHUNK // 4)])
    return keys if scored.alive is None else keys[keys != DEAD_KEY]


def narrowed(bracket: tuple[int, int], count: int, below: int, middle: int) -> tuple[int, int, int]:
    """The range of keys the cut must lie in, given the counts below and inside the bracket, and its rank there."""
    low, high = bracket
    if count <= below:
        return LOWEST_KEY, low - 1, count
    if count > below + middle:
        return high + 1, HIGHEST_KEY, count - below - middle
    return low, high, count - below


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

    Each turn counts the population by the next bits of the key and keeps one bin; only counts cross the network.
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


@dataclass(frozen=True)
class _Swept:
    """One tensor after the pass that uses the bracket."""

    mask: Tensor  # keeps what is at or above the bracket's lower end
    below: int  # living scores under the bracket
    middle: int  # living scores inside it
    spoiled: int  # living scores that are NaN
    collected: Part  # positions and keys of those inside, complete if there was room


def _sweep(
    scored: ScoredTensor, least: float, most: float, room: int, buffers: dict[torch.device, tuple[Tensor, Tensor]]
) -> _Swept:
    """One pass over a tensor: write the mask outside [least, most], collect the keys inside.

    `buffers` are shared by all tensors of a device.
    """
    mask = torch.empty(scored.numel, dtype=torch.bool, device=scored.device)
    if scored.device not in buffers:
        spare = torch.empty(CHUNK, dtype=torch.float32, device=scored.device)
        buffers[scored.device] = spare, torch.empty_like(spare, dtype=torch.bool)
    spare, flags = buffers[scored.device]
    positions: list[Tensor] = []
    keys: list[Tensor] = []
    below = middle = spoiled = 0
    for chunk in scored.chunks():
        scores = scored.score(chunk)
        size = scores.numel()
        kept = at_least(scores, least, mask[chunk], spare[:size])
        if scored.alive is None:
            below += size - int(spare[:size].sum())  # ones and zeros, fewer than fp32 can count
        else:
            below += scored.living(chunk) - count_of(kept.logical_and_(scored.alive[chunk]))
        spoiled += scored.spoiled(chunk, scores)
        inside = places_of(at_most(scores, most, flags[:size], spare[:size]).logical_and_(kept))
        middle += inside.numel()
        if middle <= room:
            positions.append(inside + chunk.start)
            keys.append(keys_of(scores.index_select(0, inside)))
    collected = [(torch.cat(positions), torch.cat(keys))] if positions else []
    return _Swept(mask, below, middle, spoiled, collected)


@dataclass(frozen=True)
class _Stream:
    """All keys of a tensor, evaluated again on each iteration."""

    scored: ScoredTensor

    def __iter__(self) -> Iterator[tuple[Where, Tensor]]:
        return ((chunk, self.scored.keys(chunk)) for chunk in self.scored.chunks())


def _tally(tensors: Sequence[ScoredTensor], swept: Sequence[_Swept], room: int, peers: Peers) -> tuple[int, int, bool]:
    """Counts below and inside the bracket over all peers, and whether all had room. NaN raises on every peer."""
    counted = [sweep for scored, sweep in zip(tensors, swept, strict=True) if scored.counted(peers)]
    here = [sum(s.below for s in counted), sum(s.middle for s in counted), int(room < 0)]
    totals = peers.totals(here + [s.spoiled for s in swept])
    refuse_nan([scored.name for scored in tensors], totals[3:])
    return totals[0], totals[1], totals[2] == 0


def refuse_nan(names: Sequence[str], counts: Sequence[int]) -> None:
    """Raise if any of these tensors has NaN scores, and name them."""
    spoiled = [f"{name!r} ({count})" for name, count in zip(names, counts, strict=True) if count]
    if spoiled:
        raise ScoreError(
            f"NaN scores in {', '.join(spoiled)}. A weight, an optimizer state or the score's own formula gave NaN:"
            " check whether the loss diverged before pruning. No mask was changed."
        )


def _quotas(tensors: Sequence[ScoredTensor], equal: Sequence[int], ties: int, peers: Peers) -> list[int]:
    """How many of the scores equal to the cut each local tensor loses, in (tensor, rank) order."""
    columns = [0 if scored.replicated else peers.rank for scored in tensors]
    table = torch.zeros(len(tensors), peers.size, dtype=torch.int64, device="cpu")
    for row, (scored, column) in enumerate(zip(tensors, columns, strict=True)):
        table[row, column] = equal[row] if scored.counted(peers) else 0
    table = peers.sum(table)
    before = table.flatten().cumsum(0).view_as(table) - table
    quotas = (ties - before).clamp(min=0).minimum(table)
    return [int(quotas[row, column]) for row, column in enumerate(columns)]


def _settle(mask: Tensor, part: Part, key: int, quota: int) -> None:
    """Write the final mask at these places: False below the key, and for the first `quota` equal to it."""
    for where, keys in part:
        kept = keys > key
        equal = (keys == key).nonzero().flatten()
        kept[equal[quota:]] = True
        quota = max(0, quota - equal.numel())
        mask[where] = kept


def keys_of(scores: Tensor) -> Tensor:
    """int32 keys in the order of the fp32 scores; -0.0 equals 0.0."""
    bits = (scores + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def values_of(keys: Tensor) -> Tensor:
    """The fp32 scores of these keys."""
    bits = keys.to(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def value_of(key: int) -> float:
    """The fp32 score of one key."""
    bits = key & 0xFFFFFFFF
    value: float = struct.unpack("f", struct.pack("I", bits ^ 0x7FFFFFFF if bits >> 31 else bits))[0]
    return value


def without_lowest(keys: Tensor, count: int) -> Tensor:
    """True for all but the `count` lowest keys of each row, ties by position; dead weights are never True."""
    alive = keys != DEAD_KEY
    if count == 0:
        return alive
    cut = keys.kthvalue(count, dim=1, keepdim=True).values
    equal = keys == cut
    wanted = count - (keys < cut).sum(1, keepdim=True)
    return ((keys > cut) | (equal & (equal.cumsum(1) > wanted))) & alive


def flat_part(tensor: Tensor, where: Where) -> Tensor:
    """Some places of a tensor in flat order. Only a part is copied when the tensor is strided or expanded."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat[where] if isinstance(where, slice) else flat.index_select(0, where.to(tensor.device))
    if isinstance(where, Tensor):
        return tensor[torch.unravel_index(where, tensor.shape)]
    width = tensor[0].numel()
    first = where.start // width
    rows = tensor[first : -(-where.stop // width)].reshape(-1)
    return rows[where.start - first * width : where.stop - first * width]


def at_least(scores: Tensor, bound: float, out: Tensor, buffer: Tensor) -> Tensor:
    """`scores >= bound` into a bool tensor by way of a float buffer: on CPUs torch compares into floats three times as
    fast as into bools, and the copy to bools is cheap."""
    return out.copy_(torch.ge(scores, bound, out=buffer))


def at_most(scores: Tensor, bound: float, out: Tensor, buffer: Tensor) -> Tensor:
    """`scores <= bound`, in the same way."""
    return out.copy_(torch.le(scores, bound, out=buffer))


def count_of(flags: Tensor) -> int:
    """How many are True: one product adds the eight bytes of a word in its top byte, 3x faster than `count_nonzero`."""
    parts = flags.split(CHUNK)
    return sum(int((_words(part) * 0x0101010101010101).bitwise_right_shift_(56).sum()) for part in parts)


def places_of(sparse: Tensor) -> Tensor:
    """Indices of the True values of a flat, mostly False tensor: `nonzero` over words of eight, then inside those."""
    words = _words(sparse)
    found = words.nonzero().flatten()
    inside = words.index_select(0, found).view(torch.bool).nonzero().flatten()
    return found.index_select(0, inside >> 3).mul_(8).add_(inside & 7)


def _words(flags: Tensor) -> Tensor:
    """A flat bool tensor, eight to an int64."""
    if not flags.numel():  # an empty one from NumPy has stride 0, which cannot be viewed
        return torch.empty(0, dtype=torch.int64, device=flags.device)
    if flags.numel() % 8 or flags.storage_offset() % 8:
        flags = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).clone()
    return flags.view(torch.int64)


def evaluator(score: Score, facts: Mapping[str, Any], first: int, device: torch.device) -> Callable[[Where], Tensor]:
    """A function from flat indices to fp32 scores. `first` is the model-wide index of the first weight."""

    def evaluate(where: Where) -> Tensor:
        values: dict[str, Any] = {}
        for name, fact in facts.items():
            if name in SCALAR_FACTS:
                values[name] = fact
            elif name == "index":
                numbers = torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where
                values[name] = numbers.to(device) + first
            else:
                values[name] = sent(flat_part(fact, where), device).float()
        return score(**values).float()

    return evaluate


def sent(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """The tensor on another device: non-blocking towards the GPU, whose stream keeps the order; blocking towards the
    host, which would otherwise read memory not yet written."""
    return tensor.to(device, copy=copy, non_blocking=device.type != "cpu")


def sampled_cut(
    scores: Mapping[str, Tensor],
    sparsity: float,
    *,
    fraction: float | None = None,
    per_tensor: bool = False,
    seed: int = 0,
) -> float:
    """The approximate threshold AdamWPrune used, for comparison: the k-th value of a sample drawn with replacement.

    `per_tensor` samples the same fraction (1 %) of each tensor; otherwise 2 % of all together. Prune `score <= cut`.
    The number of weights pruned then depends on the sample; docs/why-exact.md measures by how much.
    """
    flat = [tensor.flatten() for tensor in scores.values()]
    total = sum(tensor.numel() for tensor in flat)
    share = fraction if fraction is not None else 0.01 if per_tensor else 0.02
    generator = torch.Generator().manual_seed(seed)

    def draw(limit: int) -> Tensor:
        return torch.randint(0, limit, (max(1, int(limit * share)),), generator=generator)

    if per_tensor:
        drawn = torch.cat([tensor[draw(tensor.numel()).to(tensor.device)] for tensor in flat])
    else:
        where, parts = draw(total), []
        for tensor in flat:
            mine = where[(where >= 0) & (where < tensor.numel())]
            parts.append(tensor[mine.to(tensor.device)])
            where = where - tensor.numel()
        drawn = torch.cat(parts)
    rank = max(1, int(int(sparsity * total) * drawn.numel() / total))
    return float(drawn.float().kthvalue(rank).values)
