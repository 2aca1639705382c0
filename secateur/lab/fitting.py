"""How many rows of a batch a GPU takes at a time."""

from __future__ import annotations

import sys

import torch

from secateur.lab.trainer import Trainer


def fitting(trainer: Trainer) -> int:
    """Rows at a time: all of them where they fit, else half as many, and so on; said once, with the reason."""
    size = trainer.rows
    if trainer.accelerator.device.type != "cuda":
        return size
    if trainer.in_shards:  # a process without room would leave the others waiting
        return size
    model = trainer._alone()  # whether it fits here is nobody else's business
    model.eval()  # averages of normalisation stay as they are
    while size > 1:
        trainer.micro = size
        try:
            with torch.random.fork_rng(devices=[trainer.accelerator.device]):
                trainer.loss(next(trainer.micro_batches(1)), model)[0].backward()
            break
        except torch.OutOfMemoryError:
            size = -(-size // 2)
        finally:
            trainer.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    if size < trainer.rows and trainer.accelerator.is_main_process:
        why = f"{trainer.rows} do not fit the GPU; the step is the same but for dropout and batch normalisation"
        print(f"secateur: {size} rows at a time: {why}", file=sys.stderr)
    return size
