"""Packed linear layers on CPUs: a C library for few rows of input, unpacking into a scratch weight for many.

The library (native/packed_linear.c) is in the wheels for Linux on x86-64 and is built by an installation from source
where there is a C compiler. Without it, weights are unpacked once and the dense copies are kept: as fast as dense
layers, and as large. Each choice is logged once with its reason. SECATEUR_CPU_LEVEL forces a level of the library, and
SECATEUR_KERNELS=off turns it off: weights are then unpacked in every call, which is the reference.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from secateur.errors import ModelError, SecateurError, nearest
from secateur.inference.format import unpacked
from secateur.settings import kernels_off

LOG = logging.getLogger("secateur")
BUILT = Path(__file__).parent / "native" / "packed_linear.so"
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16")  # worst first, as in the C source
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in the C source
INT8 = 3
BROKEN = "A packed weight does not hold together: its mask, row offsets and number of values disagree. Load it again."
# Rows of input up to which the kernel is faster than unpacking and a dense product (measured, docs/LOG.md).
FEW = 32
ALONE = 1 << 17  # products below which waking other threads takes longer than they save


@dataclass(frozen=True)
class Library:
    """The C library, the best level of this processor, and the OpenMP runtime of torch, whose threads it uses."""

    functions: Any
    level: int
    parallel: int | None  # address of GOMP_parallel; None: one thread

    def linear(
        self, x: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, scale: Tensor | None, bias: Tensor | None,
        columns: int, level: int | None = None,
    ) -> Tensor:  # fmt: skip
        """x @ weight.T + bias, for x of a dtype in DTYPES and arguments that `supported` accepts."""
        x = x.contiguous()
        rows = mask.shape[0]
        inputs = x.numel() // columns if columns else 0
        result = x.new_empty((*x.shape[:-1], rows))
        if not inputs:  # an expert without tokens: empty tensors have no address
            return result
        outcome = self.functions.secateur_packed_linear(
            x.data_ptr(), mask.data_ptr(), values.data_ptr(), offsets.data_ptr(),
            None if scale is None else scale.data_ptr(), None if bias is None else bias.data_ptr(), result.data_ptr(),
            inputs, rows, columns, values.numel(), DTYPES[x.dtype], DTYPES[x.dtype] if scale is None else INT8,
            self.level if level is None else level, self.threads(inputs * rows * columns), self.parallel,
        )  # fmt: skip
        return self._checked(outcome, result)

    def dense(
        self, values: Tensor, mask: Tensor, offsets: Tensor, scale: Tensor | None, columns: int, dtype: torch.dtype
    ) -> Tensor:
        """The weight with its zeros, equal to what `unpacked` gives."""
        rows = mask.shape[0]
        weight = torch.empty((rows, columns), dtype=dtype)
        outcome = self.functions.secateur_unpack(
            mask.data_ptr(), values.data_ptr(), offsets.data_ptr(), None if scale is None else scale.data_ptr(),
            weight.data_ptr(), rows, columns, values.numel(), DTYPES[dtype], self.threads(rows * columns),
            self.parallel,
        )  # fmt: skip
        return self._checked(outcome, weight)

    def threads(self, products: int) -> int:
        """All of torch's threads, or one where there is little to do."""
        return 1 if products < ALONE else torch.get_num_threads()

    @staticmethod
    def _checked(outcome: int, result: Tensor) -> Tensor:
        if outcome == 0:
            return result
        if outcome == 1:
            raise MemoryError("There is no memory for a copy of a packed layer's inputs.")
        raise ModelError(BROKEN)


def linear(
    x: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, scale: Tensor | None, bias: Tensor | None, columns: int
) -> Tensor:
    """x @ weight.T + bias for a packed weight, by the fastest way there is."""
    if kernels_off() or not supported(x, values, mask, offsets, scale, bias, columns):
        dtype = x.dtype if scale is not None else values.dtype
        return functional.linear(x, unpacked(values, mask, scale, (mask.shape[0], columns), dtype), bias)
    found = library()
    if isinstance(found, str):
        return functional.linear(x, _kept(values, mask, scale, columns, x.dtype), bias)
    if x.numel() <= FEW * columns:
        return found.linear(x, values, mask, offsets, scale, bias, columns)
    return functional.linear(x, found.dense(values, mask, offsets, scale, columns, x.dtype), bias)


def supported(
    x: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, scale: Tensor | None, bias: Tensor | None, columns: int
) -> bool:
    """Whether the C library can read these tensors. What it cannot, plain torch computes, or refuses with its error."""
    rows = mask.shape[0]
    return (
        x.dtype in DTYPES
        and x.dim() > 0
        and x.shape[-1] == columns > 0
        and values.dtype == (x.dtype if scale is None else torch.int8)
        and mask.dtype == torch.uint8
        and mask.shape[1] == (columns + 7) // 8
        and offsets.dtype == torch.int64
        and offsets.numel() == rows + 1
        and (scale is None or (scale.dtype == torch.float32 and scale.numel() == rows and scale.is_contiguous()))
        and (bias is None or (bias.dtype == x.dtype and bias.numel() == rows and bias.is_contiguous()))
        and values.is_contiguous()
        and mask.is_contiguous()
        and offsets.is_contiguous()
        and mask.is_cpu and values.is_cpu and offsets.is_cpu
    )  # fmt: skip


@functools.cache
def library() -> Library | str:
    """The C library, or why there is none; logged once."""
    found = load(BUILT)
    if isinstance(found, str):
        LOG.warning(
            "Packed layers are unpacked once and then as large and as fast as dense ones on this CPU: %s.", found
        )
    else:
        LOG.info("Packed layers run in native code on this CPU (%s).", LEVELS[found.level])
    return found


def load(path: Path) -> Library | str:
    """The library in this file, or why it cannot be used."""
    if not path.is_file():
        return "the C library is not installed (it is in the wheels for Linux on x86-64, or needs a C compiler)"
    try:
        functions = ctypes.CDLL(str(path))
        functions.secateur_source.restype = ctypes.c_char_p
        source = functions.secateur_source().decode()
    except (OSError, AttributeError) as error:
        return f"the C library cannot be loaded ({error})"
    expected = hashlib.sha256(path.with_suffix(".c").read_bytes()).hexdigest()[:16]
    if source != expected:
        return "the C library was built from another version of its source; install Secateur again"
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    functions.secateur_packed_linear.argtypes = [pointer] * 7 + [count] * 4 + [number] * 4 + [pointer]
    functions.secateur_unpack.argtypes = [pointer] * 5 + [count] * 3 + [number] * 2 + [pointer]
    return Library(functions, _level(functions.secateur_best_level()), _gomp_parallel())


def _level(best: int) -> int:
    """The level to use: the best of this processor, or a lower one that SECATEUR_CPU_LEVEL names."""
    asked = os.environ.get("SECATEUR_CPU_LEVEL") or LEVELS[best]
    if asked not in LEVELS[: best + 1]:
        raise SecateurError(
            f"SECATEUR_CPU_LEVEL is {asked!r}; this processor has {', '.join(LEVELS[: best + 1])}. Set it to one of"
            f" them, or unset it.{nearest(asked, LEVELS[: best + 1])}"
        )
    return LEVELS.index(asked)


def _gomp_parallel() -> int | None:
    """The address of the function by which torch starts its own threads, so that no second pool competes with it."""
    try:
        runtime = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value  # found among what torch itself links
    except (OSError, AttributeError):
        LOG.warning("torch's OpenMP runtime was not found, so packed layers run in one thread.")
        return None


# Dense copies by the values they were made of, with the version of those values.
_dense: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _kept(values: Tensor, mask: Tensor, scale: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """The dense weight, unpacked at the first call and kept as long as its values are."""
    key = (dtype, mask.data_ptr(), values._version, mask._version, None if scale is None else scale._version)
    found = _dense.get(values)
    if found is None or found[0] != key:
        found = (key, unpacked(values, mask, scale, (mask.shape[0], columns), dtype))
        _dense[values] = found
    weight: Tensor = found[1]
    return weight
