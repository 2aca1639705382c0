"""What the zeros of one layer buy on this device: dense and packed time of the same inputs, taken in turns.

Calls go round copies of the layer that together exceed the caches, as the layers of a large model do, and the two forms
alternate, so that other work on the machine slows both. The smallest time counts: interruptions only make calls longer.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CACHED = 64 << 20  # bytes that copies of a layer have together, beyond the caches of most processors
COPIES = 64  # at most
SECONDS = 0.25  # after which no further pair of calls is made
LEAST, MOST = 5, 30  # pairs of calls


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
    forms = [_copies(layer) for layer in (dense, packed)]
    until = time.perf_counter() + seconds
    while len(times[0]) < LEAST or (len(times[0]) < most and time.perf_counter() < until):
        for copies, taken in zip(forms, times, strict=True):
            taken.append(_microseconds(copies[len(taken) % len(copies)], x))
    return Timing(*times, apart, tolerance, x.numel() // x.shape[-1])


def _copies(layer: nn.Module) -> list[nn.Module]:
    """The layer and as many copies as fill the caches."""
    size = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
    return [layer, *(copy.deepcopy(layer) for _ in range(min(COPIES, -(-CACHED // max(size, 1))) - 1))]


def _microseconds(layer: nn.Module, x: Tensor) -> float:
    _wait(x.device)
    began = time.perf_counter()
    layer(x)
    _wait(x.device)
    return round((time.perf_counter() - began) * 1e6, 2)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
