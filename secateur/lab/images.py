"""Image datasets: batches that depend only on step and seed, and readers of digits, MNIST and CIFAR files."""

from __future__ import annotations

import gzip
import hashlib
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.errors import LAB_EXTRA, DataError, library
from secateur.files import existing_folder, read_json, sole_folder

SLICES, SLICE = 64, 1 << 16  # a fingerprint reads this many slices of a tensor, each of this many elements
PADDING = 4  # pixels added on every side before a random crop, as is usual for CIFAR
DIGITS_HELD_OUT = 360  # the last fifth of the digits, mostly by other writers
GZIP = b"\x1f\x8b"
BYTES = 8  # the type code of unsigned bytes in an idx file
SIDE, CHANNELS = 32, 3  # of CIFAR's images
PIXELS = CHANNELS * SIDE * SIDE
BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
FILES = {10: (BATCHES, "test_batch", "labels"), 100: (("train",), "test", "fine_labels")}  # training, test, label key
ARCHIVED = ("x_train", "y_train", "x_test", "y_test")
ARRAYS = {  # every name in a pickled numpy array, before numpy 2 and since
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}
Labelled = tuple[Tensor, Tensor]  # images and their classes


def generator(*words: int | str) -> torch.Generator:
    """A generator seeded by a hash of these words: a resumed run draws what it would have drawn, in any process."""
    digest = hashlib.sha256(repr(words).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def fingerprint_of(*tensors: Tensor) -> str:
    """A hash of shapes, dtypes and evenly spaced slices, which is quick for gigabytes too."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.reshape(-1)
        digest.update(repr((tensor.shape, tensor.dtype)).encode())
        starts = torch.linspace(0, max(0, flat.numel() - SLICE), SLICES).long().unique().tolist()
        for start in starts:
            digest.update(flat[start : start + SLICE].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Images:
    """Training and held-out images, uint8 [N, C, H, W], and their classes, int64; mean and std are per channel."""

    inputs: Tensor
    targets: Tensor
    held_inputs: Tensor
    held_targets: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    augment: bool = False

    def batch(self, step: int, size: int, seed: int, device: torch.device | str = "cpu") -> Labelled:
        """Normalised images and their classes on `device`; a function of the arguments alone.

        Batches run through epochs without a gap; each epoch has every example once, in its own order. Images travel to
        the device as bytes.
        """
        places = torch.arange(step * size, (step + 1) * size)
        epochs = places // len(self.inputs)
        chosen = torch.empty_like(places)
        for epoch in epochs.unique().tolist():
            mine = epochs == epoch
            chosen[mine] = order(len(self.inputs), seed, epoch)[places[mine] % len(self.inputs)]
        inputs = self.inputs[chosen].to(device)
        if self.augment:
            inputs = moved(inputs, generator("augment", seed, step))
        return self.normalised(inputs), self.targets[chosen].to(device)

    def evaluation(self, size: int) -> Iterator[Labelled]:
        """Every held-out image once, in order, without augmentation."""
        for inputs, targets in zip(self.held_inputs.split(size), self.held_targets.split(size), strict=True):
            yield self.normalised(inputs), targets

    def fingerprint(self) -> str:
        """A hash that tells this data from other data of the same name."""
        return fingerprint_of(self.inputs, self.targets, self.held_inputs, self.held_targets)

    def normalised(self, inputs: Tensor) -> Tensor:
        """float32, scaled so that each channel of the training images has mean 0 and standard deviation 1."""
        mean, std = (torch.tensor(one, device=inputs.device)[:, None, None] for one in (self.mean, self.std))
        return (inputs.float() - mean) / std


@lru_cache(maxsize=2)  # a batch may span two epochs
def order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of the examples in an epoch."""
    return torch.randperm(count, generator=generator("epoch", seed, epoch))


def moved(inputs: Tensor, draw: torch.Generator) -> Tensor:
    """Pad each image, crop it at a random place, and flip half of them. Random numbers come from the CPU, so that they
    are the same on every device."""
    count, channels, height, width = inputs.shape
    down, right = torch.randint(0, 2 * PADDING + 1, (2, count, 1), generator=draw)
    mirrored = torch.rand(count, 1, generator=draw) < 0.5
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    which, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
    places = (which, channel, rows[:, None, :, None], columns[:, None, None, :])
    return torch.nn.functional.pad(inputs, (PADDING,) * 4)[tuple(place.to(inputs.device) for place in places)]


def make_images(train: Labelled, held_out: Labelled, classes: int, name: str, *, augment: bool = False) -> Images:
    """Check the images and labels, and add mean and standard deviation of the training pixels."""
    for which, (inputs, targets) in (("training", train), ("held-out", held_out)):
        if not len(inputs) or len(inputs) != len(targets):
            raise DataError(f"{name} has {len(inputs):,} {which} images and {len(targets):,} labels. Fetch it again.")
        if int(targets.min()) < 0 or int(targets.max()) >= classes:
            found = f"{int(targets.min())} to {int(targets.max())}"
            raise DataError(
                f"{name} has {which} labels from {found}; they should be below {classes}. Is it another dataset?"
            )
    if train[0].shape[1:] != held_out[0].shape[1:]:
        shapes = " and ".join(str(list(inputs.shape[1:])) for inputs in (train[0], held_out[0]))
        raise DataError(f"{name} has training and held-out images of different shapes: {shapes}. Fetch it again.")
    figures = [_mean_and_std(train[0][:, channel]) for channel in range(train[0].shape[1])]
    mean, std = (tuple(figure) for figure in zip(*figures, strict=True))
    return Images(*train, *held_out, classes, mean, std, name, augment)


def _mean_and_std(pixels: Tensor) -> tuple[float, float]:
    """From a histogram, which needs no float copy of the images."""
    counts = torch.bincount(pixels.flatten(), minlength=256).double()
    values = torch.arange(256).double()
    mean = (counts * values).sum() / counts.sum()
    std = ((counts * (values - mean).square()).sum() / counts.sum()).sqrt()
    return float(mean), float(std) or 1.0  # a constant channel is not scaled


def digits(name: str) -> Images:
    """The 8x8 handwritten digits that come with scikit-learn."""
    datasets = library("sklearn.datasets", f"Reading {name}", LAB_EXTRA)
    found = datasets.load_digits()
    inputs = torch.from_numpy(found.images).to(torch.uint8)[:, None]
    targets = torch.from_numpy(found.target).long()
    first = len(inputs) - DIGITS_HELD_OUT
    return make_images((inputs[:first], targets[:first]), (inputs[first:], targets[first:]), 10, name)


def mnist(path: str, name: str) -> Images:
    """MNIST or a dataset in its format: the idx files in the folder or below it."""
    folder = existing_folder(path)
    place = sole_folder(folder, ["train-images*idx3-ubyte*"])
    if place is None:
        raise DataError(f"There is no train-images-idx3-ubyte or train-images-idx3-ubyte.gz in {folder} or below it.")
    parts = [
        (
            read_idx(_file(place, f"{part}-images*idx3-ubyte*"), 3),
            read_idx(_file(place, f"{part}-labels*idx1-ubyte*"), 1),
        )
        for part in ("train", "t10k")
    ]
    train, held_out = ((images[:, None], labels.long()) for images, labels in parts)
    return make_images(train, held_out, 10, name)


def _file(folder: Path, glob: str) -> Path:
    found = sorted(path for path in folder.glob(glob) if path.is_file())
    if not found:
        raise DataError(f"There is no {glob.replace('*', '-', 1).rstrip('*')}[.gz] in {folder}. Fetch the data again.")
    return found[0]  # the uncompressed one, if both are there


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The bytes of an idx file, compressed or not, with this number of dimensions."""
    raw = path.read_bytes()
    if raw.startswith(GZIP):
        try:
            raw = gzip.decompress(raw)
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path} is truncated or damaged: {error}. Fetch it again.") from error
    magic, header = bytes((0, 0, BYTES, dimensions)), 4 + 4 * dimensions
    if raw[:4] != magic:
        raise DataError(
            f"{path} starts with {raw[:4].hex() or 'nothing'}; an idx file of this kind with {magic.hex()}."
            " Fetch it again."
        )
    if len(raw) < header:
        raise DataError(f"{path} is truncated within its header. Fetch it again.")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    if not math.prod(shape) or math.prod(shape) != len(raw) - header:
        asked = " x ".join(f"{size:,}" for size in shape)
        raise DataError(f"{path} has {len(raw) - header:,} bytes after its header, which says {asked}. Fetch it again.")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).view(shape)


def cifar(path: str, name: str, classes: int) -> Images:
    """CIFAR from python batches, PNG batches or an .npz, in the folder or below it; with random crops and flips."""
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
    """PNG batches, with labels in train_labels.json and test_labels.json; one package spells it "lables"."""
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
        raise DataError(f"{path} must be a list of whole numbers. Fetch the data again.")
    return torch.tensor(labels, dtype=torch.int64)


def _parts(
    place: Path | None, training: tuple[str, ...], test: str, suffix: str, read: Callable[[Path], Labelled]
) -> tuple[Labelled, Labelled] | None:
    """The training batches, concatenated, and the test batch."""
    if place is None:
        return None
    missing = [name + suffix for name in (*training, test) if not (place / (name + suffix)).is_file()]
    if missing:
        raise DataError(f"{place} holds {training[0]}{suffix}, but not {', '.join(missing)}. Fetch the data again.")
    batches = [read(place / (name + suffix)) for name in training]
    inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    return (inputs, targets), read(place / (test + suffix))


class _ArraysOnly(pickle.Unpickler):
    """Loads numpy arrays and refuses every other class or function, since a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ARRAYS:
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):  # how protocol 2 writes bytes
            return _latin
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of an array")


def _latin(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it names the encoding {encoding}")
    return text.encode("latin1")


def read_batch(path: Path, key: str) -> Labelled:
    """The images and labels of one pickled batch."""
    numpy = library("numpy", f"Reading {path.name}", LAB_EXTRA)
    try:
        with path.open("rb") as file:
            found = _ArraysOnly(file, encoding="bytes").load()
        found = {name.decode() if isinstance(name, bytes) else name: value for name, value in found.items()}
        data, labels = found["data"], torch.tensor(found[key], dtype=torch.int64)
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path} is not a CIFAR batch with {key!r}: {error!r}. Fetch it again.") from error
    return _images(numpy, data, path), labels


def _archive(folder: Path, classes: int) -> tuple[Labelled, Labelled] | None:
    found = sorted(folder.rglob("*.npz"))
    if not found:
        return None
    if len(found) > 1:
        raise DataError(f"{folder} holds {len(found)} .npz files: {', '.join(map(str, found[:4]))}. Keep one of them.")
    numpy = library("numpy", f"Reading {found[0].name}", LAB_EXTRA)
    try:
        with found[0].open("rb") as file, numpy.load(file, allow_pickle=False) as opened:
            train, train_labels, test, test_labels = (opened[name] for name in ARCHIVED)
    except (KeyError, OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{found[0]} is not an archive of {', '.join(ARCHIVED)}: {error}. Fetch it again.") from error
    return tuple(  # type: ignore[return-value]
        (_images(numpy, inputs, found[0]), torch.from_numpy(labels.reshape(-1).astype("int64")))
        for inputs, labels in ((train, train_labels), (test, test_labels))
    )


def _images(numpy: Any, data: Any, path: Path) -> Tensor:
    """uint8 [N, 3, 32, 32] from an array in any of the usual layouts."""
    if not isinstance(data, numpy.ndarray) or data.dtype != numpy.uint8:
        raise DataError(f"{path} holds images as {getattr(data, 'dtype', type(data).__name__)}; uint8 is needed.")
    shape = tuple(data.shape[1:])
    if shape not in ((PIXELS,), (CHANNELS, SIDE, SIDE), (SIDE, SIDE, CHANNELS)):
        raise DataError(f"{path} holds images of shape {list(shape)}; CIFAR's have {CHANNELS} x {SIDE} x {SIDE}.")
    pixels = torch.from_numpy(data.copy())  # an array from a pickle may be read-only
    return pixels.permute(0, 3, 1, 2).contiguous() if shape[-1] == CHANNELS else pixels.view(-1, CHANNELS, SIDE, SIDE)


def read_picture(path: Path) -> Tensor:
    """A PNG with one image in each row of pixels, channels last."""
    pillow = library("PIL.Image", f"Reading {path.name}", LAB_EXTRA)
    try:
        with pillow.open(path) as picture:
            mode, (width, height), raw = picture.mode, picture.size, bytearray(picture.tobytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} is truncated or not a PNG: {error}. Fetch it again.") from error
    if mode != "RGB" or width != SIDE * SIDE:
        raise DataError(f"{path} is {mode}, {width} wide; a batch is RGB, {SIDE * SIDE} wide, one image per row.")
    pixels = torch.frombuffer(raw, dtype=torch.uint8).view(height, SIDE, SIDE, CHANNELS)
    return pixels.permute(0, 3, 1, 2).contiguous()
