"""Finished runs: read from folders or JSON, checked for a fair comparison, and grouped into rows over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from secateur.errors import ComparisonError, nearest
from secateur.files import read_json
from secateur.settings import parse

Settings = Mapping[str, Any]
SEED = "seed"
SCORE = "score"
NEVER_COMPARED = (SEED, "out")  # rows are averages over seeds, and the folder does not change a run
NOT_SET = "not set"
# Settings that have no effect on a dense run, which is one without a score.
PRUNING = (
    "sparsity", "pattern", "regrow", "schedule", "begin", "end", "every", "scope", "allocation", "drop", "until",
    "skip", "prunable", "preset", "mask_gradients",
)  # fmt: skip
CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
BUDGET = "budget"
PRESET = "preset"
OF_PRESET = ("schedule", "begin", "end", "prunable")  # what a preset sets, beside the budget: its name says it
EXTENDED = "[extended]"
AGAIN = "Train it again in another folder, or leave it out."
EVALUATED = ("seconds", "held_out_loss", "quality", "sparsity")
NOT_FINITE = ("nan", "inf", "infinity")


def shown(value: Any) -> str:
    """A setting as text; settings are equal if their texts are, such as 0 and 0.0, or null and "none"."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"{value:.12g}" if abs(value) < 1e300 else str(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def texts(settings: Settings) -> dict[str, str]:
    """The settings in which runs can differ, as text."""
    return {name: shown(value) for name, value in settings.items() if name not in NEVER_COMPARED}


def differing(configs: Sequence[Settings]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, with their values in order of appearance.

    A setting that is none in some runs and missing in others is the same: the others are of a version without it.
    """
    found = [texts(config) for config in configs]
    names = dict.fromkeys(name for one in found for name in one)
    values = {name: list(dict.fromkeys(one.get(name, NOT_SET) for one in found)) for name in names}
    return {name: several for name, several in values.items() if len({*several} - {NOT_SET}) > 1 or _lacks(several)}


def _lacks(values: Sequence[str]) -> bool:
    """Whether a setting has a value in some runs and is missing in others."""
    return NOT_SET in values and any(value not in (NOT_SET, "none") for value in values)


def own_differences(configs: Sequence[Settings]) -> dict[str, list[str]]:
    """The settings in which runs differ. Beside a dense run, a pruning setting that all pruned runs share does not
    count: a dense run has none."""
    different = differing(configs)
    pruned = [config for config in configs if shown(config.get(SCORE)) != "none"]
    if not 0 < len(pruned) < len(configs):
        return different
    among_pruned = differing(pruned)
    return {name: values for name, values in different.items() if name not in PRUNING or name in among_pruned}


def own_axes(configs: Sequence[Settings]) -> list[str]:
    """The one setting in which runs may differ without being asked; an error if they differ in more."""
    different, own = differing(configs), own_differences(configs)
    if len(own) > 1:
        raise ComparisonError(
            f"These runs differ in {len(own)} settings: {_listed(own)}. Name the settings in which rows may differ,"
            f" --by {','.join(own)}, or leave out the runs that do not belong."
        )
    return list(different)


def check_fair(configs: Sequence[Settings], axes: Sequence[str]) -> None:
    """Refuse runs that differ in anything but `axes` and the seed."""
    _check_axes(configs, axes)
    unfair = {name: values for name, values in own_differences(configs).items() if name not in axes}
    if unfair:
        raise ComparisonError(
            f"These runs differ in more than {', '.join(axes) or 'the seed'}: {_listed(unfair)}. If that is intended,"
            f" say so: --by {','.join([*axes, *unfair])}. Otherwise leave out the runs that do not belong."
        )


def _listed(different: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{name} ({', '.join(values)})" for name, values in different.items())


def _check_axes(configs: Sequence[Settings], axes: Sequence[str]) -> None:
    known = list(dict.fromkeys(name for config in configs for name in texts(config)))
    for axis in axes:
        if axis == SEED:
            raise ComparisonError("Rows cannot differ by seed: a row is an average over seeds. Leave it out of --by.")
        if axis not in known:
            hint = nearest(axis, known)
            raise ComparisonError(f"No run has a setting {axis!r}.{hint} Known: {', '.join(known)}.")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on held-out data."""

    step: int
    seconds: float  # since training began
    held_out_loss: float
    quality: float
    sparsity: float


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its settings, evaluations and summary."""

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
        """Whether it was trained for more steps than usual."""
        return self.settings.get(BUDGET) == "extended"

    @property
    def took(self) -> float:
        """Seconds until the last evaluation, which the summary may not include."""
        return max([self.final.seconds, *(one.seconds for one in self.evaluations)])


def read_runs(paths: Sequence[Path]) -> tuple[list[FinishedRun], list[Path]]:
    """The finished runs in these folders, below them or in these JSON files, in order; and unfinished runs' folders."""
    known: set[Path] = set()  # a path given twice is read once
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
            f"There is no folder {path}. Give folders written by `secateur train` or `sweep`, or files written by"
            " `secateur compare --json`."
        )
    found = list(run_folders(path))
    if not found:
        raise ComparisonError(f"There is no run in {path} or below it: a run's folder holds a {CONFIG}.")
    return found


def run_folders(path: Path) -> Iterator[Path]:
    """Folders of runs, by name. A run's own subfolders are not searched: a saved model has a config.json too."""
    if any((path / name).exists() for name in (CONFIG, METRICS, SUMMARY)):  # any one of them may be missing
        yield path
        return
    for inner in sorted(path.iterdir()):
        if inner.is_dir():
            yield from run_folders(inner)


def read_run(folder: Path) -> FinishedRun:
    """A finished run from its folder; an error names a damaged file."""
    lines = [line for line in _lines(folder / METRICS) if "step" in line]
    run = _run(folder, _mapping(folder / CONFIG), _mapping(folder / SUMMARY), lines)
    if not any(found.step == run.final.step for found in run.evaluations):
        raise ComparisonError(
            f"{folder / METRICS} is damaged: it lacks the evaluation at step {run.final.step}, the last. {AGAIN}"
        )
    return run


def read_kept(path: Path) -> list[FinishedRun]:
    """The runs in a file written by `secateur compare --json`."""
    advice = "Give a file written by `secateur compare --json`, or folders."
    found = read_json(path, dict, ComparisonError, advice).get("runs")
    if not isinstance(found, list) or not found:
        raise ComparisonError(f"{path} holds no runs. {advice}")
    return [_kept_run(path, run) for run in found]


def kept_choices(paths: Sequence[Path]) -> tuple[list[str] | None, str | None]:
    """The --by and --baseline that a JSON file was made with; None unless it is the only path."""
    if len(paths) != 1 or not paths[0].is_file():
        return None, None
    kept = read_json(paths[0], dict, ComparisonError)
    axes, baseline = kept.get("axes"), kept.get("baseline")
    named = axes is None or (isinstance(axes, list) and all(isinstance(axis, str) for axis in axes))
    if not named or not isinstance(baseline, str | None):
        raise ComparisonError(f"{paths[0]} is damaged, or not from `secateur compare --json`: its axes or baseline.")
    return axes, baseline


def plain_run(run: FinishedRun) -> dict[str, Any]:
    """A run for JSON, as `read_kept` reads it. Of its sparsity only the steps around a change are kept."""
    curve = [asdict(found) for found in run.evaluations]
    gone = run.sparsity
    around = zip([None, *gone], gone, [*gone[1:], None], strict=False)
    bends = [now for last, now, then in around if not (last and then and last[1] == now[1] == then[1])]
    kept = {"folder": str(run.folder), "settings": run.settings, "evaluations": curve, "path": bends}
    return {**kept, "summary": run.summary}


def finite(value: Any) -> Any:
    """The same for JSON, with null for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def _kept_run(path: Path, run: Any) -> FinishedRun:
    try:
        settings, summary = dict(run["settings"]), dict(run["summary"])
        path_taken = [{"step": step, "sparsity": gone} for step, gone in run["path"]]
        lines, folder = [*map(dict, run["evaluations"]), *path_taken], Path(run["folder"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ComparisonError(f"{path} is damaged, or not from `secateur compare --json`: {error!r}.") from error
    return _run(folder, settings, summary, lines)


def _run(folder: Path, settings: dict[str, Any], summary: dict[str, Any], lines: list[dict[str, Any]]) -> FinishedRun:
    """A run from its settings, metrics and summary."""
    if type(settings.get(SEED)) is not int:
        raise ComparisonError(
            f"{folder / CONFIG} has no seed that is a whole number. Runs are paired by seed: add one, or leave it out."
        )
    if BUDGET in summary:
        settings = {**settings, BUDGET: _budget(settings, summary)}
    try:
        # A resumed run may have logged a step twice: the later line is of the final model.
        judged = {line["step"]: _evaluation(line) for line in lines if "held_out_loss" in line}
        path = {line["step"]: number(line["sparsity"]) for line in lines if "sparsity" in line}
        final = _evaluation({"step": summary["steps"], **summary})
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ComparisonError(
            f"The run in {folder} is damaged, or not from `secateur train`: {error!r}. {AGAIN}"
        ) from error
    evaluations = tuple(judged[step] for step in sorted(judged))
    return FinishedRun(folder, settings, evaluations, tuple(sorted(path.items())), summary, final)


def _budget(settings: Settings, summary: Settings) -> Any:
    """The budget a run got. Earlier versions marked runs as extended that had asked for it and got no more steps."""
    steps, taken = settings.get("steps"), summary.get("asked_steps")
    if summary[BUDGET] == "extended" and type(steps) is int and type(taken) is int and taken <= steps:
        return "normal"
    return summary[BUDGET]


def number(value: Any) -> float:
    """A number from JSON, where null and strings such as "inf" stand for numbers that are not finite."""
    if (isinstance(value, str) and value.lower().lstrip("+-") not in NOT_FINITE) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a number")
    return math.nan if value is None else float(value)


def _evaluation(line: dict[str, Any]) -> Evaluation:
    if type(line["step"]) is not int or line["step"] < 0:
        raise ValueError(f"{line['step']!r} is not a step")
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
    """The quality that runs are compared by. Perplexities are compared by their logarithm, the held-out loss."""

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
    """The measure that all runs share, or an error."""
    found: dict[Measure, Any] = {}
    for run in runs:
        name, higher = run.summary.get("quality_name"), run.summary.get("higher_is_better")
        if not isinstance(name, str) or not isinstance(higher, bool):
            raise ComparisonError(f"The summary of {run.folder} lacks quality_name or higher_is_better. {AGAIN}")
        found.setdefault(Measure(name, higher), run.folder)
    if len(found) > 1:
        listed = "; ".join(f"{measure.name} ({folder})" for measure, folder in found.items())
        raise ComparisonError(f"These runs have different measures: {listed}. Compare runs with the same one.")
    return next(iter(found))


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed, by seed."""

    settings: dict[str, str]  # of the axes
    runs: tuple[FinishedRun, ...]
    implied: tuple[str, ...] = ()  # axes that the others imply, which the label leaves out

    @property
    def label(self) -> str:
        unnamed = (BUDGET, *self.implied)  # the budget is marked instead
        named = {axis: value for axis, value in self.settings.items() if axis not in unnamed}
        label = ", ".join(f"{axis}={value}" for axis, value in named.items()) or "all runs"
        return f"{label} {EXTENDED}" if self.extended else label

    @property
    def extended(self) -> bool:
        return any(run.extended for run in self.runs)


def group(runs: Sequence[FinishedRun], axes: Sequence[str]) -> list[Row]:
    """Rows, ordered by their first run; an error if runs differ in more than the axes and the seed."""
    check_fair([run.settings for run in runs], axes)
    members: dict[tuple[str, ...], dict[int, FinishedRun]] = {}
    for run in runs:
        found = texts(run.settings)
        seeds = members.setdefault(tuple(found.get(axis, NOT_SET) for axis in axes), {})
        if run.seed in seeds:
            raise ComparisonError(
                f"{seeds[run.seed].folder} and {run.folder} have the same settings and the same seed {run.seed}:"
                " a seed counts once. Leave one of them out."
            )
        seeds[run.seed] = run
    rows = [dict(zip(axes, values, strict=True)) for values in members]
    implied = _implied(rows)
    return [
        Row(row, tuple(seeds[seed] for seed in sorted(seeds)), implied)
        for row, seeds in zip(rows, members.values(), strict=True)
    ]


def _implied(rows: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """The axes that a preset among them implies, if rows can be told apart without."""
    if not rows or PRESET not in rows[0]:
        return ()
    left = {tuple(value for axis, value in row.items() if axis not in OF_PRESET) for row in rows}
    return tuple(axis for axis in rows[0] if axis in OF_PRESET) if len(left) == len(rows) else ()


def baselines(rows: Sequence[Row], wanted: str | None) -> list[Row | None]:
    """The baseline of each row: the first row, or the one that `wanted` ("score=magnitude") names.

    If it names several, a row's baseline is the one that agrees with it in all other settings, or None.
    """
    if wanted is None:
        return [rows[0]] * len(rows)
    asked = _asked(rows, wanted)
    named = [row for row in rows if row.settings | asked == row.settings]
    if not named:
        known = "; ".join(row.label for row in rows)
        raise ComparisonError(f"--baseline {wanted}: there is no such row. The rows are: {known}.")
    if len(named) == 1:
        return [named[0]] * len(rows)
    return [next((one for one in named if one.settings == row.settings | asked), None) for row in rows]


def _asked(rows: Sequence[Row], wanted: str) -> dict[str, str]:
    words, axes = wanted.split(","), list(rows[0].settings)
    if not all(word.partition("=")[0] in axes and "=" in word for word in words):
        example = rows[0].label.replace(", ", ",").removesuffix(EXTENDED).strip()
        raise ComparisonError(
            f"--baseline must name a row by a setting in which rows differ ({', '.join(axes) or 'there is none'}),"
            f" such as {example!r}; got {wanted!r}."
        )
    return {name: shown(value) for name, value in parse(words).items()}


def dense_rows(rows: Sequence[Row]) -> dict[str, Row]:
    """The dense row that agrees with a pruned row in everything but pruning, by the pruned row's label."""

    def other_settings(row: Row) -> dict[str, str]:
        return {axis: value for axis, value in row.settings.items() if axis not in (SCORE, *PRUNING)}

    dense = [row for row in rows if all(run.final.sparsity == 0 for run in row.runs)]
    found: dict[str, Row] = {}
    for row in rows:
        alike = [one for one in dense if other_settings(one) == other_settings(row)]
        if row not in dense and len(alike) == 1:
            found[row.label] = alike[0]
    return found
