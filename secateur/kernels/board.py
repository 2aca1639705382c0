"""The board: what a batch of selections writes down on the device while it works, so that the host need not look."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import torch

from secateur.kernels.table import Table, layout, to_device
from secateur.selection.pieces import HIGHEST_KEY, LOWEST_KEY

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
