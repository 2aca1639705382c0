"""Blocks: the modules of a model that run one after another, such as transformer layers, found by running a batch.

`Chain` runs blocks one at a time on stored hidden states. `HiddenStates` caches the inputs of blocks, so that gradients
of late blocks do not run the early ones again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.model.distributed import SOLO, Ranks
from secateur.model.prunable import Prunable
from secateur.oneshot.batches import (
    Batch,
    Padding,
    device_of,
    eval_mode,
    hooked,
    is_out_of_memory,
    padding_masks,
    to_device,
)

MERGE_TOLERANCE = 0.02  # relative difference of outputs that bf16 and another order of summation explain
LOSS_TOLERANCE = 1e-6  # relative difference of losses with and without skipped blocks
CACHE_BYTES = 4 << 30  # of hidden states kept for blocks that may be asked for later
CUDA_CACHE_BYTES = 8 << 30

Forward = Callable[[nn.Module, Batch], Any]


def find_blocks(
    model: nn.Module,
    batch: Batch,
    forward: Forward,
    prunables: Sequence[Prunable],
    around: Callable[[Sequence[nn.Module]], AbstractContextManager[None]] = lambda _: nullcontext(),
    device: torch.device | None = None,
) -> list[nn.Module]:
    """The module list that holds most of the prunable weights and runs in order; empty if there is none.

    `around` is a context manager in which each candidate list is tried.
    """
    sizes = {id(prunable.parameter): prunable.parameter.numel() for prunable in prunables}

    def weights_in(module: nn.Module) -> int:
        return sum(sizes.get(id(p), 0) for p in module.parameters())

    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    lists = [blocks for blocks in lists if len(blocks) > 1]
    for blocks in sorted(lists, key=lambda blocks: -sum(map(weights_in, blocks))):
        if not weights_in(nn.ModuleList(blocks)):
            continue
        with around(blocks):
            in_order = _run_in_order(model, blocks, to_device(batch, device or device_of(model)), forward)
        if in_order:
            return blocks
    return []


def _run_in_order(model: nn.Module, blocks: Sequence[nn.Module], batch: Batch, forward: Forward) -> bool:
    """Whether each block runs once, in order, on exactly the tensor that the block before it returned."""
    inputs: list[tuple[int, Any]] = []
    outputs: list[Any] = []

    def before(number: int) -> Any:
        return lambda _, args: inputs.append((number, _identity(args[0] if args else None)))

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(_identity(output[0] if isinstance(output, tuple | list) and output else output))

    hooks = [partial(block.register_forward_pre_hook, before(number)) for number, block in enumerate(blocks)]
    hooks += [partial(block.register_forward_hook, after) for block in blocks]
    with hooked(hooks), eval_mode(model), torch.no_grad():
        forward(model, batch)
    if [number for number, _ in inputs] != list(range(len(blocks))) or inputs[0][1] is None:
        return False
    return all(found is not None and found == left for left, (_, found) in zip(outputs, inputs[1:], strict=False))


def _identity(state: Any) -> tuple[Any, ...] | None:
    """Identifies a tensor and its version, which changes when it is written in place."""
    return (state.data_ptr(), state.shape, state._version) if isinstance(state, Tensor) else None


@contextmanager
def replaced_forward(blocks: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Temporarily replaces each block's `forward`; restores also one that another library had put on the instance."""
    originals = [vars(block).get("forward") for block in blocks]
    try:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward
        yield
    finally:
        for block, original in zip(blocks, originals, strict=True):
            vars(block).pop("forward", None)
            if original is not None:
                block.forward = original


def hidden_state(output: Any) -> Tensor:
    """The hidden state in a block's output."""
    found = output[0] if isinstance(output, tuple | list) else getattr(output, "hidden_states", output)
    assert isinstance(found, Tensor)
    return found


@dataclass
class Chain:
    """Blocks, the hidden state of every batch before the next block, and the other arguments of every block."""

    blocks: list[nn.Module]
    states: list[Tensor]
    arguments: list[list[tuple[tuple[Any, ...], dict[str, Any]]]]  # by batch, then by block
    padding: list[Padding]  # masks of every batch
    autocast: torch.dtype | None = None  # the dtype of autocast, if it was on
    _mergeable: dict[int, bool] = field(default_factory=dict, repr=False)  # by the first batch of a group

    def run(self, number: int, batch: int, block: nn.Module | None = None, state: Tensor | None = None) -> Tensor:
        """The output of a block for a batch; `block` and `state` replace its own.

        The state is copied, because blocks may write into their inputs.
        """
        args, kwargs = self.arguments[batch][number]
        state = (self.states[batch] if state is None else state).clone()
        with torch.autocast(state.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return hidden_state((self.blocks[number] if block is None else block)(state, *args, **kwargs))

    def advance(self, number: int) -> None:
        """Run every state through a block."""
        for batch in range(len(self.states)):
            self.states[batch] = self.run(number, batch)

    def merged(self, limit: int) -> Chain:
        """The same chain with batches concatenated up to `limit` bytes of state: fewer and larger steps.

        Only batches whose blocks are called with equal arguments are merged.
        """
        groups: list[list[int]] = []
        for batch, state in enumerate(self.states):
            first = groups[-1][0] if groups else batch
            alike = state.shape[1:] == self.states[first].shape[1:] and state.dtype == self.states[first].dtype
            size = sum(self.states[b].nbytes for b in groups[-1]) + state.nbytes if groups else limit + 1
            if size <= limit and alike and self._can_merge(first, batch):
                groups[-1].append(batch)
            else:
                groups.append([batch])
        states = [torch.cat([self.states[b] for b in group]) for group in groups]
        padding = [_concatenated([self.padding[b] for b in group]) for group in groups]
        return Chain(self.blocks, states, [self.arguments[group[0]] for group in groups], padding, self.autocast)

    def _can_merge(self, one: int, other: int) -> bool:
        """Whether two batches may run as one: equal arguments, and the first block gives the same for both together.

        The trial is needed because the first dimension need not be the batch.
        """
        shapes = [{name: mask.shape[1:] for name, mask in self.padding[b].items()} for b in (one, other)]
        if not _equal(self.arguments[one], self.arguments[other]) or shapes[0] != shapes[1]:
            return False
        if one not in self._mergeable:
            apart = torch.cat([self.run(0, one), self.run(0, other)])
            try:
                both = self.run(0, one, state=torch.cat([self.states[one], self.states[other]]))
                difference = float((both - apart).float().norm() / apart.float().norm().clamp(min=1e-30))
            except (RuntimeError, IndexError, ValueError) as error:
                if not _is_shape_error(error):
                    raise
                difference = float("inf")  # an argument has a row for each member of the batch
            self._mergeable[one] = difference < MERGE_TOLERANCE
        return self._mergeable[one]


def _is_shape_error(error: Exception) -> bool:
    """Whether code may have raised this because it got another shape than usual.

    torch raises a plain RuntimeError for shapes; its subclasses (accelerator errors, NotImplementedError) and a lack
    of memory mean something else.
    """
    return not is_out_of_memory(error) and (type(error) is RuntimeError or not isinstance(error, RuntimeError))


def _concatenated(masks: Sequence[Padding]) -> Padding:
    """Padding masks of several batches as those of one."""
    return {name: torch.cat([batch[name] for batch in masks]) for name in masks[0]}


def _equal(one: Any, other: Any) -> bool:
    """Whether two calls had equal arguments; tensors with a row for each member of a batch never count as equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        shared = one.ndim < 2 or one.shape[0] == 1
        return shared and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple | list) and type(one) is type(other) and len(one) == len(other):
        return all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return all(_equal(one[key], other[key]) for key in one)
    plain = one is None or isinstance(one, bool | int | float | str)
    return one is other or (plain and type(one) is type(other) and one == other)


def capture_chain(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    batches: Sequence[Batch],
    forward: Forward,
    device: torch.device | None = None,
) -> Chain | None:
    """A chain with every batch before the first block, from one forward pass each; None if a batch skips a block."""
    chain = Chain(list(blocks), [], [], [])
    visited: list[int] = []

    def hook(number: int) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            visited.append(number)
            if number == 0:
                chain.states.append(args[0].detach().clone())
                chain.arguments.append([])
                kind = args[0].device.type
                chain.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            chain.arguments[-1].append((args[1:], kwargs))

        return before

    hooks = [partial(b.register_forward_pre_hook, hook(n), with_kwargs=True) for n, b in enumerate(blocks)]
    with hooked(hooks), eval_mode(model), torch.no_grad():
        for batch in batches:
            batch = to_device(batch, device or device_of(model))
            chain.padding.append(padding_masks(model, batch))
            forward(model, batch)
    return chain if visited == list(range(len(blocks))) * len(batches) else None


class HiddenStates:
    """A cache of the hidden states that enter blocks, for every batch; valid until a weight before a block changes."""

    def __init__(
        self, blocks: Sequence[nn.Module], batches: int, first_loss: Callable[[], float], ranks: Ranks = SOLO
    ) -> None:
        self._blocks, self._batches, self._first_loss, self._ranks = blocks, batches, first_loss, ranks
        self._parameters = [{id(parameter) for parameter in block.parameters()} for block in blocks]
        self._states: dict[int, list[Tensor]] = {}
        self._lengths: dict[int, int] = {}  # 0 if a block returns a tensor, or the length of (state, None, ...)
        self._skippable: dict[int, bool] = {}  # whether the loss stays the same without the blocks before this one

    def first_block(self, prunables: Sequence[Prunable]) -> int:
        """The number of the first block that has one of these weights; 0 if one lies outside of all blocks."""
        return min((self._block_of(prunable) for prunable in prunables), default=0)

    def _block_of(self, prunable: Prunable) -> int:
        return next((n for n, inside in enumerate(self._parameters) if id(prunable.parameter) in inside), 0)

    def invalidate(self, prunables: Sequence[Prunable]) -> None:
        """Drop the states after these weights, which have changed."""
        first = self.first_block(prunables)
        self._states = {number: states for number, states in self._states.items() if number <= first}

    @contextmanager
    def from_cache(self, prunables: Sequence[Prunable]) -> Iterator[None]:
        """Inside, run every batch once, in order: blocks before these weights are skipped if the cache has the state
        that follows them. Otherwise they run, and the cache is filled."""
        number = self.first_block(prunables)
        if number and number not in self._skippable:
            self._decide(number)
        if number == 0 or self._skippable.get(number) is False:
            yield
        elif number in self._states and self._skippable.get(number):
            with self._skipping(number):
                yield
        else:
            with self._recording(number):
                yield

    def _decide(self, number: int) -> None:
        """Decide whether the blocks before this one can be skipped, once its states are cached. The first rank, which
        has the first batch, decides for all."""
        mine = int(self._can_skip(number)) if self._ranks.rank == 0 and number in self._states else -1
        decision = self._ranks.tell("states of blocks", [mine])[0][0]
        if decision >= 0:
            self._skippable[number] = bool(decision)

    def _can_skip(self, number: int) -> bool:
        """Whether the loss stays the same without the early blocks; it does not if a model uses more than their state,
        such as a skip connection."""
        whole = self._first_loss()
        try:
            with self._skipping(number):
                short = self._first_loss()
        except (
            RuntimeError,
            TypeError,
            AttributeError,
            LookupError,
            ValueError,
            AssertionError,
            StopIteration,
        ) as error:
            if not _is_shape_error(error):
                raise
            return False  # the model reads more of an early block than its state
        return abs(short - whole) <= LOSS_TOLERANCE * abs(whole)

    @contextmanager
    def _recording(self, last: int) -> Iterator[None]:
        """Caches the inputs of block `last`, and of those before it where memory allows."""
        found: dict[int, list[Tensor]] = {}

        def before(number: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
                state = args[0].detach().clone()
                limit = CUDA_CACHE_BYTES if state.is_cuda else CACHE_BYTES
                if number == last or state.nbytes * self._batches * last <= limit:
                    found.setdefault(number, []).append(state)

            return hook

        def after(number: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                more = output[1:] if isinstance(output, tuple) else ()
                if isinstance(output, Tensor) or all(value is None for value in more):
                    self._lengths[number] = 0 if isinstance(output, Tensor) else len(output)

            return hook

        numbers = range(1, last + 1)
        hooks = [partial(self._blocks[n].register_forward_pre_hook, before(n)) for n in numbers]
        hooks += [partial(self._blocks[n - 1].register_forward_hook, after(n - 1)) for n in numbers]
        with hooked(hooks):
            yield
        self._states |= {n: states for n, states in found.items() if len(states) == self._batches}

    @contextmanager
    def _skipping(self, number: int) -> Iterator[None]:
        """Replaces the blocks before this one by functions that pass on the cached state."""
        states = iter(self._states[number])

        def skip(place: int) -> Any:
            def forward(hidden: Tensor, *_: Any, **__: Any) -> Any:
                state = next(states).clone() if place == number - 1 else hidden_state(hidden)
                length = self._lengths[place]
                return (state, *[None] * (length - 1)) if length else state

            return forward

        with replaced_forward(self._blocks[:number], [skip(place) for place in range(number)]):
            yield
