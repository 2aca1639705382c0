"""Runs the jobs of a sweep: one after another here, in several processes of this machine, or on a Ray cluster.

A job that fails does not end the others; it is named at the end. Results come back as they finish.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from secateur.errors import SecateurError, library
from secateur.files import write
from secateur.lab.encoding import end_with_parent

RETRIES = 2  # on Ray: if a node is lost, another continues its job, from storage that all nodes share
ENDING = 5.0  # seconds that a process has to end before it is killed
ERROR = "error.txt"  # the traceback of an unexpected error, in the folder of its run
Work = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """A run of a sweep: its name, its folder and the arguments of the function that trains it."""

    name: str
    folder: Path
    arguments: tuple[Any, ...]


class Outcomes:
    """Prints the result of each job as it ends, and says at the end which failed. `after` is called after each run that
    finished."""

    def __init__(self, count: int, after: Callable[[], None]) -> None:
        self.count, self.ended = count, 0
        self.failed: list[str] = []
        self.unfinished: list[str] = []  # stopped by the time limit
        self._after = after

    def add(self, name: str, summary: Mapping[str, Any]) -> None:
        """Note the summary of a job that ended, at its last step or at the time limit."""
        if summary["steps"] < summary.get("asked_steps", 0):
            self.unfinished.append(name)
            self._say(name, f"stopped after {summary['steps']} of {summary['asked_steps']} steps")
            return
        result = f"{summary['quality_name']} {summary['quality']:.4f}, {summary['sparsity']:.2%} sparsity"
        self._say(name, f"{result}, {summary['seconds']:.0f} s")
        self._after()

    def fail(self, name: str, why: str) -> None:
        """Note a job that ended with an error."""
        self.failed.append(f"{name} ({why.rstrip('.')})")
        self._say(name, f"failed: {why}")

    def _say(self, name: str, text: str) -> None:
        self.ended += 1
        print(f"[{self.ended}/{self.count}] {name}: {text}", file=sys.stderr, flush=True)

    def check(self) -> None:
        """Raise if a job failed."""
        if self.failed:
            more = f" and {len(self.failed) - 3} more" if len(self.failed) > 3 else ""
            raise SecateurError(
                f"{len(self.failed)} of {self.count} runs failed: {'; '.join(self.failed[:3])}{more}. Run the same"
                " command to continue."
            )


def reason(error: BaseException, folder: Path) -> str:
    """An error in one line. An unexpected one is written to the folder of its run with its traceback."""
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, SecateurError | OSError):
        return line
    if folder.is_dir():
        write(folder / ERROR, "".join(traceback.format_exception(error)))
    return f"{type(error).__name__}: {line} (see {folder / ERROR})"


def in_turn(jobs: Sequence[Job], work: Work, outcomes: Outcomes, until: float | None) -> None:
    """Run the jobs here, one after another, until the time (as of time.time) is up."""
    for job in jobs:
        if until is not None and time.time() >= until:
            return
        try:
            outcomes.add(job.name, work(*job.arguments))
        except Exception as error:  # whatever it is, the other jobs can still run
            outcomes.fail(job.name, reason(error, job.folder))


class Workers:
    """Runs jobs in up to `count` processes at a time, a fresh one for each job."""

    def __init__(self, count: int, devices: Sequence[str] = ()) -> None:
        self._slots = list(range(count))  # those that are free
        self._devices = devices  # one for each slot, in turn; none: as Accelerate chooses
        self._threads = max(1, torch.get_num_threads() // count)
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[Connection, tuple[SpawnProcess, Job, int]] = {}

    def run(self, jobs: Sequence[Job], work: Work, outcomes: Outcomes, until: float | None) -> None:
        """Run the jobs; an error here, Ctrl-C too, ends all processes."""
        waiting = list(jobs)
        try:
            while waiting or self._running:
                while waiting and self._slots and (until is None or time.time() < until):
                    self._start(waiting.pop(0), work)
                if not self._running:
                    return  # the time is up
                for connection in wait(list(self._running)):
                    self._collect(connection, outcomes)  # type: ignore[arg-type]
        finally:
            self._end()

    def _start(self, job: Job, work: Work) -> None:
        slot = self._slots.pop(0)
        device = self._devices[slot % len(self._devices)] if self._devices else None
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(theirs, work, job, self._threads, device))
        process.start()
        theirs.close()
        self._running[ours] = process, job, slot

    def _collect(self, connection: Connection, outcomes: Outcomes) -> None:
        process, job, slot = self._running.pop(connection)
        try:
            found = connection.recv()
        except EOFError:  # it ended without a word: killed, or out of memory
            found = None
        connection.close()
        process.join()
        self._slots.append(slot)
        if found is None:
            outcomes.fail(job.name, f"its process ended with code {process.exitcode}")
        elif isinstance(found, str):
            outcomes.fail(job.name, found)
        else:
            outcomes.add(job.name, found)

    def _end(self) -> None:
        processes = [process for process, _, _ in self._running.values()]
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(ENDING)
            if process.is_alive():
                process.kill()
                process.join()


def _work(connection: Connection, work: Work, job: Job, threads: int, device: str | None) -> None:
    """In a process of its own: do the work and send its summary, or the reason why it failed as text."""
    end_with_parent()
    torch.set_num_threads(threads)
    if device is not None:
        os.environ["ACCELERATE_TORCH_DEVICE"] = device
    try:
        connection.send(work(*job.arguments))
    except Exception as error:  # its text is all that the parent needs
        connection.send(reason(error, job.folder))


def on_ray(jobs: Sequence[Job], work: Work, outcomes: Outcomes, cpus: float, gpus: float) -> None:
    """Run the jobs on a Ray cluster with these CPUs and GPUs each."""
    ray = library("ray", "--engine ray", '"secateur[ray]"')
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES)(work)
    waiting = {task.remote(*job.arguments): job for job in jobs}
    while waiting:
        (done,), _ = ray.wait(list(waiting), num_returns=1)
        job = waiting.pop(done)
        try:
            outcomes.add(job.name, ray.get(done))
        except ray.exceptions.RayError as error:
            outcomes.fail(job.name, str(error).strip().splitlines()[-1])
