"""Tables of a comparison in words: cells for terminal and page alike, and the lines under them."""

from __future__ import annotations

from collections.abc import Sequence

from secateur.lab.rows import Measure
from secateur.lab.statistics import CONFIDENCE, UNKNOWN, Estimate, exponential, percent, ratio
from secateur.lab.tables import Entry, Table

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
