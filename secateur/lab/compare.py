"""Tables of a comparison in words: cells for terminal and page alike, and the lines under them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from secateur.errors import ComparisonError
from secateur.files import read_json
from secateur.lab.runs import FinishedRun, Measure, differing, measure_of, texts
from secateur.lab.statistics import CONFIDENCE, UNKNOWN, Estimate, exponential, percent, ratio
from secateur.lab.tables import Entry, Row, Table, baselines, group, tables
from secateur.report import text_table

PERCENT = f"{CONFIDENCE:.0%}"


def header(measure: Measure) -> tuple[str, ...]:
    """Column names."""
    compared = ("ratio of perplexities", "in percent") if measure.logarithmic else ("in percent",)
    own = (measure.name, measure.judged) if measure.logarithmic else (measure.name,)
    return ("row", "verdict", "sparsity", *own, "deviation", "seeds", "pairs", "difference", *compared)


def cells(entry: Entry, measure: Measure) -> tuple[str, ...]:
    """An entry under that header."""
    found, mean = entry.difference, entry.spread.mean
    own = (f"{exponential(mean):.5g}", f"{mean:.5f}") if measure.logarithmic else (f"{mean:.5g}",)
    deviation = "-" if entry.spread.deviation is None else f"{entry.spread.deviation:.3g}"
    if found is None:
        compared = ("-",) * (4 if measure.logarithmic else 3)
    elif measure.logarithmic:
        times, share = ratio(found), percent(found, logarithmic=True)
        compared = (str(found.pairs), _with(found, "+.4f"), _with(times, ".4f"), f"{share.mean:+.2f} %")
    else:
        compared = (str(found.pairs), _with(found, "+.4g"), _with(percent(found, logarithmic=False), "+.2f") + " %")
    return (entry.label, entry.verdict, _sparsity(entry), *own, deviation, str(entry.spread.count), *compared)


def notes(table: Table, measure: Measure) -> list[str]:
    """What stands under one table."""
    compared = any(entry.difference is not None for entry in table.entries)
    log = "Perplexities are compared on the log, which is the held-out loss; the ratio is the exp of the difference."
    first = [log] if compared and measure.logarithmic else []
    return [*first, *filter(None, [noise(table, measure)]), *table.notes]


def noise(table: Table, measure: Measure) -> str:
    """How far runs of a table fall from where their row and seed put them, in a sentence."""
    found = table.scatter
    if found is None:
        return ""
    unit = " %" if measure.logarithmic else " points" if measure.name == "accuracy" else ""
    one, two = (f"{100 * value if unit else value:.2g}{unit}" for value in (found.deviation, found.reach))
    but = f" but {'; '.join(found.left_out)}" if found.left_out else ""
    return (
        f"A run's {measure.name} falls {one} from where its row and seed put it (standard deviation over all rows{but};"
        f" {found.freedom} degrees of freedom): in this table, means over {found.seeds} seeds less than {two} apart"
        " may be chance."
    )


def explanations(tables: Sequence[Table], measure: Measure) -> list[str]:
    """What stands under all of them: how the numbers came about."""
    entries = [entry for table in tables for entry in table.entries]
    bases = list(dict.fromkeys(entry.baseline for entry in entries if entry.baseline))
    base = bases[0] if len(bases) == 1 else "the baseline that agrees in all else"
    shown = "exp of the mean held-out loss" if measure.logarithmic else "mean over seeds"
    whole = "perplexity" if measure.logarithmic else "mean over the same seeds"
    lines = [
        f"{measure.name}: {shown}. deviation: standard deviation of the {measure.judged} over seeds (n-1).",
        f"difference: from {base}, paired by seed, with its {PERCENT} confidence interval by"
        f" Student's t. percent: of the baseline's {whole}.",
    ]
    if any(entry.verdict == UNKNOWN for entry in entries):
        lines.append(f"{UNKNOWN}: the interval holds zero, or there are fewer than two common seeds.")
    intervals = [entry for entry in entries if entry.difference is not None and entry.difference.interval is not None]
    if len(intervals) > 1:
        lines.append(f"Every interval stands for itself: of many at {PERCENT}, some miss by chance.")
    return lines


def rows_of(table: Table, measure: Measure) -> Sequence[tuple[str, ...]]:
    """All rows of a table."""
    return [cells(entry, measure) for entry in table.entries]


def _sparsity(entry: Entry) -> str:
    return f"{entry.sparsity:.2%}" + (f" of {entry.final_sparsity:.2%}" if entry.early else "")


def _with(found: Estimate, form: str) -> str:
    if found.interval is None:
        return f"{found.mean:{form}}"
    low, high = found.interval
    return f"{found.mean:{form}} [{low:{form}}, {high:{form}}]"


@dataclass(frozen=True)
class Comparison:
    """Everything a page, a terminal or a file shows."""

    axes: tuple[str, ...]
    shared: dict[str, str]  # settings that are the same in all runs
    measure: Measure
    rows: tuple[Row, ...]
    tables: tuple[Table, ...]
    baseline: str | None = None  # as it was asked for

    def __str__(self) -> str:
        parts = [self.alike]
        for table in self.tables:
            parts.append(table.title)
            if table.entries:
                parts.append(text_table(header(self.measure), rows_of(table, self.measure)))
            parts.append("\n".join(notes(table, self.measure)))
        return "\n\n".join(part for part in (*parts, "\n".join(self.explained)) if part)

    @property
    def alike(self) -> str:
        """The settings all rows share, in a line."""
        return "The same in every row: " + ", ".join(f"{name}={value}" for name, value in self.shared.items()) + "."

    @property
    def explained(self) -> list[str]:
        """How the numbers of all tables came about."""
        return explanations(self.tables, self.measure)

    def to_json(self, about: Mapping[str, Any] | None = None) -> str:
        """All numbers, those of every seed too, a run on a line; `secateur compare` reads them again. What is not
        finite is null. `about` says who made the file; each run says of itself what it ran on."""
        runs = [{"row": row.label, **_plain_run(run)} for row in self.rows for run in row.runs]
        plain = {
            **(about or {}),
            "axes": self.axes,
            "baseline": self.baseline,
            "shared": self.shared,
            "measure": {**asdict(self.measure), "judged": self.measure.judged},
            "explained": self.explained,
            "tables": [
                {
                    **asdict(table),
                    "entries": [_plain_entry(entry, self.measure) for entry in table.entries],
                    "notes": notes(table, self.measure),
                }
                for table in self.tables
            ],
        }
        lines = ",\n  ".join(json.dumps(_finite(run), allow_nan=False) for run in runs)
        head = json.dumps(_finite(plain), indent=1, allow_nan=False).removesuffix("\n}")
        return f'{head},\n "runs": [\n  {lines}\n ]\n}}\n'


def compare(runs: Sequence[FinishedRun], by: Sequence[str] | None = None, baseline: str | None = None) -> Comparison:
    """Runs in rows along the settings `by` (whatever differs), each against the `baseline` row (the first)."""
    if not runs:
        raise ComparisonError("No run is finished, so there is nothing to compare.")
    settings = [run.settings for run in runs]
    different = differing(settings)
    axes = tuple(different) if by is None else tuple(by)
    measure = measure_of(runs)
    rows = group(runs, axes)
    shared = {name: value for name, value in texts(settings[0]).items() if name not in different}
    made = tables(rows, baselines(rows, baseline), measure)
    return Comparison(axes, shared, measure, tuple(rows), tuple(made), baseline)


def _plain_run(run: FinishedRun) -> dict[str, Any]:
    curve = [asdict(found) for found in run.evaluations]
    gone = run.sparsity
    around = zip([None, *gone], gone, [*gone[1:], None], strict=False)
    bends = [now for last, now, then in around if not (last and then and last[1] == now[1] == then[1])]
    kept = {"folder": str(run.folder), "settings": run.settings, "evaluations": curve, "path": bends}
    return {**kept, "summary": run.summary}


def _plain_entry(entry: Entry, measure: Measure) -> dict[str, Any]:
    found = entry.difference
    if found is None:
        return asdict(entry)
    plain = {**asdict(entry), "percent": asdict(percent(found, logarithmic=measure.logarithmic))}
    return {**plain, "ratio": asdict(ratio(found))} if measure.logarithmic else plain


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def kept_choices(paths: Sequence[Path]) -> tuple[list[str] | None, str | None]:
    """What a file says its runs were compared by, and with; nothing where there is more than one file to read."""
    if len(paths) != 1 or not paths[0].is_file():
        return None, None
    kept = read_json(paths[0], dict, ComparisonError)
    axes, baseline = kept.get("axes"), kept.get("baseline")
    named = axes is None or (isinstance(axes, list) and all(isinstance(axis, str) for axis in axes))
    if not named or not isinstance(baseline, str | None):
        raise ComparisonError(f"{paths[0]} is not as `secateur compare --json` writes it: its axes or baseline.")
    return axes, baseline
