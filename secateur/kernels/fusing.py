"""Which scores a kernel can compute in registers, from what, and with which constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Fused:
    """A score as kernels take it: a formula, its facts in the formula's order, and its constants."""

    formula: int
    facts: tuple[Tensor, ...]
    eps: float = 0.0
    sixteenths: int = 0  # exponent of VARIANCE
    scale: Any = 1.0  # factor on the first moment in MOMENTUM; a number or a tensor of one
    spread: tuple[int, int] = (1, 1)  # the last fact of WANDA is read at (index // spread[0]) % spread[1]


def _variance(options: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"eps": float(options.get("eps", 0.0)), "sixteenths": int(16 * options.get("q", 1 / 4))}


def _fisher(options: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"sixteenths": 8}


def _eps(options: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"eps": float(options["eps"])}


def _corrected(options: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"eps": float(options["eps"]), "scale": correction(facts["beta1"], facts["step"])}


def _nothing(options: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    return {}


Constants = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]

RULES: dict[Callable[..., Tensor], tuple[int, tuple[str, ...], Constants]] = {
    magnitude: (MAGNITUDE, ("weight",), _nothing),
    bitter7: (VARIANCE, ("weight", "exp_avg_sq"), _variance),
    variance: (VARIANCE, ("weight", "exp_avg_sq"), _variance),
    fisher: (VARIANCE, ("weight", "exp_avg_sq"), _fisher),
    bitter3: (MOMENTUM, ("weight", "exp_avg"), _eps),
    bitter4: (MOMENTUM, ("weight", "exp_avg"), _eps),
    bitter8: (MOMENTUM, ("weight", "exp_avg"), _corrected),
    bitter0: (BITTER0, ("weight", "exp_avg", "exp_avg_sq"), _eps),
    bitter6: (BITTER6, ("weight", "exp_avg", "exp_avg_sq"), _eps),
    wanda: (WANDA, ("weight", "input_norm"), _nothing),
}


def fuse(score: Score, facts: Mapping[str, Any]) -> Fused | None:
    """The score of these facts as kernels take it, or None where it must be evaluated by torch."""
    rule = RULES.get(score.function)
    if rule is None:
        return None
    formula, names, constants = rule
    tensors = tuple(facts[name] for name in names)
    spread = (1, max(1, tensors[0].numel()))
    if formula == WANDA:
        found = spread_of(tensors[-1])
        if found is None:
            return None
        spread = found
    plain = tensors[:-1] if formula == WANDA else tensors
    if not all(t.is_contiguous() for t in plain) or not all(t.dtype in FLOATS for t in tensors):
        return None
    return Fused(formula, tensors, spread=spread, **constants({**score.defaults, **score.options}, facts))


def spread_of(tensor: Tensor) -> tuple[int, int] | None:
    """How an expanded tensor repeats: flat index i reads element (i // first) % second. None if it is laid out else."""
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
