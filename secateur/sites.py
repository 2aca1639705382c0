"""Sites: which tensors of a model are prunable, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from secateur.errors import SiteError
from secateur.tiles import Layout

# Names by which models call the layer that makes their output; it is left dense unless `only` names it.
HEADS = (
    "*lm_head",
    "*embed_out",
    "head",
    "*.head",
    "classifier",
    "*.classifier",
    "score",
    "*.score",
    "fc",
    "output",
)

VECTOR = "bias, norm or vector"

Globs = str | Sequence[str]


@dataclass(frozen=True, eq=False)
class Site:
    """A prunable tensor: its parameter, how rows and inputs lie in it, where it begins in the model's flat order."""

    name: str
    parameter: nn.Parameter
    layout: Layout
    tied: tuple[str, ...] = ()
    start: int = 0


@dataclass(frozen=True)
class LeftOut:
    """A tensor that stays dense, and why."""

    name: str
    numel: int
    reason: str


def find_sites(model: nn.Module, skip: Globs = (), only: Globs | None = None) -> tuple[list[Site], list[LeftOut]]:
    """Every parameter of the model, once: as a site, or left out with the reason.

    `skip` and `only` are glob patterns for parameter or module names. Heads and embeddings are left out unless `only`
    matches them (an embedding only where it is tied to a layer that can be pruned).
    """
    skip, only = _globs(skip), None if only is None else _globs(only)
    named: dict[int, list[tuple[str, nn.Module, nn.Parameter]]] = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{module_name}.{leaf}" if module_name else leaf
            named.setdefault(id(parameter), []).append((name, module, parameter))
    _check_globs([name for uses in named.values() for name, _, _ in uses], (*skip, *(only or ())))
    output = _output_layer(model)
    sites: list[Site] = []
    left_out: list[LeftOut] = []
    start = 0
    for uses in named.values():
        found = _judge(uses, skip, only, output)
        if isinstance(found, Site):
            sites.append(replace(found, start=start))
            start += found.parameter.numel()
        else:
            left_out.append(found)
    return sites, left_out


def _judge(
    uses: Sequence[tuple[str, nn.Module, nn.Parameter]], skip: Sequence[str], only: Sequence[str] | None, output: Any
) -> Site | LeftOut:
    """One parameter, under all the names it goes by."""
    names = [name for name, _, _ in uses]
    parameter = uses[0][2]
    prunable = [(name, layout) for name, module, _ in uses if (layout := _layout(name, module, parameter)) is not None]

    def out(reason: str) -> LeftOut:
        return LeftOut(
            names[0], parameter.numel(), reason + (f"; tied with {', '.join(names[1:])}" if names[1:] else "")
        )

    if not prunable:
        embedding = any(isinstance(module, nn.Embedding) for _, module, _ in uses)
        return out("embedding" if embedding else VECTOR if parameter.ndim < 2 else "not a kind of weight we prune")
    name, layout = prunable[0]
    if not parameter.requires_grad:
        return out("frozen (requires_grad is False)")
    if any(_matches(n, skip) for n in names):
        return out("skipped by name")
    if only is not None:
        if not any(_matches(n, only) for n in names):
            return out("not named by only")
    elif len(prunable) < len(uses) and any(isinstance(module, nn.Embedding) for _, module, _ in uses):
        return out("embedding")
    elif any(module is output for _, module, _ in uses) or any(_matches(n, HEADS) for n in names):
        return out("head (only=... prunes it)")
    return Site(name, parameter, layout, tuple(n for n in names if n != name))


def _layout(name: str, module: nn.Module, parameter: nn.Parameter) -> Layout | None:
    """How the weight is laid out, or None when it is not one of the kinds that can be pruned."""
    leaf = name.rpartition(".")[2]
    if leaf == "weight" and isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Layout()
    # transformers' Conv1D is a Linear stored [inputs, outputs]; fully_shard derives a class from it.
    if leaf == "weight" and parameter.ndim == 2 and any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):
        return Layout(rows=(1,), inputs=0)
    stacked = parameter.ndim == 3 and min(parameter.shape) > 1 and not any(w in name for w in ("embed", "pos", "token"))
    if stacked and not isinstance(module, nn.modules.conv._ConvNd):
        # Experts of a mixture, [experts, outputs, inputs]; transformers marks those stored the other way round.
        return (
            Layout(rows=(0, 2), inputs=1) if getattr(module, "is_transposed", False) else Layout(rows=(0, 1), inputs=2)
        )
    return None


def _output_layer(model: nn.Module) -> Any:
    ask = getattr(model, "get_output_embeddings", None)
    try:
        return ask() if callable(ask) else None
    except Exception:  # a foreign model's own method; without its answer we still know heads by name
        return None


def _globs(patterns: Globs) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) or fnmatchcase(name.rpartition(".")[0], glob) for glob in patterns)


def _check_globs(names: Sequence[str], patterns: Iterable[str]) -> None:
    for glob in patterns:
        if not any(_matches(name, [glob]) for name in names):
            raise SiteError(f"No parameter or module matches {glob!r}. Names look like {names[0]!r} and {names[-1]!r}.")
