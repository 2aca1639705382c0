"""Streams of packed weights: exact both ways, the kernels against their twins by Triton's interpreter, the layers, and
compilation for GPUs that are not here."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import secateur as sc
from secateur.inference import gpu
from secateur.inference.format import pack_weight
from secateur.inference.packed import PackedLinear
from secateur.inference.timing import Timing
from secateur.kernels.decode import CHUNK, CUDA, TRITON, Form, dense_of, streams_of
from secateur.selection import masks
from tests import decode_cases as cases

KINDS = [("4",), ("8",), ("cells", "4", "8")]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(masks.INTEGERS[tensor.element_size()])


@given(
    rows=st.integers(1, 6), columns=st.integers(1, 700), sparsity=st.floats(0, 1), seed=st.integers(0, 99),
    dtype=st.sampled_from([*cases.DTYPES, torch.int8]), kinds=st.sampled_from(KINDS),
)  # fmt: skip
@settings(max_examples=60)
def test_streams_give_the_weight_back_to_the_bit(
    rows: int, columns: int, sparsity: float, seed: int, dtype: torch.dtype, kinds: tuple[str, ...]
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns).mul_(40).to(dtype)
    kept = (torch.rand(rows, columns) >= sparsity) & (weight != 0)
    weight = weight.masked_fill(~kept, 0)
    streams = streams_of(weight[kept], masks.pack(kept), columns, kinds=kinds)
    assert torch.equal(dense_of(streams), weight)
    counts = streams.starts >> 40
    assert int(counts.max()) <= streams.form.groups
    assert int(counts.sum()) == streams.indices[0].numel()
    again = streams_of(weight[kept], masks.pack(kept), columns, kinds=kinds)
    assert all(torch.equal(one, other) for one, other in zip(streams.tensors, again.tensors, strict=True))


def test_infinity_and_nan_and_small_numbers_survive() -> None:
    weight = torch.zeros(3, 500)
    weight[0, 3], weight[0, 490], weight[1, 77], weight[2, 499] = torch.inf, torch.nan, 1e-42, -torch.inf
    packed = pack_weight(weight)
    for kinds in KINDS:
        assert torch.equal(bits(dense_of(cases.streams_for(packed, kinds))), bits(weight))


def test_blocks_of_rows_do_not_change_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_weight(cases.weight_of((13, 300), 0.8, torch.bfloat16))
    whole = cases.streams_for(packed)
    monkeypatch.setattr("secateur.kernels.decode.PART", 700)
    parts = cases.streams_for(packed)
    assert whole.form == parts.form
    assert all(torch.equal(one, other) for one, other in zip(whole.tensors, parts.tensors, strict=True))


@pytest.mark.parametrize("kept", [1, 2, 4, 8])
def test_patterns_of_sixteen_need_no_gaps(kept: int) -> None:
    weight = cases.pattern_of((4, 512), kept, torch.bfloat16)
    streams = cases.streams_for(pack_weight(weight))
    assert streams.form.cell == kept
    assert not streams.bases.numel()
    placed = streams.starts.nbytes + streams.shares.nbytes
    assert streams.nbytes - placed == weight.numel() * kept / 16 * 2.5  # 20 bits a value
    assert torch.equal(dense_of(streams), weight)


@pytest.mark.parametrize(("sparsity", "bits_a_weight"), [(0.5, 10.9), (0.7, 6.6), (0.8, 4.7), (0.9, 2.8)])
def test_streams_are_short_and_segments_wide(sparsity: float, bits_a_weight: float) -> None:
    weight = torch.randn(32, 4096).masked_fill_(torch.rand(32, 4096) < sparsity, 0).bfloat16()
    streams = cases.streams_for(pack_weight(weight))
    assert streams.nbytes * 8 / weight.numel() < bits_a_weight
    assert streams.form.width % CHUNK == 0
    filled = float((streams.starts >> 40).float().mean()) / streams.form.groups
    assert filled > 0.7  # of what a program computes


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("compiled kernels are tested here: pytest -m gpu")
    monkeypatch.delenv("SECATEUR_KERNELS")
    monkeypatch.setattr(gpu, "DEVICES", {"cpu"})


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("inputs", "kinds"), [(1, ("4",)), (3, ("8",))])
def test_the_kernel_and_its_twin(interpreted: None, dtype: torch.dtype, inputs: int, kinds: tuple[str, ...]) -> None:
    cases.check_decode(cases.weight_of((9, 133), 0.8, dtype), inputs, biased=inputs == 1, kinds=kinds)


def test_the_kernel_for_patterns_and_for_int8(interpreted: None) -> None:
    cases.check_decode(cases.pattern_of((8, 100), 4, torch.float32), 2, kinds=("cells",))
    cases.check_decode(cases.weight_of((9, 100), 0.5, torch.float16), 2, int8=True, biased=True)
    cases.check_decode(cases.weight_of((3, 40), 0.5, torch.float32), 1, setting=(TRITON, 2, 2, 1))


def test_unpacking_is_exact(interpreted: None) -> None:
    for dtype in cases.DTYPES:
        cases.check_unpack(cases.weight_of((3, 77), 0.6, dtype))
    cases.check_unpack(cases.weight_of((2, 4200), 0.6, torch.float32), int8=True)  # two blocks of a mask


def test_layers_use_streams_for_few_inputs_alone(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(60, 8)
    with torch.no_grad():
        layer.weight[torch.rand(8, 60) < 0.8] = 0
    packed = PackedLinear.from_linear(layer).eval()
    assert packed.streams is not None
    used = []
    real = gpu.decode
    monkeypatch.setattr(gpu, "decode", lambda *given, **named: used.append(given[0].shape) or real(*given, **named))
    with torch.no_grad():
        for shape in ((60,), (2, 2, 60), (5, 60)):
            x = torch.randn(shape)
            torch.testing.assert_close(packed(x), layer(x), rtol=1e-4, atol=1e-5)
    assert used == [(60,), (2, 2, 60)]
    packed(torch.randn(1, 60, requires_grad=True)).sum().backward()  # gradients need the other op
    assert len(used) == 2
    assert packed.nbytes == packed.packed.nbytes + packed.streams.nbytes
    assert PackedLinear.from_linear(layer, lean=True).streams is None


def test_streams_follow_the_weight(interpreted: None) -> None:
    first, second = nn.Linear(100, 8), nn.Linear(100, 8)
    packed, other = PackedLinear.from_linear(first).eval(), PackedLinear.from_linear(second).eval()
    assert not any("streams" in name for name in packed.state_dict())
    packed.load_state_dict(other.state_dict())
    assert packed.streams is not None
    assert torch.equal(dense_of(packed.streams), second.weight)
    packed.to(torch.bfloat16)
    assert packed.streams.dtype == torch.bfloat16
    assert torch.equal(dense_of(packed.streams), second.weight.bfloat16())
    copied = copy.deepcopy(packed)
    assert copied.streams is not None
    assert copied.streams.starts.data_ptr() != packed.streams.starts.data_ptr()
    assert torch.equal(packed.to_linear().weight, second.weight.bfloat16())
    packed.to(torch.float64)
    assert packed.streams is None  # no kernel


def test_a_packed_model_that_gained_streams_compiles(interpreted: None) -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[0].weight[torch.rand(8, 64) < 0.8] = 0
        model[2].weight[torch.rand(8, 8) < 0.8] = 0
    x = torch.randn(1, 64)
    with torch.no_grad():
        expected = model(x)
        report = sc.pack(model, memory=True)
        assert report.packed == ("0", "2")
        for number in (0, 2):
            model[number].lean = False
            model[number].refresh()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)


def test_a_measured_pack_sets_the_launch_of_layers_alike(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 16), nn.Linear(64, 16)).eval()
    with torch.no_grad():
        model[0].weight.copy_(cases.weight_of((16, 64), 0.8, torch.float32))
        model[1].weight.copy_(-model[0].weight)
    monkeypatch.setattr(gpu, "TRITON_SETTINGS", ((TRITON, 8, 4, 2), (TRITON, 4, 4, 1)))
    monkeypatch.setattr(gpu, "TRIED", (1,))
    monkeypatch.setattr(gpu, "COPIES", 1)
    tried = []
    monkeypatch.setattr(gpu, "graph_microseconds", lambda calls, _: tried.append(calls) or [float(len(tried))])
    monkeypatch.setattr(
        "secateur.inference.packed.compare",
        lambda *given, **named: Timing([2.0], [1.0], 0.0, 1.0),
    )
    report = sc.pack(model)
    assert report.packed == ("0", "1")
    assert len(tried) == 4  # two settings, then streams against unpacking; once for both layers
    forms = [layer.streams.form for layer in model]
    assert all((form.tile, form.warps, form.stages) == (8, 4, 2) for form in forms)
    assert [layer.few for layer in model] == [1, 1]


def test_pack_decides_for_the_number_of_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed is faster for one token and slower for 16."""
    seen = []

    def compared(dense: nn.Module, packed: nn.Module, x: Tensor) -> Timing:
        seen.append(tuple(x.shape))
        return Timing([2.0], [1.0 if x.shape[0] == 1 else 3.0], 0.0, 1.0)

    monkeypatch.setattr("secateur.inference.packed.compare", compared)
    model = nn.Sequential(nn.Linear(64, 16)).eval()
    with torch.no_grad():
        model[0].weight.copy_(cases.weight_of((16, 64), 0.8, torch.float32))
    report = sc.pack(model, inputs=16)
    assert not report.packed
    assert report.layers[0].reason == "slower packed: 3 us for 16 inputs, dense 2 us"
    assert sc.pack(model).packed == ("0",)
    assert seen == [(16, 64), (1, 64)]
    for wrong in (0, 1.5, True):
        with pytest.raises(sc.SecateurError, match="inputs is the number of tokens"):
            sc.pack(model, inputs=wrong)


def test_forms_travel_through_an_op_as_numbers() -> None:
    form = Form(3, 100, 64, 8, 4, cell=2, kernel=CUDA, tile=4, warps=2, stages=3)
    assert Form(*form.numbers()) == form


def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    """A sample by default; SECATEUR_COMPILE=all compiles every kernel of the package, which takes minutes."""
    pytest.importorskip("triton", reason="triton is not installed")
    which = os.environ.get("SECATEUR_COMPILE", "sample")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_worker", which], env=environment, cwd=Path(__file__).parent.parent,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} >= {"_decode", "_unpack"}
    assert all(" stack=0 " in line for line in lines if line.startswith("_decode ")), lines
    # Threads exchange values at the end alone; a layout that makes them do so in the loop takes hundreds of shuffles.
    assert all(int(line.split()[5]) <= 120 for line in lines if line.startswith("_decode ")), lines


def test_a_layer_without_values_yet_gets_no_streams(interpreted: None) -> None:
    packed = PackedLinear.from_linear(nn.Linear(60, 8)).eval()
    empty = copy.deepcopy(packed).to("meta").to_empty(device="cpu")
    assert empty.streams is None
    empty.load_state_dict(packed.state_dict())
    assert empty.streams is not None
    assert torch.equal(dense_of(empty.streams), packed.packed.dense())
