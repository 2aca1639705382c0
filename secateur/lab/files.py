"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from secateur.errors import SecateurError


def check_place(path: Path) -> None:
    """Refuse a file whose folder is not there, before anything long begins."""
    if not path.resolve().parent.is_dir():
        raise SecateurError(f"There is no folder {path.resolve().parent} to write {path.name} into.")


def write(path: Path, text: str) -> None:
    """Write under a temporary name, then rename: a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
