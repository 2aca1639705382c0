"""Stages of a job: what each took, and, if wished, how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Stage:
    """Part of a job: seconds, and the most memory its device had allocated (None on CPUs)."""

    name: str
    seconds: float
    peak_bytes: int | None


class Stages:
    """Times stages one after another; those of the same name add up."""

    def __init__(self, device: torch.device, show: bool = False) -> None:
        self._device, self._show = device, show
        self._done: dict[str, Stage] = {}

    @contextmanager
    def stage(self, name: str, total: int = 0) -> Iterator[Callable[[], None]]:
        """Inside, call what it yields for each of `total` steps."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        began, bar = time.perf_counter(), _Bar(name, total, self._show)
        try:
            yield bar.tick
        finally:
            bar.close()
            if on_gpu:
                torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else None
            before = self._done.get(name, Stage(name, 0.0, None))
            most = peak if before.peak_bytes is None or peak is None else max(peak, before.peak_bytes)
            self._done[name] = Stage(name, before.seconds + time.perf_counter() - began, most)

    @property
    def done(self) -> tuple[Stage, ...]:
        return tuple(self._done.values())


class _Bar:
    """One line on stderr, redrawn at most five times a second; a plain line at the end where nobody watches."""

    def __init__(self, name: str, total: int, show: bool) -> None:
        self._name, self._total, self._show = name, total, show
        self._done, self._began, self._drawn = 0, time.perf_counter(), 0.0

    def tick(self) -> None:
        self._done += 1
        now = time.perf_counter()
        if self._show and sys.stderr.isatty() and (now - self._drawn > 0.2 or self._done == self._total):
            self._drawn = now
            left = (now - self._began) / self._done * max(0, self._total - self._done)
            width = 24 * self._done // max(1, self._total)
            bar = "#" * width + "." * (24 - width)
            print(f"\r{self._name:32} {bar} {self._done}/{self._total}, {left:5.0f} s left ", end="", file=sys.stderr)

    def close(self) -> None:
        if self._show:
            taken = f"{self._name:32} {time.perf_counter() - self._began:8.1f} s"
            print(f"\r{taken:79}" if sys.stderr.isatty() else taken, file=sys.stderr, flush=True)
