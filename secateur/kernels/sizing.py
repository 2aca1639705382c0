"""How large a sample is taken, how much room is made, and which selections share a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SMALL = 1 << 18  # weights up to which a selection collects them all
FIRST_LOOK = 1 << 17  # scores sampled to tell the second, larger sample where to look closely
SHIFT = 7  # one run of 128 is in the second sample
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
    return SHIFT - 1 if total > 1 << 30 else min(SHIFT, max(0, (total // FIRST_LOOK).bit_length() - 1))


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
