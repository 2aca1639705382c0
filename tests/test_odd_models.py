"""Unusual models; each of these was once handled wrongly."""

from __future__ import annotations

import copy
import math
import re
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal import two_tensor

import secateur as sc
from secateur.errors import FactError, ModelError, SiteError
from secateur.model.prunable import find_prunable
from secateur.oneshot import reconstruct
from secateur.oneshot.batches import standard_loss
from secateur.oneshot.blocks import Chain, find_blocks
from secateur.oneshot.calibration import CalibratedModel, CalibrationSettings
from tests import tiny
from tests.trained import Tower, classifier

IDS = torch.randint(1, 17, (4, 9), generator=torch.Generator().manual_seed(0))


class Chained(nn.Module):
    """Blocks in a list, each what `make` makes."""

    def __init__(self, make: Any, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(width) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, state: Tensor) -> Tensor:
        for layer in self.layers:
            state = layer(state)
        return self.head(state)


def pairs(width: int = 16) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(8, width, generator=draw), torch.arange(8) % 4) for _ in range(4)]


def test_an_unused_layer() -> None:
    class Lazy(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, state: Tensor) -> Tensor:
            return torch.tanh(self.used(state))

    report = sc.prune(Chained(Lazy), pairs(), method="sparsegpt")
    assert report.sparsity == 0.5
    assert any("no batch showed" in note and "were pruned by magnitude" in note for note in report.notes)
    report = sc.prune(Chained(Lazy), pairs(), score="magnitude", reconstruct=True)
    assert any("no batch showed" in note and "were not reconstructed" in note for note in report.notes)
    for order in ("reverse", "forward", "joint"):
        report = sc.probe(Chained(Lazy), pairs(), score="magnitude", order=order, tolerance=1e9)
        assert bool(report.masks["layers.0.idle.weight"].all())


def test_activations_in_place_and_autocast() -> None:
    def make(inplace: bool) -> Any:
        torch.manual_seed(0)
        return Chained(lambda width: nn.Sequential(nn.SiLU(inplace=inplace), nn.Linear(width, width)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.cross_entropy(model(batch[0].clone()).float(), batch[1])

    for settings in ({"method": "sparsegpt"}, {"score": "magnitude", "reconstruct": True}):
        models = [make(False), make(True)]
        for model in models:
            sc.prune(model, pairs(), loss=lambda m, b: nn.functional.cross_entropy(m(b[0].clone()), b[1]), **settings)
        assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
        assert sc.prune(make(True), pairs(), loss=loss, **settings).sparsity == 0.5


def test_channels_last_is_reconstructed_and_groups_are_counted() -> None:
    torch.manual_seed(0)
    images = [(torch.randn(4, 8, 6, 6), torch.arange(4)) for _ in range(3)]
    weights = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(32, 4)
        )
        model = model.to(memory_format=form)
        report = sc.prune(model, images, method="sparsegpt", only="*")
        assert [row.sparsity for row in report.tensors] == [0.5, 0.5, 0.5]
        weights.append(model[0].weight.detach().clone())
    assert torch.allclose(*weights, atol=1e-5)
    model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))
    with pytest.raises(sc.SecateurError, match="cannot be tiled by '2:4'"):
        sc.prune(model, pairs(10), method="sparsegpt", pattern="2:4", sparsity=None, only="*")
    with pytest.raises(sc.SecateurError, match="cannot give '0.weight' the pattern '3:6'"):
        sc.prune(nn.Sequential(nn.Linear(12, 6)), pairs(12), method="sparsegpt", pattern="3:6", sparsity=None, only="*")


def test_other_ways_between_blocks_are_noticed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.head = nn.Linear(16, 4)

        def forward(self, state: Tensor) -> Tensor:
            early = state = torch.tanh(self.layers[0](state))
            for layer in list(self.layers)[1:]:
                state = layer(state)
            return self.head(state + early)  # around all the others

    torch.manual_seed(0)
    calibrated = CalibratedModel(Net(), pairs())
    late = [prunable for prunable in calibrated.prunables if prunable.name == "layers.3.weight"]
    found = [calibrated.gradients({"gradient_max"}, late)["layers.3.weight"]["gradient_max"] for _ in range(2)]
    assert torch.equal(*found)


def test_nan_never_counts_as_success() -> None:
    model, batches = classifier()
    broken = [(torch.full_like(inputs, math.inf), targets) for inputs, targets in batches]
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(sc.SecateurError, match="not all finite"):
        sc.prune(model, broken, score="magnitude", reconstruct=True, sparsity=0.3)
    with pytest.raises(sc.SecateurError, match="NaN"):
        sc.probe(model, broken, score="magnitude")
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert len(before) == len(list(model.parameters()))
    model, batches = classifier()
    figures = iter([1.0, *[math.nan] * 50])
    report = sc.probe_until(model, batches, lambda _: next(figures), tolerance=1e9)
    assert report.pruned == 0
    with pytest.raises(sc.SecateurError, match="nothing can be compared"):
        sc.probe_until(model, batches, lambda _: math.nan)


@pytest.mark.parametrize("settings", [{"score": "random"}, {"score": "bitter5"}, {}, {"reconstruct": True}])
def test_what_is_gone_already_counts(settings: dict[str, Any]) -> None:
    model, batches = classifier()
    sc.prune(model, batches, sparsity=0.5, skip="0")
    report = sc.prune(model, batches, sparsity=0.6, skip="0", **settings)
    zeros = sum(int((model.get_parameter(row.name) == 0).sum()) for row in report.tensors)
    assert report.pruned == zeros == round(0.6 * report.prunable)
    assert any("were zero already" in note for note in report.notes)
    report = sc.probe(model, batches, sparsity=0.7, skip="0", score="magnitude")
    assert report.pruned == sum(int((model.get_parameter(row.name) == 0).sum()) for row in report.tensors) >= zeros


def test_batches_and_losses_of_all_kinds() -> None:
    Pair = namedtuple("Pair", "inputs targets")
    model, batches = classifier()
    assert sc.prune(model, [Pair(*batch) for batch in batches]).sparsity == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(sc.SecateurError, match="it is float"):
        sc.prune(model, batches, loss=lambda model, batch: 1.0)  # type: ignore[arg-type,return-value]
    with pytest.raises(sc.SecateurError, match="something like '24GB'"):
        sc.prune(model, batches, memory="1.2.3GB")
    with pytest.raises(sc.SecateurError, match="breaks a pattern"):
        sc.probe(model, batches, pattern="2:4", sparsity=None)
    convolution = nn.Conv2d(3, 4, 3)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convolution

        def forward(self, images: Tensor) -> Tensor:
            return nn.functional.conv2d(images, weight=self.inner.weight, bias=None).mean((2, 3))

    images = [(torch.randn(2, 3, 5, 5), torch.tensor([0, 3]))]
    assert sc.prune(Named(), images, score="wanda", only="*").scope == "row"


def test_caches_of_composite_models_and_experts_as_they_come() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "d_kv": 8, "vocab_size": 17}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    batches = [{"input_ids": row, "labels": row} for row in IDS.split(2)]
    assert sc.prune(model, batches, method="sparsegpt").sparsity == pytest.approx(0.5, abs=1e-3)
    assert model.decoder.config.use_cache
    report = sc.probe(model, batches, order="reverse", group="block", tolerance=0.5)
    assert report.sparsity > 0.4
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=17,
    )  # fmt: skip
    mixture = transformers.MixtralForCausalLM(config)
    as_it_was = mixture.config._experts_implementation
    for settings in ({"method": "sparsegpt"}, {"score": "wanda"}, {"score": "wanda", "reconstruct": True}):
        report = sc.prune(mixture, IDS, **settings)
        assert report.sparsity == pytest.approx(0.5, abs=0.01)
        mixture = transformers.MixtralForCausalLM(config)
    assert mixture.config._experts_implementation == as_it_was


def test_a_tower_keeps_its_users_gradients() -> None:
    model = Tower()
    model.blocks[2].down.weight.grad = kept = torch.ones_like(model.blocks[2].down.weight)
    sc.prune(model, IDS, reconstruct="every", rounds=2)
    assert model.blocks[2].down.weight.grad is kept


class TimeFirst(nn.Module):
    """Blocks whose states have time first and the batch second."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("build", [TimeFirst, lambda: tiny.llama(hidden_size=16), lambda: tiny.gpt2(n_layer=2)])
def test_batches_are_merged_only_where_that_changes_nothing(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    words = build is not TimeFirst
    batches: Any = list(torch.randint(0, 90, (8, 12)).split(2))
    batches = batches if words else [(torch.randn(2, 6, 16), torch.randn(2, 6, 16)) for _ in range(4)]
    found = []
    for most in (0, 256 << 20):
        monkeypatch.setattr(reconstruct, "CPU_MERGE_BYTES", most)
        torch.manual_seed(0)
        model = build()
        sc.prune(model, batches, score="magnitude", reconstruct=True)
        found.append([p.detach().clone() for p in model.parameters()])
    for apart, merged in zip(*found, strict=True):
        torch.testing.assert_close(merged, apart, rtol=1e-2, atol=1e-4)


def test_a_tensor_with_a_number_for_each_row_is_not_merged() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return x * scale[:, None]

    scale = torch.tensor([1.0, 2.0])
    chain = Chain([Scaled()], [torch.ones(2, 3)] * 2, [[((scale,), {})]] * 2, [{}, {}])
    assert len(chain.merged(1 << 20).states) == 2


def test_a_state_written_in_place_between_blocks_makes_no_chain() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x += 3.0
            return x

    model = Writing()
    batch = torch.randn(4, 8), torch.randn(4, 8)
    prunables, _ = find_prunable(model, only="*")
    assert find_blocks(model, batch, standard_loss, prunables) == []


def test_a_layer_only_later_batches_use_is_reconstructed() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.mean() > 0 else self.b(x)

    for method in (None, "sparsegpt"):
        torch.manual_seed(3)
        model = nn.Sequential(Router(), nn.Linear(8, 4))
        batches = [(torch.randn(32, 8) + sign, torch.randint(0, 4, (32,))) for sign in (1, -1)]
        settings: Any = {"method": method} if method else {"score": "magnitude", "reconstruct": True}
        report = sc.prune(model, batches, sparsity=0.5, only="*", **settings)
        assert not any("no batch showed" in note for note in report.notes)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Router(), nn.Linear(8, 4))
    batches = [(torch.randn(4, 8), torch.randint(0, 4, (4,)))]
    sc.prune(
        model, batches, score="magnitude", sparsity=0.8, reconstruct=True, only="*"
    )  # routed elsewhere once pruned


class CrossAttention(nn.Module):
    """One weight whose first rows read the first 4 positions, and whose other rows the last 6."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True, bias=False)

    def forward(self, both: Tensor) -> Tensor:
        found: Tensor = self.inner(both[:, :4], both[:, 4:], both[:, 4:], need_weights=False)[0]
        return found


def test_rows_of_cross_attention_are_pruned_by_their_own_inputs() -> None:
    torch.manual_seed(0)
    model, name = CrossAttention(), "inner.in_proj_weight"
    x, y = torch.randn(64, 4, 16) @ torch.randn(16, 16) / 4, torch.randn(64, 6, 16) * torch.linspace(0.1, 10, 16)
    dense, flat = model.inner.in_proj_weight.detach().clone(), x.reshape(-1, 16)
    settings: Any = {"only": name, "loss": lambda model, batch: model(batch).square().mean()}

    def pruned(**more: Any) -> tuple[Tensor, Tensor]:
        mine = copy.deepcopy(model)
        report = sc.prune(mine, [torch.cat([x, y], 1)], **settings, **more)
        return mine.inner.in_proj_weight.detach(), report.masks[name]

    def error(queries: Tensor) -> float:
        return float((flat @ (queries - dense[:16]).T).square().sum())

    norms = torch.cat([flat.norm(dim=0).expand(16, 16), y.reshape(-1, 16).norm(dim=0).expand(32, 16)])
    order = (dense.abs() * norms).argsort(dim=1, stable=True)
    assert torch.equal(pruned(score="wanda")[1], torch.ones(48, 16).scatter(1, order[:, :8], 0).bool())
    masked, mask = pruned(score="magnitude", scope="row")
    best = torch.zeros(16, 16)
    for row, kept in zip(range(16), mask, strict=False):
        best[row, kept] = torch.linalg.lstsq(flat[:, kept], (flat @ dense[row])[:, None]).solution[:, 0]
    assert error(pruned(score="magnitude", scope="row", reconstruct=True)[0][:16]) < 1.02 * error(best)
    assert error(pruned(method="sparsegpt")[0][:16]) < 0.75 * error(masked[:16])


def test_weights_that_share_one_storage() -> None:
    found = []
    for shared in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        if shared:
            flat = nn.utils.parameters_to_vector(model.parameters()).detach()
            nn.utils.vector_to_parameters(flat, model.parameters())
        torch.manual_seed(1)
        batches = [(torch.randn(32, 8), torch.randint(0, 4, (32,))) for _ in range(2)]
        sc.prune(model, batches, score="wanda", reconstruct=True, only="*")
        found.append([p.detach().clone() for p in model.parameters()])
    for apart, together in zip(*found, strict=True):
        torch.testing.assert_close(together, apart)


@pytest.mark.parametrize("way", ["transposed", "overlapping", "columns"])
def test_parameters_in_the_same_memory_are_refused(way: str) -> None:
    """Each would have a mask, and together these removed more than was asked for. Columns of one matrix are apart."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    flat = torch.randn(128)
    both = {
        "transposed": (flat[:64].view(8, 8), flat[:64].view(8, 8).t()),
        "overlapping": (flat[:64].view(8, 8), flat[32:96].view(8, 8)),
        "columns": flat.view(8, 16).split(8, dim=1),
    }
    model[2].weight, model[0].weight = map(nn.Parameter, both[way])
    calls: list[Any] = [
        lambda **only: sc.prune(model, pairs(), score="magnitude", scope="model", **only),
        lambda **only: sc.Pruner(model, torch.optim.SGD(model.parameters()), score="magnitude", **only),
    ]
    for call in calls:
        if way == "columns":
            call()
            assert int((flat == 0).sum()) == 64
            continue
        with pytest.raises(SiteError, match=r"are two parameters in the same memory.*skip='(0|2)\.weight'"):
            call()
        call(only="0")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_inputs_that_are_not_finite_are_refused(bad: float) -> None:
    """One infinite value gave every weight of that feature the score infinity, and all of them stayed."""
    model, batches = small(), pairs()
    batches[1][0][0, 3] = bad
    before = [p.detach().clone() for p in model.parameters()]
    calls: list[Any] = [
        lambda **more: sc.prune(model, batches, **more),
        lambda **more: sc.probe(model, batches, **more),
    ]
    for call in calls:
        with pytest.raises(FactError, match="The inputs of '0.weight' are not all finite|The loss of a batch is NaN"):
            call(score="wanda", only="*")
    assert all(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def every_way(model: nn.Module) -> list[Any]:
    """The calls that must refuse a model they cannot work on."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    return [
        lambda: sc.prune(model, pairs()),
        lambda: sc.probe(model, pairs(), score="magnitude"),
        lambda: sc.Pruner(model, optimizer),
    ]


def test_models_without_values_are_refused() -> None:
    with torch.device("meta"):
        meta = small()
    for call in every_way(meta):
        with pytest.raises(ModelError, match="'0.weight' is on the meta device and has no values"):
            call()
    for call in every_way(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4))):
        with pytest.raises(ModelError, match="'0.weight' has no shape yet"):
            call()


def test_offloaded_models_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = accelerate.cpu_offload(small(), execution_device=torch.device("cpu"))
    for call in every_way(model):
        with pytest.raises(ModelError, match="'0.weight' is offloaded by accelerate.*pass device=..."):
            call()


def test_inference_tensors_are_refused_and_a_copy_works() -> None:
    with torch.inference_mode():
        made = small()
    before = [p.clone() for p in made.parameters()]
    for call in every_way(made):
        with pytest.raises(ModelError, match=r"was made under torch.inference_mode\(\).*copy.deepcopy"):
            call()
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), before, strict=True))
    assert sc.prune(copy.deepcopy(made), pairs()).sparsity == 0.5
    with torch.inference_mode():
        for call in every_way(small()):
            with pytest.raises(ModelError, match="inference_mode.*Call it outside"):
                call()


def quantized(kind: str) -> nn.Sequential:
    """A model whose first layer is stored as libraries that quantize store it."""
    model = small()
    weight = model[0].weight.detach()
    stored: dict[str, Any] = {
        "int8": lambda: nn.Parameter((weight * 100).to(torch.int8), requires_grad=False),
        "uint8": lambda: nn.Parameter(torch.zeros(128, 1, dtype=torch.uint8), requires_grad=False),
        "float8": lambda: nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False),
        "wrapped": lambda: nn.Parameter(two_tensor.TwoTensor(weight, weight)),
    }
    model[0].weight = stored[kind]()
    return model


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("int8", "quantized (torch.int8)"),
        ("uint8", "quantized (torch.uint8)"),
        ("float8", "quantized (torch.float8_e4m3fn)"),
        ("wrapped", "wrapped in TwoTensor"),
    ],
)
def test_quantized_weights_are_left_out_by_name(kind: str, reason: str) -> None:
    reason += ", not plain numbers (prune before quantizing)"
    model = quantized(kind)
    pruner = sc.Pruner(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
    assert ("0.weight", reason) in [(name, why) for name, _, why in pruner.report().left_out]
    assert sorted(pruner.masks) == ["2.weight"]
    for call in (sc.prune, sc.probe):
        with pytest.raises(SiteError, match=re.escape(f"0.weight: {reason}")):
            call(quantized(kind), pairs(), skip="2")  # type: ignore[operator]


def test_weights_in_a_sparse_layout_are_left_out_by_name() -> None:
    model = small()
    model[0].weight = nn.Parameter(torch.eye(16).to_sparse())
    with pytest.raises(SiteError, match=r"Nothing to prune.*0.weight: stored as torch.sparse_coo"):
        sc.Pruner(model, torch.optim.SGD(model.parameters()), only="0.weight")
    report = sc.prune(small_behind(model), pairs(), only=["first.weight", "last.weight"])
    assert [row.name for row in report.tensors] == ["last.weight"]
    assert any(name == "first.weight" and why.startswith("stored as") for name, _, why in report.left_out)


def small_behind(model: nn.Sequential) -> nn.Module:
    """The same layers, the first of which is multiplied as torch multiplies sparse matrices."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = model[0], model[2]

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(torch.sparse.mm(self.first.weight, inputs.t()).t())

    return Behind()


def test_a_model_that_says_it_is_quantized() -> None:
    model = nn.Sequential(nn.LayerNorm(16))
    model.config = SimpleNamespace(quantization_config={"bits": 4})
    with pytest.raises(SiteError, match="Nothing to prune in Sequential.*load it without quantization"):
        sc.prune(model, pairs())


def test_a_vocabulary_smaller_than_the_ids() -> None:
    model = tiny.llama(vocab_size=12)
    for batches in (IDS, [{"input_ids": IDS, "labels": IDS}]):
        with pytest.raises(ModelError, match="token id 16, and the embedding of LlamaForCausalLM has 12 rows"):
            sc.prune(model, batches)
    with pytest.raises(ModelError, match="token id 16"):
        sc.probe(model, IDS)
    with pytest.raises(ModelError, match="token id 16"):
        sc.prune(model, [(IDS, IDS)])
    with pytest.raises(ModelError, match="token id -"):
        sc.prune(model, [{"input_ids": IDS.clamp(max=11) - 12, "labels": IDS}])


def test_token_ids_alone_for_models_that_need_more() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"d_model": 16, "d_ff": 24, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": 17}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(FactError, match="is an encoder-decoder.*mappings"):
        sc.prune(model, IDS)
    with pytest.raises(FactError, match="not a prediction at every position.*mappings"):
        sc.prune(tiny.bert("BertForSequenceClassification"), IDS)


def test_recurrent_layers_are_measured_without_dropout() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(16, 8, num_layers=2, dropout=0.5)
            self.last = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.rnn(x)[0])

    model = Recurrent().train()
    calibrated = CalibratedModel(model, pairs(), CalibrationSettings(only="rnn"))
    found = [calibrated.gradients({"gradient"})["rnn.weight_hh_l1"]["gradient"] for _ in range(2)]
    assert torch.equal(*found)
    assert model.rnn.dropout == 0.5
    model.eval()
    sc.prune(model, pairs(), only="rnn")
    assert not model.rnn.training


def test_blocks_that_are_false_or_have_no_length() -> None:
    """A module may define len(), so its truth value must not be used."""

    class Empty(nn.Sequential):
        def __len__(self) -> int:
            return 0

    class Plain(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(kind(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
            self.last = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.last(x)

    found = []
    for kind in (nn.Sequential, Empty):
        model = Plain(kind)
        sc.prune(model, pairs(), score="magnitude", reconstruct=True)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("settings", [{"rounds": 2, "reconstruct": "every"}, {"method": "sparsegpt"}])
def test_a_router_that_reads_what_its_experts_read(settings: dict[str, Any]) -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(16, 4)
            self.up, self.down = nn.Parameter(torch.randn(4, 24, 16) / 4), nn.Parameter(torch.randn(4, 16, 24) / 5)
            self.num_experts = 4

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(torch.einsum("bd,ehd->ebh", x, self.up))
            made = torch.einsum("ebh,edh->ebd", hidden, self.down)
            return torch.einsum("ebd,be->bd", made, self.router(x).softmax(-1))

    model = nn.Sequential(Mixture(), nn.Linear(16, 4))
    report = sc.prune(model, pairs(), sparsity=0.5, only="*", **settings)
    assert report.sparsity == pytest.approx(0.5, abs=0.01)


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ModelError, match="Device 'cuda' cannot be used here"):
        sc.prune(nn.Linear(16, 4), pairs(), device="cuda", only="*")
