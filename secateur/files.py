"""Atomic writes: files and folders appear whole or not at all, with one writer at a time and checks before long work.

Anything being written has a temporary name, `.NAME.` and eight hex digits. A killed process leaves it behind; the next
one that writes NAME removes it, and restores a folder that was moved aside to be replaced.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout  # torch itself needs filelock, so it is there

from secateur.errors import DataError, SaveError, SecateurError

Place = str | os.PathLike[str]

STALE = 3600  # seconds after which an unfinished temporary text file counts as abandoned
PAGE = 4 << 20  # bytes to allow for a page, a table or a record
FLUSHING = os.O_RDWR if sys.platform == "win32" else os.O_RDONLY  # Windows flushes only what is open for writing


# A path may hold bytes that are no UTF-8 text. Reports name paths, and are written all the same.
ESCAPED = "backslashreplace"


def write(path: Place, text: str) -> None:
    """Write a text file atomically: under a temporary name, flushed to disk, then renamed."""
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8", errors=ESCAPED) as file:
        file.write(text)


@contextmanager
def replacing(path: Place) -> Iterator[Path]:
    """A temporary path to write a file to, renamed to `path` once it is on disk. If anything fails before, it is
    removed, and what was there before is unchanged."""
    path = Path(path)
    clear(path, older=STALE)
    temporary = path.with_name(f"{_hidden(path)}.tmp")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        raise SaveError(f"{path} cannot be written ({_reason(error)}). What was there before is untouched.") from error
    finally:
        temporary.unlink(missing_ok=True)  # exists only if something failed


@contextmanager
def appearing(folder: Place) -> Iterator[Path]:
    """A temporary folder to write into, renamed to `folder` once all of it is on disk. If anything fails before, it is
    removed, and what was there before is unchanged."""
    folder = Path(os.path.realpath(folder))  # replace the folder itself, not a link to it
    with claimed(folder):
        partial = folder.with_name(_hidden(folder))
        try:
            partial.mkdir()
            yield partial
            _put_in_place(partial, folder)
        except Exception as error:
            if not isinstance(error, OSError | SaveError) and type(error).__name__ != "SafetensorError":
                raise
            left = "is as it was" if folder.exists() else "was not made"
            raise SaveError(f"{folder} could not be written ({_reason(error)}) and {left}.") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # exists only if something failed


@contextmanager
def resuming(folder: Place) -> Iterator[Path]:
    """As `appearing`, but the temporary folder is `.NAME.unfinished`, and a failure or a kill leaves it as it is: the
    next call gets it again, with what is in it."""
    folder = Path(os.path.realpath(folder))
    with claimed(folder):
        partial = folder.with_name(f".{folder.name}.unfinished")
        try:
            partial.mkdir(exist_ok=True)
            yield partial
            _put_in_place(partial, folder)
        except (OSError, SaveError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            raise SaveError(
                f"{folder} could not be written ({_reason(cause)}). What is done so far is in {partial}; the same"
                " command continues from there."
            ) from error
        finally:
            with suppress(OSError):
                partial.rmdir()  # if nothing was written


@contextmanager
def claimed(path: Place) -> Iterator[None]:
    """Lock this file or folder against other writers, and remove what killed processes left of it."""
    path = _real(path)
    if not path.name:
        raise SaveError(f"{path} cannot be replaced. Name a file or folder inside it with --out.")
    _check_writable(path.parent)
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    busy = f"Another process is writing {path}. Wait for it to end, or name another path."
    try:
        with locked(path.with_name(f".{path.name}.lock"), busy):
            clear(path)
            yield
    finally:
        for folder in missing:  # still empty if the work failed
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def locked(file: Place, busy: str) -> Iterator[None]:
    """Hold a lock, or raise with the message `busy` if another process has it. The system releases it when a process
    ends, even if killed. The same process may take it again inside."""
    file = Path(file)
    lock = FileLock(file, is_singleton=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise SecateurError(busy) from None
    except OSError as error:
        raise SaveError(f"{file.parent} cannot be written ({_reason(error)}). Name another path.") from error
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            with suppress(OSError):  # Windows cannot remove an open file; there filelock does it afterwards
                file.unlink()  # while locked, so that no waiting process can lock the removed file
        lock.release()


def clear(path: Place, older: float = 0.0) -> None:
    """Remove what killed processes left of a file or folder, and restore a folder they had moved aside.

    Call it with the lock held; without a lock, only for leftovers `older` (in seconds) than any write takes."""
    path = Path(path)
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


def check_folder(folder: Place, needed: int = 0, *, replaced: bool = True) -> None:
    """Check before long work that a folder can be written and the disk has `needed` bytes. A folder that is `replaced`
    as a whole is written beside the old one; otherwise files go into it."""
    folder = _real(folder)
    if folder.exists() and not folder.is_dir():
        raise SaveError(f"{folder} is a file; a folder is needed. Name another with --out.")
    if replaced and os.path.ismount(folder):
        raise SaveError(f"{folder} is a mount point and cannot be replaced. Name a folder inside it with --out.")
    _check_writable(folder.parent if replaced else folder)
    check_room(folder, needed)


def check_file(path: Place) -> None:
    """Check before long work that a file can be written and the disk has room for a page."""
    path = Path(path)
    if not (folder := _real(path).parent).is_dir():
        raise SaveError(f"There is no folder {folder} to write {path.name} into. Make it, or name another.")
    if path.exists() and not path.is_file():
        raise SaveError(f"{path} exists and is not a file. Name a file.")
    _check_writable(path.parent)
    check_room(path, PAGE)


def check_room(path: Place, needed: int) -> None:
    """Raise if the disk of this path has fewer free bytes than `needed`."""
    free = shutil.disk_usage(_nearest_folder(Path(path))).free
    if free < needed:
        raise SaveError(
            f"{path} needs about {needed / 1e6:,.0f} MB, and the disk has {free / 1e6:,.0f} MB left. Free some space,"
            " or name another path with --out."
        )


def read_json(path: Place, kind: type, error: type[SecateurError] = DataError, advice: str = "Write it again.") -> Any:
    """The content of a JSON file, which must be of this type, or an error that names the file."""
    path = Path(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"There is no {path.name} in {path.parent}. {advice}") from None
    except OSError as problem:
        raise error(f"{path} cannot be read ({_reason(problem)}). {advice}") from problem
    except (ValueError, RecursionError) as problem:  # not JSON, not UTF-8, or nested too deeply
        raise error(f"{path} cannot be read as JSON: {problem}. {advice}") from problem
    if not isinstance(found, kind):
        raise error(f"{path} holds a {type(found).__name__}; a {kind.__name__} is needed. {advice}")
    return found


def folder_name(text: str) -> str:
    """The text as the name of one folder. Windows allows no colon, which patterns such as 2:4 have."""
    name = text.replace("/", "_").replace(" ", "")
    return name.replace(":", "-") if sys.platform == "win32" else name


def megabytes(number: int) -> str:
    """A size as text, in kB below a megabyte, where layers of small models would be 0.00 MB."""
    return f"{number / 1e3:,.1f} kB" if number < 1e6 else f"{number / 1e6:,.2f} MB"


def _real(path: Place) -> Path:
    """Where a path leads, through links; `Path.resolve` raises RuntimeError for a link that leads to itself."""
    found = Path(os.path.realpath(path))
    if found.is_symlink():
        raise SaveError(f"{path} is a link that leads to itself. Name another path.")
    return found


def _hidden(path: Path) -> str:
    return f".{path.name}.{uuid.uuid4().hex[:8]}"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _nearest_folder(path: Path) -> Path:
    """The nearest existing folder at or above a path."""
    path = _real(path)
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _check_writable(folder: Path) -> None:
    """Raise if nothing can be written in a folder, which need not exist yet."""
    folder = _real(folder)
    try:
        tempfile.TemporaryFile(dir=next(one for one in (folder, *folder.parents) if one.exists())).close()
    except OSError as error:
        raise SaveError(f"Nothing can be written in {folder} ({_reason(error)}). Name another path.") from error


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk. Not all systems can do it for folders."""
    handle = None
    with suppress(PermissionError, IsADirectoryError):
        handle = os.open(path, FLUSHING)
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
    """Flush `partial` to disk and rename it to `folder`, moving an old folder aside first and back if that fails."""
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if folder.exists():
        aside = folder.with_name(_hidden(folder) + ".old")  # a name that `clear` restores it from
        folder.rename(aside)
        try:
            partial.rename(folder)
        except OSError:
            aside.rename(folder)
            raise
        shutil.rmtree(aside, ignore_errors=True)  # leftovers are removed by the next write
    else:
        partial.rename(folder)
    _sync(folder.parent)


def existing_folder(path: Place) -> Path:
    """This folder with "~" expanded, or an error if there is none."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        found = "a file" if folder.exists() else "not there"
        raise DataError(f"{folder} is {found}; the folder that holds the data is needed.")
    return folder


def sole_folder(folder: Place, globs: Sequence[str]) -> Path | None:
    """The one folder, this or below it, with a file that matches one of these globs; None if there is none."""
    folder = Path(folder)
    found = sorted({path.parent for glob in globs for path in folder.rglob(glob) if path.is_file()})
    if len(found) > 1:
        names = ", ".join(map(str, found[:4]))
        raise DataError(f"{folder} holds {' or '.join(globs)} in {len(found)} folders: {names}. Name one of them.")
    return found[0] if found else None
