"""Pages of the lab: one self-contained HTML file, figures inside as SVG, nothing fetched from anywhere."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from secateur.lab.demo import Plan, Run
from secateur.report import html_page, html_table

COLOURS = {"dense": "#6b7280", "magnitude": "#d97706", "variance": "#2563eb"}
STAGES = ("#93c5fd", "#3b82f6", "#1e3a8a")


def figure(draw: Any, *, width: float = 6.0, height: float = 3.4) -> str:
    """An SVG of whatever `draw(axes)` draws, without the XML header that HTML does not want."""
    canvas = Figure(figsize=(width, height), layout="constrained")
    axes = canvas.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    draw(axes)
    text = io.StringIO()
    with rc_context({"svg.hashsalt": "secateur"}):  # the same picture has the same bytes
        canvas.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _colour(name: str) -> str:
    return COLOURS.get(name, "#7c3aed")


def _loss(runs: Sequence[Run]) -> str:
    def draw(axes: Any) -> None:
        for run in runs:
            smooth, mean = [], run.loss[0]
            for value in run.loss:
                mean += 0.08 * (value - mean)
                smooth.append(mean)
            axes.plot(range(1, len(smooth) + 1), smooth, color=_colour(run.name), alpha=0.45, linewidth=1)
            steps, losses = zip(*run.held_out, strict=True)
            axes.plot(steps, losses, "o-", color=_colour(run.name), label=run.name, markersize=3.5)
        axes.set(xlabel="step", ylabel="loss, nats per byte", ylim=(None, runs[0].held_out[0][1] * 1.15))
        axes.legend(frameon=False)

    return figure(draw)


def _sparsity(runs: Sequence[Run]) -> str:
    def draw(axes: Any) -> None:
        for number, run in enumerate(runs):
            style = "-" if number % 2 else "--"  # scores share a schedule: dashes let both be seen
            axes.plot(range(1, len(run.sparsity) + 1), run.sparsity, style, color=_colour(run.name), label=run.name)
        axes.set(xlabel="step", ylabel="share of prunable weights gone", ylim=(0, 1))
        axes.legend(frameon=False)

    return figure(draw)


def legend_columns(labels: Sequence[str], letters: int) -> int:
    """How many labels stand beside each other where so many letters fit; a line's sample takes six."""
    return min(len(labels), max(1, letters // (max(map(len, labels)) + 6)))


Bars = tuple[str, str, Sequence[float]]  # label, colour, sparsity of each layer


def layer_bars(names: Sequence[str], groups: Sequence[Bars], height: float, whole: float | None = None) -> str:
    """A group of bars for every layer, and a dotted line at the sparsity of the whole."""

    def draw(axes: Any) -> None:
        thick = 0.8 / len(groups)
        for number, (label, colour, values) in enumerate(groups):
            places = [place + number * thick - 0.4 + thick / 2 for place in range(len(names))]
            axes.barh(places, values, thick, color=colour, label=label)
        axes.set(yticks=range(len(names)), yticklabels=names, xlim=(0, 1), xlabel="share of its weights gone")
        if whole is not None:
            axes.axvline(whole, color="#111827", linewidth=0.8, linestyle=":")
        axes.set_ylim(len(names) - 0.5, -0.5)  # the first layer on top
        axes.grid(visible=False)
        columns = legend_columns([label for label, _, _ in groups], 52)
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns)

    return figure(draw, height=height)


def _layers(runs: Sequence[Run]) -> str:
    pruned = [(run.name, run.report) for run in runs if run.report is not None]
    names = [row.name.removesuffix(".weight") for row in pruned[0][1].tensors]
    groups = [(name, _colour(name), [row.sparsity for row in report.tensors]) for name, report in pruned]
    return layer_bars(names, groups, 8.2, pruned[0][1].sparsity)


def _scores(run: Run) -> str:
    def draw(axes: Any) -> None:
        for snapshot, colour in zip(run.snapshots, STAGES, strict=False):
            axes.stairs(snapshot.counts, snapshot.edges, color=colour, fill=True, alpha=0.35)
            axes.stairs(
                snapshot.counts, snapshot.edges, color=colour, label=f"living weights before step {snapshot.step}"
            )
            if snapshot.cut > 0:
                axes.axvline(math.log10(snapshot.cut), color=colour, linestyle="--", linewidth=1.4)
        axes.set(xlabel=f"log10 of the {run.name} score", ylabel="weights")
        axes.legend(frameon=False, loc="upper left")

    return figure(draw)


def block(title: str, text: str, svg: str, *, tall: bool = False) -> str:
    """A figure with its heading and a sentence."""
    place = ' class="tall"' if tall else ""
    return f"<figure{place}><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{svg}</figure>"


def document(heading: str, parts: Sequence[str], figures: Sequence[str], footer: str) -> str:
    """The whole page: parts below each other, then figures beside each other. All but the heading is HTML."""
    return html_page(heading, f'{"".join(parts)}<div class="figures">{"".join(figures)}</div>', footer)


def render(plan: Plan, runs: Sequence[Run], header: Sequence[str], rows: Sequence[Sequence[str]], facts: str) -> str:
    """The demo's page."""
    figures = [
        block("Loss", "Dots: held-out files. Faint lines: training batches, smoothed.", _loss(runs)),
        block(
            "Sparsity", f"All pruned runs follow one schedule, to the weight, to {plan.sparsity:.0%}.", _sparsity(runs)
        ),
        block(
            "Sparsity by layer",
            "One cut for the whole model: each layer gives what it can spare.",
            _layers(runs),
            tall=True,
        ),
    ]
    for run in runs:
        if run.snapshots:
            text = "The cut of that update is the dashed line of the same colour: what is left of it goes."
            figures.append(block(f"Scores and the cut: {run.name}", text, _scores(run)))
    return document(
        "The same network, dense and pruned while it trained",
        [f"<p>{html.escape(facts)}</p>", html_table(header, rows)],
        figures,
        "One seed, one small model: a look, not a result.",
    )
