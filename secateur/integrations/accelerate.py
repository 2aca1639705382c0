"""For Hugging Face Accelerate: a Pruner that is saved and loaded with the rest of a training state.

    model, optimizer = accelerator.prepare(model, optimizer)
    pruner = secateur.Pruner(model, optimizer, ...)
    prepare(accelerator, pruner)  # from now on save_state and load_state include the Pruner

The state is written as safetensors. Objects given to `accelerator.register_for_checkpointing` are pickled instead, and
Accelerate reads them back in a way that runs whatever is in the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from secateur.errors import OptimizerError, StateError
from secateur.model.state import PRUNER, read_pruner, restore, write_pruner
from secateur.pruner import Handles, Pruner

__all__ = ["load_pruner", "prepare", "save_pruner"]

UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def prepare(accelerator: Accelerator, pruner: Pruner) -> Handles:
    """Include the Pruner in `accelerator.save_state` and `load_state`. Returns a handle with `remove()`.

    Build the Pruner after `accelerator.prepare(model, optimizer)`, which may replace parameters. One Pruner can be
    prepared for an Accelerator; save others with `save_pruner`, each into a folder of its own.
    """
    _check(accelerator, pruner)
    hooks = accelerator._save_model_state_pre_hook.values()
    if any(getattr(hook, "__func__", None) is _Hooks.save for hook in hooks):
        raise StateError(
            f"This Accelerator already saves a Pruner, and both would be {PRUNER}. Remove the first, handle.remove(),"
            " or save this one with save_pruner(accelerator, pruner, folder)."
        )
    both = _Hooks(accelerator, pruner)
    return Handles(
        [accelerator.register_save_state_pre_hook(both.save), accelerator.register_load_state_pre_hook(both.load)]
    )


class _Hooks:
    """What `save_state` and `load_state` call. On loading, Accelerate calls this before it loads plain models and
    optimizers, which then overwrite weights and state in place and leave the masks alone, and after it loads FSDP's."""

    def __init__(self, accelerator: Accelerator, pruner: Pruner) -> None:
        self._accelerator, self._pruner = accelerator, pruner

    def save(self, models: Any, weights: Any, folder: str) -> None:
        save_pruner(self._accelerator, self._pruner, folder)

    def load(self, models: Any, folder: str) -> None:
        load_pruner(self._accelerator, self._pruner, folder)


def save_pruner(accelerator: Accelerator, pruner: Pruner, folder: str | os.PathLike[str]) -> None:
    """Write the Pruner's state to `pruner.safetensors` in a folder. All processes must call it: shards are gathered,
    and the main process writes (on every node if the Accelerator's project saves on each)."""
    _check(accelerator, pruner)
    state = pruner.for_checkpointing().state_dict()
    each = accelerator.project_configuration.save_on_each_node
    if accelerator.is_local_main_process if each else accelerator.is_main_process:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_pruner(Path(folder) / PRUNER, state)


def load_pruner(
    accelerator: Accelerator, pruner: Pruner, folder: str | os.PathLike[str], *, strict: bool = True
) -> None:
    """Load what `save_pruner` wrote, at any number of processes, all of which must call it. With `strict=False` the
    Pruner may have other settings, as in `Pruner.load_state_dict`."""
    _check(accelerator, pruner)
    path = Path(folder) / PRUNER
    restore(pruner, read_pruner(path), path, strict)


def _check(accelerator: Any, pruner: Any) -> None:
    if not isinstance(accelerator, Accelerator) or not isinstance(pruner, Pruner):
        raise StateError(
            "An accelerate.Accelerator and a secateur.Pruner are needed, in this order; got"
            f" {type(accelerator).__name__} and {type(pruner).__name__}."
        )
    if accelerator.distributed_type in UNSUPPORTED:
        raise OptimizerError(
            f"{accelerator.distributed_type.value} keeps its own copies of weights and optimizer state, which a Pruner"
            " cannot read or zero. Use DDP, or FSDP version 2 to shard the model."
        )
