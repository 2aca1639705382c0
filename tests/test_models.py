"""Models of Hugging Face of every kind: found, measured, pruned and repaired without knowing their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import secateur as sc
from secateur.model.prunable import find_prunable
from secateur.oneshot.activations import InputStatistics, gather_inputs
from secateur.oneshot.batches import in_bf16, standard_loss
from secateur.oneshot.blocks import find_blocks
from secateur.oneshot.calibration import CalibratedModel
from tests import tiny

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.randint(0, 60, (4, 12), generator=torch.Generator().manual_seed(1))


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=64,
    )  # fmt: skip
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def causal(kind: str) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=32, vocab_size=64)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, vocab_size=64
    )
    return transformers.BertForMaskedLM(config)


def resnet() -> Any:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def batches(name: str) -> Any:
    if name == "bert":
        return [{"input_ids": row, "labels": row} for row in IDS.split(2)]
    if name == "resnet":
        draw = torch.Generator().manual_seed(0)
        return [
            {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw), "labels": torch.tensor([0, 3])} for _ in "ab"
        ]
    return IDS


MODELS = {
    "llama": lambda: causal("Llama"), "qwen3": lambda: causal("Qwen3"), "gemma2": lambda: causal("Gemma2"),
    "gpt2": gpt2, "mixtral": mixtral, "bert": bert, "resnet": resnet,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"score": "wanda"},
        {"rounds": 2},
        {"score": "wanda", "reconstruct": True},
        {"method": "sparsegpt"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_kind_is_pruned_exactly(name: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    cache = getattr(model.config, "use_cache", None)
    report = sc.prune(model, batches(name), **settings)
    if report.scope == "model":
        assert report.pruned == round(0.5 * report.prunable)
    assert report.sparsity == pytest.approx(0.5, abs=0.02)
    for weight, mask in ((model.get_parameter(key), mask) for key, mask in report.masks.items()):
        assert bool((weight[~mask] == 0).all())
        assert bool(weight.isfinite().all())
    assert getattr(model.config, "use_cache", None) == cache


@pytest.mark.parametrize("name", [name for name in MODELS if name != "resnet"])
def test_blocks_are_found_by_watching(name: str) -> None:
    model = MODELS[name]()
    prunables, _ = find_prunable(model)
    first = batches(name)
    first = first[:1] if isinstance(first, torch.Tensor) else first[0]
    assert len(find_blocks(model, first, standard_loss, prunables)) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "bert"])
def test_the_probe_of_every_kind(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    report = sc.probe(model, batches(name), order="reverse", group="block", tolerance=0.5)
    assert 0 < report.sparsity <= 0.5


def test_experts_without_tokens_are_not_taken_for_useless() -> None:
    torch.manual_seed(0)
    model = mixtral()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # all experts alike: the same two are taken for every token
    prunables, _ = find_prunable(model, only="*experts*")
    seen = InputStatistics(prunables)
    gather_inputs(model, [IDS], seen, forward=standard_loss)
    report = sc.prune(model, IDS, sparsity=0.3, only="*experts*")
    for prunable in prunables:
        idle = seen.tokens[prunable.name] == 0
        assert int(idle.sum()) == 2
        assert bool(report.masks[prunable.name][idle].all())
    assert any("No inputs reached" in note and "100% of them" in note for note in report.notes)
    assert report.pruned == round(0.3 * report.prunable)


@pytest.mark.parametrize("scope", ["model", "layer"])
def test_idle_experts_do_not_take_all_that_is_kept(scope: str) -> None:
    torch.manual_seed(0)
    model = mixtral()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # two experts of four have no tokens: half of the weights
    report = sc.prune(model, IDS, sparsity=0.6, only="*experts*", scope=scope)
    assert report.pruned == round(0.6 * report.prunable)
    busy = idle = 0.0
    for mask in report.masks.values():
        used = mask.flatten(1).float().mean(1).sort().values
        busy, idle = (
            busy + float(used[:2].mean()) / len(report.masks),
            idle + float(used[2:].mean()) / len(report.masks),
        )
    assert busy == pytest.approx(0.2, abs=0.01)  # half of what is kept at 60 %
    assert idle == pytest.approx(0.6, abs=0.01)


def test_tied_heads_are_left_alone_and_context_is_free() -> None:
    model = gpt2()
    report = sc.prune(model, IDS[:, :7])
    assert model.lm_head.weight is model.transformer.wte.weight
    assert bool((model.lm_head.weight != 0).all())
    assert not any("wte" in row.name for row in report.tensors)


def test_swift_gradients_are_nearly_those_of_fp32() -> None:
    model = tiny.llama(hidden_size=64, intermediate_size=96)
    places = [(p.data_ptr(), p.dtype) for p in model.parameters()]
    batches = list(torch.randint(0, 97, (6, 12), generator=torch.Generator().manual_seed(0)).split(2))
    calibrated = CalibratedModel(model, batches)
    exact = calibrated.gradients({"exp_avg_sq"})
    calibrated.autocast, calibrated.loss = True, in_bf16(standard_loss)  # as it is on a GPU
    rough = calibrated.gradients({"exp_avg_sq"})
    for name, facts in exact.items():
        a, b = facts["exp_avg_sq"], rough[name]["exp_avg_sq"]
        assert b.dtype == torch.float32
        assert float((a.sqrt() - b.sqrt()).norm() / a.sqrt().norm()) < 0.02, name
    assert [(p.data_ptr(), p.dtype) for p in model.parameters()] == places
    assert all(p.grad is None for p in model.parameters())


MIXTURES = {
    "Mixtral": {}, "Qwen2Moe": {}, "Qwen3Moe": {}, "DeepseekV2": {"first_k_dense_replace": 0}, "Olmoe": {},
    "DeepseekV3": {"first_k_dense_replace": 0}, "GptOss": {}, "Llama4": {}, "GraniteMoe": {}, "Jamba": {}, "Phimoe": {},
    "JetMoe": {}, "Glm4Moe": {"first_k_dense_replace": 0}, "Ernie4_5_Moe": {}, "NemotronH": {},
    "Aria": {},
}  # fmt: skip


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_of_every_family_are_found_and_lie_as_they_are_used(family: str) -> None:
    text = family in ("Llama4", "Aria")
    kind = getattr(transformers, f"{family}TextConfig" if text else f"{family}Config")
    config = kind(**MIXTURES[family])
    config.num_hidden_layers = 4
    with torch.device("meta"):
        model = getattr(transformers, f"{family}TextForCausalLM" if family == "Aria" else f"{family}ForCausalLM")(
            config
        )
    stacks = {name: p for name, p in model.named_parameters() if p.ndim == 3 and "conv" not in name}
    found = {prunable.name: prunable for prunable in find_prunable(model)[0]}
    assert stacks
    assert stacks.keys() <= found.keys()
    for name, stack in stacks.items():
        layout = found[name].layout
        out = any(word in name for word in ("down_proj", "output_linear"))
        assert stack.shape[layout.rows[-1] if out else layout.inputs] == config.hidden_size, name
        assert found[name].reason == "experts"
    assert not any("router" in name or name.endswith(".gate.weight") for name in found)


def vit() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    return transformers.ViTForImageClassification(config)


@pytest.mark.parametrize(("make", "first"), [(resnet, "embedder"), (vit, "patch_embeddings")])
@pytest.mark.parametrize("settings", [{}, {"score": "wanda"}, {"reconstruct": True}], ids=str)
def test_patterns_on_vision_models_skip_the_first_convolution(make: Any, first: str, settings: dict[str, Any]) -> None:
    model = make()
    report = sc.prune(model, batches("resnet"), pattern="2:4", sparsity=None, **settings)
    assert report.sparsity == 0.5
    left = [name for name, _, reason in report.left_out if "does not divide into 2:4" in reason]
    assert len(left) == 1
    assert first in left[0]
    assert bool((model.get_parameter(left[0]) != 0).all())
    weight = model.get_parameter(report.tensors[-1].name)
    assert bool(((weight.unflatten(1, (-1, 4)) != 0).sum(2) <= 2).all())
