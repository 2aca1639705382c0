"""Runs that differ in their seed alone make a row; one row is what the others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secateur.errors import ComparisonError
from secateur.lab.fairness import NOT_SET, check_fair, shown, texts
from secateur.lab.runs import BUDGET, Evaluation, FinishedRun
from secateur.settings import parse

EXTENDED = "[extended]"


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


@dataclass(frozen=True)
class Row:
    """Runs of the same settings, by seed."""

    settings: dict[str, str]  # of the axes
    runs: tuple[FinishedRun, ...]

    @property
    def label(self) -> str:
        told = {axis: value for axis, value in self.settings.items() if axis != BUDGET}  # the mark tells the budget
        named = ", ".join(f"{axis}={value}" for axis, value in told.items()) or "all runs"
        return f"{named} {EXTENDED}" if self.extended else named

    @property
    def extended(self) -> bool:
        return any(run.extended for run in self.runs)


def group(runs: Sequence[FinishedRun], axes: Sequence[str]) -> list[Row]:
    """Rows in the order their first run is met, or an error if more than axes and seeds differ."""
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
    return [
        Row(dict(zip(axes, values, strict=True)), tuple(seeds[seed] for seed in sorted(seeds)))
        for values, seeds in members.items()
    ]


def baselines(rows: Sequence[Row], wanted: str | None) -> list[Row | None]:
    """What each row is compared with: the first row, or the row that `wanted` ("score=magnitude") names.

    Where it names several, each row has the one that agrees with it in all else, or None.
    """
    if wanted is None:
        return [rows[0]] * len(rows)
    asked = _asked(rows, wanted)
    named = [row for row in rows if row.settings | asked == row.settings]
    if not named:
        known = "; ".join(row.label for row in rows)
        raise ComparisonError(f"No row is {wanted}. The rows are: {known}.")
    if len(named) == 1:
        return [named[0]] * len(rows)
    return [next((one for one in named if one.settings == row.settings | asked), None) for row in rows]


def _asked(rows: Sequence[Row], wanted: str) -> dict[str, str]:
    words, axes = wanted.split(","), list(rows[0].settings)
    if not all(word.partition("=")[0] in axes and "=" in word for word in words):
        example = rows[0].label.replace(", ", ",").removesuffix(EXTENDED).strip()
        raise ComparisonError(
            f"--baseline names a row by what rows differ in ({', '.join(axes) or 'nothing here'}),"
            f" such as {example!r}; got {wanted!r}."
        )
    return {name: shown(value) for name, value in parse(words).items()}


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
