"""Thrift: how statistics of gradients are gathered so that they fit into memory; chosen by measuring, and said why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from secateur.blocks import standing_in
from secateur.calibration import Batch, Loss, device_of, quiet, to_device
from secateur.errors import FactError
from secateur.sites import Site

UNITS = {"GB": 10**9, "GIB": 1 << 30, "MB": 10**6, "MIB": 1 << 20}
SHARE = 0.94  # of the memory that may be used: the allocator does not fill every gap
MOST_PASSES = 16


@dataclass(frozen=True)
class Thrift:
    """Statistics in this type, for so many groups of sites one after another, activations kept or made again."""

    dtype: torch.dtype = torch.float32
    passes: int = 1
    again: bool = False
    aside: bool = False  # statistics go to the host once a pass is done
    reason: str = ""

    def groups(self, sites: Sequence[Site]) -> list[list[Site]]:
        """Sites of each pass: neighbours, about equally many weights, the last layers first."""
        most = -(-sum(site.parameter.numel() for site in sites) // self.passes)
        groups: list[list[Site]] = [[]]
        for site in reversed(sites):
            size = sum(one.parameter.numel() for one in groups[-1]) + site.parameter.numel()
            if groups[-1] and size > most:
                groups.append([])
            groups[-1].append(site)
        return groups


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


def made_again(blocks: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Inside, what blocks compute on the way forward is not kept but computed again on the way back."""

    def wrapped(forward: Any) -> Any:
        return lambda *given, **named: checkpoint(forward, *given, use_reentrant=False, **named)

    return standing_in(blocks, [wrapped(block.forward) for block in blocks])


def on_host(tensor: Tensor) -> Tensor:
    """A copy on the host, from where a GPU can fetch parts quickly."""
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned).copy_(tensor)


def plan(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    sites: Sequence[Site],
    blocks: Sequence[nn.Module],
    memory: int | None,
    statistics: int = 1,
    copies: int = 1,
) -> Thrift:
    """What fits: fp32 statistics at once if they can (`copies` of them), else bf16, activations made again, several
    passes after each of which statistics go to the host."""
    device = device_of(model)
    if device.type != "cuda":
        return Thrift()
    free, whole = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    limit = min(whole if memory is None else memory, free + torch.cuda.memory_reserved(device))
    weights = sum(site.parameter.numel() for site in sites) * statistics
    largest = max(site.parameter.numel() for site in sites)
    transient = largest * (sites[0].parameter.element_size() + 8)  # a gradient, the same in fp32, its absolute value

    @cache
    def room(again: bool) -> float:
        held = activations(model, batch, loss, sites, blocks if again else ())
        return SHARE * limit - used - held - transient

    ways = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
    for dtype, again in ways if blocks else ways[:2]:
        left = room(again)
        need = weights * dtype.itemsize
        if need * copies <= left:
            found = Thrift(dtype, again=again)
            break
    else:
        if left <= 0 or need / left > MOST_PASSES:
            raise FactError(
                f"{limit / 1e9:.1f} GB leave {max(0, left) / 1e9:.1f} GB for {need / 1e9:.1f} GB of statistics, besides"
                " the weights and what a batch needs. Use smaller batches or more memory."
            )
        found = Thrift(torch.bfloat16, passes=int(-(-need // left)), again=again, aside=True)
    return replace(found, reason=_reason(found, limit, used, left, need))


def _reason(found: Thrift, limit: float, used: float, left: float, need: float) -> str:
    how = f"{'fp32' if found.dtype == torch.float32 else 'bf16'} statistics"
    how += f" in {found.passes} passes" if found.passes > 1 else ""
    how += ", activations made again" if found.again else ""
    numbers = f"{limit / 1e9:.1f} GB in all, {used / 1e9:.1f} taken, {left / 1e9:.1f} left beside a batch"
    return f"Memory: {how} ({numbers}; statistics need {need / 1e9:.1f} GB)."


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
