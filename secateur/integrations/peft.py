"""For PEFT: LoRA on a pruned model that keeps its zeros, in training and when merged.

Plain LoRA adds `scaling * B @ A` to the weight, which is dense. After `keep_zeros` the product is masked by the base
weight's zeros: `W + where(W == 0, 0, scaling * B @ A)`, in forward, merge, unmerge and get_delta_weight.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import peft
import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from secateur.errors import ModelError
from secateur.selection.masks import PART, apply

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
else:
    LoraLayer = object  # the mixin below may not derive from it, or instances could not change their class

log = logging.getLogger("secateur")

# Initializations that subtract B @ A from the base weight, or replace it, before anything can be masked.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def keep_zeros(model: Any, *, recompute: bool = True) -> Any:
    """Mask the LoRA adapters of a `peft.PeftModel` by the zeros of its base weights, and return the same model.

    Adapters added or loaded later are masked too. Call it before training and after loading; it changes neither the
    names nor the values of any parameter.

    Args:
        recompute: compute the masked product again in backward instead of keeping one the size of the weight for every
            layer. `False` is faster and needs that memory.
    """
    tuner = _lora_model(model)
    for name, config in tuner.peft_config.items():
        _check_config(name, config)
    found = _layers(tuner)
    if not found:
        raise ModelError(
            "No layer with an adapter has zeros in its base weight, so there is nothing to keep. Prune the model before"
            " get_peft_model, or name the pruned layers in target_modules."
        )
    tuner.__class__ = KeepZerosLoraModel
    tuner.recompute = recompute
    tuner.mask_adapters(found)
    return model


def load(
    model: nn.Module, folder: Any, adapter_name: str = "default", *, recompute: bool = True, **options: Any
) -> Any:
    """Load an adapter that was trained with `keep_zeros`, onto the pruned model it was trained on, and mask it again.

    Args:
        model: the base model, or a PeftModel that gets this adapter as another one.
        folder: where `save_pretrained` put the adapter, or its name on the hub.
        options: further arguments of `PeftModel.from_pretrained` or `PeftModel.load_adapter`, such as `is_trainable`.
    """
    config = KeepZerosConfig.from_pretrained(folder, **_of_hub(options))
    expected = config.secateur_zeros
    if expected is None:
        raise ModelError(
            f"{folder} was not saved by a model with keep_zeros, so this adapter was trained without masks. To mask it"
            " all the same, load it with PeftModel.from_pretrained and call keep_zeros."
        )
    if isinstance(model, peft.PeftModel):
        loaded = keep_zeros(model, recompute=recompute)
        config.inference_mode = not options.get("is_trainable", False)
        loaded.add_adapter(adapter_name, config)
        loaded.load_adapter(folder, adapter_name, **options)
        loaded.set_requires_grad(adapter_name, options.get("is_trainable", False))
        undo = partial(loaded.delete_adapter, adapter_name)
    else:
        loaded = peft.PeftModel.from_pretrained(model, folder, adapter_name, config=config, **options)
        undo = loaded.unload
    try:
        keep_zeros(loaded, recompute=recompute)
        _check_same_zeros(adapter_name, expected, loaded.peft_config[adapter_name].secateur_zeros)
    except ModelError:
        undo()
        raise
    return loaded


@dataclass
class KeepZerosConfig(peft.LoraConfig):
    """A LoraConfig that records the zeros of the base. PEFT alone warns about this key when it loads the adapter."""

    secateur_zeros: dict[str, int] | None = None

    @classmethod
    def from_peft_type(cls, **values: Any) -> KeepZerosConfig:
        """PEFT's own version returns the class registered for the type, which does not know our key."""
        zeros = values.pop("secateur_zeros", None)
        config = super().from_peft_type(**values)
        if type(config) is not peft.LoraConfig:
            raise ModelError(f"This adapter has a {type(config).__name__}; keep_zeros masks LoRA adapters alone.")
        config.__class__ = cls
        config.secateur_zeros = zeros
        return cast(KeepZerosConfig, config)


class KeepZerosLoraModel(peft.LoraModel):
    """A LoraModel that masks every adapter, also those added later."""

    recompute = True

    def _check_new_adapter_config(self, config: Any) -> None:
        super()._check_new_adapter_config(config)
        for name, known in self.peft_config.items():
            if known is config:
                _check_config(name, config)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **options: Any) -> None:
        super().inject_adapter(model, adapter_name, *args, **options)
        try:
            self.mask_adapters(_layers(self))
        except ModelError:
            self.delete_adapter(adapter_name)
            raise

    def mask_adapters(self, layers: dict[str, Any]) -> None:
        """Give these layers their masked classes, and record their zeros in the adapters' configs."""
        for layer in layers.values():
            if not isinstance(layer, MaskedLayer):
                layer.__class__ = MASKED[type(layer)]
            layer.recompute = self.recompute
            layer.lora_variant = {name: MaskedProduct() for name in layer.lora_A}
        for name, config in self.peft_config.items():
            self.peft_config[name] = marked = copy.copy(config)  # the caller's config stays as it is
            marked.__class__ = KeepZerosConfig
            marked.secateur_zeros = _fingerprint(name, layers)
        log.info("keep_zeros: the zeros of %d layers are kept", len(layers))


class MaskedLayer(LoraLayer):
    """What the masked layers add to PEFT's own: the base's zeros, a masked delta, and an exact unmerge."""

    recompute = True
    before_merge: BaseWeights | None = None  # set while adapters are merged

    def zeros(self) -> Tensor:
        """True where the base weight is zero without any adapter. A merged weight may be zero by chance elsewhere."""
        weight = self.get_base_layer().weight
        return cast(Tensor, (weight if self.before_merge is None else self.before_merge.weight.to(weight.device)) == 0)

    def factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """A and scaling * B as matrices. A convolution's kernel is part of A's columns."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        return a.flatten(1), b.flatten(1) * self.scaling[adapter]

    def matrix(self, weight: Tensor) -> Tensor:
        """A view of a tensor in the weight's shape as [outputs, inputs]; GPT-2's Conv1D has its weight transposed."""
        return weight.t() if getattr(self, "fan_in_fan_out", False) else weight.flatten(1)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What merging this adapter adds to the base weight."""
        a, b = self.factors(adapter)
        half = a.device.type == "cpu" and a.dtype.itemsize < 4  # as PEFT does: slow on many CPUs
        product = (b.float() @ a.float()).to(a.dtype) if half else b @ a
        zeros = self.zeros().to(a.device)
        delta = product.t().contiguous() if getattr(self, "fan_in_fan_out", False) else product.view(zeros.shape)
        if torch.is_grad_enabled():
            return delta.masked_fill(zeros, 0)  # infinity times zero would be NaN
        apply([delta], [~zeros])
        return delta

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As PEFT does; for inference with the weight that merging would write, so that outputs agree to the bit."""
        base = self.get_base_layer()
        active = [name for name in self.active_adapters if name in self.lora_A]
        usual = args or kwargs or self.training or self.merged or self.disable_adapters or base is not self.base_layer
        if usual or torch.is_grad_enabled() or any(self.lora_bias[name] for name in active):
            return cast(Tensor, super().forward(x, *args, **kwargs))
        weight = base.weight
        for name in active:
            weight = MaskedProduct.merge_safe(self, name, weight)
        return cast(Tensor, functional_call(base, {"weight": weight}, (x,), tie_weights=False))

    def resolve_lora_variant(self, *, config: Any, **options: Any) -> MaskedProduct:
        """PEFT asks this when an adapter is added to the layer; its config was checked before."""
        return MaskedProduct()

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge as PEFT does, after a copy of what the merge changes."""
        first = self.before_merge is None
        if first:
            self.before_merge = BaseWeights(self.get_base_layer())
        try:
            super().merge(safe_merge, adapter_names)
        except BaseException:
            if first:
                self._restore()
            raise
        if not self.merged:
            self.before_merge = None

    def unmerge(self) -> None:
        """Restore the base weight to the bit."""
        if self.before_merge is None:
            super().unmerge()
        else:
            self.merged_adapters.clear()
            self._restore()

    def _restore(self) -> None:
        assert self.before_merge is not None
        self.before_merge.restore(self.get_base_layer())
        self.before_merge = None


class BaseWeights:
    """A base layer's weight and bias as they were before a merge."""

    def __init__(self, base: Any) -> None:
        self.weight = base.weight.detach().clone()
        self.bias = None if base.bias is None else base.bias.detach().clone()

    def restore(self, base: Any) -> None:
        base.weight.data.copy_(self.weight)
        if self.bias is not None:
            base.bias.data.copy_(self.bias)


class MaskedProduct(lora.layer.LoraVariant):
    """PEFT's own layers call these methods in place of plain LoRA's arithmetic."""

    def supports_lora_conversion(self) -> bool:
        """A masked product has no low rank."""
        return False

    @staticmethod
    def init(module: Any, adapter_name: str, **options: Any) -> None:
        """Nothing to add: the factors are plain LoRA's."""

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        with torch.no_grad():
            return (orig_weight + module.get_delta_weight(active_adapter)).to(orig_weight.dtype)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data.copy_(MaskedProduct.merge_safe(module, active_adapter, orig_weight.data))

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **options: Any) -> Tensor:
        x = module.lora_dropout[active_adapter](x).to(result.dtype)
        a, b = module.factors(active_adapter)
        result = result + module.adapter_output(x, a, b)
        if module.lora_bias[active_adapter]:
            bias = module.lora_B[active_adapter].bias * module.scaling[active_adapter]
            result = result + bias.view(-1, *[1] * getattr(module, "spatial", 0)).to(result.dtype)
        return result


class MaskedLinear(MaskedLayer, lora.Linear):
    """LoRA on a linear layer or GPT-2's Conv1D."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In full precision with the weight that merging would write: one product instead of two, and outputs that
        agree with the merged model's. In half precision the sum would round small adapters away."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        alone = len(names) == 1 and not (args or kwargs or self.merged or self.disable_adapters)
        if alone and (self.training or torch.is_grad_enabled()) and self._can_add(x, names[0]):
            base = self.get_base_layer()
            return self._output(x, base.weight, base.bias, *self.factors(names[0]), add=True)
        return super().forward(x, *args, **kwargs)

    def _can_add(self, x: Tensor, adapter: str) -> bool:
        """Whether base and adapter see the same input in one full precision, and nothing else watches the base."""
        base = self.get_base_layer()
        plain = type(base) is nn.Linear and base is self.base_layer and "forward" not in base.__dict__
        watched = plain and bool(base._forward_hooks or base._forward_pre_hooks or base._backward_hooks)
        if not plain or watched or base.weight.requires_grad or is_traceable_wrapper_subclass(base.weight):
            return False
        dropout = self.lora_dropout[adapter]
        changed = self.lora_bias[adapter] or (self.training and not isinstance(dropout, nn.Identity) and dropout.p > 0)
        dtypes = {x.dtype, base.weight.dtype, self.lora_A[adapter].weight.dtype, self.lora_B[adapter].weight.dtype}
        full = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}
        return full and not changed and not torch.is_autocast_enabled(x.device.type)

    def adapter_output(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self._output(x, self.matrix(self.get_base_layer().weight), None, a, b, add=False)

    def _output(self, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, *, add: bool) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return cast(Tensor, _MaskedLinear.apply(x, weight, bias, a, b, add))
        if not torch.is_grad_enabled():
            return _forward_in_parts(x, weight, bias, a, b, add)
        return F.linear(x, _masked_product(weight, a, b, x.dtype, add), bias)


class _MaskedConv(MaskedLayer):
    """LoRA on a convolution. The product is computed for the whole layer, one layer at a time."""

    def adapter_output(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        base = self.get_base_layer()

        def output(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            delta = _masked_product(self.matrix(base.weight), a, b, x.dtype)
            return cast(Tensor, base._conv_forward(x, delta.view(base.weight.shape), None))

        if self.recompute and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(output, x, a, b, use_reentrant=False, preserve_rng_state=False))
        return output(x, a, b)


class MaskedConv1d(_MaskedConv, lora.layer.Conv1d):
    spatial = 1


class MaskedConv2d(_MaskedConv, lora.layer.Conv2d):
    spatial = 2


class MaskedConv3d(_MaskedConv, lora.layer.Conv3d):
    spatial = 3


MASKED: dict[type, type] = {
    lora.Linear: MaskedLinear,
    lora.layer.Conv1d: MaskedConv1d,
    lora.layer.Conv2d: MaskedConv2d,
    lora.layer.Conv3d: MaskedConv3d,
}


def _masked_product(weight: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, add: bool = False) -> Tensor:
    """b @ a where the weight is not zero, and the weight itself if it is to be added. Multiplied, which on CPUs is
    several times faster than masked_fill."""
    with torch.autocast(weight.device.type, enabled=False):
        product = (b @ a) * (weight != 0)
        return (weight + product if add else product).to(dtype)


def _parts(weight: Tensor) -> Iterator[slice]:
    """Rows of a matrix, a few million weights at a time."""
    outputs, inputs = weight.shape
    step = max(1, PART // max(1, inputs))
    return (slice(first, min(first + step, outputs)) for first in range(0, outputs, step))


def _forward_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, add: bool) -> Tensor:
    outputs = [
        F.linear(x, _masked_product(weight[rows], a, b[rows], x.dtype, add), None if bias is None else bias[rows])
        for rows in _parts(weight)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


class _MaskedLinear(torch.autograd.Function):
    """x @ masked(b @ a).T, or x @ (weight + masked(b @ a)).T + bias if the base is to be added.

    Saves x and the factors, and computes the masked product again in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, add: bool) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.add = add
        with torch.autocast(x.device.type, enabled=False):
            return _forward_in_parts(x, weight, bias, a, b, add)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        for_x, _, for_bias, for_a, for_b, _ = ctx.needs_input_grad
        grad, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        # sums over parts, in float32 at least
        grad_x = torch.zeros_like(inputs, dtype=torch.promote_types(x.dtype, torch.float32)) if for_x else None
        grad_a, grad_b = torch.zeros_like(a) if for_a else None, torch.empty_like(b) if for_b else None
        with torch.autocast(x.device.type, enabled=False):
            for rows in _parts(weight):
                of_rows = grad[:, rows]
                if grad_x is not None:
                    grad_x += of_rows @ _masked_product(weight[rows], a, b[rows], x.dtype, ctx.add)
                if grad_a is None and grad_b is None:
                    continue
                of_product = (of_rows.t() @ inputs).to(a.dtype).mul_(weight[rows] != 0)
                if grad_a is not None:
                    grad_a += b[rows].t() @ of_product
                if grad_b is not None:
                    grad_b[rows] = of_product @ a.t()
        of_x = None if grad_x is None else grad_x.to(x.dtype).view(x.shape)
        return of_x, None, grad.sum(0) if for_bias else None, grad_a, grad_b, None


def _lora_model(model: Any) -> Any:
    """The LoraModel inside a PeftModel, or an error that says what was passed instead."""
    if not isinstance(model, peft.PeftModel):
        raise ModelError(f"keep_zeros takes a PeftModel, as get_peft_model returns it; got {type(model).__name__}.")
    tuner = model.base_model
    if type(tuner) not in (peft.LoraModel, KeepZerosLoraModel):
        kind = model.peft_type.value if model.peft_type else type(tuner).__name__
        raise ModelError(
            f"keep_zeros masks LoRA adapters; this model has {kind} adapters. HIRA and IA3 multiply the base weight and"
            " keep its zeros by themselves."
        )
    return tuner


def _check_config(name: str, config: Any) -> None:
    """Refuse variants of LoRA whose arithmetic is another, and initializations that change the base weight."""
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(CHANGES_BASE):
        raise ModelError(
            f"Adapter {name!r} has init_lora_weights={init!r}, which changes the base weights and fills their zeros."
            " Use True or 'gaussian', and load the pruned model again."
        )
    for field in fields(config):
        asked = getattr(config, field.name)
        if (field.metadata.get("is_lora_variant") and asked) or asked in field.metadata.get("lora_variants", ()):
            raise ModelError(
                f"Adapter {name!r} has {field.name}={asked!r}, a variant of LoRA that keep_zeros does not mask. Use"
                " plain LoRA, with use_rslora, lora_bias or lora_dropout if you like."
            )


def _layers(tuner: Any) -> dict[str, Any]:
    """Adapted layers whose base weight has zeros, by name. Raises where such a layer cannot be masked."""
    found = {}
    for name, layer in tuner.model.named_modules():
        if isinstance(layer, ModulesToSaveWrapper) and any(map(_may_have_zeros, _matrices(layer.original_module))):
            log.warning("keep_zeros: %s is in modules_to_save, trains all its weights and loses its zeros", name)
        if not isinstance(layer, BaseTunerLayer):
            continue
        if isinstance(layer, MaskedLayer):
            found[name] = layer
        elif layer.merged:
            raise ModelError(
                f"{name!r} has merged adapters, so the zeros of its base weight are gone. Call unmerge_adapter() first."
            )
        elif not (matrices := _matrices(layer.get_base_layer())) or any(map(_may_have_zeros, matrices)):
            if reason := _cannot_mask(layer):
                raise ModelError(
                    f"keep_zeros cannot mask {name!r}, whose base has zeros or hides them: {reason}. Leave it out of"
                    " target_modules (or target_parameters)."
                )
            found[name] = layer
        else:
            log.info("keep_zeros: %s has no zeros and keeps plain LoRA", name)
    return found


def _matrices(module: nn.Module) -> list[Tensor]:
    return [weight for weight in module.parameters() if weight.ndim > 1]


def _may_have_zeros(weight: Tensor) -> bool:
    """Whether a weight has zeros, or is stored so that they cannot be seen."""
    return _is_quantized(weight) or bool((weight == 0).any())


def _is_quantized(weight: Tensor) -> bool:
    return not weight.is_floating_point() or weight.dtype.itemsize == 1 or is_traceable_wrapper_subclass(weight)


def _cannot_mask(layer: Any) -> str | None:
    """Why a layer with zeros cannot be masked, or None."""
    base = layer.get_base_layer()
    matrices = _matrices(base)
    if not matrices or any(map(_is_quantized, matrices)):
        return "its weight is quantized, sharded or otherwise not one plain number per weight"
    if type(layer) not in MASKED:
        return f"PEFT adapts this {type(base).__name__} with {type(layer).__name__}, which is not supported"
    if getattr(base, "groups", 1) > 1:
        return f"a convolution with groups={base.groups} cannot be merged by PEFT"
    return None


def _fingerprint(adapter: str, layers: dict[str, Any]) -> dict[str, int]:
    """How many zeros the layers of an adapter have, and a checksum of their number by row and column."""
    zeros, checksum = 0, 0
    for name, layer in layers.items():
        if adapter in layer.lora_A:
            here = layer.zeros().flatten(1)
            rows, columns = here.sum(1), here.sum(0)
            zeros += int(rows.sum())
            counts = torch.cat([rows, columns]).cpu().numpy().tobytes()
            checksum = zlib.crc32(name.encode() + counts, checksum)
    return {"zeros": zeros, "checksum": checksum}


def _check_same_zeros(name: str, saved: dict[str, int], found: dict[str, int]) -> None:
    """Refuse an adapter that was trained on a base with other zeros."""
    if saved != found:
        same = saved["zeros"] == found["zeros"]
        raise ModelError(
            f"Adapter {name!r} was trained on a base with {saved['zeros']:,} zeros in its layers; this base has"
            f" {'as many in other places' if same else format(found['zeros'], ',')}. Load the model it was trained on."
        )


def _of_hub(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that say where on the hub a file is."""
    return {name: options[name] for name in ("subfolder", "revision", "cache_dir", "token") if name in options}
