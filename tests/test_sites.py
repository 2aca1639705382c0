"""Which tensors are prunable and why the others are not, on our own modules and on those of transformers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import SiteError
from secateur.sites import find_sites
from secateur.tiles import Layout
from tests.conftest import Block


def reasons(model: nn.Module, **options: Any) -> dict[str, str]:
    sites, left_out = find_sites(model, **options)
    return {site.name: "site" for site in sites} | {item.name: item.reason for item in left_out}


def test_every_parameter_is_accounted_for(block: Block) -> None:
    found = reasons(block)
    assert found.keys() == {name for name, _ in block.named_parameters()}
    assert found["up.weight"] == found["down.weight"] == "site"
    assert found["embedding.weight"] == "embedding"
    assert found["norm.weight"] == found["up.bias"] == "bias, norm or vector"
    assert found["lm_head.weight"] == "head (only=... prunes it)"


def test_tied_weights_count_once_and_say_so(block: Block) -> None:
    block.lm_head.weight = block.embedding.weight
    found = reasons(block)
    assert found["embedding.weight"] == "embedding; tied with lm_head.weight"
    assert "lm_head.weight" not in found
    sites, _ = find_sites(block, only=["lm_head"])
    assert [(site.name, site.tied) for site in sites] == [("lm_head.weight", ("embedding.weight",))]
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
    sites, _ = find_sites(model)
    assert {site.name: site.layout for site in sites} == {
        "one.weight": Layout(),
        "two.weight": Layout(),
        "three.weight": Layout(),
        "experts.gate_up_proj": Layout(rows=(0, 1), inputs=2),
        "oss.gate_up_proj": Layout(rows=(0, 2), inputs=1),
    }
    found = reasons(model)
    assert found["turned.weight"] == found["pos_embedding"] == "not a kind of weight we prune"


def test_skip_and_only_are_globs(block: Block) -> None:
    assert reasons(block, skip="up")["up.weight"] == "skipped by name"
    assert reasons(block, skip=["*.weight"], only="*")["down.weight"] == "skipped by name"
    found = reasons(block, only=["up*", "lm_head.weight"])
    assert found["up.weight"] == found["lm_head.weight"] == "site"
    assert found["down.weight"] == "not named by only"
    with pytest.raises(SiteError, match="No parameter or module matches 'mlp.\\*'. Names look like 'embedding.weight'"):
        find_sites(block, skip="mlp.*")


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
    sites, left_out = find_sites(model)
    assert len(sites) == 2 * 4
    assert all(site.layout == Layout(rows=(1,), inputs=0) for site in sites)
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
    sites, left_out = find_sites(transformers.MixtralForCausalLM(config))
    layouts = {site.name.rpartition(".")[2]: site.layout for site in sites if "experts" in site.name}
    assert layouts == dict.fromkeys(("gate_up_proj", "down_proj"), Layout(rows=(0, 1), inputs=2))
    assert any(item.name == "lm_head.weight" and item.reason.startswith("head") for item in left_out)


def test_names_are_the_users_own_inside_wrappers(block: Block) -> None:
    compiled = torch.compile(block, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters())
    assert sorted(sc.Pruner(compiled, optimizer).masks) == ["down.weight", "up.weight"]


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
            "table": Stack("pos_embed"),
            "llama": Llama4TextExperts("gate_up_proj"),
        }
    )
    sites, _ = find_sites(model)
    assert {site.name: site.layout for site in sites} == {
        "composer.w": Layout(rows=(0, 1), inputs=2),
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
    assert found["classifier.0.weight"] == "site"
    assert found["classifier.2.weight"] == found["qa_outputs.weight"] == "head (only=... prunes it)"
    assert found["mixture.router.weight"] == "router (only=... prunes it)"
    assert found["mixture.gate.weight"] == found["mixture.attention.in_proj_weight"] == "site"


def test_a_gate_with_more_than_a_quarter_as_many_outputs_is_no_router() -> None:
    found = reasons(nn.ModuleDict({"a": nn.ModuleDict({"gate": nn.Linear(7, 2)}), "b": nn.Linear(4, 4)}))
    assert found["a.gate.weight"] == "site"
    found = reasons(nn.ModuleDict({"a": nn.ModuleDict({"gate": nn.Linear(8, 2)}), "b": nn.Linear(4, 4)}))
    assert found["a.gate.weight"] == "router (only=... prunes it)"


def test_names_of_containers_and_of_wrapped_parts() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend="eager"))})
    model["shared"] = model["encoder"][0]
    sites, _ = find_sites(model)
    assert {site.name: site.tied for site in sites} == {
        "encoder.0.weight": ("shared.weight",),
        "encoder.1.weight": (),
    }
    assert reasons(model, skip="encoder")["encoder.1.weight"] == "skipped by name"
    assert reasons(model, skip="shared")["encoder.0.weight"].startswith("skipped by name")
    assert reasons(model, skip=None)["encoder.1.weight"] == "site"


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
