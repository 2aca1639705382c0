"""What happens while a run trains: the load of the CPUs, the time of each part of a step, the GPU, one gradient."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import DEMO_EXTRA, library
from secateur.model.prunable import plain_name

BUSY = 0.25  # the machine is busy if other processes use more than this fraction of its CPUs
LOAD_SECONDS = 0.5  # for which the load is sampled before the demo
PARTS = ("data", "forward", "backward", "optimizer", "masks")
SAMPLED = 53  # one step in this many is timed; a prime, so that steps with mask updates get their share
NOT_FIGURES = ("seconds", "gpu")  # of a sample: when, and of which GPU
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
    psutil = library("psutil", "Measuring the CPU load", DEMO_EXTRA)
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
    """Inside a `with`, samples the GPU of this process every second, and notes the most memory in use (`peak_bytes`).

    A sample has what NVML reports: the share of time in which the GPU was busy and in which it read or wrote memory,
    in percent, the bytes in use by all processes, and the power. `off` says why there are none. The peak is that of
    torch's allocator on a GPU, and of the resident memory of this process, once a second, on a CPU.
    """

    def __init__(self, device: torch.device, every: float = 1.0) -> None:
        self._device, self._every = device, every
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._read: Callable[[], dict[str, float]] | None = None
        self.samples: list[dict[str, float]] = []
        self.off: str | None = "there is no GPU in this run"
        self.peak_bytes = 0

    def __enter__(self) -> Monitor:
        self._began = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._read, self.off = nvml_reader(self._device)
        self._note_memory()
        if self._read is not None or self._device.type == "cpu":
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._note_memory()

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            self._note_memory()
            if self._read is not None:
                found = self._read()
                if found:
                    self.samples.append({"seconds": round(time.perf_counter() - self._began, 2), **found})

    def _note_memory(self) -> None:
        if self._device.type == "cuda":
            now = torch.cuda.max_memory_allocated(self._device)
        else:
            now = library("psutil", "Measuring the memory", DEMO_EXTRA).Process().memory_info().rss
        self.peak_bytes = max(self.peak_bytes, int(now))

    def means(self) -> dict[str, float]:
        """Means of all samples."""
        return means_of(self.samples)


def nvml_reader(device: torch.device) -> tuple[Callable[[], dict[str, float]] | None, str | None]:
    """A function that samples this GPU, or None and the reason why it cannot be sampled."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, 'pynvml is not installed: pip install nvidia-ml-py, or "secateur[gpu]"'
    try:
        nvml.nvmlInit()
        # By UUID: NVML counts all GPUs, and torch only those that CUDA_VISIBLE_DEVICES names.
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        _sample(nvml, handle)
    except nvml.NVMLError as error:
        return None, f"NVML answers: {error}"
    return lambda: _sample_or_nothing(nvml, handle), None


def _sample(nvml: Any, handle: Any) -> dict[str, float]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    found = {"busy": float(rates.gpu), "memory_access": float(rates.memory)}
    found["memory_bytes"] = float(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    with contextlib.suppress(nvml.NVMLError):  # not every GPU reports its power
        found["watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    return found


def _sample_or_nothing(nvml: Any, handle: Any) -> dict[str, float]:
    """A sample; nothing if the driver does not answer this time."""
    try:
        return _sample(nvml, handle)
    except nvml.NVMLError:
        return {}


def means_of(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every figure over the samples that have it."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for key, value in sample.items():
            if key not in NOT_FIGURES:
                found.setdefault(key, []).append(value)
    return {key: round(sum(values) / len(values), 3) for key, values in sorted(found.items())}


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
