"""Scores: one number per weight, higher is kept. `@score` registers a function; every built-in score is in this file.

A score is a pure elementwise function. Its arguments without a default name the facts it reads (`weight`, `exp_avg`,
`exp_avg_sq`, `gradient`, `input_norm`, ...), those with a default are its options. A new score is one such function.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from secateur.errors import ScoreError, nearest

# Facts that are one number per tensor instead of one per weight, each with a value to test a new score on.
SCALAR_FACTS = {"step": 10.0, "beta1": 0.9, "beta2": 0.999}


@dataclass(frozen=True)
class Score:
    """A registered function with its options, and the scope and allocation it uses by default."""

    name: str
    function: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    scope: str | None = None
    allocation: str | None = None

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """Names of the facts this score reads."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.default is p.empty)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The options of the function and their default values."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    def __call__(self, **facts: Any) -> Tensor:
        return self.function(**facts, **self.options)

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.name}({options})" if options else self.name


_REGISTERED: dict[str, Score] = {}


def scores() -> list[str]:
    """Sorted names of every registered score."""
    return sorted(_REGISTERED)


def score(
    function: Callable[..., Tensor] | None = None,
    *,
    aliases: tuple[str, ...] = (),
    scope: str | None = None,
    allocation: str | None = None,
) -> Any:
    """Register a pure elementwise function as a score: `@score`, or `@score(...)` with options.

    `scope` is the default of `prune` and `probe` for this score, usually that of its paper; `allocation` is the default
    of a Pruner in scope "model". `aliases` are other names for the same formula, without that scope.
    """
    if function is None:
        return lambda wrapped: score(wrapped, aliases=aliases, scope=scope, allocation=allocation)
    for name in (function.__name__, *aliases):
        own = scope if name == function.__name__ else None
        entry = Score(name, function, scope=own, allocation=allocation)
        known = _REGISTERED.get(name)
        if known is not None and _origin(known.function) != _origin(function):
            raise ScoreError(f"A score named {name!r} exists already ({_origin(known.function)}). Choose another name.")
        _check_contract(entry)
        _REGISTERED[name] = entry
    return function


def resolve(wanted: str | Callable[..., Tensor] | Score) -> Score:
    """The Score meant by a name ("variance"), a name with options ("variance(q=0.375)"), or a registered function."""
    if isinstance(wanted, Score):
        return wanted
    if not isinstance(wanted, str):
        for entry in _REGISTERED.values():
            if entry.function is wanted:
                return entry
        raise ScoreError(f"{wanted!r} is not a registered score. Decorate the function with @secateur.score first.")
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", wanted, flags=re.DOTALL)
    name = match.group(1) if match else wanted
    if name not in _REGISTERED:
        raise ScoreError(f"No score is named {name!r}.{nearest(name, _REGISTERED)} Registered: {', '.join(scores())}.")
    options = _parse_options(wanted, match.group(2) or "") if match else {}
    return with_options(_REGISTERED[name], options)


def with_options(entry: Score, options: Mapping[str, Any]) -> Score:
    """The same score with some options set, each checked against those the function has."""
    for key in options:
        if key not in entry.defaults:
            known = ", ".join(f"{k}={v!r}" for k, v in entry.defaults.items()) or "none"
            raise ScoreError(f"Score {entry.name!r} has no option {key!r}. Its options: {known}.")
    configured = replace(entry, options={**entry.options, **options})
    if options:
        _check_contract(configured)
    return configured


def _parse_options(wanted: str, text: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            return {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, ZeroDivisionError):
        pass
    raise ScoreError(f"Cannot read {wanted!r}. Write options as numbers, as in 'variance(q=3/8)'.")


def _value(node: ast.expr) -> Any:
    """A literal, or the quotient of two."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return ast.literal_eval(node.left) / ast.literal_eval(node.right)
    return ast.literal_eval(node)


def _origin(function: Callable[..., Tensor]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _check_contract(entry: Score) -> None:
    """Evaluate on eight made-up weights, whole and in halves, to find scores that mix elements, use random numbers or
    write into their arguments."""
    size = 8
    made_up = torch.linspace(0.9, 0.1, size, dtype=torch.float32, device="cpu")
    facts: dict[str, Any] = dict.fromkeys(entry.needs, made_up)
    facts |= {name: value for name, value in SCALAR_FACTS.items() if name in facts}
    signs = torch.tensor([1.0, -1.0], dtype=torch.float32, device="cpu").repeat(size // 2)
    facts |= {name: facts[name] * signs for name in ("weight", "exp_avg") if name in facts}
    if "index" in facts:
        facts["index"] = torch.arange(size, device="cpu")

    def part(where: slice) -> dict[str, Any]:
        return {name: v[where].clone() if isinstance(v, Tensor) else v for name, v in facts.items()}

    given = part(slice(0, size))
    try:
        whole = entry(**given).clone()
        halves = [entry(**part(half)) for half in (slice(0, size // 2), slice(size // 2, size))]
        elementwise = whole.shape == (size,) and all(half.shape == (size // 2,) for half in halves)
        elementwise = elementwise and torch.allclose(whole, torch.cat(halves), rtol=0, atol=0, equal_nan=True)
    except ScoreError:
        raise
    except Exception as error:
        raise ScoreError(f"Score {entry.name!r} failed on flat tensors of {size} made-up weights: {error}") from error
    if not elementwise:
        raise ScoreError(
            f"Score {entry.name!r} must be elementwise and deterministic: one number per weight, from that weight's"
            " facts alone. It is evaluated in chunks, so sums or means over a tensor, or random numbers, cannot work."
        )
    if any(isinstance(v, Tensor) and not torch.equal(v, given[name]) for name, v in facts.items()):
        raise ScoreError(
            f"Score {entry.name!r} writes into its arguments, which are the weights and moments themselves. Use"
            " operations that return new tensors."
        )


def mixed(numbers: Tensor) -> Tensor:
    """A 32-bit hash of each int64, the same on every device (two rounds of an integer hash finalizer)."""
    bits = numbers ^ (numbers >> 32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = bits & 0xFFFFFFFF
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def power(value: Tensor, exponent: float) -> Tensor:
    """value ** exponent as a new tensor, by square roots alone; exponents are multiples of 1/16 in (0, 1].

    `torch.pow` rounds differently in the vectorized loop and in its tail, so masks would depend on the chunking.
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
        root = root.sqrt() if root is value or root is result else root.sqrt_()  # in place where no one else uses it
        if rest & bit:
            result = root if result is None else result * root
            rest -= bit
    assert result is not None
    return result


def _toward_zero(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, eps: float) -> Tensor:
    """sign(w) m / (sqrt v + eps): positive where Adam's next step, -m / sqrt v, shrinks |w|."""
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
    # One buffer for the whole chain stays in cache; |w r| equals |w| r to the bit.
    return (exp_avg_sq + eps).sqrt_().sqrt_().mul_(weight).abs_()


def correction(beta: float, step: Any) -> Any:
    """Adam's bias correction 1 / (1 - beta^step), as a factor: torch divides by a scalar on CPUs but multiplies by its
    reciprocal on GPUs, so with a divisor the last bit would depend on the device."""
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
    """|w| |g|: what the loss of a batch would change by, to first order, if the weight were gone; |g| is the mean"""
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
    offset = (0x9E3779B97F4A7C * (seed + 1) + 2**63) % 2**64 - 2**63  # torch accepts no number beyond int64
    return (mixed(index + offset) >> 8).to(torch.float32) * 2.0**-24
