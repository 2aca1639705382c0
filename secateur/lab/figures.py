"""Figures of the lab's pages: SVG inside one HTML file that fetches nothing."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from typing import Any

from secateur.errors import DEMO_EXTRA, library
from secateur.report import html_page

WIDTH = 4.3  # inches of a figure whose labels stay legible on a phone, where it is scaled down least
LEGEND_LETTERS = 60  # that fit beside each other below a figure
COLUMN = "display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min({}px,100%),1fr))"  # least width
BLUE, ORANGE, GREY, GREEN = "#0072b2", "#d55e00", "#9ca3af", "#009e73"

Draw = Callable[[Any], None]
Bars = tuple[str, str, Sequence[float]]  # label, colour, sparsity of each layer


def figure(draw: Draw, *, width: float = 6.0, height: float = 3.4) -> str:
    """An SVG of what `draw(axes)` draws, without the XML header that HTML does not allow."""
    matplotlib = library("matplotlib", "The page", DEMO_EXTRA)
    canvas = library("matplotlib.figure", "The page", DEMO_EXTRA).Figure(figsize=(width, height), layout="constrained")
    axes = canvas.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    draw(axes)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "secateur"}):  # so that equal figures have equal bytes
        canvas.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def legend_columns(labels: Sequence[str], letters: int) -> int:
    """How many labels fit side by side in this many letters; the line beside a label takes six."""
    return min(len(labels), max(1, letters // (max(map(len, labels)) + 6)))


def layer_bars(names: Sequence[str], groups: Sequence[Bars], height: float) -> str:
    """A group of bars for every layer."""

    def draw(axes: Any) -> None:
        thick = 0.8 / len(groups)
        for number, (label, colour, values) in enumerate(groups):
            places = [place + number * thick - 0.4 + thick / 2 for place in range(len(names))]
            axes.barh(places, values, thick, color=colour, label=label)
        axes.set(yticks=range(len(names)), yticklabels=names, xlim=(0, 1), xlabel="fraction of weights pruned")
        axes.set_ylim(len(names) - 0.5, -0.5)  # the first layer on top
        axes.grid(visible=False)
        columns = legend_columns([label for label, _, _ in groups], 52)
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns)

    return figure(draw, height=height)


def block(title: str, text: str, content: str) -> str:
    """A figure with its heading and a sentence; `content` is HTML."""
    said = f"<p>{html.escape(text)}</p>" if text else ""
    return f"<figure><h2>{html.escape(title)}</h2>{said}{content}</figure>"


def warning_box(text: str | None) -> str:
    """A warning that stands out, or nothing."""
    return f'<p class="warning">{html.escape(text)}</p>' if text else ""


def document(heading: str, parts: Sequence[str], figures: Sequence[str], footer: str) -> str:
    """The whole page: `parts` below each other, then `figures` side by side. All but the heading is HTML."""
    return html_page(heading, f'{"".join(parts)}<div class="figures">{"".join(figures)}</div>', footer)
