"""CIFAR-10 and CIFAR-100: the published pickles (arrays alone are let in), an .npz archive, or PNG batches."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.errors import DataError
from secateur.files import read_json
from secateur.lab.images import Images, Labelled, make_images
from secateur.lab.places import existing_folder, sole_folder
from secateur.optional import library

SIDE, CHANNELS = 32, 3
PIXELS = CHANNELS * SIDE * SIDE
BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
FILES = {10: (BATCHES, "test_batch", "labels"), 100: (("train",), "test", "fine_labels")}  # training, test, key
ARCHIVED = ("x_train", "y_train", "x_test", "y_test")
ARRAYS = {  # all that a pickled numpy array names, before numpy 2 and since
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}
EXTRA = "'secateur[lab]'"


def cifar(path: str, name: str, classes: int) -> Images:
    """The data in the folder or below it, in whichever form it is there; crops and mirrors are on."""
    folder = existing_folder(path)
    for read in (_pickles, _pictures, _archive):
        parts = read(folder, classes)
        if parts:
            return make_images(*parts, classes, name, augment=True)
    _, test, _ = FILES[classes]
    forms = f"the python batches ({test} and others), an .npz with {', '.join(ARCHIVED)}, or PNG batches ({test}.png)"
    raise DataError(f"{folder} holds no CIFAR-{classes}. Known are {forms}; unpack a .tar.gz first.")


def _pickles(folder: Path, classes: int) -> tuple[Labelled, Labelled] | None:
    training, test, key = FILES[classes]
    return _parts(sole_folder(folder, [training[0]]), training, test, "", lambda path: read_batch(path, key))


def _pictures(folder: Path, classes: int) -> tuple[Labelled, Labelled] | None:
    """Labels lie in train_labels.json and test_labels.json, which one package spells "lables"."""
    training, test, _ = FILES[classes]
    place = sole_folder(folder, [f"{training[0]}.png"])
    parts = _parts(place, training, test, ".png", lambda path: (read_picture(path), torch.empty(0)))
    if place is None or parts is None:
        return None
    train, held_out = (
        (inputs, _json_labels(place, part)) for part, (inputs, _) in zip(("train", "test"), parts, strict=True)
    )
    return train, held_out


def _json_labels(folder: Path, part: str) -> Tensor:
    path = next(iter(sorted(folder.glob(f"{part}_la*.json"))), folder / f"{part}_labels.json")
    labels = read_json(path, list)
    if not all(type(label) is int for label in labels):
        raise DataError(f"{path} holds something other than whole numbers. Fetch the data again.")
    return torch.tensor(labels, dtype=torch.int64)


def _parts(
    place: Path | None, training: tuple[str, ...], test: str, suffix: str, read: Callable[[Path], Labelled]
) -> tuple[Labelled, Labelled] | None:
    """The training batches one after another, and the test batch."""
    if place is None:
        return None
    missing = [name + suffix for name in (*training, test) if not (place / (name + suffix)).is_file()]
    if missing:
        raise DataError(f"{place} holds {training[0]}{suffix}, but not {', '.join(missing)}. Fetch the data again.")
    batches = [read(place / (name + suffix)) for name in training]
    inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    return (inputs, targets), read(place / (test + suffix))


class _ArraysOnly(pickle.Unpickler):
    """Refuses every class and function that an array is not made of: a pickle can run anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ARRAYS:
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):  # how protocol 2 writes bytes
            return _latin
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of an array")


def _latin(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
    return text.encode("latin1")


def read_batch(path: Path, key: str) -> Labelled:
    """The images and labels of one pickled batch."""
    numpy = library("numpy", f"Reading {path.name}", EXTRA)
    try:
        with path.open("rb") as file:
            found = _ArraysOnly(file, encoding="bytes").load()
        found = {name.decode() if isinstance(name, bytes) else name: value for name, value in found.items()}
        data, labels = found["data"], torch.tensor(found[key], dtype=torch.int64)
    except Exception as error:  # a damaged pickle fails in any way there is
        raise DataError(f"{path} is not a batch of CIFAR with {key!r}: {error!r}. Fetch it again.") from error
    return _images(numpy, data, path), labels


def _archive(folder: Path, classes: int) -> tuple[Labelled, Labelled] | None:
    found = sorted(folder.rglob("*.npz"))
    if not found:
        return None
    if len(found) > 1:
        raise DataError(f"{folder} holds {len(found)} .npz files: {', '.join(map(str, found[:4]))}. Name one's folder.")
    numpy = library("numpy", f"Reading {found[0].name}", EXTRA)
    try:
        with found[0].open("rb") as file, numpy.load(file, allow_pickle=False) as opened:
            train, train_labels, test, test_labels = (opened[name] for name in ARCHIVED)
    except (KeyError, OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{found[0]} has no {', '.join(ARCHIVED)} to read: {error}.") from error
    return tuple(  # type: ignore[return-value]
        (_images(numpy, inputs, found[0]), torch.from_numpy(labels.reshape(-1).astype("int64")))
        for inputs, labels in ((train, train_labels), (test, test_labels))
    )


def _images(numpy: Any, data: Any, path: Path) -> Tensor:
    """uint8 [N, 3, 32, 32] from an array in any of the shapes that are in use."""
    if not isinstance(data, numpy.ndarray) or data.dtype != numpy.uint8:
        raise DataError(f"{path} holds images as {getattr(data, 'dtype', type(data).__name__)}; uint8 is needed.")
    shape = tuple(data.shape[1:])
    if shape not in ((PIXELS,), (CHANNELS, SIDE, SIDE), (SIDE, SIDE, CHANNELS)):
        raise DataError(f"{path} holds images of shape {list(shape)}; CIFAR's have {CHANNELS} x {SIDE} x {SIDE}.")
    pixels = torch.from_numpy(data.copy())  # of its own, as what a pickle gives may be read-only
    return pixels.permute(0, 3, 1, 2).contiguous() if shape[-1] == CHANNELS else pixels.view(-1, CHANNELS, SIDE, SIDE)


def read_picture(path: Path) -> Tensor:
    """A PNG with one image a row of pixels, channels last."""
    pillow = library("PIL.Image", f"Reading {path.name}", EXTRA)
    try:
        with pillow.open(path) as picture:
            mode, (width, height), raw = picture.mode, picture.size, bytearray(picture.tobytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} is truncated or no PNG: {error}. Fetch it again.") from error
    if mode != "RGB" or width != SIDE * SIDE:
        raise DataError(f"{path} is {mode}, {width} wide; batches are RGB, {SIDE * SIDE} wide, one image a row.")
    pixels = torch.frombuffer(raw, dtype=torch.uint8).view(height, SIDE, SIDE, CHANNELS)
    return pixels.permute(0, 3, 1, 2).contiguous()
