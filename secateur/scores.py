"""Scores: pure elementwise functions from facts about a weight to how much it deserves to stay.

A score's argument names say which facts it reads (as pytest's fixtures do), its defaults are options, higher is
kept. Facts arrive as flat fp32 tensors whatever the storage dtype, a chunk at a time, so a score may not mix
elements. Every built-in uses only + * / sqrt and abs, no pow or exp: the same weight gets the same bits in any chunk
and on any rank, and masks can be compared with `torch.equal`. (Between a CPU and a GPU a score may differ in its last
bit: torch's square root on CPUs is not always rounded correctly.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur.errors import ScoreError
from secateur.registry import mixed, score
from secateur.registry import scores as scores


def power(value: Tensor, exponent: float) -> Tensor:
    """value ** exponent, a new tensor, for exponents in (0, 1] that are multiples of 1/16, by square roots alone.

    `torch.pow` rounds differently in a vector loop and in its tail, so it would tie a mask to the chunking.
    """
    sixteenths = exponent * 16
    if not 0 < sixteenths <= 16 or sixteenths != int(sixteenths):
        nearest = min(max(round(sixteenths), 1), 16)
        raise ScoreError(f"The exponent must be a multiple of 1/16 in (0, 1], got {exponent}. Nearest: {nearest / 16}.")
    if sixteenths == 16:
        return value.clone()
    result, root, rest = None, value, int(sixteenths)
    for bit in (8, 4, 2, 1):
        if not rest:
            break
        root = root.sqrt() if root is value or root is result else root.sqrt_()  # reuse what is ours alone
        if rest & bit:
            result = root if result is None else result * root
            rest -= bit
    assert result is not None
    return result


def _toward_zero(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, eps: float) -> Tensor:
    """sign(w) m / (sqrt v + eps): positive where Adam's next step shrinks |w|, for that step is -m / sqrt v."""
    return weight.sign() * exp_avg / (exp_avg_sq.sqrt() + eps)


@score(aliases=("bitter1", "bitter2"), scope="layer")
def magnitude(weight: Tensor) -> Tensor:
    """|w|"""
    return weight.abs()


@score
def bitter0(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, eps: float = 1e-8) -> Tensor:
    """w^2 |m| / (sqrt v + eps)"""
    return weight.square() * exp_avg.abs() / (exp_avg_sq.sqrt() + eps)


@score
def bitter3(weight: Tensor, exp_avg: Tensor, eps: float = 1e-8) -> Tensor:
    """|w| sqrt(|m| + eps)"""
    return weight.abs() * (exp_avg.abs() + eps).sqrt()


@score(allocation="depth")
def bitter4(weight: Tensor, exp_avg: Tensor, eps: float = 1e-8) -> Tensor:
    """|w| sqrt(|m| + eps), later layers losing more (allocation "depth")"""
    return bitter3(weight, exp_avg, eps)


@score
def bitter5(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, eps: float = 1e-8) -> Tensor:
    """-sign(w) m / (sqrt v + eps) + 0.1 |w|: weights Adam is pushing toward zero go first"""
    return 0.1 * weight.abs() - _toward_zero(weight, exp_avg, exp_avg_sq, eps)


@score
def bitter6(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, eps: float = 1e-8) -> Tensor:
    """|w| sqrt(|m| + eps) sqrt(m^2 / (v + eps))"""
    return bitter3(weight, exp_avg, eps) * (exp_avg.square() / (exp_avg_sq + eps)).sqrt()


@score
def bitter7(weight: Tensor, exp_avg_sq: Tensor, eps: float = 1e-8) -> Tensor:
    """|w| (v + eps)^(1/4)"""
    # One buffer for the whole chain: |w r| = |w| r to the bit, and it stays in cache.
    return (exp_avg_sq + eps).sqrt_().sqrt_().mul_(weight).abs_()


def correction(beta: float, step: Any) -> Any:
    """1 / (1 - beta^step), what undoes Adam's start from zero. A factor, not a divisor: torch divides by one number
    on CPUs, but on GPUs it multiplies by the reciprocal, and the last bit would depend on the device."""
    return 1 / (1 - beta**step)


@score
def bitter8(weight: Tensor, exp_avg: Tensor, step: Any, beta1: float, eps: float = 1e-8) -> Tensor:
    """|w| sqrt(|m_hat| + eps), m_hat = m / (1 - beta1^step)"""
    return bitter3(weight, exp_avg * correction(beta1, step), eps)


@score
def bitter9(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, eps: float = 1e-8) -> Tensor:
    """|w| sqrt(|m| + eps) - 0.1 sign(w) m / (sqrt v + eps)"""
    return bitter3(weight, exp_avg, eps) - 0.1 * _toward_zero(weight, exp_avg, exp_avg_sq, eps)


@score
def variance(weight: Tensor, exp_avg_sq: Tensor, q: float = 1 / 4) -> Tensor:
    """|w| v^q, q a multiple of 1/16"""
    return power(exp_avg_sq, q).mul_(weight).abs_()


@score
def fisher(weight: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """|w| sqrt v: the root of the diagonal Fisher cost w^2 v"""
    return variance(weight, exp_avg_sq, q=1 / 2)


@score
def gradient(weight: Tensor, gradient: Tensor) -> Tensor:
    """|w| |g|: what the loss would change by, to first order, if the weight were gone"""
    return weight.abs() * gradient


@score
def displacement(weight: Tensor, initial_weight: Tensor) -> Tensor:
    """w (w - w0): how far a weight has moved away from zero since pruning was set up"""
    return weight * (weight - initial_weight)


@score
def movement(movement_sum: Tensor) -> Tensor:
    """-sum of w g over the steps so far (Sanh et al. 2020)"""
    return movement_sum


@score(scope="row")
def wanda(weight: Tensor, input_norm: Tensor) -> Tensor:
    """|w| ||x||: weight times the L2 norm of the input feature it multiplies (Sun et al. 2023)"""
    return weight.abs() * input_norm


@score
def random(index: Tensor, seed: int = 0) -> Tensor:
    """A hash of the weight's position in the model: uniform in [0, 1), the same on every device and world size"""
    offset = (0x9E3779B97F4A7C * (seed + 1) + 2**63) % 2**64 - 2**63  # torch takes no number past an int64
    return (mixed(index + offset) >> 8).to(torch.float32) * 2.0**-24
