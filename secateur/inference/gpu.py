"""Packed linear layers on NVIDIA GPUs: streams for few inputs, unpacking into a temporary weight for many.

A layer that arrives on a GPU gets streams (kernels/decode.py), derived from its mask and values; files and state dicts
never hold them. Few inputs go through the kernel that reads streams, behind the op `secateur::sparse_linear`. For many,
the weight is unpacked into memory that torch's allocator gives to the next layer again, and cuBLAS multiplies. Where
the CUDA kernel runs it unpacks streams too, so that mask and values can stay on the host. SECATEUR_KERNELS=off turns
all of this off.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from secateur import kernels
from secateur.inference.format import Packed, unpacked
from secateur.inference.timing import beyond_cache, graph_microseconds
from secateur.kernels import decode_cuda
from secateur.kernels.decode import CUDA, TRITON, Streams, can_stream, streams_of

LOG = logging.getLogger("secateur")
DEVICES = {"cuda"}  # types of devices on which layers get streams
HOST = torch.device("cpu")
# Inputs up to which the kernel is used where nothing was measured; `few_of` measures it.
FEW = 4
TRIED = (1, 4, 8, 16)  # numbers of inputs that `few_of` measures
Setting = tuple[int, ...]  # kernel, tile, warps, stages, copies
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Launch settings that are tried (`Form` has their meaning). In Triton fewer rows make more programs; with more rows
# inputs are staged less often.
CUDA_SETTINGS: tuple[Setting, ...] = (
    (CUDA, 1024, 1, 2, 1), (CUDA, 1024, 1, 1, 1), (CUDA, 512, 1, 2, 1), (CUDA, 512, 2, 1, 1),
    (CUDA, 1024, 1, 2, 16), (CUDA, 1024, 1, 1, 16), (CUDA, 512, 2, 1, 16),
)  # fmt: skip
TRITON_SETTINGS: tuple[Setting, ...] = ((TRITON, 8, 4, 2, 1), (TRITON, 16, 8, 2, 1), (TRITON, 4, 4, 2, 1))
COPIES = 16  # of streams that tuning goes round at most


def served(device: torch.device) -> bool:
    """Whether layers on this device get streams."""
    return device.type in DEVICES and kernels.reason_against(device) is None


def streams_for(packed: Packed, *, lean: bool = False) -> Streams | None:
    """The streams of a weight, or None if its device or dtype has no kernel; `lean`: also if they do not suffice."""
    values = packed.values
    if not served(values.device) or not can_stream(values.dtype, packed.scale is not None) or not packed.mask.numel():
        return None
    processors = 1
    if decode_cuda.reason_against(values.device) is None:
        processors = decode_cuda.processors(values.device)
    elif lean:
        return None
    streams = streams_of(values, packed.mask, packed.shape[1], processors=processors)
    return None if lean and not suffice(streams) else streams.launched(*settings_for(streams)[0])


def suffice(streams: Streams) -> bool:
    """Whether streams do for any number of inputs, so that mask and values are not needed on their device."""
    return decode_cuda.can_run(streams)


def settings_for(streams: Streams) -> tuple[Setting, ...]:
    """Launch settings to try: the CUDA kernel's where it can run, as it is faster."""
    return CUDA_SETTINGS if suffice(streams) else TRITON_SETTINGS


@torch.library.custom_op("secateur::sparse_linear", mutates_args=())
def sparse_linear(
    x: Tensor,
    values: Sequence[Tensor],
    indices: Sequence[Tensor],
    bases: Tensor,
    starts: Tensor,
    shares: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    form: Sequence[int],
) -> Tensor:
    """x @ weight.T * scale + bias for few inputs and a weight in streams; no gradients."""
    return kernels.sparse_linear(x, values, indices, bases, starts, shares, scale, bias, dtype, form)


@sparse_linear.register_fake
def _(
    x: Tensor, values: Sequence[Tensor], indices: Sequence[Tensor], bases: Tensor, starts: Tensor, shares: Tensor,
    scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype, form: Sequence[int],
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], form[0]))


def takes(x: Tensor, streams: Streams, scaled: bool, few: int) -> bool:
    """Whether the kernel for few inputs can compute this."""
    return (
        x.dtype in FLOATS
        and (scaled or x.dtype == streams.dtype)
        and 0 < x.numel() <= few * streams.form.columns
        and x.shape[-1] == streams.form.columns
        and x.device == streams.starts.device
        and not torch.is_grad_enabled()
    )


def decode(x: Tensor, streams: Streams, scale: Tensor | None, bias: Tensor | None, *, observed: bool = True) -> Tensor:
    """x @ weight.T + bias by the kernel; `observed`: something traces the call, so it must be an op."""
    parts = (streams.values, streams.indices, streams.bases, streams.starts, streams.shares)
    given = (x, *parts, scale, bias, streams.dtype, streams.form.numbers())
    result: Tensor = sparse_linear(*given) if observed else kernels.sparse_linear(*given)
    return result


@torch.library.custom_op("secateur::weight_of_streams", mutates_args=())
def weight_of_streams(
    values: Sequence[Tensor],
    indices: Sequence[Tensor],
    bases: Tensor,
    starts: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    form: Sequence[int],
    made: torch.dtype,
) -> Tensor:
    """The dense weight in the dtype `made`, that of the values unless they have a scale."""
    weight = starts.new_empty(form[:2], dtype=made)
    kernels.unpack_streams(values, indices, bases, starts, scale, dtype, form, weight)
    return weight


@weight_of_streams.register_fake
def _(
    values: Sequence[Tensor], indices: Sequence[Tensor], bases: Tensor, starts: Tensor, scale: Tensor | None,
    dtype: torch.dtype, form: Sequence[int], made: torch.dtype,
) -> Tensor:  # fmt: skip
    return starts.new_empty((form[0], form[1]), dtype=made)


def weight_of(streams: Streams, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The dense weight, in `dtype` if the values have a scale, otherwise in their own; a constant to autograd."""
    made = streams.dtype if scale is None else dtype
    given = (streams.values, streams.indices, streams.bases, streams.starts, scale, streams.dtype)
    weight: Tensor = weight_of_streams(*given, streams.form.numbers(), made)
    return weight


def many(x: Tensor, streams: Streams, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias from streams that suffice: unpack, then cuBLAS."""
    weight = weight_of(streams, scale, x.dtype)
    return functional.linear(x, weight.to(x.dtype) if torch.is_autocast_enabled(x.device.type) else weight, bias)


def linear(
    x: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, scale: Tensor | None, bias: Tensor | None, columns: int
) -> Tensor:
    """x @ weight.T + bias from mask and values: unpack, then cuBLAS."""
    rows, dtype = mask.shape[0], x.dtype if scale is not None else values.dtype
    parts = (values, mask, offsets, *([] if scale is None else [scale]))
    if not served(x.device) or dtype not in FLOATS or not mask.numel() or not all(one.is_contiguous() for one in parts):
        return functional.linear(x, unpacked(values, mask, scale, (rows, columns), dtype), bias)
    weight = x.new_empty((rows, columns), dtype=dtype)
    kernels.unpack_weight(values, mask, offsets, scale, columns, weight)
    return functional.linear(x, weight, bias)


# Measuring


@torch.no_grad()
def timed_settings(streams: Streams, scale: Tensor | None, x: Tensor) -> dict[Setting, float]:
    """Microseconds of these inputs with each launch setting that can run on this device."""
    number = min(COPIES, -(-beyond_cache(x.device) // max(1, streams.nbytes)))
    copies, times = [streams, *(copy.deepcopy(streams) for _ in range(number - 1))], {}
    for setting in settings_for(streams):
        calls = [partial(decode, x, one.launched(*setting), scale, None, observed=False) for one in copies]
        try:
            times[setting] = min(graph_microseconds(calls, x.device))
        except Exception as error:  # Triton has its own: too much shared memory for this device
            if type(error).__name__ != "OutOfResources":
                raise
            LOG.info("packed layers: launch settings %s do not fit this device: %s", setting, error)
    return times


def best_setting(streams: Streams, x: Tensor) -> Setting:
    """The fastest launch setting for these inputs; values with a scale take as long as those without."""
    scale = torch.ones(streams.form.rows, device=x.device) if streams.dtype == torch.int8 else None
    times = timed_settings(streams, scale, x)
    return min(times, key=times.__getitem__)


@torch.no_grad()
def few_of(streams: Streams, packed: Packed, scale: Tensor | None, offsets: Tensor, x: Tensor) -> int:
    """The largest number of inputs, of those TRIED and that of x, for which streams beat unpacking and cuBLAS."""
    few = 0
    for inputs in sorted({*TRIED, x.shape[0]}):
        given = x[:1].expand(inputs, -1).contiguous()
        sparse = partial(decode, given, streams, scale, None, observed=False)
        unpacking: Callable[[], Tensor]
        if suffice(streams):
            unpacking = partial(many, given, streams, scale, None)
        else:
            parts = (packed.values, packed.mask, offsets, scale, None, packed.shape[1])
            unpacking = partial(linear, given, *parts)
        if min(graph_microseconds([sparse], x.device)) >= min(graph_microseconds([unpacking], x.device)):
            break
        few = inputs
    return few
