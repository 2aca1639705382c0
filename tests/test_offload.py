"""Calibration in limited memory: block offload, statistics on the host, activation checkpointing, bf16 means.

"cpu:0" counts as another device than "cpu", so streaming runs here without a GPU.
"""

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
from secateur.model.prunable import find_prunable
from secateur.oneshot import offload, reconstruct
from secateur.oneshot.blocks import Chain
from secateur.oneshot.calibration import CalibratedModel
from secateur.oneshot.gradients import GradientPass, GradientStatistics, gather_gradients, stochastic_round
from secateur.oneshot.offload import MemoryPlan, activation_checkpointing, as_bytes, plan_memory
from tests import tiny
from tests.trained import Tower

IDS = torch.randint(0, 17, (6, 9), generator=torch.Generator().manual_seed(0))
ROWS = torch.randint(0, 17, (5, 9), generator=torch.Generator().manual_seed(0))
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
    """Records non-blocking copies to the host."""

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
def test_copies_to_the_host_block(case: str) -> None:
    """A non-blocking copy to pinned memory could be read before it arrives."""
    work, settings = CASES[case]
    with Sendings() as sendings:
        work(build("llama"), IDS.split(2), device="cpu:0", **settings)
    assert sendings.sent
    assert not sendings.found


def test_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0
    real = offload._CopyToDevice.forward

    def forward(ctx: Any, parameter: Tensor, device: torch.device, on_gradient: Any) -> Tensor:
        nonlocal most
        copied = real(ctx, parameter, device, on_gradient)
        alive.append(weakref.ref(copied.untyped_storage()))
        most = max(most, sum(one() is not None for one in alive))
        return copied

    monkeypatch.setattr(offload._CopyToDevice, "forward", staticmethod(forward))
    model = tiny.llama(num_hidden_layers=5)
    sc.prune(model, IDS, rounds=2, device="cpu:0")
    each = len(list(model.model.layers[0].parameters()))
    assert len(alive) > 50 * each
    assert most <= 2 * each  # one on its way out while the next comes in


@pytest.mark.parametrize("case", ["repaired", "sparsegpt"])
def test_a_block_runs_only_on_the_device(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the trial run before batches are merged, which CPUs skip by default."""
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
    monkeypatch.setattr(reconstruct, "CPU_MERGE_BYTES", 1 << 20)
    work, settings = CASES[case]
    work(model, IDS.split(2), device="cpu:0", **settings)
    assert calls > 0


def test_an_error_leaves_the_model_on_the_host() -> None:
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
    with pytest.raises(ModelError, match="no blocks that run in order"):
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
    with pytest.raises(ModelError, match="with a module outside"):
        offload.BlockOffload(model, list(model.blocks), torch.device("cpu:0"))


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


@pytest.mark.parametrize(
    "plan", [MemoryPlan(on_device=300, checkpointing=True), MemoryPlan(checkpointing=True), MemoryPlan(on_device=0)]
)
def test_every_memory_plan_gives_the_same_masks(plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [
        sc.prune(tower(), ROWS, rounds=2).masks,
        sc.probe(tower(), ROWS, tolerance=0.5).masks,
        sc.probe(tower(), ROWS, exact=True, score="variance").masks,
    ]
    monkeypatch.setattr(CalibratedModel, "memory_plan", lambda *_: plan)
    found = [
        sc.prune(tower(), ROWS, rounds=2).masks,
        sc.probe(tower(), ROWS, tolerance=0.5).masks,
        sc.probe(tower(), ROWS, exact=True, score="variance").masks,
    ]
    for mine, right in zip(found, expected, strict=True):
        assert all(torch.equal(mine[name], mask) for name, mask in right.items())


def test_only_so_many_statistics_stay_where_the_weights_are() -> None:
    prunables, _ = find_prunable(tower().to("meta"))
    sizes = [prunable.parameter.numel() for prunable in prunables]
    found = GradientStatistics(
        prunables, {"gradient_max", "exp_avg_sq"}, 3, MemoryPlan(on_device=sizes[0] + sizes[1] + sizes[2] - 1)
    )
    stayed = [all(t.device.type == "meta" for t in found.facts[prunable.name].values()) for prunable in prunables]
    assert stayed[:2] == [True, True]
    assert sum(size for size, here in zip(sizes, stayed, strict=True) if here) < sum(sizes[:3])
    assert all(
        t.device.type == "cpu" for prunable, here in zip(prunables, stayed, strict=True) if not here
        for t in found.facts[prunable.name].values()
    )  # fmt: skip


def test_checkpointed_blocks_run_again_in_backward_and_only_inside() -> None:
    model = tower()
    calls: list[int] = []
    model.blocks[0].register_forward_hook(lambda *_: None)
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    with activation_checkpointing(list(model.blocks)):
        model(ROWS).square().mean().backward()
    assert len(calls) == 2
    assert not any("forward" in vars(block) for block in model.blocks)
    model(ROWS).square().mean().backward()
    assert len(calls) == 3


def test_another_librarys_forward_is_put_back() -> None:
    model = tower()
    own = model.blocks[1].forward
    model.blocks[1].forward = mine = lambda *given, **named: own(*given, **named)
    with activation_checkpointing(list(model.blocks)):
        model(ROWS)
    assert vars(model.blocks[1])["forward"] is mine


def test_stochastic_rounding_is_unbiased() -> None:
    draw = torch.Generator().manual_seed(0)
    value = 1.0 + 0.3 / 128  # three tenths of the way between two neighbours in bf16
    found = stochastic_round(torch.full((20000,), value), draw)
    assert torch.equal(found.bfloat16().float(), found)
    assert set(found.tolist()) == {1.0, 1.0 + 1 / 128}
    assert float(found.mean()) == pytest.approx(value, abs=1e-4)


def test_means_in_bf16_keep_growing() -> None:
    """Two thousand equal squares: rounded to the nearest, the sum would stop growing at a few hundred."""
    layer = nn.Linear(64, 64, bias=False)
    prunables, _ = find_prunable(layer, only="*")
    with GradientStatistics(prunables, {"exp_avg_sq"}, 2000, MemoryPlan(torch.bfloat16)) as found:
        for _ in range(2000):
            layer.weight.grad = None
            layer.weight.sum().backward()
    assert float(found.facts["weight"]["exp_avg_sq"].float().mean()) == pytest.approx(1.0, rel=0.02)
    exact = gather_gradients(
        layer,
        [None],
        prunables,
        {"gradient_max"},
        GradientPass(lambda m, _: m.weight.sum(), MemoryPlan(torch.bfloat16)),
    )
    assert bool((exact["weight"]["gradient_max"] == 1).all())


def test_memory_in_words() -> None:
    assert as_bytes("24GB") == 24 * 10**9
    assert as_bytes(" 1.5 GiB") == 3 << 29
    assert as_bytes(7) == 7
    assert as_bytes(None) is None
    with pytest.raises(FactError, match="something like '24GB'"):
        as_bytes("lots")
    model = tower()
    prunables, _ = find_prunable(model)
    assert plan_memory(model, ROWS[:1], lambda m, b: m(b).sum(), prunables, [], None) == MemoryPlan()


def test_channels_last_in_bf16_and_what_is_not_a_number() -> None:
    layer = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    prunables, _ = find_prunable(layer, only="*")
    batch = [torch.randn(2, 4, 8, 8)]
    loss = lambda model, inputs: model(inputs).square().mean()  # noqa: E731
    plans = (MemoryPlan(torch.bfloat16), MemoryPlan())
    found = [gather_gradients(layer, batch, prunables, {"exp_avg_sq"}, GradientPass(loss, plan)) for plan in plans]
    rough, exact = (facts["weight"]["exp_avg_sq"] for facts in found)
    torch.testing.assert_close(rough.float(), exact, rtol=0.02, atol=0)
    for bits in (0x7FFFFFFF, 0x7FC00000, -1):
        values = torch.full((4,), bits, dtype=torch.int32).view(torch.float32)
        assert bool(stochastic_round(values, torch.Generator()).isnan().all())
