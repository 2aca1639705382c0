"""What each row of a comparison cost: seconds, tokens a second, memory and use of the GPU; and what compiling changed.

First the figures and their tables, then the two charts of them on the page of `secateur compare`. A figure is a mean
over the runs of a row, and only there if all of them recorded it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from secateur.lab.figures import BLUE, GREEN, GREY, LEGEND_LETTERS, ORANGE, figure, legend_columns
from secateur.lab.runs import FinishedRun, Measure, Row, number
from secateur.lab.statistics import exponential

COMPILE = "compile"
GB = 1e9
MARKERS = "osD^vPX*"
BARS = (BLUE, ORANGE, GREY, GREEN)


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


def mean_of(row: Row, key: str) -> float | None:
    """The mean of a figure over the runs of a row, if all of them recorded it."""
    found = [FIGURES[key].of(run) for run in row.runs]
    known = [value for value in found if value is not None]
    return fmean(known) if len(known) == len(found) else None


def recorded(rows: Sequence[Row]) -> list[str]:
    """The figures that some row has."""
    return [key for key in FIGURES if any(mean_of(row, key) is not None for row in rows)]


def columns(rows: Sequence[Row], measure: Measure) -> dict[str, str]:
    """Names of the columns for what the rows recorded, by figure."""
    return {key: FIGURES[key].name.format(unit(measure)) for key in recorded(rows)}


def shown(row: Row, key: str) -> str:
    """A figure as text."""
    value = mean_of(row, key)
    return "-" if value is None else f"{value:{FIGURES[key].form}}"


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


Changes = dict[str, tuple[str, str, float]]


def compile_changes(eager: Row, compiled: Row, measure: Measure) -> Changes:
    """Seconds, memory, memory access and quality: eager, compiled, and the change in percent, by the column's name."""
    found = {}
    for key, name in columns([eager, compiled], measure).items():
        before, after = mean_of(eager, key), mean_of(compiled, key)
        if key in CHANGING and before and after is not None:
            found[name] = shown(eager, key), shown(compiled, key), 100 * (after / before - 1)
    before, after = (quality_of(row, measure) for row in (eager, compiled))
    change = 100 * (after / before - 1) if before else math.nan
    return found | {measure.name: (f"{before:.4g}", f"{after:.4g}", change)}


def named_changes(rows: Sequence[Row], measure: Measure) -> tuple[list[tuple[str, Changes]], list[str]]:
    """Every pair by its name with its changes, and all columns of these."""
    pairs = [(pair_name(eager), compile_changes(eager, compiled, measure)) for eager, compiled in compile_pairs(rows)]
    return pairs, list(dict.fromkeys(kind for _, changes in pairs for kind in changes))


def compile_table(
    rows: Sequence[Row], measure: Measure, names: Mapping[str, str] | None = None
) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
    """Header and rows: eager, compiled and the change, for every pair; None if there is none. `names` are of pairs."""
    pairs, kinds = named_changes(rows, measure)
    if not pairs:
        return None
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


def memory_figure(rows: Sequence[Row]) -> str | None:
    """The figure of memory that at least two rows have; None if there is none."""
    for key in (PEAK, MEMORY):
        if sum(mean_of(row, key) is not None for row in rows) > 1:
            return key
    return None


def quality_by_memory(
    rows: Sequence[Row], measure: Measure, names: Mapping[str, str], colours: Mapping[str, str], width: float
) -> str:
    """A point for every row: its quality by the memory it took. Left and low (or high, for accuracy) is better."""
    key = memory_figure(rows)
    found = [(mean_of(row, key), quality_of(row, measure), row.label) for row in rows] if key else []
    points = [(memory, quality, label) for memory, quality, label in found if memory and math.isfinite(quality)]
    if key is None or len(points) < 2:
        return ""

    texts = [names[label] for _, _, label in points]
    in_a_line = legend_columns(texts, LEGEND_LETTERS)

    def draw(axes: Any) -> None:
        for place, (memory, quality, label) in enumerate(points):
            marker = MARKERS[place % len(MARKERS)]
            axes.plot([memory], [quality], marker, color=colours[label], markersize=7, label=names[label])
        axes.margins(0.1)
        axes.ticklabel_format(useOffset=False)
        axes.set(xlabel=FIGURES[key].name, ylabel=measure.name)
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=in_a_line, fontsize="small")

    return figure(draw, width=width, height=2.8 + 0.2 * math.ceil(len(points) / in_a_line))


def compile_chart(rows: Sequence[Row], measure: Measure, names: Mapping[str, str], width: float) -> str:
    """For every pair of an eager and a compiled row, the change of each figure in percent, as bars; empty if none."""
    pairs, kinds = named_changes(rows, measure)
    if not pairs:
        return ""

    def draw(axes: Any) -> None:
        thick = 0.8 / len(kinds)
        for turn, kind in enumerate(kinds):
            places = [place - 0.4 + thick * (turn + 0.5) for place in range(len(pairs))]
            values = [changes[kind][2] if kind in changes else math.nan for _, changes in pairs]
            axes.barh(places, values, thick, color=BARS[turn % len(BARS)], label=kind)
        labels = [names.get(name, name).replace(" (", "\n(") for name, _ in pairs]
        axes.set_yticks(range(len(pairs)), labels, fontsize="small")
        axes.invert_yaxis()
        axes.axvline(0, color="#111827", linewidth=1)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("compiled against eager, %")
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize="small")

    return figure(draw, width=width, height=1.5 + 0.2 * len(kinds) * len(pairs))
