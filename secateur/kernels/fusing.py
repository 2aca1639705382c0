"""Which scores a kernel can compute in registers, from what, and with which constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.registry import Score
from secateur.scores import (
    bitter0,
    bitter3,
    bitter4,
    bitter6,
    bitter7,
    bitter8,
    correction,
    fisher,
    magnitude,
    variance,
    wanda,
)

# What kernels know how to compute. GIVEN reads scores that were evaluated beforehand.
GIVEN, MAGNITUDE, VARIANCE, MOMENTUM, BITTER0, BITTER6, WANDA = range(7)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Plan(NamedTuple):
    """How a score is fused: its formula, the facts it takes in order, and constants that hold for every tensor."""

    formula: int
    names: tuple[str, ...]
    eps: float = 0.0
    sixteenths: int = 0
    corrected: bool = False  # the first moment is scaled by Adam's bias correction

    @property
    def rough(self) -> bool:
        """Whether quick roots may be taken first. They take numbers below 1e-38 for zero, which an eps makes up for;
        without one (or with a root over a quotient) such a number's root would be lost."""
        return self.formula != BITTER6 and (self.eps >= 1e-20 or self.formula in (MAGNITUDE, WANDA))


_RULES: dict[Callable[..., Tensor], tuple[int, tuple[str, ...]]] = {
    magnitude: (MAGNITUDE, ("weight",)),
    bitter7: (VARIANCE, ("weight", "exp_avg_sq")),
    variance: (VARIANCE, ("weight", "exp_avg_sq")),
    fisher: (VARIANCE, ("weight", "exp_avg_sq")),
    bitter3: (MOMENTUM, ("weight", "exp_avg")),
    bitter4: (MOMENTUM, ("weight", "exp_avg")),
    bitter8: (MOMENTUM, ("weight", "exp_avg")),
    bitter0: (BITTER0, ("weight", "exp_avg", "exp_avg_sq")),
    bitter6: (BITTER6, ("weight", "exp_avg", "exp_avg_sq")),
    wanda: (WANDA, ("weight", "input_norm")),
}
_EXPONENTS = {bitter7: 4, fisher: 8}


class Fused(NamedTuple):
    """A score of one tensor as kernels take it."""

    plan: Plan
    facts: tuple[Tensor, ...]
    scale: Any = 1.0  # factor on the first moment; a number or a tensor of one
    spread: tuple[int, int] = (1, 1)  # the last fact of WANDA is read at (index // spread[0]) % spread[1]


def plan_for(score: Score) -> Plan | None:
    """How this score is fused, or None if torch must evaluate it."""
    rule = _RULES.get(score.function)
    if rule is None:
        return None
    options = {**score.defaults, **score.options}
    sixteenths = _EXPONENTS.get(score.function, int(16 * options.get("q", 0)))
    return Plan(*rule, float(options.get("eps", 0.0)), sixteenths, score.function is bitter8)


def fuse(plan: Plan, facts: Mapping[str, Any]) -> Fused | None:
    """The score of these facts as kernels take it, or None where it must be evaluated by torch."""
    tensors = tuple([facts[name] for name in plan.names])
    spread: tuple[int, int] | None = (1, 1)
    plain = tensors
    if plan.formula == WANDA:
        spread, plain = spread_of(tensors[-1]), tensors[:-1]
    for tensor in plain:
        if not tensor.is_contiguous() or tensor.dtype not in FLOATS:
            return None
    if spread is None:
        return None
    return Fused(plan, tensors, correction(facts["beta1"], facts["step"]) if plan.corrected else 1.0, spread)


def spread_of(tensor: Tensor) -> tuple[int, int] | None:
    """How an expanded tensor repeats: flat index i reads element (i // first) % second. None if it is laid out else."""
    if tensor.dtype not in FLOATS:
        return None
    moving = [dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1 and tensor.stride(dim) != 0]
    if not moving:
        return (1, 1)
    first, last = moving[0], moving[-1]
    expected = 1
    for dim in range(last, first - 1, -1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != expected:
            return None
        expected *= tensor.shape[dim]
    return math.prod(tensor.shape[last + 1 :]), expected
