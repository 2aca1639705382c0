"""The page of `secateur compare`: the result as headline, what each row costs as figure and table, then all curves."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from secateur.lab.compare import (
    BASELINE,
    Comparison,
    Entry,
    Table,
    at_step,
    best_first,
    header,
    mean_quality,
    notes,
    rows_of,
    short_names,
    written,
)
from secateur.lab.costs import (
    PEAK,
    RATE,
    SECONDS,
    columns,
    compile_chart,
    compile_pairs,
    compile_table,
    cost_notes,
    cost_table,
    pair_name,
    quality_by_memory,
    shown,
)
from secateur.lab.figures import LEGEND_LETTERS, block, figure, layer_bars, legend_columns
from secateur.lab.runs import Evaluation, Measure, Row, number
from secateur.lab.statistics import Difference, Estimate, exponential, percent
from secateur.report import html_page, html_table

# The first six are safe for colour-blind readers (Okabe and Ito).
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7c3aed", "#84cc16", "#b91c1c", "#0f766e"]
DASHES = ("-", "--", ":", "-.")
INK, GREY, ACCENT = "#111827", "#9ca3af", "#d55e00"
SPARSITY = "sparsity"
WIDTH = 4.6  # inches: text of 10 points stays legible on a phone
FEW = 4  # rows with bars for every layer
MOST_LINES = 6  # in a figure of quality against sparsity
MOST_CURVES = 8
LONG_NAME, LONG_LABEL = 14, 40  # letters of a row in a column name, and of all rows in a label of a legend


def render(found: Comparison) -> str:
    """The whole page."""
    final, findings = found.tables[0], found.findings
    headline, detail = findings[-1]
    others = "".join(f"<li>{html.escape(first)}. {html.escape(rest)}</li>" for first, rest in findings[:-1])
    runs = sum(len(row.runs) for row in found.rows)
    figures = _figures(found)
    body = [
        f"<p>{html.escape(detail)}</p>",
        f"<ul>{others}</ul>" if others else "",
        f'<div class="figures">{"".join(figures[:2])}</div>',
        f"<h2>{html.escape(final.title)}</h2>",
        html_table(*summary(found)),
        "".join(f"<p>{html.escape(note)}</p>" for note in notes(final, found.measure)),
        f'<div class="figures">{"".join([*figures[2:], *_cost_figures(found)])}</div>',
        _costs(found),
        "<details><summary>Full tables: at the end, at equal steps, at equal seconds</summary>",
        *(_table(one, found.measure) for one in found.tables),
        f"<p>{'<br>'.join(map(html.escape, found.explained))}</p></details>",
        f"<p>{html.escape(found.alike)}</p>",
    ]
    return html_page(_unbroken(headline), _unbroken("".join(body)), f"{len(found.rows)} rows, {runs} runs.")


def _unbroken(text: str) -> str:
    """Intervals and percentages stay on one line."""
    text = re.sub(r"(\[[^\s\[\],]+), (?=[^\s\[\],]+\])", "\\1,\N{NBSP}", text)
    return re.sub(r"(?<=\d) (?=%)", "\N{NBSP}", text)


def summary(found: Comparison) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of the short table: quality, difference from the baseline, distance from dense."""
    measure, names = found.measure, short_names([entry.label for entry in found.final])
    bases = {entry.baseline for entry in found.final if entry.baseline}
    base = names[bases.pop()] if len(bases) == 1 else ""
    base = base if 0 < len(base) <= LONG_NAME else "baseline"
    dense = any(entry.from_dense and entry.dense != entry.baseline for entry in found.final)
    ordered, rows = best_first(found.final, measure), []
    whole = {row.label: row for row in found.rows}
    cost = {key: name for key, name in columns(found.rows, measure).items() if key in (PEAK, SECONDS, RATE)}
    labels = _with_sparsity([(names[entry.label], entry.final_sparsity) for entry in ordered])
    for entry, label in zip(ordered, labels, strict=True):
        mean = mean_quality(entry, measure)
        compared = entry.verdict if entry.verdict == BASELINE else "-"
        if entry.difference is not None:
            compared = f"{_share(entry.difference, measure)} {entry.verdict}"
        away = _share(entry.from_dense, measure) if entry.from_dense else "-"
        value = f"{mean:.2%}" if measure.name == "accuracy" else f"{mean:.4g}"
        spent = (shown(whole[entry.label], key) for key in cost)
        rows.append((label, compared, *((away,) if dense else ()), value, f"{100 * entry.sparsity:.3g} %", *spent))
    head = ("row", f"against {base}", *(("from dense",) if dense else ()), measure.name, "sparsity")
    return (*head, *cost.values()), rows


def _share(found: Difference, measure: Measure) -> str:
    return written(percent(found, logarithmic=measure.logarithmic), "+.1f", " %")


def _pair_names(rows: Sequence[Row]) -> dict[str, str]:
    """What to call each pair of an eager and a compiled row."""
    pairs = [(pair_name(eager), reached(eager)) for eager, _ in compile_pairs(rows)]
    short = short_names([name for name, _ in pairs])
    with_sparsity = _with_sparsity([(short[name], sparsity) for name, sparsity in pairs])
    return dict(zip((name for name, _ in pairs), with_sparsity, strict=True))


def _costs(found: Comparison) -> str:
    """Tables of what the rows cost."""
    rows, measure = found.rows, found.measure
    cost = cost_table(rows, measure)
    if cost is None:
        return ""
    parts = []
    if (changes := compile_table(rows, measure, _pair_names(rows))) is not None:
        parts += ["<h2>Compiled against eager</h2>", html_table(*changes)]
    under = "".join(f"<p>{html.escape(note)}</p>" for note in cost_notes(rows, measure))
    parts += ["<details><summary>What each row cost, mean over seeds</summary>", html_table(*cost), under, "</details>"]
    return "".join(parts)


def _cost_figures(found: Comparison) -> list[str]:
    """Quality against memory, and compiled against eager, where the runs recorded them."""
    rows, measure = found.rows, found.measure
    names, colours = short_names([row.label for row in rows]), {k: v[0] for k, v in styles(found).items()}
    labels = dict(zip((row.label for row in rows), _labels(rows, names), strict=True))
    figures = []
    if scatter := quality_by_memory(rows, measure, labels, colours, WIDTH):
        better = "down" if measure.logarithmic else "up"
        text = f"A point for every row, mean over seeds. Better is {better} and to the left."
        figures.append(block(f"{measure.name.capitalize()} against memory", text, scatter))
    if chart := compile_chart(rows, measure, _pair_names(rows), WIDTH):
        text = "Change of each figure with torch.compile, mean over seeds, all else equal."
        figures.append(block("Compiled against eager", text, chart))
    return figures


def _table(found: Table, measure: Measure) -> str:
    body = html_table(header(measure), rows_of(found, measure)) if found.entries else ""
    under = "".join(f"<p>{html.escape(note)}</p>" for note in notes(found, measure))
    return f"<section><h2>{html.escape(found.title)}</h2>{body}{under}</section>"


def _figures(found: Comparison) -> list[str]:
    rows, measure = found.rows, found.measure
    names = short_names([row.label for row in rows])
    judged, drawn = measure.judged.capitalize(), styles(found)
    reference = reference_of(found)
    lines = lines_of(rows)
    levels = {round(reached(row), 3) for row in rows} - {0.0}
    figures = []
    if reference == "dense" and len(levels) > 1 and len(lines) - 1 <= MOST_LINES:
        text = f"{measure.name.capitalize()} at the end of training. Dots: seeds. Line: mean."
        figures.append(block("Distance from dense by sparsity", text, cost_by_sparsity(found)))
    else:
        text = "At the end of training. Dots: seeds. Mark and bar: mean and 95 % interval."
        figures.append(block(f"Difference from {reference}", text, differences(found)))
    band = "Line: mean over seeds. Band: lowest to highest seed."
    shown = few_rows(found)
    if len(shown) < len(rows):
        band = f"{len(shown)} of {len(rows)} rows: the sparsest and best, baseline and dense. {band}"
    if distance := _distance(found, shown, names, drawn):
        figures.append(block(f"Difference from {reference} during training", band, distance))
    else:
        figures.append(block(f"{judged} by step", band, _curves(shown, measure, "step", names, drawn)))
    figures.append(block(f"{judged} by seconds", band, _curves(shown, measure, "seconds", names, drawn)))
    text = "Mean over seeds, of the prunable weights."
    figures.append(block("Sparsity during training", text, _sparsity(rows, names, drawn)))
    if layers := _layers(rows, names, drawn):
        figures.append(
            block("Sparsity by layer", f"Rows at {100 * max(levels, default=0):.3g} %, mean over seeds.", layers)
        )
    return figures


def reference_of(found: Comparison) -> str:
    """What the first figure measures from: "dense" if there is a dense row for every pruned one, else the baseline."""
    pruned = [entry for entry in found.final if entry.final_sparsity > 0]
    if pruned and all(entry.from_dense is not None for entry in pruned):
        return "dense"
    bases = {entry.baseline for entry in found.final if entry.baseline}
    names = short_names([entry.label for entry in found.final])
    return names[bases.pop()] if len(bases) == 1 else found.baseline or "the baseline"


def cost_by_sparsity(found: Comparison, width: float = WIDTH, height: float = 3.2) -> str:
    """How far each line of rows is from dense at each sparsity, in percent, with every seed: an SVG."""
    measure, whole = found.measure, {entry.label: entry for entry in found.final}
    entries = {label: entry for label, entry in whole.items() if entry.from_dense}
    lines = {label: [row for row in rows if row.label in entries] for label, rows in lines_of(found.rows).items()}
    lines = {label: rows for label, rows in lines.items() if rows}
    drawn, names = styles(found), short_names(list(whole))

    def draw(axes: Any) -> None:
        ends = []
        for rows in lines.values():
            colour = drawn[rows[-1].label][0]
            places = [100 * reached(row) for row in rows]
            seeds = [_seeds(entries[row.label], whole[entries[row.label].dense or ""], measure) for row in rows]
            means = [_in_percent(entries[row.label].from_dense, measure).mean for row in rows]
            for place, values in zip(places, seeds, strict=True):
                axes.plot([place] * len(values), values, "o", color=colour, markersize=3.5, alpha=0.45)
            axes.plot(places, means, color=colour, linewidth=2)
            ends.append((means[-1], places[-1], f" {names[rows[-1].label]} {means[-1]:+.1f} %", colour))
        axes.axhline(0, color=INK, linewidth=1)
        _label_ends(axes, ends)
        levels = sorted({round(reached(row), 3) for rows in lines.values() for row in rows})
        axes.set_xticks([100 * level for level in levels], [f"{100 * level:.3g} %" for level in levels])
        axes.set(xlabel="sparsity of the prunable weights", ylabel=f"{measure.name} from dense, %")

    return figure(draw, width=width, height=height)


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names at the right ends of lines, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    gap, last = (high - low) / 14, -math.inf
    for value, place, text, colour in sorted(ends, key=lambda end: end[0]):
        if math.isfinite(value):
            last = max(value, last + gap)
            axes.annotate(text, (place, last), color=colour, va="center", annotation_clip=False, fontsize="small")
    left, right = axes.get_xlim()
    letters = max((len(text) for *_, text, _ in ends), default=0)
    axes.set_xlim(left, right + (right - left) * min(1.2, 0.024 * letters))


def differences(found: Comparison, width: float = WIDTH, from_baseline: bool = False) -> str:
    """Every row's difference from dense, or from the baseline, in percent: seeds, mean and interval, as an SVG."""
    measure, whole = found.measure, {entry.label: entry for entry in found.final}
    reference = (found.baseline or found.rows[0].label) if from_baseline else reference_of(found)
    dense = reference == "dense" and not from_baseline
    shown = []
    for entry in best_first(found.final, measure)[::-1]:
        share = _in_percent(entry.from_dense if dense else entry.difference, measure)
        base = entry.dense if dense else entry.baseline
        if math.isfinite(share.mean) and base is not None:
            shown.append((entry, share, _seeds(entry, whole[base], measure)))
    names = short_names([entry.label for entry, _, _ in shown])
    labels = _with_sparsity([(names[entry.label], entry.final_sparsity) for entry, _, _ in shown])
    labels = [label.replace(" (", "\n(") for label in labels]
    each = 0.4 if any("\n" in label for label in labels) else 0.28

    def draw(axes: Any) -> None:
        for place, (_, share, seeds) in enumerate(shown):
            low, high = share.interval or (share.mean, share.mean)
            axes.plot([low, high], [place, place], color=GREY, linewidth=5, alpha=0.6, solid_capstyle="butt")
            axes.plot(seeds, [place] * len(seeds), "o", color=COLOURS[0], markersize=4, alpha=0.7)
            axes.plot([share.mean], [place], "|", color=INK, markersize=13, markeredgewidth=2)
        axes.axvline(0, color=ACCENT, linewidth=1)
        axes.set_yticks(range(len(shown)), labels, fontsize="small")
        axes.set_ylim(-0.6, max(len(shown), 1) - 0.4)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{measure.name} from {reference}, %", fontsize="small")

    return figure(draw, width=width, height=1.1 + each * max(len(shown), 1))


def _with_sparsity(rows: Sequence[tuple[str, float]]) -> list[str]:
    """Names of rows, with the sparsity where pruned rows differ in it."""
    several = len({round(sparsity, 3) for _, sparsity in rows if sparsity}) > 1
    return [f"{name}, {100 * sparsity:.3g} %" if several and sparsity else name for name, sparsity in rows]


def _in_percent(found: Difference | None, measure: Measure) -> Estimate:
    return percent(found, logarithmic=measure.logarithmic) if found else Estimate(math.nan, None)


def _seeds(entry: Entry, base: Entry, measure: Measure) -> list[float]:
    """The difference of each seed from the same seed of the base, in percent."""
    both = [(value, base.values[seed]) for seed, value in entry.values.items() if seed in base.values]
    return _shares(both, measure)


def _shares(pairs: Sequence[tuple[float, float]], measure: Measure) -> list[float]:
    """Differences of pairs in percent of the second."""
    if measure.logarithmic:
        return [100 * (exponential(value - other) - 1) for value, other in pairs]
    return [100 * (value - other) / abs(other) for value, other in pairs if other]


Style = tuple[str, str]  # colour and dashes


def styles(found: Comparison) -> dict[str, Style]:
    """How each row is drawn in every figure: a colour for each name, dashes for each sparsity, grey for dense."""
    names = short_names([row.label for row in found.rows])
    pruned = [row for row in found.rows if reached(row) > 0]
    shown = [row for row in few_rows(found) if row in pruned]
    places = list(dict.fromkeys(names[row.label] for row in (*shown, *pruned)))  # no colour twice in one figure
    levels = sorted({round(reached(row), 3) for row in pruned}, reverse=True)
    dense = [row for row in found.rows if reached(row) == 0]
    drawn = {row.label: (INK, DASHES[place % len(DASHES)]) for place, row in enumerate(dense)}
    for row in pruned:
        place, level = places.index(names[row.label]), levels.index(round(reached(row), 3))
        drawn[row.label] = COLOURS[place % len(COLOURS)], DASHES[level % len(DASHES)]
    if not pruned:  # all rows are dense and differ in something else
        drawn = {row.label: (COLOURS[place % len(COLOURS)], "-") for place, row in enumerate(found.rows)}
    return drawn


def moments(row: Row) -> list[list[Evaluation]]:
    """The evaluations of all seeds at each step that all of them have."""
    steps = set.intersection(*({found.step for found in run.evaluations} for run in row.runs))
    together = ([at_step(run, step) for run in row.runs] for step in sorted(steps))
    return [[found for found in several if found is not None] for several in together]


def _labels(rows: Sequence[Row], names: dict[str, str]) -> list[str]:
    return _with_sparsity([(names[row.label], reached(row)) for row in rows])


def few_rows(found: Comparison) -> list[Row]:
    """Rows whose curves are distinguishable in one figure: the best of the sparsest, their baselines and dense."""
    if len(found.rows) <= MOST_CURVES:
        return list(found.rows)
    ordered = best_first(found.final, found.measure)
    level = round(ordered[-1].final_sparsity, 3)
    sparsest = [entry for entry in ordered if round(entry.final_sparsity, 3) == level]
    chosen = {label for entry in sparsest for label in (entry.baseline, entry.dense) if label}
    for entry in sparsest:
        if len(chosen) < MOST_CURVES:
            chosen.add(entry.label)
    return [row for row in found.rows if row.label in chosen]


def _distance(found: Comparison, rows: Sequence[Row], names: dict[str, str], drawn: dict[str, Style]) -> str:
    """How far each row is from its reference at every step that both were evaluated at; empty if there is none."""
    measure, entries = found.measure, {entry.label: entry for entry in found.final}
    dense, whole = reference_of(found) == "dense", {row.label: row for row in found.rows}
    curves = []
    for row in rows:
        base = entries[row.label].dense if dense else entries[row.label].baseline
        if base is not None and base != row.label:
            points = _differences_by_step(row, whole[base], measure)
            if any(len(values) for _, values in points):
                curves.append((row, points))
    if not curves:
        return ""
    labels = _labels([row for row, _ in curves], names)

    def draw(axes: Any) -> None:
        for (row, points), label in zip(curves, labels, strict=True):
            colour, dashes = drawn[row.label]
            steps = [step for step, _ in points]
            means = [fmean(v) for _, v in points]
            axes.plot(steps, means, dashes, marker=_mark(steps), color=colour, label=label, linewidth=1.6)
            lows, highs = [min(v) for _, v in points], [max(v) for _, v in points]
            axes.fill_between(steps, lows, highs, color=colour, alpha=0.15)
        axes.axhline(0, color=INK, linewidth=1)
        axes.set(xlabel="step", ylabel=f"{measure.name}, % from {reference_of(found)}")

    return _with_legend(draw, labels)


def _mark(places: Sequence[float]) -> str:
    """A dot for a line of one point, which would not be seen: a run that was evaluated once."""
    return "o" if len(places) == 1 else ""


def _differences_by_step(row: Row, base: Row, measure: Measure) -> list[tuple[int, list[float]]]:
    """The difference of every seed from the same seed of the base, in percent, at the steps all of them have."""
    others = {run.seed: run for run in base.runs}
    pairs = [(run, others[run.seed]) for run in row.runs if run.seed in others]
    if not pairs:
        return []
    steps = set.intersection(*({found.step for found in run.evaluations} for pair in pairs for run in pair))
    found = []
    for step in sorted(steps):
        values = [(at_step(ours, step), at_step(theirs, step)) for ours, theirs in pairs]
        both = [(measure.of(one), measure.of(other)) for one, other in values if one and other]
        found.append((step, _shares(both, measure)))
    return [(step, values) for step, values in found if values and all(map(math.isfinite, values))]


def _curves(rows: Sequence[Row], measure: Measure, along: str, names: dict[str, str], drawn: dict[str, Style]) -> str:
    labels = _labels(rows, names)

    def draw(axes: Any) -> None:
        for row, label in zip(rows, labels, strict=True):
            colour, dashes = drawn[row.label]
            seeds = moments(row)
            places = [fmean(getattr(one, along) for one in several) for several in seeds]
            values = [[measure.of(one) for one in several] for several in seeds]
            means = [fmean(v) for v in values]
            axes.plot(places, means, dashes, marker=_mark(places), color=colour, label=label, linewidth=1.4)
            axes.fill_between(places, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15)
        axes.set(xlabel=along, ylabel=measure.judged)

    return _with_legend(draw, labels)


def _sparsity(rows: Sequence[Row], names: dict[str, str], drawn: dict[str, Style]) -> str:
    """Rows with the same path share a line, drawn as the first of them."""
    paths: dict[tuple[tuple[int, float], ...], list[str]] = {}
    first: dict[str, Style] = {}
    for row, label in zip(rows, _labels(rows, names), strict=True):
        first[label] = drawn[row.label]
        runs = [dict(run.sparsity) for run in row.runs]
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        paths.setdefault(tuple((step, round(fmean(run[step] for run in runs), 4)) for step in steps), []).append(label)
    labels = [_joined(several) for several in paths.values()]

    def draw(axes: Any) -> None:
        for (path, several), label in zip(paths.items(), labels, strict=True):
            colour, dashes = first[several[0]]
            axes.plot([step for step, _ in path], [gone for _, gone in path], dashes, color=colour, label=label)
        axes.set(xlabel="step", ylabel="sparsity", ylim=(0, 1))

    return _with_legend(draw, labels)


def _joined(names: Sequence[str]) -> str:
    """Names of rows in one label; a long list is counted instead."""
    text = ", ".join(names)
    return text if len(text) <= LONG_LABEL else f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else text


def _with_legend(draw: Callable[[Any], None], labels: Sequence[str]) -> str:
    """A figure with its legend below, where it covers no line."""
    columns = legend_columns(labels, LEGEND_LETTERS)

    def drawn(axes: Any) -> None:
        draw(axes)
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=columns, fontsize="small")

    return figure(drawn, width=WIDTH, height=3.0 + 0.2 * math.ceil(len(labels) / columns))


def _layers(rows: Sequence[Row], names: dict[str, str], drawn: dict[str, Style]) -> str:
    """Bars for a few of the sparsest rows: with more of them, the bars of a layer are too thin to read."""
    level = max(round(reached(row), 3) for row in rows)
    pruned = [row for row in rows if layer_means(row) and round(reached(row), 3) == level][:FEW]
    if not pruned:
        return ""
    labels = _labels(pruned, names)
    layers = list(dict.fromkeys(name for row in pruned for name in layer_means(row)))
    bars = [
        (label, drawn[row.label][0], [layer_means(row).get(name, 0.0) for name in layers])
        for row, label in zip(pruned, labels, strict=True)
    ]
    height = min(60.0, 1.4 + 0.2 * len(pruned) + len(layers) * max(0.25, 0.09 * len(pruned)))
    return layer_bars([name.removesuffix(".weight") for name in layers], bars, height)


def layer_means(row: Row) -> dict[str, float]:
    """Sparsity of every layer, averaged over the seeds that report it."""
    values: dict[str, list[float]] = {}
    for run in row.runs:
        for layer in run.summary.get("layers", []):
            values.setdefault(layer["name"], []).append(number(layer["sparsity"]))
    return {name: fmean(several) for name, several in values.items()}


def lines_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ only in sparsity, ordered by it: one line of a figure each."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        others = {axis: value for axis, value in row.settings.items() if axis != SPARSITY}
        lines.setdefault(replace(row, settings=others).label, []).append(row)
    return {label: sorted(members, key=reached) for label, members in lines.items()}


def reached(row: Row) -> float:
    """The final sparsity of a row."""
    return fmean(run.final.sparsity for run in row.runs)
