"""Rewrite the generated parts of README.md and docs from benchmarks/results and from the code.

    python -m benchmarks.tables [--check]

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. With --check nothing is written and the
exit code says whether anything would change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import secateur
from benchmarks import sampling, select
from benchmarks.record import RESULTS
from secateur.registry import resolve
from secateur.report import markdown_table

ROOT = Path(__file__).parent.parent


def newest(theme: str) -> dict[str, Any]:
    """The latest results of a theme."""
    path = max(RESULTS.glob(f"{theme}_*.json"), key=lambda p: p.stem.rpartition("_")[2])
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def source(record: dict[str, Any]) -> str:
    """Where the numbers come from, in a line."""
    return (
        f"{record['hardware']}; torch {record['versions']['torch']}, Python {record['versions']['python']};"
        f" commit {record['commit']}, {record['date']}: `{record['command']}`"
    )


def select_tables() -> str:
    """One table per size."""
    record = newest("select")
    return "\n\n".join([*(markdown_table(*select.table(size)) for size in record["sizes"]), source(record)])


def sampling_table() -> str:
    """Errors of the sampled threshold."""
    record = newest("sampling")
    return markdown_table(*sampling.table(record["results"], record["updates"])) + "\n\n" + source(record)


def scores_table() -> str:
    """Every registered score with its formula, as its docstring states it."""
    rows = []
    for name in secateur.scores():
        score = resolve(name)
        formula = (score.function.__doc__ or "").strip().split("\n")[0]
        options = ", ".join(f"{key}={value:g}" for key, value in score.defaults.items()) or "-"
        rows.append((f"`{name}`", f"`{formula}`", ", ".join(f"`{need}`" for need in score.needs), options))
    return markdown_table(("score", "formula", "reads", "options"), rows).replace("---:", "---")


def demo_table() -> str:
    """What the demo printed."""
    record = newest("demo")
    return markdown_table(record["header"], record["rows"]) + "\n\n" + source(record)


PARTS: dict[str, Callable[[], str]] = {
    "demo": demo_table,
    "sampling": sampling_table,
    "scores": scores_table,
    "select": select_tables,
}


def filled(text: str) -> str:
    """The text with every generated part made anew."""
    for name, make in PARTS.items():
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
                path.write_text(filled(text), encoding="utf-8")
    print("stale: " + ", ".join(stale) if stale else "up to date")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
