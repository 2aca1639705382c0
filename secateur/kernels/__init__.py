"""Kernels: exact selection, ranking and masking on whatever device the tensors are. The only place that asks which.

Triton serves CUDA devices; plain torch serves all others, and these too with SECATEUR_KERNELS=off. On one device both
give the same masks. Where TRITON_INTERPRET=1 is set, Triton's interpreter serves the CPU: so the kernels are tested.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.kernels.reference import Hyper, Part
from secateur.selection import exact
from secateur.selection.exact import ALONE, Cut, Peers, ScoredTensor, count_of, refuse_nan
from secateur.selection.masks import as_bool, from_bits, to_bits


class Pruned(NamedTuple):
    """What became of some selections: a cut for each, and for each piece its mask."""

    cuts: list[Cut | None]
    masks: list[Tensor]
    kept: list[int] | None  # how many weights each mask keeps, where that was found in passing


def reason_against(device: torch.device) -> str | None:
    """Why Triton does not serve this device, or None if it does."""
    return _reason(device, os.environ.get("SECATEUR_KERNELS") == "off", os.environ.get("TRITON_INTERPRET") == "1")


@lru_cache(maxsize=64)
def _reason(device: torch.device, off: bool, interpreted: bool) -> str | None:
    if off:
        return "SECATEUR_KERNELS=off"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        return None if interpreted else "plain torch serves CPUs"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"there are kernels for NVIDIA GPUs only, not for {device.type if device.type != 'cuda' else 'ROCm'}"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton needs compute capability 7.0 or later"
    return None


def serves(*tensors: Tensor) -> bool:
    """Whether Triton serves the one device all of these are on."""
    devices = {tensor.device for tensor in tensors}
    return len(devices) == 1 and reason_against(devices.pop()) is None


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to the current device, so it must be this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def prune_groups(
    groups: Sequence[Sequence[ScoredTensor]], counts: Sequence[int], peers: Peers = ALONE, packed: bool = False
) -> Pruned:
    """For each group of pieces, a selection of its own: exactly `count` more of its living weights go.

    Masks are flat and in the order of the pieces: bool, or one bit a weight when `packed`.
    """
    pieces = [piece for group in groups for piece in group]
    if not _served(pieces):
        plain = [[replace(piece, alive=_bools(piece)) for piece in group] for group in groups]
        done = [exact.prune_exactly(group, count, peers) for group, count in zip(plain, counts, strict=True)]
        masks = [mask for _, found in done for mask in found]
        kept = [count_of(mask) for mask in masks]
        return Pruned([cut for cut, _ in done], [to_bits(mask) for mask in masks] if packed else masks, kept)
    from secateur.kernels import launch, select

    with on(pieces[0].device):
        return Pruned(*select.prune_groups(launch, groups, counts, peers, packed))


def rank_tiles(
    pieces: Sequence[ScoredTensor], widths: Sequence[int], gone: Sequence[int], peers: Peers, packed: bool
) -> list[Tensor] | None:
    """Masks without the lowest of every `width` neighbours, or None where that is for plain torch to do."""
    if not _served(pieces):
        return None
    from secateur.kernels import select, select_triton

    with on(pieces[0].device):
        done = select.rank_tiles(select_triton, pieces, widths, gone, packed)
    if done is None:
        return None
    masks, spoiled = done
    refuse_nan([piece.name for piece in pieces], peers.totals(spoiled))
    return masks


def zero(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zero, in place, what the masks say is gone: each bool in its tensor's shape, or flat bits."""
    from secateur.kernels import reference

    slow: list[tuple[Tensor, Tensor]] = []
    fast: list[tuple[Tensor, Tensor]] = []
    for tensor, mask in zip(tensors, masks, strict=True):
        flat = serves(tensor, mask) and tensor.is_contiguous() and mask.is_contiguous()
        (fast if flat else slow).append((tensor, mask))
    if slow:
        reference.zero([tensor for tensor, _ in slow], [mask for _, mask in slow])
    for device in dict.fromkeys(tensor.device for tensor, _ in fast):
        from secateur.kernels import adamw

        mine = [(tensor, mask) for tensor, mask in fast if tensor.device == device]
        with on(device):
            adamw.zero([tensor for tensor, _ in mine], [mask for _, mask in mine])
        written([tensor for tensor, _ in mine])


def written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that kernels wrote here: a backward pass that needs the old values must fail, not be wrong."""
    torch.autograd.graph.increment_version(tensors)


def takes(part: Part, group: Mapping[str, Any]) -> bool:
    """Whether the AdamW kernel can take this part: plain floats in flat order on a device it serves, and no setting
    that asks for torch's own way."""
    if group["foreach"] or group["capturable"] or group["differentiable"] or isinstance(group["lr"], Tensor):
        return False
    tensors = [*part.tensors, part.gradient, *([] if part.mask is None else [part.mask])]
    floats = all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) for t in (*part.tensors, part.gradient))
    alike = len({t.dtype for t in part.tensors[1:]}) == 1 and len({t.shape for t in part.tensors}) == 1
    return floats and alike and serves(*tensors) and all(tensor.is_contiguous() for tensor in tensors)


def prepare_adamw(parts: Sequence[Part], hyper: Hyper) -> list[Any]:
    """Steps of AdamW by kernel, for parts that it takes: one for each device, to be taken again and again."""
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
    """One step of AdamW by kernel, masks and SPAM inside."""
    if not ready:
        return  # Triton, which the steps import, is optional
    from secateur.kernels import adamw

    for one in ready:
        with on(one.device):
            adamw.take(one, gradients, hyper, None if soft is None else soft.to(one.device))
        written(one.written)


def population(masks: Sequence[Tensor]) -> list[int]:
    """How many weights each mask keeps; one look at the device for all."""
    if masks and serves(*masks):
        from secateur.kernels import adamw

        with on(masks[0].device):
            return adamw.population(masks).tolist()
    return [
        count_of(mask.view(-1) if mask.dtype == torch.bool else from_bits(mask, 8 * mask.numel())) for mask in masks
    ]


def _served(pieces: Sequence[ScoredTensor]) -> bool:
    if not pieces or reason_against(pieces[0].device) is not None:
        return False
    return all(piece.device == pieces[0].device for piece in pieces)


def _bools(piece: ScoredTensor) -> Tensor | None:
    return None if piece.alive is None else as_bool(piece.alive, (piece.numel,))
