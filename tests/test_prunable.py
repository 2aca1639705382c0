"""Which tensors are prunable and why the others are not, on our own modules and on those of transformers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import FactError, PatternError, SiteError
from secateur.model.prunable import find_prunable
from secateur.selection.tiles import Layout
from tests.conftest import Block


def reasons(model: nn.Module, **options: Any) -> dict[str, str]:
    prunables, left_out = find_prunable(model, **options)
    return {prunable.name: "prunable" for prunable in prunables} | {item.name: item.reason for item in left_out}


def test_every_parameter_is_accounted_for(block: Block) -> None:
    found = reasons(block)
    assert found.keys() == {name for name, _ in block.named_parameters()}
    assert found["up.weight"] == found["down.weight"] == "prunable"
    assert found["embedding.weight"] == "embedding"
    assert found["norm.weight"] == found["up.bias"] == "bias, norm or vector"
    assert found["lm_head.weight"] == "head (only=... prunes it)"


def test_tied_weights_count_once_and_say_so(block: Block) -> None:
    block.lm_head.weight = block.embedding.weight
    found = reasons(block)
    assert found["embedding.weight"] == "embedding; tied with lm_head.weight"
    assert "lm_head.weight" not in found
    prunables, _ = find_prunable(block, only=["lm_head"])
    assert [(prunable.name, prunable.tied) for prunable in prunables] == [("lm_head.weight", ("embedding.weight",))]
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared[1].weight = shared[0].weight
    pruner = sc.Pruner(shared, torch.optim.AdamW(shared.parameters()))
    assert pruner.report().prunable == 16
    assert "0.weight is tied with 1.weight and counts once." in str(pruner.report())


def test_convolutions_and_experts() -> None:
    class Experts(nn.Module):
        def __init__(self, is_transposed: bool) -> None:
            super().__init__()
            self.is_transposed = is_transposed
            self.gate_up_proj = nn.Parameter(torch.randn(3, 4, 5))

    model = nn.ModuleDict(
        {
            "one": nn.Conv1d(4, 4, 3),
            "two": nn.Conv2d(4, 4, 3),
            "three": nn.Conv3d(4, 4, 3),
            "turned": nn.ConvTranspose2d(4, 4, 3),
            "experts": Experts(False),
            "oss": Experts(True),
        }
    )
    model.pos_embedding = nn.Parameter(torch.randn(2, 9, 8))
    prunables, _ = find_prunable(model)
    assert {prunable.name: prunable.layout for prunable in prunables} == {
        "one.weight": Layout(),
        "two.weight": Layout(),
        "three.weight": Layout(),
        "experts.gate_up_proj": Layout(rows=(0, 1), inputs=2),
        "oss.gate_up_proj": Layout(rows=(0, 2), inputs=1),
    }
    found = reasons(model)
    assert found["turned.weight"] == "transposed convolution (only=... prunes it)"
    assert found["pos_embedding"] == "table of vectors (only=... prunes it)"


def test_skip_and_only_are_globs(block: Block) -> None:
    assert reasons(block, skip="up")["up.weight"] == "skipped by name"
    assert reasons(block, skip=["*.weight"], only="*")["down.weight"] == "skipped by name"
    found = reasons(block, only=["up*", "lm_head.weight"])
    assert found["up.weight"] == found["lm_head.weight"] == "prunable"
    assert found["down.weight"] == "not named by only"
    with pytest.raises(SiteError, match="No parameter or module matches 'mlp.\\*'. Names look like 'embedding.weight'"):
        find_prunable(block, skip="mlp.*")


def test_frozen_and_unoptimized_weights_stay_out(block: Block) -> None:
    block.up.weight.requires_grad_(False)
    assert reasons(block)["up.weight"] == "frozen (requires_grad is False)"
    with pytest.raises(SiteError, match="Nothing to prune in Block.*not in the optimizer"):
        sc.Pruner(block, torch.optim.AdamW(block.norm.parameters()))


def test_gpt2_of_transformers() -> None:
    """Conv1D is reached, the tied head stays dense, and Conv1D loses the same weights as the Linear it stands for."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    prunables, left_out = find_prunable(model)
    assert len(prunables) == 2 * 4
    assert all(prunable.layout == Layout(rows=(1,), inputs=0) for prunable in prunables)
    assert ("transformer.wte.weight", "embedding; tied with lm_head.weight") in {(i.name, i.reason) for i in left_out}
    turned, plain = transformers.pytorch_utils.Conv1D(6, 8), nn.Linear(8, 6)
    with torch.no_grad():
        plain.weight.copy_(turned.weight.t())
    masks = []
    for layer in (turned, plain):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        pruner = sc.Pruner(layer, optimizer, score="magnitude", sparsity=0.25, every=1, scope="row", only="*")
        layer.weight.grad = torch.zeros_like(layer.weight)
        optimizer.step()
        pruner.step()
        masks.append(pruner.masks["weight"])
    assert torch.equal(masks[0].t(), masks[1])
    assert (~masks[1]).sum(1).tolist() == [2] * 6


def test_mixture_of_experts_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, vocab_size=50,
    )  # fmt: skip
    prunables, left_out = find_prunable(transformers.MixtralForCausalLM(config))
    layouts = {
        prunable.name.rpartition(".")[2]: prunable.layout for prunable in prunables if "experts" in prunable.name
    }
    assert layouts == dict.fromkeys(("gate_up_proj", "down_proj"), Layout(rows=(0, 1), inputs=2))
    assert any(item.name == "lm_head.weight" and item.reason.startswith("head") for item in left_out)


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_names_are_the_users_own_inside_wrappers(wrap: Any, block: Block) -> None:
    wrapped = wrap(block)
    pruner = sc.Pruner(wrapped, torch.optim.AdamW(wrapped.parameters()))
    assert sorted(pruner.masks) == ["down.weight", "up.weight"]
    sc.Pruner(block, torch.optim.AdamW(block.parameters())).load_state_dict(pruner.state_dict())
    for copied in (copy.deepcopy(wrapped), copy.deepcopy(block)):
        pruner.apply_to(copied)


def test_a_stateless_site_is_named(block: Block) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Unused()
    optimizer = torch.optim.AdamW(model.parameters())
    pruner = sc.Pruner(model, optimizer, every=1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(sc.SecateurError, match="no state for 'unused.weight', which has had no gradient yet"):
        pruner.step()


def test_an_optimizer_without_state_is_not_mistaken_for_a_layer_without_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters(), 0.1)]
    pruner = sc.Pruner(model, optimizers, every=1)
    model(torch.randn(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    with pytest.raises(FactError, match="SGD keeps nothing shaped like the weights for '1.weight'") as told:
        pruner.step()
    assert str(told.value).endswith(
        "Scores that work here: bitter1, bitter2, displacement, magnitude, movement, random."
    )


def test_what_only_looks_like_experts() -> None:
    class Stack(nn.Module):
        def __init__(self, leaf: str) -> None:
            super().__init__()
            self.register_parameter(leaf, nn.Parameter(torch.randn(3, 4, 5)))

    class Llama4TextExperts(Stack):
        pass

    model = nn.ModuleDict(
        {
            "normed": nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3)),
            "bilinear": nn.Bilinear(3, 4, 5),
            "composer": Stack("w"),
            "experts": Stack("w"),
            "table": Stack("pos_embed"),
            "llama": Llama4TextExperts("gate_up_proj"),
        }
    )
    prunables, _ = find_prunable(model)
    assert {prunable.name: prunable.layout for prunable in prunables} == {
        "experts.w": Layout(rows=(0, 1), inputs=2),
        "llama.gate_up_proj": Layout(rows=(0, 2), inputs=1),
    }


def test_heads_and_routers_by_the_company_they_keep() -> None:
    def linear(outputs: int = 8) -> nn.Linear:
        return nn.Linear(8, outputs)

    model = nn.ModuleDict(
        {
            "classifier": nn.Sequential(linear(), nn.ReLU(), linear()),
            "qa_outputs": linear(),
            "mixture": nn.ModuleDict(
                {"router": linear(2), "gate": linear(8), "attention": nn.MultiheadAttention(8, 2)}
            ),
        }
    )
    found = reasons(model)
    assert found["classifier.0.weight"] == "prunable"
    assert found["classifier.2.weight"] == found["qa_outputs.weight"] == "head (only=... prunes it)"
    assert found["mixture.router.weight"] == "router (only=... prunes it)"
    assert found["mixture.gate.weight"] == found["mixture.attention.in_proj_weight"] == "prunable"


def test_a_gate_with_more_than_a_quarter_as_many_outputs_is_no_router() -> None:
    found = reasons(nn.ModuleDict({"a": nn.ModuleDict({"gate": nn.Linear(7, 2)}), "b": nn.Linear(4, 4)}))
    assert found["a.gate.weight"] == "prunable"
    found = reasons(nn.ModuleDict({"a": nn.ModuleDict({"gate": nn.Linear(8, 2)}), "b": nn.Linear(4, 4)}))
    assert found["a.gate.weight"] == "router (only=... prunes it)"


def test_names_of_containers_and_of_wrapped_parts() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend="eager"))})
    model["shared"] = model["encoder"][0]
    prunables, _ = find_prunable(model)
    assert {prunable.name: prunable.tied for prunable in prunables} == {
        "encoder.0.weight": ("shared.weight",),
        "encoder.1.weight": (),
    }
    assert reasons(model, skip="encoder")["encoder.1.weight"] == "skipped by name"
    assert reasons(model, skip="shared")["encoder.0.weight"].startswith("skipped by name")
    assert reasons(model, skip=None)["encoder.1.weight"] == "prunable"


def test_empty_weights_and_flattened_ones_are_told_apart() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when it initialises nothing
        model = nn.Sequential(nn.Linear(4, 0), nn.Linear(4, 4))
    assert reasons(model)["0.weight"] == "empty"

    class FullyShardedDataParallel(nn.Module):
        pass

    model.append(FullyShardedDataParallel())
    with pytest.raises(sc.SecateurError, match="Shard with torch's fully_shard"):
        sc.Pruner(model, torch.optim.AdamW(model.parameters()))


class Head(nn.Module):
    """One head of an attention, as in nanoGPT's lecture."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(width, size, bias=False) for _ in range(3))


class Attention(nn.Module):
    def __init__(self, projected: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(8, 4) for _ in range(2))
        if projected:
            self.proj = nn.Linear(8, 8)


class Lecture(nn.Module):
    """Blocks with a list of attention heads each, in a list, in a Sequential, or one attention without blocks."""

    def __init__(self, blocks: int, kind: Any, projected: bool = True) -> None:
        super().__init__()
        made = [nn.ModuleDict({"sa": Attention(projected)}) for _ in range(blocks)]
        if blocks:
            self.blocks = kind(made) if kind is nn.ModuleList else kind(*made)
        else:
            self.sa_heads = Attention(projected)
        self.lm_head = nn.Linear(8, 10)


@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize("projected", [True, False])
def test_heads_of_an_attention_are_not_output_heads(blocks: int, kind: Any, projected: bool) -> None:
    found = reasons(Lecture(blocks, kind, projected))
    assert {name for name, reason in found.items() if reason.startswith("head")} == {"lm_head.weight"}
    assert len([name for name in found if ".heads." in name and found[name] == "prunable"]) == max(1, blocks) * 6


def test_output_heads_are_left_dense_wherever_they_are() -> None:
    def linear() -> nn.Linear:
        return nn.Linear(8, 8)

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(nn.ModuleDict({"body": linear(), "head": linear()}) for _ in range(2))

    def scored(last: str) -> nn.Module:
        blocks = nn.ModuleList(nn.ModuleDict({"score": linear(), "mlp": linear()}) for _ in range(2))
        return nn.ModuleDict({"blocks": blocks, last: linear()})

    cases: list[tuple[nn.Module, set[str]]] = [
        (nn.ModuleDict({"encoder": linear(), "heads": nn.Sequential(linear(), nn.Tanh(), linear())}), {"heads.2"}),
        (nn.ModuleDict({"encoder": linear(), "heads": nn.ModuleList([linear(), linear()])}), {"heads.0", "heads.1"}),
        (nn.ModuleDict({"body": linear(), "head": linear(), "head_dist": linear()}), {"head"}),
        (nn.ModuleDict({"features": linear(), "classifier": nn.Sequential(linear(), linear())}), {"classifier.1"}),
        (nn.ModuleDict({"encoder": linear(), "classifier": linear(), "decoder": linear()}), {"classifier"}),
        (nn.Sequential(linear(), nn.ModuleDict({"head": nn.ModuleDict({"fc": linear()})})), {"1.head.fc"}),
        (Ensemble(), {"members.0.head", "members.1.head"}),
        (scored("score"), {"score"}),
    ]
    for model, heads in cases:
        found = reasons(model)
        assert {name for name, reason in found.items() if reason.startswith("head")} == {f"{n}.weight" for n in heads}


def test_routers_inside_a_module_of_their_own() -> None:
    block = nn.ModuleDict({"router": nn.ModuleDict({"classifier": nn.Linear(32, 4)}), "mlp": nn.Linear(32, 32)})
    found = reasons(nn.ModuleDict({"blocks": nn.ModuleList([block])}))
    assert found["blocks.0.router.classifier.weight"] == "router (only=... prunes it)"


class Odd(nn.Module):
    """Parameters of two and more dimensions that no layer of torch's owns."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"queries": (1, 4, 8), "prompts": (3, 4, 8), "latents": (3, 5, 7), "A_log": (8, 4), "weight": (6, 8)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def test_tables_are_left_out_until_they_are_named() -> None:
    model = nn.ModuleDict({"odd": Odd(), "table": nn.Embedding(9, 8), "layer": nn.Linear(8, 8)})
    ask = "(only=... prunes it)"
    found = reasons(model)
    assert found["layer.weight"] == "prunable"
    assert {name: found[f"odd.{name}"] for name in ("queries", "prompts", "latents", "A_log", "weight")} == {
        "queries": f"table of vectors {ask}",
        "prompts": f"table of vectors {ask}",
        "latents": f"table of vectors {ask}",
        "A_log": f"not known to be a matrix {ask}",
        "weight": f"weight of a custom module {ask}",
    }
    for region in ("*", "*odd*", ["odd", "table*.*", "layer"]):  # a region is asked for its matrices
        prunables, _ = find_prunable(model, only=region)
        assert {"odd.weight"} <= {prunable.name for prunable in prunables} <= {"odd.weight", "layer.weight"}
    for name in ("odd.prompts", "odd.A_log", "*.queries", "table", "table.weight", "*.weight"):
        prunables, _ = find_prunable(model, only=name)
        assert prunables
        assert all(name.strip("*.") in prunable.name for prunable in prunables), name
        assert all(prunable.reason.startswith("named by only") for prunable in prunables)
    assert reasons(model, only="*")["odd.A_log"] == "not known to be a matrix (name it in only=... to prune it)"


def test_stacks_are_known_by_what_their_module_tells() -> None:
    class Bare(nn.Module):
        """Stacks without a word that says so."""

        def __init__(self, **shapes: tuple[int, ...]) -> None:
            super().__init__()
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    counted, linear = Bare(w=(4, 6, 8)), type("GroupedLinear", (Bare,), {})(weight=(2, 8, 6))
    counted.num_experts, linear.in_features = 4, 8
    model = nn.ModuleDict(
        {
            "fused": Bare(gate_up_proj=(4, 12, 8), down_proj=(4, 8, 6)),
            "turned": Bare(a=(4, 8, 12), b=(4, 6, 8)),
            "plain": Bare(w1=(4, 6, 8), w2=(4, 8, 6)),
            "pairs": Bare(keys=(4, 6, 8), values=(4, 6, 8)),
            "counted": counted,
            "linear": linear,
        }
    )
    straight, turned = Layout(rows=(0, 1), inputs=2), Layout(rows=(0, 2), inputs=1)
    prunables, _ = find_prunable(model)
    assert {prunable.name: prunable.layout for prunable in prunables} == {
        "fused.gate_up_proj": straight, "fused.down_proj": straight, "turned.a": turned, "turned.b": turned,
        "plain.w1": straight, "plain.w2": straight, "counted.w": straight, "linear.weight": turned,
    }  # fmt: skip
    assert {prunable.reason for prunable in prunables} == {"experts", "a matrix for each group"}
    assert reasons(model)["pairs.keys"] == "not known to be a matrix (only=... prunes it)"


class Everything(nn.Module):
    """Every kind of weight that is pruned when `only` asks for it, each used once on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.cell = nn.GRUCell(8, 8)
        self.up = nn.ConvTranspose1d(8, 8, 4, groups=2)
        self.mixed = nn.Bilinear(8, 8, 8)
        self.custom = Odd()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.last = nn.Linear(6, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        state, _ = self.lstm(self.embedding(tokens))
        state = self.up(state.transpose(1, 2))[..., : tokens.shape[1]].transpose(1, 2)
        state = self.cell(self.mixed(state, state).flatten(0, 1)).unflatten(0, tokens.shape)
        prompts = self.custom.prompts.mean((0, 1)) + self.custom.queries.mean((0, 1))
        state = torch.tanh(self.spectral(self.normed(state)) + prompts)
        return self.last(nn.functional.linear(state, self.custom.weight)).mean(1)


ASKED = (
    "embedding", "lstm", "cell", "up", "mixed", "custom.weight", "custom.prompts", "normed", "spectral.weight",
)  # fmt: skip


def batches_of_tokens() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randint(0, 12, (4, 6), generator=draw), torch.arange(4)) for _ in range(3)]


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("settings", [{}, {"scope": "row"}, {"pattern": "2:4", "sparsity": None}], ids=str)
def test_only_asks_for_any_weight(name: str, settings: dict[str, Any]) -> None:
    model = Everything()
    report = sc.prune(model, batches_of_tokens(), only=name, **settings)
    assert report.sparsity == pytest.approx(0.5, abs=0.01)
    assert all(row.reason.startswith("named by only") for row in report.tensors)
    assert "Pruned, named by only" in str(report)
    for key, mask in report.masks.items():
        assert bool((model.get_parameter(key)[~mask] == 0).all())
    if name in ("normed", "spectral.weight"):  # the weight that is used has the same zeros
        made = model.get_submodule(name.removesuffix(".weight")).weight
        assert torch.equal(made == 0, ~next(iter(report.masks.values())))


@pytest.mark.parametrize("name", ["lstm", "up", "embedding", "normed"])
def test_only_works_in_training_too(name: str) -> None:
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, optimizer, sparsity=0.5, every=1, only=name)
    for tokens, targets in batches_of_tokens():
        nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    assert pruner.sparsity == pytest.approx(0.5, abs=0.01)
    if name == "normed":
        assert int((model.normed.weight == 0).sum()) == pruner.report().pruned


def test_rows_of_a_transposed_convolution_are_its_outputs() -> None:
    """Scope and pattern in [inputs, outputs of a group, kernel] are those in the convolution it stands for."""
    groups, draw = 2, torch.randn(8, 3, 5)  # 8 inputs in two groups, 6 outputs
    turned = nn.ConvTranspose1d(8, 6, 5, groups=groups)
    plain = nn.Conv1d(8, 6, 5, groups=groups)
    for settings in ({"scope": "row", "sparsity": 0.4}, {"pattern": "2:4", "sparsity": None}):
        with torch.no_grad():
            turned.weight.copy_(draw)
            plain.weight.copy_(draw.unflatten(0, (groups, 4)).transpose(1, 2).reshape(6, 4, 5))
        masks = []
        for layer in (turned, plain):
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
            pruner = sc.Pruner(layer, optimizer, score="magnitude", every=1, only="*", **settings)
            layer.weight.grad = torch.zeros_like(layer.weight)
            optimizer.step()
            pruner.step()
            masks.append(pruner.masks["weight"])
        assert torch.equal(masks[0].unflatten(0, (groups, 4)).transpose(1, 2).reshape(6, 4, 5), masks[1])
    with pytest.raises(PatternError, match="cannot be tiled by '4:8'"):  # eight inputs, but four of a group
        sc.Pruner(turned, torch.optim.SGD(turned.parameters()), pattern="4:8", sparsity=None, only="*")


def test_a_parametrization_that_does_not_keep_zeros_is_refused() -> None:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).mT

    model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 4))
    nn.utils.parametrize.register_parametrization(model[2], "weight", Symmetric())
    for name, kind in (("1.weight", "_Orthogonal"), ("2", "Symmetric")):
        with pytest.raises(SiteError, match=f"its parametrization \\({kind}\\) does not keep zeros"):
            find_prunable(model, only=name)
    found = reasons(model, only="*")
    assert found["1.parametrizations.weight.original"] == "its parametrization (_Orthogonal) does not keep zeros"
    assert found["0.weight"] == "prunable"
    assert reasons(model)["1.parametrizations.weight.original"] == "parametrized (only=... prunes it)"


def test_looking_at_a_parametrization_changes_nothing() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)).train()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    prunables, _ = find_prunable(layer, only="weight")
    assert [prunable.name for prunable in prunables] == ["parametrizations.weight.original"]
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert all(module.training for module in layer.modules())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_older_reparametrizations() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.utils.spectral_norm(nn.Conv1d(8, 8, 3)))
    assert set(reasons(model).values()) == {"bias, norm or vector", "parametrized (only=... prunes it)"}
    prunables, _ = find_prunable(model, only="*")
    assert [prunable.name for prunable in prunables] == ["0.weight_v", "1.weight_orig"]


@pytest.mark.parametrize("name", ["embedding", "lstm", "up", "mixed", "normed"])
def test_inputs_nobody_sees_are_an_error_that_says_what_works(name: str) -> None:
    with pytest.raises(FactError, match="use a score that reads gradients"):
        sc.prune(Everything(), batches_of_tokens(), score="wanda", only=name)


def test_sparsegpt_refuses_transposed_convolutions() -> None:
    with pytest.raises(PatternError, match="'sparsegpt' cannot prune 'up.weight'"):
        sc.prune(Everything(), batches_of_tokens(), method="sparsegpt", only="up")
    report = sc.prune(Everything(), batches_of_tokens(), method="sparsegpt", only=["lstm", "last"])
    assert report.sparsity == pytest.approx(0.5, abs=0.01)


def small_vision() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 10), nn.Linear(10, 4),
    )  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"score": "wanda"}, {"method": "sparsegpt"}], ids=str)
def test_a_pattern_leaves_out_what_cannot_take_it(settings: dict[str, Any]) -> None:
    images = [(torch.randn(4, 3, 8, 8), torch.arange(4)) for _ in range(3)]
    model = small_vision()
    report = sc.prune(model, images, pattern="2:4", sparsity=None, **settings)
    convolution = {"2.weight"} if "method" not in settings else set()  # SparseGPT's columns are no channels
    assert {row.name for row in report.tensors} == {"6.weight"} | convolution
    assert report.sparsity == 0.5
    left = {name: reason for name, _, reason in report.left_out}
    assert left["7.weight"] == "its shape does not divide into 2:4; sparsity counts the other layers"
    assert "sparsity counts the other layers" in left["0.weight"]
    assert "does not divide into 2:4" in str(report)
    assert bool((model[0].weight != 0).all())
    with pytest.raises(PatternError, match="'0.weight' of shape .* cannot be tiled by '2:4'"):
        sc.prune(small_vision(), images, pattern="2:4", sparsity=None, only=["0", "2"])


def test_the_probe_and_the_pruner_leave_out_what_cannot_take_a_pattern() -> None:
    images = [(torch.randn(4, 3, 8, 8), torch.arange(4)) for _ in range(3)]
    report = sc.probe(small_vision(), images, pattern="2:4", sparsity=None, exact=True)
    assert [row.name for row in report.tensors] == ["2.weight", "6.weight"]
    model = small_vision()
    optimizer = torch.optim.AdamW(model.parameters())
    pruner = sc.Pruner(model, optimizer, pattern="block:4x4", sparsity=0.5)
    assert sorted(pruner.masks) == ["2.weight"]
    assert "Left dense, its shape does not divide into block:4x4" in str(pruner.report())
    with pytest.raises(SiteError, match="Nothing to prune in Sequential.*does not divide into 7:11"):
        sc.Pruner(model, optimizer, pattern="7:11", sparsity=None)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("settings", [{}, {"score": "magnitude", "scope": "model"}, {"rounds": 2, "reconstruct": True}])
def test_no_row_of_a_weight_norm_goes_whole(norm: Any, settings: dict[str, Any]) -> None:
    model = nn.Sequential(norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].bias[0] = -100  # a dead unit, whose weights go first
    batches = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(4)]
    report = sc.prune(model, batches, sparsity=0.7, only="*", **settings)
    assert report.pruned == round(0.7 * report.prunable)
    assert bool(model(batches[0][0]).isfinite().all())
    direction = next(mask for name, mask in report.masks.items() if name.startswith("0."))
    assert bool(direction.any(1).all())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("settings", "inputs"),
    [({"sparsity": 0.98, "scope": "layer"}, 32), ({"sparsity": 0.9, "scope": "row"}, 4), ({"sparsity": None}, 32)],
)
def test_masks_that_leave_a_row_of_weight_norm_empty_are_refused(
    norm: Any, dim: int, settings: dict[str, Any], inputs: int
) -> None:
    model = nn.Sequential(norm(nn.Linear(inputs, 64), dim=dim))
    name = next(name for name, p in model.named_parameters() if p.shape == (64, inputs))
    if settings["sparsity"] is None:
        kept = torch.ones(64, inputs, dtype=torch.bool)
        kept.select(dim, 3).fill_(False)
        settings = {**settings, "masks": {name: kept}}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        pruner = sc.Pruner(model, optimizer, every=1, only="*", **settings)
        model(torch.randn(8, inputs)).square().mean().backward()
        optimizer.step()
        pruner.step()

    if dim == 1 and settings.get("scope") == "layer":  # 41 weights are enough for one in each of 32 columns
        step()
    else:
        with pytest.raises(SiteError, match="nothing would be left of some of its rows.*No mask was changed"):
            step()
    assert bool(model(torch.randn(8, inputs)).isfinite().all())


@pytest.mark.parametrize("layer", [nn.Conv1d(1, 64, 3), nn.Conv1d(64, 64, 3, groups=64), nn.Linear(4, 64)])
def test_short_rows_of_weight_norm_keep_their_zeros(layer: nn.Module) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(layer))
    found, _ = find_prunable(model, only="0")
    assert [prunable.fragile[0] for prunable in found] == [0]  # a single column is the whole tensor, and fragile too


def test_names_that_are_none_are_refused() -> None:
    with pytest.raises(SiteError, match="must be names or globs"):
        find_prunable(nn.Linear(4, 4), only=3)  # type: ignore[arg-type]
    with pytest.raises(SiteError, match="It has no parameters"):
        sc.prune(nn.Sequential(nn.ReLU()), [(torch.randn(2, 4), torch.zeros(2, 4))])
