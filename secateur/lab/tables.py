"""Runs that differ in their seed alone make a row; one row is what the others are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from secateur.errors import ComparisonError
from secateur.lab.runs import BUDGET, NOT_SET, Evaluation, FinishedRun, Measure, check_fair, shown, texts
from secateur.lab.statistics import Difference, Scatter, Spread, difference, scatter, spread, verdict
from secateur.settings import parse

EXTENDED = "[extended]"


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


BASELINE, NO_BASELINE = "baseline", "no baseline"
SPARSITY_ROUNDING = 1e-4  # metrics and summaries may round a sparsity differently
Moment = Callable[[FinishedRun], Evaluation | None]


@dataclass(frozen=True)
class Entry:
    """A row at one moment of its training."""

    label: str
    extended: bool
    baseline: str | None
    values: dict[int, float]  # what is judged, by seed
    qualities: dict[int, float]  # the same as the run names it: of a held-out loss, the perplexity
    sparsity: float  # mean over seeds, at that moment
    final_sparsity: float
    spread: Spread
    difference: Difference | None
    verdict: str

    @property
    def early(self) -> bool:
        """Whether it was not yet as sparse as it came to be."""
        return abs(self.sparsity - self.final_sparsity) > SPARSITY_ROUNDING


@dataclass(frozen=True)
class Table:
    """One table, with what must be said under it."""

    name: str
    title: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    scatter: Scatter | None = None


def tables(rows: Sequence[Row], bases: Sequence[Row | None], measure: Measure) -> list[Table]:
    """All three; one that cannot be made has no entries and a note that says why."""
    runs = [run for row in rows for run in row.runs]
    return [
        _table(
            "final", f"{measure.name.capitalize()} at the end of training", rows, bases, measure, lambda run: run.final
        ),
        _equal_steps(runs, rows, bases, measure),
        _equal_seconds(runs, rows, bases, measure),
    ]


def common_step(runs: Sequence[FinishedRun]) -> int | None:
    """The last step at which every run was evaluated."""
    steps = [{found.step for found in run.evaluations} for run in runs]
    return max(set.intersection(*steps), default=None)


def at_step(run: FinishedRun, step: int) -> Evaluation | None:
    """The evaluation after this step."""
    return next((found for found in run.evaluations if found.step == step), None)


def by_seconds(run: FinishedRun, limit: float) -> Evaluation | None:
    """The last evaluation no later than this."""
    return next((found for found in reversed(run.evaluations) if found.seconds <= limit), None)


def _equal_steps(
    runs: Sequence[FinishedRun], rows: Sequence[Row], bases: Sequence[Row | None], measure: Measure
) -> Table:
    step = common_step(runs)
    if step is None:
        return Table("equal_steps", "At equal steps", (), ("There is no step at which every run was evaluated.",))
    title = f"{measure.name.capitalize()} at equal steps: after step {step:,}, the last that every run was evaluated at"
    return _table("equal_steps", title, rows, bases, measure, lambda run: at_step(run, step))


def _equal_seconds(
    runs: Sequence[FinishedRun], rows: Sequence[Row], bases: Sequence[Row | None], measure: Measure
) -> Table:
    limit = min(run.took for run in runs)
    title = (
        f"{measure.name.capitalize()} at equal seconds: the last evaluation within {limit:.1f} s, as the fastest took"
    )
    made = _table("equal_seconds", title, rows, bases, measure, lambda run: by_seconds(run, limit))
    made = replace(made, scatter=None)  # runs of one row may be at different steps here
    machines = sorted({str(run.summary.get("hardware", "unknown")) for run in runs})
    if len(machines) == 1:
        return made
    note = f"The runs were not on the same hardware ({'; '.join(machines)}): their seconds say little."
    return replace(made, notes=(*made.notes, note))


def _table(
    name: str, title: str, rows: Sequence[Row], bases: Sequence[Row | None], measure: Measure, moment: Moment
) -> Table:
    made = [_entry(row, base, measure, moment) for row, base in zip(rows, bases, strict=True)]
    entries = tuple(entry for entry in made if entry is not None)
    return Table(
        name, title, entries, tuple(_notes(rows, entries, moment)), scatter({one.label: one.values for one in entries})
    )


def _found(row: Row, moment: Moment) -> dict[int, Evaluation]:
    return {run.seed: found for run in row.runs if (found := moment(run)) is not None}


def _entry(row: Row, base: Row | None, measure: Measure, moment: Moment) -> Entry | None:
    found = _found(row, moment)
    if not found:
        return None
    values = {seed: measure.of(one) for seed, one in found.items()}
    compared, word = None, BASELINE if base is row else NO_BASELINE
    if base is not None and base is not row:
        compared = difference(values, {seed: measure.of(one) for seed, one in _found(base, moment).items()})
        word = verdict(compared, measure.higher_is_better)
    finals = [run.final.sparsity for run in row.runs if run.seed in found]
    return Entry(
        label=row.label,
        extended=row.extended,
        baseline=None if base is None else base.label,
        values=values,
        qualities={seed: one.quality for seed, one in found.items()},
        sparsity=spread([one.sparsity for one in found.values()]).mean,
        final_sparsity=spread(finals).mean,
        spread=spread(list(values.values())),
        difference=compared,
        verdict=word,
    )


def _notes(rows: Sequence[Row], entries: Sequence[Entry], moment: Moment) -> list[str]:
    notes = []
    early = [f"{entry.label} ({entry.sparsity:.2%} of {entry.final_sparsity:.2%})" for entry in entries if entry.early]
    if early:
        notes.append(f"Not yet at their final sparsity at this point: {'; '.join(early)}.")
    missing = [str(run.folder) for row in rows for run in row.runs if moment(run) is None]
    if missing:
        notes.append(f"Left out, as not evaluated by then: {', '.join(missing)}.")
    wild = [entry.label for entry in entries if not all(map(math.isfinite, entry.values.values()))]
    if wild:
        notes.append(f"A loss or quality that is not a finite number: {'; '.join(wild)}.")
    if any(entry.extended for entry in entries):
        notes.append("[extended]: trained with an extended budget, more than the usual one.")
    return notes
