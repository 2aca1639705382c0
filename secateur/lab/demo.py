"""The demo: one small GPT trained dense, pruned by magnitude and pruned by Adam's variance, as a table and a page."""

from __future__ import annotations

import html
import math
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import DEMO_EXTRA, library
from secateur.files import write
from secateur.integrations.text import VOCABULARY, standard_library
from secateur.lab.config import Experiment
from secateur.lab.data import Tokens
from secateur.lab.figures import COLUMN, WIDTH, block, document, figure, warning_box
from secateur.lab.monitor import CpuLoad, LoadMeter, cpu_load, threads_for
from secateur.lab.trainer import Callback, Execution, ShowProgress, Trainer
from secateur.pruner import Pruner
from secateur.report import Report, heat_map, html_table, text_table
from secateur.selection.exact import CHUNK

DENSE = Experiment(
    model="gpt-4x128x4", data="python", context=64, steps=450, batch=20, lr=3e-3, warmup=40, beta2=0.99,
    evaluate_every=25, evaluation=128,
)  # fmt: skip
SPARSITY = 0.8
RAMP: dict[str, Any] = {"schedule": "late_cubic", "every": 10}
SCORES = ("magnitude", "variance")
HEADER = ("run", "perplexity", "vs dense", "sparsity", "of the model", "seconds")
SHOWN = ("run", "perplexity", "vs dense", "sparsity")  # on the page, where more would not fit a phone
COLOURS = {"dense": "#6b7280", "magnitude": "#d97706", "variance": "#2563eb"}
STAGES = ("#93c5fd", "#3b82f6", "#1e3a8a")  # of the histograms, from early to late
PROMPTS = ("import ", "class ", "def read(self", "    return ")
GENERATED = 80  # bytes after each prompt
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Snapshot:
    """Scores of the kept weights just before a mask update, as counts in bins of log10(score), and its cut."""

    step: int
    edges: list[float]
    counts: list[int]
    cut: float


@dataclass
class Run:
    """What one of the three trainings leaves behind."""

    name: str
    loss: list[float] = field(default_factory=list)  # of every step
    sparsity: list[float] = field(default_factory=list)  # after every step
    held_out: list[tuple[int, float]] = field(default_factory=list)  # step, mean loss in nats per byte
    snapshots: list[Snapshot] = field(default_factory=list)
    report: Report | None = None
    seconds: float = 0.0
    texts: list[str] = field(default_factory=list)  # the trained model's continuation of each prompt

    @property
    def perplexity(self) -> float:
        return math.exp(self.held_out[-1][1])


class Recorder(Callback):
    """Collects a run's numbers and three histograms of its scores."""

    def __init__(self, run: Run, experiment: Experiment) -> None:
        self.run, every = run, experiment.every
        begin, end = experiment.begin_step, experiment.end_step
        self._watched = {int(begin + (end - begin) * part / 4) // every * every for part in (2, 3, 4)}
        self._scores: tuple[list[float], list[int]] | None = None

    def before_masks(self, trainer: Trainer) -> None:
        if trainer.progress.step + 1 in self._watched and trainer.pruner is not None:
            self._scores = histogram(trainer.pruner)

    def after_step(self, trainer: Trainer, loss: Tensor, evaluation: dict[str, float] | None) -> None:
        step = trainer.progress.step
        self.run.loss.append(float(loss))
        self.run.sparsity.append(trainer.sparsity)
        if evaluation is not None:
            self.run.held_out.append((step, evaluation["held_out_loss"]))
        if self._scores is not None and trainer.pruner is not None:
            cut = trainer.pruner.report().tensors[0].cut or 0.0
            self.run.snapshots.append(Snapshot(step, *self._scores, cut))
            self._scores = None


@torch.no_grad()
def histogram(pruner: Pruner, bins: int = 120) -> tuple[list[float], list[int]]:
    """Edges and counts of equal bins of log10(score), over the kept weights with a positive score."""
    logs = []
    for piece in pruner.pieces():
        for start in range(0, piece.numel, CHUNK):
            where = slice(start, min(start + CHUNK, piece.numel))
            scores = piece.score(where)
            kept = scores if piece.alive is None else scores[piece.alive[where]]
            logs.append(kept[kept > 0].log10().cpu())
    values = torch.cat(logs)
    low = float(values.kthvalue(1 + values.numel() // 2000).values)  # leaves out the long tail of tiny scores
    high = float(values.max())
    counts = torch.histc(values, bins, low, high)
    return torch.linspace(low, high, bins + 1).tolist(), [int(count) for count in counts]


def train(experiment: Experiment, execution: Execution, data: Tokens) -> Run:
    """One of the three trainings."""
    run = Run(experiment.score or "dense")
    trainer = Trainer(experiment, execution, data, [Recorder(run, experiment), ShowProgress(run.name)])
    trainer.train()
    run.report = trainer.pruner.report() if trainer.pruner else None
    run.seconds = trainer.progress.seconds
    model = trainer.bare_model()
    run.texts = [generate(model, text, experiment.context, GENERATED, seed) for seed, text in enumerate(PROMPTS)]
    return run


@torch.no_grad()
def generate(model: nn.Module, prompt: str, context: int, count: int, seed: int = 0) -> str:
    """The `count` bytes that a byte-level model writes after a prompt, sampled; the same again for the same seed."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    tokens = list(prompt.encode())
    for _ in range(count):
        logits = model(torch.tensor([tokens[-context:]], device=device))[0, -1].float().cpu()
        tokens.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)))
    return bytes(tokens[-count:]).decode(errors="replace")


def demo(out: Path, steps: int | None = None) -> list[Run]:
    """Train the three networks, print the table to stdout (progress goes to stderr), write the page."""
    for name in ("accelerate", "matplotlib", "psutil"):
        library(name, "The demo", DEMO_EXTRA)  # now, not after minutes of training
    began = time.perf_counter()
    dense = DENSE if steps is None else replace(DENSE, steps=steps)
    experiments = [dense, *(replace(dense, score=score, sparsity=SPARSITY, **RAMP) for score in SCORES)]
    execution = Execution(cpu=not torch.cuda.is_available())
    corpus = standard_library()
    data = Tokens(corpus.train, corpus.held_out, VOCABULARY, "python")
    load = cpu_load()
    about = (
        f"A GPT with 4 layers of width 128 reads the standard library of Python {platform.python_version()}"
        f" ({corpus.train.numel() / 1e6:.1f} MB in {corpus.files[0]} files) byte by byte for {dense.steps} steps, and"
        f" is evaluated on {corpus.files[1]} files it never saw. All runs have the same initial weights, data and"
        " steps; only the score differs."
    )
    print(about, file=sys.stderr)
    with threads_for(load) as why:
        device = "cpu" if execution.cpu else torch.cuda.get_device_name()
        ran_on = f"Ran on {device}; {why}; torch {torch.__version__}; seed {dense.seed}"
        print(f"secateur: {ran_on}", file=sys.stderr)
        if load.warning:
            print(f"secateur: {load.warning}", file=sys.stderr)
        meter = LoadMeter()
        runs = [train(experiment, execution, data) for experiment in experiments]
        load = max(load, meter.load(), key=lambda one: one.used)
    rows = table(runs)
    print(f"{headline(runs)}\n\n{text_table(HEADER, rows)}")
    write(out, render(runs, rows, about, ran_on, load))
    print(f"\nReport: {out.resolve()}  ({time.perf_counter() - began:.0f} s in all)")
    return runs


def above_dense(run: Run, dense: Run) -> list[tuple[int, float]]:
    """By how many percent the perplexity of a run exceeds that of the dense one, at each evaluation."""
    pairs = zip(run.held_out, dense.held_out, strict=True)
    return [(step, 100 * math.expm1(loss - other)) for (step, loss), (_, other) in pairs]


def headline(runs: Sequence[Run]) -> str:
    """The result in one line, the best score first."""
    dense, *pruned = runs
    costs = sorted((above_dense(run, dense)[-1][1], run.name) for run in pruned)
    (first, name), *others = costs
    rest = "".join(f", {cost:+.1f} % by {other}" for cost, other in others)
    sparsity = max(run.sparsity[-1] for run in pruned)
    return f"{100 * sparsity:.0f} % gone: {first:+.1f} % perplexity by {name}{rest}"


def table(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """The rows under HEADER."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        of_prunable, of_model = (run.report.sparsity, run.report.model_sparsity) if run.report else (0.0, 0.0)
        cost = f"{above_dense(run, runs[0])[-1][1]:+.1f}%" if run is not runs[0] else "-"
        rows.append(
            (run.name, f"{run.perplexity:.3f}", cost, f"{of_prunable:.2%}", f"{of_model:.2%}", f"{run.seconds:.0f}")
        )
    return rows


def render(runs: Sequence[Run], rows: Sequence[Sequence[str]], about: str, ran_on: str, load: CpuLoad) -> str:
    """The page."""
    dense, *pruned = runs
    figures = [
        block(
            "Distance from dense",
            "Held-out perplexity above that of the dense run at the same step. Grey: how many weights are pruned.",
            _distance(runs),
        )
    ]
    text = "Each run has one cut for the whole model, so layers lose different shares."
    figures.append(block("Sparsity by layer", text, _heat_maps(pruned)))
    for run in pruned:
        if run.snapshots:
            text = "Scores of the kept weights at three mask updates. Those left of the dashed cut are pruned."
            figures.append(block(f"Scores and cuts: {run.name}", text, _histograms(run)))
    texts = "".join(
        f"<figure><h2>{html.escape(label)}</h2><pre>{_continued(run.texts)}</pre></figure>"
        for label, run in [("Dense", dense), *((f"Pruned by {run.name}", run) for run in pruned)]
    )
    parts = [
        warning_box(load.warning),
        f"<p>{html.escape(about)}</p>",
        html_table(*_columns(SHOWN, rows)),
        "<h2>What they write</h2><p>Each model continues the words in bold, byte by byte, with the same random numbers."
        f'</p><div style="{COLUMN.format(300)}">{texts}</div>',
    ]
    times = ", ".join(f"{run.name} {run.seconds:.0f} s" for run in runs)
    footer = html.escape(
        f"Training took: {times}. {ran_on}. One seed and one small model: an illustration, not a result."
    )
    return document(headline(runs), parts, figures, footer)


def _continued(texts: Sequence[str]) -> str:
    """Prompts in bold with their continuations, as HTML."""
    pairs = zip(PROMPTS, texts, strict=True)
    return "\n\n".join(f"<b>{html.escape(prompt)}</b>{html.escape(text.rstrip())}" for prompt, text in pairs)


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """These columns of the table."""
    places = [HEADER.index(name) for name in names]
    return names, [[row[place] for place in places] for row in rows]


def _heat_maps(runs: Sequence[Run]) -> str:
    """A heat map for each pruned run, with the same colours for the same sparsity."""
    found = {run.name: [(row.name, row.sparsity) for row in run.report.tensors] for run in runs if run.report}
    values = [sparsity for rows in found.values() for _, sparsity in rows]
    limits = min(values), max(values)
    maps = "".join(f"<div><b>{html.escape(name)}</b>{heat_map(rows, limits)}</div>" for name, rows in found.items())
    return f'<div style="{COLUMN.format(170)}">{maps}</div>'


def _distance(runs: Sequence[Run]) -> str:
    dense, *pruned = runs

    def draw(axes: Any) -> None:
        for run in pruned:
            line, colour = above_dense(run, dense), COLOURS.get(run.name, "#7c3aed")
            axes.plot(*zip(*line, strict=True), "o-", color=colour, label=run.name, markersize=3)
            axes.annotate(f"{line[-1][1]:+.1f} %", line[-1], (5, -3), textcoords="offset points", color=colour)
        axes.axhline(0, color=COLOURS["dense"], linewidth=1.2)
        axes.annotate("dense", (1, 0), (5, 3), textcoords="offset points", color=COLOURS["dense"])
        axes.set(xlabel="step", ylabel="perplexity above dense, %", xlim=(0, 1.14 * len(dense.loss)))
        share = axes.twinx()
        share.fill_between(range(1, len(dense.loss) + 1), pruned[-1].sparsity, color="#e5e7eb", linewidth=0)
        share.set(ylim=(0, 1), yticks=[])
        share.spines[:].set_visible(False)
        axes.set_zorder(share.get_zorder() + 1)
        axes.patch.set_visible(False)
        axes.legend(frameon=False, loc="upper left")

    return figure(draw, width=WIDTH, height=2.9)


def _histograms(run: Run) -> str:
    def draw(axes: Any) -> None:
        for snapshot, colour in zip(run.snapshots, STAGES, strict=False):
            axes.stairs(snapshot.counts, snapshot.edges, color=colour, fill=True, alpha=0.35)
            axes.stairs(snapshot.counts, snapshot.edges, color=colour, label=f"step {snapshot.step}")
            if snapshot.cut > 0:
                axes.axvline(math.log10(snapshot.cut), color=colour, linestyle="--", linewidth=1.4)
        axes.set(xlabel=f"log10 of the {run.name} score", ylabel="weights")
        axes.legend(frameon=False, loc="upper left")

    return figure(draw, width=WIDTH, height=2.6)
