"""Pruning after training on a real GPU: `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.model.prunable import find_prunable
from secateur.oneshot.calibration import CalibratedModel
from secateur.oneshot.gradients import GradientPass, HostCache, gather_gradients
from secateur.oneshot.offload import MemoryPlan
from secateur.scores import resolve
from secateur.selection.exact import evaluator
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
IDS = torch.randint(0, 97, (12, 32), generator=torch.Generator().manual_seed(0))
BATCHES = list(IDS.split(3))
JOBS: dict[str, Any] = {
    "rounds": (sc.prune, {"rounds": 2}),
    "repaired": (sc.prune, {"rounds": 2, "reconstruct": "every"}),
    "sparsegpt": (sc.prune, {"method": "sparsegpt"}),
    "wanda": (sc.prune, {"score": "wanda"}),
    "2:4": (sc.prune, {"sparsity": None, "pattern": "2:4", "reconstruct": True}),
    "joint": (sc.probe, {"tolerance": 0.5}),
    "reverse": (sc.probe, {"order": "reverse", "group": "block"}),
}


def build(width: int = 128, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return tiny.llama(hidden_size=width, intermediate_size=3 * width, num_hidden_layers=3).to(dtype).eval()


def alike(found: Any, right: Any) -> float:
    same = sum(int((found.masks[k].cpu() == mask.cpu()).sum()) for k, mask in right.masks.items())
    return same / right.prunable


@pytest.mark.parametrize("job", JOBS)
def test_cpu_gpu_and_streamed_agree(job: str) -> None:
    """But for the precision of products: bf16 on the GPU where a score is measured, and other orders of sums."""
    work, settings = JOBS[job]
    host, device, streamed = build(), build().cuda(), build()
    right = work(host, BATCHES, **settings)
    found = work(device, BATCHES, **settings)
    carried = work(streamed, BATCHES, device="cuda", **settings)
    if work is sc.prune:
        assert right.pruned == found.pruned == carried.pruned
    assert alike(found, right) > 0.97
    assert alike(carried, found) > 0.995
    assert all(parameter.device.type == "cpu" for parameter in streamed.parameters())
    for name, mask in found.masks.items():
        assert not bool(device.get_parameter(name)[~mask].any())
    with torch.no_grad():
        losses = [float(m(IDS.to(m.device), labels=IDS.to(m.device)).loss) for m in (host, device, streamed)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[2] == pytest.approx(losses[1], rel=0.005)


def test_statistics_in_host_memory_are_those_on_the_device() -> None:
    model = build(dtype=torch.bfloat16).cuda()
    prunables, _ = find_prunable(model)
    wanted = {"gradient_max", "exp_avg_sq"}
    for dtype in (torch.float32, torch.bfloat16):
        right = gather_gradients(model, BATCHES, prunables, wanted, GradientPass(plan=MemoryPlan(dtype)))
        for room in (0, 100_000):
            found = gather_gradients(model, BATCHES, prunables, wanted, GradientPass(plan=MemoryPlan(dtype, room)))
            assert {t.device.type for facts in found.values() for t in facts.values()} <= {"cpu", "cuda"}
            for name, facts in right.items():
                for key, statistic in facts.items():
                    assert torch.equal(found[name][key].cuda(), statistic), (name, key, dtype, room)


def test_facts_of_a_busy_device_are_waited_for_on_the_host() -> None:
    fact = torch.rand(1 << 20, device="cuda")
    right = fact.cpu()
    torch.cuda._sleep(1 << 30)  # half a second: what is copied now is copied late
    fact.mul_(2)
    score = evaluator(resolve("wanda"), {"weight": torch.ones(1 << 20), "input_norm": fact}, 0, torch.device("cpu"))
    assert torch.equal(score(slice(0, 1 << 20)), 2 * right)


def test_what_is_fetched_ahead_is_what_was_put_back() -> None:
    cache = HostCache()
    tensors = [torch.zeros(1 << 20, pin_memory=True) for _ in range(5)]
    for turn in range(20):
        for number, tensor in enumerate(tensors):
            with cache.on_device(tensor, torch.device("cuda", torch.cuda.current_device())) as near:
                assert near.is_cuda
                near.add_(number + turn)
    cache.synchronize()
    for number, tensor in enumerate(tensors):
        assert bool((tensor == 20 * number + 190).all())


def test_a_limit_of_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(1024, torch.bfloat16).cuda()
    weights = sum(p.nbytes for p in model.parameters())
    limit = torch.cuda.memory_allocated() + 2 * weights  # three copies of statistics in bf16 need more
    monkeypatch.setattr(
        CalibratedModel, "copies", property(lambda _: 3, lambda *_: None), raising=False
    )  # over each one's own
    for work, settings in (JOBS["rounds"], JOBS["joint"]):
        torch.cuda.empty_cache()
        outcome = work(model, BATCHES, memory=limit, **settings)
        assert any("in host memory" in note for note in outcome.notes), outcome.notes
        assert max(stage.peak_bytes for stage in outcome.stages) <= limit


def test_a_plan_that_gives_up_nothing_is_taken_where_there_is_room() -> None:
    calibrated = CalibratedModel(build().cuda(), BATCHES)
    plan = calibrated.memory_plan(calibrated.prunables, 1)
    assert (plan.dtype, plan.on_device, plan.checkpointing) == (torch.float32, None, False)
    assert plan != MemoryPlan()  # it says why
