"""Ways to make a trained network sparse while it is fine-tuned, for the comparison in `tools.finetune_rivals`.

A way changes the model before a forward pass, its gradients before an optimizer step, or its weights after one. Which
weights are kept is always decided by Secateur's exact selection.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import secateur
from secateur.integrations.pruning import Pruning
from secateur.model.prunable import find_prunable
from secateur.pruner import Pruner
from secateur.schedules import Constant, Ramp
from secateur.scores import resolve

DECAY = "ast", "ast-decoupled"
PENALTY = "admm", "admm-decoupled"
HOW = ("gradual", "oneshot", "levels", *PENALTY, *DECAY)


@dataclass(frozen=True)
class Settings:
    """One way. Fractions are of all steps."""

    how: str = "gradual"
    sparsity: float = 0.8
    score: str = "variance"
    begin: float = 0.05
    end: float = 0.6  # of the ramp
    power: float = 3  # of the ramp: sparsity rises as 1 - (1 - p)^power
    every: int = 4
    scope: str = "model"
    allocation: str | None = None
    regrow: str | None = None
    drop: float = 0.3
    until: float | None = None
    start: float = 0.0  # sparsity reached before training, by pruning with reconstruction
    levels: tuple[float, ...] = ()  # sparsities reached by pruning with reconstruction, evenly spread up to `end`
    strength: float = 0.0  # lambda of ADMM, decay of AST
    rising: bool = False  # whether the strength rises from zero
    hard: float = 1.0  # when ADMM and AST fix their masks
    reset: bool = False  # forget Adam's state at the end of the ramp
    alpha: float = 0.9
    hidden: float = 0.0  # weight of SquareHead
    lr: float = 1e-3
    steps: int = 240


class Way:
    """Trains without pruning; the base of all ways."""

    def __init__(self, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.settings, self.model, self.optimizer = settings, model, optimizer
        self.weights = {one.name: one.parameter for one in find_prunable(model)[0]}
        begin, end = (round(place * settings.steps) for place in (settings.begin, settings.end))
        self.ramp = Ramp(settings.sparsity, begin, max(begin + 1, end), self._curve)

    def _curve(self, progress: float) -> float:
        return 1 - (1 - progress) ** self.settings.power

    def before_forward(self, step: int) -> None:
        """Called before the forward pass of a step, which counts from 0."""

    def on_gradients(self, step: int) -> None:
        """Called after the backward pass, before gradients are clipped."""

    def after_step(self, step: int) -> None:
        """Called after the optimizer's step, with the number of steps done."""


class Gradual(Way):
    """The Pruner's own way, from dense or from a model that was pruned before."""

    def __init__(
        self, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, calibration: Tensor
    ) -> None:
        super().__init__(settings, model, optimizer)
        masks = None
        if settings.start:
            masks = prune(model, calibration, settings.start)
        pruning = Pruning(
            score=settings.score, sparsity=self._schedule(), every=settings.every, scope=settings.scope,
            allocation=settings.allocation, regrow=settings.regrow, drop=settings.drop, until=settings.until,
            masks=None if settings.regrow else masks,
        )  # fmt: skip
        self.pruner = pruning.pruner(model, optimizer, settings.steps)
        if settings.regrow and masks:  # regrowth is refused with masks that must stay, so it takes them as a state
            held = Pruner(model, optimizer, score=settings.score, sparsity=self._schedule(), masks=masks)
            self.pruner.load_state_dict(held.state_dict(), strict=False)
        self.attached = self.pruner.attach()

    def _schedule(self) -> Ramp | Constant:
        if self.settings.start >= self.settings.sparsity:
            return secateur.constant(self.settings.sparsity)
        return self.ramp

    def after_step(self, step: int) -> None:
        if self.settings.reset and step == self.ramp.end:
            forget(self.optimizer)


class Levels(Way):
    """Prunes with reconstruction to one level after another, and holds the zeros in between."""

    def __init__(
        self, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, calibration: Tensor
    ) -> None:
        super().__init__(settings, model, optimizer)
        last = round(settings.end * settings.steps)
        count = len(settings.levels)
        self.due = {last * number // max(1, count - 1): level for number, level in enumerate(settings.levels)}
        self.calibration, self.masks = calibration, dict[str, Tensor]()
        self._reach(0)

    def _reach(self, step: int) -> None:
        if step in self.due:
            self.masks = prune(self.model, self.calibration, self.due[step])

    def after_step(self, step: int) -> None:
        self._reach(step)
        zero(self.optimizer, self.weights, self.masks)


class ADMM(Way):
    """ELSA's form (arXiv 2510.01650): the weights x are pulled towards their sparse copy z, and z is made anew from x.

    Every few steps z = projection of x + u, u += x - z; the projection keeps what the score ranks highest. The penalty
    lambda (x - z + u) is added to the gradient, or (decoupled) taken off the weights times the learning rate.
    """

    def __init__(self, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(settings, model, optimizer)
        self.sparse = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.dual = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.masks: dict[str, Tensor] = {}
        self.last = round(settings.hard * settings.steps)

    def _pull(self, name: str, step: int) -> Tensor:
        strength = self.settings.strength
        if self.settings.rising:
            strength *= step / max(1, self.last)
        return strength * (self.weights[name].detach() - self.sparse[name] + self.dual[name])

    def on_gradients(self, step: int) -> None:
        if self.settings.how == "admm" and step < self.last:
            for name, weight in self.weights.items():
                if weight.grad is not None:
                    weight.grad += self._pull(name, step)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if step > self.last:
            zero(self.optimizer, self.weights, self.masks)
            return
        if self.settings.how == "admm-decoupled":
            for name, weight in self.weights.items():
                weight -= self.optimizer.param_groups[0]["lr"] * self._pull(name, step)
        if step % self.settings.every == 0 or step == self.last:
            self._project(step)
        if step == self.last:
            for name, weight in self.weights.items():
                weight.copy_(self.sparse[name])
            zero(self.optimizer, self.weights, self.masks)

    def _project(self, step: int) -> None:
        moved = {name: weight + self.dual[name] for name, weight in self.weights.items()}
        sparsity = self.settings.sparsity if step == self.last else self.ramp(step)
        self.masks = select(self.settings.score, moved, self.optimizer, self.weights, sparsity, self.settings.scope)
        for name, weight in self.weights.items():
            self.sparse[name] = moved[name] * self.masks[name]
            self.dual[name] += weight - self.sparse[name]


class AST(Way):
    """Adaptive sparse training (arXiv 2407.20584): the forward pass uses masked weights, the gradient reaches all of
    them (straight through), and weights outside the mask decay instead of being zeroed, so masks may move."""

    def __init__(self, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(settings, model, optimizer)
        self.masks = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in self.weights.items()}
        self.dense: dict[str, Tensor] = {}
        self.last = round(settings.hard * settings.steps)

    def _decay(self, step: int) -> float:
        share = min(1.0, step / max(1, self.ramp.end)) if self.settings.rising else 1.0
        return self.settings.strength * share

    @torch.no_grad()
    def before_forward(self, step: int) -> None:
        for name, weight in self.weights.items():
            self.dense[name] = weight.clone()
            weight *= self.masks[name]

    @torch.no_grad()
    def on_gradients(self, step: int) -> None:
        for name, weight in self.weights.items():
            weight.copy_(self.dense[name])
            if weight.grad is not None and self.settings.how == "ast":
                weight.grad += self._decay(step) * weight * ~self.masks[name]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self.settings.how == "ast-decoupled":
            rate = self.optimizer.param_groups[0]["lr"] * self._decay(step)
            for name, weight in self.weights.items():
                weight -= min(1.0, rate) * weight * ~self.masks[name]
        if step <= self.last and (step % self.settings.every == 0 or step == self.last):
            self.masks = select(
                self.settings.score, self.weights, self.optimizer, self.weights, self.ramp(step), self.settings.scope
            )
        if step >= self.last:
            zero(self.optimizer, self.weights, self.masks)


def build(settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, calibration: Tensor) -> Way:
    """The way that these settings name."""
    if settings.how in PENALTY:
        return ADMM(settings, model, optimizer)
    if settings.how in DECAY:
        return AST(settings, model, optimizer)
    kind = Levels if settings.how == "levels" else Gradual
    return kind(settings, model, optimizer, calibration)


def prune(model: nn.Module, calibration: Tensor, sparsity: float) -> dict[str, Tensor]:
    """Prune once, with the rounds and the reconstruction of the recommended recipe; returns the masks."""
    outcome = secateur.prune(model, calibration.split(8), sparsity=sparsity, rounds=5, reconstruct="every")
    model.train()
    return dict(outcome.masks)


@torch.no_grad()
def select(
    score: str,
    values: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    weights: dict[str, nn.Parameter],
    sparsity: float,
    scope: str,
) -> dict[str, Tensor]:
    """Masks of these values by a score that reads the weight and Adam's second moment; every weight competes."""
    entry, ranked = resolve(score), {}
    for name, value in values.items():
        state = optimizer.state[weights[name]]
        ranked[name] = entry(**{need: value if need == "weight" else state[need] for need in entry.needs})
    return secateur.select(ranked, sparsity, scope=scope)


@torch.no_grad()
def zero(optimizer: torch.optim.Optimizer, weights: dict[str, nn.Parameter], masks: dict[str, Tensor]) -> None:
    """Zero what the masks remove, with its moments."""
    for name, mask in masks.items():
        state = optimizer.state.get(weights[name], {})
        for tensor in (weights[name], state.get("exp_avg"), state.get("exp_avg_sq")):
            if tensor is not None:
                tensor *= mask


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Start Adam's state from nothing."""
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, Tensor):
                tensor.zero_()


def rate(step: int, settings: Settings) -> float:
    """Warm-up over a fifteenth of the steps, then half a cosine, as `secateur finetune` does."""
    warm = max(1, round(settings.steps / 15))
    if step < warm:
        return settings.lr * (step + 1) / warm
    return settings.lr / 2 * (1 + math.cos(math.pi * (step - warm) / max(1, settings.steps - warm)))


def sparsity_of(weights: Iterable[Tensor]) -> float:
    """The share of exact zeros."""
    found = list(weights)
    return sum(int((one == 0).sum()) for one in found) / sum(one.numel() for one in found)
