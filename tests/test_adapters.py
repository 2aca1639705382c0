"""Models with adapters of PEFT: the adapters stay dense, and the layers of the base model are found behind them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import secateur as sc
from secateur.errors import SiteError
from secateur.model.prunable import find_prunable
from tests import tiny

peft = pytest.importorskip("peft", reason="peft is not installed")


def adapters() -> dict[str, Any]:
    causal: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    return {
        "lora": peft.LoraConfig(target_modules=["q_proj", "lm_head"], **causal),
        "embedding": peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], **causal),
        "dora": peft.LoraConfig(target_modules="all-linear", use_dora=True, modules_to_save=["lm_head"], **causal),
        "loha": peft.LoHaConfig(target_modules=["q_proj"], **causal),
        "adalora": peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, **causal),
        "ia3": peft.IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"], **causal),
        "oft": peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4, **causal),
        "tokens": peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2], **causal),
        "prefix": peft.PrefixTuningConfig(num_virtual_tokens=3, **causal),
        "prompt": peft.PromptTuningConfig(num_virtual_tokens=3, **causal),
    }


ADAPTED = ["lora", "embedding", "dora", "loha", "adalora", "ia3", "oft", "tokens", "prefix", "prompt"]


def adapted(kind: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about its own settings
        return peft.get_peft_model(tiny.llama(), adapters()[kind])


def without_peft(name: str) -> str:
    """The name a parameter had before PEFT; with prefix and prompt tuning the base is not wrapped twice."""
    return "model.layers." + name.partition("layers.")[2].replace(".base_layer", "")


@pytest.mark.parametrize("kind", ADAPTED)
def test_the_adapters_of_peft_stay_dense_and_the_base_is_found(kind: str) -> None:
    expected = [prunable.name for prunable in find_prunable(tiny.llama())[0]]
    model = adapted(kind)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    found, left_out = find_prunable(model)
    assert sorted(without_peft(prunable.name) for prunable in found) == sorted(expected)
    told = {item.name: item.reason for item in left_out}
    assert trained
    for name in trained:
        assert told[name].startswith(
            "PEFT adapter" if "modules_to_save" not in name else "copy of a layer that PEFT"
        ), name


@pytest.mark.parametrize("kind", ADAPTED)
def test_a_frozen_base_is_an_error_that_says_what_to_do(kind: str) -> None:
    model = adapted(kind)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    with pytest.raises(SiteError, match=r"Nothing to prune.*base model is frozen.*sc\.prune first.*peft\.keep_zeros"):
        sc.Pruner(model, optimizer)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "prompt"])
@pytest.mark.parametrize("how", ["prune", "probe"])
def test_pruning_after_training_prunes_the_base_of_a_peft_model(how: str, kind: str) -> None:
    model = adapted(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.randint(1, 90, (4, 12))
    work = sc.prune if how == "prune" else sc.probe
    report = work(model, [{"input_ids": tokens, "labels": tokens}], sparsity=0.5)
    expected = sum(one.parameter.numel() for one in find_prunable(tiny.llama())[0])
    assert report.prunable == expected
    assert report.pruned == round(0.5 * expected) if how == "prune" else 0 < report.pruned <= round(0.5 * expected)
    adapter = [name for name, _, reason in report.left_out if reason.startswith(("PEFT adapter", "copy of a layer"))]
    assert adapter
    for name, tensor in model.state_dict().items():
        kept = report.masks[name] if name in report.masks else torch.ones_like(tensor, dtype=torch.bool)
        assert torch.equal(tensor, before[name] * kept), name


def test_adapters_are_pruned_only_by_their_own_name() -> None:
    model = adapted("lora")
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    with pytest.raises(SiteError, match="Nothing to prune"):
        sc.Pruner(model, optimizer, only="*self_attn*")
    pruner = sc.Pruner(model, optimizer, only="*.lora_A.default")
    assert all("lora_A" in name for name in pruner.masks)
    assert len(pruner.masks) == 3


def test_names_without_peft_match_globs() -> None:
    model = adapted("lora").requires_grad_(True)
    found, _ = find_prunable(model, only="model.layers.0.self_attn.q_proj")
    assert [one.name for one in found] == ["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"]
