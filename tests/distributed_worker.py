"""Run by torchrun: trains the same little network at any world size and writes what came out.

`python -m tests.distributed_worker OUT single` is the one-process run the others are compared with. Gradients are set
by hand to the same numbers on every rank and in every run, so that weights agree to the bit and masks can be compared.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import secateur as sc

SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"score": "variance"},
    "bf16": {"score": "magnitude"},
    "layer": {"score": "bitter6", "scope": "layer"},
    "row": {"score": "bitter7", "scope": "row"},
    "erk": {"score": "bitter8", "allocation": "erk"},
    "lamp": {"score": "magnitude", "allocation": "lamp"},
    "random": {"score": "random(seed=3)"},
    "movement": {"score": "movement"},
    "2:4": {"score": "fisher", "pattern": "2:4", "sparsity": None},
    "large": {"score": "bitter3"},
    "regrow": {"score": "magnitude", "regrow": "gradient"},
    "regrow-layer": {"score": "bitter7", "scope": "layer", "regrow": "gradient", "until": 16},
    "regrow-random": {"score": "magnitude", "regrow": "random", "until": 16},
    "held": {"score": "variance", "masks": "given"},
    "held-layer": {"score": "magnitude", "scope": "layer", "masks": "given"},
    "hold": {"sparsity": None, "masks": "given"},
    "zeros": {"score": "magnitude", "masks": "zeros"},
    "hold-zeros": {"sparsity": None, "masks": "zeros"},
}


def network(setting: str) -> nn.Module:
    """Layers whose rows do not divide by 2, 3 or 4: shards are uneven, and with four ranks one may be empty."""
    torch.manual_seed(1)
    if setting == "large":  # past what is collected outright, so the sampled bracket is summed over ranks too
        return nn.Sequential(nn.Linear(1024, 701), nn.Linear(701, 402))
    if setting == "even":
        return nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4))
    model = nn.Sequential(nn.Linear(12, 37), nn.ReLU(), nn.Linear(37, 9), nn.Linear(9, 5, bias=False))
    if setting == "2:4":
        model = nn.Sequential(nn.Linear(12, 36), nn.ReLU(), nn.Linear(36, 8), nn.Linear(8, 5, bias=False))
    if "zeros" in setting:
        for name, mask in given(model).items():
            model.get_parameter(name).data.mul_(mask)
    return model.to(torch.bfloat16) if setting == "bf16" else model


def given(model: nn.Module) -> dict[str, Tensor]:
    """Whole masks of two of the weights, half of them kept."""
    generator = torch.Generator().manual_seed(5)
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    return {name: torch.rand(p.shape, generator=generator) < 0.5 for name, p in matrices[:2]}


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator).round(decimals=1).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = whole


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(model: nn.Module, how: str) -> nn.Module:
    world = dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    for layer in model:  # type: ignore[attr-defined]
        if how != "mixed" or layer is not model[2]:  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
    return model


def run(how: str, setting: str, save: Path | None = None, load: Path | None = None) -> tuple[dict[str, Tensor], int]:
    """Masks and weights after twelve steps, and the bytes the largest update sent."""
    model = network(setting)
    options = {"sparsity": sc.cubic(0.7, begin=0, end=11), **SETTINGS[setting]}
    if options.get("masks") == "given":
        options["masks"] = given(model)
    model = model if how == "single" else shard(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, optimizer, every=4, **options)
    first = 1
    if load is not None:
        first = 7
        resume(load, model, optimizer, pruner)
    for step in range(first, 13):
        gradients(model, step)
        optimizer.step()
        pruner.step()
        if save is not None and step == 6:
            dcp.save(checkpoint(model, optimizer, pruner), checkpoint_id=save)
    found = {f"mask.{name}": whole(mask) for name, mask in pruner.masks.items()}
    names = {name.removeprefix("module."): whole(p.detach()) for name, p in model.named_parameters()}
    return found | names, max((update.bytes_sent for update in pruner.updates), default=0)


def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, pruner: sc.Pruner) -> dict[str, Any]:
    moments = {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return {"model": model.state_dict(), "moments": moments, "pruner": pruner.state_dict()}


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, pruner: sc.Pruner) -> None:
    gradients(model, 0)
    optimizer.step()  # makes the optimizer's state exist, to be overwritten
    state = checkpoint(model, optimizer, pruner)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    pruner.load_state_dict(state["pruner"])


class Conv1D(nn.Module):
    """Stored [inputs, outputs], as in transformers: sharding dim 0 cuts every output row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8))


def saved_by_one(setting: str, how: str = "fsdp") -> dict[str, Any]:
    """A Pruner's state by torch.save on the first rank, which holds its shards alone, and gathered before."""
    model = shard(network(setting), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, optimizer, every=1, sparsity=0.7)
    gradients(model, 1)
    optimizer.step()
    pruner.step()
    found: dict[str, Any] = {}
    states = {"shards": pruner.state_dict(), "whole": {name: whole(one) for name, one in pruner.state_dict().items()}}
    states["checkpointing"] = pruner.for_checkpointing().state_dict()
    found["plain"] = all(type(one) is Tensor and one.device.type == "cpu" for one in states["checkpointing"].values())
    found["masks"] = {name: whole(mask) for name, mask in pruner.masks.items()}
    found["state"] = states["checkpointing"]
    for name, state in states.items():
        saved = io.BytesIO()
        torch.save(state, saved)
        box = [saved.getvalue()]
        dist.broadcast_object_list(box)
        fresh = shard(network(setting), "fsdp")
        other = sc.Pruner(fresh, torch.optim.AdamW(fresh.parameters()), every=1, sparsity=0.7)
        try:
            loaded = torch.load(io.BytesIO(box[0]), weights_only=name == "checkpointing")
            other.for_checkpointing().load_state_dict(loaded)
            found[name] = all(torch.equal(whole(mask), whole(pruner.masks[key])) for key, mask in other.masks.items())
        except sc.SecateurError as error:
            found[name] = f"{type(error).__name__}: {error}"
            found["untouched"] = other.sparsity == 0
    return found


def copies() -> dict[str, bool]:
    """Copies of the model get the zeros, whole or sharded, whichever way the model itself is held."""
    found = {}
    for how in ("fsdp", "ddp"):
        model = shard(network("model"), how)
        pruner = sc.Pruner(model, torch.optim.SGD(model.parameters()), masks=given(network("model")), sparsity=None)
        ways = {
            "whole": network("model"),
            "fsdp": shard(network("model"), "fsdp"),
            "ddp": shard(network("model"), "ddp"),
        }
        ways["averaged"] = AveragedModel(network("model"))
        for way, copied in ways.items():
            pruner.apply_to(copied)
            inner = getattr(copied, "module", copied)
            same = [torch.equal(whole(inner.get_parameter(name)) != 0, mask) for name, mask in given(inner).items()]
            found[f"{how} {way}"] = all(same) and len(same) == 2
    return found


def too_early() -> str:
    """A Pruner made before fully_shard replaced the parameters: without the check it reports zeros nobody has."""
    model = network("model")
    pruner = sc.Pruner(model, early := torch.optim.AdamW(model.parameters(), lr=0.01), every=1)
    shard(model, "fsdp")
    gradients(model, 1)
    early.step()
    try:
        pruner.step()
    except sc.SecateurError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def gathered() -> float:
    """After a forward pass FSDP2 holds whole weights in its modules: that is no replacement."""
    model = network("model")
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, optimizer, every=1)
    model(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    model(torch.ones(2, 12))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    pruner.step()
    return pruner.sparsity


def refusals() -> dict[str, str]:
    """What is refused, with which words. Every rank must raise: one that did not would wait for ever."""
    said = {}
    for name, options in {"row": {"scope": "row"}, "8:12": {"pattern": "8:12", "sparsity": None}}.items():
        model = shard(nn.Sequential(Conv1D()), "fsdp")
        try:
            sc.Pruner(model, torch.optim.AdamW(model.parameters()), **options)
        except sc.SecateurError as error:
            said[name] = f"{type(error).__name__}: {error}"
    for name, how in {"nan": "fsdp", "replicas": "ddp"}.items():
        model = shard(network("model"), how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        pruner = sc.Pruner(model, optimizer, every=1, score="magnitude")
        gradients(model, 1)
        optimizer.step()
        if dist.get_rank() == dist.get_world_size() - 1:
            first = next(model.parameters()).detach()
            part = first.to_local() if isinstance(first, DTensor) else first
            part.fill_(torch.nan if name == "nan" else 0.5)
        try:
            pruner.step()
        except sc.SecateurError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


ALONE: dict[str, Callable[[], Any]] = {
    "refusals": refusals,
    "copies": copies,
    "too-early": too_early,
    "gathered": gathered,
    "saved-by-one": lambda: [saved_by_one("even"), saved_by_one("model"), saved_by_one("even", "hsdp")],
}


def main() -> None:
    out, *jobs = sys.argv[1:]
    single = jobs == ["single"]
    torch.set_num_threads(1)
    if not single:
        dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for job in [f"single {setting}" for setting in SETTINGS] if single else jobs:
        if job in ALONE:
            results[job] = ALONE[job]()
            continue
        how, setting, *paths = job.split()
        where = {key: Path(path) for key, path in (pair.split("=") for pair in paths)}
        results[f"{how} {setting}" + "".join(f" {key}" for key in where)] = run(how, setting, **where)
    if single or dist.get_rank() == 0:
        torch.save(results, out)
    if not single:
        dist.barrier()
        dist.destroy_process_group()
        # All is saved. Leaving the interpreter the usual way, torch's own threads sometimes abort the process.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
