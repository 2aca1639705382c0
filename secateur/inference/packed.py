"""Packed linear layers: `pack` drops the zeros of a model's linear layers in place, `unpack` brings them back.

All packed layers call one torch op, `secateur::packed_linear`. `KERNELS` is the one place that says what runs on which
kind of device; without an entry, the weight is unpacked into a temporary tensor and multiplied as usual, which gives
the same bits as the dense layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.errors import ModelError
from secateur.inference import cpu, gpu
from secateur.inference.format import Packed, fault, pack_weight, smaller, unpacked
from secateur.inference.timing import Timing, compare
from secateur.kernels.decode import Streams
from secateur.model.kinds import reads_weight
from secateur.report import collapse, text_table
from secateur.selection import masks

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int], Tensor]


def plain(
    x: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, scale: Tensor | None, bias: Tensor | None, columns: int
) -> Tensor:
    """x @ weight.T + bias in plain torch, on any device: unpack, then multiply."""
    dtype = x.dtype if scale is not None else values.dtype
    return functional.linear(x, unpacked(values, mask, scale, (mask.shape[0], columns), dtype), bias)


# By type of device, such as "cuda" or "cpu". A kernel has the signature of `plain` and chooses by the shapes it gets.
KERNELS: dict[str, Kernel] = {"cpu": cpu.linear, "cuda": gpu.linear}


@torch.library.custom_op("secateur::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor,
    values: Tensor,
    mask: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    columns: int,
) -> Tensor:
    """x @ weight.T + bias for a packed weight of `columns` inputs; `offsets` says where each row's values begin."""
    return KERNELS.get(x.device.type, plain)(x, values, mask, offsets, scale, bias, columns)


@packed_linear.register_fake
def _(
    x: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, scale: Tensor | None, bias: Tensor | None, columns: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], mask.shape[0]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, mask, _, scale, bias, columns = inputs
    ctx.save_for_backward(values, mask, scale)
    ctx.columns, ctx.dtype, ctx.biased = columns, x.dtype, bias is not None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of the inputs and the bias; packed weights are constants."""
    values, mask, scale = ctx.saved_tensors
    needs_x, needs_bias = ctx.needs_input_grad[0], ctx.biased and ctx.needs_input_grad[5]
    weight = unpacked(values, mask, scale, (mask.shape[0], ctx.columns), ctx.dtype) if needs_x else None
    of_bias = grad.unsqueeze(0).flatten(0, -2).sum(0) if needs_bias else None
    return None if weight is None else grad @ weight, None, None, None, None, of_bias, None


packed_linear.register_autograd(_gradients, setup_context=_remember)


# What users have registered on a layer: attributes of any module.
HOOKS = [name for name in vars(nn.Module()) if "_hooks" in name and "state_dict" not in name]


class PackedLinear(nn.Module):
    """A linear layer for inference whose weight is stored without its zeros.

    `weight` holds the values that are not zero, row by row; `weight_mask` one bit a weight; `weight_scale` a scale a
    row if the values are int8. Gradients reach inputs and bias in eval mode; in training mode the layer refuses.
    On GPUs `streams` holds the weight as the kernel for few inputs reads it. Where that suffices for any number of
    inputs, values and mask stay on the host (`hosted`); elsewhere it is a second copy, left out if `lean` is set.
    """

    packed_for_inference = True  # by which pruning knows packed layers
    stored_groups: tuple[int, int] | None = None  # while it is loaded from a file that has groups instead of its mask
    weight: Tensor
    weight_mask: Tensor
    weight_scale: Tensor | None
    offsets: Tensor
    bias: nn.Parameter | None

    def __init__(self, packed: Packed, bias: nn.Parameter | None = None, *, lean: bool = False) -> None:
        super().__init__()
        if len(packed.shape) != 2:
            raise ModelError(f"A linear layer has a weight of 2 dimensions; this one has {list(packed.shape)}.")
        self.out_features, self.in_features = packed.shape
        self.dtype = packed.dtype
        self.dense_kind: type[nn.Module] = nn.Linear
        self.trainable = True  # whether the weight required gradients before it was packed
        self.register_buffer("weight", packed.values)
        self.register_buffer("weight_mask", packed.mask)
        self.register_buffer("weight_scale", packed.scale)
        self.register_buffer("offsets", row_offsets(packed.mask, self.in_features), persistent=False)
        self.register_parameter("bias", bias)
        self.lean = lean
        self.few = gpu.FEW  # inputs that are computed from streams at most
        self.streams: Streams | None = None
        self._derive(packed.mask.device)

    @property
    def hosted(self) -> bool:
        """Whether values and mask are on the host, while the layer computes on a GPU."""
        return self.streams is not None and self.streams.starts.device != self.weight.device

    @property
    def device(self) -> torch.device:
        """Where the layer computes."""
        return self.weight.device if self.streams is None else self.streams.starts.device

    def _derive(self, device: torch.device) -> None:
        """What follows from mask and values on a device: where rows begin and, on GPUs, streams."""
        if self.stored_groups is not None or self.weight_mask.is_meta:
            self.streams = None
            return
        self._put(device)
        if self.weight_scale is not None:  # loaded together with values and mask, it may be on the host as they are
            self.weight_scale = self.weight_scale.to(device)
        self.offsets = row_offsets(self.weight_mask, self.in_features)
        self.streams = gpu.streams_for(self.packed, lean=self.lean)
        if self.streams is not None and gpu.suffice(self.streams):
            self._put(gpu.HOST)
            self.offsets = self.offsets.to(gpu.HOST)

    def _put(self, device: torch.device) -> None:
        """Move values and mask."""
        self.weight, self.weight_mask = self.weight.to(device), self.weight_mask.to(device)

    @classmethod
    def from_linear(cls, layer: Any, *, int8: bool = False, lean: bool = False) -> PackedLinear:
        """A packed copy of an nn.Linear or of transformers' Conv1D, which shares its bias."""
        transposed = is_conv1d(layer)
        made = cls(pack_weight(layer.weight.detach(), int8=int8, transposed=transposed), layer.bias, lean=lean)
        made.dense_kind = type(layer) if transposed else nn.Linear
        made.trainable = layer.weight.requires_grad
        return made.train(layer.training)

    def to_linear(self) -> Any:
        """The dense layer, to the bit (-0.0 has become 0.0), which shares the bias."""
        with torch.device("meta"):
            if self.dense_kind is nn.Linear:
                layer: Any = nn.Linear(self.in_features, self.out_features, bias=False)
            else:
                layer = self.dense_kind(self.out_features, self.in_features)
        layer.weight = nn.Parameter(self.packed.dense().to(self.device), requires_grad=self.trainable)
        if self.bias is not None:
            layer.bias = self.bias
        return layer.train(self.training)

    @property
    def packed(self) -> Packed:
        """The weight."""
        shape = (self.out_features, self.in_features)
        transposed = self.dense_kind is not nn.Linear
        scale = None if self.weight_scale is None else self.weight_scale.to(self.weight.device)
        return Packed(self.weight, self.weight_mask, shape, self.dtype, scale, transposed)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight where the layer computes, streams included."""
        if self.streams is None:
            return self.packed.nbytes
        scale = 0 if self.weight_scale is None else self.weight_scale.nbytes
        return self.streams.nbytes + (scale if self.hosted else self.packed.nbytes)

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        if self.training and torch.is_grad_enabled():
            raise ModelError(
                "Packed layers are for inference and cannot be trained. Call model.eval() to run the model, or"
                " sc.unpack(model) to train it."
            )
        values, kind = self.weight, x.device.type
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, bias = _lowered(x, dtype), None if bias is None else _lowered(bias, dtype)
            values = values if self.weight_scale is not None or self.hosted else _lowered(values, dtype)
        scale, streams = self.weight_scale, self.streams
        if streams is not None and gpu.takes(x, streams, scale is not None, self.few):
            return gpu.decode(x, streams, scale, bias, observed=not _unobserved(x))
        if streams is not None and self.hosted:
            return gpu.many(x, streams, scale, bias)
        given = (x, values, self.weight_mask, self.offsets, self.weight_scale, bias, self.in_features)
        result: Tensor = KERNELS.get(kind, plain)(*given) if _unobserved(x) else packed_linear(*given)
        return result

    def refresh(self) -> None:
        """Check the weight and compute where rows begin, after buffers were replaced, perhaps by those of another
        dtype."""
        if self.weight_scale is None:
            self.dtype = self.weight.dtype
        if wrong := fault(self.packed):
            raise ModelError(f"A packed layer does not hold together: {wrong}. Load or save the model again.")
        self._derive(self.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """Moves and casts. Values take another dtype unless they are int8; scales stay fp32, as precision would be lost
        otherwise, and masks and offsets stay integers even if `fn` casts those."""
        before, hosted, int8 = (self.device, self.dtype), self.hosted, self.weight_scale is not None
        held = {name: self._buffers.pop(name) for name in ("weight", "weight_mask", "offsets") if hosted}
        buffers = {**self._buffers, **held}
        fixed = {name: one for name, one in buffers.items() if one is not None and (int8 or name != "weight")}
        super()._apply(fn, recurse)
        like = fn(torch.empty(0, dtype=self.dtype, device=before[0]))
        self.dtype = like.dtype
        same = before == (like.device, like.dtype)
        for name, tensor in held.items():
            self._buffers[name] = tensor if same or tensor is None else fn(tensor)
        for name, one in fixed.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != one.dtype:
                self._buffers[name] = one.to(moved.device)
        if before[0].type == "meta":
            self.streams = None  # there are no values yet; `refresh` and loading derive them
        elif not same:
            self._derive(like.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """The number of values may change; mask, values and scales are checked together before any is replaced."""
        names = [name for name in ("weight", "weight_mask", "weight_scale") if prefix + name in state_dict]
        found: dict[str, Tensor | None] = {"weight_scale": None, **{one: state_dict[prefix + one] for one in names}}
        if {"weight", "weight_mask"} <= found.keys():
            values, mask, scale = (found[one] for one in ("weight", "weight_mask", "weight_scale"))
            assert values is not None
            assert mask is not None
            dtype = values.dtype if scale is None else self.dtype
            shape = (self.out_features, self.in_features)
            if wrong := fault(Packed(values, mask, shape, dtype, scale)):
                errors.append(f"{prefix}weight cannot be loaded into a packed layer: {wrong}.")
                return
            for name, tensor in found.items():
                old = getattr(self, name)
                kind = tensor.dtype if tensor is not None and (scale is not None or name != "weight") else self.dtype
                like = self.weight_mask if old is None else old
                setattr(
                    self, name, None if tensor is None else torch.empty_like(tensor, dtype=kind, device=like.device)
                )
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        if not errors:
            if self.weight_scale is None:
                self.dtype = self.weight.dtype  # assigned tensors bring theirs
            self._derive(self.device)

    def extra_repr(self) -> str:
        """Sizes, sparsity and bytes."""
        numel = self.in_features * self.out_features
        gone = 1 - self.weight.numel() / numel if numel else 0.0
        dense = numel * self.dtype.itemsize
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" sparsity={gone:.1%}, {self.packed.nbytes:,} bytes instead of {dense:,}"
        )


def _lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as autocast gives it to a linear layer; torch leaves fp64 as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _unobserved(x: Tensor) -> bool:
    """Whether nothing traces or differentiates this call. The op can be left out then, which saves 15 us a layer."""
    return (
        type(x) is Tensor
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._len_torch_dispatch_stack()
    )


def row_offsets(mask: Tensor, columns: int) -> Tensor:
    """Where the values of each row begin, and their number at the end: int64 [rows + 1]."""
    counts = masks.unpack(mask, (mask.shape[0], columns)).sum(1)
    return functional.pad(counts.cumsum(0), (1, 0))


# Whole models


@dataclass(frozen=True)
class LayerRow:
    """One linear layer: its bytes, and why it was left dense if it was."""

    name: str
    shape: tuple[int, ...]
    zeros: int
    dense_bytes: int
    packed_bytes: int  # the dense bytes if it was left dense
    reason: str = ""
    speedup: float | None = None  # dense over packed time of one input, measured on a layer alike; None: not measured

    @property
    def sparsity(self) -> float:
        """Fraction of its weights that is zero."""
        numel = self.shape[0] * self.shape[1]
        return self.zeros / numel if numel else 0.0

    @property
    def outcome(self) -> str:
        """Whether it was packed or left dense, in words."""
        if self.reason:
            return f"left dense: {self.reason}"
        return "packed" if self.speedup is None else f"packed, {self.speedup:.1f}x as fast"


@dataclass(frozen=True)
class PackReport:
    """What `pack` did to every linear layer."""

    layers: tuple[LayerRow, ...]

    @property
    def packed(self) -> tuple[str, ...]:
        """Names of the layers that were packed."""
        return tuple(row.name for row in self.layers if not row.reason)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the linear layers before."""
        return sum(row.dense_bytes for row in self.layers)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the linear layers afterwards, those left dense included."""
        return sum(row.packed_bytes for row in self.layers)

    def __str__(self) -> str:
        rows = [
            (row.name, "x".join(map(str, row.shape)), f"{row.sparsity:.2%}", f"{row.dense_bytes:,}",
             f"{row.packed_bytes:,}", row.outcome)
            for row in self.layers
        ]  # fmt: skip
        share = f", {self.packed_bytes / self.dense_bytes:.1%}" if self.dense_bytes else ""
        total = (
            f"{len(self.packed)} of {len(self.layers)} linear layers are packed: {self.dense_bytes:,} bytes became"
            f" {self.packed_bytes:,}{share}."
        )
        table = text_table(("layer", "shape", "sparsity", "dense bytes", "bytes now", ""), collapse(rows))
        return f"{table}\n\n{total}"


FULL = "too few zeros to be smaller packed"
# Called with the model after its layers were packed or unpacked. The integration with transformers keeps the model's
# config in step, so that `save_pretrained` writes a folder that loads again.
CHANGED: list[Callable[[nn.Module], None]] = []


@torch.inference_mode(False)  # what is packed while it is on can also be used and unpacked while it is off
@torch.no_grad()
def pack(model: nn.Module, *, memory: bool = False, inputs: int = 1) -> PackReport:
    """Replace linear layers by packed ones, in place, wherever `inputs` tokens at a time then take less time on their
    device.

    Each shape is timed once, dense and packed; `memory` packs without timing, wherever that takes fewer bytes. Left
    alone, each with its reason in the report: layers that are slower packed, tied and shared weights, subclasses of
    nn.Linear, layers with hooks, and weights with too few zeros. `unpack` reverses it. Weights are kept to the bit;
    outputs differ from dense ones by the order of sums (SECATEUR_KERNELS=off: not at all).
    """
    check_module(model)
    if type(inputs) is not int or inputs < 1:
        raise ModelError(f"inputs is the number of tokens that a layer gets at a time, at least 1, not {inputs!r}.")
    if isinstance(model, nn.Linear) or is_conv1d(model):
        raise ModelError("pack replaces layers inside a model. For a single layer use PackedLinear.from_linear(layer).")
    rows = []
    times: dict[Any, Measured] = {}  # of layers alike
    for name, layer, reason in list(linear_layers(model)):
        weight, after = layer.weight, layer.weight.nbytes
        zeros = 0 if weight.is_meta else weight.numel() - int(torch.count_nonzero(weight.detach()))
        if not reason and weight.is_meta:
            reason = "on the meta device, without values"
        if not reason and not smaller(weight.detach()):
            reason = FULL
        made = None if reason else PackedLinear.from_linear(layer, lean=memory)
        if made is not None and memory and made.nbytes >= weight.nbytes:
            made, reason = None, FULL
        found = None if made is None or memory else _timed(layer, made, zeros, inputs, times)
        if found is not None and found.ratio <= 1:
            what = "one input" if inputs == 1 else f"{inputs} inputs"
            reason = f"slower packed: {min(found.packed):.0f} us for {what}, dense {min(found.dense):.0f} us"
        elif made is not None:
            _replace(model, name, made)
            after = made.nbytes
        speed = found.ratio if found is not None else None
        rows.append(LayerRow(name, tuple(weight.shape), zeros, weight.nbytes, after, reason, speed))
    for changed in CHANGED:
        changed(model)
    return PackReport(tuple(rows))


class Measured(NamedTuple):
    """What was measured of a layer: its times and, with streams, the best launch settings and where they pay."""

    timing: Timing
    setting: gpu.Setting | None
    few: int


def _timed(layer: Any, made: PackedLinear, zeros: int, inputs: int, known: dict[Any, Measured]) -> Timing:
    """The times of a layer, or of one of the same shape and, to a twentieth, the same sparsity; sets its launch."""
    weight = layer.weight
    key = (tuple(weight.shape), weight.dtype, weight.device, layer.bias is None, round(20 * zeros / weight.numel()))
    if key not in known:
        x = torch.ones(inputs, made.in_features, dtype=weight.dtype, device=weight.device)
        setting = None
        if made.streams is not None:
            setting = gpu.best_setting(made.streams, x)
            made.streams = made.streams.launched(*setting)
            made.few = gpu.few_of(made.streams, made.packed, made.weight_scale, made.offsets, x)
        known[key] = Measured(compare(layer, made, x), setting, made.few)
    timing, setting, made.few = known[key]
    if made.streams is not None and setting is not None:
        made.streams = made.streams.launched(*setting)
    return timing


@torch.inference_mode(False)
@torch.no_grad()
def unpack(model: nn.Module) -> nn.Module:
    """Replace packed layers by dense ones, in place, to the bit (-0.0 has become 0.0); returns the model."""
    check_module(model)
    if isinstance(model, PackedLinear):
        raise ModelError("unpack replaces layers inside a model. For a single layer use layer.to_linear().")
    layers = packed_layers(model)
    if away := [name for name, layer in layers if _offloaded(layer)]:
        raise ModelError(
            f"{away[0]} is offloaded by accelerate and cannot be unpacked. Load the model without offloading it first."
        )
    for name, layer in layers:
        dense = layer.to_linear()
        for hooks in HOOKS:
            setattr(dense, hooks, getattr(layer, hooks))
        _replace(model, name, dense)
    for changed in CHANGED:
        changed(model)
    return model


def _offloaded(layer: nn.Module) -> bool:
    """Whether accelerate fetches values of the layer when it is called."""
    return hasattr(layer, "_hf_hook") and any(one.is_meta for one in (*layer.parameters(), *layer.buffers()))


def check_module(model: object) -> None:
    """Refuse what is not a module."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"A torch.nn.Module is needed, not a {type(model).__name__}.")


def packed_layers(model: nn.Module) -> list[tuple[str, PackedLinear]]:
    """The packed layers by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear)]


def is_conv1d(module: object) -> bool:
    """Whether this is transformers' Conv1D, GPT-2's linear layer, whose weight is [inputs, outputs]."""
    return f"{type(module).__module__}.{type(module).__name__}" == "transformers.pytorch_utils.Conv1D"


def linear_layers(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Every nn.Linear and Conv1D by name, with the reason why it cannot be packed, or ""."""
    owners: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(_memory(parameter), []).append(name)
    modules = dict(model.named_modules())
    for name, module in model.named_modules():
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and isinstance(getattr(module, "weight", None), Tensor):
            tied = [other for other in owners.get(_memory(module.weight), ()) if other != f"{name}.weight"]
            yield name, module, _reason(module, tied) or _read_by(name, modules)


def _memory(parameter: Tensor) -> Any:
    """A key that parameters share if they share memory."""
    if parameter.is_meta or type(parameter) is not nn.Parameter or not parameter.numel():
        return id(parameter)
    return parameter.device, parameter.untyped_storage().data_ptr()


def _read_by(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Which module around a layer reads its weight without calling the layer, as a reason, or ""."""
    words = name.split(".")
    for depth in reversed(range(len(words))):
        kind: Any = type(modules[".".join(words[:depth])])
        if reads_weight(kind, ".".join(words[depth:])):
            return f"{kind.__name__} reads its weight directly"
    return ""


def _reason(layer: Any, tied: list[str]) -> str:
    if type(layer) is not nn.Linear and not is_conv1d(layer):
        return f"{type(layer).__name__} is a subclass of nn.Linear, which may compute something else"
    if tied:
        return f"shares its memory with {tied[0]}"
    if type(layer.weight) is not nn.Parameter:
        return f"its weight is a {type(layer.weight).__name__}"
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if any(hooks) or hasattr(layer, "_hf_hook"):
        return "has hooks, which would be lost"
    return ""


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)
