"""Which optimizer steps were taken, which were acted on, and when an update of the masks falls due."""

from __future__ import annotations

from collections.abc import Sequence

from secateur.errors import ScheduleError


class Clock:
    """Counts an optimizer's steps. Updates fall due every so many, and where the schedule ends."""

    def __init__(self, every: int, end: int | None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ScheduleError(f"every is a number of optimizer steps, at least 1; got {every!r}.")
        self.every, self.end = every, end
        self.taken = self.seen = self.settled = 0  # the last: steps by which no update is owed

    def behind(self) -> bool:
        """Whether steps were taken that have not been acted on; from now on they have."""
        behind, self.seen = self.taken != self.seen, self.taken
        return behind

    def due(self, held: bool) -> bool:
        """Whether an update falls due now, or fell due while updates were held back. While `held`, it stays owed."""
        now, last = self.taken, self.settled
        due = now // self.every > last // self.every or (self.end is not None and last < self.end <= now)
        if due and held:
            return False
        self.settled = now
        return due

    def saved(self) -> list[int]:
        return [self.taken, self.seen, self.settled]

    def restore(self, saved: Sequence[int]) -> None:
        self.taken, self.seen, self.settled = saved
