"""CUDA source compiled at run time by NVRTC, the compiler library that comes with torch's CUDA builds.

No compiler is needed at installation and no CUDA toolkit at run time. Only the documented C interfaces of NVRTC and of
the CUDA driver are used, through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PLAIN_SHARED = 48 << 10  # bytes of shared memory that need no permission


class CompilerError(RuntimeError):
    """NVRTC or the driver is missing, or refused something."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute with a value that is an integer."""

    _fields_ = (("name", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("number", ctypes.c_uint),
    )  # fmt: skip


@functools.cache
def compiler() -> Any:
    """The NVRTC library of this torch build."""
    if torch.version.cuda is None or torch.version.hip is not None:
        raise CompilerError("this torch build has no CUDA")
    major = torch.version.cuda.split(".")[0]
    name = f"nvrtc64_{major}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}"
    near = Path(torch.__file__).parent
    folders = [near / "lib", *sorted(near.parent.glob("nvidia/*/lib"))]
    return _loaded([folder for folder in folders if (folder / name).exists()], name)


def _loaded(folders: Sequence[Path], name: str) -> Any:
    """The library of this name, from one of the folders or wherever the system finds it."""
    for folder in folders:
        with suppress(OSError):
            for builtins in folder.glob("*nvrtc-builtins*"):  # NVRTC opens it by its bare name
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(folder / name))
    with suppress(OSError):
        return ctypes.CDLL(name)
    raise CompilerError(f"{name} was not found beside torch")


@functools.cache
def driver() -> Any:
    """The CUDA driver's library, which torch has initialized already."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise CompilerError(f"the CUDA driver's library cannot be loaded: {error}") from error


def _check(code: int, what: str) -> None:
    if code:
        raise CompilerError(f"{what} failed with code {code}")


def compile_source(source: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Machine code for an architecture such as "sm_90"; the compiler's messages are in the error."""
    library, program = compiler(), ctypes.c_void_p()
    given = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in options)]
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None), "NVRTC")
    try:
        code = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        if code:
            raise CompilerError(f"NVRTC refused the source:\n{_read(library, program, 'ProgramLog').decode()}")
        return _read(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    text = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, text), what)
    return text.raw


def c_values(arguments: Sequence[Tensor | int | None]) -> list[ctypes.c_int | ctypes.c_void_p]:
    """Arguments of a kernel as C has them: tensors as pointers, None as a null pointer, integers of 32 bits."""
    return [
        ctypes.c_int(one) if isinstance(one, int) else ctypes.c_void_p(None if one is None else one.data_ptr())
        for one in arguments
    ]


class Function:
    """A kernel that is loaded on the current device."""

    def __init__(self, code: bytes, name: str, most_shared: int) -> None:
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream()  # so that torch's context is the current one
        _check(driver().cuModuleLoadData(ctypes.byref(self.module), code), "loading a kernel")
        found = driver().cuModuleGetFunction(ctypes.byref(self.function), self.module, name.encode())
        _check(found, f"finding {name}")
        if most_shared > PLAIN_SHARED:
            code_of = driver().cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED, most_shared)
            _check(code_of, f"asking for {most_shared} bytes of shared memory")

    def launch(
        self, grid: tuple[int, int], threads: int, shared: int, arguments: Sequence[Tensor | int | None], early: bool
    ) -> None:
        """Launch on torch's current stream, with bytes of `shared` memory a block.

        Integers are 32-bit; None is a null pointer.
        `early`: the kernel may begin before the launch before it has ended, and waits for that end itself.
        """
        held = c_values(arguments)
        pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(one) for one in held])
        attribute = Attribute(EARLY, 0, 1)
        launch = Launch(
            (*grid, 1), (threads, 1, 1), shared, torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(attribute), int(early),
        )  # fmt: skip
        code = driver().cuLaunchKernelEx(ctypes.byref(launch), self.function, pointers, None)
        _check(code, "launching a kernel")
