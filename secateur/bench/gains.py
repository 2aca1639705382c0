"""What the zeros of a model's linear layers buy on this device: bytes and time of one input, dense and packed.

`secateur inspect` shows it. Weights come one at a time; of layers alike (shape, dtype, and sparsity to a twentieth) the
first is timed, with the other work of the machine slowing both forms. Nothing is said about speed where outputs differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.bench.decode import DIFFER, LEAST_GAIN, NOTHING, kernel, measure
from secateur.bench.measuring import ratio
from secateur.files import megabytes
from secateur.inference.format import smaller
from secateur.selection.masks import packed_bytes

HEADER = ("linear layers", "number", "dtype", "zeros", "dense", "packed", "dense us", "packed us", "speedup")
CALLS = 20  # of each form of a layer


@dataclass
class Group:
    """Layers alike, with the measurement of the first."""

    cell: dict[str, Any]
    layers: int = 0
    weights: int = 0
    zeros: int = 0
    dense_bytes: int = 0
    packed_bytes: int = 0

    @property
    def us(self) -> tuple[float, float]:
        """Microseconds of one layer, dense and packed, the fastest of all calls."""
        return min(self.cell["dense_us"]), min(self.cell["packed_us"])


class Gains:
    """Groups of the layers that packing makes smaller, and the number of those that it does not."""

    def __init__(
        self, device: torch.device, only: Collection[str] | None = None, transposed: Collection[str] = ()
    ) -> None:
        self.device, self.only, self.transposed = device, only, transposed
        self.groups: dict[Any, Group] = {}
        self.left = 0

    def watched(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights, each looked at on its way."""
        for name, weight in tensors:
            if name in self.only if self.only is not None else weight.ndim == 2 and name.endswith("weight"):
                self.add(weight.detach().T.contiguous() if name in self.transposed else weight.detach())
            yield name, weight

    def add(self, weight: Tensor) -> None:
        """Count a linear layer's weight [outputs, inputs]; time it if none alike was timed."""
        if not smaller(weight):
            self.left += 1
            return
        zeros = weight.numel() - int(torch.count_nonzero(weight))
        key = tuple(weight.shape), weight.dtype, round(20 * zeros / weight.numel())
        if key not in self.groups:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            layer.weight = nn.Parameter(weight.to(self.device), requires_grad=False)
            self.groups[key] = Group(measure(layer.eval(), CALLS))
        group = self.groups[key]
        group.layers += 1
        group.weights += weight.numel()
        group.zeros += zeros
        group.dense_bytes += weight.nbytes
        group.packed_bytes += packed_bytes(weight.shape) + (weight.numel() - zeros) * weight.element_size()

    def rows(self) -> list[Sequence[str]]:
        """A row for each group."""
        found: list[Sequence[str]] = []
        for group in self.groups.values():
            cell, (dense, packed) = group.cell, group.us
            found.append(
                (cell["shape"], str(group.layers), cell["dtype"], f"{group.zeros / group.weights:.1%}",
                 megabytes(group.dense_bytes), megabytes(group.packed_bytes), f"{dense:.0f}",
                 f"{packed:.0f}", ratio(dense / packed, cell["right"], DIFFER))
            )  # fmt: skip
        return found

    def lines(self) -> list[str]:
        """All layers together, in plain sentences."""
        groups = list(self.groups.values())
        if not groups:
            return [f"{NOTHING} No linear layer has enough zeros to be smaller packed."]
        left = f" {self.left} linear layers have too few zeros and stay dense." if self.left else ""
        dense, packed = sum(group.dense_bytes for group in groups), sum(group.packed_bytes for group in groups)
        said = [
            f"Packed, {sum(group.layers for group in groups)} linear layers take {megabytes(packed)} instead of"
            f" {megabytes(dense)} ({packed / dense:.0%}).{left}",
            f"Packed layers are computed by: {kernel(self.device)}; threads: {torch.get_num_threads()}.",
        ]
        if not all(group.cell["right"] for group in groups):
            return [*said, f"In time: {DIFFER}, so nothing is claimed."]
        before = sum(group.layers * group.us[0] for group in groups) / 1e3
        after = sum(group.layers * min(group.us) for group in groups) / 1e3  # as `sc.pack` leaves slower layers dense
        if before / after < LEAST_GAIN:
            return [*said, f"In time: {NOTHING.lower()} One input takes {before:.2f} ms through them, packed or dense."]
        return [
            *said,
            f"One input takes {after:.2f} ms through them instead of {before:.2f} ({before / after:.2f}x), where slower"
            " layers stay dense; `secateur bench decode` measures whole decoding steps.",
        ]
