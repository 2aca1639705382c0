"""Files and folders that appear whole or not at all, one writer at a time, in places checked before the work begins.

Whatever is being written has a temporary name, `.NAME.` and eight hex digits. A killed process leaves it behind; the
next one that writes NAME removes it, and puts back a folder that was moved aside to make room.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout  # torch itself needs filelock, so it is there

from secateur.errors import DataError, SaveError, SecateurError

STALE = 3600  # seconds after which a text file that is still being written never will be
PAGE = 4 << 20  # bytes to allow for a page, a table or a record


def write(path: Path, text: str) -> None:
    """Write a text file under a temporary name, flush it to the disk, then rename it: nobody sees half of it."""
    clear(path, older=STALE)
    temporary = path.with_name(f"{_hidden(path)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise SaveError(f"{path} cannot be written ({_reason(error)}). What was there before is untouched.") from error
    finally:
        temporary.unlink(missing_ok=True)  # there only when something failed


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to write into under a temporary name. It takes its own name once all of it is on the disk; if anything
    fails before, it is removed, and what stood there is as it was."""
    folder = Path(os.path.realpath(folder))  # the folder itself, not a link to it, is what is replaced
    with claimed(folder):
        partial = folder.with_name(_hidden(folder))
        try:
            partial.mkdir()
            yield partial
            for path in [*partial.rglob("*"), partial]:
                _sync(path)
            _put_in_place(partial, folder)
        except Exception as error:
            if not isinstance(error, OSError | SaveError) and type(error).__name__ != "SafetensorError":
                raise
            left = "is as it was" if folder.exists() else "was not made"
            raise SaveError(f"{folder} could not be written ({_reason(error)}) and {left}.") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # there only when something failed


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Inside, no other process writes this file or folder; what killed ones left of it is cleared away first."""
    path = Path(os.path.realpath(path))
    _check_writable(path.parent)
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    busy = f"Another process is writing {path}. Wait for it to end, or name another place."
    try:
        with locked(path.with_name(f".{path.name}.lock"), busy):
            clear(path)
            yield
    finally:
        for folder in missing:  # made for nothing when the work failed
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def locked(file: Path, busy: str) -> Iterator[None]:
    """Hold a lock, or raise with this message where another process does. The system releases it when a process ends,
    however it does. A process may take the same lock again inside."""
    lock = FileLock(file, is_singleton=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise SecateurError(busy) from None
    except OSError as error:
        raise SaveError(f"{file.parent} cannot be written ({_reason(error)}). Name another place.") from error
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            with suppress(OSError):  # Windows removes no open file; filelock does it there afterwards
                file.unlink()  # while it is held: whoever opened it in between finds it gone and is refused
        lock.release()


def clear(path: Path, older: float = 0.0) -> None:
    """Remove what killed processes left of a file or folder, and put back a folder they had moved aside. To be called
    by whoever holds the lock; without one, only for what is `older` than any write takes."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}(\.old|\.tmp)?")
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with suppress(OSError):
            if not ours.fullmatch(left.name) or left.stat().st_mtime > time.time() - older:
                continue
            if left.suffix == ".old" and not path.exists():
                left.rename(path)
            elif left.is_dir() and not older:
                shutil.rmtree(left, ignore_errors=True)
            elif left.is_file():
                left.unlink()


def check_folder(folder: Path, needed: int = 0, *, replaced: bool = True) -> None:
    """Refuse a place in which no folder can be made, or that has too little room, before anything long begins. A folder
    that is `replaced` as a whole is made beside the old one; otherwise files are put into it."""
    folder = Path(os.path.realpath(folder))
    if folder.exists() and not folder.is_dir():
        raise SaveError(f"{folder} is a file; a folder is needed. Name another with --out.")
    if replaced and os.path.ismount(folder):
        raise SaveError(f"{folder} is a mount point and cannot be replaced. Name a folder inside it with --out.")
    _check_writable(folder.parent if replaced else folder)
    check_room(folder, needed)


def check_file(path: Path, needed: int = PAGE) -> None:
    """Refuse a place in which this file cannot be made, or that has too little room, before anything long begins."""
    if not path.resolve().parent.is_dir():
        raise SaveError(f"There is no folder {path.resolve().parent} to write {path.name} into.")
    if path.exists() and not path.is_file():
        raise SaveError(f"{path} is no file and cannot be written as one. Name a file.")
    _check_writable(path.parent)
    check_room(path, needed)


def check_room(path: Path, needed: int) -> None:
    """Refuse a disk that has less than so many bytes left."""
    free = shutil.disk_usage(_standing(path)).free
    if free < needed:
        raise SaveError(
            f"{path} needs about {needed / 1e6:,.0f} MB, and the disk has {free / 1e6:,.0f} MB left. Free some space,"
            " or name another place with --out."
        )


def read_json(path: Path, kind: type, error: type[SecateurError] = DataError, advice: str = "Write it again.") -> Any:
    """What a JSON file holds, which must be of this type; otherwise an error that names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"There is no {path.name} in {path.parent}. {advice}") from None
    except OSError as problem:
        raise error(f"{path} cannot be read ({_reason(problem)}). {advice}") from problem
    except (ValueError, RecursionError) as problem:  # no JSON, no text, or nested without end
        raise error(f"{path} cannot be read as JSON: {problem}. {advice}") from problem
    if not isinstance(found, kind):
        raise error(f"{path} holds a {type(found).__name__}; a {kind.__name__} is needed. {advice}")
    return found


def _hidden(path: Path) -> str:
    return f".{path.name}.{uuid.uuid4().hex[:8]}"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _standing(path: Path) -> Path:
    """The nearest folder above a place that is there."""
    return next(folder for folder in (path.resolve(), *path.resolve().parents) if folder.is_dir())


def _check_writable(folder: Path) -> None:
    """Refuse a folder, there or yet to be made, in which nothing can be written."""
    folder = folder.resolve()
    try:
        tempfile.TemporaryFile(dir=next(one for one in (folder, *folder.parents) if one.exists())).close()
    except OSError as error:
        raise SaveError(f"Nothing can be written in {folder} ({_reason(error)}). Name another place.") from error


def _sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk. Not all systems can for folders."""
    handle = None
    with suppress(PermissionError, IsADirectoryError):
        handle = os.open(path, os.O_RDONLY)
    if handle is None:
        return
    try:
        os.fsync(handle)
    except OSError:
        if path.is_file():
            raise
    finally:
        os.close(handle)


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename, with what stood there moved aside first and back again should that fail."""
    if folder.exists():
        aside = partial.with_name(partial.name + ".old")
        folder.rename(aside)
        try:
            partial.rename(folder)
        except OSError:
            aside.rename(folder)
            raise
        shutil.rmtree(aside, ignore_errors=True)  # what cannot be removed now is at the next write
    else:
        partial.rename(folder)
    _sync(folder.parent)


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
