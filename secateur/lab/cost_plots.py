"""Figures of cost for the page of `secateur compare`: quality against memory, and compiled against eager."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from secateur.lab.costs import (
    FIGURES,
    MEMORY,
    PEAK,
    compile_changes,
    compile_pairs,
    mean_of,
    pair_name,
    quality_of,
)
from secateur.lab.page import BLUE, GREEN, GREY, ORANGE, figure, legend_columns
from secateur.lab.runs import Measure, Row

LEGEND_LETTERS = 60  # that fit beside each other below a figure
MARKERS = "osD^vPX*"
BARS = (BLUE, ORANGE, GREY, GREEN)


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
    columns = legend_columns(texts, LEGEND_LETTERS)

    def draw(axes: Any) -> None:
        for number, (memory, quality, label) in enumerate(points):
            marker = MARKERS[number % len(MARKERS)]
            axes.plot([memory], [quality], marker, color=colours[label], markersize=7, label=names[label])
        axes.margins(0.1)
        axes.ticklabel_format(useOffset=False)
        axes.set(xlabel=FIGURES[key].name, ylabel=measure.name)
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=columns, fontsize="small")

    return figure(draw, width=width, height=2.8 + 0.2 * math.ceil(len(points) / columns))


def compile_chart(rows: Sequence[Row], measure: Measure, names: Mapping[str, str], width: float) -> str:
    """For every pair of an eager and a compiled row, the change of each figure in percent, as bars; empty if none."""
    pairs = [(pair_name(eager), compile_changes(eager, compiled, measure)) for eager, compiled in compile_pairs(rows)]
    if not pairs:
        return ""
    kinds = list(dict.fromkeys(kind for _, changes in pairs for kind in changes))

    def draw(axes: Any) -> None:
        thick = 0.8 / len(kinds)
        for number, kind in enumerate(kinds):
            places = [place - 0.4 + thick * (number + 0.5) for place in range(len(pairs))]
            values = [changes[kind][2] if kind in changes else math.nan for _, changes in pairs]
            axes.barh(places, values, thick, color=BARS[number % len(BARS)], label=kind)
        labels = [names.get(name, name).replace(" (", "\n(") for name, _ in pairs]
        axes.set_yticks(range(len(pairs)), labels, fontsize="small")
        axes.invert_yaxis()
        axes.axvline(0, color="#111827", linewidth=1)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("compiled against eager, %")
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize="small")

    return figure(draw, width=width, height=1.5 + 0.2 * len(kinds) * len(pairs))
