"""`secateur sweep`: a grid of runs that differ only in named settings, trained here, in several processes, or on Ray.

First the cells of a grid, then how a cell is trained and recorded, last who trains them. A run that fails does not end
the others; it is named at the end.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from secateur.errors import SecateurError, library, nearest, one_line
from secateur.files import check_folder, check_room, folder_name, write
from secateur.lab.compare import compare
from secateur.lab.config import DEFAULTS, Experiment, merge, without_idle
from secateur.lab.data import load
from secateur.lab.encoding import end_with_parent
from secateur.lab.run import RunFolder, check_place, run
from secateur.lab.runs import (
    CONFIG,
    METRICS,
    SCORE,
    SUMMARY,
    check_fair,
    own_differences,
    read_kept,
    read_run,
    shown,
)
from secateur.lab.trainer import Execution, Trainer, dry_run
from secateur.settings import checked, from_mapping, read_toml

TABLES = ("base", "axes")
DENSE = "dense"
NONE = "none"  # TOML has no null
RIVAL = "magnitude"  # the baseline of a record, if the grid has it
RETRIES = 2  # on Ray: if a node is lost, another continues its run, from storage that all nodes share
ENDING = 5.0  # seconds that a process has to end before it is killed
ERROR = "error.txt"  # the traceback of an unexpected error, in the folder of its run
Axes = Mapping[str, list[Any]]
Work = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its experiment and the name of its folder."""

    name: str
    experiment: Experiment


def cells_of(path: Path, changes: Mapping[str, Any] | None = None) -> tuple[list[str], list[Cell]]:
    """The settings in which the cells of a grid differ, without the seed, and its cells, each experiment once.

    `changes` are settings of all cells that rank above those of the grid. A setting that does nothing in a cell, such
    as the sparsity of a dense one, is left out there.
    """
    layers, blocks = _read(path, changes or {})
    cells: dict[Experiment, Cell] = {}
    names: dict[str, Experiment] = {}
    read: set[str] = set()
    for axes in blocks:
        for values in itertools.product(*axes.values()):
            cell, settings = _cell(path, layers, dict(zip(axes, values, strict=True)))
            read |= settings.keys()
            if cell.experiment not in cells and names.setdefault(cell.name, cell.experiment) != cell.experiment:
                raise SecateurError(f"{path}: two runs would have the folder {cell.name}. Change one of the values.")
            cells.setdefault(cell.experiment, cell)
    _check_read(path, {**layers[-1], **{name: values for axes in blocks for name, values in axes.items()}}, read)
    configs = [asdict(experiment) for experiment in cells]
    differ = [axis for axis in dict.fromkeys(axis for axes in blocks for axis in axes) if axis != "seed"]
    differ += [name for name in own_differences(configs) if name not in differ]  # what presets and budgets imply
    check_fair(configs, differ)
    return differ, list(cells.values())


def _cell(path: Path, layers: Sequence[Mapping[str, Any]], chosen: dict[str, Any]) -> tuple[Cell, dict[str, Any]]:
    """The cell of these values of the axes, and its settings that do something."""
    named, sources = dict(chosen), [*layers, chosen]
    if chosen.get(SCORE) == DENSE:
        chosen[SCORE] = None
        sources = [{name: value for name, value in source.items() if name != "preset"} for source in sources]
    settings = without_idle(merge(*(checked(Experiment, source, str(path)) for source in sources)))
    parts = [f"{name}={shown(value)}" for name, value in named.items() if name in settings]
    return Cell(folder_name("-".join(parts)), from_mapping(Experiment, settings, str(path))), settings


def _check_read(path: Path, given: Mapping[str, Any], read: set[str]) -> None:
    """Refuse settings of a grid that do nothing in any of its cells."""
    unread = [name for name, value in given.items() if name not in read and value not in (DEFAULTS.get(name), [])]
    if unread:
        raise SecateurError(f"{path}: {', '.join(unread)} would do nothing in any of its runs. Leave it out.")


def _read(path: Path, changes: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Axes]]:
    """The settings that all cells share, of the recipe and of the grid itself, and the blocks of axes."""
    found = read_toml(path)
    for table in found:
        if table not in TABLES:
            raise SecateurError(f"{path} has a table [{table}].{nearest(table, TABLES)} Use [base] and [axes].")
    base, blocks = found.get("base", {}), found.get("axes", [])
    if not isinstance(base, dict):
        raise SecateurError(f"{path}: base must be a table [base] with settings; got {base!r}.")
    base, blocks = dict(base), blocks if isinstance(blocks, list) else [blocks]
    if not any(blocks):
        raise SecateurError(f"{path} has no [axes], so there is one run only: use `secateur train`.")
    recipe = read_toml(path.parent / str(base.pop("recipe"))) if "recipe" in base else {}
    for name in changes:
        if any(name in axes for axes in blocks if isinstance(axes, dict)):
            raise SecateurError(f"--set {name}: {path} has it in [axes]. Change the grid.")
    return [recipe, {**base, **changes}], [_axes(path, base, axes) for axes in blocks]


def _axes(path: Path, base: Mapping[str, Any], axes: Any) -> Axes:
    """One block of axes, checked, with None for "none"."""
    if not isinstance(axes, dict):
        raise SecateurError(f"{path}: axes must be a table [axes], or several [[axes]]; got {axes!r}.")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise SecateurError(f"{path}: axis {name} must be a list of values, such as seed = [0, 1, 2].")
        if name in base:
            raise SecateurError(f"{path}: {name} is in [base] and in [axes]. Remove one of them.")
    return {name: [None if value == NONE else value for value in values] for name, values in axes.items()}


def run_cell(
    config: Mapping[str, Any],
    folder: str,
    cpu: bool,
    checkpoint_every: int,
    numbers_only: bool,
    until: float | None = None,
    read: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Train one cell, or continue it, up to the time `until`, and return its summary; `read` loads the dataset."""
    check_place(Path(folder))
    experiment = from_mapping(Experiment, config, folder)
    data = read(experiment.data) if read else None
    trainer = Trainer(experiment, Execution(cpu=cpu, checkpoint_every=checkpoint_every), data)
    place = RunFolder(Path(folder), trainer.experiment, trainer.fingerprint)
    if place.finished:
        done = read_run(place.path)
        return {**done.summary, **asdict(done.final), "steps": done.final.step}  # JSON has null for NaN
    check_room(place.path, max(0, trainer.room - place.bytes))
    if until is not None:  # now, since building the model and reading the data take time too
        trainer.execution = replace(trainer.execution, max_seconds=max(0.0, until - time.time()))
    found = run(trainer, place)
    if numbers_only and place.finished:
        place.forget_weights()
    return found


class Record:
    """A file with all finished runs of a sweep, written anew after each of them, as `secateur compare --json` does.

    Runs that are in it already count as finished, so a sweep continues on a machine that has the file but not the
    folders of its runs.
    """

    def __init__(self, path: Path, out: Path, axes: Sequence[str], about: Mapping[str, Any]) -> None:
        self._path, self._out, self._axes, self._about = path, out, axes, about
        self._kept = read_kept(path) if path.exists() else []

    def has(self, cell: Cell) -> bool:
        """Whether the file has this cell."""
        config = json.loads(json.dumps(asdict(cell.experiment)))
        return any(all(run.settings.get(name) == value for name, value in config.items()) for run in self._kept)

    def write(self, cells: Sequence[Cell]) -> None:
        """Write the finished runs of these cells, and those that the file had."""
        fresh = [read_run(self._out / cell.name) for cell in cells if (self._out / cell.name / SUMMARY).exists()]
        known = [run.settings for run in fresh]
        runs = [*(run for run in self._kept if run.settings not in known), *fresh]
        rival = f"{SCORE}={RIVAL}"
        scores = {run.settings.get(SCORE) for run in runs}
        found = compare(runs, self._axes, rival if SCORE in self._axes and RIVAL in scores else None)
        write(self._path, found.to_json(self._about))


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    cpu: bool,
    checkpoint_every: int,
    numbers_only: bool,
    max_seconds: float | None = None,
    workers: int = 1,
    resources: tuple[float, float] | None = None,
    record: Record | None = None,
) -> int:
    """Run the cells in folders below `out`, and return how many are still to be run, because the time was up.

    They run one after another here, in `workers` processes, or on Ray with `resources`, CPUs and GPUs of each.
    """
    until = None if max_seconds is None else time.time() + max_seconds
    check_folder(out, replaced=False)
    _check_ours(out)
    known = [cell for cell in cells if record is not None and record.has(cell)]
    todo = [cell for cell in cells if cell not in known]
    said = f", {len(known)} of them in the record already" if known else ""
    print(f"secateur: {len(cells)} runs{said}, in {out}", file=sys.stderr)
    how = cpu, checkpoint_every, numbers_only, until
    jobs = [Job(cell.name, out / cell.name, (asdict(cell.experiment), str(out / cell.name), *how)) for cell in todo]
    outcomes = Outcomes(len(jobs), lambda: record.write(cells) if record is not None else None)
    if resources is not None:
        on_ray(jobs, run_cell, outcomes, *resources)
    elif workers > 1:
        Workers(workers, _devices(cpu)).run(jobs, run_cell, outcomes, until)
    else:
        read = lru_cache(maxsize=1)(load)  # most grids have one dataset
        in_turn(jobs, partial(run_cell, read=read), outcomes, until)
    outcomes.check()
    return len(jobs) - outcomes.ended + len(outcomes.unfinished)


def _devices(cpu: bool) -> list[str]:
    """The GPUs that workers take in turn, if there are several."""
    count = 0 if cpu else torch.cuda.device_count()
    return [f"cuda:{number}" for number in range(count)] if count > 1 else []


def _check_ours(out: Path) -> None:
    """Refuse a folder with other things than runs in it."""
    inside = list(out.iterdir()) if out.is_dir() else []
    runs = (any((one / name).exists() for name in (CONFIG, METRICS, SUMMARY)) for one in inside)
    if inside and not any(runs) and not any(one.is_dir() and not any(one.iterdir()) for one in inside):
        raise SecateurError(f"{out} exists and holds no runs. Name another folder with --out.")


def dry_run_cells(cells: Sequence[Cell], cpu: bool) -> str:
    """Two small steps of every cell, once for all seeds; returns a line for each. The error names cells that failed."""
    alone = {replace(cell.experiment, seed=0): cell.name for cell in reversed(cells)}
    lines, failed = [], []
    for experiment, name in reversed(alone.items()):
        try:
            lines.append(f"{name}: {dry_run(experiment, cpu)}")
        except SecateurError as error:
            failed.append(f"{name}: {error}")
    if failed:
        raise SecateurError(f"{len(failed)} of {len(alone)} runs would fail: {' '.join(failed[:3])}")
    steps = sum(cell.experiment.steps_taken for cell in cells)
    seen = sum(cell.experiment.steps_taken * cell.experiment.step_size for cell in cells)
    return "\n".join([*lines, f"{len(cells)} runs, {steps:,} steps, {seen:,} tokens or images in all"])


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
    line = one_line(error)
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
