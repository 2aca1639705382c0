"""A run's folder: its settings, its numbers line by line, its checkpoint, and the summary that says it is finished."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from secateur.errors import SaveError, SecateurError, StateError
from secateur.files import check_folder, clear, locked, read_json, write
from secateur.lab.checkpoint import BEST, CHECKPOINT, check_checkpoint, check_tensors
from secateur.lab.config import Experiment
from secateur.lab.rows import measure_of
from secateur.lab.runs import CONFIG, METRICS, SUMMARY, read_run

WEIGHTS = "model.safetensors"
REPORT, GRADIENT, GPU = "report.json", "gradient.json", "gpu.json"
LOCK = ".lock"
ADVICE = "Put back a copy of it, or name another folder with --out."


def check_place(path: Path) -> None:
    """Refuse a folder that a run cannot have, before its data is read: it cannot be written, holds something else, or
    another process trains there."""
    check_folder(path, replaced=False)
    others = [] if (path / CONFIG).exists() or not path.exists() else [one.name for one in path.iterdir()]
    if any(name != LOCK and not name.startswith(f".{CONFIG}.") for name in others):  # those a killed run may leave
        raise SecateurError(f"{path} is there already and holds no run. Name another folder with --out.")
    first = os.environ.get("RANK", "0") == "0"  # the processes of one run must not meet each other here
    if first and (path / LOCK).exists():
        with locked(path / LOCK, _busy(path)):
            pass


def _busy(path: Path) -> str:
    return f"Another process is training in {path}. Wait for it, or name another folder with --out."


class RunFolder:
    """Where a run writes. A folder that holds another experiment is refused; one with a checkpoint is continued."""

    def __init__(self, path: Path, experiment: Experiment, fingerprint: str) -> None:
        self.path = path
        config = json.loads(json.dumps(asdict(experiment) | {"fingerprint": fingerprint}))  # as the file gives it back
        if (path / CONFIG).exists():
            found = read_json(path / CONFIG, dict, StateError, ADVICE)
            if found != config:
                differing = sorted(key for key in {*found, *config} if found.get(key) != config.get(key))
                raise SecateurError(
                    f"{path} holds a run with other settings ({', '.join(differing)}). Name another folder with --out."
                )
        else:
            check_place(path)
            path.mkdir(parents=True, exist_ok=True)
            write(path / CONFIG, json.dumps(config, indent=1) + "\n")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other process trains here. What a killed one left half done is cleared away first."""
        with locked(self.path / LOCK, _busy(self.path)):
            for name in (CHECKPOINT, BEST, CONFIG, METRICS, SUMMARY, REPORT, GRADIENT, GPU, "report.html"):
                clear(self.path / name)
            for name in (CHECKPOINT, BEST):  # a killed process leaves its lock; nobody else writes here now
                (self.path / f".{name}.lock").unlink(missing_ok=True)
            yield

    @property
    def finished(self) -> bool:
        """Whether there is a summary. If anything of the run is damaged that is an error, and not the end of it."""
        if not (self.path / SUMMARY).exists():
            return False
        run = read_run(self.path)
        measure_of([run])
        for name, kind in (REPORT, dict), (GRADIENT, list), (GPU, list):
            if (self.path / name).exists() or (name == REPORT and run.summary.get("layers")):
                read_json(self.path / name, kind, StateError, ADVICE)
        if (self.path / BEST).exists():
            self.check_best()
        if (self.path / CHECKPOINT).exists():
            check_checkpoint(self.path / CHECKPOINT)
        return True

    def check_best(self) -> None:
        """Refuse to go on beside best weights that are damaged."""
        check_tensors(self.path / BEST / WEIGHTS)

    @property
    def bytes(self) -> int:
        """What the run takes on the disk."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint, if there is one."""
        return self.path / CHECKPOINT if (self.path / CHECKPOINT).exists() else None

    def forget_weights(self) -> None:
        """Keep the numbers of a finished run and none of its weights."""
        for name in (CHECKPOINT, BEST):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def rewind(self, count: int) -> None:
        """Keep the first `count` lines of numbers, which were there when the checkpoint was written. The steps of those
        that follow are taken again; the last may have been cut short."""
        path = self.path / METRICS
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[:count] if path.exists() else []
            found = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError) as error:
            raise StateError(f"{path} is damaged ({error}). {ADVICE}") from error
        whole = [line for line in found if isinstance(line, dict) and type(line.get("step")) is int]
        if len(whole) < count:
            raise StateError(f"{path} is damaged: it has {len(whole)} of the {count} lines it had. {ADVICE}")
        write(path, "".join(line + "\n" for line in lines))

    def note(self, numbers: Mapping[str, Any]) -> None:
        """Add a line of numbers."""
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(numbers) + "\n")
        except OSError as error:
            raise SaveError(f"{self.path / METRICS} cannot be written ({error.strerror}).") from error

    def finish(self, summary: Mapping[str, Any], report: str | None, looks: Mapping[str, Any]) -> None:
        """Write the report, whatever else was looked at, and then the summary: a folder that has one is done."""
        for name, numbers in looks.items():
            if numbers:
                write(self.path / name, json.dumps(numbers) + "\n")
        if report is not None:
            write(self.path / REPORT, report + "\n")
        write(self.path / SUMMARY, json.dumps(summary, indent=1) + "\n")
