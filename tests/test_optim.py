"""sc.optim.AdamW: torch's own signature, state and numbers, with masks and SPAM inside the step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import StateError
from secateur.selection.masks import to_bits
from tests.conftest import Block, train


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> None:
    torch.manual_seed(seed)
    train(model, optimizer, count)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_the_signature_is_torchs_and_one_more() -> None:
    theirs, ours = (inspect.signature(kind.__init__).parameters for kind in (torch.optim.AdamW, sc.optim.AdamW))
    assert list(ours) == [*theirs, "spam"]
    assert all(ours[name].default == parameter.default for name, parameter in theirs.items())
    assert all(ours[name].kind == parameter.kind for name, parameter in theirs.items())
    assert issubclass(sc.optim.AdamW, torch.optim.AdamW)


@pytest.mark.parametrize(
    "settings",
    [{}, {"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"lr": 0.1}],
    ids=str,
)
def test_dense_steps_are_torchs_to_the_bit(settings: dict[str, Any]) -> None:
    models = [Block(), Block()]
    models[1].load_state_dict(models[0].state_dict())
    for model, kind in zip(models, (torch.optim.AdamW, sc.optim.AdamW), strict=True):
        groups = [{"params": [p]} for p in model.parameters()]
        groups[0]["weight_decay"] = 0.3
        steps(model, kind(groups, **settings), 4)
    assert same(*models)


def test_states_interchange_both_ways() -> None:
    for first, second in ((torch.optim.AdamW, sc.optim.AdamW), (sc.optim.AdamW, torch.optim.AdamW)):
        for settings in ({}, {"amsgrad": True}, {"fused": True}):
            begun = Block()
            optimizer = first(begun.parameters(), lr=1e-2, **settings)
            steps(begun, optimizer, 3)
            other = copy.deepcopy(begun)
            loaded = second(other.parameters(), lr=1e-2, **settings)
            loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert optimizer.state_dict()["state"].keys() == loaded.state_dict()["state"].keys()
            assert optimizer.state_dict()["state"][0].keys() == loaded.state_dict()["state"][0].keys()
            steps(begun, optimizer, 3, seed=1)
            steps(other, loaded, 3, seed=1)
            assert same(begun, other)


def test_masks_hold_weights_and_moments_at_zero() -> None:
    model, dense = Block(), Block()
    dense.load_state_dict(model.state_dict())
    optimizer = sc.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    masks = {model.up.weight: torch.rand_like(model.up.weight) < 0.5}
    optimizer.set_masks(masks)
    steps(model, optimizer, 1)
    steps(dense, torch.optim.AdamW(dense.parameters(), lr=1e-2, amsgrad=True), 1)
    mask = masks[model.up.weight]
    assert torch.equal(model.up.weight, torch.where(mask, dense.up.weight, 0.0))
    assert torch.equal(model.down.weight, dense.down.weight)
    steps(model, optimizer, 3)
    for tensor in (model.up.weight, *(optimizer.state[model.up.weight][k] for k in ("exp_avg", "exp_avg_sq"))):
        assert bool((tensor[~mask] == 0).all())
        assert bool((tensor[mask] != 0).any())
    optimizer.set_masks({})
    steps(model, optimizer, 1)
    assert bool((model.up.weight[~mask] != 0).any())


def test_masks_that_do_not_fit_are_refused() -> None:
    model = Block()
    optimizer = sc.optim.AdamW(model.parameters())
    for parameter, mask in (
        (model.up.weight, torch.ones(3, 3, dtype=torch.bool)),
        (model.up.weight, torch.ones_like(model.up.weight)),
        (nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.bool)),
    ):
        with pytest.raises(StateError, match="set_masks takes bool masks in the shape of parameters of this optimizer"):
            optimizer.set_masks({parameter: mask})


def test_masks_may_be_flat_bits() -> None:
    """As a Pruner on a GPU holds them: whole words of 32, and nothing else that is uint8 or flat."""
    layers = [nn.Linear(7, 5), nn.Linear(7, 5)]
    layers[1].load_state_dict(layers[0].state_dict())
    mask = torch.rand(5, 7) < 0.5
    for layer, held in zip(layers, (mask, to_bits(mask.view(-1))), strict=True):
        optimizer = sc.optim.AdamW(layer.parameters(), lr=0.1)
        optimizer.set_masks({layer.weight: held})
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(2, 7)).square().sum().backward()
            optimizer.step()
    assert torch.equal(layers[0].weight, layers[1].weight)
    assert torch.equal(layers[1].weight != 0, mask)
    odd = [torch.zeros(length, dtype=torch.uint8) for length in (4, 5, 7, 9, 10, 12, 35)]
    for wrong in (*odd, torch.zeros(5, 7, dtype=torch.uint8), torch.zeros(8), torch.zeros(8, dtype=torch.bool)):
        with pytest.raises(StateError, match="set_masks takes bool masks"):
            optimizer.set_masks({layers[1].weight: wrong})


def test_a_closure_and_a_grad_scaler_are_served() -> None:
    models = [Block(), Block()]
    models[1].load_state_dict(models[0].state_dict())
    for model, kind in zip(models, (torch.optim.AdamW, sc.optim.AdamW), strict=True):
        optimizer = kind(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            tokens = torch.arange(12).view(2, 6) % 10
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            scaler.scale(loss * (torch.inf if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

        def closure(model: nn.Module = model) -> torch.Tensor:
            loss = model(torch.arange(10)).square().mean()
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) > 0
        assert float(optimizer.state[model.up.weight]["step"]) == 4
    assert same(*models)


@pytest.mark.parametrize("restart", [False, True])
def test_spam_clips_resets_and_leaves_the_rate_alone(restart: bool) -> None:
    weight = nn.Parameter(torch.ones(4))
    spam = sc.optim.Spam(theta=5000.0, every=6, warmup=2, quiet=2, floor=0.25, restart_bias=restart)
    optimizer = sc.optim.AdamW([weight], lr=0.1, weight_decay=0.0, spam=spam)
    for step in range(1, 16):
        weight.grad = torch.full((4,), 1.0)
        if step == 5:
            weight.grad[0] = 1e6
        before = weight.detach().clone()
        second = optimizer.state[weight]["exp_avg_sq"].clone() if step > 1 else torch.zeros(4)
        optimizer.step()
        state, moved = optimizer.state[weight], (before - weight.detach()).abs()
        assert float(weight.grad[1]) == 1.0
        assert optimizer.param_groups[0]["lr"] == 0.1
        if step == 5:  # clipped to sqrt(5000 v)
            expected = 0.999 * second[0] + 0.001 * 5000 * second[0]
            assert float(state["exp_avg_sq"][0]) == pytest.approx(float(expected), rel=1e-5)
        if step in (6, 12):  # both moments start over; the bias correction only if that is asked for
            assert float(state["step"]) == (1 if restart else step)
            assert float(state["exp_avg"][1]) == pytest.approx(0.1)
            assert float(state["exp_avg_sq"][1]) == pytest.approx(0.001, rel=1e-3)
        if restart and step in (
            6,
            7,
            8,
        ):  # a constant gradient moves by the rate, times 0.25 + 0.75 (1 - cos(pi j / 3)) / 2
            assert float(moved[1]) == pytest.approx(0.1 * {6: 0.25, 7: 0.4375, 8: 1.0}[step], rel=1e-3)
        if step == 4:
            assert float(moved[1]) == pytest.approx(0.1, rel=1e-2)
    assert optimizer.taken == 15


def test_a_state_saved_before_spam_had_these_settings_loads() -> None:
    model = Block()
    optimizer = sc.optim.AdamW(model.parameters(), lr=1e-2, spam="paper")
    steps(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved["param_groups"][0]) - set(torch.optim.AdamW(model.parameters()).param_groups[0]) == {"spam_steps"}
    for entry in saved["state"].values():
        entry["step"].fill_(2.0)  # earlier versions restarted this count at a reset
    saved["param_groups"][0]["spam_steps"] = 502
    again = sc.optim.AdamW(model.parameters(), lr=1e-2, spam="paper")
    again.load_state_dict(saved)
    assert again.taken == 502
    steps(model, again, 2)
    assert again.taken == 504
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    "spam", ["paper", "adamwprune", sc.optim.Spam(theta=1.0, every=4, warmup=2, spike=2.0, quiet=1)], ids=str
)
def test_a_run_with_spam_resumes_to_the_bit(spam: Any) -> None:
    through, model = Block(), Block()
    model.load_state_dict(through.state_dict())
    whole = sc.optim.AdamW(through.parameters(), lr=1e-2, spam=spam)
    steps(through, whole, 7)
    steps(through, whole, 8, seed=1)
    half = sc.optim.AdamW(model.parameters(), lr=1e-2, spam=spam)
    steps(model, half, 7)
    again = sc.optim.AdamW(model.parameters(), lr=1e-2, spam=spam)
    again.load_state_dict(copy.deepcopy(half.state_dict()))
    steps(model, again, 8, seed=1)
    assert same(through, model)


def test_a_pruner_gives_its_masks_and_need_not_mask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Block(), Block()]
    models[1].load_state_dict(models[0].state_dict())
    found = []
    for model, kind in zip(models, (torch.optim.AdamW, sc.optim.AdamW), strict=True):
        optimizer = kind(model.parameters(), lr=1e-2)
        pruner = sc.Pruner(model, optimizer, score="bitter7", sparsity=sc.linear(0.6, begin=0, end=8), every=4)
        calls: list[int] = []
        real = pruner.apply
        monkeypatch.setattr(pruner, "apply", lambda real=real, calls=calls: calls.append(1) or real())
        torch.manual_seed(0)
        train(model, optimizer, 12, pruner.step)
        found.append((pruner, len(calls)))
        for name, mask in pruner.masks.items():
            assert bool((model.get_parameter(name)[~mask] == 0).all())
    assert same(*models)
    # From outside at every step; with ours until it has masks, and when they change: at 1, 2, 3, 4 and 8.
    assert [calls for _, calls in found] == [12, 5]
    saved = found[1][0].state_dict()
    fresh = Block()
    optimizer = sc.optim.AdamW(fresh.parameters())
    sc.Pruner(fresh, optimizer, score="bitter7", sparsity=0.6).load_state_dict(saved, strict=False)
    steps(fresh, optimizer, 2)
    assert all(bool((fresh.get_parameter(n)[~m] == 0).all()) for n, m in found[1][0].masks.items())


@pytest.mark.parametrize(
    ("score", "updates"), [("bitter7", [3, 6, 9, 14, 15, 18]), ("magnitude", [3, 6, 9, 12, 15, 18])]
)
def test_no_update_ranks_by_moments_that_have_just_been_reset(
    score: str, updates: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = Block()
    optimizer = sc.optim.AdamW(model.parameters(), lr=1e-3, spam=sc.optim.Spam(theta=0, every=10, warmup=4))
    pruner = sc.Pruner(model, optimizer, score=score, sparsity=sc.linear(0.5, begin=0, end=20), every=3)
    seen: list[int] = []

    def after() -> None:
        pruner.step()
        if len(pruner.updates) > len(seen):
            seen.append(pruner.updates[-1].step)
            if score == "bitter7":
                second = optimizer.state[model.up.weight]["exp_avg_sq"]
                assert float((second[pruner.masks["up.weight"]] > 0).float().mean()) > 0.9

    train(model, optimizer, 19, after)
    assert seen == updates  # bitter7's twelfth falls into the four steps from the reset on, and is made up for at 14
    train(model, optimizer, 6, after)
    assert seen[-1] == (24 if score == "bitter7" else 20)  # the schedule ends at 20, where the moments are reset again
    assert any("waits until step 24" in line for line in caplog.messages) is (score == "bitter7")
    assert pruner.report().pruned == round(0.5 * pruner.report().prunable)


def test_two_pruners_share_an_optimizer() -> None:
    model = Block()
    optimizer = sc.optim.AdamW(model.parameters(), lr=1e-2)
    pruners = [sc.Pruner(model, optimizer, score="magnitude", every=1, only=name) for name in ("up", "down")]

    def after() -> None:
        for pruner in pruners:
            pruner.step()

    train(model, optimizer, 4, after)
    assert int((model.up.weight == 0).sum()) == int((model.down.weight == 0).sum()) == 512
    optimizer.set_masks({})  # behind the pruners' backs: they mask from outside again
    train(model, optimizer, 2, after)
    assert int((model.up.weight == 0).sum()) == 512


class Stranger(torch.optim.SGD):
    """An optimizer of somebody else that implements MaskedOptimizer without anything of Secateur's."""

    cold = False

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.applied: dict[Tensor, Tensor] = {}
        self.regrows = False

    def holds(self, masks: Mapping[Tensor, Tensor]) -> bool:
        return all(self.applied.get(parameter) is mask for parameter, mask in masks.items())

    def set_masks(self, masks: Mapping[Tensor, Tensor], *, others: bool = False, regrows: bool = False) -> None:
        self.applied = {**(self.applied if others else {}), **masks}
        self.regrows = regrows

    def delay(self, steps: int) -> int:
        return 3 if steps == 6 else 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter, mask in self.applied.items():
            parameter.detach().mul_(mask)
        return loss


def test_any_optimizer_with_the_protocol_applies_masks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block()
    optimizer = Stranger(model.parameters(), lr=0.1)
    assert isinstance(optimizer, sc.optim.MaskedOptimizer)
    assert isinstance(sc.optim.AdamW(model.parameters()), sc.optim.MaskedOptimizer)
    assert not isinstance(torch.optim.AdamW(model.parameters()), sc.optim.MaskedOptimizer)
    pruner = sc.Pruner(model, optimizer, score="magnitude", every=2, regrow="random", until=3)
    assert optimizer.regrows
    applied, real = [], pruner.apply
    monkeypatch.setattr(pruner, "apply", lambda: applied.append(pruner.report().step) or real())
    train(model, optimizer, 8, pruner.step)
    assert max(applied) == 2  # at the update itself; afterwards the optimizer's own step keeps the zeros
    assert all(torch.equal(optimizer.applied[model.get_parameter(name)], mask) for name, mask in pruner.masks.items())
    assert int((model.up.weight == 0).sum()) + int((model.down.weight == 0).sum()) == 1024


def test_updates_wait_for_an_optimizer_whose_moments_are_cold(caplog: pytest.LogCaptureFixture) -> None:
    class Cold(Stranger):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["exp_avg_sq"] = torch.ones_like(parameter)
            return loss

    model = Block()
    optimizer = Cold(model.parameters(), lr=0.1)
    optimizer.cold = True
    pruner = sc.Pruner(model, optimizer, score="variance", sparsity=sc.linear(0.5, begin=0, end=6), every=2)
    assert "the last update waits until step 9" in caplog.text
    train(model, optimizer, 3, pruner.step)
    assert pruner.sparsity == 0
    optimizer.cold = False
    train(model, optimizer, 1, pruner.step)
    assert pruner.sparsity > 0


def test_copies_keep_masks_and_spam() -> None:
    model = Block()
    optimizer = sc.optim.AdamW(model.parameters(), lr=1e-2, spam="paper")
    optimizer.set_masks({model.up.weight: torch.rand_like(model.up.weight) < 0.5})
    steps(model, optimizer, 2)
    twin, copied = copy.deepcopy((model, optimizer))
    assert copied.spam == sc.optim.Spam()
    steps(model, optimizer, 2)
    steps(twin, copied, 2)
    assert same(model, twin)
    assert int((twin.up.weight == 0).sum()) > 400


def test_a_mask_holds_without_a_gradient() -> None:
    model = Block()
    optimizer = sc.optim.AdamW(model.parameters(), lr=1e-2)
    mask = torch.rand_like(model.up.weight) < 0.5
    optimizer.set_masks({model.up.weight: mask})
    steps(model, optimizer, 2)
    with torch.no_grad():
        model.up.weight.fill_(1.0)
    model.zero_grad()
    optimizer.step()
    assert torch.equal(model.up.weight != 0, mask)


def test_differentiable_steps_keep_their_graph() -> None:
    rates = []
    for kind in (torch.optim.AdamW, sc.optim.AdamW):
        rate = torch.tensor(0.1, requires_grad=True)
        weight = torch.ones(3, requires_grad=True)
        moved = weight.clone()
        moved.grad = torch.ones(3)
        kind([moved.requires_grad_()] if moved.is_leaf else [moved], lr=rate, differentiable=True).step()
        moved.sum().backward()
        rates.append((float(rate.grad), weight.grad.tolist()))
    assert rates[0] == rates[1]
    assert rates[0][0] != 0
