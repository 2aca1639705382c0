"""Masks in a file: one bit a weight in safetensors, read back with everything checked.

safetensors is imported when a file is read or written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import StateError, library
from secateur.selection.masks import can_unpack, pack, unpack

EXTRA = '"secateur[hf]"'
MASKS = "masks.safetensors"


def save_masks(folder: str | os.PathLike[str], masks: Mapping[str, Tensor]) -> None:
    """Write bool masks by parameter name into a folder."""
    files = library("safetensors.torch", "Saving masks", EXTRA)
    packed = {name: pack(mask).cpu().contiguous() for name, mask in masks.items()}
    shapes = json.dumps({name: list(mask.shape) for name, mask in masks.items()})
    files.save_file(packed, Path(folder) / MASKS, metadata={"format": "pt", "shapes": shapes})


def load_masks(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The bool masks that `save_masks` wrote into a folder; True is kept."""
    files = library("safetensors", "Reading masks", EXTRA)
    path = Path(folder) / MASKS
    if not path.is_file():
        raise StateError(
            f"There is no {MASKS} in {folder}: it was not saved by Secateur, or without its masks. To hold the zeros of"
            " its weights, load them and give the Pruner masks='zeros'."
        )
    try:
        with files.safe_open(path, framework="pt") as opened:
            shapes = json.loads((opened.metadata() or {})["shapes"])
            packed = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except (files.SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise StateError(f"{path} does not hold masks: {error!r}. Save the model again.") from error
    if not isinstance(shapes, dict) or not all(map(_is_shape, shapes.values())):
        raise StateError(f"{path} does not hold masks: its shapes are not lists of sizes. Save the model again.")
    wrong = [name for name in packed if name not in shapes or not can_unpack(packed[name], shapes[name])]
    if wrong or shapes.keys() != packed.keys():
        odd = sorted({*wrong, *(shapes.keys() ^ packed.keys())})
        raise StateError(f"{path} does not fit the shapes it names, at {', '.join(odd[:3])}. Save the model again.")
    return {name: unpack(packed[name], shape) for name, shape in shapes.items()}


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and bool(shape) and all(type(size) is int and size >= 0 for size in shape)


def check_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Refuse masks of parameters that the model does not have, or of other shapes."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, mask in masks.items():
        if name not in shapes:
            raise StateError(f"There is a mask for {name!r}, which is not a parameter of {type(model).__name__}.")
        if mask.dtype != torch.bool or mask.shape != shapes[name]:
            raise StateError(
                f"The mask of {name!r} is {mask.dtype} {list(mask.shape)}; it must be torch.bool {list(shapes[name])}."
            )
