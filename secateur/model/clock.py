"""Which optimizer steps were taken, which were acted on, and when an update of the masks falls due."""

from __future__ import annotations

from collections.abc import Sequence

from secateur.errors import ScheduleError


class Clock:
    """Counts optimizer steps. Updates fall due every so many, and where the schedule ends.

    Of several optimizers a step counts when every one of them has stepped since the last that counted.
    """

    def __init__(self, every: int, end: int | None, optimizers: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ScheduleError(f"every is a number of optimizer steps, at least 1; got {every!r}.")
        self.every, self.end = every, end
        self.taken = self.seen = self.settled = 0  # the last: steps by which no update is owed
        self.counts = [0] * optimizers  # steps of each optimizer in this process
        self._ahead: set[int] = set()  # those that have stepped since the last step that counted

    def tick(self, number: int = 0) -> None:
        """This optimizer has completed a step."""
        self.counts[number] += 1
        self._ahead.add(number)
        if len(self._ahead) == len(self.counts):
            self.taken += 1
            self._ahead.clear()

    @property
    def midway(self) -> bool:
        """Whether some optimizers have taken the next step and others have not."""
        return bool(self._ahead)

    def behind(self) -> int:
        """How many steps were taken that have not been acted on; from now on they have."""
        behind, self.seen = self.taken - self.seen, self.taken
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
