"""The kernels on a real GPU: `pytest -m gpu`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.kernels import prune_groups, select
from secateur.selection.exact import ALONE
from tests import kernel_cases as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
GPU = torch.device("cuda")
UNIT = 2.0**-23  # in the last place, of fp32


@pytest.fixture
def ops() -> Any:
    from secateur.kernels import launch

    return launch


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "SMALL", 1 << 10)
    monkeypatch.setattr(select, "COARSE_SAMPLE", 1 << 9)


PAIRS = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("number", range(len(cases.FUSED) + 2))
def test_every_score(number: int, ops: Any, small: None) -> None:
    score = [*cases.FUSED, "bitter5", "bitter9"][number]
    alive = (None, "bool", "bits")[number % 3]  # each combination is compiled, which takes its time
    for weight, state in PAIRS[: 3 if score == "bitter7" else 2]:
        for change in (None, cases.ties, cases.extremes):
            pieces = cases.pieces_for(score, GPU, (70001, 33, 4096), weight, state, alive, change)
            for layers in (False, True):
                cases.check_selection(ops, pieces, 0.43, packed=alive != "bool", layers=layers)


@pytest.mark.parametrize("score", ["variance", "fisher", "variance(q=3/8)"])
def test_the_fast_root_loses_no_subnormal(score: str, ops: Any, small: None) -> None:
    pieces = cases.pieces_for(score, GPU, (300_000, 70_001), change=cases.subnormals)
    for share in (0.2, 0.5, 0.8):
        cases.check_selection(ops, pieces, share, packed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_millions_of_weights(dtype: torch.dtype, packed: bool, ops: Any) -> None:
    for score in ("bitter7", "magnitude", "variance"):
        for share in (0.01, 0.5, 0.97):
            for sizes in ((3_000_000, 1_000_001, 5), (1 << 21, 1 << 12)):
                cases.check_selection(ops, cases.pieces_for(score, GPU, sizes, dtype, dtype), share, packed)


def test_every_kernel_and_its_twin_on_the_gpu(small: None) -> None:
    """All kernels but the rough sweep, whose words depend on how quick the device's roots are."""
    from secateur.kernels import adamw

    for mask in (None, "bits", "bool"):
        for parameter, state in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
            spams = (False, 0.0, torch.inf, False), (True, 0.5, torch.inf, True), (False, 0.5, 0.0, False)
            for amsgrad, theta, unseen, soft in spams:
                case = {"parameter": parameter, "state": state, "mask": mask, "maximize": amsgrad, "unseen": unseen}
                cases.check_adamw(adamw, GPU, {**case, "amsgrad": amsgrad, "theta": theta, "soft": soft})
    cases.check_zero(adamw, GPU)


def test_no_launch_per_tensor(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    real = ops.launch_kernel
    monkeypatch.setattr(
        ops, "launch_kernel", lambda kernel, *rest, **named: launches.append(kernel) or real(kernel, *rest, **named)
    )
    for tensors in (3, 300):
        launches.clear()
        pieces = cases.pieces_for("bitter7", GPU, [4096] * tensors)
        select.prune_groups(ops, [pieces], [tensors * 1000], ALONE, True)
        assert len(launches) < 20


def test_scratch_is_bounded() -> None:
    pieces = cases.pieces_for("bitter7", GPU, (40_000_000, 20_000_000))
    prune_groups([pieces], [30_000_000], packed=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    masks = prune_groups([pieces], [30_000_000], packed=True).masks
    used = torch.cuda.max_memory_allocated() - before - sum(mask.nbytes for mask in masks)
    assert used < 24 << 20


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1000), nn.ReLU(), nn.Linear(1000, 64)]
    return nn.Sequential(*layers).to(GPU, dtype)


TRAINING = [score for score in sc.scores() if score not in ("wanda", "gradient")]  # those need batches of their own
SETTINGS: list[dict[str, Any]] = [
    *({"score": score, "sparsity": sc.cubic(0.6, begin=0, end=12)} for score in TRAINING),
    {"score": "bitter7", "scope": "layer", "sparsity": 0.5},
    {"score": "bitter7", "scope": "row", "sparsity": 0.37},
    {"score": "magnitude", "pattern": "2:4", "sparsity": None},
    {"score": "bitter0", "pattern": "4:8", "sparsity": None},
    {"score": "variance", "allocation": "erk", "sparsity": 0.7},
    {"score": "fisher", "allocation": "lamp", "sparsity": 0.7},
    {"score": "magnitude", "pattern": "block:4x4", "sparsity": 0.5},
]


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda found: "-".join(str(v) for v in found.values() if isinstance(v, str))
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pruner_with_and_without_kernels(
    settings: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kernels in ("on", "off"):
        monkeypatch.setenv("SECATEUR_KERNELS", kernels)
        model = build(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        found.append(cases.masks_of(model, optimizer, 14, every=4, **settings))
        assert found[-1]._held.packed == (kernels == "on")
        for name, mask in found[-1].masks.items():
            assert bool((model.get_parameter(name)[~mask] == 0).all())
    assert all(torch.equal(mask, found[1].masks[name]) for name, mask in found[0].masks.items())
    assert found[0].report().pruned == found[1].report().pruned


def test_our_adamw_walks_as_torchs_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [build(), build()]
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), lr=1e-3, weight_decay=0.1, fused=True),
        sc.optim.AdamW(models[1].parameters(), lr=1e-3, weight_decay=0.1),
    ]
    for step in range(20):
        inputs = torch.randn(64, 256, device=GPU)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
        for (_, a), (_, b) in zip(*(model.named_parameters() for model in models), strict=True):
            b.grad = a.grad.clone()  # the same gradients, so that only the steps differ
        for optimizer in optimizers:
            optimizer.step()
        for a, b in zip(*([p.detach() for p in model.parameters()] for model in models), strict=True):
            size = a.abs().clamp(min=float(a.square().mean().sqrt()))
            assert float(((a - b).abs() / size).max()) <= 4 * (step + 1) * UNIT
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))  # or else both would move one state
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for optimizer in optimizers:
        optimizer.step()
    for a, b in zip(*([p.detach() for p in model.parameters()] for model in models), strict=True):
        size = a.abs().clamp(min=float(a.square().mean().sqrt()))
        assert float(((a - b).abs() / size).max()) <= 4 * 21 * UNIT
