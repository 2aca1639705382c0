"""Thrift: how statistics of gradients are gathered so that they fit into memory; chosen by measuring, and said why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from secateur.errors import FactError
from secateur.model.prunable import Site
from secateur.oneshot.batches import Batch, Loss, device_of, quiet, to_device
from secateur.oneshot.blocks import standing_in

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
    sites: Sequence[Site],
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


def activations(model: nn.Module, batch: Batch, loss: Loss, sites: Sequence[Site], blocks: Sequence[nn.Module]) -> int:
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
