"""Cases of the kernels of packed layers, run under Triton's interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur import kernels
from secateur.inference.format import Packed, pack_weight
from secateur.inference.gpu import Setting
from secateur.inference.packed import row_offsets
from secateur.kernels import decode_cuda
from secateur.kernels.decode import Streams, dense_of, reference, streams_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}  # of the largest output


def weight_of(shape: tuple[int, int], sparsity: float, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
    """A random weight with an empty row, a full one and, if it has room, rows in between."""
    weight = torch.randn(shape, device=device)
    weight[torch.rand(shape, device=device) < sparsity] = 0
    weight[0] = 0
    weight[-1] = torch.randn(shape[1], device=device)
    return weight.to(dtype)


def pattern_of(shape: tuple[int, int], kept: int, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
    """A random weight with so many values in each 16 columns."""
    weight = torch.randn(shape[0], -(-shape[1] // 16), 16, device=device)
    order = torch.rand(weight.shape, device=device).argsort(2)
    return weight.masked_fill(order >= kept, 0).flatten(1)[:, : shape[1]].to(dtype)


def streams_for(packed: Packed, kinds: tuple[str, ...] = ("cells", "4", "8"), processors: int = 3) -> Streams:
    return streams_of(packed.values, packed.mask, packed.shape[1], kinds=kinds, processors=processors)


def parts_of(streams: Streams) -> tuple[Any, ...]:
    return streams.values, streams.indices, streams.bases, streams.starts, streams.shares


def check_decode(
    weight: Tensor, inputs: int, *, int8: bool = False, biased: bool = False, kinds: tuple[str, ...] = ("4", "8"),
    setting: Setting | None = None, processors: int = 3,
) -> Tensor:  # fmt: skip
    """The kernel against its twin, and the twin's weight against the dense one; returns what the kernel computed."""
    packed = pack_weight(weight, int8=int8)
    streams = streams_for(packed, kinds, processors)
    streams = streams if setting is None else streams.launched(*setting)
    if not int8:
        assert torch.equal(dense_of(streams), weight)
    x = torch.randn(inputs, weight.shape[1], device=weight.device).to(weight.dtype)
    bias = torch.randn(weight.shape[0], device=weight.device).to(weight.dtype) if biased else None
    parts = (*parts_of(streams), packed.scale, bias, streams.dtype)
    found = kernels.sparse_linear(x, *parts, streams.form.numbers())
    again = kernels.sparse_linear(x, *parts, streams.form.numbers())
    assert torch.equal(found, again)
    wanted = reference(x.double() if weight.is_cpu else x, streams, packed.scale, bias)
    largest = float(wanted.abs().max()) or 1.0
    assert found.dtype == x.dtype
    assert float((found.double() - wanted.double()).abs().max()) <= TOLERANCES[x.dtype] * largest
    return found


def check_unpack(weight: Tensor, *, int8: bool = False) -> None:
    """The unpacked weight to the bit."""
    packed = pack_weight(weight, int8=int8)
    found = torch.full_like(weight, torch.nan)
    kernels.unpack_weight(
        packed.values, packed.mask, row_offsets(packed.mask, weight.shape[1]), packed.scale, weight.shape[1], found
    )
    assert torch.equal(found, packed.dense())


def check_unpack_streams(weight: Tensor, kinds: tuple[str, ...], *, int8: bool = False) -> None:
    """The weight that the CUDA kernel unpacks from streams, to the bit."""
    packed = pack_weight(weight, int8=int8)
    streams = streams_for(packed, kinds)
    found = torch.full_like(weight, torch.nan)
    parts = (streams.values, streams.indices, streams.bases, streams.starts)
    decode_cuda.unpack(*parts, packed.scale, streams.dtype, streams.form.numbers(), found)
    assert torch.equal(found, packed.dense())
