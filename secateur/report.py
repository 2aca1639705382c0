"""Reports: what was asked, what was done, to which tensors, at what cost. Frozen data and pure renderings."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from secateur.progress import Stage


@dataclass(frozen=True)
class Update:
    """One mask update: what the schedule asked for at this step and what came of it, over all processes."""

    step: int
    asked: float
    pruned: int
    churn: int  # weights whose mask changed
    seconds: float
    bytes_sent: int  # by this process
    grown: int = 0  # weights that had been gone and came back


@dataclass(frozen=True)
class TensorRow:
    """One prunable tensor."""

    name: str
    shape: tuple[int, ...]
    numel: int
    pruned: int
    churn: int  # at the last update
    cut: float | None  # score at the boundary of the last update; None where every row or group has its own
    tied: tuple[str, ...]
    reason: str = ""  # why it is prunable, where its layer alone does not tell

    @property
    def sparsity(self) -> float:
        """Fraction of its weights that is pruned."""
        return self.pruned / self.numel


@dataclass(frozen=True)
class Report:
    """The state of a Pruner: settings, totals, every prunable tensor, every tensor left dense and why."""

    score: str
    schedule: str
    scope: str
    pattern: str | None
    allocation: str | None
    step: int
    asked: float
    tensors: tuple[TensorRow, ...]
    left_out: tuple[tuple[str, int, str], ...]  # name, numel, reason
    updates: tuple[Update, ...]
    mask_bytes: int
    packed_mask_bytes: int
    fact_bytes: int  # copies a score needs beyond the optimizer's state
    regrow: str | None = None

    @property
    def prunable(self) -> int:
        """Number of weights that may be pruned."""
        return sum(row.numel for row in self.tensors)

    @property
    def pruned(self) -> int:
        """Number of weights that are pruned."""
        return sum(row.pruned for row in self.tensors)

    @property
    def sparsity(self) -> float:
        """Of the prunable weights."""
        return self.pruned / self.prunable

    @property
    def model_sparsity(self) -> float:
        """Of every parameter of the model."""
        return self.pruned / (self.prunable + sum(numel for _, numel, _ in self.left_out))

    def to_json(self) -> str:
        """Everything, as JSON."""
        totals = {
            "prunable": self.prunable,
            "pruned": self.pruned,
            "sparsity": self.sparsity,
            "model_sparsity": self.model_sparsity,
        }
        return json.dumps({**totals, **self._plain()}, indent=2)

    def _plain(self) -> dict[str, Any]:
        return asdict(self)

    def to_markdown(self) -> str:
        """Totals and the table of tensors."""
        rows = [
            (
                row.name,
                "x".join(map(str, row.shape)),
                f"{row.numel:,}",
                f"{row.pruned:,}",
                f"{row.sparsity:.4f}",
                _cut(row),
            )
            for row in self.tensors
        ]
        table = markdown_table(("tensor", "shape", "weights", "pruned", "sparsity", "cut"), rows)
        return "\n\n".join((*self._summary(), table, *self._notes()))

    def __str__(self) -> str:
        rows = [
            (
                row.name,
                "x".join(map(str, row.shape)),
                f"{row.pruned:,} of {row.numel:,}",
                f"{row.sparsity:.2%}",
                _cut(row),
            )
            for row in self.tensors
        ]
        table = text_table(("tensor", "shape", "pruned", "sparsity", "cut"), rows)
        return "\n".join((*self._summary(), "", table, "", *self._notes()))

    def _summary(self) -> list[str]:
        options = {"pattern": self.pattern, "allocation": self.allocation, "regrow": self.regrow}
        how = f"score {self.score}, scope {self.scope}" + "".join(
            f", {word} {value}" for word, value in options.items() if value
        )
        lines = [
            f"Step {self.step}: asked {self.asked:.4%}, achieved {self.sparsity:.4%} of prunable weights"
            f" ({self.pruned:,} of {self.prunable:,}), {self.model_sparsity:.4%} of the model.",
            f"Set up with {how}, sparsity {self.schedule}.",
        ]
        if self.updates:
            last = self.updates[-1]
            came_back = f" ({last.grown:,} came back)" if last.grown else ""
            mean = sum(update.seconds for update in self.updates) / len(self.updates)
            lines.append(
                f"{len(self.updates)} updates, {mean * 1e3:.1f} ms each on average; the last, at step {last.step},"
                f" changed {last.churn:,} weights{came_back} and sent {last.bytes_sent:,} bytes."
            )
        memory = f"Masks take {self.mask_bytes:,} bytes here, {self.packed_mask_bytes:,} when saved"
        lines.append(memory + (f"; the score keeps {self.fact_bytes:,} more." if self.fact_bytes else "."))
        return lines

    def _notes(self) -> list[str]:
        notes = [f"{row.name} is tied with {', '.join(row.tied)} and counts once." for row in self.tensors if row.tied]
        because = [("Pruned", row.reason, row.name, row.numel) for row in self.tensors if row.reason]
        because += [("Left dense", reason, name, numel) for name, numel, reason in self.left_out]
        reasons: dict[str, list[tuple[str, int]]] = {}
        for what, reason, name, numel in because:
            reasons.setdefault(f"{what}, {reason}", []).append((name, numel))
        for reason, members in reasons.items():
            shown = ", ".join(name for name, _ in members[:3]) + (", ..." if len(members) > 3 else "")
            notes.append(f"{reason}: {len(members)} tensors, {sum(n for _, n in members):,} weights ({shown})")
        return notes


@dataclass(frozen=True)
class Outcome(Report):
    """What `prune` or `probe` did to a trained model; `step` counts rounds or levels. `masks` are not rendered."""

    batches: int = 0
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()
    found: tuple[tuple[str, float], ...] = ()  # further figures, by name
    masks: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def _plain(self) -> dict[str, Any]:
        plain = asdict(replace(self, masks={}))
        del plain["masks"]
        # JSON knows no infinity; a ruined model has one.
        plain["found"] = [[name, value if math.isfinite(value) else str(value)] for name, value in self.found]
        return plain

    def _summary(self) -> list[str]:
        first, how, *_ = super()._summary()
        lines = [first.partition(": ")[2], how.replace(", sparsity ", "; ") + f" Calibrated on {self.batches} batches."]
        lines += [f"{name}: {value:.6g}" for name, value in self.found]
        spent = [
            f"{s.name} {s.seconds:.1f} s" + (f" ({s.peak_bytes / 2**30:.1f} GiB)" if s.peak_bytes else "")
            for s in self.stages
        ]
        return [*lines, "Spent: " + ", ".join(spent) + "."] if spent else lines

    def _notes(self) -> list[str]:
        return [*self.notes, *super()._notes()]


def _cut(row: TensorRow) -> str:
    return "-" if row.cut is None else f"{row.cut:.4g}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub-flavoured table; the first column is text, the rest numbers. Bars inside a cell are escaped."""
    escaped = [[cell.replace("|", r"\|") for cell in cells] for cells in (header, *rows)]
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (escaped[0], rule, *escaped[1:]))


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns for a terminal; the first is flush left, the rest flush right."""
    widths = [max(len(cells[column]) for cells in (header, *rows)) for column in range(len(header))]
    lines = []
    for cells in (header, ["-" * width for width in widths], *rows):
        padded = [cells[0].ljust(widths[0])] + [
            cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


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
