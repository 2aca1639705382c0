"""Sites: which tensors of a model are prunable, and why the others are not.

What multiplies decides: the type of the module that owns a parameter, then how the module is built. Layers whose
weights are surely matrices are pruned by default; all other floating parameters of two or more dimensions when `only`
asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from secateur.errors import ModelError, SiteError
from secateur.model.distributed import local
from secateur.selection.tiles import Layout, Pattern, fits

# Names by which models call the layer that makes their output; it is left dense unless `only` names it. So is the last
# layer inside a container of one of the third names. Inside repeated blocks the second and third may mean something
# else, such as the heads of an attention: there they count only where no other layer follows.
SURE_HEADS = ("*lm_head", "*embed_out", "*qa_outputs", "fc", "output")
HEADS = ("head", "*.head", "score", "*.score")
HEAD_CONTAINERS = ("head", "heads", "classifier")
ROUTERS = ("*.router", "*.router.*", "*.gate")
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # put into names by torch.compile and checkpointing of parts

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, nn.Bilinear)
# What torch's older weight_norm, spectral_norm and prune rename a weight to. All of them keep its zeros.
REPARAMETRIZED = {"weight_v": "weight", "weight_orig": "weight"}

# Attributes by which modules tell how many inputs or experts they have, and words in names of tables of vectors.
INPUT_SIZES = ("in_features", "input_size", "in_channels", "input_dim", "in_dim", "group_in_dim")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_experts", "n_routed_experts", "n_shared_experts")
TABLES = {
    "embed", "embedding", "embeddings", "pos", "position", "positions", "token", "tokens", "query", "queries", "prompt",
    "prompts", "latent", "latents", "slots", "codebook", "codebooks", "register", "registers", "bias",
}  # fmt: skip
MATRICES = {"proj", "weight", "kernel"}  # words that outweigh those of tables: query_proj

STACK = Layout(rows=(0, 1), inputs=2)  # [matrices, outputs, inputs]
TURNED_STACK = Layout(rows=(0, 2), inputs=1)

VECTOR = "bias, norm or vector"
ASK = "only=... prunes it"

Globs = str | Sequence[str]


class When(IntEnum):
    """When a weight is pruned: by default, when `only` covers it, or when `only` names it and not just its region."""

    USUAL = 0
    COVERED = 1
    NAMED = 2


@dataclass(frozen=True)
class Kind:
    """What a weight is, how it is laid out, and when it is pruned."""

    what: str
    layout: Layout
    when: When


@dataclass(frozen=True, eq=False)
class Prunable:
    """A prunable tensor: its parameter, how rows and inputs lie in it, where it begins in the model's flat order.

    `reason` says why it is prunable where that is not plain from its layer. `fragile` weights are divided by the norm
    of a row, so no row may go whole (weight_norm).
    """

    name: str
    parameter: nn.Parameter
    layout: Layout
    tied: tuple[str, ...] = ()
    start: int = 0
    reason: str = ""
    fragile: bool = False


@dataclass(frozen=True)
class LeftOut:
    """A tensor that stays dense, and why."""

    name: str
    numel: int
    reason: str


@dataclass(frozen=True, eq=False)
class Use:
    """A parameter under one of its names. `module` is the layer it belongs to and `leaf` what it is called there, seen
    through a parametrization if there is one."""

    name: str
    parameter: nn.Parameter
    module: nn.Module
    leaf: str
    plain: str  # the name it would have without the parametrization
    through: ParametrizationList | None = None

    @property
    def owner(self) -> str:
        return self.plain.rpartition(".")[0]


Unfit = Callable[[Prunable], str | None]  # why a site must be left out, if it must


def fits_all(site: Prunable) -> str | None:
    """No site is left out."""
    return None


def plain_name(name: str) -> str:
    """A parameter's name without what compiling and checkpointing put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def find_prunable(
    model: nn.Module,
    skip: Globs | None = (),
    only: Globs | None = None,
    unfit: Unfit = fits_all,
) -> tuple[list[Prunable], list[LeftOut]]:
    """Every parameter of the model, once: as a site, or left out with the reason.

    `skip` and `only` are glob patterns for parameter or module names. What is left out by default is pruned if `only`
    matches it; a table of vectors, which nothing multiplies by, only if a glob names it or its own module and not just
    a region around it. `unfit` may give a reason to leave a site out that `only` did not ask for.
    """
    skip, only = _globs(skip), None if only is None else _globs(only)
    modules = {_path(name): module for name, module in model.named_modules(remove_duplicate=False)}
    ordered = _uses(model, modules)
    named: dict[int, list[Use]] = {}
    for use in ordered:
        named.setdefault(id(use.parameter), []).append(use)
    _check_globs(ordered, (*skip, *(only or ())))
    heads = _heads(model, ordered, modules)
    sites: list[Prunable] = []
    left_out: list[LeftOut] = []
    start = 0
    for uses in named.values():
        found = _judge(uses, skip, only, heads)
        if isinstance(found, Prunable) and only is None and (reason := unfit(found)):
            found = LeftOut(found.name, found.parameter.numel(), reason)
        if isinstance(found, Prunable):
            sites.append(replace(found, start=start))
            start += found.parameter.numel()
        else:
            left_out.append(found)
    return sites, left_out


def unfit_for(pattern: Pattern | None) -> Unfit:
    """Says of a site whether it cannot take this pattern."""

    def unfit(site: Prunable) -> str | None:
        if pattern is None or fits(site.parameter.shape, site.layout, pattern):
            return None
        return f"its shape does not divide into {pattern.text}; sparsity counts the others alone"

    return unfit


def _path(module_name: str) -> str:
    """What names of a module's parameters begin with."""
    return plain_name(module_name + ".") if module_name else ""


def _uses(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[Use]:
    """Every parameter under every name, in the order of the modules."""
    found = []
    for module_name, module in model.named_modules(remove_duplicate=False):
        path = _path(module_name)
        owner, inside, tensor = path.removesuffix(".").rpartition("parametrizations.")
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if inside and isinstance(module, ParametrizationList):
                found.append(Use(path + leaf, parameter, modules[owner], tensor, owner + tensor, module))
            else:
                found.append(Use(path + leaf, parameter, module, leaf, path + leaf))
    return found


def _judge(uses: Sequence[Use], skip: Sequence[str], only: Sequence[str] | None, heads: set[str]) -> Prunable | LeftOut:
    """One parameter, under all the names it goes by."""
    names = [use.name for use in uses]
    parameter = uses[0].parameter
    use, kind = min(((use, _kind(use)) for use in uses), key=lambda pair: pair[1].when)  # the first of the best

    def out(reason: str) -> LeftOut:
        return LeftOut(
            names[0], parameter.numel(), reason + (f"; tied with {', '.join(names[1:])}" if names[1:] else "")
        )

    if reason := _impossible(use) or (_default_reason(uses, kind, heads) if only is None else None):
        return out(reason)
    if not parameter.numel():
        return out("empty")
    if not parameter.requires_grad:
        return out("frozen (requires_grad is False)")
    if any(_matches(use, skip) for use in uses):
        return out("skipped by name")
    if only is not None and (reason := _not_asked(uses, kind, only)):
        return out(reason)
    asked = "" if only is None else "named by only"
    why = ", ".join(filter(None, (asked, kind.what)))
    tied = tuple(n for n in names if n != use.name)
    return Prunable(use.name, parameter, kind.layout, tied, reason=why, fragile=_is_fragile(use))


def _impossible(use: Use) -> str | None:
    """Why a parameter cannot be pruned whatever is asked."""
    parameter = use.parameter
    if use.through is not None and any(t.numel() > parameter.numel() for t in _originals(use.through)):
        return "norms of a parametrized weight"
    if foreign := _foreign(parameter):
        return f"{foreign}, not plain numbers (prune before quantizing)"
    if parameter.is_complex():
        return "complex"
    return VECTOR if parameter.ndim < 2 else None


def _foreign(parameter: Tensor) -> str | None:
    """What a parameter is whose values are not stored as plain floating point numbers, one for each weight."""
    inner = local(parameter)
    if is_traceable_wrapper_subclass(inner):
        return f"wrapped in {type(inner).__name__}"
    whole = not (parameter.is_floating_point() or parameter.is_complex())
    return f"quantized ({parameter.dtype})" if whole or parameter.dtype.itemsize == 1 else None


def _default_reason(uses: Sequence[Use], kind: Kind, heads: set[str]) -> str | None:
    """Why a weight is left alone unless it is asked for by name."""
    if any(isinstance(use.module, nn.Embedding) for use in uses):
        return "embedding"
    if kind.when is not When.USUAL:
        return kind.what if kind.what == VECTOR else f"{kind.what} ({ASK})"
    if not heads.isdisjoint(use.name for use in uses):
        return f"head ({ASK})"
    # A gate with as many outputs as inputs is half of a gated network; one with few chooses experts.
    name, parameter = uses[0].name, uses[0].parameter
    if _is_called(name, ROUTERS) and parameter.shape[0] * 4 <= parameter.shape[-1]:
        return f"router ({ASK})"
    return None


def _not_asked(uses: Sequence[Use], kind: Kind, only: Sequence[str]) -> str | None:
    """Why a weight stays dense although there is `only`; None when it is asked for."""
    if not any(_matches(use, only) for use in uses):
        return "not named by only"
    if kind.when is When.NAMED and not any(_names(use, only) for use in uses):
        return f"{kind.what} (name it in only=... to prune it)"
    if lost := _loses_zeros(uses[0]):
        if not {uses[0].name, uses[0].plain, uses[0].owner}.isdisjoint(only):
            raise SiteError(f"{uses[0].name!r} cannot be pruned: {lost}. Leave it out of only=..., or remove it first.")
        return lost
    return None


def _kind(use: Use) -> Kind:
    """What this parameter is where it is used. Vectors and foreign numbers are sorted out elsewhere."""
    leaf = REPARAMETRIZED.get(use.leaf, use.leaf) if isinstance(use.module, LAYERS) else use.leaf
    found = _layer_kind(leaf, use) or _stack_kind(leaf, use) or _custom_kind(leaf, use)
    if (use.through is not None or leaf != use.leaf) and found.when is When.USUAL:
        return Kind("parametrized", found.layout, When.COVERED)
    return found


def _layer_kind(leaf: str, use: Use) -> Kind | None:
    """The weights of torch's own layers, and transformers' Conv1D."""
    module, weight = use.module, leaf == "weight"
    if weight and isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Kind("", Layout(), When.USUAL)
    if weight and use.parameter.ndim == 2 and "Conv1D" in _kinds(module):  # transformers': [inputs, outputs]
        return Kind("", Layout(rows=(1,), inputs=0), When.USUAL)
    if isinstance(module, nn.MultiheadAttention) and leaf.endswith("proj_weight"):
        return Kind("", Layout(), When.USUAL)
    if weight and isinstance(module, TRANSPOSED):  # [inputs, outputs of a group, ...]
        return Kind("transposed convolution", Layout(rows=(1,), inputs=0, groups=module.groups), When.COVERED)
    if weight and isinstance(module, nn.Bilinear):
        return Kind("bilinear weight", Layout(rows=(0,), inputs=2), When.COVERED)
    if isinstance(module, RECURRENT) and leaf.startswith("weight"):
        return Kind("recurrent weight", Layout(), When.COVERED)
    if isinstance(module, nn.Embedding):
        return Kind("embedding", Layout(), When.NAMED)
    return None


def _stack_kind(leaf: str, use: Use) -> Kind | None:
    """Several matrices in one parameter of three dimensions: experts, or layers with a weight for each group."""
    parameter, words = use.parameter, set(leaf.lower().split("_"))
    if parameter.ndim != 3 or min(parameter.shape) < 2 or (words & TABLES and not words & MATRICES):
        return None
    kinds = " ".join(_kinds(use.module))
    grouped = leaf == "weight" and "Linear" in kinds
    if not (grouped or _holds_experts(use, kinds) or any(_chained(parameter, other) for other in _siblings(use))):
        return None
    return Kind("a matrix for each group" if grouped else "experts", _stacked(use), When.USUAL)


def _holds_experts(use: Use, kinds: str) -> bool:
    """Whether the module says that it holds experts: by a mark of transformers', by name, or by how many it has."""
    named = any("expert" in text.lower() for text in (kinds, use.leaf, use.owner.rpartition(".")[2]))
    counts = (getattr(use.module, name, None) for name in EXPERT_COUNTS)
    return named or hasattr(use.module, "is_transposed") or use.parameter.shape[0] in counts


def _siblings(use: Use) -> list[Tensor]:
    """Other parameters of the same module with as many matrices."""
    others = use.module.parameters(recurse=False)
    return [p for p in others if p is not use.parameter and p.ndim == 3 and len(p) == len(use.parameter)]


def _chained(one: Tensor, other: Tensor) -> bool:
    """Whether one of two stacks maps into a hidden space and the other back out of it, gate and input fused or not."""
    pairs = (one, other), (other, one)
    return any(_opens(up, down, turned) for up, down in pairs for turned in (False, True))


def _opens(up: Tensor, down: Tensor, turned: bool, fused: tuple[int, ...] = (1, 2)) -> bool:
    """Whether `down` takes what `up` gives, or half of it, and gives what `up` takes."""
    (hidden, inner), (outer, narrow) = (t.shape[:0:-1] if turned else t.shape[1:] for t in (up, down))
    return inner == outer and hidden in [narrow * times for times in fused]


def _stacked(use: Use) -> Layout:
    """[matrices, outputs, inputs], or the other way round if the module says so, or sizes of its weights do."""
    marked = getattr(use.module, "is_transposed", None)
    if marked is None and (size := _input_size(use)) in use.parameter.shape[1:]:
        marked = size != use.parameter.shape[2]
    if marked is None:
        pairs = [pair for other in _siblings(use) for pair in ((use.parameter, other), (other, use.parameter))]
        marked = "Llama4TextExperts" in _kinds(use.module) or any(_opens(up, down, True, (2,)) for up, down in pairs)
    return TURNED_STACK if marked else STACK


def _input_size(use: Use) -> int | None:
    """How many inputs the module says it has."""
    sizes = (getattr(use.module, name, None) for name in INPUT_SIZES)
    return next((size for size in sizes if isinstance(size, int)), None)


def _custom_kind(leaf: str, use: Use) -> Kind:
    """Parameters of modules that are not torch's. A matrix or a kernel called `weight` multiplies; others may not."""
    parameter, kinds = use.parameter, " ".join(_kinds(use.module)).lower()
    words = set(leaf.lower().split("_"))
    if "norm" in kinds or "bias" in words or parameter.numel() == max(parameter.shape, default=0):
        return Kind(VECTOR, _generic(use), When.NAMED)
    if "embed" in kinds or (words & TABLES and not words & MATRICES):
        return Kind("table of vectors", _generic(use), When.NAMED)
    if leaf == "weight" and (parameter.ndim == 2 or "conv" in kinds):
        kernel = parameter.ndim > 2
        return Kind("weight of a custom module", Layout() if kernel else _generic(use), When.COVERED)
    return Kind("not known to be a matrix", _generic(use), When.NAMED)


def _generic(use: Use) -> Layout:
    """[outputs, inputs] or [matrices, outputs, inputs], unless the module tells how many inputs it has."""
    shape = use.parameter.shape
    if len(shape) == 3:
        return _stacked(use)
    turned = len(shape) == 2 and _input_size(use) == shape[0] != shape[1]
    return Layout(rows=(1,), inputs=0) if turned else Layout()


def _kinds(module: nn.Module) -> set[str]:
    """Names of the module's class and those it derives from: fully_shard puts a class of its own in front."""
    return {kind.__name__ for kind in type(module).__mro__}


@torch.no_grad()
def _loses_zeros(use: Use) -> str | None:
    """Why zeros in a parametrized weight would not last: found by zeroing some and computing the weight."""
    if use.through is None:
        return None
    drawn = torch.rand(use.parameter.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    gone = drawn.to(use.parameter.device) < 0.5
    found = _made_without(use.through, use.parameter, gone)
    kept = found.shape == gone.shape and not bool((found[gone] != 0).any())
    kinds = ", ".join(type(step).__name__ for step in use.through)
    return None if kept else f"its parametrization ({kinds}) does not keep zeros"


@torch.no_grad()
def _is_fragile(use: Use) -> bool:
    """Whether a parametrization gives numbers that are not finite once a row or a column is zero altogether."""
    if use.through is None:
        return use.leaf == "weight_v"  # of torch's older weight_norm
    gone = torch.zeros(use.parameter.shape, dtype=torch.bool, device=use.parameter.device)
    gone[0] = gone[:, 0] = True
    return not bool(_made_without(use.through, use.parameter, gone).isfinite().all())


def _made_without(through: ParametrizationList, parameter: Tensor, gone: Tensor) -> Tensor:
    """The weight a parametrization computes when some of this parameter is zero. Nothing is changed."""
    modes = [(module, module.training) for module in through.modules()]
    try:
        through.eval()  # spectral_norm updates its estimate when it is called in training
        first, *others = list(through)
        found: Tensor = first(*(t.masked_fill(gone, 0) if t is parameter else t.clone() for t in _originals(through)))
        for step in others:
            found = step(found)
    finally:
        for module, mode in modes:
            module.training = mode
    return found


def _originals(through: ParametrizationList) -> list[Tensor]:
    """What a parametrization computes the weight from."""
    names = ["original"] if hasattr(through, "original") else [f"original{n}" for n in range(through.ntensors)]
    return [getattr(through, name) for name in names]


def _heads(model: nn.Module, ordered: Sequence[Use], modules: Mapping[str, nn.Module]) -> set[str]:
    """Names of the weights that make the output: by their own name, by the container's, or as the model tells."""
    ask = getattr(model, "get_output_embeddings", None)
    try:
        told = ask() if callable(ask) else None
    except Exception:  # a foreign model's own method; without its answer we still know heads by name
        told = None
    heads: set[str] = set()
    last: dict[str, str] = {}
    weights = [use.name for use in ordered if use.parameter.ndim > 1 and _kind(use).when is When.USUAL]
    is_last = cache(lambda path: _is_last(path, weights, modules))
    for use in ordered:
        path = use.name.rpartition(".")[0]
        if use.module is told or _is_called(use.name, SURE_HEADS) or (_is_called(use.name, HEADS) and is_last(path)):
            heads.add(use.name)
    for name in weights:
        parts = name.split(".")[:-1]
        tops = [place for place, part in enumerate(parts, 1) if part in HEAD_CONTAINERS]
        for place in tops if name not in heads else ():
            top = ".".join(parts[:place])
            if is_last(top):
                last[".".join(parts[: place + _is_parallel(top, modules)])] = name
    return heads | set(last.values())


def _is_parallel(container: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether this is a list of heads beside each other, each of which makes an output."""
    return container.endswith("heads") and isinstance(modules[container + "."], nn.ModuleList | nn.ModuleDict)


def _is_last(path: str, weights: Sequence[str], modules: Mapping[str, nn.Module]) -> bool:
    """Whether what is called a head can make the output. That is doubtful for `heads` and inside numbered blocks: there
    no other layer may follow it in any module around it. Members of a list do not follow each other."""
    parts = path.split(".")
    if parts[-1] != "heads" and not any(part.isdigit() for part in parts[:-1]):
        return True
    for depth in range(len(parts), 0, -1):
        around, inside = (".".join([*parts[:length], ""]) for length in (depth - 1, depth))
        if isinstance(modules[around], nn.ModuleList):
            continue
        final = max((number for number, name in enumerate(weights) if name.startswith(inside)), default=len(weights))
        if any(name.startswith(around) for name in weights[final + 1 :]):
            return False
    return True


def _globs(patterns: Globs | None) -> tuple[str, ...]:
    found = (patterns,) if isinstance(patterns, str) else patterns or ()
    if not isinstance(found, Iterable) or not all(isinstance(glob, str) for glob in found):
        raise SiteError(f"skip and only take names or globs of parameters and modules; got {patterns!r}.")
    return tuple(found)


def _matches(use: Use, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits the parameter's name or that of any module around it."""
    around = {use.plain}
    for name in (use.name, use.plain):
        parts = name.split(".")
        around |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return any(fnmatchcase(part, glob) for glob in patterns for part in around)


def _names(use: Use, patterns: Sequence[str]) -> bool:
    """Whether a pattern names this very parameter, or its module where that holds nothing else, and not just a region:
    the pattern's last part must fit the last part of that name, and be more than a wildcard."""
    numbers = [p for p in use.module.parameters(recurse=False) if p.ndim > 1]
    alone = not any(True for _ in use.module.children()) and len(numbers) <= 1
    meant = {use.name, use.plain, *([use.owner] if alone or use.through is not None else [])}
    for glob in patterns:
        tail = glob.rpartition(".")[2]
        if tail.strip("*?") and any(fnmatchcase(n, glob) and fnmatchcase(n.rpartition(".")[2], tail) for n in meant):
            return True
    return False


def _is_called(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits the name of the very module the parameter belongs to."""
    return any(fnmatchcase(name.rpartition(".")[0], glob) for glob in patterns)


def _check_globs(uses: Sequence[Use], patterns: Iterable[str]) -> None:
    for glob in patterns if uses else ():
        if not any(_matches(use, [glob]) for use in uses):
            raise SiteError(
                f"No parameter or module matches {glob!r}. Names look like {uses[0].name!r} and {uses[-1].name!r}."
            )


def check_readable(model: nn.Module) -> None:
    """Refuse a model whose values are elsewhere or cannot be changed, and say what to do."""
    if torch.is_inference_mode_enabled():
        raise ModelError(
            "This was called inside torch.inference_mode(), where weights cannot be pruned. Call it outside."
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(f"{name!r} has no shape yet: its module is lazy. Run one batch through the model first.")
        if parameter.is_meta and _is_offloaded(model):
            raise ModelError(
                f"{name!r} is offloaded by accelerate: its values are outside of the model. Load it whole on the CPU"
                " (without device_map) and pass device=... to sc.prune or sc.probe, which bring one block at a time."
            )
        if parameter.is_meta:
            raise ModelError(
                f"{name!r} is on the meta device and has no values. Load the weights first: model.to_empty(device=...),"
                " then load_state_dict, or from_pretrained without a meta device."
            )
        if parameter.is_inference():
            raise ModelError(
                f"{name!r} was made under torch.inference_mode() and cannot be changed. Load the model outside of it,"
                " or prune a copy: copy.deepcopy(model)."
            )


def _is_offloaded(model: nn.Module) -> bool:
    return any(getattr(module, "_hf_hook", None) is not None for module in model.modules())


def nothing_to_prune(model: nn.Module, left_out: Sequence[LeftOut]) -> SiteError:
    """The error for a model without sites, with the reasons that tell most."""
    telling = [f"{item.name}: {item.reason}" for item in left_out if item.reason != VECTOR]
    quantized = getattr(getattr(model, "config", None), "quantization_config", None)
    hint = " Its weights are quantized: load it without quantization, prune, then quantize." if quantized else ""
    if not left_out:
        hint = " It has no parameters. (Quantized modules keep theirs packed: prune first, quantize afterwards.)"
    return SiteError(f"Nothing to prune in {type(model).__name__}. {'; '.join(telling[:6])}{hint}")
