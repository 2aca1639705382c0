"""Sites: which tensors of a model are prunable, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from secateur.errors import SiteError
from secateur.tiles import Layout

# Names by which models call the layer that makes their output; it is left dense unless `only` names it. So is the last
# layer inside a container of one of the second names.
HEADS = ("*lm_head", "*embed_out", "*qa_outputs", "head", "*.head", "score", "*.score", "fc", "output")
HEAD_CONTAINERS = ("head", "heads", "classifier")
ROUTERS = ("*.router", "*.gate")
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # put into names by torch.compile and checkpointing of parts

VECTOR = "bias, norm or vector"

Globs = str | Sequence[str]
Use = tuple[str, nn.Module, nn.Parameter]  # a parameter under one of its names, and the module it belongs to there


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


def plain_name(name: str) -> str:
    """A parameter's name without what compiling and checkpointing put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def find_sites(
    model: nn.Module, skip: Globs | None = (), only: Globs | None = None
) -> tuple[list[Site], list[LeftOut]]:
    """Every parameter of the model, once: as a site, or left out with the reason.

    `skip` and `only` are glob patterns for parameter or module names. Heads and embeddings are left out unless `only`
    matches them (an embedding only where it is tied to a layer that can be pruned).
    """
    skip, only = _globs(skip), None if only is None else _globs(only)
    named: dict[int, list[Use]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{module_name}.{leaf}" if module_name else leaf
            named.setdefault(id(parameter), []).append((plain_name(name), module, parameter))
    _check_globs([name for uses in named.values() for name, _, _ in uses], (*skip, *(only or ())))
    heads = _heads(model, named.values())
    sites: list[Site] = []
    left_out: list[LeftOut] = []
    start = 0
    for uses in named.values():
        found = _judge(uses, skip, only, heads)
        if isinstance(found, Site):
            sites.append(replace(found, start=start))
            start += found.parameter.numel()
        else:
            left_out.append(found)
    return sites, left_out


def _judge(uses: Sequence[Use], skip: Sequence[str], only: Sequence[str] | None, heads: set[str]) -> Site | LeftOut:
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
    if not parameter.numel():
        return out("empty")
    if not parameter.requires_grad:
        return out("frozen (requires_grad is False)")
    if any(_matches(n, skip) for n in names):
        return out("skipped by name")
    reason = _left_by_default(uses, heads) if only is None else None
    if only is not None and not any(_matches(n, only) for n in names):
        reason = "not named by only"
    name, layout = prunable[0]
    return out(reason) if reason else Site(name, parameter, layout, tuple(n for n in names if n != name))


def _left_by_default(uses: Sequence[Use], heads: set[str]) -> str | None:
    """Why a weight that could be pruned is left alone unless it is asked for by name."""
    if any(isinstance(module, nn.Embedding) for _, module, _ in uses):
        return "embedding"
    if not heads.isdisjoint(name for name, _, _ in uses):
        return "head (only=... prunes it)"
    # A gate with as many outputs as inputs is half of a gated network; one with few chooses experts.
    name, _, parameter = uses[0]
    if _is_called(name, ROUTERS) and parameter.shape[0] * 4 <= parameter.shape[-1]:
        return "router (only=... prunes it)"
    return None


def _layout(name: str, module: nn.Module, parameter: nn.Parameter) -> Layout | None:
    """How the weight is laid out, or None when it is not one of the kinds that can be pruned."""
    leaf = name.rpartition(".")[2]
    if parameter.is_complex():
        return None
    if leaf == "weight" and isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Layout()
    if leaf == "weight" and parameter.ndim == 2 and "Conv1D" in _kinds(module):  # transformers': [inputs, outputs]
        return Layout(rows=(1,), inputs=0)
    if isinstance(module, nn.MultiheadAttention) and leaf.endswith("proj_weight"):
        return Layout()
    if _stacks_experts(leaf, module, parameter):
        # [experts, outputs, inputs]; transformers marks most of those it stores the other way round.
        turned = getattr(module, "is_transposed", False) or _kinds(module) & {"Llama4TextExperts"}
        return Layout(rows=(0, 2), inputs=1) if turned else Layout(rows=(0, 1), inputs=2)
    return None


def _stacks_experts(leaf: str, module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether this is the weight of several experts in one: three dimensions, and not known to be anything else."""
    other = isinstance(module, nn.modules.conv._ConvNd | nn.Bilinear | nn.utils.parametrize.ParametrizationList)
    table = not {"embed", "embedding", "embeddings", "pos", "position", "token"}.isdisjoint(leaf.split("_"))
    return parameter.ndim == 3 and min(parameter.shape) > 1 and not other and not table


def _kinds(module: nn.Module) -> set[str]:
    """Names of the module's class and those it derives from: fully_shard puts a class of its own in front."""
    return {kind.__name__ for kind in type(module).__mro__}


def _heads(model: nn.Module, named: Iterable[Sequence[Use]]) -> set[str]:
    """Names of the weights that make the output: by their own name, by the container's, or as the model tells."""
    ask = getattr(model, "get_output_embeddings", None)
    try:
        told = ask() if callable(ask) else None
    except Exception:  # a foreign model's own method; without its answer we still know heads by name
        told = None
    heads: set[str] = set()
    last: dict[str, str] = {}
    for name, module, parameter in (use for uses in named for use in uses):
        if module is told or _is_called(name, HEADS):
            heads.add(name)
        elif _layout(name, module, parameter) is not None:
            parts = name.split(".")[:-1]
            places = [place for place, part in enumerate(parts) if part in HEAD_CONTAINERS]
            last |= {".".join(parts[: place + 1]): name for place in places}
    return heads | set(last.values())


def _globs(patterns: Globs | None) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns or ())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits the parameter's name or that of any module around it."""
    parts = name.split(".")
    around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatchcase(part, glob) for glob in patterns for part in around)


def _is_called(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits the name of the very module the parameter belongs to."""
    return any(fnmatchcase(name.rpartition(".")[0], glob) for glob in patterns)


def _check_globs(names: Sequence[str], patterns: Iterable[str]) -> None:
    for glob in patterns if names else ():
        if not any(_matches(name, [glob]) for name in names):
            raise SiteError(f"No parameter or module matches {glob!r}. Names look like {names[0]!r} and {names[-1]!r}.")


def nothing_to_prune(model: nn.Module, left_out: Sequence[LeftOut]) -> SiteError:
    """The error for a model without sites, with the reasons that tell most."""
    telling = [f"{item.name}: {item.reason}" for item in left_out if item.reason != VECTOR]
    return SiteError(f"Nothing to prune in {type(model).__name__}. {'; '.join(telling[:6])}")
