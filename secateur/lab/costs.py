"""What each row of a comparison cost: seconds, tokens a second, memory and use of the GPU; and what compiling changed.

A figure is a mean over the runs of a row, and only there if all of them recorded it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from secateur.lab.runs import FinishedRun, Measure, Row, number
from secateur.lab.statistics import exponential

COMPILE = "compile"
GB = 1e9


@dataclass(frozen=True)
class Figure:
    """A figure of cost: the name of its column, how a run recorded it, its format and what it is in words."""

    name: str
    of: Callable[[FinishedRun], float | None]
    form: str
    text: str


def _recorded(run: FinishedRun, *path: str) -> float | None:
    """A number of the summary; None if it is not there."""
    found: Any = run.summary
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    try:
        value = math.nan if found is None else number(found)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _throughput(run: FinishedRun) -> float | None:
    seen, seconds = _recorded(run, "seen"), _recorded(run, "seconds")
    return seen / seconds if seen and seconds else None


def _gigabytes(*path: str) -> Callable[[FinishedRun], float | None]:
    def of(run: FinishedRun) -> float | None:
        found = _recorded(run, *path)
        return found / GB if found else None

    return of


def _figure(*path: str) -> Callable[[FinishedRun], float | None]:
    return lambda run: _recorded(run, *path)


SECONDS, RATE, PEAK, MEMORY = "seconds", "rate", "peak", "memory"
FIGURES = {
    SECONDS: Figure("seconds", _figure("seconds"), ",.0f", "of the whole run, evaluation and compiling too"),
    RATE: Figure("{}/s", _throughput, ",.0f", "trained on in a second of that"),
    PEAK: Figure(
        "peak memory, GB", _gigabytes("peak_bytes"), ".2f",
        "most in use at a time: by torch on a GPU, by the whole process on a CPU",
    ),
    MEMORY: Figure("GPU memory, GB", _gigabytes("gpu", "memory_bytes"), ".2f", "in use on the GPU, mean over the run"),
    "busy": Figure("GPU busy, %", _figure("gpu", "busy"), ".1f", "share of time with work on the GPU"),
    "access": Figure(
        "memory access, %", _figure("gpu", "memory_access"), ".1f", "share of time in which its memory was in use",
    ),
}  # fmt: skip
CHANGING = (SECONDS, PEAK, "access")  # what compiling may change, beside the quality


def unit(measure: Measure) -> str:
    """What a run reads: tokens or images."""
    return "tokens" if measure.logarithmic else "images"


def mean_of(row: Row, figure: str) -> float | None:
    """The mean of a figure over the runs of a row, if all of them recorded it."""
    found = [FIGURES[figure].of(run) for run in row.runs]
    known = [value for value in found if value is not None]
    return fmean(known) if len(known) == len(found) else None


def recorded(rows: Sequence[Row]) -> list[str]:
    """The figures that some row has."""
    return [key for key in FIGURES if any(mean_of(row, key) is not None for row in rows)]


def columns(rows: Sequence[Row], measure: Measure) -> dict[str, str]:
    """Names of the columns for what the rows recorded, by figure."""
    return {key: FIGURES[key].name.format(unit(measure)) for key in recorded(rows)}


def shown(row: Row, figure: str) -> str:
    """A figure as text."""
    value = mean_of(row, figure)
    return "-" if value is None else f"{value:{FIGURES[figure].form}}"


def cost_table(rows: Sequence[Row], measure: Measure) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
    """Header and rows: what each row cost; None if nothing was recorded."""
    named = columns(rows, measure)
    if not named:
        return None
    return ("row", *named.values()), [(row.label, *(shown(row, key) for key in named)) for row in rows]


def plain_costs(rows: Sequence[Row], measure: Measure) -> list[dict[str, Any]]:
    """The same for JSON, with null for what a row did not record."""
    named = columns(rows, measure)
    return [{"row": row.label} | {name: mean_of(row, key) for key, name in named.items()} for row in rows]


def cost_notes(rows: Sequence[Row], measure: Measure) -> list[str]:
    """What the columns are, and where runs cannot be compared."""
    named = columns(rows, measure)
    notes = ["; ".join(f"{name}: {FIGURES[key].text}" for key, name in named.items()) + "."]
    machines = sorted({str(run.summary.get("hardware", "unknown")) for row in rows for run in row.runs})
    if len(machines) > 1:
        notes.append(f"The runs were not on the same hardware ({'; '.join(machines)}): do not compare their costs.")
    return notes


def compile_pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs of an eager and a compiled row that agree in all else."""
    eager = [row for row in rows if row.settings.get(COMPILE) == "false"]
    pairs = []
    for row in eager:
        other = {**row.settings, COMPILE: "true"}
        pairs += [(row, twin) for twin in rows if twin.settings == other]
    return pairs


def quality_of(row: Row, measure: Measure) -> float:
    """The mean quality at the end; of perplexities the exp of the mean loss."""
    mean = fmean(measure.of(run.final) for run in row.runs)
    return exponential(mean) if measure.logarithmic else mean


def compile_changes(eager: Row, compiled: Row, measure: Measure) -> dict[str, tuple[str, str, float]]:
    """Seconds, memory, memory access and quality: eager, compiled, and the change in percent, by the column's name."""
    found = {}
    for key, name in columns([eager, compiled], measure).items():
        before, after = mean_of(eager, key), mean_of(compiled, key)
        if key in CHANGING and before and after is not None:
            found[name] = shown(eager, key), shown(compiled, key), 100 * (after / before - 1)
    before, after = (quality_of(row, measure) for row in (eager, compiled))
    change = 100 * (after / before - 1) if before else math.nan
    return found | {measure.name: (f"{before:.4g}", f"{after:.4g}", change)}


def compile_table(
    rows: Sequence[Row], measure: Measure, names: Mapping[str, str] | None = None
) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
    """Header and rows: eager, compiled and the change, for every pair; None if there is none. `names` are of pairs."""
    pairs = [(pair_name(eager), compile_changes(eager, compiled, measure)) for eager, compiled in compile_pairs(rows)]
    if not pairs:
        return None
    kinds = list(dict.fromkeys(kind for _, changes in pairs for kind in changes))
    found = []
    for name, changes in pairs:
        cells = (changes.get(kind) for kind in kinds)
        texts = ("-" if cell is None else f"{cell[0]} to {cell[1]} ({cell[2]:+.1f} %)" for cell in cells)
        found.append(((names or {}).get(name, name), *texts))
    return ("row", *kinds), found


def pair_name(row: Row) -> str:
    """A row without what its pair differs in."""
    others = {name: value for name, value in row.settings.items() if name != COMPILE}
    return replace(row, settings=others).label
