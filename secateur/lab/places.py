"""Where data lies: folders and files that must be there, and what is said when they are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from secateur.errors import DataError


def existing_folder(path: str) -> Path:
    """This folder, "~" understood."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        found = "a file" if folder.exists() else "not there"
        raise DataError(f"{folder} is {found}; the folder that holds the data is needed.")
    return folder


def sole_folder(folder: Path, globs: Sequence[str]) -> Path | None:
    """The one folder, this or below it, with a file of one of these names; None where there is none."""
    found = sorted({path.parent for glob in globs for path in folder.rglob(glob) if path.is_file()})
    if len(found) > 1:
        names = ", ".join(map(str, found[:4]))
        raise DataError(f"{folder} holds {' or '.join(globs)} in {len(found)} folders: {names}. Name one of them.")
    return found[0] if found else None
