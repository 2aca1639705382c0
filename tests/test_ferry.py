"""Models that are streamed to a device block by block. "cpu:0" is another device than "cpu" as far as that goes."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import secateur as sc
from secateur.errors import FactError, ModelError
from secateur.oneshot import offload, reconstruct
from secateur.oneshot.blocks import Chain
from tests import tiny
from tests.trained import Tower

IDS = torch.randint(0, 17, (6, 9), generator=torch.Generator().manual_seed(0))
CASES: dict[str, Any] = {
    "rounds": (sc.prune, {"rounds": 2}),
    "wanda": (sc.prune, {"score": "wanda"}),
    "repaired": (sc.prune, {"rounds": 2, "reconstruct": "every"}),
    "sparsegpt": (sc.prune, {"method": "sparsegpt"}),
    "joint": (sc.probe, {"tolerance": 0.5}),
    "reverse": (sc.probe, {"order": "reverse", "group": "block", "score": "variance"}),
}
MODELS = {"tower": Tower, "llama": tiny.llama, "gpt2": lambda: tiny.gpt2(n_layer=2)}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_streamed_or_not_is_the_same(name: str, case: str) -> None:
    work, settings = CASES[case]
    here, there = build(name), build(name)
    homes = {key: parameter.data_ptr() for key, parameter in there.named_parameters()}
    right = work(here, IDS.split(2), **settings)
    found = work(there, IDS.split(2), device="cpu:0", **settings)
    assert found.pruned == right.pruned > 0
    for key, mask in right.masks.items():
        assert torch.equal(found.masks[key], mask), key
        torch.testing.assert_close(there.get_parameter(key), here.get_parameter(key))
    for key, parameter in there.named_parameters():
        assert parameter.data_ptr() == homes[key]
        assert parameter.grad is None
    assert not any("forward" in vars(module) for module in there.modules())


class Sendings(TorchFunctionMode):
    """Tensors that are sent to the host without waiting for them."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.sent = [], 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.to and (kwargs or {}).get("non_blocking"):
            self.found += [result.shape] if result.device.type == "cpu" else []
        self.sent += func is Tensor.to
        return result


@pytest.mark.parametrize("case", CASES)
def test_what_goes_to_the_host_is_waited_for(case: str) -> None:
    """torch pins the memory for it, so whoever reads at once reads what was there before."""
    work, settings = CASES[case]
    with Sendings() as sendings:
        work(build("llama"), IDS.split(2), device="cpu:0", **settings)
    assert sendings.sent
    assert not sendings.found


def test_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0
    real = offload._Carried.forward

    def forward(ctx: Any, parameter: Tensor, device: torch.device, deliver: Any) -> Tensor:
        nonlocal most
        copied = real(ctx, parameter, device, deliver)
        alive.append(weakref.ref(copied.untyped_storage()))
        most = max(most, sum(one() is not None for one in alive))
        return copied

    monkeypatch.setattr(offload._Carried, "forward", staticmethod(forward))
    model = tiny.llama(num_hidden_layers=5)
    sc.prune(model, IDS, rounds=2, device="cpu:0")
    each = len(list(model.model.layers[0].parameters()))
    assert len(alive) > 50 * each
    assert most <= 2 * each  # one on its way out while the next comes in


@pytest.mark.parametrize("case", ["repaired", "sparsegpt"])
def test_a_block_runs_only_where_it_has_landed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where batches are tried together first, which CPUs do only when they are told to."""
    model = build("llama")
    homes = {parameter.data_ptr() for parameter in model.parameters()}
    real, calls = Chain.run, 0

    def run(
        self: Chain, number: int, batch: int, block: nn.Module | None = None, state: Tensor | None = None
    ) -> Tensor:
        nonlocal calls
        calls += 1
        assert not any(p.data_ptr() in homes for p in (block or self.blocks[number]).parameters())
        return real(self, number, batch, block, state)

    monkeypatch.setattr(Chain, "run", run)
    monkeypatch.setitem(reconstruct.MERGED, "cpu", 1 << 20)
    work, settings = CASES[case]
    work(model, IDS.split(2), device="cpu:0", **settings)
    assert calls > 0


def test_an_error_leaves_the_model_at_home() -> None:
    model = build("tower")
    homes = [parameter.data_ptr() for parameter in model.parameters()]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        model(batch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sc.prune(model, IDS, loss=loss, device="cpu:0")
    assert [parameter.data_ptr() for parameter in model.parameters()] == homes
    assert not any("forward" in vars(block) for block in model.blocks)


def test_what_cannot_be_streamed_is_refused() -> None:
    with pytest.raises(ModelError, match="No blocks follow one another"):
        sc.prune(nn.Linear(4, 4), [(torch.randn(2, 4), torch.randn(2, 4))], device="cpu:0", only="*")
    shared = build("tower")
    shared.blocks[1].up = shared.blocks[0].up
    with pytest.raises(ModelError, match="share parameters"):
        sc.prune(shared, IDS, device="cpu:0")


def test_weights_come_from_the_file_and_the_file_stays(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    tiny.llama(hidden_size=64, intermediate_size=256).save_pretrained(tmp_path)
    stored = (tmp_path / "model.safetensors").read_bytes()
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    places = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    address = model.model.layers[1].mlp.up_proj.weight.data_ptr()
    assert any(low <= address < high for low, high in places), (
        "transformers copies weights now: streaming from disk ends"
    )
    sc.prune(model, IDS, device="cpu:0")
    assert model.model.layers[1].mlp.up_proj.weight.data_ptr() == address
    assert (tmp_path / "model.safetensors").read_bytes() == stored


class Middle(nn.Module):
    """Blocks registered first, and layers before and after them that are pruned too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(x)


@pytest.mark.parametrize("settings", [{"score": "wanda"}, {"score": "variance", "reconstruct": True}])
def test_layers_outside_of_the_blocks(settings: dict[str, Any]) -> None:
    batches = [(torch.randn(32, 16), torch.randint(0, 4, (32,))) for _ in range(2)]
    found = []
    for device in (None, "cpu:0"):
        torch.manual_seed(0)
        model = Middle()
        found.append(sc.prune(model, batches, device=device, only="*", **settings).masks)
    assert all(torch.equal(found[1][name], mask) for name, mask in found[0].items())


def test_a_limit_of_memory_is_not_for_streamed_models() -> None:
    with pytest.raises(FactError, match="Leave one out"):
        sc.prune(build("tower"), IDS, device="cpu:0", memory="1GB")


def test_a_parameter_inside_and_outside() -> None:
    model = build("tower")
    model.lm_head.weight = nn.Parameter(torch.randn(17, 16))
    model.blocks[0].extra = model.lm_head
    with pytest.raises(ModelError, match="with what lies outside"):
        offload.Ferry(model, list(model.blocks), torch.device("cpu:0"))
