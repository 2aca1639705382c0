"""Pages of the lab: figures as SVG inside one HTML file that fetches nothing, and the page of a run."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from secateur.errors import DEMO_EXTRA, library
from secateur.lab.monitor import CpuLoad, gradient_lines
from secateur.lab.runs import METRICS
from secateur.report import heat_map, html_page, html_table

WIDTH = 4.3  # inches of a figure whose labels stay legible on a phone, where it is scaled down least
LEGEND_LETTERS = 60  # that fit beside each other below a figure
COLUMN = "display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min({}px,100%),1fr))"  # least width
BLUE, ORANGE, GREY, GREEN = "#0072b2", "#d55e00", "#9ca3af", "#009e73"
GPU = {
    "busy": ("busy, %", 1.0),
    "memory_access": ("memory access, %", 1.0),
    "memory_bytes": ("memory, GB", 1e9),
    "watts": ("power, W", 1.0),
}

Draw = Callable[[Any], None]
Bars = tuple[str, str, Sequence[float]]  # label, colour, sparsity of each layer
Lines = Sequence[Mapping[str, Any]]  # of metrics.jsonl


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


def render_run(folder: Path, name: str, summary: Mapping[str, Any]) -> str:
    """The page of a finished run, from the files in its folder."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    load = CpuLoad(**summary["cpu_load"]) if summary.get("cpu_load") else None
    rows = [
        (summary["quality_name"], f"{summary['quality']:.4f}"),
        ("held-out loss", f"{summary['held_out_loss']:.4f}"),
        ("steps", f"{summary['steps']:,} of {summary['asked_steps']:,}"),
        *([("budget", summary["budget"])] if summary["budget"] != "normal" else []),
        ("sparsity of prunable weights", f"{summary['sparsity']:.4%}"),
        ("seconds", f"{summary['seconds']:.1f}"),
        *_resources(summary),
    ]
    versions = ", ".join(f"{package} {version}" for package, version in summary["versions"].items())
    footer = html.escape(f"{summary['hardware']}; {versions}; commit {summary['commit']}.")
    warning = warning_box(load.warning if load else None)
    parts = [warning, f"<p>{html.escape(name)}</p>", html_table(("", "value"), rows)]
    return document(run_headline(summary), parts, _run_figures(folder, lines, summary), footer)


def _resources(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Throughput, memory and use of the GPU, as far as the run recorded them."""
    tokens = "tokens" if summary["quality_name"] == "perplexity" else "images"
    rows = []
    if summary.get("seen") and summary["seconds"]:
        rows.append((f"{tokens} a second", f"{summary['seen'] / summary['seconds']:,.0f}"))
    if summary.get("epochs"):
        rows.append(("passes over the data", f"{summary['epochs']:.2f}"))
    if summary.get("peak_bytes"):
        rows.append(("most memory in use, GB", f"{summary['peak_bytes'] / 1e9:.2f}"))
    gpu = summary.get("gpu") or {}
    rows += [(f"GPU: {GPU[key][0]}", f"{value / GPU[key][1]:.1f}") for key, value in gpu.items() if key in GPU]
    return rows


def run_headline(summary: Mapping[str, Any]) -> str:
    """The result of a run in one line."""
    pruned = f"{100 * summary['sparsity']:.3g} % gone" if summary["sparsity"] else "Dense"
    return f"{pruned}: {summary['quality_name']} {summary['quality']:.4g} after {summary['steps']:,} steps"


def _run_figures(folder: Path, lines: Lines, summary: Mapping[str, Any]) -> list[str]:
    figures = [block("Loss", "Line: training batches. Dots: the whole held-out set.", _loss(lines))]
    if summary["layers"]:
        cells = heat_map([(one["name"], one["sparsity"]) for one in summary["layers"]])
        figures.append(block("Sparsity by layer", "", cells))
        figures.append(block("Sparsity", "Of the prunable weights.", _line(lines, "sparsity", "fraction pruned", BLUE)))
    figures.append(block("Learning rate", "", _line(lines, "lr", "learning rate", GREY)))
    if summary["breakdown_ms"]:
        said = "Mean of the sampled steps, with a sync after each part, so the sum exceeds the time of a usual step."
        figures.append(block("Time of a step", said, _bars(summary["breakdown_ms"])))
    if (folder / "gradient.json").exists():
        one = summary["gradient_of"]
        said = f"Element {one['index']} of {one['name']}, with Adam's moving averages of it."
        values = json.loads((folder / "gradient.json").read_text(encoding="utf-8"))
        figures.append(block("The gradient of one weight", said, _gradient(values)))
    if (folder / "gpu.json").exists():
        samples = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
        shown = {key: text for key, text in GPU.items() if key in samples[0]}
        said = "A line for every GPU." if len({one.get("gpu") for one in samples}) > 1 else ""
        figures += [
            block(f"GPU: {words}", said, _gpu(samples, key, words, unit)) for key, (words, unit) in shown.items()
        ]
    return figures


def _loss(lines: Lines) -> str:
    def draw(axes: Any) -> None:
        for key, style, colour in (("loss", "-", GREY), ("held_out_loss", "o-", BLUE)):
            found = [(line["step"], line[key]) for line in lines if key in line]
            if found:
                axes.plot(*zip(*found, strict=True), style, color=colour, markersize=3.5, linewidth=1.2)
        axes.set(xlabel="step", ylabel="loss, nats")

    return figure(draw, width=WIDTH, height=2.6)


def _line(lines: Lines, key: str, label: str, colour: str) -> str:
    def draw(axes: Any) -> None:
        axes.plot(*zip(*[(line["step"], line[key]) for line in lines if key in line], strict=True), color=colour)
        axes.set(xlabel="step", ylabel=label, ylim=(0, None))

    return figure(draw, width=WIDTH, height=2.2)


def _bars(milliseconds: Mapping[str, float]) -> str:
    def draw(axes: Any) -> None:
        axes.barh(list(milliseconds), list(milliseconds.values()), color=BLUE)
        axes.set(xlabel="milliseconds")
        axes.invert_yaxis()

    return figure(draw, width=WIDTH, height=2.2)


def _gradient(values: Sequence[float]) -> str:
    def draw(axes: Any) -> None:
        for (label, line), colour in zip(gradient_lines(values).items(), (GREY, ORANGE, BLUE, GREEN), strict=True):
            thin = 0.6 if colour == GREY else 1.4
            axes.plot(range(1, len(line) + 1), line, color=colour, linewidth=thin, label=label)
        axes.set(xlabel="step", ylabel="gradient")
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return figure(draw, width=WIDTH, height=3.2)


def _gpu(samples: Sequence[Mapping[str, float]], key: str, label: str, unit: float) -> str:
    def draw(axes: Any) -> None:
        for number in dict.fromkeys(one.get("gpu", 0) for one in samples):  # a line for every GPU of the run
            own = [one for one in samples if one.get("gpu", 0) == number and key in one]
            axes.plot([one["seconds"] for one in own], [one[key] / unit for one in own], linewidth=1.2)
        axes.set(xlabel="seconds", ylabel=label, ylim=(0, None))

    return figure(draw, width=WIDTH, height=2.2)
