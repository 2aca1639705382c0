"""A GPT-2 in training, by a mode and a method: one cell of `secateur bench train`, one runner of `bench pace`."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur import optim
from secateur.bench.measuring import device_of, settle, times
from secateur.errors import SecateurError
from secateur.lab import record
from secateur.pruner import Pruner
from secateur.report import text_table
from secateur.schedules import linear

MODES = ("eager", "compile")
DENSE = "dense"
OWN = "bitter7-own"
# What is pruned by, and whether the optimizer is ours; the others step with torch's fused AdamW.
METHODS: dict[str, tuple[str | None, bool]] = {
    DENSE: (None, False),
    "magnitude": ("magnitude", False),
    "bitter7": ("bitter7", False),
    OWN: ("bitter7", True),
}
SPARSITY = 0.5


@dataclass(frozen=True)
class Plan:
    """What every cell of a run shares."""

    device: str
    tiny: bool
    batch: int
    steps: int
    every: int

    @property
    def tokens(self) -> int:
        return 32 if self.tiny else 1024

    @property
    def vocabulary(self) -> int:
        return 256 if self.tiny else 50304

    @property
    def last_step(self) -> int:
        """Two periods to warm up, the timed steps, one period to look inside: each period ends with its update."""
        return 2 * self.every + self.steps + self.every


def load_gpt2() -> tuple[Any, Any]:
    """GPT-2's config and model, or an error that says what is lacking."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        raise SecateurError(f"This benchmark needs {package}: pip install 'secateur[hf]'.") from missing
    return GPT2Config, GPT2LMHeadModel


def gpt2(plan: Plan) -> nn.Module:
    """GPT-2 of 124 M weights, or a tiny one, from its config with a fixed seed."""
    gpt2_config, gpt2_model = load_gpt2()
    torch.manual_seed(0)
    small = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": plan.tokens} if plan.tiny else {}
    config = gpt2_config(vocab_size=plan.vocabulary, use_cache=False, bos_token_id=0, eos_token_id=0, **small)
    model: nn.Module = gpt2_model(config).to(plan.device).train()
    return model


def batches(plan: Plan) -> Iterator[Tensor]:
    """Random tokens, made on the device from a fixed seed: the same in every cell."""
    generator = torch.Generator(plan.device).manual_seed(0)
    shape = (plan.batch, plan.tokens)
    while True:
        yield torch.randint(plan.vocabulary, shape, device=plan.device, generator=generator)


class Training:
    """A model, its optimizer and its pruner, stepped together."""

    def __init__(self, plan: Plan, mode: str, method: str) -> None:
        self.plan, self.device = plan, torch.device(plan.device)
        score, own = METHODS[method]
        model = gpt2(plan)
        settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
        self.optimizer: torch.optim.Optimizer = (
            optim.AdamW(model.parameters(), **settings)
            if own
            else torch.optim.AdamW(model.parameters(), fused=True, **settings)
        )
        # The ramp lasts to the very end: an update that asks for no more than the last would have nothing to do.
        ramp = linear(SPARSITY, begin=0, end=plan.last_step)
        self.pruner = Pruner(model, self.optimizer, score=score, sparsity=ramp, every=plan.every) if score else None
        self.model: Callable[..., Any] = torch.compile(model) if mode == "compile" else model
        self.weights = sum(parameter.numel() for parameter in model.parameters())
        self.batches = batches(plan)
        self.losses: list[Tensor] = []

    def run(self, steps: int, clock: Callable[[Callable[[], Any], str], Any] = lambda work, _: work()) -> None:
        """Some steps of training; `clock` may wrap the optimizer's and the pruner's."""
        for _ in range(steps):
            tokens = next(self.batches)
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            clock(self.optimizer.step, "optimizer")
            if self.pruner is not None:
                clock(self.pruner.step, "pruner")
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.detach())

    def seconds(self, steps: int) -> float:
        """How long some steps take together: one wait for the device before, one after, none in between."""
        settle(self.device)
        began = time.perf_counter()
        self.run(steps)
        settle(self.device)
        return time.perf_counter() - began

    def shares(self, steps: int) -> dict[str, float]:
        """Shares of the time in optimizer and pruner, waiting for the device around each: a pass of its own."""
        spent = {"optimizer": 0.0, "pruner": 0.0}

        def clock(work: Callable[[], Any], what: str) -> None:
            settle(self.device)
            began = time.perf_counter()
            work()
            settle(self.device)
            spent[what] += time.perf_counter() - began

        settle(self.device)
        began = time.perf_counter()
        self.run(steps, clock)
        settle(self.device)
        whole = time.perf_counter() - began
        return {what: seconds / whole for what, seconds in spent.items()}


def compiled_frames() -> int:
    """How many frames Dynamo has compiled in this process, recompilations included."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["total"])


def measure(plan: Plan, mode: str, method: str) -> dict[str, Any]:
    """One cell: warm up over two mask updates, time the steps, then look inside some more."""
    training = Training(plan, mode, method)
    gpu = training.device.type == "cuda"
    training.run(plan.every)
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what only compiling needed is not training's
    training.run(plan.every)
    settle(training.device)
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
        **pruned_as_asked(training.pruner),
    }


def pruned_as_asked(pruner: Pruner | None) -> dict[str, Any]:
    """What was asked at the end and what was done; a dense cell has nothing to be exact about."""
    if pruner is None:
        return {"prunable": None, "pruned": 0, "exact": True, "updates": 0}
    report = pruner.report()
    return {
        "prunable": report.prunable,
        "pruned": report.pruned,
        "exact": report.pruned == round(SPARSITY * report.prunable) and math.isclose(report.asked, SPARSITY),
        "updates": len(report.updates),
    }


DEFAULTS = {"full": {"batch": 16, "steps": 200, "every": 50}, "tiny": {"batch": 2, "steps": 6, "every": 3}}

LABELS = {OWN: "bitter7, secateur.optim.AdamW"}


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that was asked for, once it is known that it can be carried out."""
    device = device_of(options)
    chosen = {
        name: getattr(options, name) or value for name, value in DEFAULTS["tiny" if options.tiny else "full"].items()
    }
    plan = Plan(device=str(device), tiny=options.tiny, **chosen)
    if plan.device == "cpu" and not plan.tiny:
        print("secateur: 124 M weights on a CPU take hours; --tiny takes a minute", file=sys.stderr)
    if plan.steps % plan.every:
        raise SecateurError(
            f"--steps {plan.steps} must be a multiple of --every {plan.every}: whole periods are timed."
        )
    load_gpt2()  # says what is lacking before anything starts
    return plan


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    plan = plan_of(options)
    others = [method for method in options.methods if method != DENSE]
    order = [DENSE, *others, *[DENSE] * (options.repeats - 1)]
    with tempfile.TemporaryDirectory() as folder:
        cells = [_apart(plan, mode, method, Path(folder)) for mode in options.modes for method in order]
    data = {"seed": 0, "plan": asdict(plan), "tokens": plan.tokens, "cells": cells}
    print(text_table(*table(cells)), end="\n\n")
    theme = "train" if set(options.modes) == set(MODES) else f"train-{options.modes[0]}"
    print(record.save(theme, data, options, device_of(options)))
    return 0


def _apart(plan: Plan, mode: str, method: str, folder: Path) -> dict[str, Any]:
    """A cell measured in a fresh process: nothing another left on the device or in Dynamo's cache is there."""
    print(f"secateur: {mode}, {method} ...", file=sys.stderr)
    told = json.dumps({"plan": asdict(plan), "mode": mode, "method": method, "out": str(folder / "cell.json")})
    shared = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    path = os.pathsep.join([str(record.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **shared, "PYTHONPATH": path}
    command = [sys.executable, "-m", "secateur.bench.train", "--cell", told]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SecateurError(f"The cell {mode}, {method} failed:\n{done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
    print(f"secateur:   {found['step_ms']:.2f} ms a step, {found['recompiles']} recompiles", file=sys.stderr)
    return found


def one_cell(told: str) -> None:
    """What the fresh process does."""
    wanted = json.loads(told)
    found = measure(Plan(**wanted["plan"]), wanted["mode"], wanted["method"])
    Path(wanted["out"]).write_text(json.dumps(found), encoding="utf-8")


def table(cells: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows; each mode is compared with its own dense cells."""
    columns = ("ms a step", "to dense", "tokens/s", "allocated MiB", "reserved MiB", "bytes/weight to dense")
    header = ("mode, method", *columns, "in pruner", "in optimizer", "recompiles", "pruned")
    rows = []
    for cell in cells:
        dense = [other for other in cells if (other["mode"], other["method"]) == (cell["mode"], DENSE)]
        right = all(c["finite"] and c["exact"] for c in (cell, *dense))
        mean = statistics.mean(c["step_ms"] for c in dense)
        rows.append(
            (
                f"{cell['mode']}, {LABELS.get(cell['method'], cell['method'])}",
                f"{cell['step_ms']:.2f}",
                times(cell["step_ms"] / mean, right, "not comparable", digits=3),
                f"{cell['tokens_per_second']:,.0f}",
                *(_mib(cell[key]) for key in ("peak_allocated", "peak_reserved")),
                _more_bytes(cell, dense),
                *(f"{cell['shares'][key]:.2%}" for key in ("pruner", "optimizer")),
                str(cell["recompiles"]),
                f"{cell['pruned']:,}",
            )
        )
    return header, rows


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
