"""Run by torchrun: prunes trained models on several processes and writes the results of every rank.

`outcome` is also the one-process run that the others are compared with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import secateur as sc
from secateur.model.distributed import SOLO, Ranks
from secateur.model.prunable import find_prunable
from secateur.oneshot.gradients import GradientPass, gather_gradients
from secateur.oneshot.offload import MemoryPlan
from tests.contract import Experts, Rows


class Recurrent(nn.Module):
    """One matrix that is used three times for every batch, and BatchNorm, whose averages differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.BatchNorm1d(12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(self.norm(x)))
        return self.outer(x)


class Choice(nn.Module):
    """Each row goes to one of four layers, by the signs of two features: pruned, some rows go elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.experts = nn.Linear(12, 12), nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(x)
        chosen = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


def llama() -> nn.Module:
    from tests import tiny

    return tiny.llama()


def dead() -> nn.Module:
    """A ReLU network with a dead layer's worth of zero gradients, so that inputs are counted too."""
    model = nn.Sequential(nn.Linear(12, 37), nn.ReLU(), nn.Linear(37, 9), nn.ReLU(), nn.Linear(9, 5, bias=False))
    model[0].bias.data -= 100
    return model


def fitted() -> nn.Module:
    """A network that is sure of its answers, which are the targets of its batches: see `batches`."""
    model = nn.Sequential(nn.Linear(12, 37), nn.Tanh(), nn.Linear(37, 5))
    model[2].weight.data *= 10
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(12, 37), nn.ReLU(), nn.Linear(37, 9), nn.Linear(9, 5, bias=False)),
    "dead": dead,
    "fitted": fitted,
    "recurrent": Recurrent,
    "choice": lambda: nn.Sequential(Choice(), Choice()),
    "moe": lambda: Rows(Experts, 16),
    "llama": llama,
}


def score(model: nn.Module) -> float:
    """A metric of a model: higher is better."""
    with torch.no_grad():
        return float(-sum(parameter.float().square().sum() for parameter in model.parameters()))


METHODS: dict[str, Callable[..., Any]] = {
    "variance": lambda *given, **more: sc.prune(*given, sparsity=0.6, **more),
    "wanda": lambda *given, **more: sc.prune(*given, score="wanda", sparsity=0.6, **more),
    "recommended": lambda *given, **more: sc.prune(*given, sparsity=0.6, rounds=2, reconstruct="every", **more),
    "sparsegpt": lambda *given, **more: sc.prune(*given, method="sparsegpt", sparsity=0.6, **more),
    "probe": lambda *given, **more: sc.probe(*given, sparsity=0.6, **more),
    "exact": lambda *given, **more: sc.probe(*given, sparsity=0.6, exact=True, score="variance", **more),
    "reverse": lambda *given, **more: sc.probe(*given, sparsity=0.6, order="reverse", **more),
    "blocks": lambda *given, **more: sc.probe(*given, sparsity=0.6, order="reverse", group="block", **more),
    "until": lambda *given, **more: sc.probe_until(
        *given, lambda model: score(model) + (dist.get_rank() if dist.is_initialized() else 0),
        start=0.2, step=0.3, tolerance=0.5, max_drop=1.0, **more,
    ),
}  # fmt: skip


def network(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]()


def batches(name: str, count: int = 5, size: int = 6) -> Any:
    generator = torch.Generator().manual_seed(2)
    if name == "llama":
        ids = torch.randint(0, 96, (count, 3, 9), generator=generator)
        masks = torch.ones_like(ids)
        masks[1::2, :, 6:] = 0  # every other batch is padded
        labels = ids.masked_fill(masks == 0, -100)
        return [{"input_ids": i, "attention_mask": m, "labels": t} for i, m, t in zip(ids, masks, labels, strict=True)]
    shape = (count, size, 1, 8, 8) if name == "moe" else (count, size, 12)
    inputs, targets = torch.randn(shape, generator=generator), torch.randint(0, 5, (count, size), generator=generator)
    if name == "fitted":
        pool = torch.randn(2000, 12, generator=generator)
        logits = network(name)(pool).detach()
        best = logits.topk(2).values.diff().flatten().argsort()[: count * size]  # farthest from the runner-up
        inputs, targets = pool[best].view(shape), logits[best].argmax(-1).view(count, size)
    return list(zip(inputs, targets, strict=True))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """fully_shard of every block, or of every layer, and of the rest."""
    parts = getattr(getattr(model, "model", None), "layers", None) or getattr(model, "blocks", None) or model.children()
    for part in parts:
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp":
        return shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    if how == "mixed":  # forward passes of training are in bf16; pruning reads the weights as they are stored
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        return shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
        return shard(model, mesh)
    return model


def outcome(how: str, name: str, method: str, count: int = 5) -> dict[str, Any]:
    """What a rank has after pruning: masks, weights, figures, and what it sent."""
    model = network(name)
    if how != "alone":
        model = wrapped(model, how)
    if how != "alone" and name == "mlp":
        model(batches(name)[0][0])  # FSDP2 then keeps the outermost module whole, DDP expects a backward pass
    if how != "alone" and name == "recurrent":
        model.get_submodule("module.norm" if how == "ddp" else "norm").running_mean.fill_(float(dist.get_rank()))
    more = {"distributed": True} if how == "plain" else {}
    report = METHODS[method](model, batches(name, count), **more)
    weights = {key.removeprefix("module."): whole(p.detach()).clone() for key, p in model.named_parameters()}
    return {
        "masks": dict(report.masks),
        "weights": weights,
        "found": list(report.found),
        "notes": list(report.notes),
        "batches": report.batches,
        "sent": sum(update.bytes_sent for update in report.updates),
        "buffers": {key.removeprefix("module."): b.clone() for key, b in model.named_buffers() if "running" in key},
    }


def said(work: Callable[[], Any]) -> str:
    """What an error says, or nothing."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals() -> dict[str, Any]:
    """An error on one rank must reach all of them: a rank that does not raise would wait for ever."""
    rank, found = dist.get_rank(), {}
    model = DistributedDataParallel(network("mlp"))
    nan = batches("mlp")
    nan[1][0].fill_(torch.nan)
    found["nan"] = said(lambda: sc.prune(model, nan))
    found["batches"] = said(lambda: sc.prune(model, batches("mlp")[rank:]))
    found["counts"] = said(lambda: sc.prune(model, batches("mlp", 5 - rank)))
    found["none"] = said(lambda: sc.prune(model, batches("mlp") if rank == 0 else []))
    found["settings"] = said(lambda: sc.prune(model, batches("mlp"), score="variance" if rank == 0 else "wanda"))

    found["score"] = said(lambda: sc.prune(model, batches("mlp"), score="variance" if rank == 0 else "nope"))
    found["order"] = said(lambda: sc.probe(model, batches("mlp"), order="joint" if rank == 0 else "nope"))

    def fails(model: nn.Module) -> float:
        if rank == 1:
            raise RuntimeError("the disk is full")
        return 1.0

    found["evaluate"] = said(lambda: sc.probe(model, batches("mlp"), evaluate=fails))
    other = network("mlp")
    other[0].bias.data += rank
    found["weights"] = said(lambda: sc.prune(other, batches("mlp"), distributed=True))
    sharded = wrapped(network("mlp"), "fsdp")
    found["sharded"] = said(lambda: sc.prune(sharded, batches("mlp"), distributed=False))
    found["sharded nan"] = said(lambda: sc.prune(sharded, nan, rounds=2, reconstruct="every"))
    dense = network("mlp").state_dict()
    found["restored"] = all(torch.equal(whole(p.detach()), dense[name]) for name, p in sharded.named_parameters())
    found["type"] = type(sharded).__name__
    parallel = network("mlp")
    for layer in (parallel[0], parallel[2]):
        parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel())
    found["parallel"] = said(lambda: sc.prune(parallel, batches("mlp")))
    if rank == 0:  # no other rank calls
        found["by itself"] = said(lambda: sc.prune(model, batches("mlp"), distributed=False))
    return found


def trained_on() -> dict[str, Any]:
    """A model sharded by FSDP2 trains on after it was pruned, as a whole one does; the Pruner holds its zeros."""
    model = wrapped(network("mlp"), "fsdp")
    sc.prune(model, batches("mlp"), sparsity=0.6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, optimizer, sparsity=0.7, every=1)
    for inputs, targets in batches("mlp"):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        pruner.step()
    return {"sparsity": pruner.sparsity, "finite": all(bool(whole(p).isfinite().all()) for p in model.parameters())}


def split() -> dict[str, Any]:
    """Which batches have a backward pass on this rank, and bytes sent for small batches and large ones."""
    seen: list[float] = []
    given = batches("mlp")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            seen.append(float(batch[0][0, 0]))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    sc.prune(network("mlp"), given, loss=loss, distributed=True)
    numbers = [[float(inputs[0, 0]) for inputs, _ in given].index(value) for value in seen]
    sent = []
    for size in (2, 200):
        report = sc.prune(network("mlp"), batches("mlp", 5, size), distributed=True)
        sent.append(report.updates[-1].bytes_sent)
    return {"numbers": numbers, "sent": sent}


def rounded() -> bool:
    """Whether bf16 statistics, which are rounded stochastically, equal those of one process: ranks must draw alike."""
    model = network("mlp")
    prunables, wanted = find_prunable(model)[0], {"exp_avg_sq", "gradient_max"}
    one, several = (
        gather_gradients(
            model, batches("mlp"), prunables, wanted, GradientPass(plan=MemoryPlan(torch.bfloat16), ranks=ranks)
        )
        for ranks in (SOLO, Ranks(dist.group.WORLD))
    )
    return all(
        torch.equal(one[prunable.name][name], several[prunable.name][name]) for prunable in prunables for name in wanted
    )


JOBS: dict[str, Callable[[], Any]] = {
    "refusals": refusals, "trained on": trained_on, "split": split, "rounded": rounded,
}  # fmt: skip


def main() -> None:
    out, *jobs = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for job in jobs:
        how, *rest = job.split()
        mine = JOBS[job]() if job in JOBS else outcome(how, rest[0], rest[1], *map(int, rest[2:]))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        results[job] = everyone
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in tests/distributed_worker.py


if __name__ == "__main__":
    main()
