"""What the zeros of one layer buy on this device: dense and packed time of the same inputs, taken in turns.

Every call is timed from cold caches, as in a model that is larger than they are, and the two forms alternate, so that
other work on the machine slows both. The smallest time counts: whatever interrupts a call can only make it longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn

FLUSH = 64 << 20  # bytes written between calls, beyond the caches of most processors
SECONDS = 0.25  # after which no further pair of calls is made
LEAST, MOST = 5, 30  # pairs of calls


@dataclass(frozen=True)
class Timing:
    """Microseconds of every call of a layer, dense and packed, and how far their outputs are apart."""

    dense: list[float]
    packed: list[float]
    difference: float  # largest, relative to the largest output
    tolerance: float  # what rounding and the order of sums explain
    inputs: int = field(default=1)

    @property
    def right(self) -> bool:
        """Whether the outputs agree."""
        return self.difference <= self.tolerance

    @property
    def ratio(self) -> float:
        """Dense time over packed time, both the smallest."""
        return min(self.dense) / min(self.packed)

    @property
    def median_ratio(self) -> float:
        """The same of the medians."""
        return median(self.dense) / median(self.packed)


@torch.no_grad()
def compare(
    dense: nn.Module, packed: nn.Module, x: Tensor, *, exact: bool = True, most: int = MOST, seconds: float = SECONDS
) -> Timing:
    """Time both layers on x. `exact`: whether the packed weight has all bits of the dense one, as int8 has not."""
    flush = torch.empty(FLUSH, dtype=torch.uint8, device=x.device)
    ours, theirs = packed(x), dense(x)
    largest = float(theirs.abs().max()) or 1.0
    apart = float((ours.double() - theirs.double()).abs().max()) / largest
    tolerance = (4 * torch.finfo(x.dtype).eps + 1e-5) if exact else 0.05
    times: tuple[list[float], list[float]] = [], []
    until = time.perf_counter() + seconds
    while len(times[0]) < LEAST or (len(times[0]) < most and time.perf_counter() < until):
        for layer, taken in zip((dense, packed), times, strict=True):
            flush.add_(1)
            taken.append(_microseconds(lambda layer=layer: layer(x), x.device))  # type: ignore[misc]
    return Timing(*times, apart, tolerance, x.numel() // x.shape[-1])


def _microseconds(call: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    return round((time.perf_counter() - began) * 1e6, 2)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
