"""Text that every machine already has: the source and documentation of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from secateur.errors import SecateurError

VOCABULARY = 256  # a token is a byte
HELD_OUT = 12  # one file in so many


@dataclass(frozen=True)
class Corpus:
    """Training and held-out tokens, from different files."""

    train: Tensor
    held_out: Tensor
    files: tuple[int, int]


def standard_library() -> Corpus:
    """Every module of the running Python's standard library. Which files are held out depends on their names alone."""
    root = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
    files = sorted(path for path in root.rglob("*.py") if not outside & set(path.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in files:
        apart = zlib.crc32(path.relative_to(root).as_posix().encode()) % HELD_OUT == 0
        parts[apart].append(path.read_bytes())
    if not all(parts):
        raise SecateurError(f"Found only {len(files)} modules of the standard library in {root}; the demo reads those.")
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return Corpus(train, held_out, (len(parts[0]), len(parts[1])))
