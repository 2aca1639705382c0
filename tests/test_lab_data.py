"""Tokens: batches depend on their arguments alone, evaluation covers what is held out, and what is wrong is said."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from secateur.errors import DataError, SecateurError, TextError
from secateur.lab import data as lab_tokens
from secateur.lab.data import FORMS, Tokens, load

ROOT = Path(__file__).parent.parent


def counting(train: int = 1000, held_out: int = 103, vocabulary: int = 1000) -> Tokens:
    """Each token is its own place, so that a window shows where it was taken."""
    return Tokens(torch.arange(train), torch.arange(held_out), vocabulary, "counting")


def write_bin(folder: Path, train: Any, val: Any, stored: torch.dtype = torch.uint16, **meta: Any) -> str:
    folder.mkdir(exist_ok=True)
    for name, numbers in (("train", train), ("val", val)):
        raw = torch.tensor(numbers).to(stored).view(torch.uint8)
        (folder / f"{name}.bin").write_bytes(bytes(raw.tolist()))
    if meta:
        (folder / "meta.json").write_text(json.dumps(meta))
    return f"tokens:{folder}"


def test_a_batch_depends_on_its_arguments_alone() -> None:
    data = counting()
    first = data.batch(7, 16, 10, seed=1)
    assert first.dtype == torch.int64
    assert first.shape == (16, 11)
    torch.rand(5)  # chance drawn elsewhere
    data.batch(8, 16, 10, seed=1)
    assert torch.equal(first, data.batch(7, 16, 10, seed=1))
    assert torch.equal(first, counting().batch(7, 16, 10, seed=1))
    assert not torch.equal(first, data.batch(8, 16, 10, seed=1))
    assert not torch.equal(first, data.batch(7, 16, 10, seed=2))
    assert torch.equal(first - first[:, :1], torch.arange(11).expand(16, 11))


def test_batches_reach_both_ends() -> None:
    data = counting(train=12, vocabulary=12)
    starts = torch.cat([data.batch(step, 16, 10, seed=0)[:, 0] for step in range(8)])
    assert starts.unique().tolist() == [0, 1]


def test_evaluation_covers_everything_in_order() -> None:
    found = counting().evaluation(9)
    assert found.shape == (10, 10)
    assert torch.equal(found.flatten(), torch.arange(100))
    assert torch.equal(counting().evaluation(102), torch.arange(103)[None])


@pytest.mark.parametrize(
    ("most", "rows"), [(1, [0]), (3, [0, 3, 6]), (4, [0, 2, 5, 7]), (10, range(10)), (99, range(10))]
)
def test_some_windows_are_spread_evenly(most: int, rows: Any) -> None:
    assert (counting().evaluation(9, most)[:, 0] // 10).tolist() == list(rows)


def test_windows_that_do_not_fit() -> None:
    data = counting(train=10)
    with pytest.raises(
        DataError, match="counting has 10 training tokens; a window of context 10 takes 11. Use a context"
    ):
        data.batch(0, 1, 10, 0)
    with pytest.raises(DataError, match="has 103 held-out tokens; a window of context 103 takes 104"):
        data.evaluation(103)
    with pytest.raises(DataError, match="evaluation must be at least 1 window, got 0; .* has 10"):
        data.evaluation(9, 0)


def test_vocabularies_that_do_not_fit() -> None:
    data = counting(vocabulary=50)
    with pytest.raises(DataError, match="counting holds the token 99, outside its vocabulary of 50"):
        data.evaluation(9)
    data.check_vocabulary(50)
    with pytest.raises(
        DataError, match="counting has a vocabulary of 50, the model one of 49. Give the model at least 50"
    ):
        data.check_vocabulary(49)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "cifar:x",
            "no dataset 'cifar:x'. Did you mean 'cifar10.*'. Use one of python, digits, tokens:FOLDER",
        ),
        ("pyhton", "Did you mean 'python'"),
        ("zzz", "There is no dataset 'zzz'. Use one of"),
        ("tokens", "'tokens' lacks a place: write 'tokens:FOLDER'."),
        ("mnist:", "'mnist:' lacks a place"),
        ("python:3", "'python:3' takes nothing after the colon: write 'python'."),
        *(
            (f"{word}:/not/there", "there is not there; ")
            for word, form in FORMS.items()
            if form.endswith(("FOLDER", "FILE"))
        ),
    ],
)
def test_specs_that_name_nothing(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(spec)


def test_every_form_is_documented() -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    assert all(f"`{form}`" in page for form in FORMS.values())


def test_python() -> None:
    data = load("python")
    assert isinstance(data, Tokens)
    assert (data.vocabulary, data.train.dtype, data.name) == (256, torch.uint8, "python")
    assert data.batch(0, 2, 16, 0).shape == (2, 17)


def test_text_is_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(256)) * 4)
    data = load(f"text:{path}")
    assert isinstance(data, Tokens)
    assert bytes(torch.cat((data.train, data.held_out)).tolist()) == path.read_bytes()
    assert (data.held_out.numel(), data.vocabulary) == (102, 256)
    path.write_bytes(b"short")
    with pytest.raises(DataError, match="a.txt has 5 bytes, too few"):
        load(f"text:{path}")
    with pytest.raises(DataError, match="is a folder; text:FILE takes one file."):
        load(f"text:{tmp_path}")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_in_files(tmp_path: Path, dtype: str) -> None:
    high = 65535 if dtype == "uint16" else 128255
    stored = torch.uint16 if dtype == "uint16" else torch.int32
    spec = write_bin(tmp_path / "a", [1, high, 3, 4], [5, 6], stored, dtype=dtype)
    data = load(spec)
    assert isinstance(data, Tokens)
    assert (data.train.dtype, data.vocabulary) == (stored, high + 1)
    assert data.train.tolist() == [1, high, 3, 4]
    assert data.evaluation(1).tolist() == [[5, 6]]
    assert int(torch.cat([data.batch(step, 8, 1, 0) for step in range(4)]).max()) == high


def test_where_the_vocabulary_comes_from(tmp_path: Path) -> None:
    spec = write_bin(tmp_path / "a", [1, 2, 3], [9, 8])
    assert vocabulary(spec) == 10
    told = {"model": {"vocab": {"a": 0, "b": 40}}, "added_tokens": [{"id": 41}]}
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps(told))
    assert vocabulary(spec) == 42
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", 0.1]] * 12}}))
    assert vocabulary(spec) == 12
    assert vocabulary(write_bin(tmp_path / "a", [1, 2, 3], [9, 8], vocabulary=50)) == 50


def vocabulary(spec: str) -> int:
    data = load(spec)
    assert isinstance(data, Tokens)
    return data.vocabulary


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.bin": None}, "There is no train.bin in .*`secateur data TEXT --out FOLDER` writes one."),
        ({"val.bin": b"123"}, "val.bin has 3 bytes of uint16; it should have a multiple of 2 bytes"),
        ({"val.bin": b""}, "val.bin has 0 bytes of uint16; it should have .* at least one token"),
        (
            {"meta.json": b'{"tokens": {"val": 9}}'},
            "val.bin has 8 bytes of uint16; it should have 18 bytes: truncated?",
        ),
        ({"meta.json": b'{"dtype": "float"}'}, "meta.json says dtype 'float'; uint16 and uint32 are known."),
        ({"meta.json": b'{"dtype": ["uint16"]}'}, r"meta.json says dtype \['uint16'\]; uint16 and uint32 are known."),
        ({"meta.json": b'{"vocabulary": "a"}'}, "meta.json says vocabulary 'a'; it must be a whole number"),
        ({"meta.json": b'{"vocabulary": 70000}'}, "vocabulary of 70,000, too large for uint16. Put {.dtype"),
        ({"meta.json": b"{"}, "meta.json cannot be read as JSON: "),
        ({"meta.json": b"[]"}, "meta.json holds a list; a dict is needed."),
        ({"tokenizer.json": b"{}"}, "tokenizer.json has no vocabulary: KeyError.*into meta.json"),
    ],
)
def test_folders_that_cannot_be_read(tmp_path: Path, files: dict[str, bytes | None], message: str) -> None:
    spec = write_bin(tmp_path / "a", [1, 2, 3, 4], [5, 6, 7, 8])
    for name, raw in files.items():
        (tmp_path / "a" / name).unlink() if raw is None else (tmp_path / "a" / name).write_bytes(raw)
    with pytest.raises(DataError, match=message):
        load(spec)


def streaming(monkeypatch: pytest.MonkeyPatch, rows: Any) -> list[Any]:
    calls: list[Any] = []

    def load_dataset(*parts: str, **how: Any) -> Any:
        calls.append((*parts, how))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_datasets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def rows() -> Iterator[dict[str, str]]:
        for number in range(10_000):
            seen.append(number)
            yield {"text": f"document {number % 50}"}

    monkeypatch.setattr(lab_tokens, "STREAMED", 2000)
    calls = streaming(monkeypatch, rows())
    data = load("dataset:user/web:sample")
    assert isinstance(data, Tokens)
    assert calls == [("user/web", "sample", {"split": "train", "streaming": True})]
    assert len(seen) < 200  # no more than was wanted
    train, held_out = (documents(part) for part in (data.train, data.held_out))
    assert train
    assert held_out
    assert not train & held_out  # though every document comes many times


def documents(tokens: Tensor) -> set[str]:
    return set(bytes(tokens.tolist()).decode().strip().split("\n\n"))


def test_datasets_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SecateurError, match="Reading dataset:a/b needs datasets: pip install datasets."):
        load("dataset:a/b")
    streaming(monkeypatch, [{"question": "?"}])
    with pytest.raises(TextError, match="dataset:a/b has no column 'text'; it has 'question'."):
        load("dataset:a/b")
    streaming(monkeypatch, [{"text": "one"}])
    with pytest.raises(DataError, match="dataset:a/b has too few documents"):
        load("dataset:a/b")

    def broken() -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise ConnectionError("no route")

    streaming(monkeypatch, broken())
    with pytest.raises(TextError, match="dataset:a/b cannot be read any further: no route"):
        load("dataset:a/b")


def test_a_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bin(tmp_path / "a", [1, 2, 3], [9, 8])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert vocabulary("tokens:~/a") == 10


def test_messages_end_as_sentences() -> None:
    with pytest.raises(DataError) as caught:
        load("nothing")
    assert re.fullmatch(r"[A-Z].*\.", str(caught.value))
