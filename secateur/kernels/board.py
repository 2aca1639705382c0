"""The board: what a batch of selections writes down on the device while it works, so that the host need not look."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from secateur.kernels.table import Table, to_device
from secateur.pieces import HIGHEST_KEY, LOWEST_KEY

DIGIT = 16  # bits of a key that one histogram resolves, so two settle all 32
BINS = 1 << DIGIT
SLOTS = BINS + 2  # the last two count what is below and above the range
BLOCK = 4096  # collected keys per program
FEW = 1024  # scores equal to the cut that are put in order without another pass
RUN = 16  # neighbours sampled together

LOW, HIGH, SHIFT, RANK = range(4)  # columns of `ranges`: an interval of keys, the bits of its bins, a rank inside it
BELOW, TAKEN, OVER, EQUAL = range(4)  # columns of `counters`

MISSED, CROWDED = 1, 2  # how a selection fails: its range did not hold the cut, or more than FEW scores equal the cut


def range_of(low: int, high: int, rank: int = 0) -> tuple[int, int, int, int]:
    """A row of `ranges`."""
    return low, high, max(0, (high - low).bit_length() - DIGIT), rank


WHOLE = range_of(LOWEST_KEY, HIGHEST_KEY)


class Board:
    """State of `len(wanted)` selections: how many weights each prunes, out of how many, with room to collect some."""

    def __init__(self, table: Table, wanted: Sequence[int], living: Sequence[int], rooms: Sequence[int]) -> None:
        groups, pieces, device = len(wanted), len(table.pieces), table.device
        starts = [0, *accumulate(-(-room // BLOCK) * BLOCK for room in rooms)]
        blocks = torch.arange(groups, device="cpu").repeat_interleave((torch.tensor(starts).diff() // BLOCK).cpu())
        numbers = [*(value for _ in wanted for value in WHOLE), *wanted, *starts]
        numbers = to_device(numbers, torch.int64, device)
        self.ranges, self.wanted, self.rooms = numbers.split([4 * groups, groups, groups + 1])
        shares = [count / max(1, all_) for count, all_ in zip(wanted, living, strict=True)]
        self.shares = to_device(shares, torch.float64, device)
        self.block_groups = to_device(blocks, torch.int32, device)
        zeros = torch.zeros(groups * (SLOTS + 5) + 2 * pieces, dtype=torch.int64, device=device)
        parts = zeros.split([groups * SLOTS, groups * 4, groups, pieces, pieces])
        self.counts, self.counters, self.failed, self.spoiled, self.equal = parts
        self.told = zeros[groups * SLOTS : groups * (SLOTS + 5) + pieces]  # what the host reads at the end
        self.totals = self.counters  # summed over peers, where there are any
        self.inside = torch.empty(table.tiles, dtype=torch.int32, device=device)
        self.positions = torch.empty(starts[-1], dtype=torch.int64, device=device)
        self.keys = torch.empty(starts[-1], dtype=torch.int32, device=device)
        self.few = torch.empty(groups * FEW, dtype=torch.int64, device=device)
        self.groups = groups

    def release(self) -> None:
        """Let go of what was collected. Launches so far have it still: memory is handed on in stream order."""
        self.rooms.zero_()
        self.positions = self.positions[:0].clone()
        self.keys = self.keys[:0].clone()
        self.few = self.few[:0].clone()
