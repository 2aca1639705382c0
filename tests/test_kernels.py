"""Every kernel against its plain-torch twin, by Triton's interpreter on the CPU, and the pipeline against the sort."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import secateur as sc
from secateur import kernels
from secateur.errors import ScoreError
from secateur.kernels import reference, select
from secateur.kernels.reference import AdamWTensors, Hyper
from secateur.kernels.table import BITS, BOOL, EVEN, TILE, WHOLE, MaskMemory, Table, plan_for
from secateur.scores import resolve
from secateur.selection import Target, choose
from secateur.selection.exact import ALONE
from secateur.selection.tiles import Layout, parse_pattern
from tests import kernel_cases as cases
from tests.processes import run_ranks
from tests.trained import classifier

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """The interpreter serves the CPU (see conftest.py), and torch's square root is lent to it.

    torch's is off by one unit in the last place for a quarter of all numbers on CPUs (docs/LOG.md), so a kernel that
    rounds correctly could not be compared bit for bit.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("compiled kernels are tested here: pytest -m gpu")
    from triton.runtime.interpreter import InterpreterBuilder

    patch = pytest.MonkeyPatch()
    patch.delenv("SECATEUR_KERNELS")

    def root(self: Any, argument: Any) -> Any:
        return self.unary_op(argument, lambda x: torch.from_numpy(x).sqrt().numpy())

    patch.setattr(InterpreterBuilder, "create_precise_sqrt", root)
    patch.setattr(InterpreterBuilder, "create_sqrt", root)
    with np.errstate(all="ignore"):  # overflow and NaN are part of the cases
        yield
    patch.undo()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that happens to large models happens at a few thousand weights."""
    monkeypatch.setattr(select, "SMALL", 1 << 10)
    monkeypatch.setattr(select, "COARSE_SAMPLE", 1 << 9)
    monkeypatch.setattr(select, "GIVEN_TILES", 1)


@pytest.fixture
def ops() -> Any:
    from secateur.kernels import launch

    return cases.Lockstep(launch)


@pytest.mark.parametrize("protocol", [select.SelectionOps, select.RankOps])
def test_kernels_and_their_twins_take_the_same_arguments(protocol: type) -> None:
    """mypy checks `launch` where it is passed to a selection; nothing passes `reference` but tests."""
    from secateur.kernels import launch

    wanted = {name: found for name, found in vars(protocol).items() if not name.startswith("_")}
    assert wanted
    for name, method in wanted.items():
        _, *arguments = inspect.signature(method).parameters.values()  # without self
        for module in (launch, reference):
            found = inspect.signature(getattr(module, name))
            assert list(found.parameters.values()) == arguments, (module.__name__, name)
            assert found.return_annotation == inspect.signature(method).return_annotation


@pytest.mark.parametrize("score", cases.FUSED)
def test_every_fused_score(score: str, ops: Any, small: None) -> None:
    cases.check_selection(ops, cases.pieces_for(score, CPU, change=cases.extremes), 0.37, packed=True)
    assert ops.called.keys() >= {
        "sample_histogram",
        "narrow_ranges",
        "sweep",
        "score_candidates",
        "count_candidates",
        "apply_cut",
        "prune_ties",
        "population",
    }


@pytest.mark.parametrize("alive", [None, "bool", "bits"])
@pytest.mark.parametrize("change", [cases.extremes, cases.ties])
def test_tensors_of_whole_tiles(alive: str | None, change: Any, ops: Any, small: None) -> None:
    """Loads without masks, also where a tensor of another size shares the selection and the launch."""
    for sizes in ((TILE, 2 * TILE), (TILE, 48)):
        for packed in (False, True):
            pieces = cases.pieces_for("variance", CPU, sizes, alive=alive, change=change)
            table = Table(pieces, [0, 0], MaskMemory(sizes, BITS if packed else BOOL, CPU), [0, 1])
            assert {launch.variant.aligned for launch in table.launches} == {WHOLE if sizes[1] > TILE else EVEN}
            cases.check_selection(ops, pieces, 0.37, packed)


@pytest.mark.parametrize("weight", cases.DTYPES)
@pytest.mark.parametrize("state", cases.DTYPES)
def test_every_dtype_and_kind_of_mask(weight: torch.dtype, state: torch.dtype, ops: Any, small: None) -> None:
    for alive in (None, "bool", "bits"):
        for packed in (False, True):
            pieces = cases.pieces_for("bitter0", CPU, (5000, 33), weight, state, alive)
            cases.check_selection(ops, pieces, 0.8, packed)


@pytest.mark.parametrize("alive", [None, "bits", "bool"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_heavy_ties_take_the_slow_way(
    alive: str | None, share: float, ops: Any, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "capacity_for", lambda request: min(request.total, 64))
    pieces = cases.pieces_for("bitter7", CPU, alive=alive, change=cases.ties)
    cases.check_selection(ops, pieces, share, packed=alive == "bits")
    assert "prune_many_ties" in ops.called


def test_scores_without_a_kernel_are_handed_over(ops: Any, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for packed, alive in ((True, "bits"), (False, None)):
        cases.check_selection(ops, cases.pieces_for("bitter5", CPU, alive=alive), 0.6, packed)
        with monkeypatch.context() as patch:
            patch.setattr(select, "capacity_for", lambda request: min(request.total, 64))
            cases.check_selection(ops, cases.pieces_for("bitter5", CPU, alive=alive, change=cases.ties), 0.3, packed)
    assert ops.called.keys() >= {"add_scores", "prune_many_ties"}


def test_different_kinds_and_layers_share_a_selection(ops: Any, small: None) -> None:
    mixed = [
        *cases.pieces_for("bitter7", CPU, (3000, 16)),
        *cases.pieces_for("bitter7", CPU, (2000,), torch.bfloat16, torch.bfloat16, "bits"),
        *cases.pieces_for("bitter7", CPU, (4096,)),
        *cases.pieces_for("bitter9", CPU, (1500,)),
    ]
    cases.check_selection(ops, mixed, 0.45, packed=True)
    cases.check_selection(ops, mixed, 0.45, packed=True, layers=True)
    cases.check_selection(ops, mixed[:2], 0.0, packed=True)
    cases.check_selection(ops, mixed, 1.0, packed=False)


def test_a_sample_that_misleads(ops: Any, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "SIGMAS", 0.0)
    monkeypatch.setattr(select, "capacity_for", lambda request: min(request.total, 64))
    for seed in range(4):
        torch.manual_seed(seed)
        cases.check_selection(ops, cases.pieces_for("variance", CPU, (9000, 700)), 0.5, packed=seed % 2 == 0)
    assert "prune_many_ties" in ops.called


@pytest.mark.parametrize("layers", [False, True])
def test_nan_is_refused_and_named(layers: bool, ops: Any, small: None) -> None:
    pieces = cases.pieces_for("bitter7", CPU, (5000, 3000))
    assert pieces[1].source is not None
    pieces[1].source[1]["weight"][17] = torch.nan
    groups = [[piece] for piece in pieces] if layers else [pieces]
    with pytest.raises(ScoreError, match=r"NaN scores in '1' \(1\)"):
        select.prune_groups(ops, groups, [100] * len(groups), ALONE, True)
    assert pieces[0].source is not None
    pieces[0].source[1]["weight"].fill_(torch.nan)
    with pytest.raises(ScoreError, match=r"NaN scores in '0' \(5000\), '1' \(1\)"):
        select.prune_groups(ops, groups, [100] * len(groups), ALONE, True)


def test_empty_tensors_among_others(ops: Any, small: None) -> None:
    cases.check_selection(ops, cases.pieces_for("bitter7", CPU, (0, 3000, 0)), 0.5, packed=True)
    cases.check_selection(ops, cases.pieces_for("bitter5", CPU, (0, 3000, 0)), 0.5, packed=False)
    assert sc.select({"a": torch.ones(0, 4), "b": torch.arange(8.0).view(2, 4)}, 0.5)["b"].sum() == 4
    assert sc.select({"a": torch.ones(0, 4)}, 0.5, scope="row")["a"].shape == (0, 4)


def test_one_look_at_the_device(ops: Any, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    for name in ("tolist", "item", "nonzero", "cpu"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _real=real, _name=name: looks.append(_name) or _real(self, *a)
        )
    from secateur.kernels import launch

    pieces = cases.pieces_for("bitter7", CPU, (9000, 700))
    count = 4000
    monkeypatch.setattr(launch, "launch_kernel", lambda *_, **__: None)
    select.prune_groups(launch, [pieces], [count], ALONE, True)
    assert looks == ["tolist"]


TILED = [("2:4", (24, 64)), ("4:8", (5, 40)), ("1:3", (7, 12)), (None, (9, 48)), (None, (6, 77)), (None, (3, 5000))]


@pytest.mark.parametrize(("pattern", "shape"), TILED)
@pytest.mark.parametrize("alive", [None, "bits"])
def test_rows_and_groups(pattern: str | None, shape: tuple[int, int], alive: str | None) -> None:
    found = []
    for served in (False, True):
        torch.manual_seed(1)
        change = cases.ties if shape[1] == 48 else None
        sizes = [shape[0] * shape[1]] * 2
        pieces = cases.pieces_for("bitter0", CPU, sizes, torch.bfloat16, alive=alive, change=change)
        targets = [Target(piece, shape, shape, Layout()) for piece in pieces]
        with pytest.MonkeyPatch.context() as patch:
            if not served:
                patch.setenv("SECATEUR_KERNELS", "off")
            parsed = parse_pattern(pattern)
            chosen = choose(targets, 0.5 if parsed is None else parsed.sparsity or 0, scope="row", pattern=parsed)
            packed = choose(
                targets, 0.5 if parsed is None else parsed.sparsity or 0, scope="row", pattern=parsed, packed=True
            )
        found.append((chosen.masks, packed.masks))
    for which in range(2):
        assert all(torch.equal(a, b) for a, b in zip(found[0][which], found[1][which], strict=True))


def test_the_ranking_kernel_and_its_twin() -> None:
    from secateur.kernels import launch

    for packed in (False, True):
        pieces = cases.pieces_for("bitter7", CPU, (4 * 96, 2 * 96), alive="bits" if packed else "bool")
        done = select.rank_tiles(cases.Lockstep(launch), pieces, [96, 48], [40, 20], packed)
        assert done is not None


@pytest.mark.parametrize("mask", [None, "bits", "bool"])
@pytest.mark.parametrize(("amsgrad", "maximize"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("theta", "unseen", "soft"), [(0.0, torch.inf, False), (0.5, torch.inf, True), (0.5, 0.0, False)]
)
def test_the_adamw_kernel(
    mask: str | None, amsgrad: bool, maximize: bool, theta: float, unseen: float, soft: bool
) -> None:
    from secateur.kernels import adamw

    for parameter, state in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        case = {"parameter": parameter, "state": state, "mask": mask, "amsgrad": amsgrad, "maximize": maximize}
        cases.check_adamw(adamw, CPU, {**case, "theta": theta, "unseen": unseen, "soft": soft})


def test_the_zeroing_kernel() -> None:
    from secateur.kernels import adamw

    cases.check_zero(adamw, CPU)


def test_a_step_by_kernel_counts_and_warns_as_torchs_does() -> None:
    weight, empty = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(0, 4))
    optimizer = sc.optim.AdamW([weight, empty], lr=0.1)
    weight.grad, empty.grad = torch.ones(64), torch.ones(0, 4)
    before = (weight * weight.detach().clone().requires_grad_()).sum()
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in (weight, empty)] == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    # A second moment kept in another type is not for the kernel, which takes one type for all state.
    memory = torch.full((128,), 7.0, dtype=torch.bfloat16)
    optimizer.state[weight]["exp_avg_sq"] = memory[:64].fill_(1e-3)
    group = optimizer.param_groups[0]
    part = AdamWTensors(
        weight, weight.grad, optimizer.state[weight]["exp_avg"], memory[:64], None, torch.tensor(1.0), None
    )
    assert not kernels.takes(part, group)
    assert kernels.takes(replace(part, exp_avg_sq=torch.ones(64)), group)


def test_spam_by_kernel_is_that_of_plain_torch_and_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet steps, clipping, a reset and its warm-up: none of them changes the kernel or needs another preparation."""
    prepared: list[int] = []
    real = kernels.prepare_adamw
    monkeypatch.setattr(kernels, "prepare_adamw", lambda *given: prepared.append(len(given[0])) or real(*given))
    found = []
    for setting in ("on", "off"):
        monkeypatch.setenv("SECATEUR_KERNELS", setting)
        torch.manual_seed(2)
        weight = nn.Parameter(torch.randn(96))
        spam = sc.optim.Spam(theta=2.0, every=12, warmup=6, quiet=4)
        optimizer = sc.optim.AdamW([weight], lr=0.1, spam=spam)
        weight.grad = torch.zeros(96)
        for step in range(1, 31):
            weight.grad.copy_(torch.randn(96))
            weight.grad[::7] *= step % 5 == 0  # there v is still zero at the first step that clips
            optimizer.step()
        found.append([weight.detach(), *(optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq", "step"))])
    assert sum(prepared) == 1  # without kernels there is nothing to prepare
    for ours, plain in zip(*found, strict=True):
        # the plain step rounds 1 - beta2 = 0.001 otherwise (see check_adamw), and 30 of those add up
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-5)
    assert float(found[0][3]) == 30


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"scope": "layer", "score": "bitter8"}, {"regrow": "gradient", "until": 8}], ids=str
)
def test_kernels_do_not_depend_on_the_default_dtype(default: torch.dtype, settings: dict[str, Any]) -> None:
    torch.manual_seed(4)
    # Small: after SPAM's reset all scores are ties, and the interpreter compares each with all others.
    first = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))
    inputs = torch.randn(8, 16, 16)
    found = []
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        try:
            model = copy.deepcopy(first)
            spam = sc.optim.Spam(theta=10.0, every=6, warmup=2, quiet=1, spike=1.0)
            optimizer = sc.optim.AdamW(model.parameters(), lr=1e-2, spam=spam)
            pruner = sc.Pruner(model, optimizer, sparsity=sc.linear(0.7, begin=0, end=8), every=2, **settings)
            for batch in inputs:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                pruner.step()
            found.append([*model.state_dict().values(), *pruner.state_dict().values()])
        finally:
            torch.set_default_dtype(torch.float32)
    assert pruner.sparsity > 0
    for wanted, got in zip(*found, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def test_a_prepared_step_is_dropped_when_anything_it_rests_on_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one optimizer, prepared once, and of one that prepares each: the same whatever happens in between."""
    prepared: list[int] = []
    real = kernels.prepare_adamw
    monkeypatch.setattr(kernels, "prepare_adamw", lambda *given: prepared.append(1) or real(*given))

    def run(forget: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        weights = [nn.Parameter(torch.randn(3, 16)), nn.Parameter(torch.randn(32))]
        optimizer = sc.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}], lr=0.1)
        mask = torch.arange(48).view(3, 16) % 3 > 0
        kept = [torch.randn(50) for _ in range(8)]  # gradients come back elsewhere, some at odd addresses

        def change_data() -> None:
            weights[0].data = weights[0].data.clone() * 2

        changes: list[Any] = [
            lambda: None,
            lambda: None,
            lambda: optimizer.set_masks({weights[0]: mask}),
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
            change_data,
            lambda: optimizer.param_groups[0].update(lr=0.01),
            lambda: optimizer.param_groups[0].update(foreach=True),
            lambda: optimizer.param_groups[0].update(foreach=None),
        ]
        for change, memory in zip(changes, kept, strict=True):
            change()
            weights[0].grad, weights[1].grad = memory[:48].view(3, 16), memory[1:33]
            if forget:
                optimizer._ready.clear()
            optimizer.step()
        return [*(w.detach() for w in weights), *(optimizer.state[w]["exp_avg_sq"] for w in weights)]

    expected = run(forget=True)
    assert len(prepared) == 16
    prepared.clear()
    assert all(torch.equal(a, b) for a, b in zip(run(forget=False), expected, strict=True))
    # At first; for the mask; for the loaded state; and of the first group alone: new data, foreach on and off.
    assert len(prepared) == 2 + 2 + 2 + 3


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 1 - 1e-8])
@pytest.mark.parametrize("step", [1.0, 2.0, 10.0, 1e6])
def test_biases_are_those_of_torchs_fused_step(beta: float, step: float) -> None:
    """Powers are rounded before they are taken from one, but a beta that fp32 takes for one leaves something."""
    from secateur.kernels import adamw

    hyper = Hyper(1e-3, beta, beta, 1e-8, 0.1, False, False, 0.0)
    _, _, _, size, inverse, *_ = adamw.numbers(hyper, step)
    power = float(torch.tensor(beta, dtype=torch.float32) ** step)
    bias = float(torch.tensor(1.0) - torch.tensor(power)) if beta < 0.9999 else 1 - beta**step
    assert size == pytest.approx(1e-3 / bias, rel=1e-6)
    assert inverse == pytest.approx(bias**-0.5, rel=1e-6)


@pytest.mark.parametrize("score", ["bitter6", "bitter7(eps=0.0)"])
def test_smallest_numbers_are_not_lost_by_quick_roots(score: str) -> None:
    plan = plan_for(resolve(score))
    assert plan is not None
    assert not plan.fast_math  # quick roots take numbers below 1e-38 for zero


@pytest.mark.parametrize("score", ["magnitude", "wanda", "bitter0", "bitter3", "bitter7", "bitter8", "variance"])
def test_other_scores_take_quick_roots_first(score: str) -> None:
    plan = plan_for(resolve(score))
    assert plan is not None
    assert plan.fast_math


def test_a_pruner_on_kernels_equals_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(optimizer: Any, **settings: Any) -> sc.Pruner:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 8))
        return cases.masks_of(model, optimizer(model.parameters(), lr=1e-2), 6, every=2, **settings)

    for settings in (
        {"score": "bitter7", "sparsity": sc.linear(0.7, begin=0, end=6)},
        {"score": "movement", "sparsity": 0.5, "scope": "layer"},
        {"score": "magnitude", "pattern": "2:4", "sparsity": None},
    ):
        fast = run(torch.optim.AdamW, **settings)
        assert fast._held.packed
        ours = run(sc.optim.AdamW, **settings)
        saved = fast.state_dict()
        with monkeypatch.context() as patch:
            patch.setenv("SECATEUR_KERNELS", "off")
            plain = run(torch.optim.AdamW, **settings)
        assert not plain._held.packed
        for name, mask in plain.masks.items():
            assert torch.equal(mask, fast.masks[name])
            assert torch.equal(saved[f"mask.{name}"], plain.state_dict()[f"mask.{name}"])
            weight = ours._model.get_parameter(name)
            assert bool((weight[~ours.masks[name]] == 0).all())
        assert fast.report().mask_bytes < plain.report().mask_bytes / 4
        assert ours.sparsity == fast.sparsity == plain.sparsity
        ours.load_state_dict(saved)
        assert all(torch.equal(mask, ours.masks[name]) for name, mask in plain.masks.items())


def test_the_backend_and_the_reason_for_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert kernels.reason_against(CPU) is None
    monkeypatch.setenv("SECATEUR_KERNELS", "off")
    assert kernels.reason_against(CPU) == "SECATEUR_KERNELS=off is set"
    monkeypatch.delenv("SECATEUR_KERNELS")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert kernels.reason_against(CPU) == "the kernels do not run on CPUs"
    kernels._reason.cache_clear()
    with caplog.at_level(logging.INFO, "secateur"):
        for _ in range(2):
            assert "NVIDIA" in str(kernels.reason_against(torch.device("mps")))
    assert caplog.messages == [f"mps: plain torch, no Triton kernels: {kernels.reason_against(torch.device('mps'))}"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    kernels._reason.cache_clear()
    assert kernels.reason_against(torch.device("cuda")) == "triton is not installed"
    kernels._reason.cache_clear()


def test_many_processes_by_kernel(tmp_path: Path) -> None:
    """Two processes under the interpreter come to the masks of one without kernels."""
    pytest.importorskip("torch.distributed.tensor")
    done = run_ranks(2, "tests.kernel_worker", log=tmp_path / "log")
    assert done.well, f"exit codes {done.codes}: {done.said[-3000:]}"


@pytest.mark.parametrize(
    "work",
    [
        lambda model, batches: sc.prune(model, batches, rounds=2, sparsity=0.6),
        lambda model, batches: sc.prune(model, batches, score="wanda", reconstruct=True),
        lambda model, batches: sc.prune(model, batches, method="sparsegpt"),
        lambda model, batches: sc.probe(model, batches, tolerance=0.3, tolerances=(0.0, 1.0)),
        lambda model, batches: sc.probe(model, batches, score="variance", exact=True),
        lambda model, batches: sc.probe(model, batches, order="reverse", score="magnitude"),
        lambda model, batches: sc.probe_until(model, batches, lambda _: 0.0, tolerance=1e9, start=0.4, step=0.3),
    ],
)
def test_after_training_on_kernels_equals_without(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels serve, masks are held as bits; everything else must not notice."""
    found = []
    for off in (True, False):
        monkeypatch.setenv("SECATEUR_KERNELS", "off" if off else "on")
        model, batches = classifier()
        report = work(model, batches[:3])
        found.append(({name: mask.clone() for name, mask in report.masks.items()}, report.pruned, model))
    assert found[0][1] == found[1][1]
    for name, mask in found[0][0].items():
        assert torch.equal(mask, found[1][0][name]), name
        assert torch.equal(found[0][2].get_parameter(name), found[1][2].get_parameter(name)), name
