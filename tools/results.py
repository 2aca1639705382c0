"""The campaign on record: tables and pictures of docs/results.md from the files `secateur compare --json` wrote.

    python -m tools.results

draws docs/figures anew; `python -m tools.tables` writes the tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from secateur.files import write
from secateur.lab.compare import Comparison, compare, kept_choices, noise
from secateur.lab.record import ROOT, results_folder
from secateur.lab.runs import Measure, read_kept
from secateur.lab.statistics import exponential, percent
from secateur.lab.tables import BASELINE, Entry, Table

PREFIX = "campaign-"
RIVAL = "score=magnitude"  # the score to beat: of several rows, each has the one that agrees with it in all else
FIGURES = ROOT / "docs" / "figures"


def records() -> dict[str, Path]:
    """The newest record of every experiment, by name."""
    dated = sorted(results_folder().glob(f"{PREFIX}*.json"), key=lambda path: (path.stem.rpartition("_")[2], path.stem))
    return {path.stem.partition("_")[0]: path for path in dated}


def comparison(path: Path) -> Comparison:
    """The runs of a record, compared anew with the baseline it names."""
    return compare(read_kept(path), *kept_choices([path]))


def _final(found: Comparison) -> Table:
    (table,) = [table for table in found.tables if table.name == "final"]
    return table


def entries(found: Comparison) -> list[Entry]:
    """The rows at the end of training by their sparsity, best first."""
    sign = -1 if found.measure.higher_is_better else 1
    return sorted(_final(found).entries, key=lambda entry: (entry.final_sparsity, sign * entry.spread.mean))


def table(found: Comparison) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows: quality of every seed and their mean, the paired difference from the baseline in percent with
    its interval, and, where the baseline is one row, that from the rival that agrees with a row in all else."""
    measure = found.measure
    base = found.baseline or found.rows[0].label
    header = ["row", "sparsity", measure.name, "of each seed", f"to {base}, 95 %", "verdict"]
    columns = [entries(found)]
    if base != RIVAL and any(RIVAL in row.label.split(", ") for row in found.rows):
        header += [f"to {RIVAL}, all else equal", "verdict"]
        columns.append(entries(compare([run for row in found.rows for run in row.runs], found.axes, RIVAL)))
    rows = []
    for several in zip(*columns, strict=True):
        entry = several[0]
        mean = exponential(entry.spread.mean) if measure.logarithmic else entry.spread.mean
        seeds = ", ".join(_number(value, measure.logarithmic) for value in entry.qualities.values())
        own = entry.label, f"{entry.sparsity:.2%}", _number(mean, measure.logarithmic), seeds
        rows.append((*own, *(word for one in several for word in _judged(one, measure))))
    return header, rows


def _number(value: float, perplexity: bool) -> str:
    """A share in percent; four digits of a perplexity, or as many as it has before the point and one."""
    if not perplexity:
        return f"{value:.2%}"
    before = math.floor(math.log10(value)) if math.isfinite(value) else 0
    return f"{value:.{max(1, 3 - before)}f}"


def _judged(entry: Entry, measure: Measure) -> tuple[str, str]:
    if entry.difference is None:
        return "-", BASELINE if entry.verdict == BASELINE else "-"
    share = percent(entry.difference, logarithmic=measure.logarithmic)
    if not math.isfinite(share.mean):
        return "-", entry.verdict
    around = "" if share.interval is None else f" [{share.interval[0]:+.1f}, {share.interval[1]:+.1f}]"
    return f"{share.mean:+.1f} %{around}", entry.verdict


def noise_at_the_end(found: Comparison) -> str:
    """What differences in the table are worth, in a sentence; empty where it has too few runs to say."""
    return noise(_final(found), found.measure)


def source(found: Comparison) -> str:
    """Where the numbers come from, in a line."""
    runs = [run for row in found.rows for run in row.runs]
    hardware, commit = (", ".join(sorted({run.summary[key] for run in runs})) for key in ("hardware", "commit"))
    torch = ", ".join(sorted({run.summary["versions"]["torch"] for run in runs}))
    return f"{len(runs)} runs; {hardware}; torch {torch}; commit {commit}"


def picture(found: Comparison) -> str:
    """Every row against the baseline, seed by seed, with the mean and its interval: an SVG."""
    from secateur.lab.page import figure

    measure, whole = found.measure, entries(found)
    compared = [(entry, entry.difference) for entry in whole if entry.difference][::-1]
    shares = [(entry, percent(difference, logarithmic=measure.logarithmic)) for entry, difference in compared]
    shown = [(entry, share) for entry, share in shares if math.isfinite(share.mean)]
    base = {entry.label: entry.qualities for entry in whole}
    names = without_common([entry.label for entry, _ in shown])

    def draw(axes: Any) -> None:
        for place, (entry, share) in enumerate(shown):
            low, high = share.interval or (share.mean, share.mean)
            axes.plot([low, high], [place, place], color="#9ca3af", linewidth=5, alpha=0.6, solid_capstyle="butt")
            ours, theirs = entry.qualities, base[entry.baseline or ""]
            each = [100 * (ours[seed] / theirs[seed] - 1) for seed in ours if theirs.get(seed)]
            axes.plot(each, [place] * len(each), "o", color="#0072b2", markersize=4, alpha=0.7)
            axes.plot([share.mean], [place], "|", color="#111827", markersize=13, markeredgewidth=2)
        axes.axvline(0, color="#d55e00", linewidth=1)
        axes.set_yticks(range(len(shown)), names, fontsize="small")
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.set_xlabel(f"{measure.name}, percent from {found.baseline or found.rows[0].label}", fontsize="small")

    return figure(draw, width=8.0, height=1.1 + 0.28 * len(shown))


def without_common(labels: Sequence[str]) -> list[str]:
    """Labels of rows without the settings that all of them name."""
    parts = [label.split(", ") for label in labels]
    common = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    return [", ".join(word for word in words if word not in common) for words in parts]


def main() -> None:
    """Draw every record."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, path in records().items():
        write(FIGURES / f"{name}.svg", picture(comparison(path)) + "\n")
        print(FIGURES.relative_to(ROOT) / f"{name}.svg")


if __name__ == "__main__":
    main()
