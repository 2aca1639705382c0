"""Zeros that stay: a Pruner that is given masks holds them, prunes on from there, and passes them to copies."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import secateur as sc
from secateur.errors import PatternError, RegrowthError, StateError
from secateur.model.masks import save_masks
from secateur.model.prunable import find_prunable
from tests.conftest import Block, train
from tests.trained import classifier

Zeros = dict[str, Tensor]


class Experts(nn.Module):
    """Four experts in one stack, each token sent to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 24, 12) / 4)
        self.down = nn.Parameter(torch.randn(4, 12, 24) / 5)

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        hidden = torch.einsum("bi,bhi->bh", x, self.up[route]).relu()
        return torch.einsum("bh,bih->bi", hidden, self.down[route])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(12, 12), Experts(), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden + self.experts(hidden, x[:, :4].argmax(1)))


def relu() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12)), torch.randn(16, 12)


def convolutional() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1), nn.BatchNorm2d(3)
    )
    return model, torch.randn(4, 3, 6, 6)


def transformer() -> tuple[nn.Module, Tensor]:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), torch.randn(4, 5, 16)


def mixture() -> tuple[nn.Module, Tensor]:
    return Mixture(), torch.randn(32, 12)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "relu": relu, "conv": convolutional, "transformer": transformer, "moe": mixture,
}  # fmt: skip


class Lion(torch.optim.Optimizer):
    """Keeps one moment and steps by its sign, so that every weight moves in every step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_((0.9 * moment + 0.1 * p.grad).sign() * group["lr"])
                moment.lerp_(p.grad, 0.01)


class Codes(torch.optim.Optimizer):
    """Eight-bit state of bitsandbytes: codes, a table of values, the largest value of each 256."""

    optimizer_name = "adam"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            for number in (1, 2) if not self.state[p] else ():
                self.state[p][f"state{number}"] = torch.full(p.shape, 9, dtype=torch.uint8)
                self.state[p][f"qmap{number}"] = torch.linspace(0, 1, 256)
                self.state[p][f"absmax{number}"] = torch.ones(-(-p.numel() // 256))
            p.sub_(p.grad.sign() * 0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "ours": lambda p: sc.optim.AdamW(p, 0.01),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "lion": lambda p: Lion(p, 0.01),
    "codes": lambda p: Codes(p, {}),
}


def prunable(model: nn.Module) -> dict[str, Tensor]:
    return {one.name: one.parameter.detach() for one in find_prunable(model)[0]}


def zeros(model: nn.Module) -> Zeros:
    return {name: weight == 0 for name, weight in prunable(model).items()}


def count(found: Mapping[str, Tensor]) -> int:
    return sum(int(tensor.sum()) for tensor in found.values())


def sparse(name: str, share: float = 0.6) -> tuple[nn.Module, Tensor]:
    """A model in which this share of each prunable weight is zero, and its inputs."""
    torch.manual_seed(3)
    model, inputs = MODELS[name]()
    for weight in prunable(model).values():
        weight[torch.rand(weight.shape) < share] = 0
    return model, inputs


def run(model: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer, pruner: sc.Pruner, steps: int) -> None:
    goal = inputs.roll(1, 0)
    for _ in range(steps):
        nn.functional.mse_loss(model(inputs), goal).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()


def same(one: Zeros, other: Zeros) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_zeros_after_training_as_before_with_every_optimizer(name: str, kind: str) -> None:
    model, inputs = sparse(name)
    before, weights = zeros(model), copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS[kind](model.parameters())
    pruner = sc.Pruner(model, optimizer, masks="zeros", sparsity=None)
    run(model, inputs, optimizer, pruner, 50)
    assert same(zeros(model), before)  # none lost, none gained
    assert pruner.report().pruned == count(before)
    for key in before:
        assert not torch.equal(model.state_dict()[key], weights[key])  # it did train
        plain = [t for t in optimizer.state[model.get_parameter(key)].values() if isinstance(t, Tensor)]
        shaped = [t for t in plain if t.shape == before[key].shape]
        assert all(bool((state[before[key]] == 0).all()) for state in shaped)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "ours", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_pruning_goes_on_from_the_zeros_given(name: str, kind: str) -> None:
    model, inputs = sparse(name, 0.4)
    before = zeros(model)
    total = sum(mask.numel() for mask in before.values())
    optimizer = OPTIMIZERS[kind](model.parameters())
    score = "magnitude" if kind == "sgd" else "variance"
    ramp = sc.cubic(0.85, begin=5, end=40)
    pruner = sc.Pruner(model, optimizer, masks="zeros", sparsity=ramp, score=score, every=5)
    assert pruner.report().asked == pruner.sparsity == count(before) / total
    run(model, inputs, optimizer, pruner, 50)
    after = zeros(model)
    assert count(after) == round(0.85 * total) == pruner.report().pruned
    assert all(bool((after[key] >= before[key]).all()) for key in before)  # the old ones are among them
    first = pruner.updates[0]
    assert first.step > 5  # while the schedule asks for less than is held, nothing is chosen
    assert first.asked > count(before) / total


@pytest.mark.parametrize(
    "options",
    [
        {"scope": "layer"},
        {"scope": "row"},
        {"allocation": "erk"},
        {"allocation": "lamp"},
        {"allocation": "owl"},
        {"pattern": "2:4", "sparsity": 0.5},
        {"pattern": "block:4x4"},
    ],
)
def test_every_scope_pattern_and_allocation_keeps_what_is_held(options: dict[str, Any], block: Block) -> None:
    """Zeros are held unevenly: most of one tensor, none of the other."""
    kept = torch.rand(block.up.weight.shape, generator=torch.Generator().manual_seed(0)) > 0.8
    masks = {"up.weight": kept}
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    settings = {"sparsity": 0.6, **options}
    pruner = sc.Pruner(block, optimizer, score="magnitude", masks=masks, every=2, **settings)
    assert torch.equal(block.up.weight != 0, kept)
    train(block, optimizer, 4, pruner.step)
    found = pruner.masks
    assert not bool((found["up.weight"] & ~kept).any())
    assert bool((block.up.weight[~kept] == 0).all())
    if options.get("scope") == "layer":  # each layer counts its own zeros
        assert int((~found["down.weight"]).sum()) == round(0.6 * 1024)
        assert torch.equal(found["up.weight"], kept)
    elif options.get("scope") == "row":
        assert bool(((~found["down.weight"]).sum(1) == round(0.6 * 64)).all())
        assert torch.equal((~found["up.weight"]).sum(1), (~kept).sum(1).clamp(min=round(0.6 * 16)))
    elif "allocation" in options:
        assert pruner.report().pruned == round(0.6 * 2048)
    elif options["pattern"] == "2:4":
        assert all(bool((mask.view(-1, 4).sum(1) <= 2).all()) for mask in found.values())
        assert bool((found["down.weight"].view(-1, 4).sum(1) == 2).all())
    else:
        small = found["down.weight"].view(4, 4, -1, 4).float().mean((1, 3))
        assert bool(((small == 0) | (small == 1)).all())


def test_a_schedule_below_what_is_held_keeps_it_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = sparse("relu")
    before = zeros(model)
    optimizer = torch.optim.AdamW(model.parameters())
    pruner = sc.Pruner(model, optimizer, masks="zeros", sparsity=sc.linear(0.3, begin=0, end=10), every=2)
    with caplog.at_level(logging.INFO, "secateur"):
        run(model, inputs, optimizer, pruner, 12)
    assert same(zeros(model), before)
    assert [record.message for record in caplog.records if "which stays" in record.message] == [
        f"Step 2: the schedule asks for sparsity 0.0600 and the masks held have {pruner.sparsity:.4f}, which stays."
    ]


@pytest.mark.parametrize("source", ["mapping", "folder", "path", "report", "pruner"])
def test_masks_may_come_from_anywhere(source: str, tmp_path: Path) -> None:
    """Weights that the masks remove are zeroed at once, and their optimizer state too."""
    torch.manual_seed(0)
    model, batches = classifier()
    dense = copy.deepcopy(model)
    report = sc.prune(model, batches, score="magnitude", sparsity=0.7)
    save_masks(tmp_path, report.masks)
    optimizer = torch.optim.AdamW(dense.parameters(), lr=0.01)
    nn.functional.cross_entropy(dense(batches[0][0]), batches[0][1]).backward()
    optimizer.step()
    given: Any = {"mapping": dict(report.masks), "folder": str(tmp_path), "path": tmp_path, "report": report}.get(
        source
    )
    if source == "pruner":
        given = sc.Pruner(model, torch.optim.SGD(model.parameters()), masks="zeros", sparsity=None)
    pruner = sc.Pruner(dense, optimizer, masks=given, sparsity=None)
    for name, mask in report.masks.items():
        weight = dense.get_parameter(name)
        assert torch.equal(pruner.masks[name], mask)
        for tensor in (weight, optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]):
            assert torch.equal(tensor != 0, mask)
    assert pruner.sparsity == report.sparsity


def test_negative_zeros_count_and_tensors_of_zeros_alone_do_not(block: Block, caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad():
        block.up.weight[0] = -0.0
        block.down.weight.zero_()
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    with caplog.at_level(logging.WARNING, "secateur"):  # a surprise to those who pruned that tensor
        pruner = sc.Pruner(block, optimizer, masks="zeros", sparsity=None)
    assert any("'down.weight'" in record.message and "entirely zero" in record.message for record in caplog.records)
    train(block, optimizer, 3, pruner.step)
    assert pruner.report().pruned == block.up.weight[0].numel()
    assert bool((block.up.weight[0] == 0).all())
    assert bool(block.down.weight.any())  # it trains


def test_with_nothing_to_hold_the_first_step_says_so(block: Block) -> None:
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    pruner = sc.Pruner(block, optimizer, masks="zeros", sparsity=None)
    with pytest.raises(StateError, match=r"nothing to hold.*Load the sparse weights first"):
        train(block, optimizer, 1, pruner.step)


KEPT = torch.ones(64, 16, dtype=torch.bool)


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        ({"up.wieght": KEPT}, r"mask for 'up.wieght', which the model does not have. Did you mean 'up.weight'\?"),
        ({"lm_head.weight": KEPT}, "mask for 'lm_head.weight', which is not pruned here: head"),
        ({"up.weight": KEPT[:3]}, r"The mask of 'up.weight' is torch.bool \[3, 16\]; it must be torch.bool \[64, 16\]"),
        ({"up.weight": KEPT.float()}, r"is torch.float32 \[64, 16\]; it must be torch.bool"),
        ({"up.weight": True}, "is a bool; it must be torch.bool"),
        ({"up.weight": ~KEPT, "down.weight": ~KEPT.T}, "remove every prunable weight"),
        ({}, "empty mapping"),
        ("zero", "masks='zero' is neither 'zeros' nor a folder with saved masks. Did you mean 'zeros'"),
        (Path("nowhere"), "There is no masks.safetensors in nowhere"),
        (7, "masks must be 'zeros', a mapping"),
        (["zeros"], "masks must be 'zeros', a mapping.*got a list"),
    ],
)
def test_masks_that_do_not_fit_are_refused_and_nothing_changes(masks: Any, said: str, block: Block) -> None:
    before = copy.deepcopy(block.state_dict())
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    with pytest.raises(StateError, match=said):
        sc.Pruner(block, optimizer, masks=masks, sparsity=None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())


def test_two_masks_of_one_tied_weight_must_agree() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(2)))
    model[1].weight = model[0].weight
    one, other = torch.eye(16, dtype=torch.bool), torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) > 0.5
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(StateError, match=r"'0.weight' and '1.weight' are one tied weight, and their masks differ"):
        sc.Pruner(model, optimizer, masks={"0.weight": one, "1.weight": other}, sparsity=None)
    assert bool(model[0].weight.all())
    pruner = sc.Pruner(model, optimizer, masks={"0.weight": one, "1.weight": one.clone()}, sparsity=None)
    assert torch.equal(pruner.masks["0.weight"], one)


def test_a_pruners_own_report_has_no_masks(block: Block) -> None:
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    report = sc.Pruner(block, optimizer, score="magnitude").report()
    with pytest.raises(StateError, match=r"got a Report.*pass pruner.masks"):
        sc.Pruner(block, optimizer, masks=report, sparsity=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"pattern": "2:4"}, {"allocation": "erk"}, {"scope": "row"}])
def test_settings_of_pruning_mean_nothing_while_holding(options: Any, block: Block) -> None:
    with pytest.raises(PatternError, match=rf"holds zeros and prunes nothing else, but {next(iter(options))} says"):
        sc.Pruner(block, torch.optim.SGD(block.parameters(), 0.1), masks="zeros", sparsity=None, **options)


def test_regrowth_would_bring_held_weights_back(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    with pytest.raises(RegrowthError, match=r"masks=... keeps the given weights at zero.*strict=False"):
        sc.Pruner(block, optimizer, masks="zeros", regrow="random", until=10)


def test_masks_of_other_wrappings_are_taken(block: Block) -> None:
    """Names as a compiled model or one in DistributedDataParallel has them, and a tied weight's other name."""
    kept = torch.rand(64, 16) > 0.5
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    for prefix in ("_orig_mod.", "module.", "module._orig_mod."):
        pruner = sc.Pruner(block, optimizer, masks={f"{prefix}up.weight": kept}, sparsity=None)
        assert torch.equal(pruner.masks["up.weight"], kept)


@pytest.mark.parametrize("settings", [{"sparsity": None}, {"sparsity": sc.cubic(0.9, begin=0, end=40), "every": 4}])
@pytest.mark.parametrize("kind", ["adamw", "ours"])
def test_resumed_is_the_same_to_the_bit(kind: str, settings: dict[str, Any]) -> None:
    model, inputs = sparse("relu", 0.5)
    base = copy.deepcopy(model)
    optimizer = OPTIMIZERS[kind](model.parameters())
    pruner = sc.Pruner(model, optimizer, masks="zeros", **settings)
    resumed: list[tuple[nn.Module, torch.optim.Optimizer, sc.Pruner]] = []
    for steps in (0, 2, 10):  # before the first step; while the schedule asks for less than is held; above it
        run(model, inputs, optimizer, pruner, steps)
        saved = io.BytesIO()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "pruner": pruner.for_checkpointing().state_dict()}, saved)
        loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
        fresh = copy.deepcopy(base)
        again = OPTIMIZERS[kind](fresh.parameters())
        other = sc.Pruner(fresh, again, masks="zeros", **settings)
        fresh.load_state_dict(loaded["model"])
        again.load_state_dict(loaded["optimizer"])
        other.for_checkpointing().load_state_dict(loaded["pruner"])
        run(fresh, inputs, again, other, 50 - pruner.report().step)
        resumed.append((fresh, again, other))
    run(model, inputs, optimizer, pruner, 38)
    for fresh, _, other in resumed:
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in fresh.state_dict().items())
        assert other.sparsity == pruner.sparsity


def test_given_masks_are_not_lost_by_loading(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    trained = sc.Pruner(block, optimizer, score="magnitude", sparsity=0.5, every=1)
    train(block, optimizer, 1, trained.step)
    state = trained.state_dict()
    kept = torch.arange(1024).view(64, 16) >= 100
    pruner = sc.Pruner(block, optimizer, score="magnitude", sparsity=0.5, every=1, masks={"up.weight": kept})
    lost = int((trained.masks["up.weight"] & ~kept).sum())
    assert lost
    with pytest.raises(StateError, match=rf"saved masks keep {lost} weights that masks=... of this Pruner removes"):
        pruner.load_state_dict(state)
    assert pruner.report().pruned == 100
    pruner.load_state_dict(state, strict=False)
    assert torch.equal(pruner.masks["up.weight"], trained.masks["up.weight"] & kept)
    train(block, optimizer, 2, pruner.step)
    assert bool((block.up.weight[~kept] == 0).all())
    again = sc.Pruner(block, optimizer, score="magnitude", sparsity=0.5, every=1, masks={"up.weight": kept})
    again.load_state_dict(pruner.state_dict())
    assert again.sparsity == pruner.sparsity == (1024 + lost) / 2048


def test_zeros_by_chance_do_not_stand_against_a_saved_state() -> None:
    """After resuming, "zeros" may find weights that training has made zero; the saved masks are exact."""
    model, inputs = sparse("relu")
    optimizer = torch.optim.AdamW(model.parameters())
    pruner = sc.Pruner(model, optimizer, masks="zeros", sparsity=None)
    run(model, inputs, optimizer, pruner, 2)
    with torch.no_grad():
        weight = model.get_parameter("0.weight")
        weight[tuple(weight.nonzero()[0])] = 0
    other = sc.Pruner(model, optimizer, masks="zeros", sparsity=None)
    assert other.report().pruned == pruner.report().pruned + 1
    other.load_state_dict(pruner.state_dict())
    assert same({n: ~m for n, m in other.masks.items()}, {n: ~m for n, m in pruner.masks.items()})


def test_a_held_run_may_be_pruned_further_and_a_pruned_one_held() -> None:
    model, inputs = sparse("relu", 0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    holding = sc.Pruner(model, optimizer, masks="zeros", sparsity=None)
    run(model, inputs, optimizer, holding, 3)
    further = sc.Pruner(model, optimizer, score="magnitude", sparsity=0.75, scope="layer", every=1)
    with pytest.raises(StateError, match="The saved Pruner has"):
        further.load_state_dict(holding.state_dict())
    further.load_state_dict(holding.state_dict(), strict=False)
    run(model, inputs, optimizer, further, 2)
    assert further.sparsity == 0.75
    before = zeros(model)
    last = sc.Pruner(model, optimizer, masks="zeros", sparsity=None, every=1)
    last.load_state_dict(further.state_dict(), strict=False)
    run(model, inputs, optimizer, last, 5)
    assert same(zeros(model), before)


def test_the_warning_about_zeros_names_the_setting_that_holds_them() -> None:
    model, inputs = sparse("relu")
    optimizer = torch.optim.AdamW(model.parameters())
    pruner = sc.Pruner(model, optimizer, sparsity=0.1)
    with pytest.warns(UserWarning, match='grow back.*masks="zeros"'):
        run(model, inputs, optimizer, pruner, 1)


def averaged(model: nn.Module) -> nn.Module:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


@pytest.mark.parametrize("wrap", [averaged, copy.deepcopy, lambda m: torch.compile(copy.deepcopy(m), backend="eager")])
def test_copies_get_the_same_zeros(wrap: Any) -> None:
    model, inputs = MODELS["conv"]()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    pruner = sc.Pruner(model, optimizer, sparsity=sc.cubic(0.8, begin=0, end=10), every=2)
    copied = wrap(model)
    for _ in range(12):
        run(model, inputs, optimizer, pruner, 1)
        if isinstance(copied, AveragedModel):
            copied.update_parameters(model)
    inner = copied.module if isinstance(copied, AveragedModel) else getattr(copied, "_orig_mod", copied)
    assert count(zeros(inner)) < pruner.report().pruned
    others = {name: tensor.clone() for name, tensor in inner.state_dict().items() if name not in pruner.masks}
    pruner.apply_to(copied)
    assert same(zeros(inner), {name: ~mask for name, mask in pruner.masks.items()})
    assert all(torch.equal(inner.state_dict()[name], tensor) for name, tensor in others.items())


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight


def test_a_copy_with_broken_ties_gets_the_zeros_under_every_name() -> None:
    model = Tied()
    kept = torch.rand(8, 8) > 0.5
    pruner = sc.Pruner(model, torch.optim.SGD(model.parameters(), 0.1), masks={"one.weight": kept}, sparsity=None)
    copied, still = copy.deepcopy(model), copy.deepcopy(model)
    copied.two.weight = nn.Parameter(torch.randn(8, 8))
    with torch.no_grad():
        still.one.weight.fill_(1)
    pruner.apply_to(copied)
    pruner.apply_to(still)
    assert torch.equal(copied.one.weight != 0, kept)
    assert torch.equal(copied.two.weight != 0, kept)
    assert torch.equal(still.two.weight != 0, kept)
    copied.two.weight = nn.Parameter(torch.randn(4, 8))
    with pytest.raises(StateError, match=r"'two.weight' is \[4, 8\] in Tied"):
        pruner.apply_to(copied)


@pytest.mark.parametrize("name", MODELS)
def test_a_frozen_layer_that_trains_later_keeps_its_zeros(name: str) -> None:
    model, inputs = sparse(name)
    before = zeros(model)
    frozen = model.get_parameter(next(iter(before))).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)  # has the frozen layer too
    pruner = sc.Pruner(model, optimizer, masks="zeros", sparsity=None)
    run(model, inputs, optimizer, pruner, 2)
    frozen.requires_grad_(True)
    was = frozen.detach().clone()
    run(model, inputs, optimizer, pruner, 5)
    assert not torch.equal(frozen, was)
    assert same(zeros(model), before)


def test_a_frozen_layer_outside_the_optimizer_is_left_out_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = sparse("relu")
    first = model.get_parameter("0.weight").requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one is not first], 0.01)
    with caplog.at_level(logging.WARNING, "secateur"):
        pruner = sc.Pruner(model, optimizer, masks="zeros", sparsity=None)
    assert "0.weight" not in pruner.masks
    assert not caplog.records


@pytest.mark.parametrize("settings", [{"masks": "zeros", "sparsity": None}, {"score": "magnitude", "sparsity": 0.6}])
def test_a_sparse_layer_that_joins_the_optimizer_later_is_refused(settings: dict[str, Any]) -> None:
    model, inputs = sparse("relu")
    first = model.get_parameter("0.weight").requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one is not first], 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other layers have zeros, under a schedule
        pruner = sc.Pruner(model, optimizer, every=1, **settings)
        run(model, inputs, optimizer, pruner, 2)
    optimizer.add_param_group({"params": [first.requires_grad_(True)]})
    before = zeros(model)
    with pytest.raises(StateError, match="1 tensors with zeros joined AdamW.*undo their zeros: '0.weight'"):
        run(model, inputs, optimizer, pruner, 1)
    assert same(zeros(model), before)


def test_a_dense_layer_that_joins_the_optimizer_later_is_named(block: Block) -> None:
    block.down.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in block.parameters() if one.requires_grad], 0.01)
    pruner = sc.Pruner(block, optimizer, sparsity=0.5, every=1)
    train(block, optimizer, 2, pruner.step)
    optimizer.add_param_group({"params": [block.down.weight.requires_grad_(True)]})
    with pytest.warns(
        UserWarning, match="1 tensors joined AdamW after the Pruner was made and stay dense: 'down.weight'"
    ):
        train(block, optimizer, 2, pruner.step)
    assert bool(block.down.weight.all())


def test_a_tensor_of_zeros_alone_is_held_where_the_others_are_sparse(
    block: Block, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.no_grad():
        block.up.weight.mul_(torch.rand(block.up.weight.shape) > 0.5)
        block.down.weight.zero_()
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    with caplog.at_level(logging.WARNING, "secateur"):
        pruner = sc.Pruner(block, optimizer, masks="zeros", sparsity=None, only=["up", "down"])
    assert any("'down.weight'" in one.message and "stay zero" in one.message for one in caplog.records)
    train(block, optimizer, 3, pruner.step)
    assert not bool(block.down.weight.any())


def test_a_copy_inside_several_wrappers_in_another_dtype(block: Block) -> None:
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    kept = torch.rand(64, 16) > 0.5
    pruner = sc.Pruner(block, optimizer, masks={"up.weight": kept}, sparsity=None)
    copied = Block().to(torch.bfloat16)
    pruner.apply_to(AveragedModel(copied))  # AveragedModel copies: this one stays dense
    assert count(zeros(copied)) == 0
    wrapped = AveragedModel(torch.compile(copied, backend="eager"))
    pruner.apply_to(wrapped)
    assert torch.equal(wrapped.module._orig_mod.up.weight != 0, kept)


def test_modules_that_are_no_copies_are_refused_and_nothing_changes(block: Block) -> None:
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    pruner = sc.Pruner(block, optimizer, masks={"up.weight": torch.rand(64, 16) > 0.5}, sparsity=None)
    smaller = Block()
    smaller.down = nn.Linear(64, 8)
    dense = copy.deepcopy(smaller.state_dict())
    with pytest.raises(StateError, match=r"'down.weight' is \[8, 64\] in Block and \[16, 64\] in the pruned model"):
        pruner.apply_to(smaller)
    assert all(torch.equal(tensor, dense[name]) for name, tensor in smaller.state_dict().items())
    with pytest.raises(StateError, match="Linear has no parameter 'up.weight', which is pruned"):
        pruner.apply_to(nn.Linear(64, 16))
    with pytest.raises(StateError, match="takes a module with the pruned model's parameters; got a dict"):
        pruner.apply_to({})  # type: ignore[arg-type]


def test_a_holding_pruner_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = sparse("relu")
    with caplog.at_level(logging.INFO, "secateur"):
        pruner = sc.Pruner(model, torch.optim.SGD(model.parameters(), 0.1), masks="zeros", sparsity=None)
    assert f"Holding {pruner.report().pruned} of 768 weights at zero" in caplog.text
    assert "hold" in repr(pruner)
    assert "score none" in str(pruner.report())


@pytest.mark.parametrize("settings", [{"sparsity": None}, {"sparsity": sc.linear(0.9, begin=0, end=12), "every": 3}])
def test_accelerate_saves_and_loads_it(settings: dict[str, Any], tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    plain, inputs = sparse("relu", 0.5)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), 0.01))
    pruner = sc.Pruner(model, optimizer, masks="zeros", **settings)
    accelerator.register_for_checkpointing(pruner.for_checkpointing())
    run(model, inputs, optimizer, pruner, 7)
    accelerator.save_state(str(tmp_path / "state"))
    run(model, inputs, optimizer, pruner, 7)
    expected, sparsity = copy.deepcopy(model.state_dict()), pruner.sparsity
    accelerator.load_state(str(tmp_path / "state"))
    assert pruner.report().step == 7
    run(model, inputs, optimizer, pruner, 7)
    assert pruner.sparsity == sparsity
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("masks", ["zeros", "mapping"])
def test_masks_held_as_bits_are_the_same(masks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's interpreter: packed masks are given, held, saved, loaded and applied to copies as bools are."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")

    def held(make: Any) -> tuple[sc.Pruner, nn.Module]:
        model, inputs = sparse("relu", 0.5)
        given: Any = masks if masks == "zeros" else {name: ~mask for name, mask in zeros(model).items()}
        optimizer = make(model.parameters(), lr=0.01)
        settings: dict[str, Any] = {"score": "magnitude", "sparsity": 0.7, "every": 2, "masks": given}
        pruner = sc.Pruner(model, optimizer, **settings)
        run(model, inputs, optimizer, pruner, 3)
        other = sc.Pruner(model, optimizer, **settings)
        other.load_state_dict(pruner.state_dict())
        copied = copy.deepcopy(model)
        for weight in prunable(copied).values():
            weight.fill_(1)
        other.apply_to(copied)
        return other, copied

    plain, copied = held(torch.optim.AdamW)
    with monkeypatch.context() as patch:
        patch.delenv("SECATEUR_KERNELS")
        packed, other = held(torch.optim.AdamW)
        ours, _ = held(sc.optim.AdamW)
        assert packed._held.packed
        assert all(torch.equal(mask, plain.masks[name]) for name, mask in packed.masks.items())
    assert same(zeros(copied), zeros(other))
    assert plain.sparsity == packed.sparsity == ours.sparsity == round(0.7 * 768) / 768
