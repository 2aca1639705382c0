"""For PEFT: LoRA on a pruned model that keeps its zeros, in training and when merged.

Plain LoRA adds `scaling * B @ A` to the weight, which is dense. After `keep_zeros` the product is masked by the base
weight's zeros: `W + where(W == 0, 0, scaling * B @ A)`, in forward, merge, unmerge and get_delta_weight.
"""

from __future__ import annotations

import copy
import logging
import warnings
import zlib
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, cast

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from secateur.errors import ModelError
from secateur.integrations.masked_lora import MASKED, MaskedLayer, MaskedProduct
from secateur.selection.masks import pack

log = logging.getLogger("secateur")

# Initializations that subtract B @ A from the base weight, or replace it, before anything can be masked.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
PLACES = "places"  # the checksum in an adapter's record of zeros; earlier versions had another, of rows and columns


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


def maskable_layers(model: nn.Module, config: peft.LoraConfig) -> list[str]:
    """Names of the layers that this config adapts and `keep_zeros` can mask, whatever zeros they have.

    The model stays as it is: adapters are added to a copy of it that has no values.
    """
    empty = {id(one): nn.Parameter(torch.empty_like(one, device="meta"), False) for one in model.parameters()}
    with warnings.catch_warnings(action="ignore"):  # about adapters that nobody will use
        adapted = peft.get_peft_model(copy.deepcopy(model, cast(Any, empty)), copy.deepcopy(config))
    modules = adapted.base_model.model.named_modules()
    layers = [(name, layer) for name, layer in modules if isinstance(layer, BaseTunerLayer)]
    return [name for name, layer in layers if _cannot_mask(layer) is None]


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
    """How many zeros the layers of an adapter have, and a checksum of their places."""
    count, places = 0, 0
    for name, layer in layers.items():
        if adapter in layer.lora_A:
            zeros = layer.zeros()
            count += int(zeros.sum())
            places = zlib.crc32(name.encode() + pack(zeros).cpu().numpy().tobytes(), places)
    return {"zeros": count, PLACES: places}


def _check_same_zeros(name: str, saved: dict[str, int], found: dict[str, int]) -> None:
    """Refuse an adapter that was trained on a base with other zeros."""
    if PLACES not in saved:
        log.warning(
            "Adapter %r was saved by an earlier version of Secateur, without a checksum of places: the number of zeros"
            " was compared alone. Save it again to have them checked.", name,
        )  # fmt: skip
        saved, found = ({"zeros": one["zeros"]} for one in (saved, found))
    if saved != found:
        same = saved["zeros"] == found["zeros"]
        raise ModelError(
            f"Adapter {name!r} was trained on a base with {saved['zeros']:,} zeros in its layers; this base has"
            f" {'as many in other places' if same else format(found['zeros'], ',')}. Load the model it was trained on."
        )


def _of_hub(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that say where on the hub a file is."""
    return {name: options[name] for name in ("subfolder", "revision", "cache_dir", "token") if name in options}
