"""What the zeros of one layer buy on this device: dense and packed time of the same inputs, taken in turns.

Calls go round copies of the layer that together exceed the caches, as the layers of a large model do, and the two forms
alternate, so that other work on the machine slows both. The smallest time counts: interruptions only make calls longer.
On GPUs a CUDA graph makes one call of every copy, and its replays are timed by events on the device.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

CACHED = 64 << 20  # bytes that copies of a layer have together, beyond the caches of most processors
COPIES = 64  # at most
SECONDS = 0.25  # after which no further pair of calls is made
LEAST, MOST = 5, 30  # pairs of calls
GRAPHED = 20  # calls in a CUDA graph at least: its replay must last much longer than its launch
REPLAYS = 7


@dataclass(frozen=True)
class Timing:
    """Microseconds of every call of a layer, dense and packed, and how far their outputs are apart."""

    dense: list[float]
    packed: list[float]
    difference: float  # largest, relative to the largest output
    tolerance: float  # what rounding and the order of sums explain
    inputs: int = 1

    @property
    def right(self) -> bool:
        """Whether the outputs agree."""
        return self.difference <= self.tolerance

    @property
    def ratio(self) -> float:
        """Dense time over packed time, both the smallest."""
        return min(self.dense) / min(self.packed)


@torch.no_grad()
def compare(
    dense: nn.Module, packed: nn.Module, x: Tensor, *, exact: bool = True, most: int = MOST, seconds: float = SECONDS
) -> Timing:
    """Time both layers on x. `exact`: whether the packed weight has all bits of the dense one, as int8 has not."""
    ours, theirs = packed(x), dense(x)
    largest = float(theirs.abs().max()) or 1.0
    apart = float((ours.double() - theirs.double()).abs().max()) / largest
    tolerance = (4 * torch.finfo(x.dtype).eps + 1e-5) if exact else 0.05
    times: tuple[list[float], list[float]] = [], []
    forms = [_copies(layer, x.device) for layer in (dense, packed)]
    if x.device.type == "cuda":
        graphs = [graph_of([partial(one, x) for one in copies], x.device) for copies in forms]
    until = time.perf_counter() + seconds
    while len(times[0]) < LEAST or (len(times[0]) < most and time.perf_counter() < until):
        for number, taken in enumerate(times):
            if x.device.type == "cuda":
                taken.append(replayed(*graphs[number]))
            else:
                taken.append(_microseconds(forms[number][len(taken) % len(forms[number])], x))
    return Timing(*times, apart, tolerance, x.numel() // x.shape[-1])


def beyond_cache(device: torch.device) -> int:
    """Bytes that do not fit into the caches of this device."""
    return 4 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else CACHED


def _copies(layer: nn.Module, device: torch.device) -> list[nn.Module]:
    """The layer and as many copies as fill the caches."""
    size = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
    number = min(COPIES, -(-beyond_cache(device) // max(size, 1)))
    return [layer, *(copy.deepcopy(layer) for _ in range(number - 1))]


Graph = tuple[torch.cuda.CUDAGraph, int, torch.device]  # with its number of calls


def graph_of(calls: Sequence[Callable[[], Any]], device: torch.device) -> Graph:
    """A CUDA graph that makes all calls in turn, GRAPHED or more, after each was made once.

    The device need not be the current one; torch's own stream for captures stays on the device of the first capture.
    """
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph, rounds = torch.cuda.CUDAGraph(), -(-GRAPHED // len(calls))
        with torch.cuda.graph(graph, stream=side):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
    return graph, rounds * len(calls), device


def replayed(graph: torch.cuda.CUDAGraph, calls: int, device: torch.device) -> float:
    """Microseconds of one call in a replay."""
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
    end.synchronize()
    return round(begin.elapsed_time(end) * 1e3 / calls, 3)


def graph_microseconds(calls: Sequence[Callable[[], Any]], device: torch.device, replays: int = REPLAYS) -> list[float]:
    """Microseconds of a call, by replays of a CUDA graph of all calls; on other devices by the host's clock."""
    if device.type == "cuda":
        graph = graph_of(calls, device)
        return [replayed(*graph) for _ in range(replays)]
    taken = []
    for _ in range(replays):
        began = time.perf_counter()
        for call in calls:
            call()
        taken.append(round((time.perf_counter() - began) * 1e6 / len(calls), 2))
    return taken


def _microseconds(layer: nn.Module, x: Tensor) -> float:
    _wait(x.device)
    began = time.perf_counter()
    layer(x)
    _wait(x.device)
    return round((time.perf_counter() - began) * 1e6, 2)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
