"""How things are measured, on CPUs and GPUs alike: time, copy bandwidth, scratch memory."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

WARM_UP = 3  # calls before the first that counts: kernels compile, the allocator finds its blocks
COPIED = {"cuda": 2 << 30, "cpu": 256 << 20}  # bytes of the copy that tells the bandwidth: far beyond any cache


def device_of(options: argparse.Namespace) -> torch.device:
    """The device asked for, which the command line has checked."""
    return torch.device(options.device)


def settle(device: torch.device) -> None:
    """Wait for all work handed to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    """How long one call takes by the host's clock, from an idle device to an idle device."""
    settle(device)
    began = time.perf_counter()
    function()
    settle(device)
    return round((time.perf_counter() - began) * 1e3, 4)


def samples(function: Callable[[], Any], device: torch.device, calls: int, warm_up: int = WARM_UP) -> list[float]:
    """Times of calls in a row, after some that do not count."""
    for _ in range(warm_up):
        function()
    return [milliseconds(function, device) for _ in range(calls)]


def bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written together, of the fastest of some large copies: the strictest floor."""
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    fastest = min(samples(lambda: target.copy_(source), device, calls=10))
    return 2 * source.numel() / fastest * 1e3


def floor_ms(moved: float, speed: float) -> float:
    """The least time in which so many bytes can move."""
    return round(moved / speed * 1e3, 5)


def scratch_mib(function: Callable[[], Sequence[Tensor]], device: torch.device) -> float:
    """MiB allocated at the highest during a call, beyond what was there before and the tensors it returns."""
    peak, kept = (_cuda_peak if device.type == "cuda" else _cpu_peak)(function)
    return round((peak - kept) / 2**20, 2)


def _cuda_peak(function: Callable[[], Sequence[Tensor]]) -> tuple[int, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = sum(tensor.nbytes for tensor in function())
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, kept


def _cpu_peak(function: Callable[[], Sequence[Tensor]]) -> tuple[int, int]:
    """By torch's own memory profile: CPUs have no counter of their own."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = sum(tensor.nbytes for tensor in function())
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, kept


def times(value: float, right: bool, wrong: str = "masks differ", digits: int = 2) -> str:
    """A ratio, unless what it compares is not equal."""
    return f"{value:.{digits}f}x" if right else wrong
