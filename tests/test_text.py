"""Text: reading it, windows of tokens, splits for calibration and evaluation, and their errors."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from secateur.errors import SecateurError, TextError
from secateur.integrations import tokenizing
from secateur.integrations.text import check_apart, read_text, split, windows
from tests import tiny

PROSE = " ".join(f"line {number} says, again, that trees are cut.\n" for number in range(60))


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Grüße\n", encoding="utf-8")
    assert read_text(path) == read_text(str(path)) == "Grüße\n"


@pytest.mark.parametrize("field", ["text", "body"])
def test_jsonl_is_read(tmp_path: Path, field: str) -> None:
    path = tmp_path / "a.jsonl"
    # A line separator inside a string ends no line of the file.
    path.write_text("\n".join(json.dumps({field: text}, ensure_ascii=False) for text in ("o\u2028ne", "two")) + "\n\n")
    assert read_text(f"{path}:{field}") == "o\u2028ne\n\ntwo"
    if field == "text":
        assert read_text(path) == "o\u2028ne\n\ntwo"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 1}', "Line 2 of .* has no text under 'text'; it has 1 there. Name the field: .*a.jsonl:FIELD."),
        ('{"a": "x", "b": 2}', "Line 2 .* has no text under 'text'; it has 'a', 'b'."),
        ("[1]", "Line 2 .* has no text under 'text'; it has a list."),
        ("{oops", "Line 2 of .*a.jsonl is not JSON: .* at column 2."),
    ],
)
def test_jsonl_that_does_not_fit(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(TextError, match=message):
        read_text(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"There is no file .*gone.txt. Text is read from a file, FILE.jsonl\[:FIELD\]"):
        read_text(tmp_path / "gone.txt")
    with pytest.raises(TextError, match="is a folder. Give one text file or one .jsonl file."):
        read_text(tmp_path)
    (tmp_path / "latin").write_bytes(b"ab\xff")
    with pytest.raises(TextError, match="latin is not UTF-8 text: byte 2 is invalid. Convert it first."):
        read_text(tmp_path / "latin")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1\xff")
    for path in (tmp_path, tmp_path / "rows.parquet"):
        with pytest.raises(TextError, match=f"Its parquet files are read as dataset:{re.escape(str(tmp_path))}"):
            read_text(path)
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(TextError, match="empty holds no text."):
        read_text(tmp_path / "empty")
    with pytest.raises(TextError, match=r"cannot be read: Not a directory."):
        read_text(tmp_path / "empty" / "a.txt")


def test_the_builtin_text_is_the_standard_library() -> None:
    text = read_text("builtin")
    assert len(text) > 1_000_000
    assert "def " in text


class Rows(dict[str, list[str]]):
    """As much of a dataset as is used."""

    @property
    def column_names(self) -> list[str]:
        return list(self)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("dataset:user/wiki", ("user/wiki", "train")),
        ("dataset:user/wiki:test", ("user/wiki", "test")),
        ("dataset:user/wiki:raw", ("user/wiki", "raw", "train")),
        ("dataset:user/wiki:raw:validation", ("user/wiki", "raw", "validation")),
        ("dataset:user/wiki:raw:train[:1%]", None),
    ],
)
def test_datasets(monkeypatch: pytest.MonkeyPatch, name: str, asked: tuple[str, ...] | None) -> None:
    calls = []

    def load_dataset(*parts: str, split: str) -> Rows:
        calls.append((*parts, split))
        return Rows(text=["one", "two"])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    if asked is None:
        with pytest.raises(TextError, match=r"does not name a dataset; the form is dataset:NAME\[:CONFIG\]\[:SPLIT\]."):
            read_text(name)
    else:
        assert read_text(name) == "one\n\ntwo"
        assert calls == [asked]


def test_datasets_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SecateurError, match="Reading dataset:wiki needs datasets: pip install datasets."):
        read_text("dataset:wiki")

    def load_dataset(*parts: str, split: str) -> Rows:
        if parts[0] == "gone":
            raise ConnectionError("no route")
        return Rows(question=[], answer=[])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(TextError, match="dataset:gone cannot be read: no route"):
        read_text("dataset:gone")
    with pytest.raises(TextError, match="dataset:quiz has no column 'text'; it has 'question', 'answer'."):
        read_text("dataset:quiz")
    with pytest.raises(TextError, match="'dataset:' does not name a dataset"):
        read_text("dataset:")


def test_windows_are_consecutive_and_whole(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny.tokenizer(limit=16)
    logging.getLogger("transformers").addHandler(caplog.handler)  # its loggers do not propagate
    found = windows(tokenizer, PROSE, 24)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not caplog.records  # such as "longer than the specified maximum"
    assert found.dtype == torch.int64
    assert found.shape == (len(PROSE) // 24, 24)
    assert tokenizer.decode(found.flatten()) == PROSE[: found.numel()]
    assert torch.equal(windows(tokenizer, PROSE, 24, 3), found[:3])


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("piece", [64, 200, 1000])
def test_pieces_give_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch, prefix: bool, piece: int) -> None:
    tokenizer = tiny.tokenizer(prefix=prefix)
    whole = windows(tokenizer, PROSE, 16)
    monkeypatch.setattr(tokenizing, "PIECE", piece)
    monkeypatch.setattr(tokenizing, "AROUND", 10)
    read: list[int] = []
    encode = tokenizing._encode
    monkeypatch.setattr(tokenizing, "_encode", lambda *given: read.append(len(given[1])) or encode(*given))
    assert torch.equal(windows(tokenizer, PROSE, 16), whole)
    assert max(read) <= piece
    read.clear()
    windows(tokenizer, PROSE, 16, 1)
    assert sum(read) < 2 * piece + 80  # no more is read than is needed


def test_text_without_spaces_is_cut_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "PIECE", 50)
    assert windows(tiny.tokenizer(), "a" * 500, 10).shape == (50, 10)


def test_windows_that_cannot_be() -> None:
    tokenizer = tiny.tokenizer()
    with pytest.raises(TextError, match="The text has 5 tokens: 0 windows of 8, and 1 are needed. Give a longer text"):
        windows(tokenizer, "trees", 8)
    with pytest.raises(TextError, match="The text has 5 tokens: 2 windows of 2, and 3 are needed."):
        windows(tokenizer, "trees", 2, 3)
    with pytest.raises(TextError, match="The text has 0 tokens"):
        windows(tokenizer, "", 2)
    with pytest.raises(TextError, match="context must be at least 1, got 0."):
        windows(tokenizer, "trees", 0)
    with pytest.raises(TextError, match="count must be at least 1, got -1."):
        windows(tokenizer, "trees", 2, -1)


def test_split() -> None:
    rows = torch.arange(20).view(10, 2)

    def sizes(*given: Any) -> list[list[int]]:
        return [part[:, 0].div(2).int().tolist() for part in split(*given)]

    assert sizes(rows) == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]]
    assert sizes(rows[:2]) == [[0], [1]]
    assert sizes(rows, 8) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]
    assert sizes(rows, 2, 3) == [[0, 1], [2, 3, 4]]
    assert sizes(rows, None, 2) == [[0, 1, 2], [3, 4]]
    for wrong in ((rows[:1],), (rows, 10), (rows, 0), (rows, 5, 6), (rows, 5, 0)):
        with pytest.raises(TextError, match="windows cannot be split into .* for calibration and .* for evaluation"):
            split(*wrong)


def test_shared_text_is_found_at_any_offset() -> None:
    tokens = torch.randint(0, 50_000, (4000,))
    one, other = tokens[:1600].view(-1, 16), tokens[1600:].view(-1, 16)
    check_apart(one, other)
    check_apart(*split(tokens.view(-1, 16)))
    check_apart(one, other[:0])
    with pytest.raises(TextError, match="5 of 100 calibration windows are in the other text too, .* window 95. A mask"):
        check_apart(one, tokens[1520:].view(-1, 16))
    shifted = torch.cat((torch.randint(0, 50_000, (7,)), tokens))[: 4000 // 16 * 16].view(-1, 16)
    with pytest.raises(TextError, match="100 of 100 calibration windows are in the other text too, .* window 0."):
        check_apart(one, shifted)
    with pytest.raises(TextError, match="1 of 1 evaluation windows are in the other text too"):
        check_apart(tokens[:992].view(-1, 31), tokens[40:50].view(1, 10))
    check_apart(tokens[:20].view(1, 20), tokens[1:20].view(1, 19) + 1)


def test_a_lack_of_memory_is_not_a_text_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*given: str, **options: Any) -> Any:
        raise MemoryError

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(MemoryError):
        read_text("dataset:large")


def test_any_path_like_object_names_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words", encoding="utf-8")

    class Named:
        def __fspath__(self) -> str:
            return str(tmp_path / "a.txt")

    assert read_text(Named()) == "words"
