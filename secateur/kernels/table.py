"""Layout of many tensors in device memory: one row of addresses per tensor, so that one launch covers all of them.

Three parts. `Plan` and `fuse` say which scores a kernel can compute in registers, and from which tensors. `Table`
splits the tensors of a selection into tiles of 4096 weights and groups them into launches. `SelectionState` holds what
a selection writes: histograms, ranges of keys, collected candidates. Nothing here needs Triton.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.scores import (
    Score,
    bitter0,
    bitter3,
    bitter4,
    bitter6,
    bitter7,
    bitter8,
    correction,
    fisher,
    magnitude,
    variance,
    wanda,
)
from secateur.selection.exact import HIGHEST_KEY, LOWEST_KEY, ScoredTensor, sent

# Formulas with a kernel. GIVEN stands for all others: torch evaluates the scores and passes them to the kernel.
# BARE is VARIANCE without an eps.
GIVEN, MAGNITUDE, VARIANCE, BARE, MOMENTUM, BITTER0, BITTER6, WANDA = range(8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

TILE = 4096  # weights per program: 32 for each of 128 threads
RUN = 16  # neighbours that are sampled together, and weights in one collected word

# Columns of a table's rows, one row per tensor; all int64.
FACT0, FACT1, FACT2, ALIVE, MASK, NUMEL, FIRST, GROUP, COUNTED, DIVISOR, MODULUS, LAUNCH = range(12)
COLUMNS = 12
# How the tensors of a launch are aligned. EVEN: addresses and sizes are multiples of 16, so loads can be vectorized;
# WHOLE: sizes are also multiples of TILE, so no load needs a mask.
ODD, EVEN, WHOLE = range(3)
NOTHING, BOOL, BITS = range(3)  # how a mask is stored: no mask, a byte per weight, a bit per weight

DIGIT = 13  # bits of a key that one histogram resolves
BINS = 1 << DIGIT
SLOTS = BINS + 2  # the last two count keys below and above the range
BLOCK = 1024  # collected words or keys per program
TIES_PER_PROGRAM = 128

LOW, HIGH, SHIFT, RANK = range(4)  # columns of `ranges`: an interval of keys, log2 of its bin width, a rank inside it
BELOW, INSIDE, WORDS, LISTED, OVER, EQUAL = range(6)  # columns of `counters`; OVER: the candidate buffers overflowed
COUNTERS = 8
TOO_MANY_TIES = 2  # in `failed`: the ties did not fit their buffer. There, 1 says that the range did not hold the cut


class Plan(NamedTuple):
    """How a kernel computes a score: the formula, the facts it reads in order, and constants shared by all tensors."""

    formula: int
    names: tuple[str, ...]
    eps: float = 0.0
    sixteenths: int = 0  # the exponent of VARIANCE, times 16
    corrected: bool = False  # scale the first moment by Adam's bias correction

    @property
    def fast_math(self) -> bool:
        """Whether the first pass may use the fast square root and division.

        The fast sqrt flushes numbers below 1e-38 to zero. That is safe where an eps is added first, and for BARE, whose
        kernel leaves such numbers to the exact pass; not where a root is taken of a quotient (BITTER6).
        """
        return self.formula != BITTER6 and (self.eps >= 1e-20 or self.formula in (MAGNITUDE, WANDA, BARE))


_RULES: dict[Callable[..., Tensor], tuple[int, tuple[str, ...]]] = {
    magnitude: (MAGNITUDE, ("weight",)),
    bitter7: (VARIANCE, ("weight", "exp_avg_sq")),
    variance: (BARE, ("weight", "exp_avg_sq")),
    fisher: (BARE, ("weight", "exp_avg_sq")),
    bitter3: (MOMENTUM, ("weight", "exp_avg")),
    bitter4: (MOMENTUM, ("weight", "exp_avg")),
    bitter8: (MOMENTUM, ("weight", "exp_avg")),
    bitter0: (BITTER0, ("weight", "exp_avg", "exp_avg_sq")),
    bitter6: (BITTER6, ("weight", "exp_avg", "exp_avg_sq")),
    wanda: (WANDA, ("weight", "input_norm")),
}
_EXPONENTS = {bitter7: 4, fisher: 8}


class Fused(NamedTuple):
    """The score of one tensor as a kernel reads it."""

    plan: Plan
    facts: tuple[Tensor, ...]
    scale: Any = 1.0  # factor on the first moment: a number or a one-element tensor
    broadcast: tuple[int, int] = (1, 1)  # the last fact of WANDA is read at (index // broadcast[0]) % broadcast[1]


def plan_for(score: Score) -> Plan | None:
    """The plan of this score, or None if it has no kernel and torch must evaluate it."""
    rule = _RULES.get(score.function)
    if rule is None:
        return None
    options = {**score.defaults, **score.options}
    sixteenths = _EXPONENTS.get(score.function, int(16 * options.get("q", 0)))
    return Plan(*rule, float(options.get("eps", 0.0)), sixteenths, score.function is bitter8)


def fuse(plan: Plan, facts: Mapping[str, Any]) -> Fused | None:
    """The score of these facts for a kernel, or None if a layout or dtype has no kernel and torch must evaluate it."""
    tensors = tuple([facts[name] for name in plan.names])
    broadcast: tuple[int, int] | None = (1, 1)
    plain = tensors
    if plan.formula == WANDA:
        broadcast, plain = broadcast_of(tensors[-1]), tensors[:-1]
    for tensor in plain:
        if not tensor.is_contiguous() or tensor.dtype not in FLOATS:
            return None
    if broadcast is None:
        return None
    return Fused(plan, tensors, correction(facts["beta1"], facts["step"]) if plan.corrected else 1.0, broadcast)


def broadcast_of(tensor: Tensor) -> tuple[int, int] | None:
    """How an expanded tensor repeats: flat index i reads element (i // first) % second. None for other layouts."""
    if tensor.dtype not in FLOATS:
        return None
    moving = [dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1 and tensor.stride(dim) != 0]
    if not moving:
        return (1, 1)
    first, last = moving[0], moving[-1]
    expected = 1
    for dim in range(last, first - 1, -1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != expected:
            return None
        expected *= tensor.shape[dim]
    return math.prod(tensor.shape[last + 1 :]), expected


class KernelVariant(NamedTuple):
    """What a kernel is compiled for, and its constants. Tensors of one variant share a launch."""

    plan: Plan
    dtypes: tuple[torch.dtype, ...]
    alive: int  # how the mask of competing weights is stored
    aligned: int  # ODD, EVEN or WHOLE


@dataclass(frozen=True)
class Launch:
    """The tiles that one kernel launch covers."""

    variant: KernelVariant
    number: int
    tiles: Tensor | None  # int32 tile numbers; None when they are `first`, `first + 1`, ...
    first: int
    count: int
    tensor: int | None = None  # the only tensor of this launch, if torch evaluates its scores


class MaskMemory:
    """Uninitialized flat masks in one allocation; packed masks end on a 32-bit word, since bits are cleared atomically.

    Launches need only the addresses. The tensors are made on first use, while the device already works.
    """

    def __init__(self, sizes: Sequence[int], kind: int, device: torch.device) -> None:
        self.kind = kind
        self._sizes = list(sizes) if kind == BOOL else [-(-size // 32) * 4 for size in sizes]
        *self._starts, end = 0, *accumulate([-(-size // 16) * 16 for size in self._sizes])
        self._memory = torch.empty(end, dtype=torch.bool if kind == BOOL else torch.uint8, device=device)
        first = self._memory.data_ptr()
        self.addresses = [first + start for start in self._starts]

    @cached_property
    def tensors(self) -> list[Tensor]:
        places = zip(self._starts, self._sizes, strict=True)
        return [self._memory[start : start + size] for start, size in places]


def mask_kind(mask: Tensor | None) -> int:
    """How this mask is stored: NOTHING, BOOL or BITS."""
    return NOTHING if mask is None else BOOL if mask.dtype == torch.bool else BITS


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values from the host as a tensor on the device, copied without a sync."""
    if isinstance(values, Tensor):
        here = values.to(dtype)
        here = here.pin_memory() if device.type == "cuda" else here
    else:
        here = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return sent(here, device)


def jitter(run: Tensor, shift: int) -> Tensor:
    """Which of every `1 << shift` runs is sampled: a fixed hash, so no random state is used. As `_sample_histogram`."""
    return ((run * 0x9E3779B1) >> 8) & ((1 << shift) - 1)


# A tensor's variant (with its own number if it needs its own launch) and its row without the launch column.
Entry = tuple[tuple[Any, ...], tuple[int, ...]]

GIVEN_PLAN = Plan(GIVEN, ())
NO_TYPES: tuple[torch.dtype, ...] = (torch.float32,)


class Table:
    """The tensors of one or more selections (groups), laid out for launches on one device."""

    def __init__(
        self,
        tensors: Sequence[ScoredTensor],
        groups: Sequence[int],
        memory: MaskMemory,
        members: Sequence[int],
        rank: int = 0,
    ) -> None:
        """`members` are the places of these tensors in the mask memory."""
        self.tensors, self.groups, self.device = tensors, groups, tensors[0].device
        self._memory, self._members, self.mask_kind = memory, members, memory.kind
        self.counted = [not tensor.replicated or rank == 0 for tensor in tensors]
        self.first, self.owners = layout(tuple([tensor.numel for tensor in tensors]), TILE, self.device)
        self.tiles = self.first[-1]
        plans: dict[int, Plan | None] = {}
        scales: list[Any] = []
        entries = []
        for number, tensor in enumerate(tensors):
            fused = None
            if tensor.source is not None:
                score, facts = tensor.source
                plan = plans[id(score)] if id(score) in plans else plans.setdefault(id(score), plan_for(score))
                fused = None if plan is None else fuse(plan, facts)
            scales.append(1.0 if fused is None else fused[2])
            entries.append(self._entry(number, tensor, fused))
        self.rows, self.launches, self._launch_of = _device_rows(tuple(entries), self.device)
        self.scales = _scales(scales, self.device)

    def launch_of(self, tensor: int) -> int:
        """The number of the launch that covers a tensor."""
        return self._launch_of[tensor]

    @cached_property
    def masks(self) -> list[Tensor]:
        """The masks to be written."""
        return [self._memory.tensors[place] for place in self._members]

    def _entry(self, number: int, tensor: ScoredTensor, fused: Fused | None) -> Entry:
        alive, numel, mask = tensor.alive, tensor.numel, self._memory.addresses[self._members[number]]
        address = 0 if alive is None else alive.data_ptr()
        row = (address, mask, numel, self.first[number], self.groups[number], self.counted[number])
        if fused is None:
            even = (address | mask | numel) & 15 == 0
            return (GIVEN_PLAN, NO_TYPES, mask_kind(alive), even, number), (0, 0, 0, *row, 1, 1)
        plan, facts, _, broadcast = fused
        found = [fact.data_ptr() for fact in facts]
        even = (address | mask | numel | found[0] | found[-1] | found[len(found) // 2]) & 15 == 0
        key = plan, tuple([fact.dtype for fact in facts]), mask_kind(alive), even, -1
        return key, (*found, *(0, 0, 0)[len(found) :], *row, *broadcast)


class DeviceRows(NamedTuple):
    """The device side of a table. It holds addresses but no tensors, so it can be cached."""

    rows: Tensor
    launches: list[Launch]
    launch_of: list[int]


@lru_cache(maxsize=8)
def _device_rows(entries: tuple[Entry, ...], device: torch.device) -> DeviceRows:
    """Rows and launches of these entries. Cached: from one mask update to the next all addresses stay the same."""
    members: dict[Any, list[int]] = {}
    numbers: list[int] = []
    launch_of = []
    places: dict[Any, int] = {}
    for number, (key, row) in enumerate(entries):
        members.setdefault(key, []).append(number)
        launch_of.append(places.setdefault(key, len(places)))
        numbers += (*row, launch_of[-1])
    launches = [_launch(place, key, found, entries, device) for place, (key, found) in enumerate(members.items())]
    return DeviceRows(to_device(numbers, torch.int64, device), launches, launch_of)


def _launch(place: int, key: Any, members: list[int], entries: tuple[Entry, ...], device: torch.device) -> Launch:
    plan, types, alive, even, alone = key
    whole = even and all(entries[number][1][NUMEL] % TILE == 0 for number in members)
    aligned = WHOLE if whole else EVEN if even else ODD
    variant = KernelVariant(plan, (*types, torch.float32, torch.float32)[:3], alive, aligned)
    tensor = None if alone < 0 else alone
    starts = [entries[number][1][FIRST] for number in members]
    counts = [-(-entries[number][1][NUMEL] // TILE) for number in members]
    if len(members) == members[-1] + 1 - members[0]:
        return Launch(variant, place, None, starts[0], sum(counts), tensor)
    ranges = [torch.arange(s, s + count, device="cpu") for s, count in zip(starts, counts, strict=True)]
    tiles = to_device(torch.cat(ranges), torch.int32, device)
    return Launch(variant, place, tiles, 0, tiles.numel(), tensor)


@lru_cache(maxsize=8)
def layout(sizes: tuple[int, ...], tile: int, device: torch.device) -> tuple[list[int], Tensor]:
    """The first tile of each tensor, and the owner (tensor number, int32) of each tile."""
    counts = [-(-size // tile) for size in sizes]
    owners = torch.arange(len(sizes), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
    return [0, *accumulate(counts)], to_device(owners, torch.int32, device)


def _scales(scales: Sequence[Any], device: torch.device) -> Tensor:
    """The scale of every tensor; scales that are tensors on the device are never read by the host."""
    if not any(isinstance(scale, Tensor) for scale in scales):
        return _numbers(tuple(scales), device)
    tensors = [sent(torch.as_tensor(scale, dtype=torch.float64), device) for scale in scales]
    return torch.stack(tensors).float()


@lru_cache(maxsize=8)
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    return to_device(values, torch.float32, device)


def range_of(low: int, high: int, rank: int = 0) -> tuple[int, int, int, int]:
    """A row of `ranges`."""
    return low, high, max(0, (high - low).bit_length() - DIGIT), rank


ALL_KEYS = range_of(LOWEST_KEY, HIGHEST_KEY)


class SelectionState:
    """Device memory of `len(wanted)` selections: `wanted[i]` of `living[i]` weights are to be pruned by selection i.

    Per group: `ranges` (keys between which the cut lies), `histogram` (keys counted by bin), `counters`, `failed`.
    Per tensor: `nan_counts` and `tie_counts`. Candidates are the weights whose score lies in the range of their group:
    first as `words` (a position and 16 flags), then as `positions` and `keys`; `ties` are positions equal to the cut.
    """

    def __init__(self, table: Table, wanted: Sequence[int], living: Sequence[int]) -> None:
        groups, tensors, self.device = len(wanted), len(table.tensors), table.device
        self.groups = groups
        sizes = [4 * groups, groups, groups, groups * SLOTS, groups * COUNTERS, groups, tensors, tensors]
        memory = torch.zeros(sum(sizes), dtype=torch.int64, device=self.device)
        memory[: 6 * groups].copy_(_initial(tuple(wanted), tuple(living), self.device))
        parts = torch.split_with_sizes(memory, sizes)
        self.ranges, self.wanted, fractions, self.histogram, self.counters = parts[:5]
        self.failed, self.nan_counts, self.tie_counts = parts[5:]
        self.fractions = fractions.view(torch.float64)
        self.readback = memory[sum(sizes[:4]) : -tensors]  # counters, failed, nan_counts: what the host reads
        self.totals = self.counters  # summed over peers, if there are any
        self.free_candidates()

    def allocate_candidates(self, capacities: Sequence[int], ties: int) -> None:
        """Allocate room for this many candidates of each selection, and for `ties` scores equal to each cut."""
        starts, self.block_groups = layout(tuple(capacities), BLOCK, self.device)
        self.starts = _block_starts(tuple(starts), self.device)
        capacity, self.tie_capacity = starts[-1] * BLOCK, ties
        memory = torch.empty(2 * capacity + self.groups * ties, dtype=torch.int64, device=self.device)
        self.words, self.positions, self.ties = memory.split([capacity, capacity, self.groups * ties])
        self.keys = torch.empty(capacity, dtype=torch.int32, device=self.device)

    def free_candidates(self) -> None:
        """Drop the candidate buffers. Safe while kernels still run: the allocator reuses memory in stream order."""
        self.words = self.positions = self.ties = self.starts = self.histogram
        self.tie_capacity = 0
        self.block_groups = self.keys = self.counters
        self.inside = self.counters  # int32 candidates per tile after a careful sweep

    def failures_in(self, readback: Sequence[int]) -> Sequence[int]:
        """How each selection failed (0: it did not), from `readback` on the host."""
        return readback[COUNTERS * self.groups : (COUNTERS + 1) * self.groups]

    def nan_counts_in(self, readback: Sequence[int]) -> Sequence[int]:
        """How many scores of each tensor are NaN, from `readback` on the host."""
        first = (COUNTERS + 1) * self.groups
        return readback[first : first + self.nan_counts.numel()]

    def by_group(self, name: str) -> Tensor:
        """A per-group buffer with one row per selection."""
        flat: Tensor = getattr(self, name)
        return flat.view(self.groups, -1)


@lru_cache(maxsize=32)
def _initial(wanted: tuple[int, ...], living: tuple[int, ...], device: torch.device) -> Tensor:
    """Initial ranges, counts to prune, and these as fractions (float64 bits, so that one copy transfers everything).

    Cached: a device-to-device copy is faster than a transfer, and most mask updates ask for the same counts.
    """
    fractions = [count / max(1, alive) for count, alive in zip(wanted, living, strict=True)]
    bits = struct.unpack(f"{len(fractions)}q", struct.pack(f"{len(fractions)}d", *fractions))
    return to_device([*(ALL_KEYS * len(wanted)), *wanted, *bits], torch.int64, device)


@lru_cache(maxsize=32)
def _block_starts(blocks: tuple[int, ...], device: torch.device) -> Tensor:
    return to_device([block * BLOCK for block in blocks], torch.int64, device)
