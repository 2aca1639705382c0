"""Training under another default dtype: fp32 models give the same masks and weights to the bit, others still work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import secateur as sc
from secateur.scores import _REGISTERED
from secateur.selection.allocation import ALLOCATIONS
from tests.conftest import Block, train

DTYPES = [torch.bfloat16, torch.float64]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The default dtype to try. `under` sets it, so that a test can also look at what fp32 gives."""
    found: torch.dtype = request.param
    return found


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def under(dtype: torch.dtype, work: Callable[[], Any]) -> Any:
    """What `work` gives while this is the default dtype."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        return work()
    finally:
        torch.set_default_dtype(torch.float32)


def alike(found: Any, wanted: Any) -> bool:
    """Equal to the bit and of the same dtype, tensor by tensor."""
    if isinstance(wanted, Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(alike(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


def trained(optimizer: Callable[[Any], torch.optim.Optimizer], **settings: Any) -> Any:
    """Masks, weights, saved state and report of a fp32 model after 24 steps."""
    model = copy.deepcopy(MODEL)
    adam = optimizer(model.parameters())
    settings = {"sparsity": sc.cubic(0.6, begin=0, end=20), "every": 5, **settings}
    pruner = sc.Pruner(model, adam, **settings)
    torch.manual_seed(1)
    train(model, adam, 24, pruner.step)
    cuts = [row.cut for row in pruner.report().tensors]
    return {**pruner.state_dict(), **model.state_dict(), "cuts": cuts, "pruned": pruner.report().pruned}


MODEL = Block()  # of fp32
OURS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
SPAM = {"every": 8, "warmup": 3, "quiet": 2, "theta": 20.0, "spike": 1.0}
IN_TRAINING = [name for name in sc.scores() if name not in ("gradient", "wanda")]  # which read calibration batches
CASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    **{score: (lambda p: torch.optim.AdamW(p, **OURS), {"score": score}) for score in IN_TRAINING},
    **{f"allocation {name}": (lambda p: sc.optim.AdamW(p, **OURS), {"allocation": name}) for name in ALLOCATIONS},
    "scope layer": (lambda p: sc.optim.AdamW(p, **OURS), {"scope": "layer"}),
    "scope row": (lambda p: sc.optim.AdamW(p, **OURS), {"scope": "row"}),
    "pattern 2:4": (lambda p: sc.optim.AdamW(p, **OURS), {"pattern": "2:4", "sparsity": None}),
    "amsgrad": (lambda p: sc.optim.AdamW(p, amsgrad=True, foreach=True, **OURS), {}),
    "spam, paper": (lambda p: sc.optim.AdamW(p, spam="paper", **OURS), {}),
    "spam, all of it": (lambda p: sc.optim.AdamW(p, spam=SPAM, **OURS), {"score": "magnitude"}),
    "regrow gradient": (lambda p: sc.optim.AdamW(p, **OURS), {"regrow": "gradient"}),
    "regrow random": (lambda p: sc.optim.AdamW(p, spam=SPAM, **OURS), {"regrow": "random"}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_a_fp32_model_does_not_depend_on_it(case: str, dtype: torch.dtype) -> None:
    optimizer, settings = CASES[case]
    wanted = under(torch.float32, lambda: trained(optimizer, **settings))
    assert wanted["pruned"] > 0
    assert alike(under(dtype, lambda: trained(optimizer, **settings)), wanted)


SELECTIONS: list[dict[str, Any]] = [
    {}, {"scope": "layer"}, {"scope": "row"}, {"pattern": "2:4", "sparsity": None}, {"pattern": "block:4x4"},
]  # fmt: skip


@pytest.mark.parametrize("options", SELECTIONS, ids=str)
def test_selection_does_not_depend_on_it(options: dict[str, Any], dtype: torch.dtype) -> None:
    given = {"sparsity": 0.7, **options}
    scores = {"large": torch.randn(1024, 1024).abs(), "small": torch.randn(64, 32).abs(), "tied": torch.ones(8, 8)}
    alive = {name: torch.rand(score.shape) < 0.9 for name, score in scores.items()}
    for living in (None, alive) if not options else (None,):
        wanted = sc.select(scores, alive=living, **given)
        assert alike(under(dtype, lambda living=living: sc.select(scores, alive=living, **given)), wanted)


def test_a_model_of_that_dtype_is_pruned_to_the_weight(dtype: torch.dtype) -> None:
    def work() -> None:
        for kind in (torch.optim.AdamW, sc.optim.AdamW):
            model = Block()
            assert model.up.weight.dtype == dtype
            optimizer = kind(model.parameters(), lr=1e-2)
            pruner = sc.Pruner(model, optimizer, sparsity=0.5, every=2, regrow="gradient", until=6)
            train(model, optimizer, 8, pruner.step)
            assert pruner.report().pruned == pruner.report().prunable // 2
            assert sum(int((~mask).sum()) for mask in pruner.masks.values()) == pruner.report().pruned

    under(dtype, work)


def test_states_load_across_default_dtypes(dtype: torch.dtype) -> None:
    def run(first: torch.dtype, second: torch.dtype) -> Any:
        """Save under one default after 6 steps and go on under another."""
        model = copy.deepcopy(MODEL)
        states = None
        for default, seed in ((first, 1), (second, 2)):
            torch.set_default_dtype(default)
            optimizer = sc.optim.AdamW(model.parameters(), lr=1e-2, spam=SPAM)
            pruner = sc.Pruner(model, optimizer, score="movement", sparsity=sc.linear(0.5, begin=0, end=12), every=3)
            if states is not None:
                optimizer.load_state_dict(states[0])
                pruner.load_state_dict(states[1])
            torch.manual_seed(seed)
            train(model, optimizer, 6, pruner.step)
            states = optimizer.state_dict(), pruner.state_dict()
            torch.set_default_dtype(torch.float32)
        return {**model.state_dict(), **pruner.state_dict()}

    wanted = run(torch.float32, torch.float32)
    assert alike(run(torch.float32, dtype), wanted)
    assert alike(run(dtype, torch.float32), wanted)


def test_a_score_is_checked_and_used_under_it(dtype: torch.dtype) -> None:
    def work() -> Any:
        def squared(*, weight: Tensor) -> Tensor:
            return weight.square()

        registered = sc.score(squared)
        try:
            return trained(lambda p: torch.optim.AdamW(p, **OURS), score=registered)
        finally:
            del _REGISTERED["squared"]

    assert alike(under(dtype, work), under(torch.float32, work))


def test_schedules_do_not_depend_on_it(dtype: torch.dtype) -> None:
    def work() -> Any:
        made = [sc.constant(0.3), *(kind(0.8, begin=10, end=90) for kind in (sc.linear, sc.cubic, sc.late_cubic))]
        return [schedule(step) for schedule in made for step in range(100)]

    assert under(dtype, work) == under(torch.float32, work)
