"""LoRA on pruned models: the base's zeros survive training, merging, saving and loading, with the real PEFT."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

pytest.importorskip("peft", reason="adapters need peft, which is not installed")

import peft
from peft import LoraConfig, PeftModel, get_peft_model

from secateur.errors import ModelError, SecateurError
from secateur.integrations import masked_lora as kept
from secateur.integrations.peft import keep_zeros, load
from tests import tiny

IDS = torch.arange(24).view(3, 8) % 90
DENSE = ("embed", "lm_head", "wte", "wpe", "norm", "ln_")


class Convolutions(nn.Module):
    """Every convolution that PEFT adapts, with the settings that its own product of two convolutions ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Conv2d(3, 6, 3, stride=2, padding=1, padding_mode="circular")
        self.point = nn.Conv2d(6, 4, 1)
        self.one = nn.Conv1d(4, 5, 3, padding=1)
        self.three = nn.Conv3d(1, 2, (1, 3, 1))
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(torch.relu(self.two(x)))
        x = torch.relu(self.one(x.flatten(2)))
        x = self.three(x[:, None, None])
        return torch.as_tensor(self.head(x.mean((2, 3, 4))))


def halved(model: Any) -> Any:
    """Half of the weights of every matrix set to zero, except embeddings and the head of language models."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and not any(part in name for part in DENSE):
                flat = weight.view(-1)
                flat[torch.randperm(flat.numel())[: flat.numel() // 2]] = 0
    return model


MODELS: dict[str, Any] = {
    "llama": (tiny.llama, ["q_proj", "v_proj", "up_proj", "down_proj"], IDS),
    "gpt2": (tiny.gpt2, ["c_attn", "c_proj", "c_fc"], IDS),
    "convolutions": (Convolutions, ["two", "point", "one", "three", "head"], torch.randn(2, 3, 8, 8)),
}


def pruned(name: str = "llama", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return halved(MODELS[name][0]())


def adapted(name: str = "llama", filled: bool = True, **settings: Any) -> Any:
    """A pruned model with an adapter whose B is not zero, as after training."""
    config = {"target_modules": MODELS[name][1], "r": 4, "fan_in_fan_out": name == "gpt2", **settings}
    model = get_peft_model(pruned(name), LoraConfig(**config))
    return fill(model) if filled else model


def fill(model: Any, adapter: str = "default") -> Any:
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name and adapter in name:
            nn.init.normal_(weight, std=0.3)
    return model


def output(model: Any, name: str = "llama") -> Tensor:
    found = model(MODELS[name][2])
    return torch.as_tensor(getattr(found, "logits", found))


def zeros(model: nn.Module) -> dict[str, Tensor]:
    """Where the matrices are zero, under the names they have without adapters."""
    named = model.named_parameters()
    plain = {name.replace("base_model.model.", "").replace(".base_layer", ""): w for name, w in named if w.ndim > 1}
    return {name: w == 0 for name, w in plain.items() if "lora_" not in name and not any(p in name for p in DENSE)}


def sparsity(model: nn.Module) -> float:
    found = torch.cat([mask.flatten() for mask in zeros(model).values()])
    return float(found.double().mean())


def bits(model: nn.Module) -> dict[str, Tensor]:
    """The bits of all tensors of a model: -0.0 and 0.0 differ."""
    return {name: value.clone().view(torch.int32) for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def masked(model: Any) -> dict[str, Any]:
    return {name: one for name, one in model.named_modules() if isinstance(one, kept.MaskedLayer)}


# Merging


@pytest.mark.parametrize("name", MODELS)
def test_plain_lora_fills_the_zeros(name: str) -> None:
    model = adapted(name)
    assert sparsity(model) == pytest.approx(0.5, abs=0.01)
    merged = model.merge_and_unload()
    adapted_alone = [mask for key, mask in zeros(merged).items() if key.split(".")[-2] in MODELS[name][1]]
    assert adapted_alone
    assert not any(bool(mask.any()) for mask in adapted_alone)


@pytest.mark.parametrize("safe", [False, True], ids=["plain", "safe"])
@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_has_the_zeros_of_the_base_and_its_outputs(name: str, safe: bool) -> None:
    model = keep_zeros(adapted(name)).eval()
    before, expected = zeros(model), output(model, name)
    assert off(expected, output(adapted(name).eval(), name)) > 1e-3  # the mask changes what the adapter does
    with torch.no_grad():
        exact = output(model, name)
    merged = model.merge_and_unload(safe_merge=safe)
    assert same(zeros(merged), before)
    with torch.no_grad():
        assert torch.equal(output(merged, name), exact)
    assert sparsity(merged) == pytest.approx(0.5, abs=0.01)
    assert off(output(merged, name), expected) < 1e-6  # float32, summed in another order


@pytest.mark.parametrize("name", MODELS)
def test_unmerging_restores_the_base_to_the_bit(name: str) -> None:
    model = keep_zeros(adapted(name, lora_bias=name == "gpt2"))
    weight = next(iter(masked(model).values())).get_base_layer().weight
    with torch.no_grad():
        weight[weight == 0] = -0.0
    before = bits(model)
    for safe in (False, True, False):
        model.merge_adapter(safe_merge=safe)
        assert not same(bits(model), before)
        model.unmerge_adapter()
        assert same(bits(model), before)
    assert all(layer.before_merge is None for layer in masked(model).values())


def test_a_weight_that_becomes_zero_by_chance_is_not_taken_for_a_pruned_one() -> None:
    model = keep_zeros(adapted())
    layer = next(iter(masked(model).values()))
    weight, expected = layer.get_base_layer().weight, layer.zeros()
    row, column = (~expected).nonzero()[0]
    with torch.no_grad():
        weight[row, column] = -layer.get_delta_weight("default")[row, column]
    delta = layer.get_delta_weight("default")
    model.merge_adapter()
    assert weight[row, column] == 0
    assert torch.equal(layer.zeros(), expected)
    assert torch.equal(layer.get_delta_weight("default"), delta)
    model.unmerge_adapter()
    assert weight[row, column] == -delta[row, column]


def test_a_broken_adapter_leaves_the_base_as_it_was() -> None:
    model = keep_zeros(adapted())
    layer = next(iter(masked(model).values()))
    before = layer.get_base_layer().weight.clone()
    with torch.no_grad():
        layer.lora_B["default"].weight[0] = torch.inf
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layer.get_base_layer().weight, before)
    layer.merge()
    assert bool((layer.get_base_layer().weight[before == 0] == 0).all())  # infinity times zero would be NaN
    layer.unmerge()
    assert torch.equal(layer.get_base_layer().weight, before)


def test_a_merge_that_fails_halfway_is_undone() -> None:
    with pytest.warns(UserWarning, match="has no bias"):
        model = keep_zeros(adapted(target_modules=["q_proj"], lora_bias=True))
    before = [layer.get_base_layer().weight.clone() for layer in masked(model).values()]
    with pytest.raises(RuntimeError, match="base layer has no bias"):
        model.merge_adapter()
    for layer, weight in zip(masked(model).values(), before, strict=True):
        assert torch.equal(layer.get_base_layer().weight, weight)
        assert not layer.merged


def test_merging_is_right_in_bfloat16() -> None:
    model = keep_zeros(adapted().to(torch.bfloat16)).eval()
    before, expected = zeros(model), output(model)
    with torch.no_grad():
        exact = output(model)
    assert expected.dtype == exact.dtype == torch.bfloat16
    merged = model.merge_and_unload()
    assert same(zeros(merged), before)
    assert torch.equal(output(merged), exact)
    assert off(exact, expected) < 0.05  # merging rounds W + delta to 8 bits
    model = get_peft_model(pruned().to(torch.bfloat16), LoraConfig(target_modules=["q_proj"]))
    assert next(w for name, w in model.named_parameters() if "lora_A" in name).dtype == torch.float32
    keep_zeros(fill(model))
    output(model).sum().backward()
    before = zeros(model)
    assert same(zeros(model.merge_and_unload()), before)


# Training


def dropped(x: Tensor, share: float) -> Tensor:
    torch.manual_seed(7)
    return F.dropout(x, share)


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "dense"])
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_a_layer_computes_its_definition(transposed: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """base(x) + dropout(x) @ (mask * scaling * B A).T, with rslora, a bias of the adapter, and rows in parts."""
    monkeypatch.setattr(kept, "PART", 40)
    name, target = ("gpt2", "c_attn") if transposed else ("llama", "q_proj")
    model = adapted(name, target_modules=[target], lora_dropout=0.3, use_rslora=True, lora_bias=transposed)
    keep_zeros(model, recompute=recompute).double()
    layer = next(iter(masked(model).values()))
    assert len(list(kept._parts(layer.matrix(layer.get_base_layer().weight)))) > 3
    base, a, b = layer.get_base_layer(), layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    weight = base.weight.t() if transposed else base.weight
    delta = torch.where(weight == 0, 0, 8 / 2 * b @ a)
    expected = base(x) + dropped(x, 0.3) @ delta.t()
    if transposed:
        expected = expected + 8 / 2 * layer.lora_B["default"].bias
    torch.manual_seed(7)
    found = layer(x)
    assert off(found, expected) < 1e-12
    goal = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * goal).sum(), (x, a, b))
    for gradient, right in zip(torch.autograd.grad((found * goal).sum(), (x, a, b)), wanted, strict=True):
        assert off(gradient, right) < 1e-12


@pytest.mark.parametrize("add", [False, True], ids=["adapter alone", "with the base"])
@pytest.mark.parametrize("part", [1, 12, 1 << 20])
def test_gradients_are_exact(part: int, add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "PART", part)
    torch.manual_seed(0)
    weight = torch.randn(5, 4, dtype=torch.float64) * (torch.rand(5, 4) < 0.5)
    shapes = [(2, 3, 4), (5,), (2, 4), (5, 2)]
    x, bias, a, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)

    def run(x: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        return torch.as_tensor(kept._MaskedLinear.apply(x, weight, bias, a, b, add))

    assert torch.autograd.gradcheck(run, (x, bias, a, b))
    assert torch.autograd.gradcheck(run, (x, None, a, b))
    assert torch.autograd.gradcheck(lambda a: run(x.detach(), bias.detach(), a, b.detach()), (a,))
    assert torch.autograd.gradcheck(lambda x: run(x, None, a.detach(), b.detach()), (x,))
    assert torch.autograd.gradcheck(lambda x: run(x[0, 0], bias, a, b), (x,))
    torch.testing.assert_close(run(x[0, 0], bias, a, b), run(x, bias, a, b)[0, 0])


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "dense"])
def test_training_in_full_precision_gives_the_merged_outputs_to_the_bit(recompute: bool) -> None:
    model = keep_zeros(adapted(), recompute=recompute).train()
    trained = output(model)
    assert trained.requires_grad
    assert torch.equal(trained, output(model.merge_and_unload()))


def test_what_watches_or_changes_the_base_gets_the_adapter_apart() -> None:
    """Hooks on the base layer still run, a base that trains gets its gradient, and dropout is the adapter's alone."""
    model = keep_zeros(adapted(target_modules=["q_proj"]))
    layer = next(iter(masked(model).values()))
    x, base = torch.randn(3, 16), layer.get_base_layer()
    expected, seen = layer(x), []
    handle = base.register_forward_hook(lambda *_: seen.append(1))
    assert off(layer(x), expected) < 1e-6
    assert seen
    handle.remove()
    base.weight.requires_grad_(True)
    layer(x).sum().backward()
    assert base.weight.grad is not None
    base.weight.requires_grad_(False)
    dropping = keep_zeros(adapted(target_modules=["q_proj"], lora_dropout=0.9)).train()
    layer = next(iter(masked(dropping).values()))
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def gradients(model: Any, name: str) -> dict[str, Tensor]:
    model.zero_grad()
    output(model, name).square().sum().backward()
    return {key: weight.grad.clone() for key, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_recomputing_gives_the_gradients_of_the_dense_path(name: str) -> None:
    model = adapted(name).eval()
    dense = gradients(keep_zeros(model, recompute=False), name)
    low = gradients(keep_zeros(model), name)
    assert low.keys() == dense.keys()
    assert all("lora_" in key for key in low)
    for key in low:
        torch.testing.assert_close(low[key], dense[key], rtol=1e-4, atol=1e-6)


def saved_bytes(model: Any, ids: Tensor) -> int:
    """Bytes that autograd keeps for backward, without the model's own parameters."""
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    seen: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    found = sum(tensor.untyped_storage().nbytes() for tensor in seen.values())
    loss.backward()
    return found


def test_recomputing_keeps_no_product_for_backward() -> None:
    torch.manual_seed(0)
    base = halved(tiny.llama(hidden_size=128, intermediate_size=256, num_hidden_layers=2))
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "up_proj", "down_proj"], r=4))
    plain = saved_bytes(model, IDS)
    low, dense = saved_bytes(keep_zeros(model), IDS), saved_bytes(keep_zeros(model, recompute=False), IDS)
    weights = sum(layer.get_base_layer().weight.numel() for layer in masked(model).values())
    assert dense - low >= 4 * weights  # the products in float32
    assert low - plain < weights  # inputs of the layers, and A and B


def test_training_and_merging_agree_after_steps() -> None:
    model = keep_zeros(adapted(filled=False, lora_dropout=0.1))
    before, start = zeros(model), {name: w.clone() for name, w in model.named_parameters() if not w.requires_grad}
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=0.02)
    losses = []
    for _ in range(20):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(w, start[name]) for name, w in model.named_parameters() if name in start)
    model.eval()
    expected = output(model)
    merged = model.merge_and_unload()
    assert same(zeros(merged), before)
    assert off(output(merged), expected) < 1e-6


def test_gradient_checkpointing() -> None:
    model = keep_zeros(adapted(task_type="CAUSAL_LM", lora_dropout=0.2)).train()

    def run() -> dict[str, Tensor]:
        torch.manual_seed(3)
        return gradients(model, "llama")

    expected = run()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = run()
    assert found.keys() == expected.keys()
    for key in found:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["llama", "convolutions"])
def test_autocast(name: str) -> None:
    model = keep_zeros(adapted(name))
    exact = output(model, name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = output(model, name)
        found.float().square().sum().backward()  # inside: backward then runs under autocast too
    assert 0 < off(found.float(), exact) < 0.1
    assert all(w.grad.dtype == torch.float32 for key, w in model.named_parameters() if w.requires_grad)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does so itself
@pytest.mark.parametrize("name", ["llama", "gpt2", "convolutions"])
def test_compiled(name: str) -> None:
    layers = masked(keep_zeros(adapted(name)))
    for key in ("self_attn.q_proj", "attn.c_attn", "two"):
        for layer in [one for full, one in layers.items() if full.endswith(key)][:1]:
            x = torch.randn(2, 3, 8, 8) if name == "convolutions" else torch.randn(2, 5, 16)
            compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
            found, expected = compiled(x), layer(x)
            torch.testing.assert_close(found, expected)
            factors = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
            wanted = torch.autograd.grad(expected.square().sum(), factors)
            torch.testing.assert_close(torch.autograd.grad(found.square().sum(), factors), wanted)
            layer.eval()
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), layer(x))


# What PEFT's users do with adapters


def test_what_peft_reports_does_not_change(capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted()
    names = [name for name, _ in model.named_parameters()]
    model.print_trainable_parameters()
    before = capsys.readouterr().out
    assert keep_zeros(model) is model
    model.print_trainable_parameters()
    assert capsys.readouterr().out == before
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names
    assert model.get_model_status().enabled
    assert "lora.MaskedLinear(" in repr(model)


def test_only_layers_with_zeros_are_masked(caplog: pytest.LogCaptureFixture) -> None:
    model = adapted(target_modules=[*MODELS["llama"][1], "lm_head"])
    with caplog.at_level(logging.INFO, "secateur"):
        keep_zeros(model)
    assert "lm_head has no zeros and keeps plain LoRA" in caplog.text
    assert "the zeros of 8 layers are kept" in caplog.text
    assert type(model.base_model.model.lm_head) is peft.tuners.lora.Linear
    assert sorted({name.rpartition(".")[2] for name in masked(model)}) == ["down_proj", "q_proj", "up_proj", "v_proj"]


def test_disabled_adapters_leave_the_base() -> None:
    model = keep_zeros(adapted()).eval()
    base = output(pruned().eval())
    assert off(output(model), base) > 1e-3
    with model.disable_adapter():
        assert torch.equal(output(model), base)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(output(model), base)  # disabling unmerges


def test_several_adapters() -> None:
    model = keep_zeros(adapted()).eval()
    one = output(model)
    model.add_adapter("two", LoraConfig(target_modules=["q_proj", "k_proj"], r=2))
    model.set_adapter("two")
    fill(model, "two").eval()
    assert isinstance(model.base_model.model.model.layers[0].self_attn.k_proj, kept.MaskedLinear)
    two = output(model)
    model.base_model.set_adapter(["default", "two"])
    both, before = output(model), zeros(model)
    model.merge_adapter(adapter_names=["default"])
    with pytest.warns(UserWarning, match="additionally merging two"):
        model.merge_adapter(adapter_names=["two"])
    assert off(output(model), both) < 1e-6
    assert same(zeros(model), before)
    model.unmerge_adapter()
    mixed = model(IDS, adapter_names=["default", "two", "__base__"]).logits
    with model.disable_adapter():
        base = output(model)
    for row, right in enumerate((one, two, base)):
        torch.testing.assert_close(mixed[row], right[row])
    model.delete_adapter("two")
    assert torch.equal(output(model), one)


def test_adapters_made_of_others_are_masked() -> None:
    model = keep_zeros(adapted()).eval()
    model.add_adapter("two", LoraConfig(target_modules=["q_proj", "k_proj"], r=4))
    fill(model, "two")
    before = zeros(model)
    model.base_model.set_adapter(["default", "two"])
    expected = output(model)
    model.add_weighted_adapter(["default", "two"], [1.0, 1.0], "sum", combination_type="cat")
    model.set_adapter("sum")
    assert off(output(model), expected) < 1e-5
    assert same(zeros(model.merge_and_unload()), before)


def test_calling_it_twice_changes_the_path_alone() -> None:
    model = keep_zeros(adapted())
    expected = output(model)
    keep_zeros(model, recompute=False)
    assert not any(layer.recompute for layer in masked(model).values())
    assert off(output(model), expected) < 1e-6


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_zeros(copied: Any) -> None:
    model = keep_zeros(adapted()).eval()
    other = copied(model)
    assert torch.equal(output(other), output(model))
    assert same(zeros(other.merge_and_unload()), zeros(model))


def test_the_config_of_the_caller_stays_as_it_is() -> None:
    config = LoraConfig(target_modules=["q_proj"])
    model = keep_zeros(get_peft_model(pruned(), config))
    assert type(config) is LoraConfig
    assert "secateur_zeros" not in config.to_dict()
    assert model.peft_config["default"].to_dict()["secateur_zeros"]["zeros"] == sum(
        int(layer.zeros().sum()) for layer in masked(model).values()
    )


# Saving and loading


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Tensor]:
    model = keep_zeros(adapted(task_type="CAUSAL_LM")).eval()
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", output(model)


def test_a_saved_adapter_loads_again(saved: tuple[Path, Tensor]) -> None:
    folder, expected = saved
    model = load(pruned(), folder, is_trainable=True).eval()
    assert torch.equal(output(model), expected)
    assert all(w.requires_grad == ("lora_" in name) for name, w in model.named_parameters())
    before = zeros(model)
    assert same(zeros(model.merge_and_unload()), before)


def test_a_saved_adapter_loads_beside_another(saved: tuple[Path, Tensor]) -> None:
    folder, expected = saved
    model = load(get_peft_model(pruned(), LoraConfig(target_modules=["k_proj"])), folder, "second")
    assert list(model.peft_config) == ["default", "second"]
    assert not any(w.requires_grad for name, w in model.named_parameters() if "second" in name)
    load(model, folder, "third", is_trainable=True)
    assert all(w.requires_grad for name, w in model.named_parameters() if "third" in name)
    model.set_adapter("second")
    assert torch.equal(output(model.eval()), expected)


def test_peft_alone_loads_it_with_a_warning(saved: tuple[Path, Tensor]) -> None:
    folder, expected = saved
    with pytest.warns(UserWarning, match=r"Unexpected keyword arguments \['secateur_zeros'\] for class LoraConfig"):
        model = PeftModel.from_pretrained(pruned(), folder).eval()
    assert off(output(model), expected) > 1e-3  # the dense adapter is another one
    assert torch.equal(output(keep_zeros(model)), expected)


def checkered(flip: int) -> Any:
    """A model of which every second weight is zero, so that all rows and all columns have as many."""
    torch.manual_seed(0)
    model = tiny.llama()
    with torch.no_grad():
        for weight in (w for name, w in model.named_parameters() if "proj" in name):
            weight[sum(torch.meshgrid(*map(torch.arange, weight.shape), indexing="ij")) % 2 == flip] = 0
    return model


def test_zeros_in_other_places_are_refused_though_each_row_and_column_has_as_many(tmp_path: Path) -> None:
    config = LoraConfig(target_modules=["q_proj", "up_proj"], r=4, task_type="CAUSAL_LM")
    keep_zeros(get_peft_model(checkered(0), config)).save_pretrained(tmp_path)
    assert load(checkered(0), tmp_path) is not None
    with pytest.raises(ModelError, match="this base has as many in other places"):
        load(checkered(1), tmp_path)


def test_an_adapter_of_an_earlier_version_loads_with_a_warning(
    saved: tuple[Path, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """It has no checksum of places: the number of zeros is compared."""
    folder, expected = saved
    config = json.loads((folder / "adapter_config.json").read_text())
    config["secateur_zeros"] = {"zeros": config["secateur_zeros"]["zeros"], "checksum": 1}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert torch.equal(output(load(pruned(), folder).eval()), expected)
    assert "was saved by an earlier version of Secateur" in caplog.text
    base = pruned()
    with torch.no_grad():
        base.model.layers[1].mlp.up_proj.weight.fill_(1)
    with pytest.raises(ModelError, match="zeros in its layers; this base has"):
        load(base, folder)


@pytest.mark.parametrize("other", ["more zeros", "other zeros"])
def test_a_base_with_other_zeros_is_refused(saved: tuple[Path, Tensor], other: str) -> None:
    base = pruned(seed=0 if other == "more zeros" else 5)
    weight = base.model.layers[1].mlp.up_proj.weight
    if other == "more zeros":
        with torch.no_grad():
            weight[0] = 0
    found = r"this base has [\d,]+\. Load" if other == "more zeros" else "as many in other places"
    names = [name for name, _ in base.named_parameters()]
    with pytest.raises(ModelError, match=f"'default' was trained on a base with [\\d,]+ zeros.*; .*{found}"):
        load(base, saved[0])
    assert [name for name, _ in base.named_parameters()] == names  # as it was before
    model = get_peft_model(base, LoraConfig(target_modules=["k_proj"]))
    with pytest.raises(ModelError, match="'second' was trained on a base"):
        load(model, saved[0], "second")
    assert list(model.peft_config) == ["default"]


def test_adapters_of_another_kind_are_not_loaded(tmp_path: Path) -> None:
    adapted(task_type="CAUSAL_LM").save_pretrained(tmp_path / "plain")
    with pytest.raises(ModelError, match="plain was not saved by a model with keep_zeros"):
        load(pruned(), tmp_path / "plain")
    get_peft_model(pruned(), peft.IA3Config(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "ia3")
    with pytest.raises(ModelError, match="has a IA3Config; keep_zeros masks LoRA adapters alone"):
        load(pruned(), tmp_path / "ia3")


def test_trainer(tmp_path: Path) -> None:
    """Five steps of transformers' Trainer, stopped after three and resumed: the same adapter, and all zeros."""
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in IDS.repeat(8, 1)]

    def train(folder: str, resume: bool = False) -> Any:
        model = keep_zeros(adapted(filled=False, task_type="CAUSAL_LM", lora_dropout=0.1))
        settings = TrainingArguments(
            str(tmp_path / folder), max_steps=5, save_steps=3, per_device_train_batch_size=4, report_to=[],
            disable_tqdm=True, use_cpu=True, learning_rate=0.01,
        )  # fmt: skip
        Trainer(model, settings, train_dataset=data).train(resume_from_checkpoint=resume)
        return model

    whole = train("run")
    assert "secateur_zeros" in json.loads((tmp_path / "run" / "checkpoint-3" / "adapter_config.json").read_text())
    (tmp_path / "run" / "checkpoint-5").rename(tmp_path / "last")
    again = train("run", resume=True)
    assert same(bits(again), bits(whole))
    loaded = load(pruned(), tmp_path / "last").eval()
    assert torch.equal(output(loaded), output(whole.eval()))
    before = zeros(whole)
    assert same(zeros(whole.merge_and_unload()), before)


# Other adapters, and what is refused


@pytest.mark.parametrize("config", [peft.HiraConfig, peft.IA3Config])
def test_hira_and_ia3_keep_zeros_by_themselves(config: Any) -> None:
    extra = {"feedforward_modules": ["up_proj"]} if config is peft.IA3Config else {}
    model = get_peft_model(pruned(), config(target_modules=["q_proj", "up_proj"], **extra))
    torch.manual_seed(0)
    before = zeros(pruned())
    for weight in model.parameters():
        if weight.requires_grad:
            nn.init.normal_(weight)
    with pytest.raises(ModelError, match="keep_zeros masks LoRA adapters; this model has (HIRA|IA3) adapters"):
        keep_zeros(model)
    merged = model.merge_and_unload()
    assert same(zeros(merged), before)
    assert sparsity(merged) == pytest.approx(0.5, abs=0.01)
    assert not torch.equal(merged.model.layers[0].mlp.up_proj.weight, pruned().model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "'default' has use_dora=True, a variant of LoRA that keep_zeros does not mask"),
        ({"init_lora_weights": "mica"}, "'default' has init_lora_weights='mica', a variant"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes the base weights and fills their zeros"),
        ({"init_lora_weights": "olora"}, "'olora', which changes the base weights"),
        ({"target_modules": ["lm_head"]}, "No layer with an adapter has zeros in its base weight"),
    ],
)
def test_configs_that_cannot_keep_zeros(settings: dict[str, Any], message: str) -> None:
    model = adapted(filled=False, **settings)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ModelError, match=message):
        keep_zeros(model)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_such_adapters_cannot_be_added_later(settings: dict[str, Any]) -> None:
    model = keep_zeros(adapted())
    before = bits(model)
    with pytest.raises(ModelError, match="Adapter 'two' has"):
        model.add_adapter("two", LoraConfig(target_modules=["q_proj"], **settings))
    assert same(bits(model), before)
    assert list(model.peft_config) == ["default"]


class Odd(nn.Module):
    """Layers with zeros that cannot be masked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Embedding(8, 8)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.experts = nn.ParameterDict({"stack": nn.Parameter(torch.randn(3, 8, 8))})
        self.eight = nn.Linear(8, 8)
        self.saved = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("table", "PEFT adapts this Embedding with Embedding, which is not supported"),
        ("attention", "PEFT adapts this MultiheadAttention with MultiheadAttention, which is not supported"),
        ("eight", "its weight is quantized, sharded or otherwise not one plain number per weight"),
        ("experts.stack", "PEFT adapts this ParameterDict with ParamWrapper, which is not supported"),
    ],
)
def test_layers_that_cannot_be_masked(target: str, reason: str) -> None:
    model = halved(Odd())
    if target == "eight":
        model.eight.weight = nn.Parameter(model.eight.weight.to(torch.float8_e4m3fn), requires_grad=False)
    where = {"target_parameters": [target]} if "." in target else {"target_modules": [target, "linear"]}
    adapter = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, **where), autocast_adapter_dtype=False)
    with pytest.raises(ModelError, match=f"cannot mask '{target.partition('.')[0]}', .*: {reason}. Leave it out"):
        keep_zeros(adapter)
    if "." not in target:  # the same, when it comes later
        later = keep_zeros(get_peft_model(model, LoraConfig(r=2, target_modules=["linear"])))
        with pytest.raises(ModelError, match=reason):
            later.add_adapter("two", LoraConfig(r=2, target_modules=[target]), autocast_adapter_dtype=False)
        assert list(later.peft_config) == ["default"]


def test_a_grouped_convolution_is_refused() -> None:
    with pytest.warns(UserWarning, match="groups > 1"):
        model = get_peft_model(halved(Odd()), LoraConfig(r=2, target_modules=["grouped"]))
    with pytest.raises(ModelError, match="a convolution with groups=2 cannot be merged by PEFT"):
        keep_zeros(model)


def test_an_embedding_without_zeros_is_left_alone() -> None:
    model = halved(Odd())
    nn.init.ones_(model.table.weight)
    model = keep_zeros(get_peft_model(model, LoraConfig(r=2, target_modules=["table", "linear"])))
    assert list(masked(model)) == ["base_model.model.linear"]


def test_modules_to_save_are_told(caplog: pytest.LogCaptureFixture) -> None:
    config = LoraConfig(r=2, target_modules=["linear"], modules_to_save=["saved", "norm"])
    keep_zeros(get_peft_model(halved(Odd()), config))
    assert "norm" not in caplog.text
    assert "saved is in modules_to_save, trains all its weights and loses its zeros" in caplog.text


def test_a_base_without_float_weights_is_refused() -> None:
    """GPTQ and its like keep integers in buffers, where zeros cannot be seen."""

    class Packed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            weight = self.weight.detach().to(torch.int8)
            del self.weight
            self.register_buffer("weight", weight)

    model = halved(Odd())
    model.eight = Packed()
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["linear", "eight"]))
    with pytest.raises(ModelError, match="cannot mask 'eight', .*: its weight is quantized"):
        keep_zeros(model)


def test_zeros_that_come_later_are_kept_too() -> None:
    model = keep_zeros(adapted())
    layer = next(iter(masked(model).values()))
    with torch.no_grad():
        layer.get_base_layer().weight[0] = 0
    before = zeros(model)
    assert same(zeros(model.merge_and_unload()), before)


def test_what_is_not_a_peft_model_or_already_merged() -> None:
    with pytest.raises(SecateurError, match="takes a PeftModel, as get_peft_model returns it; got LlamaForCausalLM"):
        keep_zeros(pruned())
    model = adapted()
    model.merge_adapter()
    with pytest.raises(ModelError, match=r"merged adapters, .* Call unmerge_adapter\(\) first"):
        keep_zeros(model)
