"""Measuring time, copy bandwidth and scratch memory on any device, and comparing a figure with its bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

WARM_UP = 3  # untimed calls, in which kernels compile and the allocator fills its cache
COPIED = {"gpu": 2 << 30, "cpu": 256 << 20}  # bytes of the copy that measures the bandwidth, larger than any cache


def kind(device: torch.device) -> str:
    """ "cpu" or "gpu": which default sizes a benchmark takes on this device."""
    return "cpu" if device.type == "cpu" else "gpu"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock time of one call, from an idle device to an idle device."""
    synchronize(device)
    began = time.perf_counter()
    function()
    synchronize(device)
    return round((time.perf_counter() - began) * 1e3, 4)


def samples(function: Callable[[], Any], device: torch.device, calls: int, warm_up: int = WARM_UP) -> list[float]:
    """Times of consecutive calls, after some untimed ones."""
    for _ in range(warm_up):
        function()
    return [milliseconds(function, device) for _ in range(calls)]


def bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written together, of the fastest of ten large copies."""
    source = torch.zeros(COPIED[kind(device)], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    fastest = min(samples(lambda: target.copy_(source), device, calls=10))
    return 2 * source.numel() / fastest * 1e3


def floor_ms(moved: float, speed: float) -> float:
    """The time in which this many bytes move at this bandwidth."""
    return round(moved / speed * 1e3, 5)


def scratch_mib(function: Callable[[], Sequence[Tensor]], device: torch.device) -> float:
    """Peak MiB allocated during a call, beyond what was allocated before and the tensors it returns."""
    peak, returned = _cpu_peak(function) if device.type == "cpu" else _accelerator_peak(function, device)
    return round((peak - returned) / 2**20, 2)


def _accelerator_peak(function: Callable[[], Sequence[Tensor]], device: torch.device) -> tuple[int, int]:
    synchronize(device)
    memory = torch.get_device_module(device)
    memory.reset_peak_memory_stats(device)
    before = memory.memory_allocated(device)
    returned = sum(tensor.nbytes for tensor in function())
    synchronize(device)
    return memory.max_memory_allocated(device) - before, returned


def _cpu_peak(function: Callable[[], Sequence[Tensor]]) -> tuple[int, int]:
    """From torch's memory profile, since CPUs have no allocation counter."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        returned = sum(tensor.nbytes for tensor in function())
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, returned


def ratio(value: float, right: bool, wrong: str = "masks differ", digits: int = 2) -> str:
    """A ratio for a table, or `wrong` instead if the compared results are not equal."""
    return f"{value:.{digits}f}x" if right else wrong


def against(value: float, bar: float, right: bool = True, wrong: str = "masks differ") -> str:
    """How a figure compares with its bar, the largest acceptable value."""
    if not right:
        return wrong
    if value > 2 * bar:
        return f"missed, {value / bar:.1f} times the bar"
    return f"{'met' if value <= bar else 'missed'} by {abs(value / bar - 1):.1%}"
