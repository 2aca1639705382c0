"""Paths may be text or any os.PathLike, and every file appears whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from secateur import files, settings
from secateur.errors import DataError, SaveError


class Like:
    """A path of somebody else's making."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


FORMS = [Path, str, Like]


@pytest.mark.parametrize("form", FORMS)
def test_every_function_takes_any_path(form: Callable[[Path], Any], tmp_path: Path) -> None:
    text, folder = tmp_path / "a.json", tmp_path / "folder"
    files.check_file(form(text))
    files.check_folder(form(folder))
    files.check_room(form(folder), 1)
    files.write(form(text), '{"a": 1}')
    assert files.read_json(form(text), dict) == settings.read_toml(form(toml_of(tmp_path))) == {"a": 1}
    with files.appearing(form(folder)) as partial:
        (partial / "x.bin").write_bytes(b"x")
    assert files.existing_folder(form(folder)) == files.sole_folder(form(tmp_path), ["*.bin"]) == folder
    with files.claimed(form(text)), files.locked(form(tmp_path / "lock"), "busy"):
        (tmp_path / f".{text.name}.01234567.tmp").touch()
        files.clear(form(text))
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.toml", "folder"]


def toml_of(folder: Path) -> Path:
    (folder / "a.toml").write_text("a = 1", encoding="utf-8")
    return folder / "a.toml"


def test_a_folder_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with files.appearing(folder) as partial:
        (partial / "a").touch()
    with pytest.raises(SaveError, match="folder could not be written .full. and is as it was"), files.appearing(folder):
        raise OSError("full")
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(folder) == ["a"]


def test_errors_name_the_path_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="file is a file; a folder is needed. Name another with --out"):
        files.check_folder(tmp_path / "file")
    with pytest.raises(SaveError, match="exists and is not a file. Name a file"):
        files.check_file(tmp_path)
    with pytest.raises(SaveError, match="There is no folder .*missing to write a.txt into"):
        files.check_file(tmp_path / "missing" / "a.txt")
    with pytest.raises(DataError, match="file is a file; the folder that holds the data is needed"):
        files.existing_folder(str(tmp_path / "file"))
    with pytest.raises(SaveError, match="needs about .* MB, and the disk has"):
        files.check_room(tmp_path, 1 << 60)


def test_a_file_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with files.replacing(path) as temporary:
        temporary.write_bytes(b"first")
    with pytest.raises(SaveError, match="a.bin cannot be written .full.. What was there before is untouched"):
        write_half(path, OSError("full"))
    with pytest.raises(KeyboardInterrupt):
        write_half(path, KeyboardInterrupt())
    assert os.listdir(tmp_path) == ["a.bin"]
    assert path.read_bytes() == b"first"


def write_half(path: Path, error: BaseException) -> None:
    with files.replacing(path) as temporary:
        temporary.write_bytes(b"sec")
        raise error


def test_windows_flushes_only_what_is_open_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl", reason="this system refuses by itself")

    def flush(handle: int) -> None:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def written() -> list[str]:
        files.write(tmp_path / "a.txt", "a")
        with files.appearing(tmp_path / "folder") as partial:
            (partial / "b").touch()
        return sorted(os.listdir(tmp_path))

    monkeypatch.setattr(os, "fsync", flush)
    with pytest.raises(SaveError, match="a.txt cannot be written .Bad file descriptor"):
        written()
    monkeypatch.setattr(files, "FLUSHING", os.O_RDWR)
    assert written() == ["a.txt", "folder"]


def test_names_of_folders_fit_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.folder_name("gpt2-score=variance(q=3/8)-pattern=2:4, x") == "gpt2-score=variance(q=3_8)-pattern=2:4,x"
    monkeypatch.setattr("sys.platform", "win32")
    assert files.folder_name("gpt2-2:4") == "gpt2-2-4"
