"""Packed layers: equal outputs to the bit, back to the bit, compiled, copied, moved, saved, and not trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import secateur as sc
from secateur.errors import ModelError, SecateurError
from secateur.inference import packed as packed_module
from secateur.inference.packed import PackedLinear, packed_layers, packed_linear, plain


def network(dtype: torch.dtype = torch.float32, sparsity: float = 0.8) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(37, 50), nn.GELU(), nn.Linear(50, 20, bias=False), nn.Linear(20, 3)).to(dtype)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight[torch.rand(layer.weight.shape) < sparsity] = 0
    return model.eval()


def states_equal(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(37,), (5, 37), (2, 3, 37), (0, 37)])
def test_outputs_are_equal_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model, x = network(dtype), torch.randn(shape).to(dtype)
    expected = model(x)
    report = sc.pack(model, memory=True)
    assert report.packed == ("0", "2", "3")
    assert [name for name, _ in packed_layers(model)] == ["0", "2", "3"]
    assert torch.equal(model(x), expected)


def test_unpacking_is_exact_and_keeps_what_belongs_to_a_layer() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    model[2].train()
    before, biases = copy.deepcopy(model), [model[0].bias, model[3].bias]
    sc.pack(model, memory=True)
    assert sc.unpack(model) is model
    assert states_equal(model, before)
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear, nn.Linear]
    assert [model[number].weight.requires_grad for number in (0, 2, 3)] == [False, True, True]
    assert [model[0].bias, model[3].bias] == biases  # the same parameters
    assert [layer.training for layer in model] == [False, False, True, False]


def test_hooks_of_packed_layers_survive_unpacking() -> None:
    model, seen = network(), list[str]()
    sc.pack(model, memory=True)
    handle = model[0].register_forward_hook(lambda *_: seen.append("after"))
    model[0].register_forward_pre_hook(lambda *_, **__: seen.append("before"), with_kwargs=True)
    sc.unpack(model)(torch.randn(1, 37))
    handle.remove()
    model(torch.randn(1, 37))
    assert seen == ["before", "after", "before"]


def test_negative_zero_comes_back_as_zero() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight.mul_(torch.where(model[0].weight == 0, -1.0, 1.0))
    assert bool(torch.signbit(model[0].weight[model[0].weight == 0]).all())
    sc.pack(model, memory=True)
    sc.unpack(model)
    assert not bool(torch.signbit(model[0].weight[model[0].weight == 0]).any())


def test_the_report_says_what_was_left_and_why() -> None:
    class Own(nn.Linear):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 16)
            self.up = nn.Linear(16, 32)
            self.dense = nn.Linear(32, 32)
            self.own = Own(32, 16)
            self.hooked = nn.Linear(16, 16)
            self.twice = nn.Linear(16, 16)
            self.again = self.twice
            self.view = nn.Linear(16, 16)
            self.view.weight = nn.Parameter(self.hooked.weight.data)
            self.attention = nn.MultiheadAttention(16, 2)
            self.block = nn.TransformerEncoderLayer(16, 2, 16)
            self.head = nn.Linear(16, 30, bias=False)
            self.head.weight = self.embedding.weight

    model = Model()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data[:, ::2] = 0
    nn.init.ones_(model.dense.weight)
    handle = model.hooked.register_forward_hook(lambda *_: None)
    report = sc.pack(model, memory=True)
    reasons = {row.name: row.reason for row in report.layers}
    assert report.packed == ("up",)
    other = "NonDynamicallyQuantizableLinear is a subclass of nn.Linear, which may compute something else"
    assert reasons == {
        "up": "",
        "dense": "too few zeros to be smaller packed",
        "own": "Own is a subclass of nn.Linear, which may compute something else",
        "hooked": "shares its memory with view.weight",
        "twice": "shares its memory with again.weight",
        "view": "shares its memory with hooked.weight",
        "attention.out_proj": other,
        "block.self_attn.out_proj": other,
        "block.linear1": "TransformerEncoderLayer reads its weight directly",
        "block.linear2": "TransformerEncoderLayer reads its weight directly",
        "head": "shares its memory with embedding.weight",
    }
    model.view.weight = nn.Parameter(torch.zeros(16, 16))
    assert {row.name: row.reason for row in sc.pack(model, memory=True).layers}[
        "hooked"
    ] == "has hooks, which would be lost"
    handle.remove()
    assert "hooked" in sc.pack(model, memory=True).packed
    row = report.layers[0]
    assert (row.dense_bytes, row.packed_bytes, row.sparsity) == (16 * 32 * 4, 16 * 32 // 8 + 16 * 32 * 2, 0.5)
    assert report.packed_bytes == report.dense_bytes - row.dense_bytes + row.packed_bytes
    text = str(report)
    assert "1 of 11 linear layers are packed" in text
    assert "left dense: too few zeros" in text


class Reads(nn.Module):
    """Reads the weights of its layers in every way that packing must notice, and in some that it need not."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.multiplied, self.given = (nn.Linear(16, 16) for _ in range(3))
        self.typed, self.behind, self.inner = nn.Linear(16, 16), nn.Linear(16, 16), nn.Sequential()
        self.inner.up = nn.Linear(16, 16)
        nn.init.uniform_(self.called.weight)
        self._init_weights()

    def _init_weights(self) -> None:
        self.called.weight.data[:, ::2] = 0

    @property
    def hidden(self) -> Tensor:
        return self.behind.weight

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.typed.weight, Tensor) and self.typed.weight.device == x.device:
            x = self.typed(x.to(self.typed.weight.dtype))
        x = functional.linear(self.called(x) @ self.multiplied.weight, self.given.weight)
        return x @ self.hidden + functional.linear(x, self.inner.up.weight)  # `self.called.weight` is not read here


class Inherits(Reads):
    def extra(self) -> str:
        return "self.called.weight"


class ReadsMembers(nn.Module):
    """Reads the weights of its layers by other names, from containers and in loops."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.named, self.query, self.key = (nn.Linear(16, 16) for _ in range(4))
        self.inside = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.looped, self.counted = (nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for _ in range(2))
        self.held = nn.ModuleDict({"one": nn.Linear(16, 16), "other": nn.Linear(16, 16)})

    def forward(self, x: Tensor) -> Tensor:
        layer = self.named
        x = functional.linear(self.called(x), layer.weight) @ self.inside[0].weight + self.inside[1](x)
        for layer in self.looped:
            x = functional.linear(x, layer.weight)
        for _, other in enumerate(self.counted):
            x = other(x)
            x = x.to(other.weight.dtype)
        first, second = functional.linear(x, torch.cat([part.weight for part in (self.query, self.key)])).chunk(2, -1)
        return functional.linear(first + second, self.held["one"].weight) + self.held["other"](x)


UNSEEN = """
class Unseen(nn.Module):
    def __init__(self):
        super().__init__()
        self.called, self.multiplied = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.only(x) @ (lambda: self.multiplied.weight)()

    def only(self, x):
        return self.called(x)
"""


@pytest.mark.parametrize("kind", ["Reads", "Inherits", "Unseen"])
def test_layers_whose_weight_a_module_around_them_reads_stay_dense(kind: str) -> None:
    """`Unseen` has no source, as classes made in an interpreter."""
    known: dict[str, Any] = {"nn": nn, "Reads": Reads, "Inherits": Inherits}
    exec(UNSEEN, known)
    block = known[kind]().eval()
    for layer in block.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data[:, ::2] = 0
    model, x = nn.Sequential(block), torch.rand(3, 16)
    with torch.no_grad():
        expected = model(x)
    report = sc.pack(model, memory=True)
    assert report.packed == (("0.called",) if kind == "Unseen" else ("0.called", "0.typed"))
    assert {row.reason for row in report.layers} == {"", f"{kind} reads its weight directly"}
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def test_layers_whose_weight_is_read_by_another_name_stay_dense() -> None:
    block, x = ReadsMembers().eval(), torch.rand(3, 16)
    for layer in block.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data[:, ::2] = 0
    with torch.no_grad():
        expected = block(x)
        assert set(sc.pack(block, memory=True).packed) == {
            "called", "inside.1", "counted.0", "counted.1", "held.other",
        }  # fmt: skip
        torch.testing.assert_close(block(x), expected)


def test_packing_twice_changes_nothing() -> None:
    model = network()
    sc.pack(model, memory=True)
    before = copy.deepcopy(model)
    assert sc.pack(model, memory=True).layers == ()
    assert states_equal(model, before)
    assert sc.unpack(network()) is not None  # nothing to unpack is fine too


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: sc.pack(nn.Linear(2, 2)), "use PackedLinear.from_linear"),
        (lambda: sc.unpack(PackedLinear.from_linear(nn.Linear(2, 2))), "use layer.to_linear"),
        (lambda: PackedLinear(sc.inference.format.pack_weight(torch.ones(2, 2, 2))), "a weight of 2 dimensions"),
    ],
)
def test_single_layers_are_pointed_to_the_right_call(work: Callable[[], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        work()


def test_what_is_no_module_or_has_no_values_is_refused() -> None:
    for work in (sc.pack, sc.unpack):
        with pytest.raises(ModelError, match="A torch.nn.Module is needed, not a list"):
            work([nn.Linear(2, 2)])  # type: ignore[arg-type]
    (row,) = sc.pack(nn.Sequential(nn.Linear(4, 4, device="meta"))).layers
    assert row.reason == "on the meta device, without values"


# The op


def op_inputs(layer: PackedLinear, x: Tensor) -> tuple[Any, ...]:
    return x, layer.weight, layer.weight_mask, layer.offsets, layer.weight_scale, layer.bias, layer.in_features


@pytest.mark.parametrize("int8", [False, True])
def test_the_op_keeps_torchs_contract(int8: bool) -> None:
    layer = PackedLinear.from_linear(network()[0], int8=int8)
    torch.library.opcheck(torch.ops.secateur.packed_linear.default, op_inputs(layer, torch.randn(4, 37)))


def test_it_compiles_into_one_graph() -> None:
    model, x = network(), torch.randn(4, 37)
    sc.pack(model, memory=True)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    with torch.no_grad():
        assert torch.equal(compiled(x), expected)


def test_offsets_say_where_rows_begin() -> None:
    layer = PackedLinear.from_linear(network()[0])
    dense = layer.packed.dense()
    for row in range(50):
        values = layer.weight[layer.offsets[row] : layer.offsets[row + 1]]
        assert torch.equal(values, dense[row][dense[row] != 0])


def test_a_kernel_is_found_by_the_type_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = PackedLinear.from_linear(network()[0]).eval(), torch.randn(4, 37)
    seen = []

    def kernel(*inputs: Any) -> Tensor:
        seen.append(inputs[0].shape)
        return plain(*inputs)

    expected = layer(x)
    monkeypatch.setitem(packed_module.KERNELS, "cpu", kernel)
    assert torch.equal(layer(x), expected)
    assert seen == [(4, 37)]


def test_wrong_inputs_are_refused_as_by_linear() -> None:
    layer = PackedLinear.from_linear(network()[0]).eval()
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 36))
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 37, dtype=torch.float64))


def test_gradients_reach_inputs_and_bias_in_eval_mode() -> None:
    model, x = network(torch.float64), torch.randn(3, 37, dtype=torch.float64, requires_grad=True)
    layer = model[0]
    expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.bias))
    packed = PackedLinear.from_linear(layer)
    found = torch.autograd.grad(packed(x).square().sum(), (x, packed.bias))
    assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))
    assert [name for name, _ in packed.named_parameters()] == ["bias"]
    one = x[0].detach().requires_grad_()  # a single input without a batch
    expected = torch.autograd.grad(layer(one).square().sum(), (one, layer.bias))
    found = torch.autograd.grad(packed(one).square().sum(), (one, packed.bias))
    assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))


def test_packed_models_are_not_pruned() -> None:
    model, batches = network(), [(torch.randn(4, 37), torch.randint(0, 3, (4,)))]
    model[0] = PackedLinear.from_linear(model[0])  # the others stay dense, as `pack` leaves layers that are slower
    works: list[Callable[[], Any]] = [
        lambda: sc.prune(model, batches, sparsity=0.9),
        lambda: sc.probe(model, batches, sparsity=0.9),
        lambda: sc.Pruner(model, torch.optim.AdamW(model.parameters()), sparsity=0.9),
        lambda: sc.Pruner(model, torch.optim.AdamW(model.parameters()), masks="zeros", sparsity=None),
    ]
    for work in works:
        with pytest.raises(SecateurError, match=r"0 is a packed layer, .* Call sc.unpack\(model\) first"):
            work()


def test_training_is_refused() -> None:
    model = network()
    sc.pack(model, memory=True)
    model.train()
    with pytest.raises(ModelError, match=r"cannot be trained. Call model.eval\(\) to run the model, or sc.unpack"):
        model(torch.randn(2, 37))
    with torch.no_grad():
        model(torch.randn(2, 37))  # dropout and the like may be wanted without gradients
    sc.unpack(model)
    model(torch.randn(2, 37)).sum().backward()


@pytest.mark.parametrize("int8", [False, True])
def test_autocast_gives_its_dtype(int8: bool) -> None:
    layer, x = network()[0], torch.randn(4, 37)
    packed = PackedLinear.from_linear(layer, int8=int8)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = layer(x), packed(x)
    assert found.dtype == torch.bfloat16
    if not int8:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("given", [torch.float64, torch.int64])
def test_autocast_leaves_what_torch_leaves(given: torch.dtype) -> None:
    model, x = network(torch.float64), torch.ones(4, 37, dtype=given)
    packed = copy.deepcopy(model)
    sc.pack(packed, memory=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if given == torch.float64:
            assert torch.equal(packed(x), model(x))
        else:
            for one in (model, packed):
                with pytest.raises(RuntimeError, match="same dtype"):
                    one(x)


def test_int8_layers_multiply_with_the_rounded_weight() -> None:
    layer, x = network()[0], torch.randn(4, 37)
    packed = PackedLinear.from_linear(layer, int8=True)
    assert torch.equal(packed(x), functional.linear(x, packed.packed.dense(), layer.bias))
    assert packed.packed.nbytes < PackedLinear.from_linear(layer).packed.nbytes


# What modules can do


def test_copies_states_and_dtypes() -> None:
    model, x = network(), torch.randn(4, 37)
    sc.pack(model, memory=True)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))
    assert copied[0].weight.data_ptr() != model[0].weight.data_ptr()
    half = copied.to(torch.bfloat16)
    assert half[0].dtype == torch.bfloat16 == half[0].weight.dtype
    assert half[0].weight_mask.dtype == torch.uint8
    expected = sc.unpack(copy.deepcopy(model)).to(torch.bfloat16)
    assert torch.equal(half(x.to(torch.bfloat16)), expected(x.to(torch.bfloat16)))
    assert model.to("meta")[0].weight.is_meta


def test_only_values_of_weights_are_cast() -> None:
    model, x = network(), torch.randn(4, 37)
    sc.pack(model, memory=True)
    int8 = PackedLinear.from_linear(network()[0], int8=True)
    expected = model(x), int8(x)
    for layer in (model.type(torch.float64)[0], int8.type(torch.float64)):  # which casts every buffer of a dense model
        assert layer.weight_mask.dtype == torch.uint8
        assert layer.offsets.dtype == torch.int64
        assert layer.weight.dtype == (torch.int8 if layer is int8 else torch.float64)
    assert torch.allclose(model(x.double()), expected[0].double(), atol=1e-5)
    assert torch.equal(int8.float()(x), expected[1])


def test_assigned_states_bring_their_dtype_and_device() -> None:
    source, x = network(torch.bfloat16), torch.randn(4, 37, dtype=torch.bfloat16)
    target, empty = network(sparsity=0.5), network(sparsity=0.5)
    for model in (source, target, empty):
        sc.pack(model, memory=True)
    empty.to("meta")
    for model in (target, empty):
        model.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
        assert torch.equal(model(x), source(x))
        assert model[0].dtype == torch.bfloat16
        assert states_equal(sc.unpack(model), sc.unpack(copy.deepcopy(source)))


def test_what_is_packed_in_inference_mode_works_outside_of_it() -> None:
    model, x = network(), torch.randn(4, 37)
    expected = model(x)
    with torch.inference_mode():
        sc.pack(model, memory=True)
    assert torch.equal(model(x), expected)  # the bias requires gradients
    with torch.inference_mode():
        sc.unpack(model)
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_casting_keeps_the_scales_of_int8_values() -> None:
    layer = PackedLinear.from_linear(network()[0], int8=True)
    scale = layer.weight_scale
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.int8
    assert torch.equal(layer.weight_scale, scale)  # type: ignore[arg-type]
    assert layer.to_linear().weight.dtype == torch.bfloat16
    assert layer(torch.randn(4, 37, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_states_of_another_sparsity_can_be_loaded() -> None:
    one, other, x = network(sparsity=0.8), network(sparsity=0.6), torch.randn(4, 37)
    sc.pack(one, memory=True), sc.pack(other, memory=True)
    expected = one(x)
    assert {"0.weight", "0.weight_mask", "0.bias"} <= one.state_dict().keys()
    assert not any("offsets" in name for name in one.state_dict())
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(x), expected)
    assert torch.equal(other[0].offsets, one[0].offsets)
    other.load_state_dict(copy.deepcopy(one.state_dict()), assign=True)
    assert torch.equal(other(x), expected)
    layer = PackedLinear.from_linear(network()[0], int8=True)
    one[0].load_state_dict(layer.state_dict())
    assert torch.equal(one[0](x), layer(x))


def test_states_that_do_not_fit_are_refused() -> None:
    model, dense = network(), network()
    sc.pack(model, memory=True)
    with pytest.raises(RuntimeError, match="weight_mask"):
        model.load_state_dict(dense.state_dict())
    before = copy.deepcopy(model[0])
    state = model.state_dict()
    state["0.weight"] = state["0.weight"][:-1]
    with pytest.raises(RuntimeError, match="0.weight cannot be loaded into a packed layer: its mask keeps"):
        model.load_state_dict(state)
    assert states_equal(model[0], before)
    with pytest.raises(RuntimeError, match="size mismatch"):
        dense.load_state_dict(before.state_dict(prefix="0."), strict=False)


def test_its_name_says_what_it_saves() -> None:
    layer = nn.Linear(16, 16, bias=False)
    layer.weight.data[:, ::2] = 0
    assert repr(PackedLinear.from_linear(layer)) == (
        "PackedLinear(in_features=16, out_features=16, bias=False, sparsity=50.0%, 544 bytes instead of 1,024)"
    )


def test_the_op_is_deterministic() -> None:
    layer, x = PackedLinear.from_linear(network()[0]), torch.randn(4, 37)
    first = packed_linear(*op_inputs(layer, x))
    assert all(torch.equal(packed_linear(*op_inputs(layer, x)), first) for _ in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [96, 128])
def test_inputs_without_rows_give_outputs_without_rows(columns: int, dtype: torch.dtype) -> None:
    layer = nn.Linear(columns, 8, dtype=dtype)
    with torch.no_grad():
        layer.weight.mul_(torch.rand(8, columns) < 0.3)
    packed = nn.Sequential(layer)
    sc.pack(packed)
    assert packed(torch.randn(0, columns).to(dtype)).shape == (0, 8)
