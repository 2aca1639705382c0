"""A run's own page: how it learned, where its zeros are, where its time went, and one weight's gradient."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from secateur.lab.monitor import picture_of_a_gradient
from secateur.lab.page import block, document, figure, layer_bars
from secateur.lab.runs import METRICS
from secateur.report import html_table

BLUE, ORANGE, GREY, GREEN = "#0072b2", "#d55e00", "#9ca3af", "#009e73"
GPU = {"busy": ("busy, %", 1.0), "memory_bytes": ("memory, GB", 1e9), "watts": ("power, W", 1.0)}
LAYERS_SHOWN = 60


def render(folder: Path, title: str, summary: Mapping[str, Any]) -> str:
    """The page of a finished run, from what its folder holds."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    quality = summary["quality_name"]
    figures = [block("Loss", "Line: training batches. Dots: the whole held-out set.", _loss(lines))]
    if summary["layers"]:
        figures.append(block("Sparsity", "Of the prunable weights.", _line(lines, "sparsity", "share gone", BLUE)))
    figures.append(block("Learning rate", "As the schedule has it.", _line(lines, "lr", "learning rate", GREY)))
    if summary["breakdown_ms"]:
        said = "Mean of some steps, each part waited for: more than a step takes when nobody waits."
        figures.append(block("Where a step goes", said, _bars(summary["breakdown_ms"])))
    if (folder / "gradient.json").exists():
        one = summary["gradient_of"]
        said = f"Number {one['index']} of {one['name']}, as it comes and as Adam would average it."
        values = json.loads((folder / "gradient.json").read_text(encoding="utf-8"))
        figures.append(block("The gradient of one weight", said, _gradient(values)))
    if (folder / "gpu.json").exists():
        samples = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
        figures += [block(f"GPU: {words}", "", _gpu(samples, key, words, unit)) for key, (words, unit) in GPU.items()]
    if summary["layers"]:
        figures.append(block("Sparsity by layer", "The largest layers.", _layers(summary["layers"]), tall=True))
    rows = [(quality, f"{summary['quality']:.4f}"), ("held-out loss", f"{summary['held_out_loss']:.4f}")]
    rows += [("steps", f"{summary['steps']:,} of {summary['asked_steps']:,}"), ("budget", summary["budget"])]
    rows += [("sparsity (prunable)", f"{summary['sparsity']:.4%}"), ("seconds", f"{summary['seconds']:.1f}")]
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    footer = html.escape(f"{summary['hardware']}; {versions}; commit {summary['commit']}")
    return document(title, [html_table(("", ""), rows)], figures, footer)


def _loss(lines: Sequence[Mapping[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        for key, style, colour in (("loss", "-", GREY), ("held_out_loss", "o-", BLUE)):
            found = [(line["step"], line[key]) for line in lines if key in line]
            if found:
                axes.plot(*zip(*found, strict=True), style, color=colour, markersize=3.5, linewidth=1.2)
        axes.set(xlabel="step", ylabel="loss, nats")

    return figure(draw)


def _line(lines: Sequence[Mapping[str, Any]], key: str, label: str, colour: str) -> str:
    def draw(axes: Any) -> None:
        axes.plot(*zip(*[(line["step"], line[key]) for line in lines if key in line], strict=True), color=colour)
        axes.set(xlabel="step", ylabel=label, ylim=(0, None))

    return figure(draw)


def _bars(milliseconds: Mapping[str, float]) -> str:
    def draw(axes: Any) -> None:
        axes.barh(list(milliseconds), list(milliseconds.values()), color=BLUE)
        axes.set(xlabel="milliseconds")
        axes.invert_yaxis()

    return figure(draw, height=2.6)


def _gradient(values: Sequence[float]) -> str:
    def draw(axes: Any) -> None:
        for (label, line), colour in zip(
            picture_of_a_gradient(values).items(), (GREY, ORANGE, BLUE, GREEN), strict=True
        ):
            axes.plot(
                range(1, len(line) + 1), line, color=colour, linewidth=0.6 if colour == GREY else 1.4, label=label
            )
        axes.set(xlabel="step", ylabel="gradient")
        axes.legend(frameon=False, fontsize=7)

    return figure(draw)


def _gpu(samples: Sequence[Mapping[str, float]], key: str, label: str, unit: float) -> str:
    def draw(axes: Any) -> None:
        axes.plot([one["seconds"] for one in samples], [one[key] / unit for one in samples], color=BLUE)
        axes.set(xlabel="seconds", ylabel=label, ylim=(0, None))

    return figure(draw, height=2.6)


def _layers(layers: Sequence[Mapping[str, Any]]) -> str:
    largest = sorted(layers, key=lambda one: -one["numel"])[:LAYERS_SHOWN]
    shown = [one for one in layers if one in largest]
    names = [one["name"].removesuffix(".weight") for one in shown]
    bars = [("sparsity", BLUE, [one["sparsity"] for one in shown])]
    return layer_bars(names, bars, max(2.5, 0.24 * len(names)))
