"""Looking at a run while it trains: where a step's time goes, what the GPU does, the gradient of one weight."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.model.prunable import plain_name

PARTS = ("data", "forward", "backward", "optimizer", "masks")
SAMPLED = 53  # one step in so many is timed part by part; a prime, so that mask updates are met as often as they come
BETAS = (0.8, 0.9, 0.999)  # of the averages a gradient is shown with


class Stopwatch:
    """Times the parts of some steps, waiting for the device after each; other steps run as they would anyway."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on, self._last = device, False, 0.0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = 0

    def start(self, step: int) -> None:
        """A step begins. The first ones are not typical."""
        self._on = step % SAMPLED == 0
        self.steps += self._on
        self._settle()

    def lap(self, part: str) -> None:
        """The part that has just ended."""
        if self._on:
            before = self._last
            self._settle()
            self.seconds[part] += self._last - before

    def _settle(self) -> None:
        if self._on:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._last = time.perf_counter()

    def milliseconds(self) -> dict[str, float]:
        """Mean time of every part in a step; nothing if no step was timed."""
        return {part: round(1e3 * spent / self.steps, 3) for part, spent in self.seconds.items()} if self.steps else {}


class Monitor:
    """Inside a `with`, asks the GPU every second how busy it is, what memory it has in use and what power it draws."""

    def __init__(self, device: torch.device, every: float = 1.0) -> None:
        self._device, self._every = device, every
        self._over = threading.Event()
        self.samples: list[dict[str, float]] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Monitor:
        if self._device.type == "cuda" and self._sample() is not None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        began = time.perf_counter()
        while not self._over.wait(self._every):
            if (found := self._sample()) is not None:
                self.samples.append({"seconds": round(time.perf_counter() - began, 2), **found})

    def _sample(self) -> dict[str, float] | None:
        """What NVML says; nothing where its Python package is missing or it does not answer."""
        try:
            free, whole = torch.cuda.mem_get_info(self._device)
            return {
                "busy": float(torch.cuda.utilization(self._device)),
                "memory_bytes": float(whole - free),
                "watts": torch.cuda.power_draw(self._device) / 1e3,
            }
        except (RuntimeError, ModuleNotFoundError):
            return None

    def means(self) -> dict[str, float]:
        """Means over all samples."""
        keys = self.samples[0].keys() - {"seconds"} if self.samples else ()
        return {key: round(sum(sample[key] for sample in self.samples) / len(self.samples), 3) for key in sorted(keys)}


class OneWeight:
    """The gradient of one weight at every step, left on the device until it is asked for."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.ndim >= 2]
        name, self._parameter = named[len(named) // 2]
        self.name = plain_name(name)
        draw = torch.Generator().manual_seed(seed)
        self.index = int(torch.randint(0, self._parameter.numel(), (1,), generator=draw))
        self._kept: list[Tensor] = []

    def note(self) -> None:
        """Keep the gradient of this step."""
        if type(self._parameter.grad) is Tensor:  # a shard of it is somewhere, perhaps not here
            self._kept.append(self._parameter.grad.detach().reshape(-1)[self.index].float())

    def taken(self) -> list[float]:
        """The gradients since this was last asked, oldest first."""
        found: list[float] = torch.stack(self._kept).tolist() if self._kept else []
        self._kept.clear()
        return found


def averaged(values: Sequence[float], beta: float, squared: bool = False) -> list[float]:
    """The running average Adam would have of these, corrected for its beginning; of squares, their root."""
    mean, found = 0.0, []
    for step, value in enumerate(values, 1):
        mean = beta * mean + (1 - beta) * (value * value if squared else value)
        corrected = mean / (1 - beta**step)
        found.append(corrected**0.5 if squared else corrected)
    return found


def picture_of_a_gradient(values: Sequence[float]) -> dict[str, Any]:
    """The lines of the seeds' picture: the gradient as it comes, its averages, and the root of its averaged square."""
    slow, quick, square = BETAS[1], BETAS[0], BETAS[2]
    return {
        "gradient": list(values),
        f"average, beta1 {quick}": averaged(values, quick),
        f"average, beta1 {slow}": averaged(values, slow),
        f"root of averaged square, beta2 {square}": averaged(values, square, squared=True),
    }
