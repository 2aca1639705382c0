"""What a parameter is: a layer's weight, a stack of experts, a table of vectors; its layout, and when to prune it.

The type of the module that owns a parameter decides, then how that module is built. A new kind of layer is one rule in
`_layer_kind`, `_stack_kind` or `_custom_kind`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm

from secateur.selection.tiles import Layout

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED, nn.Bilinear)
# What torch's older weight_norm, spectral_norm and prune rename a weight to. All of them keep its zeros.
REPARAMETRIZED = {"weight_v": "weight", "weight_orig": "weight"}

# Attributes in which modules store how many inputs or experts they have, and words in names of tables of vectors.
INPUT_SIZES = ("in_features", "input_size", "in_channels", "input_dim", "in_dim", "group_in_dim")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_experts", "n_routed_experts", "n_shared_experts")
TABLES = {
    "embed", "embedding", "embeddings", "pos", "position", "positions", "token", "tokens", "query", "queries", "prompt",
    "prompts", "latent", "latents", "slots", "codebook", "codebooks", "register", "registers", "bias",
}  # fmt: skip
MATRICES = {"proj", "weight", "kernel"}  # words that count more than those of tables: query_proj is a matrix

STACK = Layout(rows=(0, 1), inputs=2)  # [matrices, outputs, inputs]
TURNED_STACK = Layout(rows=(0, 2), inputs=1)
TURNED = {"Llama4TextExperts", "RecurrentGemmaRglru"}  # modules with such stacks, which nothing else tells

VECTOR = "bias, norm or vector"

# Modules of PEFT: the base model is in children of these names; all other children and parameters are the adapter's.
PEFT_BASES = ("base_layer", "base_model", "model", "original_module", "word_embeddings")
ADAPTER = "PEFT adapter"
ADAPTER_COPY = "copy of a layer that PEFT trains (modules_to_save)"

# Methods that run before a layer can be packed, and what may be asked of a packed layer's weight as of a dense one's.
INITIAL = {"__init__", "_init_weights", "init_weights", "reset_parameters", "_reset_parameters"}
HARMLESS = {"dtype", "device"}
Layer = tuple[str, ...]  # attributes and members behind `self`
MEMBER = "*"  # any member of a container
MEMBERS = {"values", "items"}


class When(IntEnum):
    """When a weight is pruned: by default, if a glob of `only` covers it, or only if one names it itself."""

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
class Use:
    """A parameter under one of its names. `module` is the layer it belongs to and `leaf` its name there, both looked up
    behind a parametrization (`through`) if there is one. `adapter` says what of a PEFT adapter it is, if it is."""

    name: str
    parameter: nn.Parameter
    module: nn.Module
    leaf: str
    plain: str  # the name it would have without the parametrization and without PEFT
    through: ParametrizationList | None = None
    adapter: str = ""

    @property
    def owner(self) -> str:
        return self.plain.rpartition(".")[0]


def kind_of(use: Use) -> Kind:
    """What a parameter is in its module. Vectors and quantized values are handled elsewhere."""
    leaf = REPARAMETRIZED.get(use.leaf, use.leaf) if isinstance(use.module, LAYERS) else use.leaf
    found = _layer_kind(leaf, use) or _stack_kind(leaf, use) or _custom_kind(leaf, use)
    if use.adapter:
        least = When.NAMED if use.adapter == ADAPTER else When.COVERED
        return replace(found, what=use.adapter, when=max(found.when, least))
    if (use.through is not None or leaf != use.leaf) and found.when is When.USUAL:
        return Kind("parametrized", found.layout, When.COVERED)
    return found


def _layer_kind(leaf: str, use: Use) -> Kind | None:
    """Weights of torch's own layers, and of transformers' Conv1D."""
    module, weight = use.module, leaf == "weight"
    if weight and isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Kind("", Layout(), When.USUAL)
    if weight and use.parameter.ndim == 2 and "Conv1D" in _kinds(module):  # of transformers: [inputs, outputs]
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
    """Several matrices in one three-dimensional parameter: experts, or layers with a weight for each group."""
    parameter, words = use.parameter, set(leaf.lower().split("_"))
    if parameter.ndim != 3 or min(parameter.shape) < 2 or (words & TABLES and not words & MATRICES):
        return None
    kinds = " ".join(_kinds(use.module))
    grouped = leaf == "weight" and "Linear" in kinds
    if not (grouped or _holds_experts(use, kinds) or any(_chained(parameter, other) for other in _siblings(use))):
        return None
    return Kind("a matrix for each group" if grouped else "experts", _stacked(use), When.USUAL)


def _holds_experts(use: Use, kinds: str) -> bool:
    """Whether a module holds experts: by an attribute of transformers, by name, or by the number it stores."""
    named = any("expert" in text.lower() for text in (kinds, use.leaf, use.owner.rpartition(".")[2]))
    counts = (getattr(use.module, name, None) for name in EXPERT_COUNTS)
    return named or hasattr(use.module, "is_transposed") or use.parameter.shape[0] in counts


def _siblings(use: Use) -> list[Tensor]:
    """Other parameters of the same module with the same number of matrices."""
    others = use.module.parameters(recurse=False)
    return [p for p in others if p is not use.parameter and p.ndim == 3 and len(p) == len(use.parameter)]


def _chained(one: Tensor, other: Tensor) -> bool:
    """Whether one of two stacks projects up and the other back down, with gate and up projection fused or not."""
    pairs = (one, other), (other, one)
    return any(_opens(up, down, turned) for up, down in pairs for turned in (False, True))


def _opens(up: Tensor, down: Tensor, turned: bool, fused: tuple[int, ...] = (1, 2)) -> bool:
    """Whether the inputs of `down` are the outputs of `up`, or half of them, and the other way round."""
    (hidden, inner), (outer, narrow) = (t.shape[:0:-1] if turned else t.shape[1:] for t in (up, down))
    return inner == outer and hidden in [narrow * times for times in fused]


def _stacked(use: Use) -> Layout:
    """[matrices, outputs, inputs], or transposed if an attribute of the module or the sizes of its weights say so."""
    marked = getattr(use.module, "is_transposed", None)
    if marked is None and (size := _input_size(use)) in use.parameter.shape[1:]:
        marked = size != use.parameter.shape[2]
    if marked is None:
        pairs = [pair for other in _siblings(use) for pair in ((use.parameter, other), (other, use.parameter))]
        marked = not TURNED.isdisjoint(_kinds(use.module)) or any(_opens(up, down, True, (2,)) for up, down in pairs)
    return TURNED_STACK if marked else STACK


def _input_size(use: Use) -> int | None:
    """The number of inputs stored in the module, if any."""
    sizes = (getattr(use.module, name, None) for name in INPUT_SIZES)
    return next((size for size in sizes if isinstance(size, int)), None)


def _custom_kind(leaf: str, use: Use) -> Kind:
    """Parameters of other modules. A matrix or kernel called `weight` multiplies inputs; others may not."""
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
    """[outputs, inputs] or [matrices, outputs, inputs], unless the module's number of inputs says otherwise."""
    shape = use.parameter.shape
    if len(shape) == 3:
        return _stacked(use)
    turned = len(shape) == 2 and _input_size(use) == shape[0] != shape[1]
    return Layout(rows=(1,), inputs=0) if turned else Layout()


def _kinds(module: nn.Module) -> set[str]:
    """Names of the module's class and its bases: fully_shard puts a class of its own in front."""
    return {kind.__name__ for kind in type(module).__mro__}


def peft_parts(modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, str]]:
    """For the path of every module: the path it would have without PEFT, and what of an adapter it is ("" in the base
    model). In `modules` parents come before their children."""
    found = {"": ("", "")}
    for path in modules:
        above, dot, name = path.removesuffix(".").rpartition(".")
        if not path:
            continue
        plain, adapter = found[above + dot]
        if not _is_peft(modules[above + dot]):
            found[path] = f"{plain}{name}.", adapter
        elif name in PEFT_BASES:
            found[path] = plain, ""
        else:
            found[path] = f"{plain}{name}.", ADAPTER_COPY if name == "modules_to_save" else ADAPTER
    own = {path: (found[path][0], ADAPTER) for path, module in modules.items() if _is_peft(module)}
    return found | own


def _is_peft(module: nn.Module) -> bool:
    """Whether PEFT defines the module's class or one that it inherits from; PEFT itself is not imported."""
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)


@torch.no_grad()
def loses_zeros(use: Use) -> str | None:
    """Why a parametrization does not keep zeros, or None: zeroes some values and computes the weight."""
    if use.through is None:
        return None
    drawn = torch.rand(use.parameter.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    gone = drawn.to(use.parameter.device) < 0.5
    found = _made_without(use.through, use.parameter, gone)
    # A row that is zero as a whole becomes NaN where it is divided by its norm: `fragile_dims` finds that.
    kept = found.shape == gone.shape and not bool(found[gone].nan_to_num(0).any())
    kinds = ", ".join(type(step).__name__ for step in use.through)
    return None if kept else f"its parametrization ({kinds}) does not keep zeros"


@torch.no_grad()
def fragile_dims(use: Use) -> tuple[int, ...]:
    """The dimensions in which no slice may be zero as a whole, because a parametrization would return NaN or infinity:
    (0,) for weight_norm, which divides every row by its norm."""
    if use.through is None:
        # torch's older weight_norm; its dim -1 is one norm of the whole tensor
        norms = [hook for hook in use.module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
        return tuple(hook.dim for hook in norms if f"{hook.name}_v" == use.leaf and hook.dim >= 0)
    found = []
    for dim in range(use.parameter.ndim):
        gone = torch.zeros(use.parameter.shape, dtype=torch.bool, device=use.parameter.device)
        gone.select(dim, 0).fill_(True)
        if not bool(_made_without(use.through, use.parameter, gone).isfinite().all()):
            found.append(dim)
    return tuple(found)


def _made_without(through: ParametrizationList, parameter: Tensor, gone: Tensor) -> Tensor:
    """The weight a parametrization computes when some of this parameter is zero. The model is not changed."""
    modes = [(module, module.training) for module in through.modules()]
    try:
        through.eval()  # in training mode spectral_norm updates its estimate at each call
        first, *others = list(through)
        found: Tensor = first(*(t.masked_fill(gone, 0) if t is parameter else t.clone() for t in originals(through)))
        for step in others:
            found = step(found)
    finally:
        for module, mode in modes:
            module.training = mode
    return found


def originals(through: ParametrizationList) -> list[Tensor]:
    """The tensors a parametrization computes the weight from."""
    names = ["original"] if hasattr(through, "original") else [f"original{n}" for n in range(through.ntensors)]
    return [getattr(through, name) for name in names]


# Weights that are read without calling their layer


@functools.cache
def reads_weight(kind: type[nn.Module], path: str) -> bool:
    """Whether a method of this class, perhaps an inherited one, reads the weight of the layer `self.{path}` itself.

    Without source, a method that has all these names counts as one that does.
    """
    parts = path.split(".")
    for base in kind.__mro__:
        members = {} if base in (nn.Module, object) else vars(base)
        for code in (_code(member) for name, member in members.items() if name not in INITIAL):
            if code is None or not {parts[0], "weight"} <= (names := _names_in(code)):
                continue
            read = _layers_read(code)
            if {*parts, "weight"} <= names if read is None else any(_fits(parts, one) for one in read):
                return True
    return False


def _fits(parts: Sequence[str], read: Sequence[str]) -> bool:
    """Whether a layer is one of those that are read."""
    return len(parts) == len(read) and all(wanted in (part, MEMBER) for part, wanted in zip(parts, read, strict=True))


@functools.cache
def _layers_read(code: CodeType) -> set[Layer] | None:
    """The layers behind `self` whose weights a function reads; None if it has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):  # made in an interpreter, or part of a longer expression
        return None
    return set(_weights_read(tree, _other_names(tree)))


def _code(member: Any) -> CodeType | None:
    """The code of a method or property, behind its decorators."""
    if isinstance(member, property | functools.cached_property):
        member = member.fget if isinstance(member, property) else member.func
    method = isinstance(member, FunctionType | classmethod | staticmethod)
    code = getattr(inspect.unwrap(member), "__code__", None) if method else None
    return code if isinstance(code, CodeType) else None


def _names_in(code: CodeType) -> set[str]:
    """Attributes and globals that a function uses, with the functions inside it."""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names}.union(*inner)


def _weights_read(node: ast.AST, names: Mapping[str, Sequence[Layer]]) -> Iterator[Layer]:
    """Layers whose weights are read, not only their dtype, device or type."""
    if isinstance(node, ast.Attribute) and node.attr in HARMLESS and isinstance(node.value, ast.Attribute):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        return
    if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.ctx, ast.Load):
        yield from _paths(node.value, names)
    for child in ast.iter_child_nodes(node):
        yield from _weights_read(child, names)


def _paths(node: ast.AST, names: Mapping[str, Sequence[Layer]]) -> list[Layer]:
    """What an expression may be, as attributes and members behind `self`."""
    if isinstance(node, ast.Name):
        return [()] if node.id == "self" else list(names.get(node.id, ()))
    if isinstance(node, ast.Attribute):
        return [(*path, node.attr) for path in _paths(node.value, names)]
    if isinstance(node, ast.Subscript):
        key = str(node.slice.value) if isinstance(node.slice, ast.Constant) else MEMBER
        return [(*path, key) for path in _paths(node.value, names)]
    return []


def _other_names(tree: ast.AST) -> dict[str, list[Layer]]:
    """What variables of a function stand for: `layer = self.up`, `for layer in self.layers`."""
    names: dict[str, list[Layer]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            found = [path for value in values for path in _paths(value, names)]
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.For | ast.comprehension):
            found, targets = list(_members(node.iter, names)), [node.target]
        else:
            continue
        for name in (one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)):
            names.setdefault(name.id, []).extend(found)
    return names


def _members(node: ast.expr, names: Mapping[str, Sequence[Layer]]) -> Iterator[Layer]:
    """What a loop goes over: members of a container, perhaps by enumerate() or values(), or of a tuple."""
    if isinstance(node, ast.Tuple | ast.List):
        yield from (path for one in node.elts for path in _paths(one, names))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from (path for one in node.args for path in _members(one, names))
    else:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MEMBERS:
            node = node.func.value
        yield from ((*path, MEMBER) for path in _paths(node, names))
