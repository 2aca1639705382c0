"""Reports: what was asked, what was done, to which tensors, at what cost. Frozen data and pure renderings."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from torch import Tensor

from secateur.progress import Stage


@dataclass(frozen=True)
class Update:
    """One mask update: what the schedule asked for at this step and what was reached, over all processes."""

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
        table = text_table(("tensor", "shape", "pruned", "sparsity", "cut"), collapse(rows, ranged=4))
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
        empty = [row.name for row in self.tensors if row.pruned == row.numel]
        if empty:
            shown = ", ".join(empty[:3]) + (", ..." if len(empty) > 3 else "")
            notes.insert(0, f"Nothing is left of {len(empty)} of {len(self.tensors)} tensors: {shown}")
        because = [("Pruned", row.reason, row.name, row.numel) for row in self.tensors if row.reason]
        because += [("Left dense", reason, name, numel) for name, numel, reason in self.left_out]
        reasons: dict[str, list[tuple[str, int]]] = {}
        for what, reason, name, numel in because:
            reasons.setdefault(f"{what}, {reason}", []).append((name, numel))
        for reason, members in reasons.items():
            shown = ", ".join(name for name, _ in members[:3]) + (", ..." if len(members) > 3 else "")
            number = "1 tensor" if len(members) == 1 else f"{len(members)} tensors"
            notes.append(f"{reason}: {number}, {sum(n for _, n in members):,} weights ({shown})")
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


def collapse(rows: Sequence[Sequence[str]], least: int = 3, ranged: int | None = None) -> list[Sequence[str]]:
    """One row for rows that differ only in the numbers of their layers: "24 layers alike: layers.*.mlp.weight".

    The first cell is the name. The cell `ranged`, a number, may differ too and becomes a range. Fewer than `least` rows
    are left as they are.
    """
    groups: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for row in rows:
        groups.setdefault(_kind_of(row, ranged), []).append(row)
    found: list[Sequence[str]] = []
    for row in rows:
        members = groups[_kind_of(row, ranged)]
        if len(members) < least:
            found.append(row)
        elif row is members[0]:
            words = zip(*(member[0].split(".") for member in members), strict=True)
            name = ".".join(one[0] if len(set(one)) == 1 else "*" for one in words)
            cells = [f"{len(members)} layers alike: {name}", *row[1:]]
            if ranged is not None:
                cells[ranged] = _range([member[ranged] for member in members])
            found.append(tuple(cells))
    return found


def _kind_of(row: Sequence[str], ranged: int | None) -> tuple[str, ...]:
    """The row without the numbers in its name and without the cell that may differ."""
    name = ".".join("*" if word.isdecimal() else word for word in row[0].split("."))
    return (name, *(cell for number, cell in enumerate(row) if number not in (0, ranged)))


def _range(cells: Sequence[str]) -> str:
    """The least and the greatest of some numbers; "-" stands for none."""
    numbers = sorted((cell for cell in set(cells) if cell != "-"), key=float)
    return " to ".join(numbers[:: max(1, len(numbers) - 1)]) or "-"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns for a terminal; the first `left` are flush left, the rest flush right."""
    widths = [max(len(cells[column]) for cells in (header, *rows)) for column in range(len(header))]
    lines = []
    for cells in (header, ["-" * width for width in widths], *rows):
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #111827; background: #f9fafb; margin: 0; overflow-wrap: anywhere; }
main { max-width: 1080px; margin: 0 auto; padding: 2rem 1.25rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 1.5rem 0 .25rem; }
p { margin: .25rem 0 .75rem; color: #4b5563; max-width: 72ch; }
img, svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; overflow-wrap: normal; margin: .5rem 0; width: fit-content; max-width: 100%;
  background: linear-gradient(90deg, #fff 1rem, #fff0) left/2rem 100% no-repeat local,
    linear-gradient(270deg, #fff 1rem, #fff0) right/2rem 100% no-repeat local,
    linear-gradient(90deg, #0003, #0000) left/.6rem 100% no-repeat scroll,
    linear-gradient(270deg, #0003, #0000) right/.6rem 100% no-repeat scroll, #fff; } /* shadows: there is more */
table { border-collapse: collapse; }
th, td { padding: .4rem .6rem; text-align: right; border-bottom: 1px solid #e5e7eb;
  font-variant-numeric: tabular-nums; }
th { font-weight: 600; color: #374151; } th:first-child, td:first-child { text-align: left; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 1rem; }
.figures { align-items: start; margin-top: 1.5rem; }
figure { background: #fff; border: 1px solid #e5e7eb; border-radius: 8px; margin: 0; padding: 1rem; min-width: 0; }
figure.full { grid-column: 1 / -1; } figure h2 { margin-top: 0; } figure .figures { margin-top: .75rem; }
figure > svg { width: 100%; display: block; }
.warning { background: #fef3c7; border-left: 4px solid #d97706; color: #78350f; padding: .5rem .75rem; }
pre { background: #f3f4f6; padding: .6rem; margin: 0; font-size: .8rem; white-space: pre-wrap; }
footer { color: #6b7280; font-size: .85rem; margin-top: 2rem; }
@media (max-width: 600px) {
  main { padding: 1rem .75rem 2rem; } h1 { font-size: 1.3rem; }
  th, td { padding: .3rem .4rem; font-size: .85rem; } figure { padding: .6rem; }
}
"""
LONG = 20  # characters of a name that may be broken
BREAKS = r"\.(?=[A-Za-z_*]|\d+\.)"  # dots between the parts of a name, not those of a number
COLUMNS = 16  # of a heat map; models with more kinds of weights show the mean of those that differ in a number
PALE, DARK = (239, 246, 255), (30, 58, 138)  # RGB


def html_page(title: str, body: str, footer: str = "") -> str:
    """A whole page that fetches nothing: the title, which is the headline too, then `body` and `footer` as HTML."""
    made_by = f"{footer}{' ' if footer else ''}Made by Secateur."
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body><main>'
        f"<h1>{html.escape(title)}</h1>{body}<footer>{made_by}</footer></main></body></html>\n"
    )


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls by itself where the page is narrow. The first column is text, the rest numbers."""
    head = "".join(f"<th>{_breakable(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_breakable(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _breakable(cell: str) -> str:
    """A cell as HTML: lines break after dots of a long dotted name, and never between a number and a short unit."""
    words = [re.sub(BREAKS, ".<wbr>", word) if len(word) > LONG else word for word in html.escape(cell).split(" ")]
    return re.sub(r"(?<=\d) (?=[A-Za-z%]{1,3}\b|%)", "\N{NBSP}", " ".join(words))


def heat_map(rows: Sequence[tuple[str, float]], limits: tuple[float, float] | None = None) -> str:
    """Sparsity of tensors, given by name, as a table of blocks by kinds of weights: the darker, the sparser.

    "layers.3.attn.q_proj.weight" is block 3, kind "attn.q_proj". Styles are inline, so that notebooks show it too.
    `limits` are the sparsities of the palest and the darkest colour (the lowest and highest found).
    """
    if not rows:
        return ""
    blocks, kinds = _by_block(rows)
    values = [fmean(found) for block in blocks.values() for found in block.values()]
    low, high = limits or (min(values), max(values))
    cell = "padding:3px 6px;border:1px solid #fff;text-align:center;font-size:12px;font-variant-numeric:tabular-nums"
    turned = "writing-mode:vertical-rl;transform:rotate(180deg);white-space:nowrap;display:inline-block"
    head = "".join(
        f'<th scope="col" style="{cell};vertical-align:bottom"><span style="{turned}">{html.escape(kind)}</span></th>'
        for kind in kinds
    )
    lines = []
    for label, block in blocks.items():
        shown = [_heat_cell(f"{label} {kind}", block.get(kind), low, high, cell) for kind in kinds]
        lines.append(f'<tr><th scope="row" style="{cell}">{html.escape(label)}</th>{"".join(shown)}</tr>')
    spread = f"{min(values):.1%}" if max(values) == min(values) else f"{min(values):.1%} to {max(values):.1%}"
    return (
        f'<p style="font-size:12px">Percent of weights that are zero, by block and kind of weight: {spread}.</p>'
        '<div class="wide" style="overflow-x:auto"><table style="border-collapse:collapse;min-width:0">'
        f'<thead><tr><th scope="col" style="{cell}">block</th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _by_block(rows: Sequence[tuple[str, float]]) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    """Sparsities by the label of their block and by kind, and all kinds in the order they come."""
    split = [(*_split_name(name), value) for name, value in rows]
    if len({kind for _, _, kind, _ in split}) > COLUMNS:
        split = [(stem, number, re.sub(r"\b\d+\b", "*", kind), value) for stem, number, kind, value in split]
    several = len({stem for stem, number, _, _ in split if number}) > 1  # such as an encoder and a decoder
    blocks: dict[str, dict[str, list[float]]] = {}
    for stem, number, kind, value in split:
        label = f"{stem}.{number}" if several and number else number or "-"
        blocks.setdefault(label, {}).setdefault(kind, []).append(value)
    return blocks, list(dict.fromkeys(kind for _, _, kind, _ in split))


def _split_name(name: str) -> tuple[str, str, str]:
    """What stands before the first whole number in a tensor's name, that number, and what follows it."""
    words = name.removesuffix(".weight").split(".")
    place = next((place for place, word in enumerate(words) if word.isdecimal()), None)
    if place is None:
        return "", "", ".".join(words)
    return ".".join(words[:place]), words[place], ".".join(words[place + 1 :]) or words[place - 1]


def _heat_cell(name: str, found: list[float] | None, low: float, high: float, style: str) -> str:
    if found is None:
        return f'<td style="{style}"></td>'
    value = fmean(found)
    heat = (value - low) / (high - low) if high - low > 0.005 else value
    colour = ",".join(f"{pale + heat * (dark - pale):.0f}" for pale, dark in zip(PALE, DARK, strict=True))
    ink = "#fff" if heat > 0.5 else "#111827"
    return (
        f'<td style="{style};background:rgb({colour});color:{ink}" title="{html.escape(name)}: {value:.2%}">'
        f"{_whole_percent(value)}</td>"
    )


def _whole_percent(value: float) -> str:
    """Percent without decimals; 0 and 100 only where that is exact."""
    if 0 < value < 0.005:
        return "&lt;1"
    return "&gt;99" if 0.995 <= value < 1 else f"{100 * value:.0f}"


def render(title: str, outcome: Outcome, verdict: str = "", warnings: Sequence[str] = ()) -> str:
    """The page of `prune` and `probe`. The verdict is its headline; warnings, which are among the notes too, follow."""
    figures = [(name, f"{value:,.6g}") for name, value in outcome.found]
    figures += [
        ("sparsity asked", f"{outcome.asked:.4%}"),
        ("sparsity achieved, of the prunable weights", f"{outcome.sparsity:.4%}"),
        ("of the whole model", f"{outcome.model_sparsity:.4%}"),
        ("weights pruned", f"{outcome.pruned:,} of {outcome.prunable:,}"),
    ]
    peaks = any(stage.peak_bytes is not None for stage in outcome.stages)
    stages = [
        (s.name, f"{s.seconds:.1f}", "-" if s.peak_bytes is None else f"{s.peak_bytes / 2**30:.2f}")[: 2 + peaks]
        for s in outcome.stages
    ]
    how = [outcome.score, f"scope {outcome.scope}", outcome.schedule]
    how += [
        f"{word} {value}" for word, value in (("pattern", outcome.pattern), ("allocation", outcome.allocation)) if value
    ]
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in outcome._notes() if note not in warnings)
    warned = "".join(f'<p class="warning">{html.escape(line)}</p>' for line in warnings)
    return html_page(
        verdict or title,
        f"<p>{html.escape(title)} by {html.escape(', '.join(how))}; calibrated on {outcome.batches} batches.</p>"
        f"{warned}"
        f"{html_table(('', 'value'), figures)}"
        f"<h2>Sparsity by layer</h2>{heat_map([(row.name, row.sparsity) for row in outcome.tensors])}"
        f"<h2>Time{' and memory' if peaks else ''}</h2>"
        f"{html_table(('stage', 'seconds', 'peak GiB')[: 2 + peaks], stages)}<h2>Notes</h2>{notes}",
    )
