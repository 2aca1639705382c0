"""Which scores a kernel can compute in registers, from what, and with which constants."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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

# What kernels know how to compute. GIVEN reads scores that were evaluated beforehand.
GIVEN, MAGNITUDE, VARIANCE, MOMENTUM, BITTER0, BITTER6, WANDA = range(7)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Plan(NamedTuple):
    """How a score is fused: its formula, the facts it takes in order, and constants that hold for every tensor."""

    formula: int
    names: tuple[str, ...]
    eps: float = 0.0
    sixteenths: int = 0
    corrected: bool = False  # the first moment is scaled by Adam's bias correction

    @property
    def rough(self) -> bool:
        """Whether quick roots may be taken first. They take numbers below 1e-38 for zero, which an eps makes up for;
        without one (or with a root over a quotient) such a number's root would be lost."""
        return self.formula != BITTER6 and (self.eps >= 1e-20 or self.formula in (MAGNITUDE, WANDA))


_RULES: dict[Callable[..., Tensor], tuple[int, tuple[str, ...]]] = {
    magnitude: (MAGNITUDE, ("weight",)),
    bitter7: (VARIANCE, ("weight", "exp_avg_sq")),
    variance: (VARIANCE, ("weight", "exp_avg_sq")),
    fisher: (VARIANCE, ("weight", "exp_avg_sq")),
    bitter3: (MOMENTUM, ("weight", "exp_avg")),
    bitter4: (MOMENTUM, ("weight", "exp_avg")),
    bitter8: (MOMENTUM, ("weight", "exp_avg")),
    bitter0: (BITTER0, ("weight", "exp_avg", "exp_avg_sq")),
    bitter6: (BITTER6, ("weight", "exp_avg", "exp_avg_sq")),
    wanda: (WANDA, ("weight", "input_norm")),
}
_EXPONENTS = {bitter7: 4, fisher: 8}


class Fused(NamedTuple):
    """A score of one tensor as kernels take it."""

    plan: Plan
    facts: tuple[Tensor, ...]
    scale: Any = 1.0  # factor on the first moment; a number or a tensor of one
    spread: tuple[int, int] = (1, 1)  # the last fact of WANDA is read at (index // spread[0]) % spread[1]


def plan_for(score: Score) -> Plan | None:
    """How this score is fused, or None if torch must evaluate it."""
    rule = _RULES.get(score.function)
    if rule is None:
        return None
    options = {**score.defaults, **score.options}
    sixteenths = _EXPONENTS.get(score.function, int(16 * options.get("q", 0)))
    return Plan(*rule, float(options.get("eps", 0.0)), sixteenths, score.function is bitter8)


def fuse(plan: Plan, facts: Mapping[str, Any]) -> Fused | None:
    """The score of these facts as kernels take it, or None where it must be evaluated by torch."""
    tensors = tuple([facts[name] for name in plan.names])
    spread: tuple[int, int] | None = (1, 1)
    plain = tensors
    if plan.formula == WANDA:
        spread, plain = spread_of(tensors[-1]), tensors[:-1]
    for tensor in plain:
        if not tensor.is_contiguous() or tensor.dtype not in FLOATS:
            return None
    if spread is None:
        return None
    return Fused(plan, tensors, correction(facts["beta1"], facts["step"]) if plan.corrected else 1.0, spread)


def spread_of(tensor: Tensor) -> tuple[int, int] | None:
    """How an expanded tensor repeats: flat index i reads element (i // first) % second. None if it is laid out else."""
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


TILE = 4096  # weights per program: 32 for each of 128 threads

# Columns of a table's rows, one row per tensor; all int64.
FACT0, FACT1, FACT2, ALIVE, MASK, NUMEL, FIRST, GROUP, COUNTED, DIVISOR, MODULUS, LAUNCH = range(12)
COLUMNS = 12

GIVEN_PLAN = Plan(GIVEN, ())
NO_TYPES: tuple[torch.dtype, ...] = (torch.float32,)

NOTHING, BOOL, BITS = range(3)  # how a mask is stored: not at all, a byte a weight, a bit a weight


class Kind(NamedTuple):
    """What a kernel is compiled for, and its constants. Tensors of one kind share a launch."""

    plan: Plan
    dtypes: tuple[torch.dtype, ...]
    alive: int
    aligned: bool  # all addresses and sizes are multiples of 16, so that loads may be wide


@dataclass(frozen=True)
class Launch:
    """Tiles that are handled together: their numbers, and what they have in common."""

    kind: Kind
    number: int
    tiles: Tensor | None  # int32; None when they are `first`, `first + 1`, ...
    first: int
    count: int
    piece: int | None = None  # the only one, if its scores must be evaluated by torch and handed over


def new_masks(sizes: Sequence[int], kind: int, device: torch.device) -> list[Tensor]:
    """Memory for flat masks, in one piece. Bits come in whole words, since single ones are cleared atomically."""
    used = list(sizes) if kind == BOOL else [-(-size // 32) * 4 for size in sizes]
    room = [-(-size // 16) * 16 for size in used]
    parts = torch.empty(sum(room), dtype=torch.bool if kind == BOOL else torch.uint8, device=device).split(room)
    return [part if size == part.numel() else part[:size] for part, size in zip(parts, used, strict=True)]


def mask_kind(mask: Tensor | None) -> int:
    """How this mask is stored."""
    return NOTHING if mask is None else BOOL if mask.dtype == torch.bool else BITS


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor made on the host and sent without waiting."""
    if isinstance(values, Tensor):
        here = values.to(dtype)
        here = here.pin_memory() if device.type == "cuda" else here
    else:
        here = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return sent(here, device)


class Laid(NamedTuple):
    """What a table has on the device, for tensors at these addresses: it holds none of them, so it can be kept."""

    rows: Tensor
    launches: list[Launch]
    launch_of: list[int]


class Table:
    """The pieces of one or more selections (groups), ready for launches on one device."""

    def __init__(
        self, pieces: Sequence[ScoredTensor], groups: Sequence[int], masks: Sequence[Tensor], rank: int = 0
    ) -> None:
        self.pieces, self.groups, self.masks, self.device = pieces, groups, masks, pieces[0].device
        self.mask_kind = mask_kind(masks[0])
        self.counted = [not piece.replicated or rank == 0 for piece in pieces]
        self.first, self.owners = layout(tuple([piece.numel for piece in pieces]), TILE, self.device)
        self.tiles = self.first[-1]
        plans: dict[int, Plan | None] = {}
        scales: list[Any] = []
        entries = []
        for number, piece in enumerate(pieces):
            fused = None
            if piece.source is not None:
                score, facts = piece.source
                plan = plans[id(score)] if id(score) in plans else plans.setdefault(id(score), plan_for(score))
                fused = None if plan is None else fuse(plan, facts)
            scales.append(1.0 if fused is None else fused[2])
            entries.append(self._describe(number, piece, fused))
        self.rows, self.launches, self._launch_of = _lay(tuple(entries), self.device)
        self.scales = _scales(scales, self.device)

    def launch_of(self, piece: int) -> int:
        """The number of the launch a piece belongs to."""
        return self._launch_of[piece]

    def _describe(self, number: int, piece: ScoredTensor, fused: Fused | None) -> Entry:
        """All that kernels are told of a piece: what it has in common with those it shares a launch with (the fields
        of a Kind, and its own number if it goes alone), and its row of the table but for that launch."""
        alive, numel, place = piece.alive, piece.numel, self.masks[number].data_ptr()
        address = 0 if alive is None else alive.data_ptr()
        row = (address, place, numel, self.first[number], self.groups[number], self.counted[number])
        if fused is None:
            aligned = (address | place | numel) & 15 == 0
            return (GIVEN_PLAN, NO_TYPES, mask_kind(alive), aligned, number), (0, 0, 0, *row, 1, 1)
        plan, facts, _, spread = fused
        found = [fact.data_ptr() for fact in facts]
        aligned = (address | place | numel | found[0] | found[-1] | found[len(found) // 2]) & 15 == 0
        key = plan, tuple([fact.dtype for fact in facts]), mask_kind(alive), aligned, -1
        return key, (*found, *(0, 0, 0)[len(found) :], *row, *spread)


Entry = tuple[tuple[Any, ...], tuple[int, ...]]


@lru_cache(maxsize=8)
def _lay(entries: tuple[Entry, ...], device: torch.device) -> Laid:
    """Rows and launches for pieces so described. Masks are updated many times with everything in the same place."""
    members: dict[Any, list[int]] = {}
    numbers: list[int] = []
    launch_of = []
    places: dict[Any, int] = {}
    for number, (key, row) in enumerate(entries):
        members.setdefault(key, []).append(number)
        launch_of.append(places.setdefault(key, len(places)))
        numbers += (*row, launch_of[-1])
    launches = [_launch(place, key, found, entries, device) for place, (key, found) in enumerate(members.items())]
    return Laid(to_device(numbers, torch.int64, device), launches, launch_of)


def _launch(place: int, key: Any, members: list[int], entries: tuple[Entry, ...], device: torch.device) -> Launch:
    plan, types, alive, aligned, alone = key
    kind = Kind(plan, (*types, torch.float32, torch.float32)[:3], alive, aligned)
    piece = None if alone < 0 else alone
    starts = [entries[number][1][FIRST] for number in members]
    counts = [-(-entries[number][1][NUMEL] // TILE) for number in members]
    if len(members) == members[-1] + 1 - members[0]:
        return Launch(kind, place, None, starts[0], sum(counts), piece)
    ranges = [torch.arange(s, s + count, device="cpu") for s, count in zip(starts, counts, strict=True)]
    tiles = to_device(torch.cat(ranges), torch.int32, device)
    return Launch(kind, place, tiles, 0, tiles.numel(), piece)


@lru_cache(maxsize=8)
def layout(sizes: tuple[int, ...], tile: int, device: torch.device) -> tuple[list[int], Tensor]:
    """First tile of each tensor, and which tensor each tile is of (int32). The same every time, so it is kept."""
    counts = [-(-size // tile) for size in sizes]
    owners = torch.arange(len(sizes), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
    return [0, *accumulate(counts)], to_device(owners, torch.int32, device)


def _scales(scales: Sequence[Any], device: torch.device) -> Tensor:
    """The scale of every piece; those that are tensors on the device never visit the host."""
    if not any(isinstance(scale, Tensor) for scale in scales):
        return _numbers(tuple(scales), device)
    tensors = [sent(torch.as_tensor(scale, dtype=torch.float64), device) for scale in scales]
    return torch.stack(tensors).float()


@lru_cache(maxsize=8)
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    return to_device(values, torch.float32, device)


DIGIT = 13  # bits of a key that one histogram resolves
BINS = 1 << DIGIT
SLOTS = BINS + 2  # the last two count what is below and above the range
BLOCK = 1024  # collected words or keys per program
ORDERED = 128  # scores equal to the cut that a program puts in order
RUN = 16  # neighbours sampled together, and weights in a collected word

LOW, HIGH, SHIFT, RANK = range(4)  # columns of `ranges`: an interval of keys, the bits of its bins, a rank inside it
BELOW, INSIDE, WORDS, LISTED, OVER, EQUAL = range(6)  # columns of `counters`
COUNTERS = 8

MISSED, CROWDED = 1, 2  # how a selection fails: its range did not hold the cut, or too many scores equal the cut


def range_of(low: int, high: int, rank: int = 0) -> tuple[int, int, int, int]:
    """A row of `ranges`."""
    return low, high, max(0, (high - low).bit_length() - DIGIT), rank


WHOLE = range_of(LOWEST_KEY, HIGHEST_KEY)


class Board:
    """State of `len(wanted)` selections: how many weights each prunes, out of how many."""

    def __init__(self, table: Table, wanted: Sequence[int], living: Sequence[int]) -> None:
        groups, pieces, self.device = len(wanted), len(table.pieces), table.device
        self.groups = groups
        begun = _begun(tuple(wanted), tuple(living), self.device).clone()
        self.ranges, self.wanted, self.shares = begun.split([4 * groups, groups, groups])
        self.shares = self.shares.view(torch.float64)
        sizes = [groups * SLOTS, groups * COUNTERS, groups, pieces, pieces]
        zeros = torch.zeros(sum(sizes), dtype=torch.int64, device=self.device)
        self.counts, self.counters, self.failed, self.spoiled, self.equal = zeros.split(sizes)
        self.told = zeros[sizes[0] : -pieces]  # what the host reads at the end
        self.totals = self.counters  # summed over peers, where there are any
        self.release()

    def collect(self, rooms: Sequence[int], few: int) -> None:
        """Make room to collect so many weights of each selection, and to order so many that equal its cut."""
        starts, self.block_groups = layout(tuple(rooms), BLOCK, self.device)
        self.rooms = _starts(tuple(starts), self.device)
        room, self.few_room = starts[-1] * BLOCK, few
        memory = torch.empty(2 * room + self.groups * few, dtype=torch.int64, device=self.device)
        self.words, self.positions, self.few = memory.split([room, room, self.groups * few])
        self.keys = torch.empty(room, dtype=torch.int32, device=self.device)

    def release(self) -> None:
        """Let go of what was collected: launches so far have it still, since memory is handed on in stream order."""
        self.words = self.positions = self.few = self.rooms = self.counts
        self.few_room = 0
        self.block_groups = self.keys = self.counters
        self.inside = self.counters  # of every tile, once ties must be put in order

    def failed_in(self, told: Sequence[int]) -> Sequence[int]:
        """Of what the host has read: how each selection failed, 0 if it did not."""
        return told[COUNTERS * self.groups : (COUNTERS + 1) * self.groups]

    def spoiled_in(self, told: Sequence[int]) -> Sequence[int]:
        """And how many of each piece's scores are NaN."""
        first = (COUNTERS + 1) * self.groups
        return told[first : first + self.spoiled.numel()]

    def table_of(self, name: str) -> torch.Tensor:
        """`ranges` or `counters`, a row per selection."""
        flat: torch.Tensor = getattr(self, name)
        return flat.view(self.groups, -1)


@lru_cache(maxsize=32)
def _begun(wanted: tuple[int, ...], living: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """What selections know at first: ranges, counts wanted, and these as shares (as bits, so that one message holds
    all). Kept, since to copy it on the device is quicker than to send it again; masks are mostly updated alike."""
    shares = [count / max(1, all_) for count, all_ in zip(wanted, living, strict=True)]
    bits = struct.unpack(f"{len(shares)}q", struct.pack(f"{len(shares)}d", *shares))
    return to_device([*(WHOLE * len(wanted)), *wanted, *bits], torch.int64, device)


@lru_cache(maxsize=32)
def _starts(blocks: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return to_device([block * BLOCK for block in blocks], torch.int64, device)


SMALL = 1 << 18  # weights up to which a selection collects them all
FIRST_LOOK = 1 << 17  # scores sampled to tell the second, larger sample where to look closely
SAMPLE_SHIFT = 7  # one run of 128 is in the second sample
SIGMAS = 3.0  # half-width of the bracket, in standard deviations of the sampled rank: one update in 370 goes slowly
ROOM = 1 << 22  # scores collected in one batch of selections, 20 bytes each
BATCH = 32  # selections in one batch
GIVEN_TILES = 256  # tiles whose scores torch evaluates at a time, for scores without a kernel


@dataclass(frozen=True)
class Wish:
    """A selection: which pieces compete (numbers, in order), how many weights go, out of how many living."""

    pieces: Sequence[int]
    wanted: int
    living: int
    total: int


def sampling(total: int) -> int:
    """The shift of the second sample: finer where there is so much that the bracket must not hold the usual share."""
    return SAMPLE_SHIFT - 1 if total > 1 << 30 else min(SAMPLE_SHIFT, max(0, (total // FIRST_LOOK).bit_length() - 1))


def room_for(wish: Wish) -> int:
    """How many scores the bracket is expected to hold, and a third as many again."""
    if wish.total <= SMALL:
        return wish.total
    return min(wish.total, int(1.33 * SIGMAS * (wish.total << sampling(wish.total)) ** 0.5))


def few_for(total: int, groups: int) -> int:
    """How many scores equal to the cut can be put in order without another pass. In bf16 a value is shared by about
    one weight in 200,000."""
    return 1 << 12 if groups > 1 else 1 << 17 if total > 1 << 30 else 1 << 15


def batches(wishes: Sequence[Wish]) -> Iterator[list[int]]:
    """Selections of about the same size together, as many as there is room for."""
    for sampled in (False, True):
        batch: list[int] = []
        room = 0
        for number, wish in enumerate(wishes):
            if (wish.total > SMALL) != sampled or wish.wanted == 0:
                continue
            if batch and (len(batch) == BATCH or room + room_for(wish) > ROOM):
                yield batch
                batch, room = [], 0
            batch.append(number)
            room += room_for(wish)
        if batch:
            yield batch
