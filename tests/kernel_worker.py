"""Run by torchrun under Triton's interpreter: shards selected by kernels give the masks one process gives."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from triton.runtime.interpreter import InterpreterBuilder

from secateur.kernels import select
from tests.kernel_cases import masks_of

# See tests/test_kernels.py for why the square root is lent.
InterpreterBuilder.create_precise_sqrt = lambda self, argument: self.unary_op(
    argument, lambda x: torch.from_numpy(x).sqrt().numpy()
)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 50), nn.ReLU(), nn.Linear(50, 33), nn.ReLU(), nn.Linear(33, 8))


def whole(mask: torch.Tensor) -> torch.Tensor:
    return mask.full_tensor() if isinstance(mask, DTensor) else mask


def main() -> None:
    dist.init_process_group("gloo")
    select.SMALL, select.COARSE_SAMPLE = 256, 128
    for settings in (
        {"score": "bitter7", "sparsity": 0.6},
        {"score": "magnitude", "sparsity": 0.4, "scope": "layer"},
        {"score": "random", "sparsity": 0.5},
        {"score": "fisher", "sparsity": 0.3, "scope": "row"},
    ):
        for ties in (False, True):
            os.environ["SECATEUR_KERNELS"] = ""
            sharded = build()
            for layer in (sharded[0], sharded[2]):
                fully_shard(layer)  # the last layer stays whole on both ranks
            if ties:
                round_weights(sharded)
            many = masks_of(sharded, torch.optim.AdamW(sharded.parameters(), lr=0.0), 3, every=3, **settings)
            assert many._held.packed
            os.environ["SECATEUR_KERNELS"] = "off"
            alone = build()
            if ties:
                round_weights(alone)
            one = masks_of(alone, torch.optim.AdamW(alone.parameters(), lr=0.0), 3, every=3, **settings)
            for name, mask in one.masks.items():
                assert torch.equal(whole(many.masks[name]), mask), (settings, ties, name)
            assert many.sparsity == one.sparsity
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # as tests/distributed_worker.py does


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        part.copy_((part * 8).round() / 8)


if __name__ == "__main__":
    main()
