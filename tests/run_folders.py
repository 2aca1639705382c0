"""Run folders made by hand, as `secateur train` would leave them, and short ways to compare them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from secateur.cli import main
from secateur.lab.compare import Comparison, Entry, compare
from secateur.lab.runs import read_runs

CONFIG = {
    "model": "gpt",
    "data": "stdlib",
    "score": "magnitude",
    "sparsity": 0.5,
    "schedule": "cubic",
    "seed": 0,
    "steps": 30,
    "lr": 3e-4,
    "budget": "normal",
}
LOSSES = {
    "magnitude": [2.0, 2.1, 2.2],
    "variance": [1.9, 2.01, 2.08],
    "random": [2.0, 2.2, 2.1],
}  # a final one for every seed
Point = tuple[int, float, float, float]  # step, seconds, held-out loss or accuracy, sparsity


def line_of(point: Point, quality_name: str) -> dict[str, Any]:
    """An evaluation as metrics and summary state it."""
    step, seconds, value, sparsity = point
    quality = math.exp(value) if quality_name == "perplexity" else value
    loss = value if quality_name == "perplexity" else 1 - value
    named = {"held_out_loss": loss, "quality": quality, "sparsity": sparsity}
    return {"step": step, "seconds": seconds, "seen": step * 64, **named}


def make_run(
    folder: Path,
    points: Sequence[Point],
    *,
    quality_name: str = "perplexity",
    finished: bool = True,
    hardware: str = "one core",
    recorded: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A folder with these evaluations, the last of them final; `recorded` goes into its summary."""
    config = {**CONFIG, **settings}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    lines = []
    for point in points:
        step, seconds, value, sparsity = point
        lines.append(
            {"step": step, "seconds": seconds, "seen": 64 * step, "loss": value, "lr": 1, "sparsity": sparsity}
        )
        lines.append(line_of(point, quality_name))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    layers = [
        {"name": f"layers.{n}.weight", "numel": 64, "sparsity": min(1.0, points[-1][3] * (n + 1) / 2)} for n in range(3)
    ]
    last = line_of(points[-1], quality_name)
    summary = {
        **last,
        "steps": last.pop("step"),
        "quality_name": quality_name,
        "higher_is_better": quality_name != "perplexity",
        "prunable": 192,
        "layers": layers,
        "versions": {"torch": "2"},
        "commit": "abc",
        "hardware": hardware,
        "budget": config["budget"],
        **(recorded or {}),
    }
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def make_sweep(folder: Path, finals: dict[str, Sequence[float]], **settings: Any) -> Path:
    """Runs of several scores, one for every final value given: its place is the seed."""
    final = settings.get("sparsity", CONFIG["sparsity"])
    for score, values in finals.items():
        for seed, value in enumerate(values):
            points = [(10, 1.0, value + 1, 0.2), (20, 2.0, value + 0.5, final), (30, 3.0, value, final)]
            make_run(folder / f"{score}-{seed}", points, **{**settings, "score": score, "seed": seed})
    return folder


def compared(folder: Path, *arguments: Any) -> Comparison:
    """A comparison of all runs below."""
    return compare(read_runs([folder])[0], *arguments)


def entries(found: Comparison, name: str = "final") -> dict[str, Entry]:
    """One of its tables, by row."""
    (table,) = [table for table in found.tables if table.name == name]
    return {entry.label: entry for entry in table.entries}


def command(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    """Run the command: its exit code, stdout and stderr."""
    code = main(["compare", *map(str, words)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err
