"""A Pruner's state in a file of its own: whole tensors as safetensors, so nothing in it can run when it is read.

Used by the integrations whose checkpoints are folders. A file can be read at any world size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from secateur.errors import HF_EXTRA, StateError, library
from secateur.files import replacing
from secateur.model.distributed import local, part_of, unwrap
from secateur.model.held import check_mapping
from secateur.model.prunable import plain_name
from secateur.pruner import Pruner
from secateur.selection.masks import can_unpack, unpack

PRUNER = "pruner.safetensors"
KIND = {"format": "pt", "secateur": "pruner"}


def write_pruner(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a state of whole tensors (`pruner.for_checkpointing().state_dict()`): the whole file or none."""
    files = library("safetensors.torch", "Saving a Pruner", HF_EXTRA)
    with replacing(path) as temporary:
        files.save_file(dict(state), temporary, metadata=KIND)


def read_pruner(path: Path) -> dict[str, Tensor]:
    """The state in a file that `write_pruner` wrote, or an error that names the file."""
    files = library("safetensors", "Reading a saved Pruner", HF_EXTRA)
    try:
        with files.safe_open(path, framework="pt") as opened:
            kind = (opened.metadata() or {}).get("secateur")
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, files.SafetensorError) as error:
        raise StateError(
            f"{path} cannot be read ({error}): it is missing or damaged. Resume from another checkpoint, or put back a"
            " copy of this file."
        ) from error
    if kind != KIND["secateur"]:
        raise StateError(f"{path} is not the state of a Pruner but some other safetensors file.")
    return found


def restore(pruner: Pruner, state: Mapping[str, Tensor], path: Path, strict: bool = True) -> None:
    """Load a state that was read from this file, and name the file if it does not fit."""
    try:
        pruner.load_state_dict(state, strict=strict)
    except StateError as error:
        raise StateError(f"{path}: {error}") from error


def check_zeros(model: nn.Module, state: Mapping[str, Tensor], path: Path, advice: str = "") -> None:
    """Refuse masks of another checkpoint: weights that a mask prunes must be zero in the model.

    Names and shapes are left to `Pruner.load_state_dict`.
    """
    check_mapping(state)
    for name, parameter in unwrap(model).named_parameters():
        packed, weight = state.get(f"mask.{plain_name(name)}"), local(parameter.detach())
        if packed is None or not can_unpack(packed, parameter.shape):
            continue
        mask = unpack(part_of(packed, parameter).to(weight.device), weight.shape)
        wrong = int(weight.masked_fill(mask, 0).count_nonzero())
        if wrong:
            raise StateError(
                f"{path} is of another checkpoint than the model: it prunes {wrong:,} weights of {plain_name(name)!r}"
                f" that are not zero. Name the checkpoint the model was loaded from.{advice}"
            )
