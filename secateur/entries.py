"""States that enter a block, kept: whoever asks for the gradients of late blocks alone need not run the early ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from secateur.blocks import first_tensor
from secateur.sites import Site

ROOM = {"cpu": 4 << 30, "cuda": 8 << 30}  # bytes of states that may be kept for blocks that are asked for later


class Entries:
    """Of some blocks, what enters them for every batch. Good until a weight before them changes."""

    def __init__(self, blocks: Sequence[nn.Module], batches: int) -> None:
        self._blocks, self._batches = blocks, batches
        self._inside = [{id(parameter) for parameter in block.parameters()} for block in blocks]
        self._states: dict[int, list[Tensor]] = {}
        self._plain: dict[int, bool] = {}  # whether a block returns its state alone, not in a tuple

    def block_of(self, site: Site) -> int:
        """The number of the block a site belongs to; 0 for what lies outside, before which nothing can be left out."""
        return next((n for n, inside in enumerate(self._inside) if id(site.parameter) in inside), 0)

    def changed(self, sites: Sequence[Site]) -> None:
        """Forget what comes after these sites."""
        first = min((self.block_of(site) for site in sites), default=0)
        self._states = {number: states for number, states in self._states.items() if number <= first}

    @contextmanager
    def beginning(self, sites: Sequence[Site]) -> Iterator[None]:
        """Inside, every batch runs once, in order; blocks before these sites are left out if what enters the first of
        theirs is known, and otherwise watched so that it will be."""
        number = min((self.block_of(site) for site in sites), default=0)
        if number == 0:
            yield
        elif number in self._states:
            with self._skipping(number):
                yield
        else:
            with self._watching(number):
                yield

    @contextmanager
    def _watching(self, last: int) -> Iterator[None]:
        found: dict[int, list[Tensor]] = {}

        def before(number: int) -> Any:
            def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
                state = given[0].detach()
                room = ROOM.get(state.device.type, 0)
                if number == last or state.nbytes * self._batches * last <= room:
                    found.setdefault(number, []).append(state)

            return hook

        def after(number: int) -> Any:
            def hook(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
                self._plain[number] = isinstance(output, Tensor)

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
                state = next(states) if place == number - 1 else first_tensor(hidden)
                return state if self._plain[place] else (state,)

            return forward

        early = self._blocks[:number]
        own = [vars(block).get("forward") for block in early]
        try:
            for place, block in enumerate(early):
                block.forward = instead(place)
            yield
        finally:
            for block, before in zip(early, own, strict=True):
                del block.forward
                if before is not None:
                    block.forward = before
