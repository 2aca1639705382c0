"""Few inputs times a sparse weight on NVIDIA GPUs from compute capability 8.0 on: compiles and launches decode.cu.

decode.py has the format and the twin; where this cannot run, decode_triton.py does the same more slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.kernels.decode import CELL, ENTRIES, SHORT, Form, Streams
from secateur.kernels.nvrtc import CompilerError, Function, compile_source, compiler, driver

SOURCE = Path(__file__).with_name("decode.cu")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
UNPACKING = 16  # warps of a block that unpacks, at most
STAGED = 0.6  # of a block's shared memory that copies of the inputs take at most; sums need the rest
OLDEST, EARLY = (8, 0), (9, 0)  # compute capabilities: that can run the kernel, and that can begin it early


@functools.cache
def reason_against(device: torch.device) -> str | None:
    """Why this device cannot run the kernel; None if it can."""
    if device.type != "cuda":
        return "it is no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"it is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    try:
        compiler(), driver()
    except CompilerError as error:
        return str(error)
    return None


def can_run(streams: Streams) -> bool:
    """Whether the kernel can multiply by these streams on their device."""
    device, form = streams.starts.device, streams.form
    return (
        reason_against(device) is None
        and streams.shares.numel() > 0
        and form.columns <= SHORT
        and shares_with_room(form, 1, torch.float32, device) > 0
    )


@functools.cache
def _room(device: torch.device) -> int:
    """Bytes of shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _staged_columns(form: Form, inputs: int, dtype: torch.dtype, copies: int) -> int:
    """Places of columns in shared memory. With copies of a single 16-bit input, a place holds two columns, one of each
    half of the row; a group of entries never lies in both halves."""
    if copies == 1 or inputs > 1 or dtype.itemsize != 2:
        return _padded(form)
    step = _step(form) if form.cell else form.width
    return -(-form.columns // (2 * step)) * step


def _staged_bytes(form: Form, inputs: int, dtype: torch.dtype, copies: int) -> int:
    """Shared memory of inputs; one alone takes 4 bytes."""
    return _staged_columns(form, inputs, dtype, copies) * copies * (4 if inputs == 1 else inputs * dtype.itemsize)


def _share_bytes(form: Form, inputs: int) -> int:
    """Shared memory of a share: partial sums, and where rows begin."""
    return 4 * (inputs * form.share + 2 * form.share_rows)


def shared_bytes(form: Form, inputs: int, dtype: torch.dtype, shares: int, copies: int = 1) -> int:
    """Shared memory of a block."""
    return _staged_bytes(form, inputs, dtype, copies) + shares * _share_bytes(form, inputs) + 8


def shares_with_room(form: Form, inputs: int, dtype: torch.dtype, device: torch.device, copies: int = 1) -> int:
    """Shares that fit into shared memory together with so many inputs."""
    return max(0, _room(device) - shared_bytes(form, inputs, dtype, 0, copies)) // _share_bytes(form, inputs)


def copies_with_room(form: Form, inputs: int, dtype: torch.dtype, device: torch.device) -> int:
    """Copies of the inputs, a power of two: as many as the form allows and STAGED of the shared memory has room for."""
    copies, room = form.copies, int(STAGED * _room(device) / form.warps)
    while copies > 1 and _staged_bytes(form, inputs, dtype, copies) > room:
        copies //= 2
    return copies


def _step(form: Form) -> int:
    """Columns that a group of cells covers."""
    return CELL * ENTRIES // form.cell if form.cell else 1


def _padded(form: Form) -> int:
    """Columns that are staged: whole groups of cells, or 8, which are 16 bytes of an input."""
    step = max(8, _step(form))
    return -(-form.columns // step) * step


def _inputs_together(form: Form, inputs: int, x: Tensor) -> int:
    """How many inputs a launch multiplies at once: as many as fit into 8 bytes a column and into shared memory."""
    most = min(8 // x.dtype.itemsize, 1 if inputs == 1 else 2 if inputs == 2 else 4)
    return next((n for n in (4, 2) if n <= most and shares_with_room(form, n, x.dtype, x.device)), 1)


@functools.cache
def _code(device: torch.device, defined: tuple[tuple[str, int], ...]) -> bytes:
    major, minor = torch.cuda.get_device_capability(device)
    return compile_source(SOURCE.read_text(encoding="utf-8"), f"sm_{major}{minor}", [f"-D{a}={b}" for a, b in defined])


@functools.cache
def _function(name: str, device: torch.device, defined: tuple[tuple[str, int], ...]) -> Function:
    return Function(_code(device, defined), name, _room(device))


def _defined(form: Form, x: torch.dtype, values: torch.dtype, **more: int) -> tuple[tuple[str, int], ...]:
    """What the source is compiled with: types of inputs (or of the result) and values, the form, and so on."""
    return (("X", TYPES[x]), ("V", TYPES[values]), ("BITS", form.bits), ("CELL", form.cell), *more.items())


def linear(
    x: Tensor, values: Sequence[Tensor], indices: Sequence[Tensor], bases: Tensor, starts: Tensor, shares: Tensor,
    scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype, numbers: Sequence[int],
) -> Tensor:  # fmt: skip
    """x @ weight.T * scale + bias for few inputs, of the streams with the form that has these numbers."""
    form = Form(*numbers)
    x = x.contiguous()
    inputs, count = x.numel() // form.columns, shares.shape[0] - 1
    out = x.new_empty((*x.shape[:-1], form.rows))
    together = _inputs_together(form, inputs, x)
    copies = copies_with_room(form, together, x.dtype, x.device)
    defined = _defined(
        form, x.dtype, dtype, INPUTS=together, THREADS=form.tile, DEPTH=form.stages, COPIES=copies,
        SCALED=int(scale is not None), BIASED=int(bias is not None),
    )  # fmt: skip
    blocks = min(form.warps * processors(x.device), count)
    taken = _shares_at_a_time(-(-count // blocks), shares_with_room(form, together, x.dtype, x.device, copies))
    aligned = x.data_ptr() % 16 == 0 and form.columns % 8 == 0
    staged = _staged_columns(form, together, x.dtype, copies)
    arguments = (
        x, *_four(values), *_four(indices), bases, starts, shares, scale, None if bias is None else bias.detach(), out,
        form.rows, form.columns, staged, form.segments, inputs, count, taken, -(-form.columns // _step(form)),
        int(aligned), taken * form.share, taken * form.share_rows,
    )  # fmt: skip
    grid, shared = (blocks, -(-inputs // together)), shared_bytes(form, together, x.dtype, taken, copies)
    function = _function("decode", x.device, defined)
    function.launch(grid, form.tile, shared, arguments, _may_begin_early(x.device))
    return out


def unpack(
    values: Sequence[Tensor], indices: Sequence[Tensor], bases: Tensor, starts: Tensor, scale: Tensor | None,
    dtype: torch.dtype, numbers: Sequence[int], weight: Tensor,
) -> None:  # fmt: skip
    """Write the dense weight of streams into `weight`, contiguous [rows, columns], as `unpacked` of format.py does."""
    form = Form(*numbers)
    each = form.width * weight.itemsize  # bytes of a warp
    warps = min(UNPACKING, _room(weight.device) // each)
    defined = _defined(
        form, weight.dtype, dtype, INPUTS=1, THREADS=32 * warps, DEPTH=1, COPIES=1,
        SCALED=int(scale is not None), BIASED=0,
    )  # fmt: skip
    arguments = (
        *_four(values), *_four(indices), bases, starts, scale, weight, form.rows, form.columns, form.width,
        form.segments,
    )  # fmt: skip
    blocks = min(-(-form.rows * form.segments // warps), 4 * processors(weight.device))
    _function("unpack", weight.device, defined).launch((blocks, 1), 32 * warps, warps * each, arguments, False)


def _may_begin_early(device: torch.device) -> bool:
    """In a CUDA graph: weights were complete before it was captured, so they can be read early."""
    early = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return early and torch.cuda.get_device_capability(device) >= EARLY


def _shares_at_a_time(number: int, room: int) -> int:
    """How many shares of its `number` a block takes at a time: about as many each time."""
    return -(-number // -(-number // room))


def _four(planes: Sequence[Tensor]) -> list[Tensor | None]:
    """Planes for all arguments; those that the kernel does not read are null."""
    return [*planes, *[None] * (4 - len(planes))]
