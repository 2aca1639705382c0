"""The campaign: which way to prune while fine-tuning is best, measured with what `secateur finetune` runs.

    python -m tools.finetune_campaign --wiki FOLDER --wikitext FILE --other FILE [--models smollm2 ...] [--minutes 60]

Trains on Wikipedia, judges on WikiText-2 (in domain) and on another text (out of domain). Each cell is one run of
`secateur.integrations.finetune`; a record is written after each, and the next call continues where the last stopped.
The first cells choose learning rates, and later ones use the best: docs/finetune.md has the grid and the table. The
second half of this file makes that table, the bars under it and the figure from the record; `python -m tools.results`
draws the figure, `python -m tools.tables` writes the rest.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from secateur.cli.prune import RECOMMENDED, read_recipe
from secateur.errors import library
from secateur.files import write
from secateur.integrations.evaluation import perplexity
from secateur.integrations.finetune import Execution, Plan, finetune
from secateur.integrations.finetune_checkpoints import remove_checkpoints
from secateur.integrations.finetune_data import split_windows
from secateur.integrations.folder import load
from secateur.integrations.text import read_text, token_pieces
from secateur.lab.compare_page import COLOURS
from secateur.lab.figures import figure
from tools.cells import Cell, Cells, by

THEME = "finetune-campaign"
RATES = (3e-4, 1e-3, 3e-3)
SEEDS = (0, 1, 2)
SHORT, LONG = 5_000_000, 20_000_000  # tokens
MAIN, LEVELS = 0.8, (0.5, 0.6, 0.7, 0.9)
HEADER = (
    "model", "sparsity", "tokens", "way", "learning rate", "seeds", "in domain", "times dense", "out of domain",
    "times dense",
)  # fmt: skip
DENSE_LOSS = {"alpha 1": {"alpha": 1.0}, "cross entropy": {"distill": False}}


@dataclass(frozen=True)
class Way:
    """How to prune, as options of a plan."""

    how: str = "gradual"
    score: str = "variance"
    pruning: tuple[tuple[str, Any], ...] = ()
    distill: bool = True
    alpha: float = 0.9


VARIANCE, BY_LAYER, ONESHOT = "variance", "magnitude by layer", "one-shot, retrained"
WAYS: dict[str, Way] = {
    VARIANCE: Way(),
    "bitter3": Way(score="bitter3"),
    BY_LAYER: Way(score="magnitude", pruning=(("scope", "layer"),)),
    "movement": Way(score="movement"),
    ONESHOT: Way(how="oneshot"),
    "bitter7": Way(score="bitter7"),
    "bitter8": Way(score="bitter8"),
    "fisher": Way(score="fisher"),
    "magnitude by model": Way(score="magnitude"),
}
TUNED = (VARIANCE, "bitter3", BY_LAYER, "movement", ONESHOT)  # each with its own learning rate
OTHERS = ("bitter7", "bitter8", "fisher", "magnitude by model")  # at the learning rate of variance
ADAM = (VARIANCE, "bitter3", "bitter7", "bitter8", "fisher")
MAGNITUDE = (BY_LAYER, "magnitude by model")
for _name in (VARIANCE, ONESHOT):  # other losses, and regrowth, for what may win
    for _loss, _changes in DENSE_LOSS.items():
        WAYS[f"{_name}, {_loss}"] = replace(WAYS[_name], **_changes)
WAYS[f"{VARIANCE}, RigL"] = Way(pruning=(("regrow", "gradient"),))


@dataclass(frozen=True)
class Job:
    """One cell: what is run."""

    model: str
    way: str
    sparsity: float
    tokens: int
    lr: float
    seed: int


KEY = ("model", "way", "sparsity", "tokens", "lr", "seed")


def key(cell: Mapping[str, Any]) -> list[Any]:
    return [cell[name] for name in KEY]


def mean_of(cells: Sequence[Cell], measure: str = "after") -> float:
    """Geometric mean over seeds; infinity if a run diverged."""
    values = [cell[measure] for cell in cells]
    if not values or not all(value and math.isfinite(value) for value in values):
        return math.inf
    return math.exp(fmean(map(math.log, values)))


def best_rate(cells: Sequence[Cell], model: str, way: str) -> float | None:
    """The learning rate of lowest perplexity at 80 % and the short budget, seed 0; None until all were tried."""
    mine = {cell["lr"]: cell for cell in cells if key(cell)[:4] == [model, way, MAIN, SHORT] and cell["seed"] == 0}
    return min(RATES, key=lambda rate: mean_of([mine[rate]])) if set(RATES) <= mine.keys() else None


def ranked(cells: Sequence[Cell], model: str, ways: Sequence[str]) -> list[str]:
    """These ways, best first, by their lowest mean perplexity at 80 % and the short budget."""
    found = by([cell for cell in cells if (cell["model"], cell["sparsity"], cell["tokens"]) == (model, MAIN, SHORT)],
               "way", "lr")  # fmt: skip
    best = {way: min((mean_of(some) for (name, _), some in found.items() if name == way), default=math.inf)
            for way in ways}  # fmt: skip
    return sorted((way for way in ways if best[way] < math.inf), key=best.__getitem__)


def grid(cells: Sequence[Cell], model: str, whole: bool = True) -> Iterator[Job]:
    """All cells of a model, as far as the results at hand decide them. `whole`: also what comes after the seeds."""
    tuned = TUNED if whole else (VARIANCE, BY_LAYER, ONESHOT)
    yield from (Job(model, way, MAIN, SHORT, rate, 0) for way in tuned for rate in RATES)
    rates = {way: rate for way in tuned if (rate := best_rate(cells, model, way)) is not None}
    if len(rates) < len(tuned):
        return
    yield from (Job(model, way, MAIN, SHORT, rates[way], seed) for way in tuned for seed in SEEDS[1:])
    if whole:
        yield from _losses_and_scores(model, rates)
        yield from _levels(cells, model, rates)


def rate_of(way: str, rates: Mapping[str, float]) -> float:
    """The learning rate that was chosen for a way, or for the one it is a form of."""
    return rates.get(way, rates[ONESHOT if way.startswith(ONESHOT) else VARIANCE])


def _losses_and_scores(model: str, rates: Mapping[str, float]) -> Iterator[Job]:
    """Further scores with one seed; other losses and regrowth with all."""
    yield from (Job(model, way, MAIN, SHORT, rate_of(way, rates), 0) for way in OTHERS)
    forms = [way for way in WAYS if way not in (*TUNED, *OTHERS)]
    yield from (Job(model, way, MAIN, SHORT, rate_of(way, rates), seed) for way in forms for seed in SEEDS)


def _levels(cells: Sequence[Cell], model: str, rates: Mapping[str, float]) -> Iterator[Job]:
    """The best of each kind at other sparsities, and the two best of all on more tokens."""
    chosen = [*ranked(cells, model, ADAM)[:1], *ranked(cells, model, MAGNITUDE)[:1], ONESHOT]
    yield from (Job(model, way, level, SHORT, rate_of(way, rates), 0) for level in LEVELS for way in chosen)
    best = ranked(cells, model, list(WAYS))[:2]
    yield from (Job(model, way, level, LONG, rate_of(way, rates), 0) for way in best for level in (MAIN, 0.9))


@dataclass(frozen=True)
class Setting:
    """Where texts are, and the sizes that depend on the machine."""

    train: Path
    inside: Path
    outside: Path
    work: Path
    context: int = 1024
    batch: int = 16
    evaluation: int = 192
    calibration: int = 128
    on_cpu: bool = False
    bf16: bool = True
    scale: float = 1.0  # of all tokens, for a trial
    checkpoint_every: int = 100

    def plan(self, job: Job) -> Plan:
        way = WAYS[job.way]
        steps = max(1, round(job.tokens * self.scale / (self.context * self.batch)))
        recipe = asdict(read_recipe(RECOMMENDED)) | {"score": way.score} if way.how == "oneshot" else {}
        return Plan(
            model=job.model, data=str(self.train), eval_data=str(self.inside), how=way.how, sparsity=job.sparsity,
            score=way.score, recipe=recipe, distill=way.distill, alpha=way.alpha, teacher=None, lora=False, steps=steps,
            batch=self.batch, accumulate=1, context=self.context, calibration=self.calibration,
            evaluation=self.evaluation, lr=job.lr, seed=job.seed, dtype="float32", bf16=self.bf16,
            pruning=dict(way.pruning),
        )  # fmt: skip


def windows(tokenizer: Any, text: Path, context: int, most: int) -> Tensor:
    """The first windows of a text."""
    return torch.stack(list(islice(split_windows(token_pieces(tokenizer, read_text(text)), context), most)))


def measure(job: Job, setting: Setting) -> Cell:
    """One run, judged on both texts; an interrupted one goes on from its checkpoint."""
    folder = setting.work / "-".join(str(part) for part in key(asdict(job))).replace("/", "-").replace(" ", "-")
    execution = Execution(folder=folder, on_cpu=setting.on_cpu, checkpoint_every=setting.checkpoint_every, tracker=None)
    began, plan = time.perf_counter(), setting.plan(job)
    result = finetune(plan, execution)
    assert result is not None, "the campaign runs in one process"
    seconds = time.perf_counter() - began
    other = windows(result.tokenizer, setting.outside, setting.context, setting.evaluation)
    found = {
        "before": result.before,
        "after": result.after,
        "other": perplexity(result.model, other, batch=setting.batch),
        "achieved": result.report.sparsity,
        "steps": plan.steps,
        "trained": plan.steps * plan.batch * plan.context,
        "seconds": round(seconds, 1),
        "notes": list(result.notes),
    }
    remove_checkpoints(folder)
    return asdict(job) | found


def dense(model: str, setting: Setting) -> float:
    """The dense model's perplexity on the text out of domain."""
    loaded, tokenizer = load(model, packed=False)
    rows = windows(tokenizer, setting.outside, setting.context, setting.evaluation)
    device = "cpu" if setting.on_cpu else "cuda"
    return perplexity(loaded.to(device), rows, batch=setting.batch)


def decoded(folder: Path, out: Path, most: int | None = None) -> Path:
    """The text of a folder with train.bin (uint16) and tokenizer.json, written once."""
    if not out.exists():
        tokenizer = library("tokenizers", "Decoding the text", '"secateur[hf]"').Tokenizer.from_file(
            str(folder / "tokenizer.json")
        )
        size = (folder / "train.bin").stat().st_size // 2
        ids = torch.from_file(str(folder / "train.bin"), size=size, dtype=torch.uint16)[:most]
        part = out.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            for piece in ids.split(1 << 20):
                file.write(tokenizer.decode(piece.tolist()))
        part.replace(out)
    return out


def joined(source: Path, out: Path) -> Path:
    """The .txt files of a folder as one text, written once; a file unchanged."""
    if source.is_dir() and not out.exists():
        texts = [path.read_text(encoding="utf-8") for path in sorted(source.glob("*.txt"))]
        write(out, "\n\n".join(texts))
    return out if source.is_dir() else source


def due(cells: Cells, models: Sequence[str]) -> Job | None:
    """The next cell that is not on record: all of the first model, then the first stages of the others."""
    for number, model in enumerate(models):
        for job in grid(cells.found, model, whole=number == 0):
            if not cells.has(asdict(job)):
                return job
    return None


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


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wiki", type=Path, required=True, help="folder with train.bin and tokenizer.json, or a text")
    parser.add_argument("--wikitext", type=Path, required=True, help="text to judge on, in domain")
    parser.add_argument(
        "--other", type=Path, required=True, help="text, or folder of texts, to judge on, out of domain"
    )
    parser.add_argument("--models", nargs="+", default=["smollm2"], help="the first gets the whole grid (smollm2)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after so many (no limit)")
    parser.add_argument("--cells", type=int, default=sys.maxsize, help="run at most so many (all)")
    parser.add_argument(
        "--work", type=Path, default=Path("data-cache/campaign"), help="folder of texts and checkpoints"
    )
    parser.add_argument("--out", type=Path, help="folder of the record (benchmarks/results)")
    trial = parser.add_argument_group("for a trial; a record with other sizes needs another --out")
    trial.add_argument("--scale", type=float, default=1.0, help="share of all tokens (1)")
    trial.add_argument("--context", type=int, default=1024)
    trial.add_argument("--batch", type=int, default=16)
    trial.add_argument("--evaluation", type=int, default=192)
    trial.add_argument("--calibration", type=int, default=128)
    trial.add_argument("--cpu", action="store_true", help="on the CPU, without bf16")
    options = parser.parse_args(words)
    given = sys.argv[1:] if words is None else words
    options.invocation = f"python -m tools.finetune_campaign {shlex.join(given)}"
    for path in (options.wiki, options.wikitext, options.other):
        if not path.exists():
            parser.error(f"there is no {path}")
    if not options.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU. --cpu with small sizes tries the campaign on a CPU")
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = options_of(words)
    sizes = ("context", "batch", "evaluation", "calibration", "scale")
    options.work.mkdir(parents=True, exist_ok=True)
    train = decoded(options.wiki, options.work / "train.txt") if options.wiki.is_dir() else options.wiki
    outside_text = joined(options.other, options.work / "other.txt")
    setting = Setting(
        train, options.wikitext, outside_text, options.work, on_cpu=options.cpu, bf16=not options.cpu,
        **{name: getattr(options, name) for name in sizes},
    )  # fmt: skip
    about = {
        "sizes": {name: getattr(options, name) for name in sizes},
        "texts": [options.wikitext.name, options.other.name],
    }
    cells = Cells(THEME, key, options.out)
    if cells.path and (found := cells.about.get("sizes")) != about["sizes"]:
        raise SystemExit(
            f"{cells.path} was measured with {found}, not {about['sizes']}: name another folder with --out"
        )
    device = torch.device("cpu" if options.cpu else "cuda")
    end, begun = time.monotonic() + 60 * options.minutes, 0
    outside: dict[str, float] = {}
    while (job := due(cells, options.models)) is not None and begun < options.cells and time.monotonic() < end:
        if job.model not in outside:
            outside[job.model] = dense(job.model, setting)
        cells.add(measure(job, setting) | {"other_before": outside[job.model]}, about, options, device)
        last, begun = cells.found[-1], begun + 1
        print(f"{job}: {last['before']:.2f} -> {last['after']:.2f}, other {last['other']:.2f}", flush=True)
    print("finished" if job is None else f"next: {job}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
