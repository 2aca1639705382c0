"""Reports of `secateur finetune`: Markdown, JSON, and a page with curves and texts from before and after."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from secateur.integrations.finetune import Plan, Result
from secateur.report import heat_map, html_page, html_table, markdown_table

Points = Sequence[tuple[float, float]]

BLUE = "#2563eb"
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 520, 250, 62, 16, 34, 14  # of a chart, and its margins
TICKS = 4  # intervals between the numbers of an axis, about


def perplexities(history: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Held-out perplexity by step."""
    return [(step, math.exp(min(loss, 700.0))) for step, loss in curve(history, "eval_loss")]


def curve(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """What Trainer logged under a name, by step."""
    return [(float(entry["step"]), float(entry[name])) for entry in history if name in entry]


def figures(plan: Plan, result: Result) -> list[tuple[str, str]]:
    """The run in a table: what it reached, and with which settings."""
    tokens = plan.steps * plan.batch * plan.accumulate * plan.context
    loss = f"distillation (alpha {plan.alpha:g})" if plan.distill else "cross entropy"
    kind = plan.pruning.get("regrow")
    regrowth = f", regrowth by {kind}" if kind == "gradient" else ", random regrowth" if kind else ""
    rows = [
        (f"held-out {result.measure}, {result.base}", f"{result.before:,.6g}"),
        (f"held-out {result.measure}, fine-tuned", f"{result.after:,.6g}"),
        ("ratio", f"{result.after / result.before:.4f}" if result.before else "-"),
        ("sparsity, of the prunable weights", f"{result.report.sparsity:.4%}"),
        ("of the whole model", f"{result.report.model_sparsity:.4%}"),
        ("how", f"{plan.how}{', LoRA' if plan.lora else ''}{regrowth}, {loss}"),
        ("trained", f"{plan.steps:,} steps of {plan.batch * plan.accumulate} x {plan.context} tokens ({tokens:,} in"
                    " each process)"),
        ("learning rate", f"{plan.lr:g}"),
        ("evaluated on", f"{result.evaluated} windows of {plan.context} tokens that never trained"),
        ("seed", str(plan.seed)),
    ]  # fmt: skip
    return [*rows, *((f"seconds, {stage.name}", f"{stage.seconds:.1f}") for stage in result.stages)]


def to_markdown(title: str, lines: Sequence[str], plan: Plan, result: Result, command: str) -> str:
    """The verdict, the table of figures, the texts and every tensor."""
    parts = [f"# {title}", *lines, *result.notes, f"```bash\n{command}\n```"]
    parts.append(markdown_table(("", "value"), figures(plan, result)))
    for prompt, before, after in result.texts:
        parts += [f"Prompt: {_quoted(prompt)}", f"Before: {_quoted(before)}", f"After: {_quoted(after)}"]
    return "\n\n".join((*parts, result.report.to_markdown())) + "\n"


def to_json(lines: Sequence[str], plan: Plan, result: Result, command: str) -> str:
    """Everything: plan, figures, Trainer's log, texts and every tensor."""
    found = {
        "verdict": lines[0],
        "notes": [*lines[1:], *result.notes],
        "command": command,
        "plan": asdict(plan),
        "measure": result.measure,
        "before": _finite(result.before),
        "after": _finite(result.after),
        "stages": [asdict(stage) for stage in result.stages],
        "texts": [dict(zip(("prompt", "before", "after"), text, strict=True)) for text in result.texts],
        "history": [{name: _finite(value) for name, value in entry.items()} for entry in result.history],
    }
    return json.dumps({**json.loads(result.report.to_json()), **found}, indent=2) + "\n"


def to_html(title: str, lines: Sequence[str], plan: Plan, result: Result, command: str) -> str:
    """The page: figures, curves, texts side by side, and sparsity by layer. It fetches nothing."""
    held_out = perplexities(result.history)
    ratios = [(0.0, 1.0), *((step, value / result.before) for step, value in held_out)] if result.before else []
    dense = result.base == "dense"
    base = "the dense model's" if dense else "that before fine-tuning"
    charts = [
        _figure("Distance from dense" if dense else "Progress",
                f"Held-out perplexity over {base}, by step; 1 is equal.", ratios),
        _figure("Sparsity", "Of the prunable weights, by step.", curve(result.history, "sparsity")),
        _figure("Loss", "Of training batches, by step.", curve(result.history, "loss")),
    ]  # fmt: skip
    texts = "".join(
        f'<figure class="full"><h2>Prompt</h2><pre>{html.escape(prompt)}</pre><div class="figures">'
        + "".join(
            f"<div><h2>{name}</h2><pre>{html.escape(text)}</pre></div>"
            for name, text in (("Before", before), ("After", after))
        )
        + "</div></figure>"
        for prompt, before, after in result.texts
    )
    layers = heat_map([(row.name, row.sparsity) for row in result.report.tensors])
    body = [
        f"<p>{html.escape(title)}, {plan.how}{' with LoRA' if plan.lora else ''}.</p>",
        *(f'<p class="warning">{html.escape(line)}</p>' for line in lines[1:]),
        f"<pre>{html.escape(command)}</pre>",
        f'<div class="figures">{"".join(charts)}</div>',
        f"<h2>Text before and after</h2><p>The likeliest continuation of held-out text.</p>"
        f'<div class="figures">{texts}</div>'
        if texts
        else "",
        f"<h2>Sparsity by layer</h2>{layers}",
        f"<h2>Settings and figures</h2>{html_table(('', 'value'), figures(plan, result))}",
        *(f"<p>{html.escape(note)}</p>" for note in result.notes),
    ]
    return html_page(lines[0], "".join(body), f"Seed {plan.seed}: one run, not a comparison.")


def chart(points: Points) -> str:
    """A line chart as SVG, drawn without a plotting library; points that are not finite are left out.

    x is counted in whole steps.
    """
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return ""
    xs, ys = zip(*points, strict=True)
    left, right = _span(xs)
    across, upward = _ticks(left, right, whole=True), _ticks(*_span(ys))
    low, high = upward[0], upward[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - BOTTOM - TOP),
        )

    marks = []
    for y in upward:
        height = place(left, y)[1]
        marks.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}" stroke="#e5e7eb"/>'
            f'<text x="{LEFT - 6}" y="{height + 5:.1f}" text-anchor="end">{y:.4g}</text>'
        )
    marks += [
        f'<text x="{place(x, low)[0]:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{x:.0f}</text>'
        for x in across
        if left <= x <= right
    ]
    line = " ".join(f"{across:.1f},{height:.1f}" for across, height in (place(x, y) for x, y in points))
    dots = ""
    if len(points) <= 12:
        dots = "".join(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{BLUE}"/>' for a, b in (place(*p) for p in points)
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="system-ui, sans-serif" font-size="14"'
        f' fill="#4b5563">{"".join(marks)}'
        f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="1.6"/>{dots}</svg>'
    )


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers that begin at or below the lowest value and end at or above the highest."""
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _figure(title: str, text: str, points: Points) -> str:
    """A chart with its heading; nothing where nothing was logged."""
    drawn = chart(points)
    return f"<figure><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{drawn}</figure>" if drawn else ""


def _quoted(text: str) -> str:
    return f"`` {' '.join(text.split()).replace('``', '')} ``"


def _finite(value: Any) -> Any:
    """JSON knows no infinity; a ruined model has one."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
