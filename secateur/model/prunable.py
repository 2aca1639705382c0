"""Prunable tensors: which parameters of a model are pruned, and why the others stay dense.

Weights that are surely matrices are pruned by default, except embeddings, routers and the layer that makes the output.
All other floating-point parameters of two or more dimensions are pruned when `only` asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from secateur.errors import ModelError, SiteError, StateError
from secateur.model.distributed import check_tile, is_dtensor, local
from secateur.model.kinds import (
    ADAPTER,
    ADAPTER_COPY,
    VECTOR,
    Kind,
    Use,
    When,
    fragile_dims,
    kind_of,
    loses_zeros,
    originals,
    peft_parts,
)
from secateur.selection.tiles import Layout, Pattern, fits, tile_of

# Names that models give the layer that makes their output; it stays dense unless `only` names it. So does the last
# layer inside a container with one of the third names. In repeated blocks the second and third may mean something
# else, such as attention heads: there they count only if no other layer follows.
SURE_HEADS = ("*lm_head", "*embed_out", "*qa_outputs", "fc", "output")
HEADS = ("head", "*.head", "score", "*.score")
HEAD_CONTAINERS = ("head", "heads", "classifier")
ROUTERS = ("*.router", "*.router.*", "*.gate")
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # put into names by torch.compile and activation checkpointing

ASK = "only=... prunes it"
FROZEN = "frozen (requires_grad is False)"
ABSENT = "not in the optimizer"

Globs = str | Sequence[str]


@dataclass(frozen=True, eq=False)
class Prunable:
    """A prunable tensor: its parameter, its layout, and its first index in the model's flat order (`start`).

    `reason` says why it is pruned where its layer does not make that clear. `fragile` are dimensions whose slices are
    divided by their norm (weight_norm), so no slice may be pruned whole.
    """

    name: str
    parameter: nn.Parameter
    layout: Layout
    tied: tuple[str, ...] = ()
    start: int = 0
    reason: str = ""
    fragile: tuple[int, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """A tensor that stays dense, and why."""

    name: str
    numel: int
    reason: str


Unfit = Callable[[Prunable], str | None]  # why a tensor must stay dense, or None


def fits_all(prunable: Prunable) -> str | None:
    """No tensor is left out."""
    return None


def find_prunable(
    model: nn.Module,
    skip: Globs | None = (),
    only: Globs | None = None,
    unfit: Unfit = fits_all,
    frozen: Container[int] = (),
) -> tuple[list[Prunable], list[LeftOut]]:
    """Every parameter of the model once: as prunable, or left out with the reason.

    `skip` and `only` are globs of parameter or module names. Weights left out by default are pruned if `only` matches
    them; tables of vectors, such as embeddings, only if a glob names them or their own module, not just a module around
    it. `unfit` may return a reason to leave out a tensor that `only` did not ask for. `frozen` are the ids of
    parameters that count although they are frozen.
    """
    skip, only = _globs(skip), None if only is None else _globs(only)
    modules = {_path(name): module for name, module in model.named_modules(remove_duplicate=False)}
    _check_unpacked(modules)
    ordered = _uses(model, modules)
    named: dict[int, list[Use]] = {}
    for use in ordered:
        named.setdefault(id(use.parameter), []).append(use)
    _check_globs(ordered, (*skip, *(only or ())))
    heads = _heads(model, ordered, modules)
    prunables: list[Prunable] = []
    left_out: list[LeftOut] = []
    start = 0
    for uses in named.values():
        found = _judge(uses, skip, only, heads, frozen)
        if isinstance(found, Prunable) and only is None and (reason := unfit(found)):
            found = LeftOut(found.name, found.parameter.numel(), reason)
        if isinstance(found, Prunable):
            prunables.append(replace(found, start=start))
            start += found.parameter.numel()
        else:
            left_out.append(found)
    _check_apart(prunables)
    return prunables, left_out


def find_also_frozen(
    model: nn.Module, skip: Globs, only: Globs | None, unfit: Unfit
) -> tuple[list[Prunable], list[LeftOut]]:
    """The same, but weights that are frozen count as prunable too: after training nothing needs to train."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(parameter.is_floating_point())
        return find_prunable(model, skip, only, unfit)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def unfit_for(pattern: Pattern | None) -> Unfit:
    """A function that says why a tensor cannot take this pattern."""

    def unfit(prunable: Prunable) -> str | None:
        if pattern is None or fits(prunable.parameter.shape, prunable.layout, pattern):
            return None
        return f"its shape does not divide into {pattern.text}; sparsity counts the other layers"

    return unfit


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameters_in(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter of the model by each of its plain names."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def untrained(model: nn.Module, left_out: Sequence[LeftOut]) -> dict[str, nn.Parameter]:
    """The parameters that are left out only because no optimizer trains them now, by name."""
    parameters = parameters_in(model)
    return {item.name: parameters[item.name] for item in left_out if item.reason.startswith((FROZEN, ABSENT))}


def _path(module_name: str) -> str:
    """The prefix of the names of a module's parameters."""
    return plain_name(module_name + ".") if module_name else ""


def _uses(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[Use]:
    """Every parameter under each of its names, in the order of the modules."""
    found = []
    parts = peft_parts(modules)
    for module_name, module in model.named_modules(remove_duplicate=False):
        path = _path(module_name)
        plain, adapter = parts[path]
        owner, inside, tensor = path.removesuffix(".").rpartition("parametrizations.")
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if inside and isinstance(module, ParametrizationList):
                behind = parts[owner][0] + tensor
                found.append(Use(path + leaf, parameter, modules[owner], tensor, behind, module, adapter))
            else:
                found.append(Use(path + leaf, parameter, module, leaf, plain + leaf, adapter=adapter))
    return found


def _judge(
    uses: Sequence[Use], skip: Sequence[str], only: Sequence[str] | None, heads: set[str], frozen: Container[int]
) -> Prunable | LeftOut:
    """Whether one parameter, under all its names, is prunable; if not, why."""
    names = [use.name for use in uses]
    parameter = uses[0].parameter
    use, kind = min(((use, kind_of(use)) for use in uses), key=lambda pair: pair[1].when)  # the first of the best

    def out(reason: str) -> LeftOut:
        return LeftOut(
            names[0], parameter.numel(), reason + (f"; tied with {', '.join(names[1:])}" if names[1:] else "")
        )

    if reason := _impossible(use) or (_default_reason(uses, kind, heads) if only is None else None):
        return out(reason)
    if not parameter.numel():
        return out("empty")
    if any(_matches(use, skip) for use in uses):
        return out("skipped by name")
    wanted = only is None or any(_matches(use, only) for use in uses)
    if wanted and not parameter.requires_grad and id(parameter) not in frozen:
        return out(FROZEN)
    if only is not None and (reason := _not_asked(uses, kind, only)):
        return out(reason)
    asked = "" if only is None else "named by only"
    why = ", ".join(filter(None, (asked, kind.what)))
    tied = tuple(n for n in names if n != use.name)
    return Prunable(use.name, parameter, kind.layout, tied, reason=why, fragile=fragile_dims(use))


def _impossible(use: Use) -> str | None:
    """Why a parameter can never be pruned, or None."""
    parameter = use.parameter
    if use.through is not None and any(t.numel() > parameter.numel() for t in originals(use.through)):
        return "norms of a parametrized weight"
    if foreign := _foreign(parameter):
        return f"{foreign}, not plain numbers (prune before quantizing)"
    if parameter.is_complex():
        return "complex"
    if parameter.layout != torch.strided:
        return f"stored as {parameter.layout}, without a place for every weight"
    return use.adapter or VECTOR if parameter.ndim < 2 else None


def _foreign(parameter: Tensor) -> str | None:
    """How a parameter is stored if not as one floating-point number per weight, or None."""
    inner = local(parameter)
    if is_traceable_wrapper_subclass(inner):
        return f"wrapped in {type(inner).__name__}"
    whole = not (parameter.is_floating_point() or parameter.is_complex())
    return f"quantized ({parameter.dtype})" if whole or parameter.dtype.itemsize == 1 else None


def _default_reason(uses: Sequence[Use], kind: Kind, heads: set[str]) -> str | None:
    """Why a weight stays dense unless `only` asks for it, or None."""
    if kind.what in (ADAPTER, ADAPTER_COPY):
        return f"{kind.what} ({ASK})"
    if any(isinstance(use.module, nn.Embedding) for use in uses):
        return "embedding"
    if kind.when is not When.USUAL:
        return kind.what if kind.what == VECTOR else f"{kind.what} ({ASK})"
    if not heads.isdisjoint(use.name for use in uses):
        return f"head ({ASK})"
    # A gate with few outputs routes to experts; one with as many outputs as inputs is half of a gated MLP.
    name, parameter = uses[0].plain, uses[0].parameter
    if _is_called(name, ROUTERS) and parameter.shape[0] * 4 <= parameter.shape[-1]:
        return f"router ({ASK})"
    return None


def _not_asked(uses: Sequence[Use], kind: Kind, only: Sequence[str]) -> str | None:
    """Why `only` does not select a weight, or None if it does."""
    if not any(_matches(use, only) for use in uses):
        return "not named by only"
    if kind.when is When.NAMED and not any(_names(use, only) for use in uses):
        return f"{kind.what} (name it in only=... to prune it)"
    if lost := loses_zeros(uses[0]):
        if not {uses[0].name, uses[0].plain, uses[0].owner}.isdisjoint(only):
            raise SiteError(f"{uses[0].name!r} cannot be pruned: {lost}. Leave it out of only=..., or remove it first.")
        return lost
    return None


def _heads(model: nn.Module, ordered: Sequence[Use], modules: Mapping[str, nn.Module]) -> set[str]:
    """Names of the weights that make the output: by their name, their container's, or get_output_embeddings()."""
    ask = getattr(model, "get_output_embeddings", None)
    try:
        told = ask() if callable(ask) else None
    except Exception:  # the model's own method may fail in any way; heads are still found by name
        told = None
    while isinstance(inner := getattr(told, "base_layer", getattr(told, "original_module", None)), nn.Module):
        told = inner  # of PEFT
    heads: set[str] = set()
    last: dict[str, str] = {}
    weights = [use.name for use in ordered if use.parameter.ndim > 1 and kind_of(use).when is When.USUAL]
    is_last = cache(lambda path: _is_last(path, weights, modules))
    for use in ordered:
        path = use.name.rpartition(".")[0]
        if use.module is told or _is_called(use.plain, SURE_HEADS) or (_is_called(use.plain, HEADS) and is_last(path)):
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
    """Whether this is a list of parallel heads, each of which makes an output."""
    return container.endswith("heads") and isinstance(modules[container + "."], nn.ModuleList | nn.ModuleDict)


def _is_last(path: str, weights: Sequence[str], modules: Mapping[str, nn.Module]) -> bool:
    """Whether something called a head can make the output. For `heads` and inside numbered blocks it must be the last
    layer in every module around it; members of a ModuleList do not follow each other."""
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
        raise SiteError(f"skip and only must be names or globs of parameters and modules; got {patterns!r}.")
    return tuple(found)


def _matches(use: Use, patterns: Sequence[str]) -> bool:
    """Whether a glob matches the parameter's name or that of any module around it."""
    around = {use.plain}
    for name in (use.name, use.plain):
        parts = name.split(".")
        around |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return any(fnmatchcase(part, glob) for glob in patterns for part in around)


def _names(use: Use, patterns: Sequence[str]) -> bool:
    """Whether a glob names this parameter itself, or its module if that holds nothing else: the last part of the glob
    must match the last part of that name and be more than a wildcard."""
    numbers = [p for p in use.module.parameters(recurse=False) if p.ndim > 1]
    alone = not any(True for _ in use.module.children()) and len(numbers) <= 1
    meant = {use.name, use.plain, *([use.owner] if alone or use.through is not None else [])}
    for glob in patterns:
        tail = glob.rpartition(".")[2]
        if tail.strip("*?") and any(fnmatchcase(n, glob) and fnmatchcase(n.rpartition(".")[2], tail) for n in meant):
            return True
    return False


def _is_called(name: str, patterns: Sequence[str]) -> bool:
    """Whether a glob matches the name of the module that owns the parameter."""
    return any(fnmatchcase(name.rpartition(".")[0], glob) for glob in patterns)


def _check_globs(uses: Sequence[Use], patterns: Iterable[str]) -> None:
    for glob in patterns if uses else ():
        if not any(_matches(use, [glob]) for use in uses):
            raise SiteError(
                f"No parameter or module matches {glob!r}. Names look like {uses[0].name!r} and {uses[-1].name!r}."
            )


def _check_apart(prunables: Sequence[Prunable]) -> None:
    """Refuse different parameters in the same memory: each would have a mask, and all masks would zero all of them."""
    stored: dict[int, list[tuple[Prunable, Tensor]]] = {}
    for prunable in prunables:
        part = local(prunable.parameter.detach())
        if not part.is_meta and part.numel() and (address := part.untyped_storage().data_ptr()):
            stored.setdefault(address, []).append((prunable, part))
    for found in stored.values():
        found.sort(key=lambda pair: pair[1].storage_offset())
        ends = [_end_in_storage(part) for _, part in found]
        if all(end <= part.storage_offset() for end, (_, part) in zip(ends, found[1:], strict=False)):
            continue
        owners = torch.full((max(ends),), -1, dtype=torch.int32, device="cpu")  # columns of one matrix alternate
        for number, (prunable, part) in enumerate(found):
            mine = owners.as_strided(part.shape, part.stride(), part.storage_offset())
            if (other := int(mine.max())) >= 0:
                raise SiteError(
                    f"{found[other][0].name!r} and {prunable.name!r} are two parameters in the same memory, so their"
                    f" masks would contradict each other. Leave one out with skip={prunable.name!r}, or tie them as one"
                    " parameter."
                )
            mine.fill_(number)


def _end_in_storage(tensor: Tensor) -> int:
    """The place after a tensor's last number in its storage."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)) + 1


def _check_unpacked(modules: Mapping[str, nn.Module]) -> None:
    """Refuse packed layers, which hold no weight that could be pruned."""
    for name, module in modules.items():
        if getattr(module, "packed_for_inference", False):
            raise SiteError(
                f"{name.removesuffix('.')} is a packed layer, which cannot be pruned. Call sc.unpack(model) first."
            )


def check_readable(model: nn.Module) -> None:
    """Refuse a model whose weights are not in memory or cannot be changed."""
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
                " (without device_map) and pass device=... to sc.prune or sc.probe, which move one block at a time."
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


def check_current(model: nn.Module, prunables: Sequence[Prunable]) -> None:
    """Raise if the model no longer has a parameter that was found in it."""
    parameters = parameters_in(model)
    present = {id(parameter) for parameter in parameters.values()}
    for prunable in prunables:
        # Between forward and backward pass FSDP2 puts whole weights in the place of its shards.
        gathered = is_dtensor(prunable.parameter) and not is_dtensor(parameters.get(prunable.name))
        if id(prunable.parameter) not in present and not gathered:
            raise StateError(
                f"The model's {prunable.name!r} is not the parameter it was when this Pruner was made, so pruning would"
                " not reach the model. fully_shard, accelerator.prepare with FSDP2, tying weights and"
                " load_state_dict(assign=True) replace parameters. Build optimizer and Pruner after them."
            )


def check_tiles(prunables: Sequence[Prunable], scope: str, pattern: Pattern | None) -> None:
    """Refuse rows, groups or blocks of weights that lie on different ranks."""
    for prunable in prunables if scope == "row" or pattern is not None else ():
        height = tile_of(prunable.name, prunable.parameter.shape, prunable.layout, pattern)[0]
        meant = f"Pattern {pattern.text!r}" if pattern else "Scope 'row'"
        check_tile(prunable.name, prunable.parameter, height, meant)


def _is_offloaded(model: nn.Module) -> bool:
    return any(getattr(module, "_hf_hook", None) is not None for module in model.modules())


def nothing_to_prune(model: nn.Module, left_out: Sequence[LeftOut]) -> SiteError:
    """The error for a model without prunable tensors, with the most helpful reasons."""
    telling = [f"{item.name}: {item.reason}" for item in left_out if item.reason != VECTOR]
    quantized = getattr(getattr(model, "config", None), "quantization_config", None)
    hint = " Its weights are quantized: load it without quantization, prune, then quantize." if quantized else ""
    if not left_out:
        hint = " It has no parameters. (Quantized modules keep theirs packed: prune first, quantize afterwards.)"
    if {ADAPTER, FROZEN} <= {part for item in left_out for part in (ADAPTER, FROZEN) if item.reason.startswith(part)}:
        hint = (
            " Its base model is frozen, as PEFT leaves it, and a Pruner prunes weights that train. Prune the base model"
            " with sc.prune first; secateur.integrations.peft.keep_zeros then keeps its zeros while adapters train."
        )
    return SiteError(f"Nothing to prune in {type(model).__name__}. {'; '.join(telling[:6])}{hint}")
