"""`secateur` on shards of FSDP2 by Accelerate, which asks for it on GPUs alone: on CPUs its state has to be told."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def finish(found: dict[str, Any], out: Path) -> None:
    """Save what the first process found, and end all of them.

    Leaving the interpreter the usual way, torch's own threads sometimes abort a process.
    """
    if dist.get_rank() == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


class Sharding(accelerate.Accelerator):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.state.distributed_type = DistributedType.FSDP
        accelerate.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap"
        )


if __name__ == "__main__":
    accelerate.Accelerator = Sharding  # type: ignore[misc]
    from secateur.cli import main
    from secateur.lab.trainer import Trainer

    step, last = Trainer.step, int(os.environ.get("DIES_AFTER", "-1"))

    def mortal(trainer: Trainer) -> Any:
        assert trainer.accelerator.is_fsdp2
        if trainer.progress.step == last:
            os._exit(9)
        return step(trainer)

    Trainer.step = mortal  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
