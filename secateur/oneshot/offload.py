"""A ferry: blocks that live on the host come to a device one after another, each for as long as it computes.

For models that are larger than the device. Weights may lie in memory that a file is mapped into, as transformers loads
them on a CPU: then they come from the disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from secateur.errors import FactError, ModelError
from secateur.model.prunable import Prunable
from secateur.oneshot.batches import Batch, Loss, device_of, quiet, to_device
from secateur.oneshot.blocks import find_blocks, standing_in
from secateur.selection.exact import sent

Deliver = Callable[[Tensor, Tensor], None]  # a parameter and its gradient on the device


class _Carried(torch.autograd.Function):
    """A copy of a parameter on the device. Its gradient is delivered there and never makes the way back."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, device: torch.device, deliver: Deliver | None) -> Tensor:
        ctx.parameter, ctx.deliver = parameter, deliver
        return sent(parameter.detach(), device, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.deliver(ctx.parameter, gradient)
        return None, None, None


class _Shell(nn.Module):
    """A block's own forward and weights without its hooks, which have run already."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self._own = block, block.forward

    def forward(self, *given: Any, **named: Any) -> Any:
        return self._own(*given, **named)


class Ferry:
    """Carries the blocks of a model that is on the host to a device."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device, self.blocks = device, blocks
        inside = [{id(t) for t in (*block.parameters(), *block.buffers())} for block in blocks]
        if sum(map(len, inside)) > len(set().union(*inside)):
            raise ModelError("Blocks of this model share parameters, so they cannot be streamed one after another.")
        if any(id(t) in block for t in _parameters_outside(model, blocks) for block in inside):
            raise ModelError("A block shares a parameter with what lies outside of it, so it cannot be streamed.")
        whole = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._outside = [t for key, t in whole.items() if not any(key in block for block in inside)]
        self._deliver: Deliver | None = None

    @contextmanager
    def crossing(self) -> Iterator[None]:
        """Inside, the model takes its inputs on the device and computes there; what lies outside of the blocks stays
        there all the while."""
        with landed(self._outside, self.device), standing_in(self.blocks, list(map(self._carried, self.blocks))):
            yield

    @contextmanager
    def delivering(self, deliver: Deliver) -> Iterator[None]:
        """Inside, gradients of the blocks' parameters go there."""
        try:
            self._deliver = deliver
            yield
        finally:
            self._deliver = None

    def _carried(self, block: nn.Module) -> Callable[..., Any]:
        shell = _Shell(block)

        def forward(*given: Any, **named: Any) -> Any:
            here: dict[str, Tensor] = {}
            for name, parameter in shell.named_parameters():
                here[name] = _Carried.apply(parameter, self.device, self._deliver)
                here[name].stands_for = parameter  # type: ignore[attr-defined]
            here |= {name: buffer.to(self.device) for name, buffer in shell.named_buffers()}
            given, named = to_device(given, self.device), to_device(named, self.device)
            return torch.func.functional_call(shell, here, given, named)

        return forward


def _parameters_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Parameters that are met without going through a block."""
    inner, waiting = {id(block) for block in blocks}, [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in inner:
            yield from module.parameters(recurse=False)
            waiting += module.children()


@contextmanager
def landed(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Inside, these are on the device; afterwards where they were, with what has become of them."""
    homes = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        yield
    finally:
        for tensor, home in zip(tensors, homes, strict=True):
            if tensor.data.data_ptr() != home.data_ptr() and not torch.equal(home, tensor.data.to(home.device)):
                home.copy_(tensor.data)  # only if it changed: what a file is mapped into stays the file's
            tensor.data = home


def ferry_for(model: nn.Module, batch: Batch, loss: Loss, sites: Sequence[Prunable], device: torch.device) -> Ferry:
    """A ferry for the blocks of this model, which are found by letting a batch cross."""

    def around(blocks: Sequence[nn.Module]) -> AbstractContextManager[None]:
        return Ferry(model, blocks, device).crossing()

    blocks = find_blocks(model, batch, loss, sites, around, device)
    if not blocks:
        raise ModelError("No blocks follow one another in this model, so it cannot be streamed: move it to the device.")
    return Ferry(model, blocks, device)


UNITS = {"GB": 10**9, "GIB": 1 << 30, "MB": 10**6, "MIB": 1 << 20}
SHARE = 0.94  # of the memory that may be used: the allocator does not fill every gap


@dataclass(frozen=True)
class Thrift:
    """Statistics in this type, those of so many weights on the device (None: all) and the others in host memory;
    activations kept or made again."""

    dtype: torch.dtype = torch.float32
    room: int | None = None
    again: bool = False
    reason: str = ""


def as_bytes(memory: str | int | None) -> int | None:
    """Bytes meant by "24GB", "22.5 GiB" or a number."""
    if memory is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", str(memory))
    if not isinstance(memory, str) and memory > 0:
        return int(memory)
    if match is None or match.group(2).upper() not in UNITS:
        raise FactError(f"memory is a number of bytes or something like '24GB' or '22.5GiB', not {memory!r}.")
    return int(float(match.group(1)) * UNITS[match.group(2).upper()])


@contextmanager
def made_again(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, what blocks compute on the way forward is not kept but computed again on the way back."""

    def wrapped(forward: Any) -> Any:
        return lambda *given, **named: checkpoint(forward, *given, use_reentrant=False, **named)

    with standing_in(blocks, [wrapped(block.forward) for block in blocks]):  # whatever stands there by then
        yield


def fits_twice(tensors: Sequence[Tensor], memory: int | None) -> bool:
    """Whether a device has plenty of room for a copy of these: an eighth of what is free in it, or less."""
    device = tensors[0].device
    if device.type != "cuda":
        return False
    left = _limit(device, memory) - torch.cuda.memory_allocated(device)
    return sum(tensor.nbytes for tensor in tensors) <= left / 8


def _limit(device: torch.device, memory: int | None) -> int:
    free, whole = torch.cuda.mem_get_info(device)
    return min(whole if memory is None else memory, free + torch.cuda.memory_reserved(device))


def plan(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    sites: Sequence[Prunable],
    blocks: Sequence[nn.Module],
    memory: int | None,
    statistics: int = 1,
    copies: int = 1,
    aside: int = 0,
) -> Thrift:
    """What fits: fp32 statistics on the device if they can (`copies` of them), else bf16, else with activations made
    again, else only part of them on the device and the others in host memory. `aside` bytes are for other things."""
    device = device_of(model)
    if device.type != "cuda":
        return Thrift()
    limit = _limit(device, memory)
    used = torch.cuda.memory_allocated(device) + aside
    weights = sum(site.parameter.numel() for site in sites)
    largest = max(site.parameter.numel() for site in sites)
    # A gradient, the same in fp32, its absolute value; and a statistic that came from the host.
    transient = largest * (sites[0].parameter.element_size() + 10)

    @cache
    def room(again: bool) -> float:
        held = activations(model, batch, loss, sites, blocks if again else ())
        return SHARE * limit - used - held - transient

    ways = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
    for dtype, again in ways if blocks else ways[:2]:
        left, each = room(again), dtype.itemsize * statistics * copies
        if weights * each <= left:
            found = Thrift(dtype, again=again)
            break
    else:
        if left <= 0:
            needed = f"{used / 1e9:.1f} GB that are taken and {(SHARE * limit - used - left) / 1e9:.1f} GB for a batch"
            raise FactError(f"{limit / 1e9:.1f} GB do not hold {needed}. Use smaller batches or more memory.")
        found = Thrift(torch.bfloat16, int(left // each), again)
    return replace(found, reason=_reason(found, weights, limit, used, left))


def _reason(found: Thrift, weights: int, limit: float, used: float, left: float) -> str:
    how = f"{'fp32' if found.dtype == torch.float32 else 'bf16'} statistics"
    if found.room is not None:
        how += f", those of {found.room / weights:.0%} of the weights on the GPU, the others in host memory"
    how += ", activations made again" if found.again else ""
    return f"Memory: {how} ({limit / 1e9:.1f} GB in all, {used / 1e9:.1f} taken, {left / 1e9:.1f} left beside a batch)."


def activations(
    model: nn.Module, batch: Batch, loss: Loss, sites: Sequence[Prunable], blocks: Sequence[nn.Module]
) -> int:
    """Bytes at most that a batch takes on its way forward, measured; without limit if it does not fit."""
    device = device_of(model)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    value: Tensor | None = None
    try:
        with quiet(model, [site.parameter for site in sites]), torch.enable_grad(), made_again(blocks):
            value = loss(model, to_device(batch, device))
            value.sum().backward(inputs=[sites[-1].parameter])
    except torch.OutOfMemoryError:
        return 1 << 62
    finally:
        del value
    return torch.cuda.max_memory_allocated(device) - before
