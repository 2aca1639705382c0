"""A shelf for statistics that have no room on the device: fetched when they are needed, put back when they are done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> Tensor:
    """A copy on the host, from where a GPU can fetch parts quickly."""
    return empty_on_host(tensor.shape, tensor.dtype, tensor.device.type == "cuda").copy_(tensor)


def empty_on_host(shape: torch.Size, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Room on the host; pinned, a GPU copies from and to it while it computes."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)


class Shelf:
    """Lends tensors that are on the host to the device, one after another.

    Copies go by a stream of their own, beside the computation. Gradients come in the same order for every batch, so
    whatever followed a tensor the last time is fetched while that tensor is still in use.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._ahead: dict[int, tuple[Tensor, torch.cuda.Event]] = {}  # on their way, by the id of what is on the host
        self._follows: dict[int, Tensor] = {}
        self._last: Tensor | None = None

    @contextmanager
    def lent(self, tensor: Tensor, device: torch.device) -> Iterator[Tensor]:
        """The tensor on the device, to be changed inside; afterwards the host has what it became."""
        if tensor.device == device:
            yield tensor
        elif device.type != "cuda":
            near = tensor.to(device)
            yield near
            tensor.copy_(near)
        else:
            yield from self._lent(tensor, device)

    def _lent(self, tensor: Tensor, device: torch.device) -> Iterator[Tensor]:
        side = self._streams.setdefault(device, torch.cuda.Stream(device))
        here = torch.cuda.current_stream(device)
        known = id(tensor) in self._ahead
        near, arrived = self._ahead.pop(id(tensor)) if known else self._fetch(tensor, side)
        if self._last is not None:
            self._follows[id(self._last)] = tensor
        self._last = tensor
        following = self._follows.get(id(tensor))
        if following is not None and following is not tensor and id(following) not in self._ahead:
            self._ahead[id(following)] = self._fetch(following, side)
        here.wait_event(arrived)
        near.record_stream(here)
        yield near
        side.wait_event(here.record_event())
        near.record_stream(side)
        with torch.cuda.stream(side):
            tensor.copy_(near, non_blocking=True)

    def _fetch(self, tensor: Tensor, side: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(side):
            return tensor.to(side.device, non_blocking=True), side.record_event()

    def settle(self) -> None:
        """Wait until everything is back on the host."""
        self._ahead.clear()
        for stream in self._streams.values():
            stream.synchronize()
