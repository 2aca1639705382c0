"""`secateur demo`: a small GPT on Python's own source, dense and pruned to 80 % by two scores, at equal steps."""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from secateur.files import write
from secateur.integrations.corpus import VOCABULARY, standard_library
from secateur.lab import page
from secateur.lab.models import GPT, GPTShape
from secateur.lab.training import Plan, Run, train
from secateur.report import text_table

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
