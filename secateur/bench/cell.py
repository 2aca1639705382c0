"""A GPT-2 in training, by a mode and a method: one cell of `secateur bench train`, one runner of `bench pace`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur import optim
from secateur.bench.measuring import settle
from secateur.errors import SecateurError
from secateur.pruner import Pruner
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
