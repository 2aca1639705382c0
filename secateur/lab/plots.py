"""The page of `secateur compare`: curves of every row, where its zeros are, quality against sparsity, the tables."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from secateur.lab.compare import Comparison, header, notes, rows_of
from secateur.lab.page import block, document, figure, layer_bars, legend_columns
from secateur.lab.runs import Evaluation, Measure, number
from secateur.lab.tables import Row, Table, at_step
from secateur.report import html_table

# The first eight are told apart by people who see colours differently too (Okabe and Ito); past the last come dashes.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b7280", "#111827"]
COLOURS += ["#7c3aed", "#84cc16", "#b91c1c", "#0f766e"]
DASHES = ("-", "--", ":", "-.")
SPARSITY = "sparsity"
FEW = 4  # rows whose legend fits between the lines


def render(found: Comparison) -> str:
    """The whole page as a string."""
    rows, measure = found.rows, found.measure
    name, judged = measure.name.capitalize(), measure.judged.capitalize()
    band = "Line: mean over seeds. Band: lowest to highest seed."
    figures = [
        block(f"{judged} by step", band, _curves(rows, measure, "step")),
        block(
            f"{judged} by seconds",
            f"{band} Seconds are the mean of the seeds.",
            _curves(rows, measure, "seconds"),
        ),
        block("Sparsity through training", "Mean over seeds, of the prunable weights.", _sparsity(rows)),
        block(f"{judged} against sparsity", _pareto_text(measure), _pareto(rows, measure)),
    ]
    layers = _layers(rows)
    if layers:
        figures.append(block("Sparsity by layer", "Mean over seeds.", layers, tall=True))
    seeds = sum(len(row.runs) for row in rows)
    explained = "<br>".join(map(html.escape, found.explained))
    tables = [_table(one, measure) for one in found.tables]
    parts = [f"<p>{html.escape(found.alike)}</p>", *tables, f"<p>{explained}</p>"]
    footer = f"{len(rows)} rows, {seeds} runs."
    heading = f"{name} by {', '.join(found.axes)}" if found.axes else name
    return document(heading, parts, figures, footer)


def _table(found: Table, measure: Measure) -> str:
    body = html_table(header(measure), rows_of(found, measure)) if found.entries else ""
    under = "".join(f"<p>{html.escape(note)}</p>" for note in notes(found, measure))
    return f"<section><h2>{html.escape(found.title)}</h2>{body}{under}</section>"


def _styles(rows: Sequence[Any]) -> Iterator[tuple[Any, str, str]]:
    for place, row in enumerate(rows):
        yield row, COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]


def moments(row: Row) -> list[list[Evaluation]]:
    """The evaluations of all seeds at each step they all have."""
    steps = set.intersection(*({found.step for found in run.evaluations} for run in row.runs))
    together = ([at_step(run, step) for run in row.runs] for step in sorted(steps))
    return [[found for found in several if found is not None] for several in together]


def _curves(rows: Sequence[Row], measure: Measure, along: str) -> str:
    def draw(axes: Any) -> None:
        for row, colour, dashes in _styles(rows):
            seeds = moments(row)
            places = [fmean(getattr(one, along) for one in several) for several in seeds]
            values = [[measure.of(one) for one in several] for several in seeds]
            axes.plot(places, [fmean(v) for v in values], dashes, color=colour, label=row.label, linewidth=1.4)
            axes.fill_between(places, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15)
        axes.set(xlabel=along, ylabel=measure.judged)

    return _with_legend(draw, [row.label for row in rows])


def _sparsity(rows: Sequence[Row]) -> str:
    def draw(axes: Any) -> None:
        for row, colour, dashes in _styles(rows):
            paths = [dict(run.sparsity) for run in row.runs]
            steps = sorted(set.intersection(*(set(path) for path in paths)))
            means = [fmean(path[step] for path in paths) for step in steps]
            axes.plot(steps, means, dashes, color=colour, label=row.label, alpha=0.8)
        axes.set(xlabel="step", ylabel="share of prunable weights gone", ylim=(0, 1))

    return _with_legend(draw, [row.label for row in rows])


def _with_legend(draw: Callable[[Any], None], labels: Sequence[str]) -> str:
    """A figure whose legend is inside while it is small, and below when it would cover the lines."""
    columns = legend_columns(labels, 104)
    few = len(labels) <= FEW

    def drawn(axes: Any) -> None:
        draw(axes)
        if few:
            axes.legend(frameon=False, fontsize="small")
        else:
            axes.figure.legend(frameon=False, loc="outside lower center", ncols=columns, fontsize="x-small")

    return figure(drawn, height=3.4 if few else 3.4 + 0.16 * math.ceil(len(labels) / columns))


def _layers(rows: Sequence[Row]) -> str:
    groups, names = [], {}
    for row, colour, _ in _styles(rows):
        means = layer_means(row)
        names.update(dict.fromkeys(means))
        groups.append((row.label, colour, means))
    if not names:
        return ""
    bars = [(label, colour, [means.get(name, 0.0) for name in names]) for label, colour, means in groups]
    height = min(60.0, 1.4 + 0.2 * len(rows) + len(names) * max(0.25, 0.09 * len(rows)))
    return layer_bars([name.removesuffix(".weight") for name in names], bars, height)


def layer_means(row: Row) -> dict[str, float]:
    """Sparsity of every layer, mean over the seeds that name it."""
    values: dict[str, list[float]] = {}
    for run in row.runs:
        for layer in run.summary.get("layers", []):
            values.setdefault(layer["name"], []).append(number(layer["sparsity"]))
    return {name: fmean(several) for name, several in values.items()}


def lines_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ in their sparsity alone, in the order of that: one line of the picture each."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        others = {axis: value for axis, value in row.settings.items() if axis != SPARSITY}
        lines.setdefault(Row(others, row.runs).label, []).append(row)
    return {label: sorted(members, key=reached) for label, members in lines.items()}


def reached(row: Row) -> float:
    """The sparsity a row ended at."""
    return fmean(run.final.sparsity for run in row.runs)


def _pareto_text(measure: Measure) -> str:
    better = "Higher" if measure.higher_is_better else "Lower"
    return f"At the end of training: mean, and lowest to highest seed. {better} and further right is better."


def _pareto(rows: Sequence[Row], measure: Measure) -> str:
    lines = lines_of(rows)

    def draw(axes: Any) -> None:
        for (label, members), colour, dashes in _styles(list(lines.items())):
            values = [[measure.of(run.final) for run in row.runs] for row in members]
            means = [fmean(v) for v in values]
            ends = _ends(values, means)
            places = [reached(row) for row in members]
            axes.errorbar(places, means, ends, fmt="o" + dashes, color=colour, label=label, capsize=3, markersize=4)
        axes.set(xlabel="sparsity, of the prunable weights", ylabel=measure.judged)

    return _with_legend(draw, list(lines))


def _ends(values: Sequence[Sequence[float]], means: Sequence[float]) -> list[list[float]]:
    """How far the lowest and highest seed are from the mean, which rounding may put a hair beyond either."""

    def far(pick: Callable[[Sequence[float]], float]) -> list[float]:
        return [abs(pick(several) - mean) for several, mean in zip(values, means, strict=True)]

    return [far(min), far(max)]
