"""The campaign on record: tables and pictures of docs/results.md from the files `secateur compare --json` wrote.

    python -m tools.results

draws docs/figures anew, those of other records too; `python -m tools.tables` writes the tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from secateur.bench import patterns
from secateur.files import write
from secateur.lab.compare import BASELINE, Comparison, Entry, best_first, compare, mean_quality, noise, written
from secateur.lab.compare_page import cost_by_sparsity, differences
from secateur.lab.record import ROOT
from secateur.lab.runs import Measure, kept_choices, read_kept
from secateur.lab.statistics import percent
from tools import finetune_campaign
from tools.cells import Cells, dated

PREFIX = "campaign-"
RIVAL = "score=magnitude"  # the score to beat: of several rows, each has the one that agrees with it in all else
FIGURES = ROOT / "docs" / "figures"


def records() -> dict[str, Path]:
    """The newest record of every experiment, by name."""
    return {path.stem.partition("_")[0]: path for path in dated(f"{PREFIX}*")}


def comparison(path: Path) -> Comparison:
    """The runs of a record, compared anew with the baseline it names."""
    return compare(read_kept(path), *kept_choices([path]))


def entries(found: Comparison) -> list[Entry]:
    """The rows at the end of training by their sparsity, best first."""
    return best_first(found.final, found.measure)


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
        mean = mean_quality(entry, measure)
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
    return written(share, "+.1f", " %"), entry.verdict


def noise_at_the_end(found: Comparison) -> str:
    """Which differences in the table may be chance, in a sentence; empty for too few runs."""
    return noise(found.tables[0], found.measure)


def source(found: Comparison) -> str:
    """Where the numbers come from, in a line."""
    runs = [run for row in found.rows for run in row.runs]
    hardware, commit = (", ".join(sorted({run.summary[key] for run in runs})) for key in ("hardware", "commit"))
    torch = ", ".join(sorted({run.summary["versions"]["torch"] for run in runs}))
    return f"{len(runs)} runs; {hardware}; torch {torch}; commit {commit}"


# Records of one score against another, in plain words: network, data, number of training steps or epochs.
VERSUS = {
    f"{PREFIX}gpt-small-scores-long": "GPT 8x512, 15.2 M tokens",
    f"{PREFIX}gpt-small-scores": "GPT 8x512, 7.6 M tokens",
    f"{PREFIX}gpt2-scores": "GPT-2 124M, 7.6 M tokens",
    f"{PREFIX}gpt-python-default": "GPT 4x128, Python source, 0.6 M tokens",
    f"{PREFIX}resnet18-cifar10": "ResNet-18, CIFAR-10, 6 epochs",
    f"{PREFIX}lenet5-fashion": "LeNet-5, Fashion-MNIST, 3 epochs",
}
OURS = "score=variance"
SHOWN = ("magnitude", "variance")  # in the figure of the README


def against_rival(least: float = 0.0) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows: the default score beside magnitude in every record of VERSUS, from sparsity `least` up."""
    header = ("network and data", "sparsity", "dense", "magnitude", "variance", "variance to magnitude, 95 %", "seeds")
    rows = []
    for name, words in VERSUS.items():
        if name not in records():
            continue
        found = comparison(records()[name])
        for dense, ours, theirs in _beside_rival(found):
            if ours.final_sparsity < least - 1e-3:
                continue
            figures = [
                _number(mean_quality(entry, found.measure), found.measure.logarithmic)
                for entry in (dense, theirs, ours)
            ]
            difference = f"{_judged(ours, found.measure)[0]}: {ours.verdict}"
            rows.append((words, f"{ours.sparsity:.0%}", *figures, difference, str(len(ours.values))))
    return header, rows


def _beside_rival(found: Comparison) -> list[tuple[Entry, Entry, Entry]]:
    """Dense runs, the default score and magnitude, for every sparsity of a comparison."""
    whole = {entry.label: entry for entry in entries(found)}
    (dense,) = [entry for entry in whole.values() if entry.final_sparsity == 0]
    ours = [entry for entry in whole.values() if OURS in entry.label.split(", ")]
    return [(dense, entry, whole[entry.label.replace(OURS, RIVAL)]) for entry in ours]


def headline(found: Comparison) -> str:
    """The distance from dense by sparsity of the default score and of its rival, with every seed: an SVG."""
    runs = [run for row in found.rows for run in row.runs if run.settings["score"] in (None, *SHOWN)]
    return cost_by_sparsity(compare(runs, found.axes, found.baseline), width=6.4, height=3.0)


def picture(found: Comparison) -> str:
    """Every row against the baseline, seed by seed, with the mean and its interval: an SVG."""
    return differences(found, width=8.0, from_baseline=True)


def main() -> None:
    """Draw every record."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, path in records().items():
        write(FIGURES / f"{name}.svg", picture(comparison(path)) + "\n")
        print(FIGURES.relative_to(ROOT) / f"{name}.svg")
    for path in dated("patterns")[-1:]:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        write(FIGURES / "patterns.svg", patterns.picture(cells) + "\n")
    if cells := Cells(finetune_campaign.THEME, finetune_campaign.key).found:
        write(FIGURES / f"{finetune_campaign.THEME}.svg", finetune_campaign.drawn(cells) + "\n")
    write(FIGURES / "headline.svg", headline(comparison(records()[f"{PREFIX}gpt-small-scores"])) + "\n")


if __name__ == "__main__":
    main()
