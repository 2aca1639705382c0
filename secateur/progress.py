"""Stages of a job: the seconds and memory of each, and progress on stderr if asked for."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

LINE_SECONDS = 10.0  # between plain lines, where tqdm is not installed


@dataclass(frozen=True)
class Stage:
    """A part of a job: its seconds, and the peak of allocated device memory (None where torch does not report it)."""

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
        """Time the code inside; call the yielded function after each of `total` steps."""
        memory = _memory_stats(self._device)
        if memory is not None:
            memory.reset_peak_memory_stats(self._device)
        began, progress = time.perf_counter(), ProgressBar(name, total) if self._show else None
        try:
            yield (lambda: None) if progress is None else progress.tick
        finally:
            if progress is not None:
                progress.close()
            if self._device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(self._device)
            peak = None if memory is None else memory.max_memory_allocated(self._device)
            before = self._done.get(name, Stage(name, 0.0, None))
            peak = peak if before.peak_bytes is None or peak is None else max(peak, before.peak_bytes)
            self._done[name] = Stage(name, before.seconds + time.perf_counter() - began, peak)

    @property
    def done(self) -> tuple[Stage, ...]:
        return tuple(self._done.values())


def _memory_stats(device: torch.device) -> Any:
    """torch's module for this device if it counts allocated bytes, as torch.cuda and torch.xpu do; else None."""
    module = torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


class ProgressBar:
    """A tqdm bar on stderr, or plain lines without tqdm or a terminal, and one line with the seconds at the end."""

    def __init__(self, name: str, total: int, done: int = 0, unit: str = "") -> None:
        """`unit` is for steps that are counted in large numbers; with it the total may be unknown, 0."""
        self._name, self._total, self._first, self._done = name, total, done, done
        self._began = self._printed = time.perf_counter()
        self._bar = _tqdm_bar(name, total, done, unit) if total or unit else None

    def tick(self, note: str = "", by: int = 1) -> None:
        """Count a step, or several; `note` is shown beside the count."""
        self._done += by
        now = time.perf_counter()
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(by)
        elif now - self._printed > LINE_SECONDS:
            self._printed = now
            left = (now - self._began) / max(1, self._done - self._first) * max(0, self._total - self._done)
            count = f"{self._done:,}/{self._total:,}" if self._total else f"{self._done:,}"
            told = ", ".join(filter(None, (count, note, f"{left:.0f} s left" if self._total else "")))
            print(f"{self._name:32} {told}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        print(f"{self._name:32} {time.perf_counter() - self._began:8.1f} s", file=sys.stderr, flush=True)


def _tqdm_bar(name: str, total: int, done: int, unit: str) -> Any:
    """A bar for terminals and notebooks; None if stderr is a file or tqdm is not installed."""
    try:
        tqdm = importlib.import_module("tqdm.auto")
    except ModuleNotFoundError:
        return None
    scale = {"unit": f" {unit}s", "unit_scale": True} if unit else {}
    bar = tqdm.tqdm(total=total or None, initial=done, desc=name, leave=False, disable=None, **scale)
    return None if bar.disable else bar
