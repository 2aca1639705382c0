"""Comparing finished runs: rows over seeds, paired differences from a baseline, tables and the result in a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from secateur.errors import ComparisonError
from secateur.lab.costs import compile_table, cost_notes, cost_table, plain_costs
from secateur.lab.runs import (
    EXTENDED,
    PRUNING,
    SCORE,
    Evaluation,
    FinishedRun,
    Measure,
    Row,
    baselines,
    dense_rows,
    differing,
    finite,
    group,
    measure_of,
    own_axes,
    plain_run,
    texts,
)
from secateur.lab.statistics import (
    BETTER,
    CONFIDENCE,
    UNKNOWN,
    Difference,
    Estimate,
    Scatter,
    Spread,
    difference,
    exponential,
    percent,
    ratio,
    scatter,
    spread,
    verdict,
)
from secateur.report import text_table

BASELINE, NO_BASELINE = "baseline", "no baseline"
SPARSITY_ROUNDING = 1e-4  # metrics and summaries may round a sparsity differently
PERCENT = f"{100 * CONFIDENCE:.0f} %"
Moment = Callable[[FinishedRun], Evaluation | None]  # the evaluation of a run that a table is about


@dataclass(frozen=True)
class Entry:
    """A row of a table."""

    label: str
    extended: bool
    baseline: str | None
    values: dict[int, float]  # what is compared, by seed
    qualities: dict[int, float]  # the same as the run reports it: the perplexity for a held-out loss
    sparsity: float  # mean over seeds, at the moment the table is about
    final_sparsity: float
    spread: Spread
    difference: Difference | None
    verdict: str
    dense: str | None = None  # the dense row with otherwise equal settings
    from_dense: Difference | None = None

    @property
    def early(self) -> bool:
        """Whether the final sparsity was not reached yet."""
        return abs(self.sparsity - self.final_sparsity) > SPARSITY_ROUNDING


@dataclass(frozen=True)
class Table:
    """One table and the notes under it."""

    name: str
    title: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    scatter: Scatter | None = None


def tables(rows: Sequence[Row], bases: Sequence[Row | None], measure: Measure) -> list[Table]:
    """Tables at the end, at equal steps and at equal seconds; one that cannot be made has a note instead of entries."""
    runs = [run for row in rows for run in row.runs]
    name = measure.name.capitalize()
    made = [_table("final", f"{name} at the end of training", rows, bases, measure, lambda run: run.final)]
    step = common_step(runs)
    if step is None:
        made.append(Table("equal_steps", "At equal steps", (), ("There is no step at which every run was evaluated.",)))
    else:
        title = f"{name} at equal steps: step {step:,}, the last at which every run was evaluated"
        made.append(_table("equal_steps", title, rows, bases, measure, lambda run: at_step(run, step)))
    limit = min(run.took for run in runs)
    title = f"{name} at equal seconds: the last evaluation within {limit:.1f} s, the time of the fastest run"
    last = _table("equal_seconds", title, rows, bases, measure, lambda run: by_seconds(run, limit))
    machines = sorted({str(run.summary.get("hardware", "unknown")) for run in runs})
    note = f"The runs were not on the same hardware ({'; '.join(machines)}), so their seconds cannot be compared."
    notes = last.notes if len(machines) == 1 else (*last.notes, note)
    return [*made, replace(last, notes=notes, scatter=None)]  # runs of a row may be at different steps here


def common_step(runs: Sequence[FinishedRun]) -> int | None:
    """The last step at which every run was evaluated."""
    steps = [{found.step for found in run.evaluations} for run in runs]
    return max(set.intersection(*steps), default=None)


def at_step(run: FinishedRun, step: int) -> Evaluation | None:
    """The evaluation at this step."""
    return next((found for found in run.evaluations if found.step == step), None)


def by_seconds(run: FinishedRun, limit: float) -> Evaluation | None:
    """The last evaluation within this time."""
    return next((found for found in reversed(run.evaluations) if found.seconds <= limit), None)


def _table(
    name: str, title: str, rows: Sequence[Row], bases: Sequence[Row | None], measure: Measure, moment: Moment
) -> Table:
    dense = dense_rows(rows)
    made = [_entry(row, base, dense.get(row.label), measure, moment) for row, base in zip(rows, bases, strict=True)]
    entries = tuple(entry for entry in made if entry is not None)
    notes = tuple(_notes(rows, entries, moment))
    return Table(name, title, entries, notes, scatter({one.label: one.values for one in entries}))


def _found(row: Row, moment: Moment) -> dict[int, Evaluation]:
    return {run.seed: found for run in row.runs if (found := moment(run)) is not None}


def _entry(row: Row, base: Row | None, dense: Row | None, measure: Measure, moment: Moment) -> Entry | None:
    found = _found(row, moment)
    if not found:
        return None
    values = {seed: measure.of(one) for seed, one in found.items()}

    def minus(other: Row | None) -> Difference | None:
        if other is None or other is row:
            return None
        return difference(values, {seed: measure.of(one) for seed, one in _found(other, moment).items()})

    compared = minus(base)
    if base is None or base is row:
        word = BASELINE if base is row else NO_BASELINE
    else:
        word = verdict(compared, measure.higher_is_better)
    finals = [run.final.sparsity for run in row.runs if run.seed in found]
    return Entry(
        label=row.label,
        extended=row.extended,
        baseline=None if base is None else base.label,
        values=values,
        qualities={seed: one.quality for seed, one in found.items()},
        sparsity=spread([one.sparsity for one in found.values()]).mean,
        final_sparsity=spread(finals).mean,
        spread=spread(list(values.values())),
        difference=compared,
        verdict=word,
        dense=None if dense is None else dense.label,
        from_dense=minus(dense),
    )


def _notes(rows: Sequence[Row], entries: Sequence[Entry], moment: Moment) -> list[str]:
    notes = []
    early = [f"{entry.label} ({entry.sparsity:.2%} of {entry.final_sparsity:.2%})" for entry in entries if entry.early]
    if early:
        notes.append(f"Final sparsity not reached yet: {'; '.join(early)}.")
    missing = [str(run.folder) for row in rows for run in row.runs if moment(run) is None]
    if missing:
        notes.append(f"Left out, because they were not evaluated by then: {', '.join(missing)}.")
    wild = [entry.label for entry in entries if not all(map(math.isfinite, entry.values.values()))]
    if wild:
        notes.append(f"Loss or quality is not a finite number: {'; '.join(wild)}.")
    if any(entry.extended for entry in entries):
        notes.append(f"{EXTENDED}: trained for more steps than the others (budget=extended).")
    return notes


def header(measure: Measure) -> tuple[str, ...]:
    """Column names of a full table."""
    compared = ("ratio of perplexities", "in percent") if measure.logarithmic else ("in percent",)
    own = (measure.name, measure.judged) if measure.logarithmic else (measure.name,)
    return ("row", "verdict", "sparsity", *own, "deviation", "seeds", "pairs", "difference", *compared)


def cells(entry: Entry, measure: Measure) -> tuple[str, ...]:
    """An entry under that header."""
    found, mean = entry.difference, entry.spread.mean
    own = (f"{exponential(mean):#.5g}", f"{mean:.5f}") if measure.logarithmic else (f"{mean:#.5g}",)
    deviation = "-" if entry.spread.deviation is None else f"{entry.spread.deviation:.3g}"
    sparsity = f"{entry.sparsity:.2%}" + (f" of {entry.final_sparsity:.2%}" if entry.early else "")
    if found is None:
        compared = ("-",) * (4 if measure.logarithmic else 3)
    elif measure.logarithmic:
        times, share = ratio(found), percent(found, logarithmic=True)
        compared = (str(found.pairs), written(found, "+.4f"), written(times, ".4f"), f"{share.mean:+.2f} %")
    else:
        share = percent(found, logarithmic=False)
        compared = (str(found.pairs), written(found, "+.4g"), written(share, "+.2f") + " %")
    return (entry.label, entry.verdict, sparsity, *own, deviation, str(entry.spread.count), *compared)


def written(found: Estimate, form: str, unit: str = "") -> str:
    """An estimate with its interval, if it has one: "-3.5 % [-4.5, -2.4]"."""

    def text(value: float) -> str:
        rounded = f"{value:{form}}"
        return rounded.replace("-", "+") if float(rounded) == 0 else rounded  # no "-0.0"

    if found.interval is None:
        return f"{text(found.mean)}{unit}"
    return f"{text(found.mean)}{unit} [{text(found.interval[0])}, {text(found.interval[1])}]"


def notes(table: Table, measure: Measure) -> list[str]:
    """The lines under a table."""
    compared = any(entry.difference is not None for entry in table.entries)
    log = "Perplexities are compared on a log scale: the difference is of held-out losses, the ratio its exp."
    first = [log] if compared and measure.logarithmic else []
    return [*first, *filter(None, [noise(table, measure)]), *table.notes]


def noise(table: Table, measure: Measure) -> str:
    """The residual standard deviation of a table and the differences that may be chance, in a sentence."""
    found = table.scatter
    if found is None:
        return ""
    unit = " %" if measure.logarithmic else " points" if measure.name == "accuracy" else ""
    one, two = (f"{100 * value if unit else value:.2g}{unit}" for value in (found.deviation, found.reach))
    rows = f"all rows except {'; '.join(found.left_out)}" if found.left_out else "all rows"
    return (
        f"Residual standard deviation of a run's {measure.name}, after row and seed means: {one} ({rows};"
        f" {found.freedom} degrees of freedom). Differences below {two} between means over {found.seeds} seeds may be"
        " chance."
    )


def explanations(tables: Sequence[Table], measure: Measure) -> list[str]:
    """How the numbers of all tables were computed."""
    entries = [entry for table in tables for entry in table.entries]
    bases = list(dict.fromkeys(entry.baseline for entry in entries if entry.baseline))
    base = bases[0] if len(bases) == 1 else "the baseline with otherwise equal settings"
    mean = "exp of the mean held-out loss" if measure.logarithmic else "mean over seeds"
    whole = "perplexity" if measure.logarithmic else "mean over the same seeds"
    lines = [
        f"{measure.name}: {mean}. deviation: standard deviation of the {measure.judged} over seeds (n-1).",
        f"difference: from {base}, paired by seed, with its {PERCENT} confidence interval (Student's t)."
        f" in percent: of the baseline's {whole}.",
    ]
    if any(entry.verdict == UNKNOWN for entry in entries):
        lines.append(
            f"{UNKNOWN}: the interval contains zero, or there is none, because fewer than two seeds are shared or the"
            " difference is the same at each of them."
        )
    intervals = [entry for entry in entries if entry.difference is not None and entry.difference.interval is not None]
    if len(intervals) > 1:
        lines.append(f"Intervals are not corrected for multiple comparisons: of many {PERCENT} intervals, some miss.")
    return lines


def rows_of(table: Table, measure: Measure) -> Sequence[tuple[str, ...]]:
    """All rows of a full table."""
    return [cells(entry, measure) for entry in table.entries]


def best_first(entries: Sequence[Entry], measure: Measure) -> list[Entry]:
    """Entries by sparsity, and by quality within one sparsity; those that are not finite last."""

    def place(entry: Entry) -> tuple[float, bool, float]:
        mean = entry.spread.mean
        return round(entry.final_sparsity, 3), not math.isfinite(mean), -mean if measure.higher_is_better else mean

    return sorted(entries, key=place)


def mean_quality(entry: Entry, measure: Measure) -> float:
    """The mean over seeds as users know it: a perplexity is the exp of the mean held-out loss."""
    return exponential(entry.spread.mean) if measure.logarithmic else entry.spread.mean


def without_common(labels: Sequence[str]) -> list[str]:
    """Labels of rows without the settings they all share."""
    parts = [label.split(", ") for label in labels]
    common = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    return [", ".join(word for word in words if word not in common) for words in parts]


def short_names(labels: Sequence[str]) -> dict[str, str]:
    """Short names of rows beside their sparsity: "variance (end=0.6)" for "score=variance, sparsity=0.8, end=0.6"."""
    named = []
    marks = [f" {EXTENDED}" if label.endswith(EXTENDED) else "" for label in labels]
    for label in labels:
        words = label.removesuffix(EXTENDED).rstrip().split(", ")
        unused = PRUNING if f"{SCORE}=none" in words else ("sparsity",)
        named.append(", ".join(word for word in words if word.partition("=")[0] not in unused))
    found = {}
    for label, full, left, mark in zip(labels, named, without_common(named), marks, strict=True):
        first, _, rest = (left or full or label).partition(", ")
        first = first.replace(f"{SCORE}=none", "dense").replace(f"{SCORE}=", "")
        found[label] = (f"{first} ({rest})" if rest else first) + ("" if first.endswith(EXTENDED) else mark)
    return found


@dataclass(frozen=True)
class Comparison:
    """A finished comparison, as a page, a terminal or a file shows it."""

    axes: tuple[str, ...]
    shared: dict[str, str]  # settings that are the same in all runs
    measure: Measure
    rows: tuple[Row, ...]
    tables: tuple[Table, ...]
    baseline: str | None = None  # as --baseline named it

    def __str__(self) -> str:
        parts = [self.alike]
        for table in self.tables:
            parts.append(table.title)
            if table.entries:
                parts.append(text_table(header(self.measure), rows_of(table, self.measure)))
            parts.append("\n".join(notes(table, self.measure)))
        if (cost := cost_table(self.rows, self.measure)) is not None:
            parts += ["What each row cost, mean over seeds", text_table(*cost)]
            parts.append("\n".join(cost_notes(self.rows, self.measure)))
        if (changes := compile_table(self.rows, self.measure)) is not None:
            parts += ["Compiled against eager, mean over seeds", text_table(*changes)]
        findings = "\n".join(f"{headline}. {detail}".strip() for headline, detail in self.findings)
        return "\n\n".join(part for part in (*parts, "\n".join(self.explained), findings) if part)

    @property
    def final(self) -> tuple[Entry, ...]:
        """The rows at the end of training."""
        return next(table.entries for table in self.tables if table.name == "final")

    @property
    def alike(self) -> str:
        """The settings all rows share, in a line, without those that are not set."""
        found = ", ".join(f"{name}={value}" for name, value in self.shared.items() if value != "none")
        return f"The same in every row: {found}."

    @property
    def explained(self) -> list[str]:
        """How the numbers of all tables were computed."""
        return explanations(self.tables, self.measure)

    @property
    def findings(self) -> list[tuple[str, str]]:
        """The result at each sparsity, as a headline and what belongs under it. Rows that were trained for more steps
        are not the best of those that were not."""
        names = short_names([entry.label for entry in self.final])
        levels: dict[float, list[Entry]] = {}
        for entry in best_first(self.final, self.measure):
            levels.setdefault(round(entry.final_sparsity, 3), []).append(entry)
        if any(entry.from_dense for entry in self.final):
            levels.pop(0.0, None)  # the reference needs no sentence of its own
        found = []
        for level, several in levels.items():
            entries = [entry for entry in several if not entry.extended] or several
            elsewhere = {  # a baseline of another sparsity is named with it
                one.label: f"{names[one.label]} at {100 * one.final_sparsity:.3g} %"
                for one in self.final
                if one.final_sparsity > 0 and round(one.final_sparsity, 3) != level
            }
            found.append(finding(level, entries, names | elsewhere, self.measure))
        return found

    def to_json(self, about: Mapping[str, Any] | None = None) -> str:
        """All numbers of every seed, one run per line; `secateur compare` reads the file again.

        Numbers that are not finite are null. `about` says how the file was made.
        """
        runs = [{"row": row.label, **plain_run(run)} for row in self.rows for run in row.runs]
        plain = {
            **(about or {}),
            "axes": self.axes,
            "baseline": self.baseline,
            "shared": self.shared,
            "measure": {**asdict(self.measure), "judged": self.measure.judged},
            "findings": self.findings,
            "explained": self.explained,
            "costs": plain_costs(self.rows, self.measure),
            "tables": [
                {
                    **asdict(table),
                    "entries": [_plain_entry(entry, self.measure) for entry in table.entries],
                    "notes": notes(table, self.measure),
                }
                for table in self.tables
            ],
        }
        lines = ",\n  ".join(json.dumps(finite(run), allow_nan=False) for run in runs)
        head = json.dumps(finite(plain), indent=1, allow_nan=False).removesuffix("\n}")
        return f'{head},\n "runs": [\n  {lines}\n ]\n}}\n'


def finding(level: float, entries: Sequence[Entry], names: Mapping[str, str], measure: Measure) -> tuple[str, str]:
    """The result at one sparsity: the best row against its baseline, then seeds and the distance from dense."""
    at = f"{100 * level:.3g} % sparsity" if level else "Dense"
    usable = [entry for entry in entries if math.isfinite(entry.spread.mean)]
    if not usable:
        return f"{at}: no row has a finite {measure.name}", ""
    best = usable[0]
    detail = []
    if best.difference is not None and best.difference.interval is not None:
        among = f", best of {len(entries)} rows" if len(entries) > 2 else ""
        detail.append(f"{PERCENT} interval over {best.difference.pairs} seeds{among}.")
    if best.from_dense is not None and best.dense != best.baseline:
        base = [entry for entry in usable if entry.label == best.baseline and entry is not best]
        away = [
            f"{names[one.label]} {written(percent(one.from_dense, logarithmic=measure.logarithmic), '+.1f', ' %')}"
            for one in (best, *base)
            if one.from_dense is not None
        ]
        detail.append(f"From dense: {', '.join(away)}.")
    return f"{at}: {_against_baseline(best, names, measure, len(entries))}", " ".join(detail)


def _against_baseline(best: Entry, names: Mapping[str, str], measure: Measure, rows: int) -> str:
    name, found = names[best.label], best.difference
    if found is None or best.baseline is None:
        if best.verdict == BASELINE and rows > 1:
            return f"no row is better than {name}"
        return f"{name} has {measure.name} {mean_quality(best, measure):.4g}"
    base, share = names[best.baseline], percent(found, logarithmic=measure.logarithmic)
    if not math.isfinite(share.mean):
        return f"{name} is best; {base} has no number to compare with"
    if share.interval is not None and best.verdict == UNKNOWN:
        shown = written(share, "+.1f", " %").replace(" %", f" % {measure.name}")
        return f"no measurable difference from {base}; the best is {name}, {shown}"
    size = f"{abs(share.mean):.1f} % {'lower' if share.mean < 0 else 'higher'} {measure.name} than {base}"
    if found.pairs == 1:
        return f"{name} has {size}, with 1 seed: too few to tell"
    if share.interval is None and found.mean == 0:
        return f"{name} equals {base} at each of {found.pairs} seeds"
    if share.interval is None:
        return f"{name} has {size} at each of {found.pairs} seeds: without a spread there is no interval"
    around = written(share, "+.1f").partition(" ")[2]
    return f"{name} {'has' if best.verdict == BETTER else 'is best, with'} {size} {around}"


def compare(runs: Sequence[FinishedRun], by: Sequence[str] | None = None, baseline: str | None = None) -> Comparison:
    """Compare runs that differ in the settings `by` and the seed, each row with the `baseline` row (the first).

    Without `by` they may differ in one setting. Runs that differ in anything else are refused.
    """
    if not runs:
        raise ComparisonError("No run is finished, so there is nothing to compare.")
    settings = [run.settings for run in runs]
    axes = tuple(own_axes(settings) if by is None else by)
    measure = measure_of(runs)
    rows = group(runs, axes)
    different = differing(settings)
    shared = {name: value for name, value in texts(settings[0]).items() if name not in different}
    made = tables(rows, baselines(rows, baseline), measure)
    return Comparison(axes, shared, measure, tuple(rows), tuple(made), baseline)


def _plain_entry(entry: Entry, measure: Measure) -> dict[str, Any]:
    found = entry.difference
    if found is None:
        return asdict(entry)
    plain = {**asdict(entry), "percent": asdict(percent(found, logarithmic=measure.logarithmic))}
    return {**plain, "ratio": asdict(ratio(found))} if measure.logarithmic else plain
