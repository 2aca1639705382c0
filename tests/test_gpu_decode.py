"""Packed layers on a real GPU: `pytest -m gpu`. tests/test_decode_kernels.py runs the same cases by the interpreter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.inference import gpu
from secateur.inference.packed import PackedLinear
from secateur.kernels.decode import dense_of
from tests import decode_cases as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
GPU = torch.device("cuda")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 16])
def test_every_dtype_and_number_of_inputs(dtype: torch.dtype, inputs: int) -> None:
    for kinds in (("4",), ("8",)):
        cases.check_decode(cases.weight_of((300, 4096), 0.8, dtype, GPU), inputs, biased=inputs % 2 == 1, kinds=kinds)
    cases.check_decode(cases.weight_of((300, 4096), 0.5, dtype, GPU), inputs, int8=True)
    cases.check_decode(cases.pattern_of((300, 4096), 4, dtype, GPU), inputs, kinds=("cells",))


@pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (777, 3), (33, 2049), (129, 14336), (5, 40961)])
@pytest.mark.parametrize("sparsity", [0.0, 0.9, 1.0])
def test_odd_shapes(shape: tuple[int, int], sparsity: float) -> None:
    cases.check_decode(cases.weight_of(shape, sparsity, torch.bfloat16, GPU), 1, kinds=("cells", "4", "8"))
    cases.check_decode(cases.weight_of(shape, sparsity, torch.float32, GPU), 3)
    cases.check_unpack(cases.weight_of(shape, sparsity, torch.bfloat16, GPU))
    cases.check_unpack(cases.weight_of(shape, sparsity, torch.float16, GPU), int8=True)


@pytest.mark.parametrize("kept", [1, 2, 4, 8])
def test_patterns(kept: int) -> None:
    for columns in (4096, 4100, 48):
        cases.check_decode(cases.pattern_of((65, columns), kept, torch.bfloat16, GPU), 1, kinds=("cells",))


@pytest.mark.parametrize("setting", [*gpu.CUDA_SETTINGS, *gpu.TRITON_SETTINGS])
def test_every_launch_setting(setting: gpu.Setting) -> None:
    for inputs in (1, 4):
        cases.check_decode(cases.weight_of((1000, 4096), 0.8, torch.bfloat16, GPU), inputs, setting=setting)


def test_more_than_two_to_the_31_positions() -> None:
    """Rows and streams whose places need 64 bits: 2.2e9 positions, and 4.3 GiB of unpacked weight."""
    rows, columns = 65600, 32768
    layer = PackedLinear.from_linear(_large(rows, columns)).eval()
    assert layer.streams is not None
    x = torch.randn(1, columns, device=GPU).bfloat16()
    last = layer.packed.dense()[-64:].float()
    with torch.no_grad():
        found = layer(x)[0, -64:].float()
        many = layer(x.expand(64, -1))[5, -64:].float()
    wanted = (x.float() @ last.T)[0]
    for one in (found, many):
        torch.testing.assert_close(one, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


def _large(rows: int, columns: int) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False, device="meta").requires_grad_(False)
    weight = torch.zeros(rows, columns, dtype=torch.bfloat16, device=GPU)
    weight[:, ::37] = 1.0
    weight[-64:] = torch.randn(64, columns, device=GPU).bfloat16()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def network(dtype: torch.dtype = torch.bfloat16, sparsity: float = 0.8) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512, bias=False), nn.Linear(512, 33))
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight[torch.rand(layer.weight.shape) < sparsity] = 0
    return model.to(GPU, dtype).eval()


def packed_network() -> tuple[nn.Sequential, nn.Sequential]:
    dense = network()
    model = copy.deepcopy(dense)
    for number in (0, 2, 3):
        model[number] = PackedLinear.from_linear(dense[number]).eval()
        assert model[number].streams is not None
    return dense, model


def test_layers_agree_with_dense_ones_for_any_number_of_inputs() -> None:
    dense, model = packed_network()
    with torch.no_grad():
        for inputs in (1, 2, 4, 5, 64, 513):
            x = torch.randn(inputs, 512, device=GPU).bfloat16()
            torch.testing.assert_close(model(x), dense(x), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("inputs", [1, 4, 64])
def test_cuda_graphs(inputs: int) -> None:
    _, model = packed_network()
    x = torch.randn(inputs, 512, device=GPU).bfloat16()
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(x)
        for _ in range(3):
            x.copy_(torch.randn(inputs, 512, device=GPU))
            graph.replay()
            assert torch.equal(result, model(x))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own trial capture
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models(mode: str) -> None:
    dense, model = packed_network()
    x = torch.randn(1, 512, device=GPU).bfloat16()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(3):
            found = compiled(x).clone()
        torch.testing.assert_close(found, dense(x), rtol=3e-2, atol=3e-2)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_the_device() -> None:
    _, model = packed_network()
    x, many = torch.randn(1, 512, device=GPU).bfloat16(), torch.randn(64, 512, device=GPU).bfloat16()
    with torch.no_grad():
        expected = model(x), model(many)
        try:
            torch.cuda.set_sync_debug_mode("error")
            found = model(x), model(many)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_layers_move_between_devices_and_save_no_streams() -> None:
    dense, model = packed_network()
    assert not any("streams" in name for name in model.state_dict())
    model.cpu()
    assert model[0].streams is None
    model.to(GPU)
    assert torch.equal(dense_of(model[0].streams), dense[0].weight)
    sc.unpack(model)
    assert torch.equal(model[0].weight, dense[0].weight)


def test_pack_measures_and_says_what_it_did() -> None:
    model = network()
    report = sc.pack(model)
    assert len(report.layers) == 3
    for row in report.layers:
        assert row.speedup is not None
        assert (row.name in report.packed) == (row.speedup > 1)
        if row.name in report.packed:
            assert model.get_submodule(row.name).few in (0, *gpu.TRIED)
    small = network()
    assert sc.pack(small, memory=True).packed == ("0", "2", "3")
    assert small[0].nbytes < 0.4 * 2048 * 512 * 2
    assert sc.pack(network(sparsity=0.1), memory=True).packed == ()  # streams would be larger than dense weights


def test_a_prompt_takes_the_memory_of_one_dense_weight_at_a_time() -> None:
    _, model = packed_network()
    many = torch.randn(64, 512, device=GPU).bfloat16()
    with torch.no_grad():
        model(many)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(many)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 4 << 20  # a weight has 2 MiB, activations less than one


def test_mask_and_values_stay_on_the_host() -> None:
    dense = network()
    torch.cuda.synchronize()
    full = sum(layer.weight.nbytes for layer in dense if isinstance(layer, nn.Linear))
    before = torch.cuda.memory_allocated()
    layers = [PackedLinear.from_linear(dense[number]).eval() for number in (0, 2, 3)]
    assert all(layer.hosted and layer.device.type == "cuda" for layer in layers)
    assert torch.cuda.memory_allocated() - before < 0.4 * full
    assert sum(layer.nbytes for layer in layers) < 0.4 * full


@pytest.mark.parametrize("int8", [False, True])
def test_hosted_layers_move_cast_copy_and_load(int8: bool) -> None:
    dense = network()[0]
    layer = PackedLinear.from_linear(dense, int8=int8).eval()
    x = torch.randn(1, 512, device=GPU).bfloat16()
    with torch.no_grad():
        expected, many = layer(x), layer(x.expand(64, -1))
        assert torch.equal(layer.cpu().to_linear().to(GPU).weight, layer.to(GPU).to_linear().weight)
        assert torch.equal(layer(x), expected)
        streams = layer.streams
        layer.to(GPU)
        assert layer.streams is streams  # nothing moved
        copied = copy.deepcopy(layer)
        assert torch.equal(copied(x), expected)
        other = PackedLinear.from_linear(network()[0], int8=int8).eval()
        other.load_state_dict(layer.state_dict())
        assert other.hosted
        assert torch.equal(other(x), expected)
        assert torch.equal(other(x.expand(64, -1)), many)
        half = copy.deepcopy(layer).half()
        assert half.hosted
        torch.testing.assert_close(half(x.half()).float(), expected.float(), rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(half(x.half().expand(64, -1)).float(), many.float(), rtol=3e-2, atol=3e-2)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.equal(half(x.float().expand(64, -1)), half(x.expand(64, -1)))


@pytest.mark.parametrize("assign", [False, True])
def test_hosted_layers_load_the_values_of_a_layer_on_the_host(assign: bool) -> None:
    """Scales, which the kernel reads, come to the GPU, also where there were none before."""
    dense = network()[0]
    right = PackedLinear.from_linear(dense, int8=True).eval()
    state = {name: tensor.cpu() for name, tensor in right.state_dict().items() if name != "bias"}
    x = torch.randn(1, 512, device=GPU).bfloat16()
    for int8 in (False, True):
        layer = PackedLinear.from_linear(dense, int8=int8).eval()
        layer.load_state_dict(state, strict=False, assign=assign)
        assert layer.hosted
        with torch.no_grad():
            assert torch.equal(layer(x), right(x))
            assert torch.equal(layer(x.expand(64, -1)), right(x.expand(64, -1)))


def test_hosted_layers_keep_their_integers_in_casts() -> None:
    layer = PackedLinear.from_linear(network()[0]).eval()
    layer._apply(lambda tensor: tensor.half())
    assert layer.hosted
    assert (layer.weight_mask.dtype, layer.offsets.dtype) == (torch.uint8, torch.int64)
    assert torch.equal(layer.to_linear().weight, network()[0].weight.half())


def test_gradients_reach_inputs_and_biases_of_hosted_layers() -> None:
    dense, model = packed_network()
    found = []
    for one in (dense, model):
        x = torch.linspace(-1, 1, 3 * 512, device=GPU).view(3, 512).bfloat16().requires_grad_()
        one(x).float().square().sum().backward()
        found.append((x.grad, one[0].bias.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("columns", [333, 4096, 14336])
def test_unpacking_streams_is_exact(dtype: torch.dtype, columns: int) -> None:
    for kinds in (("4",), ("8",)):
        cases.check_unpack_streams(cases.weight_of((300, columns), 0.8, dtype, GPU), kinds)
    cases.check_unpack_streams(cases.pattern_of((300, columns), 4, dtype, GPU), ("cells",))
    cases.check_unpack_streams(cases.weight_of((300, columns), 0.5, dtype, GPU), ("4",), int8=True)
