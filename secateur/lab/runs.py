"""Which settings differ among runs, and whether a table of them compares like with like."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secateur.errors import ComparisonError, nearest
from secateur.files import read_json

Settings = Mapping[str, Any]
SEED = "seed"
# A seed is what a row is averaged over, and where a run was written says nothing about it.
NEVER_COMPARED = (SEED, "out")
NOT_SET = "not set"


def shown(value: Any) -> str:
    """A setting as text. Equal texts are equal settings: 0 and 0.0, or null and "none"."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"{value:.12g}" if abs(value) < 1e300 else str(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def texts(settings: Settings) -> dict[str, str]:
    """Everything two runs can differ in, as text."""
    return {name: shown(value) for name, value in settings.items() if name not in NEVER_COMPARED}


def differing(configs: Sequence[Settings]) -> dict[str, list[str]]:
    """Each setting that is not the same everywhere, with its values in the order they are met."""
    found = [texts(config) for config in configs]
    names = dict.fromkeys(name for one in found for name in one)
    values = {name: list(dict.fromkeys(one.get(name, NOT_SET) for one in found)) for name in names}
    return {name: several for name, several in values.items() if len(several) > 1}


def check_fair(configs: Sequence[Settings], axes: Sequence[str]) -> None:
    """Refuse a comparison along `axes` if anything but these and the seed differs."""
    _check_axes(configs, axes)
    unfair = {name: values for name, values in differing(configs).items() if name not in axes}
    if unfair:
        listed = "; ".join(f"{name} ({', '.join(values)})" for name, values in unfair.items())
        raise ComparisonError(
            f"These runs differ in more than {', '.join(axes) or 'the seed'}: {listed}. What is meant to differ is"
            f" named so: --by {','.join([*axes, *unfair])}. Otherwise leave out the runs that do not belong."
        )


def _check_axes(configs: Sequence[Settings], axes: Sequence[str]) -> None:
    known = list(dict.fromkeys(name for config in configs for name in texts(config)))
    for axis in axes:
        if axis == SEED:
            raise ComparisonError("Rows cannot differ by seed: seeds are what a row is averaged over. Leave it out.")
        if axis not in known:
            hint = nearest(axis, known)
            raise ComparisonError(f"No run has a setting {axis!r}.{hint} Known: {', '.join(known)}.")


CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
BUDGET = "budget"
AGAIN = "Train it again in another folder, or leave it out."
EVALUATED = ("seconds", "held_out_loss", "quality", "sparsity")
NOT_FINITE = ("nan", "inf", "infinity")


@dataclass(frozen=True)
class Evaluation:
    """What a model was worth on held-out data at one moment."""

    step: int
    seconds: float  # since training began
    held_out_loss: float
    quality: float
    sparsity: float


@dataclass(frozen=True)
class FinishedRun:
    """One run: its settings, what it was worth on the way, and what came of it."""

    folder: Path
    settings: dict[str, Any]
    evaluations: tuple[Evaluation, ...]  # by step
    sparsity: tuple[tuple[int, float], ...]  # step and sparsity, by step
    summary: dict[str, Any]
    final: Evaluation

    @property
    def seed(self) -> int:
        return int(self.settings[SEED])

    @property
    def extended(self) -> bool:
        """Whether it was given more training than the usual budget."""
        return self.settings.get(BUDGET) == "extended"

    @property
    def took(self) -> float:
        """Seconds until the last evaluation was there, whether or not the summary counts that one."""
        return max([self.final.seconds, *(one.seconds for one in self.evaluations)])


def read_runs(paths: Sequence[Path]) -> tuple[list[FinishedRun], list[Path]]:
    """Every run in these folders and below them, or in these files, in order; and the folders of unfinished ones."""
    known: set[Path] = set()  # named twice, read once
    finished: list[FinishedRun] = []
    unfinished: list[Path] = []
    for path in paths:
        if path.is_file():
            finished += [] if path.resolve() in known else read_kept(path)
            known.add(path.resolve())
            continue
        for folder in _folders(path):
            if folder.resolve() not in known:
                known.add(folder.resolve())
                if (folder / SUMMARY).exists():
                    finished.append(read_run(folder))
                else:
                    unfinished.append(folder)
    return finished, unfinished


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ComparisonError(
            f"There is no folder {path}. Give folders that `secateur train` or `sweep` wrote, or files of `compare"
            " --json`."
        )
    found = list(run_folders(path))
    if not found:
        raise ComparisonError(f"There is no run in {path} or below it: a run's folder holds a {CONFIG}.")
    return found


def run_folders(path: Path) -> Iterator[Path]:
    """Folders of runs, by name. Nothing is looked for inside a run: a saved model has a config.json too."""
    if any((path / name).exists() for name in (CONFIG, METRICS, SUMMARY)):  # one of them may be lost
        yield path
        return
    for inner in sorted(path.iterdir()):
        if inner.is_dir():
            yield from run_folders(inner)


def read_run(folder: Path) -> FinishedRun:
    """One finished run; what is damaged in its folder is named."""
    lines = [line for line in _lines(folder / METRICS) if "step" in line]
    run = _run(folder, _mapping(folder / CONFIG), _mapping(folder / SUMMARY), lines)
    if not any(found.step == run.final.step for found in run.evaluations):
        raise ComparisonError(
            f"{folder / METRICS} is damaged: it lacks the evaluation at step {run.final.step}, the last. {AGAIN}"
        )
    return run


def read_kept(path: Path) -> list[FinishedRun]:
    """The runs in a file that `secateur compare --json` wrote."""
    found = _mapping(path).get("runs")
    if not isinstance(found, list) or not found:
        raise ComparisonError(f"{path} holds no runs. Give a file that `secateur compare --json` wrote, or folders.")
    return [_kept_run(path, run) for run in found]


def _kept_run(path: Path, run: Any) -> FinishedRun:
    try:
        settings, summary = dict(run["settings"]), dict(run["summary"])
        path_taken = [{"step": step, "sparsity": gone} for step, gone in run["path"]]
        lines, folder = [*map(dict, run["evaluations"]), *path_taken], Path(run["folder"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ComparisonError(f"{path} is not as `secateur compare --json` writes it: {error!r}.") from error
    return _run(folder, settings, summary, lines)


def _run(folder: Path, settings: dict[str, Any], summary: dict[str, Any], lines: list[dict[str, Any]]) -> FinishedRun:
    """One run from its settings, its lines of numbers and its summary."""
    if type(settings.get(SEED)) is not int:
        raise ComparisonError(
            f"{folder / CONFIG} names no whole seed. Runs are paired by seed: write one, or leave it out."
        )
    if BUDGET in summary:
        settings = {**settings, BUDGET: summary[BUDGET]}  # what it got counts, not what was asked
    try:
        # After a resumed run a step may stand there twice: the later line belongs to the model that came out.
        judged = {line["step"]: _evaluation(line) for line in lines if "held_out_loss" in line}
        path = {line["step"]: number(line["sparsity"]) for line in lines if "sparsity" in line}
        final = _evaluation({"step": summary["steps"], **summary})
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ComparisonError(
            f"The run in {folder} is not as `secateur train` writes it: {error!r}. {AGAIN}"
        ) from error
    evaluations = tuple(judged[step] for step in sorted(judged))
    return FinishedRun(folder, settings, evaluations, tuple(sorted(path.items())), summary, final)


def number(value: Any) -> float:
    """A number from JSON, which knows no infinity: null and texts stand for what is not finite."""
    if (isinstance(value, str) and value.lower().lstrip("+-") not in NOT_FINITE) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no number")
    return math.nan if value is None else float(value)


def _evaluation(line: dict[str, Any]) -> Evaluation:
    if type(line["step"]) is not int or line["step"] < 0:
        raise ValueError(f"{line['step']!r} is no step")
    return Evaluation(line["step"], *(number(line[name]) for name in EVALUATED))


def _mapping(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(path, dict, ComparisonError, AGAIN)
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ComparisonError(f"{path} cannot be read: {error}. {AGAIN}") from error
    return [_line(f"{path}, line {place}", line) for place, line in enumerate(lines, 1) if line.strip()]


def _line(source: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ComparisonError(f"{source}: not JSON ({error}). {AGAIN}") from error
    if not isinstance(found, dict):
        raise ComparisonError(f"{source}: holds a {type(found).__name__}, not an object. {AGAIN}")
    return found


@dataclass(frozen=True)
class Measure:
    """What the runs are judged by. Perplexities are judged by their logarithm, the held-out loss."""

    name: str
    higher_is_better: bool

    @property
    def logarithmic(self) -> bool:
        return self.name == "perplexity"

    @property
    def judged(self) -> str:
        return "held-out loss" if self.logarithmic else self.name

    def of(self, found: Evaluation) -> float:
        return found.held_out_loss if self.logarithmic else found.quality


def measure_of(runs: Sequence[FinishedRun]) -> Measure:
    """What all of them are judged by, or an error if that is not one thing."""
    found: dict[Measure, Any] = {}
    for run in runs:
        name, higher = run.summary.get("quality_name"), run.summary.get("higher_is_better")
        if not isinstance(name, str) or not isinstance(higher, bool):
            raise ComparisonError(f"The summary of {run.folder} does not say quality_name and higher_is_better.")
        found.setdefault(Measure(name, higher), run.folder)
    if len(found) > 1:
        listed = "; ".join(f"{measure.name} ({folder})" for measure, folder in found.items())
        raise ComparisonError(f"These runs are judged by different things: {listed}. Compare those of one kind.")
    return next(iter(found))
