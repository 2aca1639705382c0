"""The C kernel against plain torch: every level, dtype and awkward shape, memory safety, loading, and its build."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import secateur as sc
from secateur.errors import ModelError, SecateurError
from secateur.inference import cpu
from secateur.inference.format import pack_weight, unpacked
from secateur.inference.packed import PackedLinear, plain, row_offsets
from secateur.inference.timing import Timing, compare

ROOT = Path(__file__).resolve().parent.parent
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Sums are fp32 in another order than torch's; the result is rounded to the dtype once in both.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int]


def build(folder: Path, **environment: str) -> Path:
    """Build the library as an installation does; the path it should have."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True, capture_output=True)
    made = folder / "secateur" / "inference" / "native" / "packed_linear.so"
    if made.is_file():
        shutil.copy(ROOT / "secateur" / "inference" / "native" / "packed_linear.c", made.parent)
    return made


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of everything else run without kernels (conftest.py)."""
    monkeypatch.delenv("SECATEUR_KERNELS", raising=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", reason="setuptools, which builds the library, is not installed")
    made = build(tmp_path_factory.mktemp("library"))
    if not made.is_file():
        pytest.skip("the C library cannot be built here: no C compiler, or not Linux on x86-64")
    return made


@pytest.fixture(scope="module")
def library(built: Path) -> cpu.Library:
    found = cpu.load(built)
    assert isinstance(found, cpu.Library), found
    return found


@pytest.fixture
def used(library: cpu.Library, monkeypatch: pytest.MonkeyPatch) -> cpu.Library:
    """The library is the one that packed layers use."""
    monkeypatch.setattr(cpu, "library", lambda: library)
    return library


@pytest.fixture(params=range(len(cpu.LEVELS)), ids=cpu.LEVELS)
def level(request: pytest.FixtureRequest, library: cpu.Library) -> int:
    if request.param > library.level:
        pytest.skip(f"this processor has no {cpu.LEVELS[request.param]}")
    return int(request.param)


def weight_of(rows: int, columns: int, dtype: torch.dtype, sparsity: float = 0.6) -> Tensor:
    weight = torch.randn(rows, columns)
    return torch.where(torch.rand(rows, columns) < sparsity, 0.0, weight).to(dtype)


def arguments(weight: Tensor, inputs: int, *, int8: bool = False, bias: bool = True) -> Arguments:
    packed = pack_weight(weight, int8=int8)
    x = torch.randn(inputs, weight.shape[1]).to(weight.dtype)
    given = torch.randn(weight.shape[0]).to(weight.dtype) if bias else None
    return (
        x,
        packed.values,
        packed.mask,
        row_offsets(packed.mask, weight.shape[1]),
        packed.scale,
        given,
        weight.shape[1],
    )


def assert_near(found: Tensor, given: Arguments) -> None:
    """As plain torch computes in double precision, but for rounding to the dtype."""
    x, values, mask, _, scale, bias, columns = given
    weight = unpacked(values, mask, scale, (mask.shape[0], columns), torch.float64)
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    assert found.dtype == x.dtype
    scaled = TOLERANCE[x.dtype] * (1 + x.double().abs() @ weight.abs().T)
    apart = (found.double() - expected).abs()
    assert bool((apart <= scaled).all()), float((apart / scaled).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("int8", [False, True], ids=["values", "int8"])
def test_every_level_agrees_with_plain_torch(library: cpu.Library, level: int, dtype: torch.dtype, int8: bool) -> None:
    torch.manual_seed(0)
    columns = (1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 129, 576, 2047, 2048, 2049, 4100)
    for number, inputs in itertools.product(columns, (1, 2, 3, 5, 8, 9, 17)):
        given = arguments(weight_of(5, number, dtype), inputs, int8=int8, bias=inputs % 2 == 0)
        assert_near(library.linear(*given, level=level), given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_values_full_rows_and_nothing_at_all(library: cpu.Library, level: int, dtype: torch.dtype) -> None:
    for kept in ([0, 0, 0], [0, 1, 0], [1, 0, 1], [1, 1, 1]):
        for columns in (5, 64, 200):
            weight = torch.randn(3, columns).to(dtype) * torch.tensor(kept).to(dtype)[:, None]
            given = arguments(weight, 2)
            assert_near(library.linear(*given, level=level), given)
    empty = arguments(torch.zeros(4, 30, dtype=dtype), 1, bias=False)
    assert torch.equal(library.linear(*empty, level=level), torch.zeros(1, 4, dtype=dtype))
    assert library.linear(*arguments(weight_of(3, 9, dtype), 0), level=level).shape == (0, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_are_those_of_a_dense_layer(library: cpu.Library, level: int, dtype: torch.dtype) -> None:
    weight = weight_of(6, 70, dtype)
    weight[0, 3], weight[1, 4], weight[2, 5] = float("nan"), float("inf"), -float("inf")
    weight[:, 69] = torch.tensor([0, 0, 0, 0, 1, 1]).to(dtype)
    given = list(arguments(weight, 3, bias=False))
    for value in (1.0, float("inf"), float("nan")):
        given[0][1, 69] = value  # where four rows have a zero: infinity times zero is NaN, in both
        found, expected = library.linear(*given, level=level), plain(*given)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isposinf(), expected.isposinf())
        assert torch.equal(found.isneginf(), expected.isneginf())


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_change_nothing(library: cpu.Library, threads: int) -> None:
    torch.manual_seed(1)
    given = arguments(weight_of(700, 600, torch.bfloat16), 4)  # enough products for all threads
    alone = replace(library, parallel=None).linear(*given)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert library.threads(4 * 700 * 600) == threads
        assert torch.equal(library.linear(*given), alone)
    finally:
        torch.set_num_threads(before)
    assert library.parallel is not None, "torch's OpenMP runtime was not found"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_storage_need_not_be_aligned(library: cpu.Library, level: int, dtype: torch.dtype) -> None:
    def moved(tensor: Tensor) -> Tensor:
        """The same at an address one element further, with NaN or ones on both sides."""
        around = torch.full(
            (tensor.numel() + 2,), float("nan") if tensor.is_floating_point() else 1, dtype=tensor.dtype
        )
        around[1:-1] = tensor.flatten()
        return around[1:-1].view(tensor.shape)

    for columns in (9, 64, 333):
        x, values, mask, offsets, scale, bias, _ = arguments(weight_of(7, columns, dtype), 3)
        assert bias is not None
        given = (moved(x), moved(values), moved(mask), moved(offsets), scale, moved(bias), columns)
        found = library.linear(*given, level=level)
        assert_near(found, given)
        assert torch.equal(found, library.linear(x, values, mask, offsets, scale, bias, columns, level=level))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("int8", [False, True], ids=["values", "int8"])
def test_unpacking_is_equal_to_the_bit(library: cpu.Library, dtype: torch.dtype, int8: bool) -> None:
    for rows, columns in ((1, 1), (3, 7), (5, 64), (9, 1000), (300, 700)):
        _, values, mask, offsets, scale, _, _ = arguments(weight_of(rows, columns, dtype) * 1e-6, 1, int8=int8)
        expected = unpacked(values, mask, scale, (rows, columns), dtype)
        assert torch.equal(library.dense(values, mask, offsets, scale, columns, dtype), expected)


def test_what_does_not_hold_together_is_refused(library: cpu.Library, level: int) -> None:
    x, values, mask, offsets, scale, bias, columns = arguments(weight_of(20, 100, torch.bfloat16), 1)
    damaged = mask.clone()
    damaged[-1] = 255
    for wrong in (
        (x, values, damaged, offsets, scale, bias, columns),
        (x, values[:-3].clone(), mask, offsets, scale, bias, columns),
        (x, values, mask, offsets + 1, scale, bias, columns),
        (x, values, mask, -offsets, scale, bias, columns),
        (x, values, mask, offsets * 1000, scale, bias, columns),
    ):
        with pytest.raises(ModelError, match="does not hold together.*Load it again"):
            library.linear(*wrong, level=level)
        with pytest.raises(ModelError, match="does not hold together"):
            library.dense(*wrong[1:5], columns, torch.bfloat16)


def test_few_rows_go_to_the_kernel_and_many_are_unpacked(used: cpu.Library) -> None:
    weight = weight_of(40, 100, torch.bfloat16)
    for inputs in (1, cpu.FEW, cpu.FEW + 1):
        given = arguments(weight, inputs)
        few = used.linear(*given)
        assert_near(cpu.linear(*given), given)
        assert torch.equal(cpu.linear(*given), few if inputs <= cpu.FEW else plain(*given))


def test_what_the_library_cannot_read_is_left_to_torch(used: cpu.Library) -> None:
    x, values, mask, offsets, scale, bias, columns = arguments(weight_of(6, 20, torch.float32), 2)
    assert bias is not None
    double = (x.double(), values.double(), mask, offsets, None, bias.double(), columns)
    assert torch.equal(cpu.linear(*double), plain(*double))
    strided = torch.randn(20, 2).T
    near = cpu.linear(strided, values, mask, offsets, scale, bias, columns)
    assert torch.allclose(near, plain(strided, values, mask, offsets, scale, bias, columns), atol=1e-5)
    for wrong in ((x.half(), values), (x[:, :19], values), (x, values.bfloat16())):
        with pytest.raises(RuntimeError):
            cpu.linear(*wrong, mask, offsets, scale, bias, columns)
    assert cpu.linear(x[0], values, mask, offsets, scale, bias, columns).shape == (6,)
    assert cpu.linear(x.view(2, 1, 20), values, mask, offsets, scale, bias, columns).shape == (2, 1, 6)


def test_tracing_records_the_op_and_compiling_runs_the_kernel(used: cpu.Library) -> None:
    layer = nn.Linear(64, 32)
    with torch.no_grad():
        layer.weight.copy_(weight_of(32, 64, torch.float32))
    packed, x = PackedLinear.from_linear(layer).eval(), torch.randn(2, 64)
    with torch.no_grad():
        expected = packed(x)
        traced = make_fx(packed)(x)
        compiled = torch.compile(packed, backend="eager", fullgraph=True)(x)
    assert "secateur.packed_linear" in traced.code
    assert torch.equal(traced(x), expected)
    assert torch.equal(compiled, expected)
    assert torch.equal(packed(x).detach(), expected)  # through autograd


def test_several_threads_may_call_at_once(used: cpu.Library) -> None:
    cases = [arguments(weight_of(300, 500, torch.bfloat16), 2) for _ in range(4)]
    expected = [used.linear(*given) for given in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(lambda given: used.linear(*given), cases))
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_without_the_library_a_weight_is_unpacked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "BUILT", tmp_path / "packed_linear.so")
    cpu.library.cache_clear()
    made: list[Any] = []
    monkeypatch.setattr(cpu, "unpacked", lambda *given: made.append(given) or unpacked(*given))
    layer = nn.Linear(30, 20)
    with torch.no_grad():
        layer.weight.copy_(weight_of(20, 30, torch.float32))
    packed, x = PackedLinear.from_linear(layer).eval(), torch.randn(1, 30)
    try:
        with caplog.at_level(logging.INFO, "secateur"), torch.no_grad():
            assert all(torch.equal(packed(x), layer(x)) for _ in range(3))
        assert len(made) == 1
        assert len(caplog.records) == 1
        assert "unpacked once" in caplog.text
        assert "the C library is not installed" in caplog.text
        packed.weight.mul_(2)  # the copy is not used any more
        with torch.no_grad():
            assert torch.allclose(packed(x), 2 * layer(x) - layer.bias)
        assert len(cpu._dense) == 1
        made.clear()
        del packed
        assert len(cpu._dense) == 0
    finally:
        cpu.library.cache_clear()


def test_a_library_that_cannot_be_used_says_why(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built.parent, tmp_path / "stale")
    (tmp_path / "stale" / "packed_linear.c").write_text("int changed;")
    assert "another version of its source" in str(cpu.load(tmp_path / "stale" / "packed_linear.so"))
    (tmp_path / "broken.so").write_bytes(b"not a library")
    assert "cannot be loaded" in str(cpu.load(tmp_path / "broken.so"))
    assert "is not installed" in str(cpu.load(tmp_path / "missing.so"))


def test_a_level_can_be_asked_for(built: Path, library: cpu.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECATEUR_CPU_LEVEL", "portable")
    found = cpu.load(built)
    assert isinstance(found, cpu.Library)
    assert found.level == 0
    monkeypatch.setenv("SECATEUR_CPU_LEVEL", "portible")
    with pytest.raises(SecateurError, match="'portible'; this processor has portable.* Did you mean 'portable'"):
        cpu.load(built)


def test_without_a_compiler_the_build_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    assert not build(tmp_path, CC=str(tmp_path / "no-compiler")).exists()


def test_needs_nothing_but_libc(built: Path) -> None:
    if not shutil.which("objdump"):
        pytest.skip("objdump, which lists what a library needs, is not installed")
    listed = subprocess.run(["objdump", "-p", str(built)], check=True, capture_output=True, text=True).stdout
    assert [line.split()[1] for line in listed.splitlines() if "NEEDED" in line] == ["libc.so.6"]


# Whether to pack a layer at all


def test_layers_that_are_slower_packed_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(64, 32)).eval()
    with torch.no_grad():
        for layer in model:
            layer.weight[torch.rand(layer.weight.shape) < 0.5] = 0
    asked = []

    def timed(dense: nn.Linear, packed: nn.Module, x: Tensor) -> Timing:
        asked.append((dense.in_features, packed(x).shape))
        return Timing([20.0], [10.0 if dense.in_features == 64 else 30.0], 0.0, 1.0)

    monkeypatch.setattr("secateur.inference.packed.compare", timed)
    report = sc.pack(model)
    assert report.packed == ("0", "2")
    assert asked == [(64, (1, 32)), (32, (1, 64))]  # each shape once
    assert report.layers[1].reason == "slower packed: 30 us for one input, dense 20 us"
    assert "packed, 2.0x as fast" in str(report)
    assert sc.pack(model, memory=True).packed == ("1",)
    assert len(asked) == 2


def test_times_of_both_forms_and_their_difference(used: cpu.Library) -> None:
    layer = nn.Linear(128, 128)
    with torch.no_grad():
        layer.weight.copy_(weight_of(128, 128, torch.float32))
    packed, x = PackedLinear.from_linear(layer).eval(), torch.randn(2, 128)
    found = compare(layer, packed, x, most=5)
    assert found.right
    assert found.inputs == 2
    assert len(found.dense) == len(found.packed) == 5
    assert found.ratio == min(found.dense) / min(found.packed)
    with torch.no_grad():
        layer.weight[0, 0] += 0.1
    assert not compare(layer, packed, x, most=5).right
