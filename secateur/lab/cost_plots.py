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
from secateur.lab.page import BLUE, GREEN, GREY, ORANGE, figure
from secateur.lab.runs import Measure, Row

CLOSE = 0.05  # of an axis: labels of points nearer than this are moved apart
BARS = (BLUE, ORANGE, GREEN, GREY, "#cc79a7", "#56b4e9")


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

    def draw(axes: Any) -> None:
        for memory, quality, label in points:
            axes.plot([memory], [quality], "o", color=colours[label], markersize=7)
        axes.margins(x=0.15, y=0.12)
        if measure.logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:.4g}")
            axes.yaxis.set_minor_formatter("{x:.4g}")
        _label(axes, points, names, colours)
        axes.set(xlabel=FIGURES[key].name, ylabel=measure.name)

    return figure(draw, width=width, height=3.2)


def _label(axes: Any, points: Sequence[tuple[float, float, str]], names: Mapping[str, str], colours: Any) -> None:
    """Names beside the points, moved apart where they would overlap; on the side that has more room."""
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    log = axes.get_yscale() == "log"

    def height(value: float) -> float:
        bottom, top, here = (math.log(v) if log else v for v in (low, high, value))
        return (here - bottom) / (top - bottom)

    last = {True: -math.inf, False: -math.inf}
    for memory, quality, label in sorted(points, key=lambda point: point[1]):
        far_right = (memory - left) / (right - left) > 0.5
        place = max(height(quality), last[far_right] + CLOSE)
        last[far_right] = place
        side = {"ha": "right", "xytext": (-7, 0)} if far_right else {"ha": "left", "xytext": (7, 0)}
        at = axes.transData.inverted().transform(axes.transAxes.transform((0, place)))[1]
        axes.annotate(
            names[label], (memory, at), textcoords="offset points", va="center", color=colours[label],
            fontsize="small", annotation_clip=False, **side,
        )  # fmt: skip


def compile_chart(rows: Sequence[Row], measure: Measure, width: float) -> str:
    """For every pair of an eager and a compiled row, the change of each figure in percent, as bars; empty if none."""
    pairs = [(pair_name(eager), compile_changes(eager, compiled, measure)) for eager, compiled in compile_pairs(rows)]
    if not pairs:
        return ""
    kinds = list(dict.fromkeys(name for _, changes in pairs for name in changes))

    def draw(axes: Any) -> None:
        thick = 0.8 / len(kinds)
        for number, kind in enumerate(kinds):
            places = [place - 0.4 + thick * (number + 0.5) for place in range(len(pairs))]
            values = [_change(*changes.get(kind, (0.0, 0.0))) for _, changes in pairs]
            axes.barh(places, values, thick, color=BARS[number % len(BARS)], label=kind)
        axes.set_yticks(range(len(pairs)), [name.replace(", ", "\n") for name, _ in pairs], fontsize="small")
        axes.invert_yaxis()
        axes.axvline(0, color="#111827", linewidth=1)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("compiled against eager, %")
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize="small")

    return figure(draw, width=width, height=1.4 + 0.2 * math.ceil(len(kinds) / 2) + 0.2 * len(kinds) * len(pairs))


def _change(before: float, after: float) -> float:
    return 100 * (after / before - 1) if before else math.nan
