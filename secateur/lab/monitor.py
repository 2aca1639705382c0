"""What happens while a run trains: the load of the CPUs, the time of each part of a step, the GPU, one gradient."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateur.errors import library
from secateur.model.prunable import plain_name

EXTRA = "'secateur[demo]'"
BUSY = 0.25  # the machine is busy if other processes use more than this fraction of its CPUs
LOAD_SECONDS = 0.5  # for which the load is sampled before the demo
PARTS = ("data", "forward", "backward", "optimizer", "masks")
SAMPLED = 53  # one step in this many is timed; a prime, so that steps with mask updates get their share
BETAS = (0.8, 0.9, 0.999)  # of the gradient's moving averages


@dataclass(frozen=True)
class CpuLoad:
    """The CPUs that this process may use, and how many of them other processes used on average."""

    cpus: int
    used: float

    @property
    def busy(self) -> bool:
        return self.used > BUSY * self.cpus

    @property
    def warning(self) -> str | None:
        """A sentence for people who read the times of a run; None if the machine was not busy."""
        if not self.busy:
            return None
        return f"The machine was busy: other processes used {self.used:.1f} of {self.cpus} CPUs. Times are unreliable."

    def threads(self, most: int) -> tuple[int, str]:
        """How many of `most` torch threads to use, and why.

        The threads of an operation wait for each other when it ends. One that shares its CPU with another process
        delays all of them, so a small model trains faster on the idle CPUs alone, or on one thread if there are none.
        """
        idle = self.cpus - self.used
        count = max(1, min(most, round(idle)))
        return count, f"{count} of {most} torch threads, as {idle:.1f} of {self.cpus} CPUs are idle"


class LoadMeter:
    """Measures what other processes use of the CPUs, from its construction on.

    The system's load average is of no use for this: it takes a minute to rise, and counts this process too.
    """

    def __init__(self) -> None:
        self._began, self._own, self._idle = time.perf_counter(), time.process_time(), _idle_seconds()

    def load(self) -> CpuLoad:
        """The mean since construction."""
        seconds = max(time.perf_counter() - self._began, 1e-3)
        idle = sum(now - before for now, before in zip(_idle_seconds(), self._idle, strict=True))
        own = time.process_time() - self._own
        cpus = len(self._idle)
        return CpuLoad(cpus, round(min(cpus, max(0.0, cpus - (idle + own) / seconds)), 2))


def _idle_seconds() -> list[float]:
    """Seconds each CPU was idle since the system started; only CPUs that this process may use."""
    psutil = library("psutil", "Measuring the CPU load", EXTRA)
    found = [times.idle + getattr(times, "iowait", 0.0) for times in psutil.cpu_times(percpu=True)]
    if hasattr(os, "sched_getaffinity"):  # Linux, where a container or taskset may allow some CPUs only
        allowed = os.sched_getaffinity(0)
        found = [idle for cpu, idle in enumerate(found) if cpu in allowed] or found
    return found


def cpu_load(seconds: float = LOAD_SECONDS) -> CpuLoad:
    """The load while this process sleeps for some seconds."""
    meter = LoadMeter()
    time.sleep(seconds)
    return meter.load()


@contextmanager
def threads_for(load: CpuLoad) -> Iterator[str]:
    """Use as many torch threads as CPUs are idle inside the `with`; yields the choice and its reason as text."""
    before = torch.get_num_threads()
    count, why = load.threads(before)
    torch.set_num_threads(count)
    try:
        yield why
    finally:
        torch.set_num_threads(before)


class Stopwatch:
    """Times the parts of one step in `every`, with a device sync after each part; 0: never, 1: every step."""

    def __init__(self, device: torch.device, every: int = SAMPLED) -> None:
        self.every = every
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        self._device, self._on, self._last = device, False, 0.0

    def start(self, step: int) -> None:
        """Begin a step, counted from 1. Early steps are not timed: they are not typical."""
        self._on = bool(self.every) and step % self.every == 0
        self.steps += self._on
        self._synchronize()

    def lap(self, part: str) -> None:
        """End a part of the step."""
        if self._on:
            before = self._last
            self._synchronize()
            self.seconds[part] += self._last - before

    def _synchronize(self) -> None:
        if self._on:
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            self._last = time.perf_counter()

    def milliseconds(self) -> dict[str, float]:
        """Mean time of every part; empty if no step was timed."""
        return {part: round(1e3 * spent / self.steps, 3) for part, spent in self.seconds.items()} if self.steps else {}


class Monitor:
    """Inside a `with`, samples the GPU's utilization, memory in use and power every second."""

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
        """What NVML reports, or None if its Python package is not installed or the driver does not answer."""
        free, whole = torch.cuda.mem_get_info(self._device)
        try:
            busy, milliwatts = torch.cuda.utilization(self._device), torch.cuda.power_draw(self._device)
        except (RuntimeError, ModuleNotFoundError):  # torch raises these for a missing driver and a missing pynvml
            return None
        return {"busy": float(busy), "memory_bytes": float(whole - free), "watts": milliwatts / 1e3}

    def means(self) -> dict[str, float]:
        """Means of all samples."""
        keys = self.samples[0].keys() - {"seconds"} if self.samples else ()
        return {key: round(sum(sample[key] for sample in self.samples) / len(self.samples), 3) for key in sorted(keys)}


class OneWeight:
    """Keeps the gradient of one weight at every step, on the device until `taken` is called."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.ndim >= 2]
        name, self._parameter = named[len(named) // 2]
        self.name = plain_name(name)
        generator = torch.Generator().manual_seed(seed)
        self.index = int(torch.randint(0, self._parameter.numel(), (1,), generator=generator))
        self._kept: list[Tensor] = []

    def note(self) -> None:
        """Keep the gradient of this step."""
        if type(self._parameter.grad) is Tensor:  # a sharded gradient may not hold this weight here
            self._kept.append(self._parameter.grad.detach().reshape(-1)[self.index].float())

    def taken(self) -> list[float]:
        """The gradients since the last call, oldest first."""
        found: list[float] = torch.stack(self._kept).tolist() if self._kept else []
        self._kept.clear()
        return found


def moving_average(values: Sequence[float], beta: float, squared: bool = False) -> list[float]:
    """Adam's bias-corrected moving average of these values, or the root of that of their squares."""
    mean, found = 0.0, []
    for step, value in enumerate(values, 1):
        mean = beta * mean + (1 - beta) * (value * value if squared else value)
        corrected = mean / (1 - beta**step)
        found.append(corrected**0.5 if squared else corrected)
    return found


def gradient_lines(values: Sequence[float]) -> dict[str, list[float]]:
    """Lines to plot, by label: the gradient, two moving averages, and the root of the moving average of its square."""
    fast, slow, square = BETAS
    return {
        "gradient": list(values),
        f"average, beta1 {fast}": moving_average(values, fast),
        f"average, beta1 {slow}": moving_average(values, slow),
        f"root of averaged square, beta2 {square}": moving_average(values, square, squared=True),
    }
