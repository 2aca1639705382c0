"""Measure GPT-2 training with the lab's trainer, bf16 autocast and random tokens: dense and pruned, eager and compiled.

Each cell of the table is a mode (eager or compile) and a method, and runs in a process of its own: dense training, and
each score with torch's fused AdamW and with secateur's. The table shows the time of a step, peak memory, recompiles,
and how much time the pruner and the optimizer take. The bar: at most 1.01 times dense training. `secateur bench pace`
measures that overhead more precisely.

Example: secateur bench train --tiny --device cpu --modes eager --scores variance
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.bench.measuring import against, kind, ratio, synchronize
from secateur.errors import HF_EXTRA, SecateurError, library
from secateur.lab import record
from secateur.lab.config import Experiment
from secateur.lab.data import Tokens
from secateur.lab.monitor import Stopwatch
from secateur.lab.trainer import Execution, Trainer
from secateur.pruner import Pruner
from secateur.report import text_table
from secateur.scores import resolve

MODES = ("eager", "compile")
DENSE = "dense"
OWN = "-own"  # ends the name of a method that steps with secateur's AdamW; the others use torch's fused AdamW
OPTIMIZERS = {"torch": "", "secateur": OWN}
BAR = 1.01  # times dense training
SHARES = {"optimizer": "optimizer", "pruner": "masks"}  # name in the record -> part that the stopwatch times
DEFAULTS = {"full": {"batch": 16, "steps": 200, "every": 50}, "tiny": {"batch": 2, "steps": 6, "every": 3}}


@dataclass(frozen=True)
class Plan:
    """What all cells share."""

    device: str
    tiny: bool
    batch: int
    steps: int
    every: int
    sparsity: float = 0.5
    seed: int = 0

    @property
    def tokens(self) -> int:
        return 32 if self.tiny else 1024

    @property
    def vocabulary(self) -> int:
        return 256 if self.tiny else 50304

    @property
    def last_step(self) -> int:
        """Two periods of warm-up, the timed steps, one period of profiling; each period ends with a mask update."""
        return 2 * self.every + self.steps + self.every


def methods_of(scores: Sequence[str], optimizers: Sequence[str]) -> list[str]:
    """Names of the methods besides dense: every score with every optimizer."""
    return [f"{resolve(score)}{OPTIMIZERS[optimizer]}" for score in scores for optimizer in optimizers]


def label(mode: str, method: str) -> str:
    """A row of a table."""
    return f"{mode}, {method.removesuffix(OWN)}, secateur.optim.AdamW" if method.endswith(OWN) else f"{mode}, {method}"


def experiment_of(plan: Plan, mode: str, method: str) -> Experiment:
    """What `secateur train` would be given for this cell: bf16 autocast, a constant learning rate, no clipping."""
    settings: dict[str, Any] = {"score": method.removesuffix(OWN), "sparsity": plan.sparsity}
    # The ramp lasts to the last step: an update that asks for no more than the one before would do nothing.
    settings |= {"schedule": "linear", "begin": 0.0, "end": 1.0, "every": plan.every}
    return Experiment(
        model="gpt-2x64" if plan.tiny else "gpt2",
        seed=plan.seed,
        steps=plan.last_step,
        batch=plan.batch,
        context=plan.tokens,
        optimizer="adamwprune" if method.endswith(OWN) else "adamw",
        lr=1e-4,
        warmup=0,
        final_lr=1.0,
        clip=0.0,
        precision="bf16",
        compile=mode == "compile",
        **({} if method == DENSE else settings),
    )


class RandomTokens(Tokens):
    """Random tokens, made on the device, so that reading data takes no time; the same in every cell."""

    @classmethod
    def for_plan(cls, plan: Plan) -> RandomTokens:
        held_out = torch.zeros(plan.tokens + 1, dtype=torch.int64)  # never evaluated
        return cls(torch.empty(0, dtype=torch.int64, device=plan.device), held_out, plan.vocabulary, "random tokens")

    def batch(self, step: int, size: int, context: int, seed: int) -> Tensor:
        device = self.train.device
        generator = torch.Generator(device).manual_seed(seed + step)
        return torch.randint(self.vocabulary, (size, context + 1), device=device, generator=generator)

    def fingerprint(self) -> str:
        return self.name  # nothing to read, and what is on a GPU cannot be hashed


class Training:
    """The lab's trainer on random tokens, with times."""

    def __init__(self, plan: Plan, mode: str, method: str) -> None:
        self.device = torch.device(plan.device)
        if self.device.type != "cpu":
            os.environ["ACCELERATE_TORCH_DEVICE"] = plan.device  # Accelerate would take the first GPU
        execution = Execution(cpu=self.device.type == "cpu", micro_batch=plan.batch)
        self.trainer = Trainer(experiment_of(plan, mode, method), execution, RandomTokens.for_plan(plan))
        self.trainer.stopwatch.every = 0  # no syncs in timed steps
        self.weights = sum(parameter.numel() for parameter in self.trainer.model.parameters())
        self.losses: list[Tensor] = []

    @property
    def pruner(self) -> Pruner | None:
        return self.trainer.pruner

    def run(self, steps: int) -> None:
        """Train for some steps."""
        self.losses += [self.trainer.step() for _ in range(steps)]

    def seconds(self, steps: int) -> float:
        """Time of some steps together, with a sync before and after but none in between."""
        synchronize(self.device)
        began = time.perf_counter()
        self.run(steps)
        synchronize(self.device)
        return time.perf_counter() - began

    def shares(self, steps: int) -> dict[str, float]:
        """Fractions of the time spent in optimizer and pruner, in a separate pass with a sync after each part."""
        self.trainer.stopwatch = stopwatch = Stopwatch(self.device, every=1)
        whole = self.seconds(steps)
        stopwatch.every = 0
        return {name: stopwatch.seconds[part] / whole for name, part in SHARES.items()}


def compiled_frames() -> int:
    """Frames that Dynamo has compiled in this process, recompilations included."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["total"])


def measure(plan: Plan, mode: str, method: str) -> dict[str, Any]:
    """One cell: warm up over two mask updates, time the steps, then profile one more period."""
    training = Training(plan, mode, method)
    gpu = training.device.type == "cuda"
    training.run(plan.every)
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # memory that only compilation needed
    training.run(plan.every)
    synchronize(training.device)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    frames = compiled_frames()
    seconds = training.seconds(plan.steps)
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if gpu else (None, None)
    recompiles = compiled_frames() - frames
    shares = training.shares(plan.every)
    losses = torch.stack(training.losses).float()
    return {
        "mode": mode,
        "method": method,
        "weights": training.weights,
        "seconds": seconds,
        "step_ms": seconds / plan.steps * 1e3,
        "tokens_per_second": plan.steps * plan.batch * plan.tokens / seconds,
        "peak_allocated": peaks[0],
        "peak_reserved": peaks[1],
        "recompiles": recompiles,
        "shares": shares,
        "losses": [float(losses[0]), float(losses[-1])],
        "finite": bool(losses.isfinite().all()),
        **pruned_as_asked(training.pruner, plan.sparsity),
    }


def pruned_as_asked(pruner: Pruner | None, sparsity: float) -> dict[str, Any]:
    """What was pruned, and whether that is exactly the sparsity asked for; dense training is always exact."""
    if pruner is None:
        return {"prunable": None, "pruned": 0, "exact": True, "updates": 0}
    report = pruner.report()
    return {
        "prunable": report.prunable,
        "pruned": report.pruned,
        "exact": report.pruned == round(sparsity * report.prunable) and math.isclose(report.asked, sparsity),
        "updates": len(report.updates),
    }


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan these options describe, checked."""
    chosen = {
        name: getattr(options, name) or value for name, value in DEFAULTS["tiny" if options.tiny else "full"].items()
    }
    plan = Plan(str(options.device), options.tiny, **chosen, sparsity=options.sparsity, seed=options.seed)
    if kind(options.device) == "cpu" and not plan.tiny:
        print("secateur: GPT-2 on a CPU takes hours; --tiny takes a minute", file=sys.stderr)
    if plan.steps % plan.every:
        raise SecateurError(
            f"--steps {plan.steps} must be a multiple of --every {plan.every}: whole periods are timed."
        )
    if not plan.tiny:
        library("transformers", "GPT-2", HF_EXTRA)  # fail before anything starts
    return plan


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    plan = plan_of(options)
    order = [DENSE, *methods_of(options.scores, options.optimizers), *[DENSE] * (options.repeats - 1)]
    with tempfile.TemporaryDirectory() as folder:
        cells = [_in_own_process(plan, mode, method, Path(folder)) for mode in options.modes for method in order]
    data = {"seed": plan.seed, "plan": asdict(plan), "tokens": plan.tokens, "cells": cells}
    print(text_table(*table(cells)), end="\n\n")
    theme = "train" if set(options.modes) == set(MODES) else f"train-{options.modes[0]}"
    print(record.save(theme, data, options, options.device))
    return 0


def _in_own_process(plan: Plan, mode: str, method: str, folder: Path) -> dict[str, Any]:
    """Measure a cell in a new process, so that no memory and no compiled graph of another cell is there."""
    print(f"secateur: {mode}, {method} ...", file=sys.stderr)
    task = json.dumps({"plan": asdict(plan), "mode": mode, "method": method, "out": str(folder / "cell.json")})
    shared = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    path = os.pathsep.join([str(record.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **shared, "PYTHONPATH": path}
    command = [sys.executable, "-m", "secateur.bench.train", "--cell", task]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SecateurError(f"The cell {mode}, {method} failed:\n{done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
    print(f"secateur:   {found['step_ms']:.2f} ms per step, {found['recompiles']} recompiles", file=sys.stderr)
    return found


def one_cell(task: str) -> None:
    """Measure one cell and write it to a file, in the new process."""
    wanted = json.loads(task)
    found = measure(Plan(**wanted["plan"]), wanted["mode"], wanted["method"])
    Path(wanted["out"]).write_text(json.dumps(found), encoding="utf-8")


def table(cells: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows; each mode is compared with its own dense cells."""
    columns = (
        "ms per step",
        "to dense",
        f"bar {BAR}x",
        "tokens/s",
        "allocated MiB",
        "reserved MiB",
        "bytes/weight to dense",
    )
    header = ("mode, method", *columns, "in pruner", "in optimizer", "recompiles", "pruned")
    rows = []
    for cell in cells:
        dense = [other for other in cells if (other["mode"], other["method"]) == (cell["mode"], DENSE)]
        right = all(c["finite"] and c["exact"] for c in (cell, *dense))
        mean = statistics.mean(c["step_ms"] for c in dense)
        rows.append(
            (
                label(cell["mode"], cell["method"]),
                f"{cell['step_ms']:.2f}",
                ratio(cell["step_ms"] / mean, right, "not comparable", digits=3),
                bar(cell, cell["step_ms"] / mean, right),
                f"{cell['tokens_per_second']:,.0f}",
                *(_mib(cell[key]) for key in ("peak_allocated", "peak_reserved")),
                _more_bytes(cell, dense),
                *(f"{cell['shares'][key]:.2%}" for key in ("pruner", "optimizer")),
                str(cell["recompiles"]),
                f"{cell['pruned']:,}",
            )
        )
    return header, rows


def bar(cell: dict[str, Any], to_dense: float, right: bool) -> str:
    """How a method compares with the bar; dense training has none."""
    return "-" if cell["method"] == DENSE else against(to_dense, BAR, right, "not comparable")


def _mib(number: int | None) -> str:
    return "-" if number is None else f"{number / 2**20:,.0f}"


def _more_bytes(cell: dict[str, Any], dense: Sequence[dict[str, Any]]) -> str:
    """Peak memory beyond dense training's, for each prunable weight."""
    if cell["peak_allocated"] is None or not cell["prunable"]:
        return "-"
    more = cell["peak_allocated"] - statistics.mean(c["peak_allocated"] for c in dense)
    return f"{more / cell['prunable']:+.3f}"


if __name__ == "__main__":
    if sys.argv[1:2] != ["--cell"] or len(sys.argv) != 3:
        sys.exit("Run `secateur bench train`; this starts one of its cells.")
    one_cell(sys.argv[2])
