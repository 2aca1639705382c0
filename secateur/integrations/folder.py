"""A pruned model as a folder that transformers loads like any other, with its masks and reports beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import DataError, ModelError, StateError
from secateur.files import appearing
from secateur.optional import library
from secateur.selection.bits import pack, packed_bytes, unpack

EXTRA = '"secateur[hf]"'
MASKS = "masks.safetensors"
OTHERS = 16 << 20  # bytes to allow for tokenizer, settings and reports


def save(
    model: Any,
    tokenizer: Any,
    folder: str | Path,
    masks: Mapping[str, Tensor],
    report_texts: Mapping[str, str],
    *,
    overwrite: bool = False,
) -> Path:
    """Write model, tokenizer, masks (a bit a weight) and reports ({file name: text}); the folder appears when whole."""
    files = library("safetensors.torch", "Saving masks", EXTRA)
    folder = Path(folder).absolute()
    check_free(folder, overwrite)
    _check_masks(getattr(model, "_orig_mod", model), masks)
    with appearing(folder) as partial:
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        packed = {name: pack(mask).cpu().contiguous() for name, mask in masks.items()}
        shapes = json.dumps({name: list(mask.shape) for name, mask in masks.items()})
        files.save_file(packed, partial / MASKS, metadata={"format": "pt", "shapes": shapes})
        for name, text in report_texts.items():
            if Path(name).name != name or (partial / name).exists():
                raise ModelError(f"A report cannot be saved as {name!r}: that is a path, or a file of the model's own.")
            (partial / name).write_text(text, encoding="utf-8")
    return folder


def load_masks(folder: str | Path) -> dict[str, Tensor]:
    """The masks that `save` wrote, as bools: True is kept."""
    files = library("safetensors", "Reading masks", EXTRA)
    path = Path(folder) / MASKS
    if not path.is_file():
        raise StateError(f"There is no {MASKS} in {folder}: it was not saved by Secateur, or without its masks.")
    try:
        with files.safe_open(path, framework="pt") as opened:
            shapes = json.loads((opened.metadata() or {})["shapes"])
            packed = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except (files.SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise StateError(f"{path} does not hold masks: {error!r}. Save the model again.") from error
    if not isinstance(shapes, dict) or not all(map(_is_shape, shapes.values())):
        raise StateError(f"{path} does not hold masks: its shapes are no lists of sizes. Save the model again.")
    wrong = [name for name in packed if name not in shapes or not _fits(packed[name], shapes[name])]
    if wrong or shapes.keys() != packed.keys():
        odd = sorted({*wrong, *(shapes.keys() ^ packed.keys())})
        raise StateError(f"{path} does not fit the shapes it names, at {', '.join(odd[:3])}. Save the model again.")
    return {name: unpack(packed[name], shape) for name, shape in shapes.items()}


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and bool(shape) and all(type(size) is int and size >= 0 for size in shape)


def _fits(packed: Tensor, shape: Sequence[int]) -> bool:
    """Whether these are the bits of a mask of this shape."""
    rows = packed.ndim == 2 and packed.shape[0] == shape[0]
    return packed.dtype == torch.uint8 and rows and packed.numel() == packed_bytes(shape)


def saved_bytes(model: nn.Module) -> int:
    """About what `save` will write: the weights as they are, a mask of a bit a weight, a tokenizer and reports."""
    weights = [*model.parameters(), *model.buffers()]
    return sum(weight.nbytes + weight.numel() // 8 for weight in weights) + OTHERS


def check_free(
    folder: Path, overwrite: bool, what: str = "model", signs: Sequence[str] = ("config.json", "*model*")
) -> None:
    """Refuse what is no folder, what would be lost unasked, and what is not such a thing by the files all have."""
    error = ModelError if what == "model" else DataError
    if not folder.exists():
        return
    if not folder.is_dir():
        raise error(f"{folder} is a file; a {what} is saved as a folder.")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise error(f"{folder} is not empty. Name another folder, or say overwrite=True (--overwrite).")
    if not all(any(path.is_file() for path in folder.glob(sign)) for sign in signs):  # a home folder, say, or a run's
        raise error(f"{folder} holds something other than a {what} and is not overwritten. Name another folder.")


def _check_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, mask in masks.items():
        if name not in shapes:
            raise StateError(f"There is a mask for {name!r}, which is no parameter of {type(model).__name__}.")
        if mask.dtype != torch.bool or mask.shape != shapes[name]:
            raise StateError(
                f"The mask of {name!r} is {mask.dtype} {list(mask.shape)}; it must be torch.bool {list(shapes[name])}."
            )
