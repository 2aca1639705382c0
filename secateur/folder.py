"""A pruned model as a folder that transformers loads like any other, with its masks and reports beside the weights."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.bits import pack, packed_bytes, unpack
from secateur.errors import DataError, ModelError, StateError
from secateur.optional import library

EXTRA = '"secateur[hf]"'
MASKS = "masks.safetensors"


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
    except (files.SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise StateError(f"{path} does not hold masks: {error!r}. Save the model again.") from error
    wrong = [name for name in packed if name not in shapes or packed[name].numel() != packed_bytes(shapes[name])]
    if wrong or shapes.keys() != packed.keys():
        odd = sorted({*wrong, *(shapes.keys() ^ packed.keys())})
        raise StateError(f"{path} does not fit the shapes it names, at {', '.join(odd[:3])}. Save the model again.")
    return {name: unpack(packed[name], shape) for name, shape in shapes.items()}


def check_free(folder: Path, overwrite: bool, what: str = "model", sign: str = "config.json") -> None:
    """Refuse what is no folder, what would be lost unasked, and what was never such a thing, by a file all have."""
    error = ModelError if what == "model" else DataError
    if not folder.exists():
        return
    if not folder.is_dir():
        raise error(f"{folder} is a file; a {what} is saved as a folder.")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise error(f"{folder} is not empty. Name another folder, or say overwrite=True (--overwrite).")
    if not (folder / sign).is_file():  # a home folder, say
        raise error(f"{folder} holds something other than a {what} and is not overwritten. Name another folder.")


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to write into under another name; it takes its own when whole, and goes when something fails."""
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    partial.mkdir(parents=True)
    try:
        yield partial
        _put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # there only when something failed


def _check_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, mask in masks.items():
        if name not in shapes:
            raise StateError(f"There is a mask for {name!r}, which is no parameter of {type(model).__name__}.")
        if mask.dtype != torch.bool or mask.shape != shapes[name]:
            raise StateError(
                f"The mask of {name!r} is {mask.dtype} {list(mask.shape)}; it must be torch.bool {list(shapes[name])}."
            )


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename, with what stood there moved aside first and back again should that fail."""
    if not folder.exists():
        partial.rename(folder)
        return
    aside = partial.with_name(partial.name + ".old")
    folder.rename(aside)
    try:
        partial.rename(folder)
    except OSError:
        aside.rename(folder)
        raise
    shutil.rmtree(aside)
