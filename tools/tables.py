"""Rewrite the generated parts of README.md and docs from benchmarks/results and from the code.

    python -m tools.tables [--check]

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. With --check nothing is written and the
exit code says whether anything would change.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import secateur
from secateur.bench import accuracy, pace, probe, quality, scale, select, step, train
from secateur.files import write
from secateur.lab.record import ROOT, results_folder
from secateur.report import markdown_table
from secateur.scores import resolve
from tools import results

NOT_YET = "not measured yet"
CPU, GPU = "cpu", "gpu"
Record = dict[str, Any]


def records(theme: str) -> Iterator[Record]:
    """Everything measured under a theme, newest first."""
    paths = results_folder().glob(f"{theme}_*.json")
    for path in sorted(paths, key=lambda path: path.stem.rpartition("_")[2], reverse=True):
        yield json.loads(path.read_text(encoding="utf-8"))


def newest(theme: str, kind: str) -> Record | None:
    """The latest results of a theme on this kind of hardware; only CPUs are recorded with their threads."""
    return next((one for one in records(theme) if (CPU if "threads" in one["hardware"] else GPU) == kind), None)


def source(record: Record) -> str:
    """Where the numbers come from, in a line."""
    copied = f" copies at {record['bandwidth'] / 1e12:.2f} TB/s;" if "bandwidth" in record else ""
    return (
        f"{record['hardware']};{copied} torch {record['versions']['torch']}, Python {record['versions']['python']};"
        f" commit {record['commit']}, {record['date']}: `{record['command']}`"
    )


def part(theme: str, kind: str, tables: Callable[[Record], list[str]]) -> str:
    """The newest record of a theme as tables with their source under them."""
    record = newest(theme, kind)
    return NOT_YET if record is None else "\n\n".join([*tables(record), source(record)])


def select_tables(record: Record) -> list[str]:
    return [markdown_table(*select.table(size)) for size in record["sizes"]]


def train_tables(record: Record) -> list[str]:
    return [markdown_table(*train.table(record["cells"]))]


def train_part() -> str:
    """Both modes from one run; failing that, from a run of each."""
    whole = part("train", GPU, train_tables)
    halves = [part(f"train-{mode}", GPU, train_tables) for mode in train.MODES]
    measured = [half for half in halves if half != NOT_YET]
    return whole if whole != NOT_YET or not measured else "\n\n".join(measured)


def scores_table() -> str:
    """Every registered score with its formula, as its docstring states it."""
    rows = []
    for name in secateur.scores():
        score = resolve(name)
        formula = (score.function.__doc__ or "").strip().split("\n")[0]
        options = ", ".join(f"{key}={value:g}" for key, value in score.defaults.items()) or "-"
        rows.append((f"`{name}`", f"`{formula}`", ", ".join(f"`{need}`" for need in score.needs), options))
    return markdown_table(("score", "formula", "reads", "options"), rows).replace("---:", "---")


PARTS: dict[str, Callable[[], str]] = {
    "accuracy": lambda: part(
        "accuracy", CPU, lambda found: [markdown_table(*accuracy.table(found["results"], found["updates"]))]
    ),
    "demo": lambda: part("demo", CPU, lambda found: [markdown_table(found["header"], found["rows"])]),
    "pace": lambda: part("pace", GPU, lambda found: [markdown_table(*pace.table(found["rows"]))]),
    "probe": lambda: part(
        "probe",
        GPU,
        lambda found: [
            markdown_table(*probe.passes_table(found["passes"])),
            markdown_table(*probe.jobs_table(found["jobs"])),
        ],
    ),
    "quality": lambda: part(
        "quality", GPU, lambda found: [quality.windows(found), markdown_table(*quality.table(found))]
    ),
    "quality-short": lambda: part(
        "quality", GPU, lambda found: [quality.windows(found), markdown_table(*quality.summary(found))]
    ),
    "scale": lambda: part("scale", GPU, lambda found: [markdown_table(*scale.table(found["sizes"]))]),
    "scores": scores_table,
    "select": lambda: part("select", CPU, select_tables),
    "select-gpu": lambda: part("select", GPU, select_tables),
    "step": lambda: part("step", GPU, lambda found: [markdown_table(*step.table(found))]),
    "train": train_part,
}


def campaign(path: Path) -> str:
    """An experiment of the lab: its final table, a picture of it, and where the numbers come from."""
    found = results.comparison(path)
    name = path.stem.partition("_")[0]
    picture, about = f"![{name}](figures/{name}.svg)", [results.noise_at_the_end(found), results.source(found)]
    return "\n\n".join([markdown_table(*results.table(found)), picture, *filter(None, about)])


def filled(text: str) -> str:
    """The text with every generated part made anew."""
    parts = {name: lambda: NOT_YET for name in re.findall(rf"<!-- begin ({results.PREFIX}[\w-]+) -->", text)}
    parts |= dict(PARTS) | {name: partial(campaign, path) for name, path in results.records().items()}
    for name, make in parts.items():
        marks = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if marks[0] in text:
            before, _, rest = text.partition(marks[0])
            text = f"{before}{marks[0]}\n{make()}\n{marks[1]}{rest.partition(marks[1])[2]}"
    return text


def main() -> int:
    """Rewrite, or check."""
    stale = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                write(path, filled(text))
    print("stale: " + ", ".join(stale) if stale else "up to date")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
