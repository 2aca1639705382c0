"""An experiment: the settings that determine the result of a training run, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur import optim, regrowth
from secateur.errors import SecateurError, nearest
from secateur.lab.models import is_language_model, parameter_groups
from secateur.optim import PRESETS
from secateur.pruner import Pruner
from secateur.schedules import RAMPS, Schedule, check_sparsity, constant
from secateur.scores import resolve
from secateur.selection import SCOPES
from secateur.settings import from_mapping, read_toml

SCHEDULES = (*RAMPS, "constant")
PRECISIONS = ("fp32", "bf16")
BUDGETS = ("normal", "extended")
MOMENTUM = 0.9  # of SGD
# AdamWPrune trained these scores longer than the others. Here they get more steps only with budget="extended".
MORE_STEPS = {"bitter2": 1.21, **dict.fromkeys(("bitter3", "bitter4", "bitter5", "bitter6", "bitter8", "bitter9"), 1.3)}


Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of experiments. `build` gets the experiment, the parameter groups and whether they are on a GPU."""

    build: Callable[[Experiment, Groups, bool], torch.optim.Optimizer]
    states: int  # tensors of optimizer state per weight
    spam: bool = False  # whether it takes the setting `spam`


def _adam(kind: Callable[..., torch.optim.Optimizer], amsgrad: bool = False) -> OptimizerKind:
    def build(experiment: Experiment, groups: Groups, on_gpu: bool) -> torch.optim.Optimizer:
        return kind(groups, **experiment.adam_settings, amsgrad=amsgrad, fused=True if on_gpu else None)

    return OptimizerKind(build, states=3 if amsgrad else 2)


def _masked_adamw(spam: str | None, amsgrad: bool = False) -> OptimizerKind:
    """Secateur's AdamW; `spam` is the preset if the experiment names none."""

    def build(experiment: Experiment, groups: Groups, on_gpu: bool) -> torch.optim.Optimizer:
        return optim.AdamW(groups, **experiment.adam_settings, amsgrad=amsgrad, spam=experiment.spam or spam)

    return OptimizerKind(build, states=3 if amsgrad else 2, spam=True)


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": _adam(torch.optim.AdamW),
    "adam": _adam(torch.optim.Adam),
    "sgd": OptimizerKind(lambda wanted, groups, _: torch.optim.SGD(groups, wanted.lr, momentum=MOMENTUM), states=1),
    "adamwadv": _adam(torch.optim.AdamW, amsgrad=True),
    "adamwspam": _masked_adamw("paper", amsgrad=True),
    "adamwprune": _masked_adamw(None),
}


@dataclass(frozen=True)
class Experiment:
    """Settings of a run. On one machine, the same settings give the same numbers."""

    model: str = "gpt-4x128"
    data: str = "python"
    seed: int = 0
    steps: int = 1000
    batch: int = 32  # sequences or images in an optimizer step, over all processes
    context: int = 128  # tokens in a sequence
    optimizer: str = "adamw"
    lr: float = 1e-3
    warmup: int = 50  # steps
    final_lr: float = 0.1  # learning rate at the end of the cosine, as a fraction of lr
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    spam: str | None = None  # preset of SPAM (clips gradient spikes, resets moments)
    score: str | None = None  # None: dense
    sparsity: float = 0.0
    schedule: str = "cubic"
    begin: float = 0.1  # fraction of the steps
    end: float = 0.8  # fraction of the steps
    every: int = 20  # steps between mask updates
    scope: str = "model"
    pattern: str | None = None
    allocation: str | None = None
    skip: tuple[str, ...] = ()
    regrow: str | None = None  # "gradient" (RigL) or "random" (SET)
    drop: float = 0.3  # fraction of the kept weights exchanged at first
    until: float = 0.75  # fraction of the steps after which no weight regrows
    mask_gradients: bool = False  # leave gradients of pruned weights out of the norm that clipping reads
    precision: str = "fp32"
    compile: bool = False
    evaluate_every: int = 100
    evaluation: int | None = None  # held-out windows; None: all of them
    budget: str = "normal"

    def __post_init__(self) -> None:
        words: dict[str, tuple[str, ...]] = {"optimizer": tuple(OPTIMIZERS), "spam": tuple(PRESETS)}
        words |= {"schedule": SCHEDULES, "scope": SCOPES, "regrow": regrowth.KINDS}
        words |= {"precision": PRECISIONS, "budget": BUDGETS}
        for name, known in words.items():
            if getattr(self, name) is not None:
                _check_word(name, getattr(self, name), known)
        is_language_model(self.model)
        for name in ("steps", "batch", "context", "every", "evaluate_every"):
            if getattr(self, name) < 1:
                raise SecateurError(f"{name} must be at least 1; got {getattr(self, name)}.")
        ranges = {"lr": (0, 1e9), "beta1": (0, 0.9999999), "beta2": (0, 0.9999999), "weight_decay": (0, 1e9)}
        ranges |= {"seed": (0, 2**63 - 1), "clip": (0, 1e9), "final_lr": (0, 1), "warmup": (0, 2**31)}
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise SecateurError(f"{name} must be between {low:g} and {high:g}; got {getattr(self, name)}.")
        if self.spam and not OPTIMIZERS[self.optimizer].spam:
            takers = " or ".join(name for name, kind in OPTIMIZERS.items() if kind.spam)
            raise SecateurError(f"spam goes with {takers}, not with {self.optimizer}.")
        self._check_pruning()

    def _check_pruning(self) -> None:
        check_sparsity(self.sparsity)
        if self.score is None and (self.sparsity or self.pattern or self.regrow):
            raise SecateurError("sparsity, pattern and regrow do nothing without a score. Name one, such as variance.")
        if self.score is not None:
            resolve(self.score)
            if not self.sparsity and self.pattern is None:
                raise SecateurError(f"score {self.score!r} needs a sparsity above 0, or a pattern.")
        if self.mask_gradients and (self.score is None or not self.clip or self.regrow == "gradient"):
            raise SecateurError(
                "mask_gradients leaves pruned weights out of the norm that clipping reads: it needs a score and a clip"
                " above 0, and cannot go with regrow = 'gradient', which ranks those weights by their gradients."
            )
        if not 0 < self.until <= 1:
            raise SecateurError(f"until must be a fraction of the steps above 0, at most 1; got {self.until}.")
        if self.regrow is not None and self.schedule in RAMPS and self.until < self.end:
            raise SecateurError(
                f"Weights regrow until {self.until:g} of the steps, but sparsity rises until {self.end:g}: none would"
                " regrow at the final sparsity. Set until to more than end, or end to less."
            )
        if not 0 <= self.begin < self.end <= 1:
            raise SecateurError(
                f"begin and end must be fractions of the steps with begin < end; got {self.begin} and {self.end}."
            )

    @property
    def steps_taken(self) -> int:
        """Steps of the run: with the extended budget, 21 % or 30 % more for the scores of MORE_STEPS."""
        more = MORE_STEPS.get(self.score or "", 1.0) if self.budget == "extended" else 1.0
        return round(self.steps * more)

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1: linear warm-up, then cosine decay."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        progress = (step - self.warmup) / max(1, self.steps_taken - self.warmup)
        return self.lr * (self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))

    def ramp(self) -> float | Schedule | None:
        """The sparsity schedule, which the extended budget does not stretch."""
        if self.pattern is not None and not self.sparsity:
            return None
        if self.schedule == "constant":
            return constant(self.sparsity)
        begin = round(self.begin * self.steps)
        return RAMPS[self.schedule](self.sparsity, begin=begin, end=max(begin + 1, round(self.end * self.steps)))

    def build_pruner(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Pruner | None:
        """The pruner, or None for a dense run."""
        if self.score is None:
            return None
        back: dict[str, Any] = {}
        if self.regrow is not None:
            back = {"regrow": self.regrow, "drop": self.drop, "until": max(1, round(self.until * self.steps))}
        return Pruner(
            model, optimizer, score=self.score, sparsity=self.ramp(), every=self.every, scope=self.scope,
            pattern=self.pattern, allocation=self.allocation, skip=self.skip, **back,
        )  # fmt: skip

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of this name; biases and normalization do not decay."""
        groups = parameter_groups(model, self.weight_decay)
        return OPTIMIZERS[self.optimizer].build(self, groups, next(model.parameters()).is_cuda)

    @property
    def adam_settings(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": (self.beta1, self.beta2)}


def _check_word(name: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise SecateurError(f"{name} {word!r} is not known.{nearest(word, known)} Use one of {', '.join(known)}.")


def read_experiment(path: Path | None, changes: Mapping[str, Any]) -> Experiment:
    """The experiment of a TOML file (None: all defaults) with some settings changed."""
    found = {} if path is None else read_toml(path)
    named = "the command line" if path is None or changes.keys() - found.keys() else str(path)
    return from_mapping(Experiment, {**found, **changes}, named)
