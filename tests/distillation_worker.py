"""Run by torchrun: one step of a DistillationTrainer under DDP and FSDP2; the weights that come out."""

from __future__ import annotations

import sys
from pathlib import Path

import transformers.trainer
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.fsdp_worker import Sharding, finish
from tests.test_distillation import pair_and_rows, trainer


def weights(folder: Path) -> dict[str, Tensor]:
    AcceleratorState._reset_state()
    student, teacher, items = pair_and_rows()
    changes = {"per_device_train_batch_size": 2, "ddp_find_unused_parameters": False}
    job = trainer(folder, student, teacher, changes, alpha=0.6, positions=3, train_dataset=items)
    job.train()
    assert job._by_head
    found = {name: weight.detach() for name, weight in job.model.named_parameters()}
    return {name: weight.full_tensor() if isinstance(weight, DTensor) else weight for name, weight in found.items()}


def main() -> None:
    out = Path(sys.argv[1])
    found = {}
    for job in sys.argv[2:]:
        if job == "fsdp":
            transformers.trainer.Accelerator = Sharding  # type: ignore[attr-defined]
        found[job] = weights(out.parent / job)
    finish(found, out)


if __name__ == "__main__":
    main()
