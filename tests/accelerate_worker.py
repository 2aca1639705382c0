"""A training loop of Accelerate with a Pruner in its saved state; run by torchrun also under DDP and FSDP2."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn

import secateur as sc
from secateur.integrations.accelerate import prepare
from secateur.model.distributed import is_sharded, whole
from tests.conftest import Block
from tests.fsdp_worker import Sharding, finish

STEPS, HALF = 12, 6
SETTINGS: dict[str, Any] = {"score": "variance", "sparsity": sc.cubic(0.6, begin=1, end=10), "every": 2}


class Net(Block):
    """The small network of the other tests, whose linear layers FSDP wraps one by one."""

    _no_split_modules = ("Linear",)


@dataclass
class Loop:
    accelerator: Any
    model: nn.Module
    optimizer: Any
    pruner: sc.Pruner

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(100 * step + self.accelerator.process_index)
            tokens = torch.randint(0, 10, (4, 6), generator=generator)
            loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), (tokens * 7 % 10).flatten())
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.pruner.step()
            self.optimizer.zero_grad()

    def ended(self) -> dict[str, Tensor]:
        """Whole weights, moments and masks."""
        found: dict[str, Tensor] = {}
        state = self.optimizer.optimizer.state
        for name, weight in self.accelerator.unwrap_model(self.model).named_parameters():
            found[name] = whole(weight.detach())
            found |= {f"{name} {key}": whole(torch.as_tensor(value)) for key, value in state[weight].items()}
        return found | {f"mask {name}": whole(mask) for name, mask in self.pruner.masks.items()}


def built(
    kind: Any = accelerate.Accelerator, optimizer: Any = torch.optim.AdamW, seed: int = 0, **changes: Any
) -> Loop:
    AcceleratorState._reset_state()
    accelerator = kind(cpu=True)
    torch.manual_seed(seed)
    model = Net()
    model, prepared = accelerator.prepare(model, optimizer(model.parameters(), lr=1e-2))
    return Loop(accelerator, model, prepared, sc.Pruner(model, prepared, **{**SETTINGS, **changes}))


def unbroken_and_resumed(folder: Path, **options: Any) -> tuple[Loop, Loop]:
    """A run that was saved halfway, and another that went on from there; it began with other weights."""
    first = built(**options)
    prepare(first.accelerator, first.pruner)
    first.train(0, HALF)
    first.accelerator.save_state(str(folder))
    first.train(HALF, STEPS)
    second = built(seed=1, **options)
    prepare(second.accelerator, second.pruner)
    second.accelerator.load_state(str(folder))
    second.train(HALF, STEPS)
    return first, second


def main() -> None:
    out, found = Path(sys.argv[1]), {}
    for job in sys.argv[2:]:
        runs = unbroken_and_resumed(out.parent / job, kind=Sharding if job == "fsdp" else accelerate.Accelerator)
        assert all(is_sharded(weight) for weight in runs[0].model.parameters()) is (job == "fsdp")
        found[job], found[f"{job} resumed"] = (run.ended() for run in runs)
    finish(found, out)


if __name__ == "__main__":
    main()
