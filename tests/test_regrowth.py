"""Regrowth: what goes and what comes back, against a plain sort; exact counts; births at zero; resumed and sharded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import FactError, RegrowthError
from secateur.regrowth import Regrowth
from secateur.scores import mixed, resolve
from secateur.selection.masks import from_bits, inverted, to_bits
from tests import kernel_cases as cases
from tests.conftest import Block, train
from tests.oracle import remove_lowest
from tests.test_distributed import agree, launch

Masks = dict[str, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 6, bias=False))


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, first: int = 1) -> Iterator[int]:
    """Optimizer steps on data that depends on the step alone; gradients are cleared after the caller has had a look."""
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 12, generator=generator)
        nn.functional.mse_loss(model(inputs), inputs[:, :6]).backward()
        optimizer.step()
        yield step
        optimizer.zero_grad()


def pools(masks: Masks, scope: str) -> list[list[tuple[str, slice]]]:
    """Who competes with whom, as places in the flattened tensors."""
    if scope == "row":
        return [
            [(name, slice(row * mask.shape[1], (row + 1) * mask.shape[1]))]
            for name, mask in masks.items()
            for row in range(mask.shape[0])
        ]
    each = [(name, slice(0, mask.numel())) for name, mask in masks.items()]
    return [[one] for one in each] if scope == "layer" else [each]


def reference(masks: Masks, scores: Masks, growth: Masks, asked: float, share: float, scope: str) -> Masks:
    """The plainest statement of an exchange: to the schedule, then the drop, then the growth, each by a stable sort."""
    result = {name: mask.flatten().clone() for name, mask in masks.items()}
    for pool in pools(masks, scope):
        alive, score, wish = (
            torch.cat([values[name].flatten()[where] for name, where in pool]) for values in (result, scores, growth)
        )
        alive = remove_lowest(score, round(asked * alive.numel()) - int((~alive).sum()), alive)
        count = round(share * int(alive.sum()))
        alive = remove_lowest(score, count, alive)
        gone = ~alive
        alive |= remove_lowest(wish, int(gone.sum()) - count, gone)
        for (name, where), part in zip(pool, alive.split([w.stop - w.start for _, w in pool]), strict=True):
            result[name][where] = part
    return {name: flat.view(masks[name].shape) for name, flat in result.items()}


def lots(masks: Masks, step: int) -> Masks:
    """What is drawn at a step: a hash of where a weight is in the flat order of all prunable tensors."""
    drawn, first = {}, 0
    for name, mask in masks.items():
        index = torch.arange(first, first + mask.numel())
        drawn[name] = mixed(index - 0x9E3779B97F4A7C * step) >> 8
        first += mask.numel()
    return drawn


@pytest.mark.parametrize("make", [torch.optim.AdamW, sc.optim.AdamW])
@pytest.mark.parametrize("scope", ["model", "layer", "row"])
@pytest.mark.parametrize("kind", ["gradient", "random"])
def test_every_update_is_that_of_the_plain_sort(kind: str, scope: str, make: Any) -> None:
    model = network()
    optimizer = make(model.parameters(), lr=0.02)
    schedule = sc.cubic(0.7, begin=1, end=8)
    pruner = sc.Pruner(
        model, optimizer, score="magnitude", sparsity=schedule, every=2, scope=scope, regrow=kind, until=13, only="*"
    )
    came_back = 0
    for step in steps_of(model, optimizer, 16):
        before = {name: mask.clone() for name, mask in pruner.masks.items()}
        weights = {name: model.get_parameter(name).detach().clone().abs() for name in before}
        growth = lots(before, step)
        if kind == "gradient":
            growth = {name: model.get_parameter(name).grad.abs() for name in before}  # type: ignore[union-attr]
        pruner.step()
        due = step % 2 == 0 and step <= 13
        share = Regrowth(kind, 0.3, 13).share(step) if due else 0.0
        expected = reference(before, weights, growth, schedule(step) if due else 0.0, share, scope)
        for name, mask in pruner.masks.items():
            assert torch.equal(mask, expected[name]), (step, name)
            assert bool((model.get_parameter(name)[~mask] == 0).all())
        if due:
            grown = sum(int((mask & ~before[name]).sum()) for name, mask in pruner.masks.items())
            changed = sum(int((mask ^ before[name]).sum()) for name, mask in pruner.masks.items())
            assert (pruner.updates[-1].grown, pruner.updates[-1].churn) == (grown, changed)
            assert sum(row.churn for row in pruner.report().tensors) == changed
            came_back += grown
    assert came_back > 10
    assert [update.step for update in pruner.updates] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(
    "options",
    [{}, {"scope": "layer"}, {"scope": "row"}, {"allocation": "erk"}, {"allocation": "lamp"}, {"score": "movement"}],
)
@pytest.mark.parametrize("kind", ["gradient", "random"])
def test_the_sparsity_is_the_schedules_to_the_weight(kind: str, options: dict[str, Any]) -> None:
    """Beside a Pruner without regrowth: the same count is gone after every step, in each tensor where it must be."""
    counts: list[list[Any]] = []
    for regrow in (None, kind):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        chosen = {"score": "magnitude", "regrow": regrow, **options}
        pruner = sc.Pruner(model, optimizer, sparsity=sc.linear(0.8, begin=0, end=7), every=2, only="*", **chosen)
        counts.append([])
        for _ in steps_of(model, optimizer, 9):
            pruner.step()
            rows = [int((~mask).sum()) for mask in pruner.masks.values()]
            counts[-1].append(rows if options.get("scope") or options.get("allocation") == "erk" else sum(rows))
            assert pruner.report().pruned == sum(rows)
    assert counts[0] == counts[1]


def test_what_was_dropped_returns_only_where_its_gradient_is_larger() -> None:
    """Five living of ten. The two lowest give way; of what is gone the two of largest gradient come back."""
    layer = nn.Linear(10, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
    pruner = sc.Pruner(layer, optimizer, score="magnitude", sparsity=0.5, every=1, regrow="gradient", drop=0.4, until=9)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10]]))
    # At first 1 to 5 go, then 6 and 7. The 7, at index 6, has the largest gradient of the gone, index 1 the next.
    layer.weight.grad = torch.tensor([[0.0, -5, 0.1, 0.2, 0.3, 1.0, 6.0, 9, 9, 9]])
    optimizer.step()
    pruner.step()
    assert pruner.masks["weight"].int().tolist() == [[0, 1, 0, 0, 0, 0, 1, 1, 1, 1]]
    assert layer.weight.tolist() == [[0.0, 2.0, 0, 0, 0, 0, 7.0, 8.0, 9.0, 10.0]]  # neither was away, so both stay
    assert pruner.updates[-1].grown == 0


def test_the_share_follows_half_a_cosine() -> None:
    regrowth = Regrowth("gradient", 0.4, 100)
    assert regrowth.share(0) == 0.4
    assert regrowth.share(50) == pytest.approx(0.2)
    assert regrowth.share(25) == pytest.approx(0.2 * (1 + math.sqrt(0.5)))
    assert regrowth.share(100) == regrowth.share(101) == regrowth.share(1000) == 0.0
    assert str(regrowth) == "gradient(drop=0.4, until=100)"


def test_updates_go_on_past_the_schedule_and_end_with_until(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    pruner = sc.Pruner(block, optimizer, sparsity=sc.linear(0.5, begin=2, end=6), every=2, regrow="gradient", until=12)
    train(block, optimizer, 20, pruner.step)
    assert [update.step for update in pruner.updates] == [4, 6, 8, 10]  # nothing is gone at 2, nothing is moved at 12
    assert [update.pruned for update in pruner.updates] == [512, 1024, 1024, 1024]
    assert all(update.grown > 0 for update in pruner.updates[1:])
    assert "regrow gradient(drop=0.3, until=12)" in str(pruner.report())
    assert f"({pruner.updates[-1].grown:,} came back)" in str(pruner.report())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: sc.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    ],
)
@pytest.mark.parametrize("kind", ["gradient", "random"])
def test_births_are_at_zero_with_zero_state_and_then_train(kind: str, make: Any, block: Block) -> None:
    optimizer = make(block.parameters())
    pruner = sc.Pruner(block, optimizer, score="magnitude", sparsity=0.6, every=4, regrow=kind, until=40)
    train(block, optimizer, 7, pruner.step)
    before = {name: mask.clone() for name, mask in pruner.masks.items()}
    train(block, optimizer, 1, pruner.step)
    born = {name: mask & ~before[name] for name, mask in pruner.masks.items()}
    assert sum(int(flags.sum()) for flags in born.values()) == pruner.updates[-1].grown > 20
    for name, flags in born.items():
        parameter = block.get_parameter(name)
        shaped = [value for value in optimizer.state[parameter].values() if value.shape == parameter.shape]
        assert len(shaped) >= 1
        assert all(bool((value[flags] == 0).all()) for value in (parameter, *shaped))
    train(block, optimizer, 1, pruner.step)
    for name, flags in born.items():
        assert bool(pruner.masks[name][flags].all())
        if kind == "gradient":  # a lot may fall on a weight no token reaches
            assert bool((block.get_parameter(name)[flags] != 0).all())


def test_what_is_kept_for_a_score_starts_anew_too() -> None:
    for score, fact in (("movement", "movement_sum"), ("displacement", "initial_weight")):
        block = Block()
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
        pruner = sc.Pruner(block, optimizer, score=score, sparsity=0.6, every=2, regrow="random", until=9)
        train(block, optimizer, 3, pruner.step)
        before = pruner.masks["up.weight"].clone()
        train(block, optimizer, 1, pruner.step)
        born = pruner.masks["up.weight"] & ~before
        assert bool(born.any())
        assert bool((pruner.state_dict()[f"{fact}.up.weight"][born] == 0).all())


@pytest.mark.parametrize("kind", ["gradient", "random"])
def test_attached_is_the_same(kind: str) -> None:
    found = []
    for attached in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        pruner = sc.Pruner(model, optimizer, sparsity=0.5, every=2, regrow=kind, until=9)
        if attached:
            pruner.attach()
        for _ in steps_of(model, optimizer, 6):
            pruner.step()
        found.append(pruner.masks)
    assert all(torch.equal(mask, found[1][name]) for name, mask in found[0].items())


@pytest.mark.parametrize("kind", ["gradient", "random"])
@pytest.mark.parametrize("stop", [3, 4, 9])  # between updates, at one, past the end of the ramp
def test_resumed_in_the_midst_is_the_same_to_the_bit(stop: int, kind: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, sc.Pruner]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedule = sc.linear(0.7, begin=0, end=7)
        options: dict[str, Any] = {"score": "movement", "every": 2, "only": "*"}
        return model, optimizer, sc.Pruner(model, optimizer, sparsity=schedule, regrow=kind, until=14, **options)

    model, optimizer, pruner = make()
    for step in steps_of(model, optimizer, 15):
        pruner.step()
        if step == stop:
            parts = {"model": model, "optimizer": optimizer, "pruner": pruner}
            torch.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "saved.pt")
    again, other, resumed = make()
    for name, state in torch.load(tmp_path / "saved.pt", weights_only=True).items():
        {"model": again, "optimizer": other, "pruner": resumed}[name].load_state_dict(state)
    for _ in steps_of(again, other, 15 - stop, stop + 1):
        resumed.step()
    for ours, theirs in ((model, again), (pruner, resumed)):
        state = theirs.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in ours.state_dict().items())
    assert sum(update.grown for update in resumed.updates) > 0


def test_gradients_that_are_gone_are_asked_for(block: Block) -> None:
    def late(none: bool, every: int) -> None:
        optimizer = torch.optim.AdamW(block.parameters())
        pruner = sc.Pruner(block, optimizer, sparsity=0.5, every=every, regrow="gradient", until=9)

        def after() -> None:
            optimizer.zero_grad(set_to_none=none)
            pruner.step()

        train(block, optimizer, 1, after)

    with pytest.raises(FactError, match="Call pruner.step\\(\\) after optimizer.step\\(\\) and before"):
        late(none=True, every=1)
    with pytest.raises(FactError, match="no prunable tensor has a gradient there"):
        late(none=True, every=5)  # long before the first update
    with pytest.raises(FactError, match="or use regrow='random'"):
        late(none=False, every=1)
    late(none=False, every=5)  # zeros may be honest: a model whose head starts at zero has them


def test_by_lot_no_gradient_is_needed(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=0.5, every=1, regrow="random", until=9)
    train(block, optimizer, 3, lambda: (optimizer.zero_grad(), pruner.step())[1])
    assert pruner.updates[-1].grown > 0


def test_a_tensor_the_loss_did_not_reach_has_gradient_zero() -> None:
    experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    pruner = sc.Pruner(experts, optimizer, score="magnitude", sparsity=0.5, every=1, regrow="gradient", until=9)
    experts[0](torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    kept = experts[1].weight.detach().abs().flatten().sort().values
    pruner.step()
    assert pruner.sparsity == 0.5
    assert int(pruner.masks["1.weight"].sum()) <= int((kept > 0).sum()) - 4  # nothing but drops there


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regrow": "gradients"}, "No regrowth 'gradients'. Use one of 'gradient', 'random', or None."),
        ({"regrow": "random"}, r"The schedule constant\(0.5\) has no end.* pass until="),
        ({"regrow": "random", "sparsity": lambda step: 0.5}, "has no end, so regrowth needs one"),
        ({"regrow": "random", "until": 0}, "until must be a number of optimizer steps, at least 1; got 0"),
        ({"regrow": "random", "until": 2.5}, "until must be a number of optimizer steps, at least 1; got 2.5"),
        ({"regrow": "random", "until": 9, "drop": 0}, r"in \(0, 1\); got 0"),
        ({"regrow": "random", "until": 9, "drop": 30}, r"in \(0, 1\); got 30"),
        ({"regrow": "random", "until": 9, "pattern": "2:4"}, "would break the pattern '2:4'. Pass pattern=None"),
        ({"regrow": "random", "until": 9, "pattern": "block:4x4"}, "would break the pattern 'block:4x4'"),
        ({"until": 9}, "until=9 is the last step of regrowth, but regrow is None. Pass regrow="),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str, block: Block) -> None:
    with pytest.raises(RegrowthError, match=message):
        sc.Pruner(block, torch.optim.AdamW(block.parameters()), **options)


def test_nan_gradients_stop_before_any_mask_changes(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, score="magnitude", sparsity=0.5, every=2, regrow="gradient", until=9)
    train(block, optimizer, 3, pruner.step)
    masks = {name: mask.clone() for name, mask in pruner.masks.items()}

    def spoil() -> None:
        block.up.weight.grad[~masks["up.weight"]] = torch.nan  # type: ignore[index]
        pruner.step()

    with pytest.raises(sc.SecateurError, match="NaN scores in 'up.weight'.*No mask was changed"):
        train(block, optimizer, 1, spoil)
    assert all(torch.equal(mask, masks[name]) for name, mask in pruner.masks.items())


@pytest.mark.parametrize("numel", [1, 31, 32, 33, 100])
def test_inverted_bits_leave_the_end_unset(numel: int) -> None:
    mask = torch.rand(numel) < 0.5
    bits = inverted(to_bits(mask), numel)
    assert torch.equal(bits, to_bits(~mask))
    assert torch.equal(from_bits(bits, numel), inverted(mask, numel))


def test_lots_of_late_steps_can_be_drawn() -> None:
    index = torch.arange(1000)
    for seed in (-(10**9), 10**9):
        drawn = resolve(f"random(seed={seed})")(index=index)
        assert bool(((drawn >= 0) & (drawn < 1)).all())
        assert abs(float(drawn.mean()) - 0.5) < 0.05


@pytest.mark.parametrize(("scope", "kind"), [("model", "gradient"), ("layer", "random"), ("row", "gradient")])
def test_kernels_give_the_same(scope: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks held as bits, by Triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")

    def run(make: Any) -> sc.Pruner:
        model = network()
        options: dict[str, Any] = {"score": "magnitude", "scope": scope, "regrow": kind, "until": 9, "only": "*"}
        return cases.masks_of(model, make(model.parameters(), lr=0.02), 4, every=2, sparsity=0.6, **options)

    plain = run(torch.optim.AdamW)
    with monkeypatch.context() as patch:
        patch.delenv("SECATEUR_KERNELS")
        fast, ours = run(torch.optim.AdamW), run(sc.optim.AdamW)
    assert fast._held.packed
    assert not plain._held.packed
    assert all(torch.equal(mask, fast.masks[name]) for name, mask in plain.masks.items())
    assert [u.churn for u in plain.updates] == [u.churn for u in fast.updates]
    assert sum(u.grown for u in plain.updates) == sum(u.grown for u in fast.updates) > 5
    assert ours.sparsity == plain.sparsity
    assert all(bool((ours._model.get_parameter(n)[~mask] == 0).all()) for n, mask in ours.masks.items())


@pytest.mark.slow
def test_two_processes_are_as_one(tmp_path: Path) -> None:
    settings = ("regrow", "regrow-layer", "regrow-random")
    jobs = [f"fsdp {setting}" for setting in settings] + ["mixed regrow", "ddp regrow"]
    alone = launch(tmp_path / "one.pt", 1, *(f"fsdp {setting}" for setting in settings))
    found = launch(tmp_path / "two.pt", 2, *jobs)
    for setting in settings:
        alone[f"single {setting}"] = alone[f"fsdp {setting}"]
    assert set(jobs) <= found.keys()
    for job in jobs:
        agree(found, alone, job)  # asserts, tensor by tensor
