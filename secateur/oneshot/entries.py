"""States that enter a block, kept: whoever asks for the gradients of late blocks alone need not run the early ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from secateur.model.distributed import SOLO, Ranks
from secateur.model.prunable import Site
from secateur.oneshot.blocks import first_tensor, standing_in

ROOM = {"cpu": 4 << 30, "cuda": 8 << 30}  # bytes of states that may be kept for blocks that are asked for later


class Entries:
    """Of some blocks, what enters them for every batch. Good until a weight before them changes."""

    def __init__(
        self, blocks: Sequence[nn.Module], batches: int, first_loss: Callable[[], float], ranks: Ranks = SOLO
    ) -> None:
        self._blocks, self._batches, self._first_loss, self._ranks = blocks, batches, first_loss, ranks
        self._inside = [{id(parameter) for parameter in block.parameters()} for block in blocks]
        self._states: dict[int, list[Tensor]] = {}
        self._returns: dict[int, int] = {}  # 0 if a block returns its state alone, or the length of a tuple with Nones
        self._trusted: dict[int, bool] = {}  # whether the loss is the same when blocks before this one are left out

    def block_of(self, site: Site) -> int:
        """The number of the block a site belongs to; 0 for what lies outside, before which nothing can be left out."""
        return next((n for n, inside in enumerate(self._inside) if id(site.parameter) in inside), 0)

    def first(self, sites: Sequence[Site]) -> int:
        """The number of the first block that any of these belongs to."""
        return min((self.block_of(site) for site in sites), default=0)

    def changed(self, sites: Sequence[Site]) -> None:
        """Forget what comes after these sites."""
        first = self.first(sites)
        self._states = {number: states for number, states in self._states.items() if number <= first}

    @contextmanager
    def beginning(self, sites: Sequence[Site]) -> Iterator[None]:
        """Inside, every batch runs once, in order; blocks before these sites are left out if what enters the first of
        theirs is known, and otherwise watched so that it will be."""
        number = self.first(sites)
        if number and number not in self._trusted:
            self._judge(number)
        if number == 0 or self._trusted.get(number) is False:
            yield
        elif number in self._states and self._trusted.get(number):
            with self._skipping(number):
                yield
        else:
            with self._watching(number):
                yield

    def _judge(self, number: int) -> None:
        """Settle whether blocks before this one may be left out, once the states that enter it are known. The first
        rank, which has the first batch, decides for all."""
        mine = int(self._trust(number)) if self._ranks.rank == 0 and number in self._states else -1
        verdict = self._ranks.tell("states of blocks", [mine])[0][0]
        if verdict >= 0:
            self._trusted[number] = bool(verdict)

    def _trust(self, number: int) -> bool:
        """Blocks may have other ways to each other than the state; then the loss differs, and nothing is left out."""
        whole = self._first_loss()
        try:
            with self._skipping(number):
                short = self._first_loss()
        except Exception:  # the model wanted more of an early block than its state
            short = float("nan")
        return abs(short - whole) <= 1e-6 * abs(whole)

    @contextmanager
    def _watching(self, last: int) -> Iterator[None]:
        found: dict[int, list[Tensor]] = {}

        def before(number: int) -> Any:
            def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
                state = given[0].detach().clone()
                room = ROOM.get(state.device.type, 0)
                if number == last or state.nbytes * self._batches * last <= room:
                    found.setdefault(number, []).append(state)

            return hook

        def after(number: int) -> Any:
            def hook(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
                more = output[1:] if isinstance(output, tuple) else ()
                if isinstance(output, Tensor) or all(part is None for part in more):
                    self._returns[number] = 0 if isinstance(output, Tensor) else len(output)

            return hook

        numbers = range(1, last + 1)
        handles = [self._blocks[n].register_forward_pre_hook(before(n)) for n in numbers]
        handles += [self._blocks[n - 1].register_forward_hook(after(n - 1)) for n in numbers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._states |= {n: states for n, states in found.items() if len(states) == self._batches}

    @contextmanager
    def _skipping(self, number: int) -> Iterator[None]:
        states = iter(self._states[number])

        def instead(place: int) -> Any:
            def forward(hidden: Tensor, *_: Any, **__: Any) -> Any:
                state = next(states).clone() if place == number - 1 else first_tensor(hidden)
                length = self._returns[place]
                return (state, *[None] * (length - 1)) if length else state

            return forward

        with standing_in(self._blocks[:number], [instead(place) for place in range(number)]):
            yield
