"""Files that are damaged in every way we could think of, disks that are full, and files that would run code."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

MISSING, FOLDER = "missing", "a folder"


def damages(path: Path) -> dict[str, bytes]:
    """What may stand in a file's place, by what was done to it. For `MISSING` and `FOLDER` the content says nothing."""
    whole = path.read_bytes()
    found = {MISSING: b"", FOLDER: b"", "empty": b"", "half": whole[: len(whole) // 2]}
    found["random bytes"] = random.Random(0).randbytes(max(64, len(whole)))
    if path.suffix == ".jsonl":
        found |= {"numbers": b"1\n2\n" * 20, "lists": b"[]\n" * 40, "no step": b'{"step": "a"}\n' * 40}
    if path.suffix == ".json":
        found |= {"null": b"null", "nested": b"[" * 100_000, "another type": b"[1]", "no keys": b"{}"}
        plain = json.loads(whole)
        if isinstance(plain, dict):
            numbers = {key for key, value in plain.items() if isinstance(value, int | float)}
            others: dict[str, Any] = {
                "texts": "1",
                "huge": 10**400,
                "not a number": float("nan"),
                "negative": -1,
            }
            for name, value in others.items():
                changed = {key: value if key in numbers else old for key, old in plain.items()}
                found[name] = json.dumps(changed).encode()
    return found


def damage(path: Path, how: str, content: bytes) -> None:
    """Do it."""
    path.unlink()
    if how == FOLDER:
        path.mkdir()
    elif how != MISSING:
        path.write_bytes(content)


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The one line that a refusal is; progress may stand before it."""
    shown = capsys.readouterr()
    said = [line for line in shown.err.splitlines() if line.startswith("secateur: ")]
    assert (code, len(said)) == (2, 1), shown.err
    assert shown.err.endswith(f"{said[0]}\n")
    assert "Traceback" not in shown.err
    assert "finished" not in shown.err
    return said[0]


class Hostile:
    """Pickled, it makes a file where it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


def hostile_pickle(target: Path) -> bytes:
    """A pickle that makes this folder when it is read."""
    return pickle.dumps(Hostile(target))


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes; where this machine lets us mount none, the test is skipped."""
    folder.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if mount is None or subprocess.run([mount, *options], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
