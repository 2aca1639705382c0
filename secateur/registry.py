"""The table of scores: `@score` puts a function in it, `resolve` takes one out by name, with options."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from secateur.errors import ScoreError

# Facts that are one number per tensor rather than one per weight, each with a value to try a new score on.
SCALAR_FACTS = {"step": 10.0, "beta1": 0.9, "beta2": 0.999}


@dataclass(frozen=True)
class Score:
    """A registered function with its options filled in."""

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
        """The options the function declares, at their default values."""
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
    """Register a pure elementwise function as a score. Use bare (`@score`) or with options.

    `scope` is that of the score's paper, the default after training; `allocation` is the layer allocation a Pruner uses
    unless told otherwise. `aliases` are further names for the same formula, without that scope.
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
        near = difflib.get_close_matches(name, _REGISTERED, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ScoreError(f"No score is named {name!r}.{hint} Registered: {', '.join(scores())}.")
    options = _parse_options(wanted, match.group(2) or "") if match else {}
    return with_options(_REGISTERED[name], options)


def with_options(entry: Score, options: Mapping[str, Any]) -> Score:
    """The same score with some options set, each checked against those the function declares."""
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
    raise ScoreError(f"Cannot read {wanted!r}. Write options as numbers: 'variance(q=3/8)'.")


def _value(node: ast.expr) -> Any:
    """A literal, or a fraction of two."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return ast.literal_eval(node.left) / ast.literal_eval(node.right)
    return ast.literal_eval(node)


def _origin(function: Callable[..., Tensor]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _check_contract(entry: Score) -> None:
    """Evaluate on eight made-up weights, whole and in halves: a score that mixes elements, draws random numbers or
    writes into what it is given shows here."""
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
            " facts alone. It is evaluated in chunks, so sums or means over a tensor, or random draws, cannot work."
        )
    if any(isinstance(v, Tensor) and not torch.equal(v, given[name]) for name, v in facts.items()):
        raise ScoreError(
            f"Score {entry.name!r} writes into its arguments, which are the weights and moments themselves."
        )


def mixed(numbers: Tensor) -> Tensor:
    """Thirty-two well-mixed bits for each int64, the same everywhere (the finalizer of a 32-bit hash, twice)."""
    bits = numbers ^ (numbers >> 32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = bits & 0xFFFFFFFF
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return bits ^ (bits >> 16)
