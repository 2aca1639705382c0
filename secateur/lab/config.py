"""An experiment: the settings that determine the result of a training run, and nothing else.

A preset stands for several of them: "as-published" for those of AdamWPrune's variants, listed below.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from secateur import optim, regrowth
from secateur.errors import ScheduleError, SecateurError, nearest
from secateur.lab.models import is_language_model, parameter_groups
from secateur.lab.runs import PRUNING
from secateur.model.distributed import unwrap
from secateur.model.facts import ADAM_FACTS, KEPT_FACTS, check_needs
from secateur.optim import PRESETS, Spam, as_spam
from secateur.pruner import Pruner
from secateur.schedules import RAMPS, Schedule, check_sparsity, constant
from secateur.scores import resolve
from secateur.selection import SCOPES
from secateur.settings import checked, from_mapping, read_toml

SCHEDULES = (*RAMPS, "constant")
PRECISIONS = ("fp32", "bf16", "fp16")
BUDGETS = ("normal", "extended")
MOMENTUM = 0.9  # of SGD
SPAM = tuple(f"spam_{field.name}" for field in fields(Spam))
Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of experiments. `build` gets the experiment, the parameter groups and whether they are on a GPU."""

    build: Callable[[Experiment, Groups, bool], torch.optim.Optimizer]
    states: int  # tensors of optimizer state per weight
    facts: Set[str]  # what scores can read
    takes_spam: bool = False  # whether it takes the setting `spam`
    spam: str | None = None  # the preset of SPAM unless the setting names one


def _adam(kind: Callable[..., torch.optim.Optimizer], amsgrad: bool = False) -> OptimizerKind:
    def build(experiment: Experiment, groups: Groups, on_gpu: bool) -> torch.optim.Optimizer:
        return kind(groups, **experiment.adam_settings, amsgrad=amsgrad, fused=True if on_gpu else None)

    return OptimizerKind(build, states=3 if amsgrad else 2, facts=_facts(amsgrad))


def _masked_adamw(spam: str | None, amsgrad: bool = False) -> OptimizerKind:
    """Secateur's AdamW; `spam` is the preset if the experiment names none."""

    def build(experiment: Experiment, groups: Groups, on_gpu: bool) -> torch.optim.Optimizer:
        return optim.AdamW(groups, **experiment.adam_settings, amsgrad=amsgrad, spam=experiment.spam_settings)

    return OptimizerKind(build, states=3 if amsgrad else 2, facts=_facts(amsgrad), takes_spam=True, spam=spam)


def _facts(amsgrad: bool) -> Set[str]:
    return ADAM_FACTS | {"max_exp_avg_sq"} if amsgrad else ADAM_FACTS


def _sgd(experiment: Experiment, groups: Groups, _: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, experiment.lr, momentum=MOMENTUM)


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": _adam(torch.optim.AdamW),
    "adam": _adam(torch.optim.Adam),
    "sgd": OptimizerKind(_sgd, states=1, facts={"weight", "index", "momentum_buffer", *KEPT_FACTS}),
    "adamwadv": _adam(torch.optim.AdamW, amsgrad=True),
    "adamwspam": _masked_adamw("paper", amsgrad=True),
    "adamwprune": _masked_adamw(None),
}


# What AdamWPrune published for each of its variants. The preset "as-published" takes these ramps, training budgets and
# layers instead of Secateur's defaults. The sources disagree here and there; the variants note of AdamWPrune comes
# first, its trainer's code where the note says "TBD":
#
# - Ramp: the note has linear for bitter0 to bitter2 and p^3, which it calls cubic, for bitter3 and bitter4, from the
#   warm-up to the last step of the normal budget. bitter5 to bitter9 were trained with p^3. The warm-up is 100 steps of
#   10,000. Of the two baselines, magnitude had p^3 and movement a linear ramp.
# - Budget: the note lists 21 % more steps for bitter2, 30 % for bitter3 and bitter4, 70 % for bitter7, and the standard
#   number for bitter8. It leaves bitter5, bitter6 and bitter9 open, which the code gives 30 %.
# - Layers: every nn.Linear and nn.Conv2d. The head is one of them, and with it the token embedding it is tied to.
AS_PUBLISHED = "as-published"
EVERY_LAYER = "adamwprune"  # a value of the setting `prunable`
WARM_UP = 0.01  # of the steps, before the ramp begins
LINEAR, LATE = "linear", "late_cubic"


@dataclass(frozen=True)
class Variant:
    """The ramp of a variant and its training budget, as a multiple of the normal one."""

    schedule: str
    budget: float = 1.0


VARIANTS = {
    "bitter0": Variant(LINEAR),
    "bitter1": Variant(LINEAR),
    "bitter2": Variant(LINEAR, 1.21),
    "bitter3": Variant(LATE, 1.3),
    "bitter4": Variant(LATE, 1.3),
    "bitter5": Variant(LATE, 1.3),
    "bitter6": Variant(LATE, 1.3),
    "bitter7": Variant(LATE, 1.7),
    "bitter8": Variant(LATE),
    "bitter9": Variant(LATE, 1.3),
    "magnitude": Variant(LATE),
    "movement": Variant(LINEAR),
}


def variant_of(score: Any) -> Variant | None:
    """The variant that a score is, options or not: "bitter3(eps=1e-6)" is bitter3."""
    return VARIANTS.get(score.partition("(")[0].strip()) if isinstance(score, str) else None


def budget_of(score: Any) -> float:
    """How many times the normal steps the extended budget gives this score."""
    found = variant_of(score)
    return found.budget if found else 1.0


def preset_settings(preset: str, score: Any) -> dict[str, Any]:
    """The settings that a preset means for a score; an error if there are none."""
    if preset != AS_PUBLISHED:
        raise SecateurError(f"There is no preset {preset!r}.{nearest(preset, [AS_PUBLISHED])} Use {AS_PUBLISHED}.")
    found = variant_of(score)
    if found is None:
        said = "no score" if score is None else f"score {score!r}"
        raise SecateurError(f"preset {preset} needs a score of AdamWPrune: {', '.join(VARIANTS)}. It got {said}.")
    settings: dict[str, Any] = {"schedule": found.schedule, "begin": WARM_UP, "end": 1.0, "prunable": EVERY_LAYER}
    return settings | ({"budget": "extended"} if found.budget > 1 else {})


def every_layer(model: nn.Module) -> tuple[str, ...]:
    """The paths of all linear layers and 2-d convolutions, which AdamWPrune prunes; a tied head is one of them."""
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d)
    if (transformers := sys.modules.get("transformers.pytorch_utils")) is not None:
        kinds += (transformers.Conv1D,)  # what GPT-2's layers are there
    return tuple(name for name, module in model.named_modules() if isinstance(module, kinds))


@dataclass(frozen=True)
class Idle:
    """Settings that do nothing under a condition on the others, and the reason in words."""

    names: tuple[str, ...]
    when: Callable[[Any], bool]
    why: str


NO_SCORE = "without a score. Name one, such as variance, or ask for a dense run with --pruning-method none"
IDLE = (
    Idle(PRUNING, lambda wanted: wanted.score is None, NO_SCORE),
    Idle(("begin", "end"), lambda wanted: wanted.schedule == "constant", "with schedule constant, which has no ramp"),
    Idle(
        ("schedule", "begin", "end"), lambda wanted: wanted.pattern is not None and not wanted.sparsity,
        "with a pattern alone, which asks for its sparsity from the first update on",
    ),
    Idle(("drop", "until"), lambda wanted: wanted.regrow is None, "without regrow. Set it to gradient or random"),
    Idle(("mask_gradients",), lambda wanted: not wanted.clip, "without clipping. Set clip above 0"),
    Idle(("beta1", "beta2"), lambda wanted: wanted.optimizer == "sgd", "with sgd, whose momentum is fixed"),
    Idle(
        ("context", "evaluation"), lambda wanted: not is_language_model(wanted.model),
        "with a model of images, which is evaluated on the whole held-out set",
    ),
    Idle(SPAM, lambda wanted: spam_preset(wanted) is None, "without spam. Set it to paper or adamwprune"),
    Idle(
        ("budget",), lambda wanted: wanted.budget == "extended" and budget_of(wanted.score) == 1,
        "for this score: AdamWPrune gave it no more steps. Set steps",
    ),
)  # fmt: skip


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
    warmup: float = 50  # steps, or below 1 a fraction of the steps
    final_lr: float = 0.1  # learning rate at the end of the cosine, as a fraction of lr
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    spam: str | None = None  # preset of SPAM (clips gradient spikes, resets moments)
    spam_theta: float | None = None  # these change one setting of the preset: see secateur.optim.Spam
    spam_every: int | None = None
    spam_warmup: int | None = None
    spam_spike: float | None = None  # 0: no detection of spikes
    spam_quiet: int | None = None
    spam_floor: float | None = None
    spam_clip_unseen: bool | None = None
    spam_restart_bias: bool | None = None
    spam_warm_decay: bool | None = None
    score: str | None = None  # None: dense
    sparsity: float = 0.0
    preset: str | None = None  # where the settings of the ramp, budget and layers come from: see VARIANTS
    prunable: str | None = None  # None: as Pruner chooses; "adamwprune": every layer, a tied head too
    schedule: str = "cubic"
    begin: float = 0.1  # fraction of the steps, or above 1 a number of steps; end and until too
    end: float = 0.8
    every: int = 20  # steps between mask updates
    scope: str = "model"
    pattern: str | None = None
    allocation: str | None = None
    skip: tuple[str, ...] = ()
    regrow: str | None = None  # "gradient" (RigL) or "random" (SET)
    drop: float = 0.3  # fraction of the kept weights exchanged at first
    until: float = 0.75  # from here on no weight regrows
    mask_gradients: bool = False  # leave gradients of pruned weights out of the norm that clipping reads
    precision: str = "fp32"
    compile: bool = False
    evaluate_every: int = 100
    evaluation: int | None = None  # held-out windows; None: all of them
    budget: str = "normal"

    def __post_init__(self) -> None:
        words: dict[str, tuple[str, ...]] = {"optimizer": tuple(OPTIMIZERS), "spam": tuple(PRESETS)}
        words |= {"schedule": SCHEDULES, "scope": SCOPES, "regrow": regrowth.KINDS}
        words |= {"precision": PRECISIONS, "budget": BUDGETS, "prunable": (EVERY_LAYER,)}
        words |= {"preset": (AS_PUBLISHED,)}
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
        if self.spam and not OPTIMIZERS[self.optimizer].takes_spam:
            takers = " or ".join(name for name, kind in OPTIMIZERS.items() if kind.takes_spam)
            raise SecateurError(f"spam goes with {takers}, not with {self.optimizer}.")
        _check_idle(self)
        _ = self.spam_settings  # raises for settings that SPAM does not take
        self._check_pruning()

    def _check_pruning(self) -> None:
        check_sparsity(self.sparsity)
        for name in ("warmup", "begin", "end", "until"):
            value = getattr(self, name)
            if not value >= 0 or (value > 1 and not float(value).is_integer()):
                raise SecateurError(f"{name} must be a fraction of the steps or a whole number of them; got {value}.")
        if self.score is not None:
            kind = OPTIMIZERS[self.optimizer]
            check_needs(resolve(self.score), kind.facts, f"in training with {self.optimizer}")
            if not self.sparsity and self.pattern is None:
                raise SecateurError(f"score {self.score!r} needs a sparsity above 0, or a pattern.")
        if self.mask_gradients and self.regrow == "gradient":
            raise SecateurError(
                "regrow = 'gradient' ranks pruned weights by the gradients that mask_gradients removes. Leave one out,"
                " or use regrow = 'random'."
            )
        if not self.until:
            raise SecateurError("until must be a fraction of the steps above 0, or a number of steps; got 0.")
        if self.regrow is not None and self.schedule in RAMPS and self.until_step < self.end_step:
            raise SecateurError(
                f"Weights regrow until step {self.until_step}, but sparsity rises until step {self.end_step}: none"
                " would regrow at the final sparsity. Set until to more than end, or end to less."
            )
        known = self.begin < self.end if max(self.begin, self.end) <= 1 else self.begin_step < self._step(self.end)
        if not known or self.end_step > self.steps_taken:
            raise SecateurError(
                "begin and end must be fractions of the steps, or steps of the run if above 1, with begin < end; got"
                f" {self.begin:g} and {self.end:g} in a run of {self.steps_taken} steps."
            )

    @property
    def steps_taken(self) -> int:
        """Steps of the run: with the extended budget more than `steps`, by the factor AdamWPrune gave the score."""
        return round(self.steps * budget_of(self.score)) if self.budget == "extended" else self.steps

    @property
    def step_size(self) -> int:
        """Tokens or images in a step."""
        return self.batch * (self.context if is_language_model(self.model) else 1)

    def _step(self, value: float) -> int:
        """The step that a fraction of the steps, or a number of them above 1, means."""
        return int(value) if value > 1 else round(value * self.steps)

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        return int(self.warmup) if self.warmup >= 1 else round(self.warmup * self.steps)

    @property
    def begin_step(self) -> int:
        return self._step(self.begin)

    @property
    def end_step(self) -> int:
        """The step at which the final sparsity is reached; the extended budget does not move it."""
        return max(self.begin_step + 1, self._step(self.end))

    @property
    def until_step(self) -> int:
        return max(1, self._step(self.until))

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1: linear warm-up, then cosine decay."""
        warmup = self.warmup_steps
        if step <= warmup:
            return self.lr * step / warmup
        progress = (step - warmup) / max(1, self.steps_taken - warmup)
        return self.lr * (self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))

    def ramp(self) -> float | Schedule | None:
        """The sparsity schedule, which the extended budget does not stretch."""
        if self.pattern is not None and not self.sparsity:
            return None
        if self.schedule == "constant":
            return constant(self.sparsity)
        return RAMPS[self.schedule](self.sparsity, begin=self.begin_step, end=self.end_step)

    def build_pruner(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Pruner | None:
        """The pruner, or None for a dense run."""
        if self.score is None:
            return None
        more: dict[str, Any] = {}
        if self.regrow is not None:
            more = {"regrow": self.regrow, "drop": self.drop, "until": self.until_step}
        return Pruner(
            model, optimizer, score=self.score, sparsity=self.ramp(), every=self.every, scope=self.scope,
            pattern=self.pattern, allocation=self.allocation, skip=self.skip, only=self.only(model), **more,
        )  # fmt: skip

    def only(self, model: nn.Module) -> tuple[str, ...] | None:
        """The layers to prune, or None for those that Pruner chooses."""
        return None if self.prunable is None else every_layer(unwrap(model))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of this name; biases and normalization do not decay."""
        groups = parameter_groups(model, self.weight_decay)
        return OPTIMIZERS[self.optimizer].build(self, groups, next(model.parameters()).is_cuda)

    @property
    def spam_settings(self) -> Spam | None:
        """SPAM's settings: those of the preset with the ones that are named; None if it is off."""
        whole = as_spam(spam_preset(self))
        named = {name.removeprefix("spam_"): getattr(self, name) for name in SPAM if getattr(self, name) is not None}
        if named.get("spike") == 0:
            named["spike"] = None
        try:
            return None if whole is None else replace(whole, **named)
        except ScheduleError as error:
            raise ScheduleError(f"spam and spam_*: {error}") from error

    @property
    def adam_settings(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": (self.beta1, self.beta2)}


def spam_preset(wanted: Any) -> str | None:
    """The preset of SPAM that these settings mean: the one they name, or the optimizer's own."""
    kind = OPTIMIZERS.get(wanted.optimizer)
    return wanted.spam or (kind.spam if kind else None)


DEFAULTS = {field.name: field.default for field in fields(Experiment)}


def _check_idle(wanted: Experiment) -> None:
    """Refuse settings that would do nothing."""
    for rule in IDLE:
        if rule.when(wanted):
            unread = [name for name in rule.names if getattr(wanted, name) != DEFAULTS[name]]
            if unread:
                does = "do" if len(unread) > 1 else "does"
                raise SecateurError(f"{', '.join(unread)} {does} nothing {rule.why}.")


def without_idle(found: Mapping[str, Any]) -> dict[str, Any]:
    """These settings without those that would do nothing: of a grid, in which they do something for other cells."""
    kept = dict(found)
    for rule in IDLE:
        if rule.when(SimpleNamespace(**{**DEFAULTS, **kept})):
            kept = {name: value for name, value in kept.items() if name not in rule.names}
    return kept


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of several sources, later ones first in rank. What a preset means ranks just below the source that names
    the preset, so that settings beside it and later ones change it."""
    score = next((layer["score"] for layer in reversed(layers) if "score" in layer), None)
    found: dict[str, Any] = {}
    for layer in layers:
        if layer.get("preset") is not None:
            found |= preset_settings(layer["preset"], score)
        found |= layer
    return found


def _check_word(name: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise SecateurError(f"{name} {word!r} is not known.{nearest(word, known)} Use one of {', '.join(known)}.")


def read_experiment(path: Path | None, changes: Mapping[str, Any]) -> Experiment:
    """The experiment of a TOML file (None: all defaults) with some settings changed.

    What the changes make the file's settings do without, such as the ramp of a run without a score, is left out.
    """
    found = {} if path is None else read_toml(path)
    named = "the command line" if path is None or changes.keys() - found.keys() else str(path)
    found, changes = checked(Experiment, found, str(path)), checked(Experiment, changes, named)
    whole = merge(found, changes)
    unread = without_idle(merge(found)).keys() - without_idle(whole).keys() - changes.keys()
    return from_mapping(Experiment, {name: value for name, value in whole.items() if name not in unread}, named)
