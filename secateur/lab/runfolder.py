"""A run's folder: its settings, its numbers line by line, its checkpoint, and the summary that says it is finished."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from secateur.errors import SecateurError
from secateur.lab.experiment import Experiment
from secateur.lab.files import write

try:
    import fcntl
except ModuleNotFoundError:  # Windows has none: nothing keeps two processes apart there
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS, SUMMARY, CHECKPOINT, BEST = "config.json", "metrics.jsonl", "summary.json", "checkpoint", "best"
LOCK = ".lock"


class RunFolder:
    """Where a run writes. A folder that holds another experiment is refused; one with a checkpoint is continued."""

    def __init__(self, path: Path, experiment: Experiment, fingerprint: str) -> None:
        self.path = path
        config = json.loads(json.dumps(asdict(experiment) | {"fingerprint": fingerprint}))  # as the file gives it back
        if (path / CONFIG).exists():
            found = json.loads((path / CONFIG).read_text(encoding="utf-8"))
            if found != config:
                differing = sorted(key for key in {*found, *config} if found.get(key) != config.get(key))
                raise SecateurError(
                    f"{path} holds a run with other settings ({', '.join(differing)}). Name another folder with --out."
                )
        elif path.exists() and (path.is_file() or any(path.iterdir())):
            raise SecateurError(f"{path} is there already and holds no run. Name another folder with --out.")
        else:
            path.mkdir(parents=True, exist_ok=True)
            write(path / CONFIG, json.dumps(config, indent=1) + "\n")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other process trains here. What a killed one left half done is mended first."""
        with (self.path / LOCK).open("w", encoding="utf-8") as file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go of when the process ends, however it does
            except OSError as error:
                raise SecateurError(
                    f"Another process is training in {self.path}. Wait for it, or name another folder with --out."
                ) from error
            self._recover()
            yield

    def _recover(self) -> None:
        """Put back what was moved aside when the run was killed before the new one stood in its place; then forget what
        was being written."""
        for name in (CHECKPOINT, BEST):
            for old in self.path.glob(f".{name}.*.old"):
                if not (self.path / name).exists():
                    old.rename(self.path / name)
            for partial in self.path.glob(f".{name}.*"):
                shutil.rmtree(partial, ignore_errors=True)

    @property
    def finished(self) -> bool:
        return (self.path / SUMMARY).exists()

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint, if there is one."""
        return self.path / CHECKPOINT if (self.path / CHECKPOINT).is_dir() else None

    def forget_weights(self) -> None:
        """Keep the numbers of a finished run and none of its weights."""
        for name in (CHECKPOINT, BEST):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def rewind(self, step: int) -> None:
        """Forget numbers of steps that come after this one, which will be taken again."""
        path = self.path / METRICS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = []
        for line in lines:
            try:
                kept += [line] if json.loads(line)["step"] <= step else []
            except ValueError:  # a line that was being written when the run was killed
                break
        write(path, "".join(line + "\n" for line in kept))

    def note(self, numbers: Mapping[str, Any]) -> None:
        """Add a line of numbers."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(numbers) + "\n")

    def finish(self, summary: Mapping[str, Any], report: str | None, looks: Mapping[str, Any]) -> None:
        """Write the report, whatever else was looked at, and then the summary: a folder that has one is done."""
        for name, numbers in looks.items():
            if numbers:
                write(self.path / name, json.dumps(numbers) + "\n")
        if report is not None:
            write(self.path / "report.json", report + "\n")
        write(self.path / SUMMARY, json.dumps(summary, indent=1) + "\n")
