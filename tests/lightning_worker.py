"""Lightning modules and fits with a PrunerCallback; run by torchrun also under DDP and fully_shard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from secateur.integrations.lightning import PrunerCallback
from secateur.model.distributed import is_sharded, whole
from tests.fsdp_worker import finish

EPOCHS, BATCHES = 4, 5
RAMP: dict[str, Any] = {"sparsity": 0.6, "begin": 0.1, "end": 0.8}


def batches() -> DataLoader[Any]:
    rows = torch.randn(4 * BATCHES * 2, 12, generator=torch.Generator().manual_seed(7))
    return DataLoader(rows, batch_size=4, shuffle=False)  # type: ignore[arg-type]


class Work:
    """What a module of Lightning does here; the class of the module comes from either package."""

    def __init__(self, seed: int = 0, optimizer: Any = torch.optim.AdamW, sharded: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
        self.made, self.sharded = optimizer, sharded

    def configure_model(self) -> None:
        if self.sharded:
            fully_shard(self.net)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.made(self.parameters(), lr=1e-2)  # type: ignore[attr-defined]


class Module(Work, pl.LightningModule):
    pass


def fitted(
    folder: Path, *, resume: Path | None = None, library: Any = pl, module: Any = Module, sharded: bool = False,
    optimizer: Any = torch.optim.AdamW, settings: dict[str, Any] | None = None, **options: Any,
) -> tuple[Any, PrunerCallback]:  # fmt: skip
    """Fit, with a checkpoint after every epoch; a resumed fit begins with other weights."""
    callback = PrunerCallback(**{**RAMP, **(settings or {})})
    saving = library.callbacks.ModelCheckpoint(folder, filename="{step}", save_top_k=-1)
    trainer = library.Trainer(**{
        "max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": folder, "callbacks": [callback, saving], **options,
    })  # fmt: skip
    model = module(seed=0 if resume is None else 1, optimizer=optimizer, sharded=sharded)
    trainer.fit(model, batches(), ckpt_path=resume)
    return trainer, callback


def ended(trainer: Any, callback: PrunerCallback) -> dict[str, Tensor]:
    """Whole weights, moments and masks."""
    found: dict[str, Tensor] = {}
    for name, weight in trainer.lightning_module.named_parameters():
        state = trainer.optimizers[0].state[weight]
        found[name] = whole(weight.detach())
        found |= {f"{name} {key}": whole(torch.as_tensor(value)) for key, value in state.items()}
    return found | {f"mask {name}": whole(mask) for name, mask in callback.pruner.masks.items()}


def main() -> None:
    out, found = Path(sys.argv[1]), {}
    for job in sys.argv[2:]:
        folder = out.parent / job
        for part, resume in (("", None), (" resumed", folder / "step=10.ckpt")):
            strategy = ModelParallelStrategy() if job == "fsdp" else DDPStrategy()
            run = fitted(folder, resume=resume, sharded=job == "fsdp", strategy=strategy, devices=2)
            assert all(is_sharded(weight) for weight in run[0].model.parameters()) is (job == "fsdp")
            found[job + part] = ended(*run)
    finish(found, out)


if __name__ == "__main__":
    main()
