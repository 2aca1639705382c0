"""MNIST and Fashion-MNIST as they are published: four idx files, compressed or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from secateur.errors import DataError
from secateur.lab.images import Images, make_images
from secateur.lab.places import existing_folder, sole_folder

GZIP = b"\x1f\x8b"
BYTES = 8  # the type code of unsigned bytes in an idx file


def mnist(path: str, name: str) -> Images:
    """The idx files in the folder or below it."""
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
    return found[0]  # of a file and its compressed self, the file


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The bytes of an idx file with so many dimensions."""
    raw = path.read_bytes()
    if raw.startswith(GZIP):
        try:
            raw = gzip.decompress(raw)
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path} is truncated or damaged: {error}. Fetch it again.") from error
    magic, header = bytes((0, 0, BYTES, dimensions)), 4 + 4 * dimensions
    if raw[:4] != magic:
        raise DataError(f"{path} begins with {raw[:4].hex() or 'nothing'}; idx files of this kind with {magic.hex()}.")
    if len(raw) < header:
        raise DataError(f"{path} is truncated within its header. Fetch it again.")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    if not math.prod(shape) or math.prod(shape) != len(raw) - header:
        asked = " x ".join(f"{size:,}" for size in shape)
        raise DataError(f"{path} has {len(raw) - header:,} bytes after its header, which says {asked}. Fetch it again.")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).view(shape)
