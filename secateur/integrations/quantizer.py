"""Packed models in transformers: `from_pretrained` gives packed layers, `save_pretrained` writes them again.

`import secateur` arranges for this module to be imported as soon as transformers is. transformers calls what replaces
layers before loading a "quantizer".
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from secateur.errors import ModelError
from secateur.inference import packed
from secateur.inference.convert import METHOD, file_names, loaded_names
from secateur.inference.format import (
    AGAIN,
    GROUPS,
    SCALE,
    VERSION,
    Packed,
    WeightFiles,
    describe,
    metadata,
    not_read,
    version_of,
)
from secateur.inference.groups import Groups, mask_of, stored_shape
from secateur.inference.packed import PackedLinear, is_conv1d, packed_layers, unpack


@register_quantization_config(METHOD)
class SecateurConfig(QuantizationConfigMixin):
    """The entry `quantization_config` of a packed model's config."""

    def __init__(self, version: int = VERSION, **_: Any) -> None:
        method: Any = METHOD  # transformers allows any name, and declares an enum
        self.quant_method = method
        self.version = version


@register_quantizer(METHOD)
class SecateurQuantizer(HfQuantizer):
    """Puts packed layers where the files have packed weights, after checking the files."""

    requires_calibration = True  # a dense model is packed by sc.pack, not while it is loaded

    def update_attn_implementation(self, config: Any) -> Any:
        """Called with the config before files are looked up (transformers 5.18 and later)."""
        return _unguarded(config)

    def update_tp_plan(self, config: Any) -> Any:
        """Called with the config before files are looked up (before transformers 5.18)."""
        return _unguarded(config)

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """Refuse formats of later versions."""
        if wrong := not_read(getattr(self.quantization_config, "version", None)):
            raise ModelError(f"The model {wrong}")

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        if not checkpoint_files or not all(str(file).endswith(".safetensors") for file in checkpoint_files):
            raise ModelError("A packed model is loaded from its .safetensors files, not from a state dict.")
        with WeightFiles(checkpoint_files, foreign=False) as found:
            found.check()
            names = loaded_names(model, found.packed)
            for name in found.packed:
                module = _layer_of(model, names.get(name))
                if module is not None:
                    _put_empty(model, module, found.kept(name), f"{name}{SCALE}" in found, found.groups(name))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for name, module in model.named_modules():
            if _is_linear(module) and module.weight.ndim == 1:
                raise ModelError(
                    f"{name} is packed in the files, but {type(model).__name__} has no place to unpack it."
                )
        for name, layer in packed_layers(model):
            if layer.weight.is_meta:
                raise ModelError(
                    f"{name} was offloaded to disk, which packed weights cannot be. Leave offload_buffers out, so that"
                    " they stay in memory."
                )
            _put_mask(layer)
            layer.refresh()
            if layer.bias is not None and not getattr(layer.bias, "_is_hf_initialized", False):
                nn.init.zeros_(layer.bias)  # the files have none; transformers warns of it
        self.quantization_config = model.config.quantization_config = SecateurConfig(version_of(_described(model)))
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, str]]:
        """What `save_pretrained` adds to the files. It may rename tensors afterwards, so there are no hashes."""
        names, described = file_names(model), _described(model)
        if changed := sorted(described.keys() - names.keys()):
            raise ModelError(
                f"{changed[0]} is packed, and transformers renames parts of it, splits or joins it in files. Call"
                " sc.unpack(model) first."
            )
        return None, metadata({names[name]: said for name, said in described.items()}, None)

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        return unpack(model)

    def is_serializable(self, **_: Any) -> bool:
        """`save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Packed layers cannot be trained."""
        return False

    @property
    def is_compileable(self) -> bool:
        """torch.compile works: packed layers are one op."""
        return True


def _described(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What the metadata says about the packed weights of a model that `save_pretrained` writes, with their masks."""
    return {f"{name}.weight": describe(layer.packed, grouped=False) for name, layer in packed_layers(model)}


def _unguarded(config: Any) -> Any:
    """The config without the file name that keeps transformers without Secateur from loading random weights."""
    if getattr(config, "transformers_weights", None) is not None:
        del config.transformers_weights
    return config


def _layer_of(model: Any, weight: str | None) -> str | None:
    """The linear layer that has this weight; None if there is none."""
    name = (weight or "").removesuffix(".weight")
    try:
        return name if _is_linear(model.get_submodule(name)) else None
    except AttributeError:
        return None


def _is_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def _put_empty(model: nn.Module, name: str, kept: int, int8: bool, groups: Groups | None) -> None:
    """Replace a linear layer by a packed one whose buffers have the shapes of the files, for transformers to fill (5.23
    and later refuse others). Where files hold groups, it has a buffer for these instead of the mask."""
    layer: Any = model.get_submodule(name)
    transposed = is_conv1d(layer)
    rows, columns = reversed(layer.weight.shape) if transposed else layer.weight.shape
    with torch.device("meta"):
        mask = torch.zeros(rows, -(-columns // 8), dtype=torch.uint8)
        values = torch.empty(kept, dtype=torch.int8 if int8 else layer.weight.dtype)
        scale = torch.empty(rows, dtype=torch.float32) if int8 else None
        made: Any = PackedLinear(Packed(values, mask, (rows, columns), layer.weight.dtype, scale), layer.bias)
        if groups is not None:
            made.stored_groups = groups
            made.register_buffer(f"weight{GROUPS}", torch.empty(stored_shape(rows, columns, groups), dtype=torch.uint8))
            del made.weight_mask
    made.dense_kind = type(layer) if transposed else nn.Linear
    made.trainable = layer.weight.requires_grad
    made._is_hf_initialized = True  # families that go by the name Linear would draw weights
    model.set_submodule(name, made.train(layer.training))


def _put_mask(layer: PackedLinear) -> None:
    """Replace the groups that were loaded by the mask they stand for, which kernels read."""
    stored = layer._buffers.pop(f"weight{GROUPS}", None)
    if stored is None or layer.stored_groups is None:
        return
    mask, wrong = mask_of(stored, (layer.out_features, layer.in_features), layer.stored_groups)
    if wrong:
        raise ModelError(f"A packed layer cannot be loaded: {wrong}. {AGAIN}")
    layer.register_buffer("weight_mask", mask)
    layer.stored_groups = None


def keep_config(model: Any) -> None:
    """Make a model's config say whether it has packed layers, so that `save_pretrained` writes what loads again."""
    if packed_layers(model):
        _watch_saving()
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "save_pretrained"):
        for part in model.children():  # the model of transformers may be a part of another module
            keep_config(part)
        return
    ours = isinstance(getattr(config, "quantization_config", None), SecateurConfig)
    quantizer = getattr(model, "hf_quantizer", None)
    if packed_layers(model) and not (ours and quantizer):
        version = version_of(_described(model))
        quantizer = SecateurQuantizer(SecateurConfig(version), pre_quantized=True)
        config.quantization_config = quantizer.quantization_config
        model.hf_quantizer, model.quantization_method, model.is_quantized = quantizer, METHOD, True
    elif ours and not packed_layers(model):
        if quantizer:
            quantizer.remove_quantization_config(model)
        else:  # a part of the model was packed, which has the same config
            del config.quantization_config


def _watch_saving() -> None:
    """Make `save_pretrained` look at the layers first. A part of a model that is packed by itself, such as a block,
    does not know the model, whose config would say nothing of it."""
    from transformers.modeling_utils import PreTrainedModel  # which imports the quantizers, so not above

    original = PreTrainedModel.save_pretrained
    if getattr(original, "watched", False):
        return

    @functools.wraps(original)
    def save_pretrained(model: Any, *given: Any, **named: Any) -> Any:
        keep_config(model)
        return original(model, *given, **named)

    save_pretrained.watched = True  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[assignment,method-assign]


packed.CHANGED.append(keep_config)
