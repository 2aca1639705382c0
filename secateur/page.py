"""A report as one HTML page that fetches nothing: figures, the sparsity of every layer as a picture, what it cost."""

from __future__ import annotations

import html
from collections.abc import Sequence

from secateur.report import Outcome

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #111827; background: #f9fafb; margin: 0; }
main { max-width: 960px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .25rem; }
p { margin: .25rem 0 .75rem; color: #4b5563; max-width: 72ch; }
table { border-collapse: collapse; background: #fff; width: 100%; margin: .5rem 0; }
th, td { padding: .4rem .75rem; text-align: right; border-bottom: 1px solid #e5e7eb; }
th { font-weight: 600; color: #374151; } th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; background: #fff; border: 1px solid #e5e7eb; border-radius: 8px; }
svg text { font: 11px system-ui, sans-serif; fill: #374151; }
footer { color: #6b7280; font-size: .85rem; margin-top: 2rem; }
"""
ROW, LEFT, WIDE = 18, 300, 560  # of the picture: height of a bar, room for names, length of a full bar


def render(title: str, outcome: Outcome) -> str:
    """The whole page as a string."""
    figures = [(name, f"{value:,.6g}") for name, value in outcome.found]
    figures += [
        ("sparsity asked", f"{outcome.asked:.4%}"),
        ("sparsity achieved, of the prunable weights", f"{outcome.sparsity:.4%}"),
        ("of the whole model", f"{outcome.model_sparsity:.4%}"),
        ("weights pruned", f"{outcome.pruned:,} of {outcome.prunable:,}"),
    ]
    stages = [
        (s.name, f"{s.seconds:.1f}", "-" if s.peak_bytes is None else f"{s.peak_bytes / 2**30:.2f}")
        for s in outcome.stages
    ]
    how = [outcome.score, f"scope {outcome.scope}", outcome.schedule]
    how += [
        f"{word} {value}" for word, value in (("pattern", outcome.pattern), ("allocation", outcome.allocation)) if value
    ]
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in outcome._notes())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body><main>'
        f"<h1>{html.escape(title)}</h1>"
        f"<p>{html.escape(', '.join(how))}; calibrated on {outcome.batches} batches.</p>"
        f"{table(('', 'value'), figures)}"
        "<h2>Sparsity by layer</h2><p>The dotted line is the sparsity of all together.</p>"
        f"{bars(outcome)}<h2>What it took</h2>{table(('stage', 'seconds', 'peak GiB'), stages)}"
        f"<h2>Notes</h2>{notes}<footer>Made by secateur.</footer></main></body></html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def bars(outcome: Outcome) -> str:
    """A bar for every tensor, as SVG."""
    height = ROW * len(outcome.tensors) + 30
    parts = [f'<svg viewBox="0 0 {LEFT + WIDE + 80} {height}" role="img" aria-label="sparsity of every layer">']
    for number, row in enumerate(outcome.tensors):
        top = 10 + number * ROW
        name = html.escape(row.name.removesuffix(".weight"))
        parts.append(f'<text x="{LEFT - 8}" y="{top + 12}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="{LEFT}" y="{top + 2}" width="{WIDE}" height="{ROW - 5}" fill="#f3f4f6"/>')
        length = WIDE * row.sparsity
        parts.append(f'<rect x="{LEFT}" y="{top + 2}" width="{length:.1f}" height="{ROW - 5}" fill="#2563eb"/>')
        parts.append(f'<text x="{LEFT + WIDE + 8}" y="{top + 12}">{row.sparsity:.1%}</text>')
    at = LEFT + WIDE * outcome.sparsity
    ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="6" y2="{height - 14}"'
    parts.append(f'<line {ends} stroke="#111827" stroke-dasharray="3 3"/>')
    return "".join([*parts, "</svg>"])
