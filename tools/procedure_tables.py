"""Tables of docs/probe.md from the records of `tools.procedure`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from secateur.report import markdown_table

Record = dict[str, Any]
Cell = dict[str, Any]
NONE = "not measured yet"
CACHED, REFRESHED = "raise", "raise, refreshed"
WORDS = {
    CACHED: "no limit, candidates cached",
    REFRESHED: "no limit, candidates refreshed",
    "off": "tuning off",
    "on": "tuning on",
    "both": "tuning both",
}


def strict(records: Iterable[Record]) -> str:
    """One strict probe of candidates of 50 % in reverse order, on every text and draw."""
    header = (
        "model, text", "probed", "calibration", "draw", "sparsity", "dense", "veto", "WANDA alone", "recommended",
        "calibration text: dense", "veto",
    )  # fmt: skip
    rows = []
    for record in records:
        tokens = f"{record['calibration']} x {record['context']}"
        for cell in record["cells"]:
            if cell["cell"] == "strict":
                held_out = f"{record['dense']:.2f}", f"{cell['perplexity']:.2f}", *_beside(cell)
                own = f"{cell['dense_calibrated']:.2f}", f"{cell['calibrated']:.2f}"
                which = _subject(record), _layers(cell["group"]), tokens, str(cell["draw"])
                rows.append((*which, f"{cell['sparsity']:.1%}", *held_out, *own))
    return markdown_table(header, rows)


def searches(records: Iterable[Record]) -> str:
    """Every search: what it reached, what stands beside it at the same sparsity, and what it cost."""
    header = (
        "model", "search", "draw", "levels and tries", "s each", "calls of the score", "peak MB", "sparsity",
        "perplexity", "WANDA alone", "recommended",
    )  # fmt: skip
    rows = []
    for record, cell in _searches(records):
        tried = probes(cell)
        each = f"{statistics.median(map(seconds, tried)):.1f}"
        cost = str(len(tried)), each, str(cell["calls"]), f"{cell['probe_peak_bytes'] / 1e6:,.0f}"
        reached = f"{cell['sparsity']:.1%}", f"{cell['perplexity']:.2f}"
        rows.append((_model(record), _named(cell), str(cell["draw"]), *cost, *reached, *_beside(cell)))
    return markdown_table(header, rows) if rows else NONE


def levels(records: Sequence[Record]) -> str:
    """Level by level: the searches without a limit, and what cached candidates save."""
    header = ("model", "search", "draw", "level", "sparsity", "perplexity", "s", "calls of the score")
    rows = []
    for record, cell in _searches(records):
        if cell["cell"] not in (CACHED, REFRESHED):
            continue
        names = [name for name, _ in cell["found"] if name.startswith("level ")]
        for name, level in zip(names, probes(cell), strict=True):
            asked, _, sparsity = (part.rpartition(" ")[2] for part in name.split(", "))
            cost = f"{seconds(level):.1f}", str(level["calls"])
            who = _model(record), _named(cell), str(cell["draw"])
            rows.append((*who, asked, sparsity, f"{-level['value']:.2f}", *cost))
    saved = [caching(record) for record in records]
    return "\n\n".join([markdown_table(header, rows), *filter(None, saved)]) if rows else NONE


def caching(record: Record) -> str:
    """What cached candidates save, in words, from pairs of searches without a limit."""
    found = {(cell["cell"], cell["group"], cell["draw"]): cell for cell in record["cells"]}
    said = []
    for (name, group, draw), cell in found.items():
        other = found.get((REFRESHED, group, draw))
        if name == CACHED and other is not None:
            ours, theirs = (sum(map(seconds, probes(one))) for one in (cell, other))
            said.append(
                f"{len(probes(cell))} levels, {_layers(group)}, draw {draw}: {cell['calls']} calls of the score cached,"
                f" {other['calls']} refreshed ({other['calls'] / cell['calls']:.0f}x); {ours:.0f} and {theirs:.0f} s"
                f" ({1 - ours / theirs:.0%} less); sparsity {cell['sparsity']:.1%} and {other['sparsity']:.1%} at"
                f" perplexity {cell['perplexity']:.2f} and {other['perplexity']:.2f}."
            )
    return "\n".join(f"- {line}" for line in said)


def probes(cell: Cell) -> list[dict[str, float]]:
    """The levels and tries of a search, without the evaluations of the dense model, of going back and of the score
    alone: those follow no probe."""
    names = [name for name, _ in cell["found"]]
    return [level for name, level in zip(names, cell["levels"], strict=True) if name.startswith("level ")]


def seconds(level: dict[str, float]) -> float:
    """What a level took; older records, all of CPUs, have it under another name."""
    return level["seconds"] if "seconds" in level else level["cpu_seconds"]


def source(records: Sequence[Record]) -> str:
    """Where the numbers come from: hardware, versions and commands."""
    lines = []
    for record in records:
        commands = ", ".join(f"`{command}`" for command in record["commands"])
        lines.append(
            f"- {_subject(record)}, {record['calibration']} x {record['context']} tokens calibrate,"
            f" {record['windows'][1]} other windows evaluate: {record['hardware']},"
            f" torch {record['versions']['torch']}, commit {record['commit']}, {record['date']}: {commands}"
        )
    return "\n".join(lines)


def _beside(cell: Cell) -> list[str]:
    """Perplexity of the score alone and of `recommended` at the same sparsity, where they were run."""
    return [f"{cell[key]:.2f}" if key in cell else "-" for key in ("alone", "recommended")]


def _model(record: Record) -> str:
    return str(record["model"]).partition(" with ")[0]


def _subject(record: Record) -> str:
    return f"{_model(record)}, {record['text']}"


def _named(cell: Cell) -> str:
    return f"{WORDS[cell['cell']]}, {_layers(cell['group'])}"


def _layers(group: int | str) -> str:
    return "layer by layer" if group == 1 else "block by block" if group == "block" else f"{group} layers at a time"


def _searches(records: Iterable[Record]) -> Iterator[tuple[Record, Cell]]:
    """The searches of every record, those with the same settings beside each other."""
    names = list(WORDS)
    for record in records:
        found = [cell for cell in record["cells"] if cell["cell"] in WORDS]
        for cell in sorted(found, key=lambda cell: (str(cell["group"]), names.index(cell["cell"]), cell["draw"])):
            yield record, cell
