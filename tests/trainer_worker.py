"""Run by torchrun: Trainers with a PrunerCallback under DDP and FSDP2, unbroken and resumed, and what came out.

Accelerate asks for FSDP on GPUs alone; on CPUs its state has to be told (tests/fsdp_worker.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.trainer
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.distributed.tensor import DTensor

from secateur.integrations.transformers import PrunerCallback
from secateur.model.state import PRUNER, read_pruner
from tests.fsdp_worker import Sharding, finish
from tests.test_trainer_callback import HALF, RAMP, STEPS, llama, trainer


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def ended(run: Any, callback: PrunerCallback) -> dict[str, Any]:
    """Whole weights, moments and masks at the end of a run, which must be equal on all ranks."""
    optimizer = run.optimizer.optimizer
    weights = {name: whole(weight) for name, weight in run.model.named_parameters()}
    moments = {
        f"{name}.{key}": whole(value)
        for name, weight in run.model.named_parameters()
        for key, value in optimizer.state[weight].items()
    }
    masks = {name: whole(mask) for name, mask in callback.pruner.masks.items()}
    sharded = any(isinstance(weight, DTensor) for weight in run.model.parameters())
    sums = torch.stack([part.double().sum() for part in (*weights.values(), *masks.values())])
    every = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(every, sums)
    return {
        "weights": weights, "moments": moments, "masks": masks, "sharded": sharded,
        "sparsity": callback.pruner.sparsity, "agree": all(torch.equal(every[0], one) for one in every),
    }  # fmt: skip


def trained(folder: Path, resume: str | None) -> dict[str, Any]:
    AcceleratorState._reset_state()
    callback = PrunerCallback(**RAMP)
    run = trainer(folder, callback, llama(seed=0 if resume is None else 1), ddp_find_unused_parameters=False)
    run.train(resume_from_checkpoint=resume)
    return ended(run, callback)


def main() -> None:
    out, found = Path(sys.argv[1]), {}
    for job in sys.argv[2:]:
        if job == "fsdp":
            transformers.trainer.Accelerator = Sharding  # type: ignore[attr-defined]
        folder = out.parent / job
        found[job] = trained(folder, None)
        found[f"{job} resumed"] = trained(folder, str(folder / HALF))
        found[f"{job} saved"] = read_pruner(folder / f"checkpoint-{STEPS}" / PRUNER)
    finish(found, out)


if __name__ == "__main__":
    main()
