"""Exact selection on a device, as seen from the host: sample, narrow the range of the cut, sweep once, prune the ties.

1. Histograms of two small samples give a range of keys that very likely holds the cut.
2. One sweep over all scores writes the masks of everything outside the range and collects what is inside (candidates).
3. Histograms of the candidates find the exact cut; candidates below it are pruned, then the first of its ties.
4. The host reads the counters of all selections in one transfer. Where the range missed the cut, or candidates or ties
   did not fit their buffers, that selection runs again by histograms of all scores, which always works.

Every step is an operation of `SelectionOps`: Triton kernels in `launch`, plain torch in `reference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from secateur.kernels.table import (
    BELOW,
    BITS,
    BOOL,
    DIGIT,
    EQUAL,
    INSIDE,
    LOW,
    RANK,
    RUN,
    TILE,
    TOO_MANY_TIES,
    Launch,
    MaskMemory,
    SelectionState,
    Table,
    jitter,
    mask_kind,
    range_of,
    to_device,
)
from secateur.selection.exact import Cut, Peers, ScoredTensor, Where, count_of, narrowed, refuse_nan, value_of
from secateur.selection.masks import as_bool, to_bits

SMALL = 1 << 18  # a selection over at most this many weights collects all of them, without a sample
COARSE_SAMPLE = 1 << 17  # scores in the first sample, which tells the second one where to resolve finely
SAMPLE_SHIFT = 7  # the second sample reads one run of every 1 << 7
SIGMAS = 3.0  # half-width of the range, in standard deviations of the sampled rank: about 1 update in 370 misses
MAX_CANDIDATES = 1 << 22  # candidates of one batch of selections, 20 bytes each
BATCH = 32  # selections in one batch
GIVEN_TILES = 256  # tiles that torch scores at a time, for scores without a kernel
MAX_RANK_WIDTH = 1 << 14  # widest group of neighbours that fits the registers of one program


class SelectionOps(Protocol):
    """The steps of a selection on a device. `launch` runs them as Triton kernels, `reference` in plain torch.

    `reference` documents each step.
    """

    def sample_histogram(self, table: Table, state: SelectionState, launch: Launch, shift: int) -> None: ...

    def add_scores(self, state: SelectionState, scores: Tensor, group: int) -> None: ...

    def narrow_ranges(
        self,
        state: SelectionState,
        *,
        sigmas: float | None = None,
        collected: bool = False,
        begin: bool = False,
        last: bool = False,
    ) -> None: ...

    def sweep(
        self,
        table: Table,
        state: SelectionState,
        launch: Launch,
        given: Tensor | None = None,
        *,
        careful: bool = False,
    ) -> None: ...

    def score_candidates(self, table: Table, state: SelectionState, launch: Launch) -> None: ...

    def count_candidates(self, table: Table, state: SelectionState, peers: bool) -> None: ...

    def apply_cut(self, table: Table, state: SelectionState, peers: bool) -> None: ...

    def prune_ties(self, table: Table, state: SelectionState, quotas: Tensor | None) -> None: ...

    def prune_many_ties(
        self,
        table: Table,
        state: SelectionState,
        launch: Launch,
        before: Tensor,
        quotas: Tensor,
        given: Tensor | None = None,
    ) -> None: ...

    def population(self, masks: Sequence[Tensor]) -> Tensor: ...


class RankOps(Protocol):
    """Ranking inside small groups of neighbours: rows, n:m patterns. Also in `launch` and `reference`."""

    def rank(self, table: Table, state: SelectionState, widths: Sequence[int], gone: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class Request:
    """One selection: the tensors that compete (by number, in order) and how many of their living weights to prune."""

    tensors: Sequence[int]
    wanted: int
    living: int  # over all peers
    total: int  # living or not, over all peers


def sample_shift(total: int) -> int:
    """The second sample reads one run of every `1 << shift`; finer above 2^30 weights to keep the candidates few."""
    if total > 1 << 30:
        return SAMPLE_SHIFT - 1
    return min(SAMPLE_SHIFT, max(0, (total // COARSE_SAMPLE).bit_length() - 1))


def capacity_for(request: Request) -> int:
    """Room for the expected number of candidates and a third more."""
    if request.total <= SMALL:
        return request.total
    return min(request.total, int(1.33 * SIGMAS * (request.total << sample_shift(request.total)) ** 0.5))


def tie_capacity_for(total: int, groups: int) -> int:
    """Room for scores equal to the cut. In bf16 about one weight in 200,000 shares a value."""
    return 1 << 12 if groups > 1 else 1 << 17 if total > 1 << 30 else 1 << 15


def batches(requests: Sequence[Request]) -> Iterator[list[int]]:
    """Numbers of the selections that run together: sampled and unsampled ones apart, within the candidate limit."""
    for sampled in (False, True):
        batch: list[int] = []
        candidates = 0
        for number, request in enumerate(requests):
            if (request.total > SMALL) != sampled or request.wanted == 0:
                continue
            if batch and (len(batch) == BATCH or candidates + capacity_for(request) > MAX_CANDIDATES):
                yield batch
                batch, candidates = [], 0
            batch.append(number)
            candidates += capacity_for(request)
        if batch:
            yield batch


@dataclass
class Batch:
    """Selections whose kernels are queued: what is needed to read their outcome, and to run those that failed again."""

    numbers: list[int]
    table: Table
    state: SelectionState


class Selector:
    """Runs selections over tensors of one device."""

    def __init__(self, ops: SelectionOps, tensors: Sequence[ScoredTensor], memory: MaskMemory, peers: Peers) -> None:
        self.ops, self.tensors, self.memory, self.peers = ops, tensors, memory, peers
        self.many = peers.size > 1

    def start(self, numbers: list[int], requests: Sequence[Request]) -> Batch:
        """Queue everything up to the finished masks, without reading anything back."""
        table = self._table(requests)
        state = SelectionState(table, [one.wanted for one in requests], [one.living for one in requests])
        smallest, largest = min(one.total for one in requests), max(one.total for one in requests)
        if largest > SMALL:
            self._sample(table, state, max(0, (smallest // COARSE_SAMPLE).bit_length() - 1))
            self.ops.narrow_ranges(state, sigmas=SIGMAS)
            self._sample(table, state, sample_shift(smallest))
            self.ops.narrow_ranges(state, sigmas=SIGMAS)
        here = [sum(self.tensors[n].numel for n in one.tensors) for one in requests]
        capacities = [min(capacity_for(one), numel) for one, numel in zip(requests, here, strict=True)]
        state.allocate_candidates(capacities, tie_capacity_for(largest, len(requests)))
        self._sweep(table, state)
        if self.many:
            state.totals = self.peers.sum(state.counters)
        passes = 3 if largest <= SMALL else 2  # a sampled range is at most 2^26 keys wide, unless the sample misled
        for number in range(passes):
            self.ops.count_candidates(table, state, self.many)
            self._sum_histogram(state)
            self.ops.narrow_ranges(state, collected=True, begin=number == 0, last=number == passes - 1)
        self._prune_candidates(table, state)
        state.free_candidates()
        return Batch(numbers, table, state)

    def finish(self, requests: Sequence[Request], state: SelectionState, readback: Sequence[int]) -> list[Cut]:
        """The cuts of a batch, from what the host has read; selections that failed run again."""
        cuts = []
        for group, (request, failed) in enumerate(zip(requests, state.failures_in(readback), strict=True)):
            low, high, _, ties = readback[-4 * (state.groups - group) :][:4]
            if failed:
                low, ties = self._select_by_histograms(request, low, high)
            cuts.append(Cut(value_of(low), ties))
        return cuts

    def _table(self, requests: Sequence[Request]) -> Table:
        members = [number for request in requests for number in request.tensors]
        groups = [group for group, request in enumerate(requests) for _ in request.tensors]
        return Table([self.tensors[n] for n in members], groups, self.memory, members, rank=self.peers.rank)

    def _sample(self, table: Table, state: SelectionState, shift: int) -> None:
        """Count one run of every `1 << shift` into the histograms."""
        for launch in table.launches:
            if launch.tensor is None:
                self.ops.sample_histogram(table, state, launch, shift)
            elif table.counted[launch.tensor]:
                tensor = table.tensors[launch.tensor]
                for where in sampled_places(tensor.numel, shift, table.device):
                    scores = tensor.score(where)
                    if tensor.alive is not None:
                        scores = scores.masked_fill(~alive_at(tensor, where), float("nan"))
                    self.ops.add_scores(state, scores.contiguous(), table.groups[launch.tensor])
        self._sum_histogram(state)

    def _sum_histogram(self, state: SelectionState) -> None:
        if self.many:
            state.histogram.copy_(self.peers.sum(state.histogram))

    def _launches(self, table: Table) -> Iterator[tuple[Launch, Tensor | None]]:
        """Every launch; those whose scores torch evaluates come in chunks, each with its scores."""
        for launch in table.launches:
            if launch.tensor is None:
                yield launch, None
                continue
            tensor = table.tensors[launch.tensor]
            for start in range(0, launch.count, GIVEN_TILES):
                chunk = replace(launch, first=launch.first + start, count=min(GIVEN_TILES, launch.count - start))
                where = slice(start * TILE, min((start + chunk.count) * TILE, tensor.numel))
                yield chunk, tensor.score(where).contiguous()

    def _sweep(self, table: Table, state: SelectionState, careful: bool = False) -> None:
        """One pass over all scores. A careful one counts what is inside the range instead of collecting it."""
        if careful:
            state.counters.zero_()
            state.inside = torch.empty(table.tiles, dtype=torch.int32, device=table.device)
        for launch, given in self._launches(table):
            self.ops.sweep(table, state, launch, given, careful=careful)
        for launch in table.launches:
            if launch.tensor is None and not careful:
                self.ops.score_candidates(table, state, launch)

    def _prune_candidates(self, table: Table, state: SelectionState) -> None:
        self.ops.apply_cut(table, state, self.many)
        if not self.many:
            self.ops.prune_ties(table, state, None)
            return
        overflow = self.peers.sum((state.by_group("counters")[:, EQUAL] > state.tie_capacity).long())
        state.failed.copy_(torch.where((state.failed == 0) & (overflow > 0), TOO_MANY_TIES, state.failed))
        self.ops.prune_ties(table, state, self._quotas(table, state, state.tie_counts))

    def _quotas(self, table: Table, state: SelectionState, ties: Tensor) -> Tensor:
        """How many of its ties each tensor here loses; ties are taken in (tensor, rank) order."""
        device, size, rank = table.device, self.peers.size, self.peers.rank
        columns = torch.tensor([0 if tensor.replicated else rank for tensor in table.tensors], device=device)
        rows = torch.arange(len(table.tensors), device=device)
        grid = torch.zeros(len(table.tensors), size, dtype=torch.int64, device=device)
        grid[rows, columns] = ties * torch.tensor(table.counted, device=device)
        grid = self.peers.sum(grid)
        groups = torch.tensor(table.groups, device=device)
        before = grid.flatten().cumsum(0).view_as(grid) - grid
        starts = torch.tensor([table.groups.index(group) for group in range(state.groups)], device=device)
        before = before - before[starts[groups], 0][:, None]
        to_prune = state.by_group("ranges")[groups, RANK]
        quotas = (to_prune[:, None] - before).clamp(min=0).minimum(grid)
        return quotas[rows, columns]

    def _select_by_histograms(self, request: Request, low: int, high: int) -> tuple[int, int]:
        """Select by histograms of all scores, then one pass for the ties: slower, but it cannot fail.

        `low` and `high` are the range in which the cut was expected; they are the cut itself if only its ties were too
        many. Returns the key of the cut and how many of its ties are pruned.
        """
        table = self._table([request])
        state = SelectionState(table, [request.wanted], [request.living])
        state.ranges.copy_(to_device(range_of(low, high), torch.int64, table.device))
        self._sweep(table, state, careful=True)
        counts = self.peers.totals([*state.counters[: INSIDE + 1].tolist(), *state.nan_counts.tolist()])
        refuse_nan([tensor.name for tensor in table.tensors], counts[2:])
        low, high, rank = narrowed((low, high), request.wanted, counts[BELOW], counts[INSIDE])
        state.ranges.copy_(to_device(range_of(low, high, rank), torch.int64, table.device))
        passes = -(-(high - low).bit_length() // DIGIT)
        for _ in range(passes):
            self._sample(table, state, 0)
            self.ops.narrow_ranges(state)
        if passes:
            self._sweep(table, state, careful=True)
        firsts = torch.tensor(table.first, device=table.device)
        upto = torch.cat((firsts.new_zeros(1), state.inside.cumsum(0)))
        ties = upto[firsts[1:]] - upto[firsts[:-1]]
        before = upto[:-1] - upto[firsts[table.owners.long()]]
        quotas = self._quotas(table, state, ties)
        for launch, given in self._launches(table):
            self.ops.prune_many_ties(table, state, launch, before, quotas, given)
        found = state.ranges.tolist()
        return found[LOW], found[RANK]


def alive_at(tensor: ScoredTensor, where: Where) -> Tensor:
    """Which weights at these places compete; the tensor has a mask."""
    assert tensor.alive is not None
    if tensor.alive.dtype == torch.bool:
        return tensor.alive[where]
    index = torch.arange(where.start, where.stop, device=tensor.device) if isinstance(where, slice) else where
    return (tensor.alive[index >> 3] >> (index & 7) & 1).bool()


def sampled_places(numel: int, shift: int, device: torch.device) -> Iterator[Where]:
    """Indices of one run of every `1 << shift`, GIVEN_TILES tiles' worth at a time."""
    size = GIVEN_TILES * TILE
    if shift == 0 or numel <= RUN:
        yield from (slice(start, min(start + size, numel)) for start in range(0, numel, size))
        return
    runs = max(1, numel // (RUN << shift))
    for start in range(0, runs, size // RUN):
        run = torch.arange(start, min(start + size // RUN, runs), device=device)
        places = (((run << shift) + jitter(run, shift)) * RUN)[:, None] + torch.arange(RUN, device=device)
        yield places.flatten().clamp_(max=numel - 1)


def prune_groups(
    ops: SelectionOps, groups: Sequence[Sequence[ScoredTensor]], counts: Sequence[int], peers: Peers, packed: bool
) -> tuple[list[Cut | None], list[Tensor], list[int] | None]:
    """Prune exactly `count` living weights of each group; see secateur.kernels.prune_groups.

    The host waits for the device once for all groups, unless some must run again.
    """
    tensors = [tensor for group in groups for tensor in group]
    memory = MaskMemory([tensor.numel for tensor in tensors], BITS if packed else BOOL, tensors[0].device)
    requests = requests_for(groups, counts, peers)
    selector = Selector(ops, tensors, memory, peers)
    started = [selector.start(numbers, [requests[n] for n in numbers]) for numbers in batches(requests)]
    masks = memory.tensors
    for request in requests:
        for number in request.tensors if request.wanted == 0 else ():
            keep_all(tensors[number], masks[number])
    # Counting packed masks is cheap; bool masks are eight times as large, and few callers need the counts.
    counted = ops.population(masks) if packed else torch.empty(0, dtype=torch.int64, device=masks[0].device)
    kept, *read = _read([counted, *(part for b in started for part in (b.state.readback, b.state.ranges))])
    readbacks = [[*counters, *ranges] for counters, ranges in zip(read[::2], read[1::2], strict=True)]
    names = [tensor.name for batch in started for tensor in batch.table.tensors]
    nan_counts = [n for b, words in zip(started, readbacks, strict=True) for n in b.state.nan_counts_in(words)]
    refuse_nan(names, peers.totals(nan_counts))
    cuts: list[Cut | None] = [None] * len(requests)
    again = False
    for batch, readback in zip(started, readbacks, strict=True):
        again = again or any(batch.state.failures_in(readback))
        found = selector.finish([requests[n] for n in batch.numbers], batch.state, readback)
        for number, cut in zip(batch.numbers, found, strict=True):
            cuts[number] = cut
    if not packed:
        return cuts, masks, None
    return cuts, masks, ops.population(masks).tolist() if again else kept


def _read(parts: Sequence[Tensor]) -> list[list[int]]:
    """The values of these tensors, in one transfer."""
    numbers = iter(torch.cat(list(parts)).tolist())
    return [list(islice(numbers, part.numel())) for part in parts]


def requests_for(groups: Sequence[Sequence[ScoredTensor]], counts: Sequence[int], peers: Peers) -> list[Request]:
    """The selection each group asks for, with the number of living weights over all peers."""
    here = [sum(living_in(tensor) for tensor in group if tensor.counted(peers)) for group in groups]
    requests, first = [], 0
    for group, count, living in zip(groups, counts, peers.totals(here), strict=True):
        members = range(first, first + len(group))
        requests.append(Request(members, min(max(count, 0), living), living, sum(tensor.total for tensor in group)))
        first += len(group)
    return requests


def living_in(tensor: ScoredTensor) -> int:
    """How many weights of the tensor compete."""
    if tensor.alive is None or tensor.dead is not None:
        return tensor.living()
    return count_of(as_bool(tensor.alive, (tensor.numel,)))


def keep_all(tensor: ScoredTensor, mask: Tensor) -> None:
    """Write a mask that prunes nothing new."""
    alive = torch.ones(tensor.numel, dtype=torch.bool, device=tensor.device) if tensor.alive is None else tensor.alive
    if mask_kind(mask) != mask_kind(alive):
        alive = to_bits(alive) if mask_kind(mask) == BITS else as_bool(alive, (tensor.numel,))
    mask.copy_(alive)


def can_pack(width: int) -> bool:
    """Whether a kernel can write groups of this width as bits: two programs must not share a word of 16."""
    return width % RUN == 0 or (width & (width - 1)) == 0


def rank_tiles(
    ops: RankOps, tensors: Sequence[ScoredTensor], widths: Sequence[int], gone: Sequence[int], packed: bool
) -> tuple[list[Tensor], list[int]] | None:
    """Masks without the `gone` lowest of every `width` neighbours, and NaN counts by tensor. None: no kernel for it."""
    if any(width > MAX_RANK_WIDTH or (packed and not can_pack(width)) for width in widths):
        return None
    memory = MaskMemory([tensor.numel for tensor in tensors], BITS if packed else BOOL, tensors[0].device)
    masks = memory.tensors
    for tensor, mask in zip(tensors, masks, strict=True):
        if packed and tensor.numel % 32:
            mask[-4:].zero_()  # bits past the end stay zero, so that masks can be counted and compared
    table = Table(tensors, [0] * len(tensors), memory, range(len(tensors)))
    if any(launch.tensor is not None for launch in table.launches):
        return None
    state = SelectionState(table, [0], [1])
    ops.rank(table, state, widths, gone)
    return masks, state.nan_counts.tolist()
