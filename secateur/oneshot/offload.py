"""Calibration in limited memory: block offload for models larger than the device, and a memory plan for gradients.

`BlockOffload` keeps a model on the host and copies one block at a time to the device. Weights that transformers loaded
on the CPU are mapped from their file, so they stream from disk. `plan_memory` picks the dtype and placement of gradient
statistics and activation checkpointing to fit a CUDA device; other devices have no plan.
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
from secateur.model.distributed import Ranks
from secateur.model.prunable import Prunable
from secateur.oneshot.batches import Batch, Loss, device_of, eval_mode, to_device
from secateur.oneshot.blocks import find_blocks, replaced_forward
from secateur.selection.exact import sent

UNITS = {"GB": 10**9, "GIB": 1 << 30, "MB": 10**6, "MIB": 1 << 20}
USABLE = 0.94  # of the memory; the rest is lost to fragmentation of the allocator

OnGradient = Callable[[Tensor, Tensor], None]  # a parameter on the host, and its gradient on the device


class _CopyToDevice(torch.autograd.Function):
    """A copy of a parameter on the device. Its gradient goes to a callback there, not back to the host."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, device: torch.device, on_gradient: OnGradient | None) -> Tensor:
        ctx.parameter, ctx.on_gradient = parameter, on_gradient
        return sent(parameter.detach(), device, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.on_gradient(ctx.parameter, gradient)
        return None, None, None


class _WithoutHooks(nn.Module):
    """A block's forward and weights without its hooks, which have run already."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self._forward = block, block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class BlockOffload:
    """Runs a model that is on the host on a device, with the weights of one block there at a time."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device, self.blocks = device, blocks
        inside = [{id(t) for t in (*block.parameters(), *block.buffers())} for block in blocks]
        if sum(map(len, inside)) > len(set().union(*inside)):
            raise ModelError("Blocks of this model share parameters, so they cannot be offloaded: move it to a device.")
        if any(id(t) in block for t in _parameters_outside(model, blocks) for block in inside):
            raise ModelError(
                "A block shares a parameter with a module outside of the blocks, so it cannot be offloaded: move the"
                " model to a device."
            )
        everything = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._outside = [t for key, t in everything.items() if not any(key in block for block in inside)]
        self._on_gradient: OnGradient | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the model takes its inputs on the device and computes there; weights outside of the blocks stay on
        the device all the time."""
        with moved(self._outside, self.device), replaced_forward(self.blocks, list(map(self._forward, self.blocks))):
            yield

    @contextmanager
    def gradients_to(self, on_gradient: OnGradient) -> Iterator[None]:
        """Inside, calls this with every gradient of the blocks' parameters."""
        try:
            self._on_gradient = on_gradient
            yield
        finally:
            self._on_gradient = None

    def _forward(self, block: nn.Module) -> Callable[..., Any]:
        module = _WithoutHooks(block)

        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors: dict[str, Tensor] = {}
            for name, parameter in module.named_parameters():
                tensors[name] = _CopyToDevice.apply(parameter, self.device, self._on_gradient)
                tensors[name].offloaded_from = parameter  # type: ignore[attr-defined]
            tensors |= {name: buffer.to(self.device) for name, buffer in module.named_buffers()}
            args, kwargs = to_device(args, self.device), to_device(kwargs, self.device)
            return torch.func.functional_call(module, tensors, args, kwargs)

        return forward


def offload_for(
    model: nn.Module, batch: Batch, loss: Loss, prunables: Sequence[Prunable], device: torch.device
) -> BlockOffload:
    """Block offload for this model; its blocks are found by running a batch on the device."""

    def around(blocks: Sequence[nn.Module]) -> AbstractContextManager[None]:
        return BlockOffload(model, blocks, device).active()

    blocks = find_blocks(model, batch, loss, prunables, around, device)
    if not blocks:
        raise ModelError("This model has no blocks that run in order, so it cannot be offloaded: move it to a device.")
    return BlockOffload(model, blocks, device)


def _parameters_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Parameters that can be reached without going through a block."""
    excluded, pending = {id(block) for block in blocks}, [model]
    while pending:
        module = pending.pop()
        if id(module) not in excluded:
            yield from module.parameters(recurse=False)
            pending += module.children()


@contextmanager
def moved(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Temporarily moves tensors to the device; copies changes back on exit."""
    originals = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            # Only changed tensors are copied: writing would unmap pages that are backed by a file.
            if tensor.data.data_ptr() != original.data_ptr() and not torch.equal(
                original, tensor.data.to(original.device)
            ):
                original.copy_(tensor.data)
            tensor.data = original


@contextmanager
def activation_checkpointing(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, blocks recompute their activations in the backward pass instead of storing them."""

    def wrapped(forward: Any) -> Any:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    # The forward that is there now, which may be one that offloads.
    with replaced_forward(blocks, [wrapped(block.forward) for block in blocks]):
        yield


def as_bytes(memory: str | int | None) -> int | None:
    """The number of bytes in "24GB", "22.5 GiB" or a number."""
    if memory is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", str(memory))
    if not isinstance(memory, str) and memory > 0:
        return int(memory)
    if match is None or match.group(2).upper() not in UNITS:
        raise FactError(f"memory is a number of bytes or something like '24GB' or '22.5GiB', not {memory!r}.")
    return int(float(match.group(1)) * UNITS[match.group(2).upper()])


@dataclass(frozen=True)
class MemoryPlan:
    """How gradient statistics are stored, whether activations are recomputed, and why."""

    dtype: torch.dtype = torch.float32
    on_device: int | None = None  # weights whose statistics stay on the device, not on the host; None: all of them
    checkpointing: bool = False
    reason: str = ""


@dataclass(frozen=True)
class MemoryNeed:
    """What a plan must make room for: statistics per weight, copies of them, and other bytes on the device."""

    statistics: int = 1
    copies: int = 1
    reserved: int = 0


def plan_memory(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    prunables: Sequence[Prunable],
    blocks: Sequence[nn.Module],
    memory: int | None = None,
    need: MemoryNeed | None = None,
) -> MemoryPlan:
    """The first plan that fits a CUDA device: fp32 statistics on it, bf16 statistics, activation checkpointing, and
    finally some statistics on the host. `memory` is a limit in bytes."""
    device, need = device_of(model), need or MemoryNeed()
    if device.type != "cuda":
        return MemoryPlan()
    limit = _limit(device, memory)
    used = torch.cuda.memory_allocated(device) + need.reserved
    weights = sum(prunable.parameter.numel() for prunable in prunables)
    largest = max(prunable.parameter.numel() for prunable in prunables)
    # A gradient, the same in fp32, its absolute value; and a statistic that came from the host.
    transient = largest * (prunables[0].parameter.element_size() + 10)

    @cache
    def room(checkpointing: bool) -> float:
        batch_bytes = activation_bytes(model, batch, loss, prunables, blocks if checkpointing else ())
        return USABLE * limit - used - batch_bytes - transient

    options = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
    for dtype, checkpointing in options if blocks else options[:2]:
        left, per_weight = room(checkpointing), dtype.itemsize * need.statistics * need.copies
        if weights * per_weight <= left:
            found = MemoryPlan(dtype, checkpointing=checkpointing)
            break
    else:
        if left <= 0:
            needed = f"{used / 1e9:.1f} GB in use and {(USABLE * limit - used - left) / 1e9:.1f} GB for a batch"
            raise FactError(f"{limit / 1e9:.1f} GB do not hold {needed}. Use smaller batches or more memory.")
        found = MemoryPlan(torch.bfloat16, int(left // per_weight), checkpointing)
    return replace(found, reason=_reason(found, weights, limit, used, left))


def _reason(found: MemoryPlan, weights: int, limit: float, used: float, left: float) -> str:
    how = f"{'fp32' if found.dtype == torch.float32 else 'bf16'} statistics"
    if found.on_device is not None:
        how += f", those of {found.on_device / weights:.0%} of the weights on the GPU, the others in host memory"
    how += ", activation checkpointing" if found.checkpointing else ""
    return (
        f"Memory: {how} ({limit / 1e9:.1f} GB in all, {used / 1e9:.1f} in use, {left / 1e9:.1f} left beside a batch)."
    )


def smallest_plan(plan: MemoryPlan, ranks: Ranks) -> MemoryPlan:
    """A plan that fits on the rank with least memory, the same on every rank."""
    mine = [plan.dtype != torch.float32, -1 if plan.on_device is None else plan.on_device, plan.checkpointing]
    everyone = ranks.tell("memory", mine)
    rooms = [room for _, room, _ in everyone if room >= 0]
    return replace(
        plan,
        dtype=torch.bfloat16 if any(short for short, _, _ in everyone) else torch.float32,
        on_device=min(rooms) if rooms else None,
        checkpointing=any(checkpointing for _, _, checkpointing in everyone),
    )


def fits_copy(tensors: Sequence[Tensor], memory: int | None) -> bool:
    """Whether a copy of these takes at most an eighth of a CUDA device's free memory; False on other devices."""
    device = tensors[0].device
    if device.type != "cuda":
        return False
    left = _limit(device, memory) - torch.cuda.memory_allocated(device)
    return sum(tensor.nbytes for tensor in tensors) <= left / 8


def _limit(device: torch.device, memory: int | None) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return min(total if memory is None else memory, free + torch.cuda.memory_reserved(device))


def activation_bytes(
    model: nn.Module, batch: Batch, loss: Loss, prunables: Sequence[Prunable], checkpointed: Sequence[nn.Module]
) -> int:
    """Measured peak bytes of a batch's forward pass on a CUDA device; larger than any device if it does not fit."""
    device = device_of(model)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    value: Tensor | None = None
    try:
        with (
            eval_mode(model, [prunable.parameter for prunable in prunables]),
            torch.enable_grad(),
            activation_checkpointing(checkpointed),
        ):
            value = loss(model, to_device(batch, device))
            value.sum().backward(inputs=[prunables[-1].parameter])
    except torch.OutOfMemoryError:
        return 1 << 62
    finally:
        del value
    return torch.cuda.max_memory_allocated(device) - before
