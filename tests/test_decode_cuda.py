"""decode.cu on a CPU: compiled as C++ with tests/cuda_on_cpu.h, against its twin. On a GPU: test_gpu_decode.py."""

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
from secateur.kernels.nvrtc import c_values
from tests import decode_cases as cases

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
RUN = """
extern "C" void run(int across, int down, int size, void **arguments) { launch(decode, across, down, size, arguments); }
"""
SETTING = (CUDA, 64, 1, 2)


class OnCpu:
    """Stands in for nvrtc.Function."""

    def __init__(self, defined: tuple[tuple[str, int], ...]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        source, library = Path(self.folder.name, "kernel.cpp"), Path(self.folder.name, "kernel.so")
        source.write_text(f'#include "{HEADER}"\n{decode_cuda.SOURCE.read_text()}{RUN}')
        options = [f"-D{name}={value}" for name, value in defined]
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-w", *options]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
        self.library = ctypes.CDLL(str(library))

    def launch(
        self, grid: tuple[int, int], threads: int, arguments: Sequence[Tensor | int | None], early: bool
    ) -> None:
        held = c_values(arguments)
        self.library.run(*grid, threads, (ctypes.c_void_p * len(held))(*[ctypes.addressof(one) for one in held]))


@functools.cache
def function_on_cpu(_: Any, defined: tuple[tuple[str, int], ...], __: int) -> OnCpu:
    return OnCpu(defined)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    monkeypatch.setattr(decode_cuda, "_function", function_on_cpu)
    monkeypatch.setattr(decode_cuda, "processors", lambda _: 3)
    monkeypatch.setattr(decode_cuda, "_room", lambda _: 227 << 10)


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


def test_more_shares_than_a_block_sums_at_a_time() -> None:
    torch.manual_seed(0)
    for inputs in (1, 2, 5):
        cases.check_decode(cases.weight_of((130, 200), 0.5, torch.bfloat16), inputs, setting=SETTING, processors=40)


def test_a_row_too_long_for_a_share_gets_none() -> None:
    weight = torch.ones(1, 66000)
    packed = pack_weight(weight)
    streams = cases.streams_for(packed)
    assert not streams.shares.numel()
    assert not decode_cuda.can_run(streams)
