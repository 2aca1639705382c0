"""Blocks: the parts of a model that follow one another, found by watching data pass through them.

Whoever works block by block carries the hidden states along and never runs the model from its beginning again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.model.distributed import SOLO, Ranks
from secateur.model.prunable import Prunable
from secateur.oneshot.batches import Batch, device_of, quiet, real_positions, to_device

SAME = 0.02  # by how much, of their norm, states may differ that were computed in another order, in bf16 at worst

Forward = Callable[[nn.Module, Batch], Any]


@dataclass
class Chain:
    """Blocks, what enters the next one for every batch, and whatever else each block is called with."""

    blocks: list[nn.Module]
    states: list[Tensor]
    others: list[list[tuple[tuple[Any, ...], dict[str, Any]]]]  # of every batch, of every block
    real: list[list[Tensor]]  # of every batch, masks of what is not padding
    cast: torch.dtype | None = None  # the type that autocast was on with, if it was
    _tried: dict[int, bool] = field(default_factory=dict, repr=False)  # whether batches like this one may be merged

    def run(self, number: int, batch: int, block: nn.Module | None = None, state: Tensor | None = None) -> Tensor:
        """What a block makes of its state; or another block in its place, or of another state. Blocks may write into
        what they are given, so it is a copy."""
        given, named = self.others[batch][number]
        state = (self.states[batch] if state is None else state).clone()
        with torch.autocast(state.device.type, dtype=self.cast, enabled=self.cast is not None):
            return first_tensor((self.blocks[number] if block is None else block)(state, *given, **named))

    def advance(self, number: int) -> None:
        """Carry every state through a block."""
        for batch in range(len(self.states)):
            self.states[batch] = self.run(number, batch)

    def merged(self, most: int) -> Chain:
        """The same with batches put together, up to so many bytes of state, where whatever else blocks are called with
        is one and the same for all: then fewer and larger steps give the same."""
        groups: list[list[int]] = []
        for batch, state in enumerate(self.states):
            first = groups[-1][0] if groups else batch
            alike = state.shape[1:] == self.states[first].shape[1:] and state.dtype == self.states[first].dtype
            size = sum(self.states[b].nbytes for b in groups[-1]) + state.nbytes if groups else most + 1
            if size <= most and alike and self._agree(first, batch):
                groups[-1].append(batch)
            else:
                groups.append([batch])
        states = [torch.cat([self.states[b] for b in group]) for group in groups]
        real = [_joined([self.real[b] for b in group]) for group in groups]
        return Chain(self.blocks, states, [self.others[group[0]] for group in groups], real, self.cast)

    def _agree(self, one: int, other: int) -> bool:
        """Whether two batches may go through blocks as one: they are called alike, and the first block, tried with both
        together, gives what it gives to each. (Rows need not be what the first dimension counts.)"""
        if not _same(self.others[one], self.others[other]) or len(self.real[one]) != len(self.real[other]):
            return False
        if one not in self._tried:
            apart = torch.cat([self.run(0, one), self.run(0, other)])
            try:
                both = self.run(0, one, state=torch.cat([self.states[one], self.states[other]]))
                off = float((both - apart).float().norm() / apart.float().norm().clamp(min=1e-30))
            except (RuntimeError, IndexError, ValueError):  # something had a row for each member of the batch
                off = float("inf")
            self._tried[one] = off < SAME
        return self._tried[one]


def _joined(masks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Masks of several batches put together."""
    return [torch.cat(parts) for parts in zip(*masks, strict=True)]


def _same(one: Any, other: Any) -> bool:
    """Whether two calls were given the same; tensors that have a row for each member of a batch never are."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        spread = one.ndim < 2 or one.shape[0] == 1
        return spread and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple | list) and type(one) is type(other) and len(one) == len(other):
        return all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return all(_same(one[key], other[key]) for key in one)
    plain = one is None or isinstance(one, bool | int | float | str)
    return one is other or (plain and type(one) is type(other) and one == other)


def first_tensor(output: Any) -> Tensor:
    """The hidden state in what a block returns."""
    found = output[0] if isinstance(output, tuple | list) else getattr(output, "hidden_states", output)
    assert isinstance(found, Tensor)
    return found


@contextmanager
def standing_in(blocks: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Inside, blocks do this when they are called; afterwards what they did, also where another library had a say."""
    own = [vars(block).get("forward") for block in blocks]
    try:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward
        yield
    finally:
        for block, before in zip(blocks, own, strict=True):
            vars(block).pop("forward", None)
            if before is not None:
                block.forward = before


def find_blocks(
    model: nn.Module,
    batch: Batch,
    forward: Forward,
    sites: Sequence[Prunable],
    around: Callable[[Sequence[nn.Module]], AbstractContextManager[None]] = lambda _: nullcontext(),
    device: torch.device | None = None,
) -> list[nn.Module]:
    """The list of modules that holds most of the sites and is passed through in order, or nothing. Each list is tried
    inside whatever is to be put `around` it."""
    inside = {id(site.parameter): site.parameter.numel() for site in sites}

    def weight_of(module: nn.Module) -> int:
        return sum(inside.get(id(p), 0) for p in module.parameters())

    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    lists = [blocks for blocks in lists if len(blocks) > 1]
    for blocks in sorted(lists, key=lambda blocks: -sum(map(weight_of, blocks))):
        if not weight_of(nn.ModuleList(blocks)):
            continue
        with around(blocks):
            follow = _follow(model, blocks, to_device(batch, device or device_of(model)), forward)
        if follow:
            return blocks
    return []


def _follow(model: nn.Module, blocks: Sequence[nn.Module], batch: Batch, forward: Forward) -> bool:
    """Whether each block is called once, in order, with what the one before it returned, unchanged since."""
    came: list[tuple[int, Any]] = []
    went: list[Any] = []

    def entering(number: int) -> Any:
        return lambda _, given: came.append((number, _marks(given[0] if given else None)))

    def leaving(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        went.append(_marks(output[0] if isinstance(output, tuple | list) and output else output))

    handles = [block.register_forward_pre_hook(entering(number)) for number, block in enumerate(blocks)]
    handles += [block.register_forward_hook(leaving) for block in blocks]
    try:
        with quiet(model), torch.no_grad():
            forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if [number for number, _ in came] != list(range(len(blocks))) or came[0][1] is None:
        return False
    return all(mark is not None and mark == before for before, (_, mark) in zip(went, came[1:], strict=False))


def _marks(state: Any) -> tuple[Any, ...] | None:
    """What tells a state from any other, and from itself once somebody has written into it."""
    return (state.data_ptr(), state.shape, state._version) if isinstance(state, Tensor) else None


def enter(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    batches: Sequence[Batch],
    forward: Forward,
    device: torch.device | None = None,
) -> Chain | None:
    """The chain with every batch standing before its first block, by one forward pass for each; nothing if some batch
    does not pass all blocks in order."""
    chain = Chain(list(blocks), [], [], [])
    passed: list[int] = []

    def hook(number: int) -> Any:
        def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            passed.append(number)
            if number == 0:
                chain.states.append(given[0].detach().clone())
                chain.others.append([])
                kind = given[0].device.type
                chain.cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            chain.others[-1].append((given[1:], named))

        return before

    handles = [b.register_forward_pre_hook(hook(n), with_kwargs=True) for n, b in enumerate(blocks)]
    try:
        with quiet(model), torch.no_grad():
            for batch in batches:
                batch = to_device(batch, device or device_of(model))
                chain.real.append(real_positions(model, batch))
                forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return chain if passed == list(range(len(blocks))) * len(batches) else None


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

    def block_of(self, site: Prunable) -> int:
        """The number of the block a site belongs to; 0 for what lies outside, before which nothing can be left out."""
        return next((n for n, inside in enumerate(self._inside) if id(site.parameter) in inside), 0)

    def first(self, sites: Sequence[Prunable]) -> int:
        """The number of the first block that any of these belongs to."""
        return min((self.block_of(site) for site in sites), default=0)

    def changed(self, sites: Sequence[Prunable]) -> None:
        """Forget what comes after these sites."""
        first = self.first(sites)
        self._states = {number: states for number, states in self._states.items() if number <= first}

    @contextmanager
    def beginning(self, sites: Sequence[Prunable]) -> Iterator[None]:
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
