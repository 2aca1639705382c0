"""decode.cu without a GPU: run on a CPU as C++ (tests/cuda_on_cpu.h) against its twin, and compiled by NVRTC for GPUs.

On a GPU: test_gpu_decode.py.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from secateur.inference.format import pack_weight
from secateur.kernels import decode_cuda
from secateur.kernels.decode import CUDA
from secateur.kernels.nvrtc import CompilerError, c_values, compile_source, compiler
from tests import decode_cases as cases

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
RUN = """
extern "C" void run(int across, int down, int size, void **arguments) { launch(NAME, across, down, size, arguments); }
"""
SETTING = (CUDA, 64, 1, 2)
COPIED = (CUDA, 64, 1, 1, 16)  # inputs are staged up to sixteen times
ROOM = 227 << 10  # bytes of shared memory


class OnCpu:
    """Stands in for nvrtc.Function."""

    def __init__(self, name: str, defined: tuple[tuple[str, int], ...]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        source, library = Path(self.folder.name, "kernel.cpp"), Path(self.folder.name, "kernel.so")
        source.write_text(f'#include "{HEADER}"\n{decode_cuda.SOURCE.read_text()}{RUN.replace("NAME", name)}')
        options = [f"-D{one}={value}" for one, value in defined]
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-w", *options]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
        self.library = ctypes.CDLL(str(library))

    def launch(
        self, grid: Any, threads: int, shared: int, arguments: Sequence[Tensor | int | None], early: bool
    ) -> None:
        assert shared <= ROOM
        held = c_values(arguments)
        self.library.run(*grid, threads, (ctypes.c_void_p * len(held))(*[ctypes.addressof(one) for one in held]))


@functools.cache
def function_on_cpu(name: str, _: Any, defined: tuple[tuple[str, int], ...]) -> OnCpu:
    return OnCpu(name, defined)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    monkeypatch.setattr(decode_cuda, "_function", function_on_cpu)
    monkeypatch.setattr(decode_cuda, "processors", lambda _: 3)
    monkeypatch.setattr(decode_cuda, "_room", lambda _: ROOM)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("inputs", "kinds"), [(1, ("4",)), (2, ("8",)), (3, ("4",)), (5, ("8",))])
@pytest.mark.parametrize("columns", [333, 336])  # inputs that are read one by one, and 16 bytes at a time
def test_the_kernel_and_its_twin(dtype: torch.dtype, inputs: int, kinds: tuple[str, ...], columns: int) -> None:
    weight = cases.weight_of((23, columns), 0.8, dtype)
    cases.check_decode(weight, inputs, biased=inputs == 1, kinds=kinds, setting=SETTING)


def test_patterns_and_int8() -> None:
    for dtype, kept, inputs in ((torch.bfloat16, 4, 1), (torch.float32, 2, 2), (torch.float16, 1, 4)):
        for columns in (300, 320):
            cases.check_decode(cases.pattern_of((9, columns), kept, dtype), inputs, kinds=("cells",), setting=SETTING)
    for dtype, inputs in ((torch.bfloat16, 1), (torch.float16, 3)):
        cases.check_decode(cases.weight_of((9, 100), 0.5, dtype), inputs, int8=True, biased=True, setting=SETTING)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2100), (70, 3), (3, 2049)])
@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_odd_shapes(shape: tuple[int, int], sparsity: float) -> None:
    cases.check_decode(
        cases.weight_of(shape, sparsity, torch.bfloat16), 1, kinds=("cells", "4", "8"), setting=(CUDA, 32, 2, 1)
    )


def test_more_shares_than_a_block_sums_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cuda, "_room", lambda _: 2500)
    for inputs in (1, 2, 5):
        cases.check_decode(cases.weight_of((130, 200), 0.5, torch.bfloat16), inputs, setting=SETTING, processors=40)


@pytest.mark.parametrize("columns", [333, 2100, 2304])
def test_unpacking_is_exact(columns: int) -> None:
    for dtype in cases.DTYPES:
        for kinds in (("4",), ("8",)):
            cases.check_unpack_streams(cases.weight_of((5, columns), 0.9, dtype), kinds)
        cases.check_unpack_streams(cases.pattern_of((5, columns), 2, dtype), ("cells",))
        cases.check_unpack_streams(cases.weight_of((5, columns), 0.5, dtype), ("4",), int8=True)


@pytest.mark.parametrize(
    ("dtype", "inputs"), [(torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 1), (torch.bfloat16, 3)]
)
def test_copies_of_inputs_change_nothing(dtype: torch.dtype, inputs: int) -> None:
    """Rows of one segment and of an odd number of them: copies of one input share words between the halves of a row."""
    gaps = [(cases.weight_of((20, columns), 0.6, dtype), ("4",)) for columns in (1, 333, 5000)]
    cells = [(cases.pattern_of((20, columns), 2, dtype), ("cells",)) for columns in (7, 300, 1100)]
    for weight, kinds in (*gaps, *cells):
        found = []
        for setting in (SETTING, COPIED):
            torch.manual_seed(0)
            found.append(cases.check_decode(weight, inputs, kinds=kinds, setting=setting))
        assert torch.equal(*found)


def test_as_many_copies_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    form = cases.streams_for(pack_weight(cases.weight_of((4, 4096), 0.5, torch.bfloat16))).launched(*COPIED).form
    here, found = torch.device("cpu"), []
    for room in (10**6, ROOM, 100 << 10, 1):
        monkeypatch.setattr(decode_cuda, "_room", lambda _, room=room: room)
        found += [decode_cuda.copies_with_room(form, inputs, torch.bfloat16, here) for inputs in (1, 4)]
    assert found == [16, 16, 16, 4, 4, 1, 1, 1]


def test_a_row_too_long_for_a_share_gets_none() -> None:
    weight = torch.ones(1, 66000)
    packed = pack_weight(weight)
    streams = cases.streams_for(packed)
    assert not streams.shares.numel()
    assert not decode_cuda.can_run(streams)


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC from its package on PyPI, as torch's CUDA builds bring it."""
    if torch.version.cuda is None:
        pytest.importorskip("nvidia.cu13", reason="nvidia-cuda-nvrtc is not installed")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
    compiler.cache_clear()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
def test_it_compiles_for_gpus(nvrtc: None, architecture: str, tmp_path: Path) -> None:
    cuobjdump = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
    for inputs, bits, cell, value in (
        (1, 4, 0, 1),
        (4, 4, 0, 1),
        (1, 8, 0, 2),
        (1, 4, 4, 1),
        (2, 4, 0, 3),
        (2, 8, 0, 0),
    ):
        given = {"X": 0 if value == 0 else 1, "V": value, "BITS": bits, "CELL": cell, "INPUTS": inputs, "THREADS": 1024,
                 "DEPTH": 1, "COPIES": 1 + 15 * (inputs == 1), "SCALED": 1, "BIASED": 1}  # fmt: skip
        code = compile_source(decode_cuda.SOURCE.read_text(), architecture, [f"-D{n}={v}" for n, v in given.items()])
        (tmp_path / "kernel.cubin").write_bytes(code)
        said = subprocess.run([cuobjdump, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True)
        assert " STACK:0 " in said.stdout, (given, said)  # no register is spilled


def test_source_that_is_wrong_is_refused_with_the_compilers_words(nvrtc: None) -> None:
    with pytest.raises(CompilerError, match=r'kernel.cu\(1\): error: .*"nothing" is undefined'):
        compile_source("__global__ void f(int *x) { *x = nothing; }", "sm_90")


def test_without_the_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    compiler.cache_clear()
    with pytest.raises(CompilerError, match=r"libnvrtc.so.99 was not found"):
        compiler()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CompilerError, match="this torch build has no CUDA"):
        compiler()
