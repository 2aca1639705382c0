"""Tables, bars and the figure of the fine-tuning campaign, made from its record.

    python -m tools.finetune_tables

draws docs/figures/finetune-campaign.svg anew; `python -m tools.tables` writes the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secateur.files import write
from secateur.lab.page import figure
from secateur.lab.record import ROOT
from tools.cells import Cell, Cells, by
from tools.finetune_campaign import LONG, MAGNITUDE, MAIN, SHORT, THEME, VARIANCE, key, mean_of

FIGURE = ROOT / "docs" / "figures" / f"{THEME}.svg"
HEADER = (
    "model", "sparsity", "tokens", "way", "learning rate", "seeds", "in domain", "times dense", "out of domain",
    "times dense",
)  # fmt: skip
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Row:
    """All seeds of one way at one learning rate."""

    model: str
    sparsity: float
    tokens: int
    way: str
    lr: float
    cells: Sequence[Cell]

    @property
    def inside(self) -> float:
        return mean_of(self.cells) / mean_of(self.cells, "before")

    @property
    def outside(self) -> float:
        return mean_of(self.cells, "other") / mean_of(self.cells, "other_before")


def rows(cells: Sequence[Cell]) -> list[Row]:
    """Every way at its best learning rate, by model, tokens and sparsity, best first."""
    groups = by(cells, "model", "sparsity", "tokens", "way", "lr")
    best: dict[tuple[Any, ...], Row] = {}
    for (model, sparsity, tokens, way, lr), some in groups.items():
        row = Row(model, sparsity, tokens, way, lr, some)
        known = best.get((model, sparsity, tokens, way))
        # A learning rate that went on to all seeds was chosen; its mean may be above one lucky run of another.
        if known is None or (-len(row.cells), row.inside) < (-len(known.cells), known.inside):
            best[model, sparsity, tokens, way] = row
    return sorted(best.values(), key=lambda row: (row.model, row.tokens, row.sparsity, row.inside))


def table(cells: Sequence[Cell]) -> tuple[Sequence[str], list[Sequence[str]]]:
    lines = []
    for row in rows(cells):
        trained = row.cells[0]["trained"]
        lines.append((
            row.model, f"{row.sparsity:.0%}", f"{trained / 1e6:.3g} M", row.way, f"{row.lr:g}", str(len(row.cells)),
            f"{mean_of(row.cells):.2f}", f"{row.inside:.3f}", f"{mean_of(row.cells, 'other'):.2f}",
            f"{row.outside:.3f}",
        ))  # fmt: skip
    return HEADER, lines


def bars(cells: Sequence[Cell], model: str = "smollm2") -> list[str]:
    """What was asked of SmolLM2 before anything was measured, and what was found."""
    found = [row for row in rows(cells) if row.model == model]

    def best(sparsity: float, tokens: int) -> Row | None:
        some = [row for row in found if (row.sparsity, row.tokens) == (sparsity, tokens)]
        return min(some, key=lambda row: row.inside, default=None)

    def told(what: str, bar: float, value: float | None) -> str:
        if value is None:
            return f"{what}: at most {bar}x dense: not measured yet."
        return f"{what}: at most {bar}x dense: **{'met' if value <= bar else 'missed'}**, {value:.3f}x."

    asked = (
        ("80 %, 5 M tokens", MAIN, SHORT, 2.2), ("50 %, 5 M tokens, in domain", 0.5, SHORT, 1.12),
        ("80 %, 20 M tokens", MAIN, LONG, 1.8), ("goal: 80 %, 20 M tokens", MAIN, LONG, 1.6),
        ("goal: 90 %, 20 M tokens", 0.9, LONG, 2.5),
    )  # fmt: skip
    lines = [told(what, bar, None if (row := best(*place)) is None else row.inside) for what, *place, bar in asked]
    half = best(0.5, SHORT)
    lines.insert(2, told("50 %, 5 M tokens, out of domain", 1.2, None if half is None else half.outside))
    ours, theirs = ([r for r in found if (r.sparsity, r.tokens) == (MAIN, SHORT) and r.way in ways]
                    for ways in ((VARIANCE,), MAGNITUDE))  # fmt: skip
    asked_ratio = "the mask alone (gradual, same loss), 80 %, 5 M tokens: magnitude at least 1.8x variance's perplexity"
    if not ours or not theirs:
        return [*lines, f"{asked_ratio}: not measured yet."]
    ratio = min(mean_of(row.cells) for row in theirs) / mean_of(ours[0].cells)
    return [*lines, f"{asked_ratio}: **{'met' if ratio >= 1.8 else 'missed'}**, {ratio:.2f}x."]


def drawn(cells: Sequence[Cell]) -> str:
    """How many times dense each way is at each sparsity, on the short budget: an SVG."""
    found = [row for row in rows(cells) if row.tokens == SHORT]
    lines = {
        (model, way): sorted((row.sparsity, row.inside) for row in found if (row.model, row.way) == (model, way))
        for model, way in dict.fromkeys((row.model, row.way) for row in found)
    }
    models = {model for model, _ in lines}
    lines = {name: points for name, points in lines.items() if len(points) > 1} or lines

    def draw(axes: Any) -> None:
        for number, ((model, way), points) in enumerate(lines.items()):
            label = way if len(models) == 1 else f"{model}, {way}"
            axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[number % len(COLOURS)], label=label)
        axes.axhline(1, color="#111827", linewidth=1)
        axes.set(xlabel="sparsity of the prunable weights", ylabel="perplexity, times dense")
        axes.legend(frameon=False)

    return figure(draw)


def main() -> int:
    cells = Cells(THEME, key).found
    if not cells:
        print(f"there is no record {THEME} yet: python -m tools.finetune_campaign")
        return 1
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    write(FIGURE, drawn(cells))
    print(FIGURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
