"""Rewrite the generated parts of README.md and docs from benchmarks/results and from the code.

    python -m tools.tables [--check]

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. With --check nothing is written and the
exit code says whether anything would change.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import secateur
from secateur.bench import accuracy, decode, decode_gpu, pace, patterns, probe, quality, scale, select, step, train
from secateur.files import write
from secateur.lab.record import ROOT
from secateur.report import markdown_table
from secateur.scores import resolve
from tools import claims, finetune_campaign, finetune_rivals, procedure_tables, results
from tools.cells import dated

NOT_YET = "not measured yet"
CPU, GPU = "cpu", "gpu"
Record = dict[str, Any]


def records(theme: str) -> Iterator[Record]:
    """Everything measured under a theme, newest first."""
    for path in reversed(dated(theme)):
        yield json.loads(path.read_text(encoding="utf-8"))


def newest(theme: str, kind: str) -> Record | None:
    """The latest results of a theme on this kind of hardware; only CPUs are recorded with their threads."""
    return next((one for one in records(theme) if (CPU if "threads" in one["hardware"] else GPU) == kind), None)


# Commands of old records that have another name today.
RENAMED = {"python -m benchmarks.select": "secateur bench select --device cpu"}
FIRST_SCORE = "bitter7"  # of records that do not name their score
DEFAULT_SCORE = "variance"


def source(record: Record) -> str:
    """Where the numbers come from, in a line."""
    copied = f" copies at {record['bandwidth'] / 1e12:.2f} TB/s;" if "bandwidth" in record else ""
    command = RENAMED.get(record["command"], record["command"])
    before = " (then under another name)" if command != record["command"] else ""
    return (
        f"{record['hardware']};{copied} torch {record['versions']['torch']}, Python {record['versions']['python']};"
        f" commit {record['commit']}, {record['date']}: `{command}`{before}"
    )


def size_of(record: Record) -> Record:
    """The largest size of a record, measured with the default score where that was."""
    largest = max(size["weights"] for size in record["sizes"])
    sizes = [size for size in record["sizes"] if size["weights"] == largest]
    return next((size for size in sizes if size.get("score") == DEFAULT_SCORE), sizes[-1])


def missed_floor(record: Record) -> str:
    """Which sizes from 100 M weights up take longer than the bar allows."""
    large = [size for size in record["sizes"] if size["weights"] > 99e6]
    ratios = [statistics.median(size["milliseconds"]) / size["floor_ms"] for size in large]
    most = max(size["scratch_mib"] for size in record["sizes"])
    if not ratios:
        return f"Scratch memory is at most {most:.0f} MiB (bar {scale.BAR_MIB})."
    missed = sum(value > scale.BAR_FLOOR for value in ratios)
    return (
        f"Our own bar for large models, {scale.BAR_FLOOR}x of the time to move the bytes, is missed in {missed} of"
        f" {len(ratios)} measurements from 100 M weights up ({min(ratios):.1f}x to {max(ratios):.1f}x); scratch memory"
        f" is at most {most:.0f} MiB (bar {scale.BAR_MIB})."
    )


def cost_table() -> str:
    """What one update, one step and a whole training run cost on a GPU, each beside what it replaces."""
    rows, sources = [], []
    if found := newest("select", GPU):
        size = size_of(found)
        ms = {name: statistics.median(taken) for name, taken in size["milliseconds"].items()}
        rivals = f"topk {ms['topk']:.1f} ms, kthvalue {ms['kthvalue']:,.0f} ms"
        what = f"exact mask update, {size['weights'] / 1e6:.0f} M fp32 weights, `{size.get('score', FIRST_SCORE)}`"
        room = f"{size['scratch_mib']['secateur, bool masks']:.0f} MiB scratch"
        rows.append((what, f"{ms['secateur, bool masks']:.2f} ms, {room}", rivals))
        sources.append(found)
    if found := newest("scale", GPU):
        size = size_of(found)
        took, floor = statistics.median(size["milliseconds"]), size["floor_ms"]
        rivals = f"reading and writing the bytes once: {floor:.1f} ms ({took / floor:.1f}x)"
        what = f"exact mask update, {size['weights'] / 1e9:.2f} B bf16 weights, `{size.get('score', FIRST_SCORE)}`"
        rows.append((what, f"{took:.1f} ms, {size['scratch_mib']:.0f} MiB scratch", rivals))
        sources.append(found)
    if found := newest("step", GPU):
        ms = {name: statistics.median(taken) for name, taken in found["milliseconds"].items()}
        ours, theirs = ms["secateur, masked"], ms[step.FUSED]
        what = f"masked AdamW step, {found['weights'] / 1e6:.0f} M weights"
        rows.append((what, f"{ours:.2f} ms", f"torch's fused dense step: {theirs:.2f} ms ({ours / theirs:.2f}x)"))
        sources.append(found)
    if found := newest("pace", GPU):
        _, lines = pace.table(found["rows"])
        name, ours, ratio = [line[:3] for line in lines][-1]
        rows.append((f"GPT-2 training step ({name})", f"{ours} ms", f"dense: {lines[0][1]} ms ({ratio})"))
        sources.append(found)
    table = markdown_table(("what", "Secateur", "beside it"), rows).replace("---:", "---")
    found = newest("scale", GPU)
    where = "; ".join(f"commit {one['commit']} `{one['command']}`" for one in sources)
    hardware = ", ".join(sorted({one["hardware"] for one in sources}))
    return "\n\n".join([table, *([missed_floor(found)] if found else []), f"Medians on one {hardware}: {where}"])


def quality_seconds(record: Record) -> str:
    """How long the recommended recipe takes beside SparseGPT, over all sparsities and patterns of a record."""
    seconds = {(cell["method"], cell["asked"], cell["pattern"]): cell["seconds"] for cell in record["cells"]}
    ratios = [
        taken / seconds[quality.RIVAL, *key]
        for (name, *key), taken in seconds.items()
        if name == "recommended" and (quality.RIVAL, *key) in seconds
    ]
    return f"*recommended* takes {min(ratios):.1f} to {max(ratios):.1f} times SparseGPT's seconds."


def versus_tables(least: float = 0.0) -> str:
    """The default score beside magnitude, all else equal, in every experiment that has both."""
    return markdown_table(*results.against_rival(least))


def part(theme: str, kind: str, tables: Callable[[Record], list[str]]) -> str:
    """The newest record of a theme as tables with their source under them."""
    record = newest(theme, kind)
    return NOT_YET if record is None else "\n\n".join([*tables(record), source(record)])


def select_tables(record: Record) -> list[str]:
    return [markdown_table(*select.table(size)) for size in record["sizes"]]


def train_tables(record: Record) -> list[str]:
    return [markdown_table(*train.table(record["cells"]))]


def pace_tables(record: Record) -> list[str]:
    return [markdown_table(*pace.table(record["rows"]))]


def decode_tables(record: Record) -> list[str]:
    busy = f"Load of the machine when it began: {record['load_at_start']}." if record["load_at_start"] else ""
    lines = [*decode.summary(record), busy]
    return [markdown_table(*decode.table(record["cells"])), "\n".join(f"- {line}" for line in lines if line)]


def decode_gpu_tables(record: Record) -> list[str]:
    return [markdown_table(*decode_gpu.table(record["cells"])), f"- Packed layers are computed by: {record['kernel']}."]


def decode_whole_tables(record: Record) -> list[str]:
    return ["\n".join(f"- {line}" for line in decode_gpu.whole_lines(record["whole"]))]


LEVELS = (0.5, 0.7, 0.8, 0.9)


def decode_short() -> str:
    """What zeros buy at one token at a time in bf16: dense over packed time by sparsity, of all shapes measured on GPUs
    and the largest on a CPU."""
    rows, sources = [], []
    for kind, shapes, rival in ((GPU, decode_gpu.SHAPES, "cuBLAS"), (CPU, ("8192x8192",), "torch")):
        found = newest("decode", kind)
        if found is None:
            continue
        cells = [
            cell for cell in found["cells"] if cell["dtype"] == "bfloat16" and cell["values"] == "as dense" and
            cell["right"] and cell["shape"] in shapes and cell.get("inputs", 1) == 1
        ]  # fmt: skip
        rows.append(
            (f"{found['hardware']}, beside {rival} ({', '.join(shapes)})", *map(partial(gained, cells), LEVELS))
        )
        sources.append(f"{found['hardware']}, commit {found['commit']}")
    table = markdown_table(("linear layers of bf16, batch 1", *(f"{level:.0%}" for level in LEVELS)), rows)
    return "\n\n".join([table, f"Dense over packed time, medians: {'; '.join(sources)}"]) if rows else NOT_YET


def gained(cells: list[Record], level: float) -> str:
    """The range of dense over packed time at a sparsity."""
    ratios = [
        statistics.median(cell["dense_us"]) / statistics.median(cell["packed_us"])
        for cell in cells
        if round(cell["sparsity"], 2) == level
    ]
    shown = sorted({f"{ratio:.1f}" for ratio in (min(ratios), max(ratios))}) if ratios else []
    return f"{' to '.join(shown)}x" if shown else "-"


def pattern_tables(record: Record) -> list[str]:
    cells = record["cells"]
    lines = [
        quality.windows({**record, "windows": patterns.numbers(record["windows"])}),
        patterns.conclusion(cells),
        f"Packed layers are computed by: {record['kernel']}.",
        f"Load of the machine when it began: {record['load_at_start']}.",
    ]
    shown = "\n".join(f"- {line}" for line in lines if line)
    return [markdown_table(*patterns.table(cells)), "![patterns](figures/patterns.svg)", shown]


def train_part() -> str:
    """Both modes from one run; failing that, from a run of each."""
    whole = part("train", GPU, train_tables)
    halves = [part(f"train-{mode}", GPU, train_tables) for mode in train.MODES]
    measured = [half for half in halves if half != NOT_YET]
    return whole if whole != NOT_YET or not measured else "\n\n".join(measured)


def scores_table() -> str:
    """Every registered score with its formula, as its docstring states it."""
    rows = []
    for name in secateur.scores():
        score = resolve(name)
        formula = (score.function.__doc__ or "").strip().split("\n")[0]
        options = ", ".join(f"{key}={value:g}" for key, value in score.defaults.items()) or "-"
        rows.append((f"`{name}`", f"`{formula}`", ", ".join(f"`{need}`" for need in score.needs), options))
    return markdown_table(("score", "formula", "reads", "options"), rows).replace("---:", "---")


def stream_part() -> str:
    """Streaming a dataset, by a tokenizer and by bytes."""
    found = [one for theme in ("data-stream", "data-stream-byte") if (one := newest(theme, CPU))]
    return "\n\n".join([*claims.stream_tables(found), *map(source, found)]) if found else NOT_YET


def campaign_tables(record: Record) -> list[str]:
    """The fine-tuning campaign: its table, its figure if there is one, and what was asked beside what was found."""
    cells, name = record["cells"], f"{finetune_campaign.THEME}.svg"
    picture = f"![fine-tuning campaign](figures/{name})" if (results.FIGURES / name).exists() else ""
    bars = "\n".join(f"- {line}" for line in finetune_campaign.bars(cells))
    return [one for one in (markdown_table(*finetune_campaign.table(cells)), picture, bars) if one]


def rivals_tables(record: Record) -> list[str]:
    return [markdown_table(*finetune_rivals.rows(record["cells"])), finetune_rivals.noise(record["cells"])]


def procedure_part(table: Callable[[list[Record]], str]) -> str:
    """A table of the newest record of every run of GradProbe's procedure."""
    themes = {path.stem.partition("_")[0] for path in dated("procedure-*")}
    found = [record for kind in (CPU, GPU) for theme in sorted(themes) if (record := newest(theme, kind))]
    return table(found) if found else NOT_YET


PARTS: dict[str, Callable[[], str]] = {
    "accuracy": lambda: part(
        "accuracy", CPU, lambda found: [markdown_table(*accuracy.table(found["results"], found["updates"]))]
    ),
    "demo": lambda: part("demo", CPU, lambda found: [markdown_table(found["header"], found["rows"])]),
    "claims": claims.full_tables,
    "cost": cost_table,
    "data-stream": stream_part,
    "decode": lambda: part("decode", CPU, decode_tables),
    "decode-gpu": lambda: part("decode", GPU, decode_gpu_tables),
    "decode-short": decode_short,
    "decode-model": lambda: part("decode-model", CPU, decode_tables),
    "decode-whole": lambda: part("decode-whole", GPU, decode_whole_tables),
    "forms": lambda: part("small-claims", CPU, claims.forms_tables),
    finetune_campaign.THEME: lambda: part(finetune_campaign.THEME, GPU, campaign_tables),
    **{theme: partial(part, theme, CPU, rivals_tables) for theme in finetune_rivals.THEMES},
    "pace": lambda: part("pace", GPU, pace_tables),
    "patterns": lambda: part("patterns", CPU, pattern_tables),
    "probe": lambda: part(
        "probe",
        GPU,
        lambda found: [
            markdown_table(*probe.passes_table(found["passes"])),
            markdown_table(*probe.jobs_table(found["jobs"])),
        ],
    ),
    "procedure-strict": lambda: procedure_part(procedure_tables.strict),
    "procedure-search": lambda: procedure_part(procedure_tables.searches),
    "procedure-levels": lambda: procedure_part(procedure_tables.levels),
    "procedure-source": lambda: procedure_part(procedure_tables.source),
    "quality": lambda: part(
        "quality", GPU, lambda found: [quality.windows(found), markdown_table(*quality.table(found))]
    ),
    "quality-short": lambda: part(
        "quality",
        GPU,
        lambda found: [quality.windows(found), markdown_table(*quality.summary(found)), quality_seconds(found)],
    ),
    "scale": lambda: part(
        "scale",
        GPU,
        lambda found: [markdown_table(*scale.table(found["sizes"])), missed_floor(found)],
    ),
    "scores": scores_table,
    "select": lambda: part("select", CPU, select_tables),
    "select-gpu": lambda: part("select", GPU, select_tables),
    "step": lambda: part("step", GPU, lambda found: [markdown_table(*step.table(found))]),
    "train": train_part,
    "versus": versus_tables,
    "versus-short": lambda: versus_tables(0.8),
}


def campaign(path: Path) -> str:
    """An experiment of the lab: its final table, a picture of it, and where the numbers come from."""
    found = results.comparison(path)
    name = path.stem.partition("_")[0]
    picture, about = f"![{name}](figures/{name}.svg)", [results.noise_at_the_end(found), results.source(found)]
    return "\n\n".join([markdown_table(*results.table(found)), picture, *filter(None, about)])


def filled(text: str) -> str:
    """The text with every generated part made anew."""
    parts = {name: lambda: NOT_YET for name in re.findall(rf"<!-- begin ({results.PREFIX}[\w-]+) -->", text)}
    parts |= dict(PARTS) | {name: partial(campaign, path) for name, path in results.records().items()}
    for name, make in parts.items():
        marks = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if marks[0] in text:
            before, _, rest = text.partition(marks[0])
            text = f"{before}{marks[0]}\n{make()}\n{marks[1]}{rest.partition(marks[1])[2]}"
    return text


def main() -> int:
    """Rewrite, or check."""
    stale = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                write(path, filled(text))
    print("stale: " + ", ".join(stale) if stale else "up to date")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
