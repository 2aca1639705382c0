"""LoRA layers whose product is masked by the zeros of the base weight: forward, backward, merge and unmerge.

`keep_zeros` of `secateur.integrations.peft` gives PEFT's own layers these classes. They add no parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from secateur.selection.masks import PART, apply

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
else:
    LoraLayer = object  # the mixin below may not derive from it, or instances could not change their class


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
