"""The Pruner in a training loop: exact targets, zeros that stay, every flavour of Adam, scalers, groups, compile."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import ModelError, OptimizerError, PatternError, RegrowthError, ScheduleError, StateError
from secateur.scores import resolve
from tests.conftest import Block, train


def pruned_state_is_zero(pruner: sc.Pruner, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, mask in pruner.masks.items():
        parameter = model.get_parameter(name)
        assert bool((parameter[~mask] == 0).all())
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.ndim:
                assert bool((value[~mask] == 0).all()), key


FLAVOURS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "single": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
}


def test_the_defaults_are_what_the_campaign_found(block: Block) -> None:
    """docs/results.md: score, q and scope follow from it."""
    choices: list[dict[str, Any]] = [{}, {"score": "variance(q=1/4)", "scope": "model"}, {"score": "bitter7"}]
    found = []
    for options in choices:
        torch.manual_seed(0)
        model = copy.deepcopy(block)
        optimizer = torch.optim.AdamW(model.parameters())
        pruner = sc.Pruner(model, optimizer, sparsity=0.6, every=3, **options)
        train(model, optimizer, 3, pruner.step)
        found.append(torch.cat([mask.flatten() for mask in pruner.masks.values()]))
    default, named, bitter7 = found
    assert torch.equal(default, named)
    assert not torch.equal(default, bitter7)


@pytest.mark.parametrize("score", ["bitter7", "bitter5", "bitter8", "movement", "displacement", "random"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_two_lines_with_every_adam(flavour: str, score: str, block: Block) -> None:
    optimizer = FLAVOURS[flavour](block.parameters())
    pruner = sc.Pruner(block, optimizer, score=score, sparsity=sc.cubic(0.83, begin=2, end=11), every=3)
    seen: list[float] = []

    def after() -> None:
        before = {name: mask.clone() for name, mask in pruner.masks.items()}
        pruner.step()
        assert not any(bool((mask & ~before[name]).any()) for name, mask in pruner.masks.items())  # nothing regrows
        pruned_state_is_zero(pruner, block, optimizer)
        seen.append(pruner.sparsity)

    train(block, optimizer, 15, after)
    prunable = block.up.weight.numel() + block.down.weight.numel()
    assert seen == sorted(seen)
    assert seen[-1] == round(0.83 * prunable) / prunable
    assert [update.step for update in pruner.updates] == [3, 6, 9, 11]
    for update in pruner.updates:
        assert update.pruned == round(update.asked * prunable)
    if flavour == "amsgrad":
        assert "max_exp_avg_sq" in optimizer.state[block.up.weight]


def test_capturable(block: Block) -> None:
    """On the CPU torch allows it only under compile, so the optimizer step is compiled, as a user would."""
    optimizer = torch.optim.AdamW(block.parameters(), lr=torch.tensor(0.01), capturable=True)
    pruner = sc.Pruner(block, optimizer, score="bitter8", sparsity=0.5, every=2)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        block(torch.randint(0, 10, (2, 4))).square().mean().backward()
        step()
        pruner.step()
    assert isinstance(optimizer.state[block.up.weight]["step"], Tensor)
    assert [update.step for update in pruner.updates] == [2]
    assert pruner.sparsity == 0.5
    pruned_state_is_zero(pruner, block, optimizer)


def test_attach_makes_it_one_line(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    handle = sc.Pruner(block, optimizer, sparsity=0.5, every=2).attach()
    gc.collect()  # the hook alone keeps the pruner alive
    train(block, optimizer, 2)
    zeros = sum(int((w == 0).sum()) for w in (block.up.weight, block.down.weight))
    assert zeros == (block.up.weight.numel() + block.down.weight.numel()) // 2
    handle.remove()
    train(block, optimizer, 1)
    assert sum(int((w == 0).sum()) for w in (block.up.weight, block.down.weight)) < zeros


def test_attached_it_stays_out_of_a_compiled_step() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    pruner = sc.Pruner(layer, optimizer, score="magnitude", sparsity=sc.linear(0.5, begin=0, end=6), every=1, only="*")
    pruner.attach()
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(8):
        layer(torch.randn(8, 4)).square().mean().backward()
        compiled()
        assert int((layer.weight == 0).sum()) == pruner.report().pruned
    assert pruner.report().pruned == 8
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_forgotten_pruner_is_freed(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    forgotten = weakref.ref(sc.Pruner(block, optimizer))
    gc.collect()
    assert forgotten() is None
    train(block, optimizer, 1)


def test_steps_are_counted_by_the_optimizer_not_by_calls(block: Block) -> None:
    """Micro-batches of gradient accumulation may call step() too; it waits for the optimizer."""
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=sc.linear(0.5, begin=0, end=4), every=1)
    for micro in range(12):
        tokens = torch.randint(0, 10, (2, 4))
        (nn.functional.cross_entropy(block(tokens).flatten(0, 1), tokens.flatten()) / 3).backward()
        if micro % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        pruner.step()
    assert [update.step for update in pruner.updates] == [1, 2, 3, 4]
    assert pruner.sparsity == 0.5


def test_a_call_every_few_steps_still_makes_its_updates(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=sc.linear(0.5, begin=0, end=7), every=5)

    def every_third() -> None:
        for _ in range(4):
            train(block, optimizer, 3)
            pruner.step()

    with pytest.warns(UserWarning, match="has taken 3 steps since"):
        every_third()
    assert [update.step for update in pruner.updates] == [6, 9]
    assert pruner.sparsity == 0.5


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_a_grad_scaler_does_not_count(fused: bool, block: Block) -> None:
    """Unfused, the scaler does not call the optimizer; fused, it calls it with found_inf set."""
    optimizer = torch.optim.AdamW(block.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    pruner = sc.Pruner(block, optimizer, score="movement", sparsity=sc.linear(0.5, begin=0, end=8), every=1)
    plain = Block()
    plain.load_state_dict(block.state_dict())
    expected = torch.zeros_like(block.up.weight)
    for iteration in range(6):
        tokens = torch.randint(0, 10, (2, 4))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(block(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        spoiled = iteration in (1, 4)
        if spoiled:
            block.up.weight.grad[0, 0] = torch.inf
        else:
            expected -= block.up.weight.detach() * block.up.weight.grad / scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        pruner.step()
    assert [update.step for update in pruner.updates] == [1, 2, 3, 4]
    assert pruner.sparsity == round(0.25 * 2048) / 2048
    torch.testing.assert_close(pruner.state_dict()["movement_sum.up.weight"], expected)


def test_several_groups_with_their_own_betas(block: Block) -> None:
    groups = [{"params": block.up.parameters(), "betas": (0.5, 0.9)}, {"params": block.down.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    pruner = sc.Pruner(block, optimizer, score="bitter8", sparsity=0.5, every=1)
    train(block, optimizer, 1, pruner.step)
    assert pruner.sparsity == 0.5
    assert {name: reason for name, _, reason in pruner.report().left_out}["lm_head.weight"].startswith("head")


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_models_are_neither_broken_nor_recompiled(backend: str, block: Block) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block, backend=backend, fullgraph=True)  # fullgraph: a graph break is an error
    optimizer = torch.optim.AdamW(compiled.parameters())
    pruner = sc.Pruner(compiled, optimizer, sparsity=sc.linear(0.6, begin=0, end=6), every=2)
    train(compiled, optimizer, 1, pruner.step)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(compiled, optimizer, 9, pruner.step)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert len(pruner.updates) == 3
    eager = block(torch.arange(6)[None])
    torch.testing.assert_close(compiled(torch.arange(6)[None]), eager)


@pytest.mark.parametrize("limit", [None, 0.05])
def test_masked_gradients_change_only_what_clipping_does(limit: float | None, block: Block) -> None:
    """AdamWPrune masks gradients at every step. Weights and moments of pruned weights are zero after a step anyway, so
    without clipping nothing else follows; with it, the kept weights are clipped by their own norm."""
    found = []
    for masked in (False, True):
        torch.manual_seed(0)
        model = copy.deepcopy(block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        pruner = sc.Pruner(model, optimizer, sparsity=0.8, every=2)
        train(model, optimizer, 2, pruner.step)
        tokens = torch.randint(0, 10, (4, 6))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens * 7 % 10).flatten()).backward()
        if masked:
            pruner.mask_gradients()
            for name, mask in pruner.masks.items():
                gradient = model.get_parameter(name).grad
                assert gradient is not None
                assert not gradient[~mask].any()
                assert gradient[mask].any()
            kept = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit) if limit else None
        assert not (masked and limit) or torch.equal(norm, kept)  # type: ignore[arg-type]
        optimizer.step()
        pruner.step()
        pruned_state_is_zero(pruner, model, optimizer)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*found) == (limit is None)


def test_masked_gradients_and_rigl_contradict_each_other(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=sc.cubic(0.8, begin=0, end=9), regrow="gradient")
    with pytest.raises(RegrowthError, match="ranks pruned weights by the gradients that mask_gradients"):
        pruner.mask_gradients()


def test_masks_are_updated_in_place(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=0.5, every=1)
    held = pruner.masks["up.weight"]
    weight = block.up.weight.data_ptr()
    train(block, optimizer, 2, pruner.step)
    assert torch.equal(held, pruner.masks["up.weight"])
    assert not bool(held.all())
    assert block.up.weight.data_ptr() == weight


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"scope": "layer"}, 512),
        ({"scope": "row"}, 512),
        ({"pattern": "2:4", "sparsity": None}, 512),
        ({"pattern": "block:4x4"}, None),
        ({"allocation": "uniform"}, 512),
        ({"allocation": "erk"}, None),
        ({"score": "bitter4"}, None),
        ({"allocation": "lamp", "score": "magnitude"}, None),
    ],
)
def test_scopes_patterns_and_allocations(options: dict[str, Any], count: int | None, block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, **{"sparsity": 0.5, "every": 1, **options})
    train(block, optimizer, 2, pruner.step)
    assert pruner.sparsity == 0.5
    if count is not None:
        assert [row.pruned for row in pruner.report().tensors] == [count, count]
    if "pattern" not in options and options.get("score") == "bitter4":
        assert pruner.report().allocation == "depth"
        first, last = (row.sparsity for row in pruner.report().tensors)
        assert first / last == pytest.approx(0.7 / 1.3, rel=0.01)


def test_n_of_m_may_be_reached_by_a_ramp(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, pattern="2:4", sparsity=sc.linear(0.5, begin=0, end=4), every=1)
    train(block, optimizer, 5, pruner.step)
    assert [update.pruned / 2048 for update in pruner.updates] == [0, 0.25, 0.25, 0.5]
    with pytest.raises(PatternError, match="means sparsity 0.5, not 0.8"):
        sc.Pruner(block, optimizer, pattern="2:4", sparsity=sc.linear(0.8, begin=0, end=4))


@pytest.mark.parametrize("every", [0, -3, 2.5, True])
def test_every_must_be_a_positive_number_of_steps(every: Any, block: Block) -> None:
    with pytest.raises(ScheduleError, match="every must be a number of optimizer steps, at least 1"):
        sc.Pruner(block, torch.optim.AdamW(block.parameters()), every=every)


def test_settings_that_would_mean_nothing_are_refused(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    with pytest.raises(RegrowthError, match="drop=0.5 is the share of weights that regrowth exchanges"):
        sc.Pruner(block, optimizer, drop=0.5)
    with pytest.raises(ScheduleError, match="cubic cannot be .*for example, sc.cubic"):
        sc.Pruner(block, optimizer, sparsity=sc.cubic)  # type: ignore[arg-type]


def test_a_schedule_of_ones_own_is_checked_at_every_update(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=lambda step: step / 2, every=1)
    train(block, optimizer, 1, pruner.step)
    assert pruner.sparsity == 0.5
    with pytest.raises(ScheduleError, match=r"in \[0, 1\); got 1.0"):
        train(block, optimizer, 1, pruner.step)


def test_a_schedule_that_falls_is_refused_when_it_does(block: Block) -> None:
    """Masks never return, so the sparsity achieved would not be the one asked for."""
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=lambda step: 0.5 if step < 4 else 0.3, every=2)
    train(block, optimizer, 3, pruner.step)
    masks = {name: mask.clone() for name, mask in pruner.masks.items()}
    with pytest.raises(ScheduleError, match=r"asks for sparsity 0.3 at step 4, after 0.5.*a schedule must never fall"):
        train(block, optimizer, 1, pruner.step)
    assert pruner.sparsity == 0.5
    assert all(torch.equal(mask, masks[name]) for name, mask in pruner.masks.items())


def test_a_schedule_may_be_off_by_rounding(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=lambda step: 0.5 - 1e-15 * step, every=1)
    train(block, optimizer, 3, pruner.step)
    assert pruner.sparsity == 0.5


def in_wrong_order(block: Block, optimizer: torch.optim.Optimizer, pruner: sc.Pruner, none: bool, steps: int) -> None:
    for _ in range(steps):
        block(torch.randint(0, 10, (2, 4))).square().mean().backward()
        pruner.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)


@pytest.mark.parametrize("none", [True, False])
def test_a_step_of_the_pruner_before_that_of_the_optimizer_is_told(none: bool, block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, every=100)
    with pytest.warns(UserWarning, match=r"order: loss.backward\(\), optimizer.step\(\), pruner.step\(\)") as told:
        in_wrong_order(block, optimizer, pruner, none, 20)
    assert len(told) == 1
    assert told[0].filename == __file__


def loop(
    block: Block, pruner: sc.Pruner, optimizer: torch.optim.Optimizer, micro: int, cleared: str, calls: int
) -> None:
    """Gradients of `micro` batches a step; the pruner is called after every `calls` of them."""
    for number in range(1, 40):
        (block(torch.randint(0, 10, (2, 4))).square().mean() / micro).backward()
        if number % micro == 0:
            optimizer.step()
            if cleared != "late":
                optimizer.zero_grad(set_to_none=cleared == "none")
        if number % calls == 0:
            pruner.step()
        if number % micro == 0 and cleared == "late":
            optimizer.zero_grad()


@pytest.mark.parametrize("cleared", ["none", "zeros", "late"])
@pytest.mark.parametrize(("micro", "calls"), [(1, 1), (3, 1), (3, 3), (2, 2)])
def test_loops_in_the_right_order_are_left_in_peace(micro: int, calls: int, cleared: str, block: Block) -> None:
    """Warnings are errors in this suite. Accumulation, calls that come too often, gradients cleared before or after."""
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=sc.linear(0.5, begin=0, end=9), every=2)
    loop(block, pruner, optimizer, micro, cleared, calls)
    assert pruner.report().step == 39 // micro // max(1, calls // micro) * max(1, calls // micro)


def test_skipped_steps_do_not_look_like_a_wrong_order(block: Block) -> None:
    """Scales too high at first, as a GradScaler begins: no step is taken and gradients stay."""
    optimizer = torch.optim.AdamW(block.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    pruner = sc.Pruner(block, optimizer, every=1)
    for iteration in range(14):
        scaler.scale(block(torch.randint(0, 10, (2, 4))).square().mean()).backward()
        if iteration < 4 or iteration % 2:
            block.up.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        pruner.step()
        optimizer.zero_grad()
    assert pruner.report().step == 5


def test_another_optimizer_than_the_one_given_is_told(block: Block) -> None:
    pruner = sc.Pruner(block, torch.optim.AdamW(block.parameters()))
    other = torch.optim.SGD(block.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"the optimizer given to the Pruner \(AdamW\) takes no steps") as told:
        train(block, other, 9, pruner.step)
    assert len(told) == 1


def test_zeros_stay_when_another_optimizer_takes_over(block: Block) -> None:
    first = torch.optim.AdamW(block.parameters(), 0.01)
    pruner = sc.Pruner(block, first, every=1, sparsity=0.5)
    train(block, first, 3, pruner.step)
    kept = {name: mask.clone() for name, mask in pruner.masks.items()}
    with pytest.warns(UserWarning, match="takes no steps.*still zeroes pruned weights.*masks=pruner.masks"):
        train(block, torch.optim.SGD(block.parameters(), 0.1), 5, pruner.step)
    assert all(not bool(block.get_parameter(name)[~mask].any()) for name, mask in kept.items())


class Lookahead:
    """Every second step the weights go half-way back to where they were: after the inner optimizer's step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.taken = optimizer, optimizer.param_groups, 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.taken += 1
        for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
            p.lerp_(slow, 0.5 * (self.taken % 2 == 0))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, sc.optim.AdamW])
def test_weights_that_a_wrapper_moves_after_the_step_are_zeroed_too(kind: Any, block: Block) -> None:
    wrapper: Any = Lookahead(kind(block.parameters(), lr=0.01))
    pruner = sc.Pruner(block, wrapper, every=1, sparsity=0.5)

    def after() -> None:
        pruner.step()
        assert all(not bool(block.get_parameter(name)[~mask].any()) for name, mask in pruner.masks.items())

    train(block, wrapper, 6, after)
    assert pruner.sparsity == 0.5


def test_weights_that_move_after_attached_masks_are_told(block: Block) -> None:
    wrapper: Any = Lookahead(torch.optim.AdamW(block.parameters(), lr=0.01))
    pruner = sc.Pruner(block, wrapper, every=1, sparsity=0.5)
    handle = pruner.attach()
    with pytest.warns(UserWarning, match="Pruned weights were changed after the last pruner.step"):
        train(block, wrapper, 6)
    handle.remove()
    assert pruner.sparsity == 0.5


def test_a_tensor_that_loses_its_last_weight_is_named(block: Block, caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad():
        block.up.weight.mul_(1e-6)
    optimizer = torch.optim.SGD(block.parameters(), 0.0)
    pruner = sc.Pruner(block, optimizer, score="magnitude", every=1, sparsity=0.6)
    with caplog.at_level(logging.WARNING, "secateur"):
        train(block, optimizer, 2, pruner.step)
    told = [one.message for one in caplog.records]
    assert len(told) == 1
    assert "nothing is left of 1 tensors: 'up.weight'" in told[0]
    assert "Nothing is left of 1 of" in str(pruner.report())


@pytest.mark.parametrize(
    "settings",
    [{"score": "magnitude"}, {"score": "movement"}, {"score": "magnitude", "regrow": "gradient", "until": 9}],
)
def test_sparse_gradients(settings: dict[str, Any]) -> None:
    table = nn.Embedding(20, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), 0.01)
    pruner = sc.Pruner(table, optimizer, sparsity=0.5, every=1, only="weight", **settings)
    for _ in range(4):
        table(torch.randint(0, 20, (6,))).square().sum().backward()
        if "regrow" not in settings:
            pruner.mask_gradients()
            assert not bool(table.weight.grad.to_dense()[~pruner.masks["weight"]].any())
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    assert pruner.sparsity == 0.5
    assert not bool(table.weight[~pruner.masks["weight"]].any())


def test_an_optimizer_that_waits_is_left_in_peace(block: Block) -> None:
    """Calls before the first step, on weights that do not change but for a checkpoint that is loaded."""
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, every=1)
    for _ in range(6):
        pruner.step()
    block.load_state_dict(Block().state_dict())
    pruner.step()
    train(block, optimizer, 2, pruner.step)
    assert pruner.sparsity == 0.5


def test_a_resume_without_the_pruners_state_is_told(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=0.8, every=1)
    train(block, optimizer, 2, pruner.step)
    saved = {"model": block.state_dict(), "optimizer": optimizer.state_dict(), "pruner": pruner.state_dict()}
    for knows in (False, True):
        fresh = Block()
        again = torch.optim.AdamW(fresh.parameters())
        resumed = sc.Pruner(fresh, again, sparsity=0.8, every=1)
        fresh.load_state_dict(saved["model"])
        again.load_state_dict(copy.deepcopy(saved["optimizer"]))
        if knows:
            resumed.load_state_dict(saved["pruner"])
            train(fresh, again, 1, resumed.step)  # without a warning
        else:
            with pytest.warns(UserWarning, match=r"80% of the prunable weights are exactly zero.*grow back") as told:
                train(fresh, again, 3, resumed.step)
            assert len(told) == 1


def test_tensors_that_begin_at_zero_are_not_taken_for_pruned(block: Block) -> None:
    with torch.no_grad():
        block.down.weight.zero_()
        block.up.weight[:2] = 0
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, every=1)
    train(block, optimizer, 2, pruner.step)
    assert pruner.sparsity == 0.5


def test_nan_stops_before_any_mask_changes(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, every=1)
    train(block, optimizer, 1)
    with torch.no_grad():
        block.down.weight[3, 4] = torch.nan
    with pytest.raises(sc.SecateurError, match=r"NaN scores in 'down.weight' \(1\)"):
        pruner.step()
    assert pruner.sparsity == 0
    assert all(bool(mask.all()) for mask in pruner.masks.values())


def test_channels_last_weights_are_pruned_in_logical_order() -> None:
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(3)
        layer = nn.Conv2d(8, 8, 3).to(memory_format=memory_format)
        optimizer = torch.optim.AdamW(layer.parameters())
        pruner = sc.Pruner(layer, optimizer, every=1, score="magnitude", sparsity=0.4, only="*")
        layer.weight.grad = torch.randn(8, 8, 3, 3)
        optimizer.step()
        pruner.step()
        results.append((pruner.masks["weight"], layer.weight.detach() == 0))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(~results[1][0], results[1][1])


def test_a_state_of_another_model_changes_nothing(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, every=1)
    train(block, optimizer, 1, pruner.step)
    masks = {name: mask.clone() for name, mask in pruner.masks.items()}
    other = Block(width=24)
    stranger = sc.Pruner(other, torch.optim.AdamW(other.parameters())).state_dict()
    with pytest.raises(
        StateError, match=r"'mask.up.weight' is torch.uint8 \(96, 3\); this model needs torch.uint8 \(64, 2\)"
    ):
        pruner.load_state_dict(stranger)
    nearly = pruner.state_dict()
    nearly["shape.up.weight"] = torch.tensor([64, 15])  # packs into as many bytes
    with pytest.raises(StateError, match=r"'shape.up.weight' is \[64, 15\]; in this model it is \[64, 16\]"):
        pruner.load_state_dict(nearly)
    with pytest.raises(StateError, match="'mask.up.weight' is list"):
        pruner.load_state_dict({**pruner.state_dict(), "mask.up.weight": [1]})
    del stranger["mask.up.weight"]
    with pytest.raises(StateError, match=r"1 entries missing \(mask.up.weight\)"):
        pruner.load_state_dict(stranger)
    assert all(torch.equal(mask, masks[name]) for name, mask in pruner.masks.items())


def test_an_overflowing_moment_does_not_become_nan(block: Block) -> None:
    """A gradient of 1e22 makes Adam's second moment infinite; infinity times a mask of zero would be NaN."""
    layer = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())
    pruner = sc.Pruner(layer, optimizer, score="magnitude", sparsity=0.5, every=1)
    for scale in (1.0, 1e22, 1.0):
        layer.weight.grad = torch.full((4, 4), scale)
        optimizer.step()
        pruner.step()
    assert not bool(layer.weight.isnan().any())
    pruned_state_is_zero(pruner, layer, optimizer)


def test_movement_follows_maximize() -> None:
    sums = []
    for maximize in (False, True):
        layer = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, maximize=maximize)
        pruner = sc.Pruner(layer, optimizer, score="movement", every=1)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        layer.weight.grad = torch.ones(2, 2)
        optimizer.step()
        sums.append(float(pruner.state_dict()["movement_sum.weight"][0, 0]))
    assert sums == [-1.0, 1.0]  # the second run moved the weight away from zero


def test_integer_state_of_the_weights_shape_is_not_touched() -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    pruner = sc.Pruner(layer, optimizer, score="magnitude", every=1)
    layer.weight.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.state[layer.weight]["codes"] = torch.full((4, 4), 127, dtype=torch.uint8)
    with pytest.warns(UserWarning, match="SGD keeps 'codes' as torch.uint8 codes in a format Secateur does not know"):
        pruner.step()
    assert bool((optimizer.state[layer.weight]["codes"] == 127).all())
    pruned = ~pruner.masks["weight"]
    assert bool((optimizer.state[layer.weight]["momentum_buffer"][pruned] == 0).all())


def test_an_expert_may_wait_for_its_first_gradient() -> None:
    experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
    optimizer = torch.optim.AdamW(experts.parameters())
    pruner = sc.Pruner(experts, optimizer, sparsity=0.5, every=3)
    for routed in (0, 1, 2):
        optimizer.zero_grad()
        experts[routed](torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        pruner.step()
    assert pruner.sparsity == 0.5


def test_plain_sgd_is_told_that_it_keeps_nothing(block: Block) -> None:
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    pruner = sc.Pruner(block, optimizer)
    with pytest.raises(sc.SecateurError, match="SGD keeps nothing shaped like the weights. Scores that work here"):
        train(block, optimizer, 1, pruner.step)


def test_a_pruner_cannot_be_copied(block: Block) -> None:
    pruner = sc.Pruner(block, torch.optim.AdamW(block.parameters()))
    ways: list[Any] = [copy.deepcopy, copy.copy, pickle.dumps, lambda it: torch.save({"pruner": it}, io.BytesIO())]
    for way in ways:
        with pytest.raises(StateError, match="has hooks on its optimizer, so it cannot be copied or pickled"):
            way(pruner)


def test_loading_forgets_what_the_old_run_did(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, every=1)
    start = pruner.state_dict()
    train(block, optimizer, 2, pruner.step)
    pruner.load_state_dict(start)
    report = pruner.report()
    assert (report.step, report.pruned, report.updates) == (0, 0, ())
    assert all(row.cut is None and row.churn == 0 for row in report.tensors)


def test_loaded_groups_are_read_anew(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters(), betas=(0.5, 0.9))
    pruner = sc.Pruner(block, optimizer, score="bitter8")
    train(block, optimizer, 1)
    before = pruner.pieces()[0].score(slice(0, 9))
    state = optimizer.state_dict()
    state["param_groups"][0]["betas"] = (0.9, 0.9)
    optimizer.load_state_dict(state)
    assert not torch.equal(pruner.pieces()[0].score(slice(0, 9)), before)


def test_a_score_by_place_reads_places_in_the_whole_model(block: Block) -> None:
    """The index goes on from tensor to tensor, in whatever parts a tensor is read."""
    optimizer = torch.optim.AdamW(block.parameters())
    up, down = sc.Pruner(block, optimizer, score="random", sparsity=0.5).pieces()
    expected = resolve("random")(index=torch.arange(up.numel + down.numel))
    assert torch.equal(torch.cat([up.score(slice(0, up.numel)), down.score(slice(0, down.numel))]), expected)
    places = torch.tensor([5, 1000, 17])
    assert torch.equal(down.score(places), expected[up.numel + places])
    assert torch.equal(down.score(slice(7, 9)), expected[up.numel + 7 : up.numel + 9])


def test_kernels_are_told_the_formula(block: Block) -> None:
    """Each carries its score and its facts, so that a kernel can evaluate them itself."""
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, score="magnitude", sparsity=0.5)
    for piece in pruner.pieces():
        assert piece.source is not None
        assert piece.source[0] is pruner.score
        assert not piece.replicated


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = Block()
    with pytest.raises(ModelError, match="meta"):
        sc.Pruner(model, torch.optim.AdamW(model.parameters()))


def test_a_step_of_the_pruner_only_now_and_then_is_told(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=0.5, every=1)
    calls = 0

    def now_and_then() -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            pruner.step()

    with pytest.warns(UserWarning, match="has taken 3 steps since the last pruner.step()"):
        train(block, optimizer, 9, now_and_then)


def test_our_optimizer_keeps_zeros_between_steps_of_the_pruner(block: Block) -> None:
    optimizer = sc.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=0.5, every=1)
    train(block, optimizer, 1, pruner.step)
    train(block, optimizer, 3)
    pruner.step()  # no warning: masks were applied in every step
    assert pruner.sparsity == 0.5


def test_a_pruner_prints_itself_in_one_line(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    schedule = sc.linear(0.5, begin=0, end=4)
    pruner = sc.Pruner(block, optimizer, score="variance(q=0.375)", sparsity=schedule, every=1)
    train(block, optimizer, 2, pruner.step)
    assert repr(pruner) == (
        "Pruner(score='variance(q=0.375)', sparsity=0.2500 -> linear(0.5, begin=0, end=4), step=2, tensors=2,"
        " weights=2,048)"
    )


def test_updates_are_logged_and_surprises_warned_about(block: Block, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="secateur")
    optimizer = torch.optim.AdamW(block.up.parameters())
    pruner = sc.Pruner(block, optimizer, every=2)
    assert [(r.name, r.levelname) for r in caplog.records] == [("secateur", "WARNING")]
    assert caplog.messages[0] == "1 prunable tensors are not in the optimizer and stay dense: 'down.weight'."
    caplog.clear()
    train(block, optimizer, 4, pruner.step)
    updates = [record for record in caplog.records if record.levelname == "INFO"]
    assert len(updates) == len(caplog.records) == len(pruner.updates) == 1  # at step 4 nothing more is asked for
    assert updates[0].getMessage().startswith("Step 2: sparsity 0.5000, 512 of 1024 weights pruned, 512 mask entries")
    caplog.clear()
    other = sc.Pruner(block, optimizer, scope="layer", every=2)
    other.load_state_dict(pruner.state_dict(), strict=False)
    assert caplog.messages[-1] == "Loaded masks of a Pruner with another scope; they change from the next update on."


def test_scope_global_is_scope_model(block: Block) -> None:
    found = []
    for scope in ("global", "model"):
        torch.manual_seed(0)
        model = copy.deepcopy(block)
        optimizer = torch.optim.AdamW(model.parameters())
        pruner = sc.Pruner(model, optimizer, score="bitter4", scope=scope, every=2)  # with an allocation of its own
        train(model, optimizer, 2, pruner.step)
        assert (pruner.scope, pruner.allocation, pruner.report().scope) == ("model", "depth", "model")
        found.append(torch.cat([mask.flatten() for mask in pruner.masks.values()]))
    assert torch.equal(*found)


def tied(block: Block) -> None:
    block.down.weight = nn.Parameter(torch.randn(16, 64))


def assigned(block: Block) -> None:
    block.load_state_dict(Block().state_dict(), assign=True)


def swapped(block: Block) -> None:
    block.down = nn.Linear(64, 16)


@pytest.mark.parametrize("replace", [tied, assigned, swapped])
@pytest.mark.parametrize(
    "settings", [{"sparsity": 0.5}, {"masks": {"up.weight": torch.eye(64, 16) > 0}, "sparsity": None}]
)
def test_replaced_parameters_are_noticed_at_the_first_step(replace: Any, settings: Any, block: Block) -> None:
    """A Pruner that holds the old parameters would report zeros that the model does not have."""
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, every=1, **settings)
    replace(block)
    with pytest.raises(StateError, match=r"weight' is not the parameter it was.*Build optimizer and Pruner after them"):
        train(block, optimizer, 1, pruner.step)
    with pytest.raises(StateError, match="is not the parameter it was"):
        pruner.load_state_dict(pruner.state_dict())


def test_replaced_parameters_are_noticed_at_an_update(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=sc.linear(0.5, begin=0, end=4), every=2)
    train(block, optimizer, 2, pruner.step)
    swapped(block)
    with pytest.raises(StateError, match="'down.weight' is not the parameter it was"):
        train(block, optimizer, 2, pruner.step)
    assert [update.step for update in pruner.updates] == [2]


def test_an_optimizer_that_got_other_parameters_is_noticed(block: Block) -> None:
    """As accelerator.prepare does with FSDP2: the optimizer is the same, its parameters are not."""
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, every=1)
    other = Block()
    optimizer.param_groups[0]["params"] = list(other.parameters())
    with pytest.raises(OptimizerError, match=r"AdamW no longer has 'up.weight' and 1 more tensors"):
        train(other, optimizer, 1, pruner.step)


def test_parameters_that_only_moved_are_still_the_models(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, every=1)
    block.to(torch.float64).to(torch.float32)
    nn.utils.parametrize.register_parametrization(block.up, "weight", nn.Identity())
    train(block, optimizer, 2, pruner.step)
    assert int((block.up.weight == 0).sum()) + int((block.down.weight == 0).sum()) == 1024
