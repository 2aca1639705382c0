"""One training run: the same weights, data and steps for every score, so that only the score differs."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional

from secateur.files import write
from secateur.integrations.text import VOCABULARY, Corpus, standard_library
from secateur.lab import page
from secateur.lab.models import GPT, GPTShape
from secateur.pruner import Pruner
from secateur.report import Report, text_table
from secateur.schedules import late_cubic
from secateur.selection.exact import CHUNK


@dataclass(frozen=True)
class Plan:
    """Everything a run depends on but its score."""

    shape: GPTShape
    steps: int = 450
    batch: int = 20
    learning_rate: float = 3e-3
    warmup: int = 40
    weight_decay: float = 0.1
    sparsity: float = 0.8
    every: int = 10
    evaluate_every: int = 50
    windows: int = 128
    seed: int = 0
    device: str = "cpu"

    @property
    def ramp(self) -> tuple[int, int]:
        """Pruning begins after a tenth of the steps and is done after eight tenths; the rest is recovery."""
        return self.steps // 10, self.steps * 8 // 10

    def rate(self, step: int) -> float:
        """Learning rate of a step (from 1): linear warm-up, then a cosine to a tenth."""
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class Snapshot:
    """Scores of the living weights just before an update, as counts in bins of log10(score), and the cut it made."""

    step: int
    edges: list[float]
    counts: list[int]
    cut: float


@dataclass
class Run:
    """What a run leaves behind."""

    name: str
    loss: list[float] = field(default_factory=list)  # every training step
    sparsity: list[float] = field(default_factory=list)  # after every training step
    held_out: list[tuple[int, float]] = field(default_factory=list)  # step, mean loss in nats per token
    snapshots: list[Snapshot] = field(default_factory=list)
    report: Report | None = None
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        return math.exp(self.held_out[-1][1])


def train(plan: Plan, corpus: Corpus, score: str | None, progress: Callable[[Run, int], None]) -> Run:
    """Train a GPT, pruned by `score` (None: dense). `progress` is told after every step."""
    torch.manual_seed(plan.seed)
    model = GPT(plan.shape).to(plan.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=plan.weight_decay)
    begin, end = plan.ramp
    schedule = late_cubic(plan.sparsity, begin=begin, end=end)
    pruner = Pruner(model, optimizer, score=score, sparsity=schedule, every=plan.every) if score else None
    watched = {(begin + (end - begin) * part // 4) // plan.every * plan.every for part in (2, 3, 4)}
    run = Run(score or "dense")
    data = batches(corpus.train, plan.batch, plan.shape.context, plan.seed)
    began = time.perf_counter()
    for step in range(1, plan.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step)
        loss = _loss(model, next(data).to(plan.device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if pruner is not None:
            watch = histogram(pruner) if step in watched else None
            pruner.step()
            if watch is not None:
                run.snapshots.append(Snapshot(step, *watch, cut=pruner.report().tensors[0].cut or 0.0))
        run.loss.append(float(loss.detach()))
        run.sparsity.append(pruner.sparsity if pruner else 0.0)
        if step % plan.evaluate_every == 0 or step == plan.steps:
            run.held_out.append((step, evaluate(model, plan, corpus)))
        progress(run, step)
    run.seconds = time.perf_counter() - began
    run.report = pruner.report() if pruner else None
    return run


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, plan: Plan, corpus: Corpus) -> float:
    """Mean loss per token over a fixed set of held-out windows."""
    parts = windows(corpus.held_out, plan.batch, plan.shape.context, plan.windows)
    totals = [(float(_loss(model, part.to(plan.device))) * len(part), len(part)) for part in parts]
    return sum(total for total, _ in totals) / sum(count for _, count in totals)


@torch.no_grad()
def histogram(pruner: Pruner, bins: int = 120) -> tuple[list[float], list[int]]:
    """How the positive scores of living weights are spread, in equal bins of their logarithm."""
    logs = []
    for piece in pruner.pieces():
        for start in range(0, piece.numel, CHUNK):
            where = slice(start, min(start + CHUNK, piece.numel))
            scores = piece.score(where)
            living = scores if piece.alive is None else scores[piece.alive[where]]
            logs.append(living[living > 0].log10().cpu())
    values = torch.cat(logs)
    low, high = float(values.kthvalue(1 + values.numel() // 2000).values), float(values.max())  # spare the long tail
    counts = torch.histc(values, bins, low, high)
    edges = torch.linspace(low, high, bins + 1)
    return edges.tolist(), [int(count) for count in counts]


def batches(tokens: Tensor, batch: int, context: int, seed: int) -> Iterator[Tensor]:
    """Random windows of context + 1 tokens, for ever; the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(0, tokens.numel() - context, (batch, 1), generator=draw)
        yield tokens[starts + offsets].long()


def windows(tokens: Tensor, batch: int, context: int, count: int) -> Iterator[Tensor]:
    """`count` windows spread evenly over the tokens, none overlapping if there is room; always the same ones."""
    starts = torch.linspace(0, tokens.numel() - context - 1, count).long()[:, None]
    yield from tokens[starts + torch.arange(context + 1)].long().split(batch)


SCORES = (None, "magnitude", "variance")
HEADER = ("run", "held-out perplexity", "sparsity (prunable)", "sparsity (model)", "seconds")


def demo(out: Path, steps: int | None = None) -> list[Run]:
    """Train the three networks, print the table to stdout (progress goes to stderr), write the page."""
    began = time.perf_counter()
    device, why = ("cuda", "a GPU is there") if torch.cuda.is_available() else ("cpu", "no GPU is there")
    plan = Plan(GPTShape(VOCABULARY), device=device)
    plan = plan if steps is None else replace(plan, steps=steps)
    corpus = standard_library()
    weights = sum(parameter.numel() for parameter in GPT(plan.shape).parameters())
    facts = (
        f"A GPT of {weights:,} weights reads the standard library of Python {platform.python_version()}"
        f" ({corpus.train.numel() / 1e6:.1f} MB in {corpus.files[0]} files) byte by byte for {plan.steps} steps on"
        f" {device} ({why}), and is judged on {corpus.files[1]} files it never saw. torch {torch.__version__},"
        f" seed {plan.seed}: same start, same data, same steps; only the score differs."
    )
    console = Console(stderr=True)
    console.print(facts, highlight=False)
    runs = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        for score in SCORES:
            name = score or "dense"
            task = bars.add_task(f"{name:10}", total=plan.steps)

            def tell(run: Run, step: int, task: object = task, name: str = name) -> None:
                text = f"{name:10} loss {run.loss[-1]:.2f}, {run.sparsity[-1]:4.0%} gone"
                bars.update(task, completed=step, description=text)  # type: ignore[arg-type]

            runs.append(train(plan, corpus, score, tell))
    rows = [row(run) for run in runs]
    print(text_table(HEADER, rows))
    write(out, page.render(plan, runs, HEADER, rows, facts))
    print(f"\nReport: {out.resolve()}  ({time.perf_counter() - began:.0f} s in all)")
    return runs


def row(run: Run) -> tuple[str, ...]:
    """A run as a row under HEADER."""
    report = run.report
    prunable, model = (report.sparsity, report.model_sparsity) if report else (0.0, 0.0)
    return run.name, f"{run.perplexity:.3f}", f"{prunable:.4%}", f"{model:.4%}", f"{run.seconds:.1f}"
