"""Exact selection, ranking, masking and AdamW on the device of the tensors. This is the one place that picks a backend.

Triton kernels run on NVIDIA GPUs. Plain torch runs everywhere else, and on GPUs too with SECATEUR_KERNELS=off. Both
give the same masks on one device. With TRITON_INTERPRET=1 Triton's interpreter runs the kernels on the CPU, which is
how they are tested. `reason_against` says why a device does not use Triton, and the choice is logged once per device.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.kernels import decode_cuda, select
from secateur.kernels.decode import CUDA, Form
from secateur.kernels.reference import AdamWTensors, Hyper
from secateur.kernels.table import FLOATS
from secateur.selection import exact
from secateur.selection.exact import ALONE, Cut, Peers, ScoredTensor, count_of, refuse_nan
from secateur.selection.masks import apply, from_bits, to_bits
from secateur.settings import kernels_off

LOG = logging.getLogger("secateur")


class Pruned(NamedTuple):
    """The outcome of several selections: a cut for each group, a mask for each tensor."""

    cuts: list[Cut | None]
    masks: list[Tensor]
    kept: list[int] | None  # how many weights each mask keeps, where that was counted anyway


def reason_against(device: torch.device) -> str | None:
    """Why tensors on this device do not use the Triton kernels, or None if they do."""
    return _reason(device, os.environ.get("SECATEUR_KERNELS"), os.environ.get("TRITON_INTERPRET") == "1")


@lru_cache(maxsize=64)
def _reason(device: torch.device, _asked: str | None, interpreted: bool) -> str | None:
    reason = _find_reason(device, kernels_off(), interpreted)
    LOG.info("%s: %s", device, "Triton kernels" if reason is None else f"plain torch, no Triton kernels: {reason}")
    return reason


def _find_reason(device: torch.device, off: bool, interpreted: bool) -> str | None:
    if off:
        return "SECATEUR_KERNELS=off is set"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        return None if interpreted else "the kernels do not run on CPUs"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the kernels run on NVIDIA GPUs only, not on {device.type if device.type != 'cuda' else 'ROCm'}"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton needs compute capability 7.0 or later"
    return None


def serves(*tensors: Tensor) -> bool:
    """Whether all tensors are on one device and that device uses the Triton kernels."""
    devices = {tensor.device for tensor in tensors}
    return len(devices) == 1 and reason_against(devices.pop()) is None


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make this the current CUDA device: Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def prune_groups(
    groups: Sequence[Sequence[ScoredTensor]], counts: Sequence[int], peers: Peers = ALONE, packed: bool = False
) -> Pruned:
    """Prune exactly `count` more living weights of each group, those with the lowest scores in that group.

    Masks are flat, in the order of the tensors: bool, or one bit per weight when `packed`.
    """
    tensors = [tensor for group in groups for tensor in group]
    if not _uses_kernels(tensors):
        plain = [[tensor.unpacked() for tensor in group] for group in groups]
        done = [exact.prune_exactly(group, count, peers) for group, count in zip(plain, counts, strict=True)]
        masks = [mask for _, found in done for mask in found]
        kept = [count_of(mask) for mask in masks]
        return Pruned([cut for cut, _ in done], [to_bits(mask) for mask in masks] if packed else masks, kept)
    from secateur.kernels import launch  # imports triton, which is optional

    with on(tensors[0].device):
        return Pruned(*select.prune_groups(launch, groups, counts, peers, packed))


def rank_tiles(
    tensors: Sequence[ScoredTensor], widths: Sequence[int], gone: Sequence[int], peers: Peers, packed: bool
) -> list[Tensor] | None:
    """Masks without the `gone` lowest of every `width` neighbours, or None where plain torch must do it."""
    if not _uses_kernels(tensors):
        return None
    from secateur.kernels import launch

    with on(tensors[0].device):
        done = select.rank_tiles(launch, tensors, widths, gone, packed)
    if done is None:
        return None
    masks, nan_counts = done
    refuse_nan([tensor.name for tensor in tensors], peers.totals(nan_counts))
    return masks


def zero(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zero pruned entries in place. A mask is bool in its tensor's shape, or flat bits."""
    slow: list[tuple[Tensor, Tensor]] = []
    fast: list[tuple[Tensor, Tensor]] = []
    for tensor, mask in zip(tensors, masks, strict=True):
        flat = serves(tensor, mask) and tensor.is_contiguous() and mask.is_contiguous()
        (fast if flat else slow).append((tensor, mask))
    if slow:
        apply([tensor for tensor, _ in slow], [mask for _, mask in slow])
    for device in dict.fromkeys(tensor.device for tensor, _ in fast):
        from secateur.kernels import adamw

        mine = [(tensor, mask) for tensor, mask in fast if tensor.device == device]
        with on(device):
            adamw.zero([tensor for tensor, _ in mine], [mask for _, mask in mine])
        written([tensor for tensor, _ in mine])


def written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that kernels wrote here, so that a backward pass that needs the old values fails."""
    torch.autograd.graph.increment_version(tensors)


def population(masks: Sequence[Tensor]) -> list[int]:
    """How many weights each mask keeps, with one sync for all masks."""
    if masks and serves(*masks):
        from secateur.kernels import adamw

        with on(masks[0].device):
            return adamw.population(masks).tolist()
    whole = (mask.view(-1) if mask.dtype == torch.bool else from_bits(mask, 8 * mask.numel()) for mask in masks)
    return [count_of(mask) for mask in whole]


def takes(part: AdamWTensors, group: Mapping[str, Any]) -> bool:
    """Whether the AdamW kernel can step this parameter: contiguous floats on a device with kernels, and no option of
    the parameter group that needs torch's own step."""
    if group["foreach"] or group["capturable"] or group["differentiable"] or isinstance(group["lr"], Tensor):
        return False
    tensors = [*part.tensors, part.gradient, *([] if part.mask is None else [part.mask])]
    floats = all(tensor.dtype in FLOATS for tensor in (*part.tensors, part.gradient))
    alike = len({t.dtype for t in part.tensors[1:]}) == 1 and len({t.shape for t in part.tensors}) == 1
    return floats and alike and serves(*tensors) and all(tensor.is_contiguous() for tensor in tensors)


def prepare_adamw(parts: Sequence[AdamWTensors], hyper: Hyper) -> list[Any]:
    """Prepare AdamW steps by kernel for these parameters, one per device; `take_adamw` runs them, repeatedly."""
    if not parts:
        return []
    from secateur.kernels import adamw

    ready = []
    for device in dict.fromkeys(part.parameter.device for part in parts):
        with on(device):
            members = [number for number, part in enumerate(parts) if part.parameter.device == device]
            ready.append(adamw.prepare(parts, members, hyper))
    return ready


def take_adamw(ready: Sequence[Any], gradients: Sequence[Tensor], hyper: Hyper, soft: Tensor | None) -> None:
    """One AdamW step by kernel, masks and SPAM included. `soft` holds SPAM's factors for both moments."""
    if not ready:
        return  # Triton may not be installed
    from secateur.kernels import adamw

    for one in ready:
        with on(one.device):
            adamw.take(one, gradients, hyper, None if soft is None else soft.to(one.device))
        written(one.written)


def sparse_linear(
    x: Tensor, values: Sequence[Tensor], indices: Sequence[Tensor], bases: Tensor, starts: Tensor, shares: Tensor,
    scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype, form: Sequence[int],
) -> Tensor:  # fmt: skip
    """x @ weight.T * scale + bias for few inputs and the streams of decode.py, on a device with kernels."""
    given = (x, values, indices, bases, starts, shares, scale, bias, dtype, form)
    with on(x.device):
        if Form(*form).kernel == CUDA:
            return decode_cuda.linear(*given)
        from secateur.kernels import decode_triton

        return decode_triton.linear(*given)


def unpack_streams(
    values: Sequence[Tensor], indices: Sequence[Tensor], bases: Tensor, starts: Tensor, scale: Tensor | None,
    dtype: torch.dtype, form: Sequence[int], weight: Tensor,
) -> None:  # fmt: skip
    """Write the dense weight of streams into `weight`, on a device with the CUDA kernel."""
    with on(weight.device):
        decode_cuda.unpack(values, indices, bases, starts, scale, dtype, form, weight)


def unpack_weight(
    values: Tensor, mask: Tensor, offsets: Tensor, scale: Tensor | None, columns: int, weight: Tensor
) -> None:
    """Write the dense form of a packed weight into `weight`, on a device with kernels."""
    from secateur.kernels import decode_triton

    with on(weight.device):
        decode_triton.unpack(values, mask, offsets, scale, columns, weight)


def _uses_kernels(tensors: Sequence[ScoredTensor]) -> bool:
    if not tensors or reason_against(tensors[0].device) is not None:
        return False
    return all(tensor.device == tensors[0].device for tensor in tensors)
