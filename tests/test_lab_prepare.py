"""`secateur data`: tokens that decode to the text, held-out text apart, and folders that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from secateur.cli import main
from secateur.errors import DataError, SaveError, SecateurError
from secateur.lab import data as module
from secateur.lab.data import Tokens, load, prepare, split_documents

PARAGRAPHS = "\n\n".join(f"Paragraph {number} says, again, that trees are cut.\nIt is Grün." for number in range(40))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(PARAGRAPHS, encoding="utf-8")
    return path


def read(folder: Path) -> tuple[Tokens, dict[str, Any]]:
    data = load(f"tokens:{folder}")
    assert isinstance(data, Tokens)
    return data, json.loads((folder / "meta.json").read_text())


def test_bytes_end_to_end(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "tokens"
    assert main(["data", str(text), "--out", str(out), "--held-out", "0.2"]) == 0
    data, meta = read(out)
    train, held_out = (bytes(part.tolist()).decode() for part in (data.train, data.held_out))
    assert train + held_out == PARAGRAPHS
    assert held_out.startswith("Paragraph ")
    assert 0.1 < len(held_out) / len(PARAGRAPHS) <= 0.2
    assert meta["sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert meta["tokens"] == {"train": data.train.numel(), "val": data.held_out.numel()}
    told = {key: meta[key] for key in ("vocabulary", "dtype", "tokenizer")}
    assert told == {"vocabulary": 256, "dtype": "uint16", "tokenizer": "byte"}
    assert f"Train on tokens:{out}" in capsys.readouterr().out
    assert sorted(path.name for path in out.parent.iterdir()) == ["tokens"]  # nothing unfinished is left


def bpe(folder: Path) -> Path:
    """GPT-2's two files, tiny: every byte, and one merge."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers other than bytes need tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {sign: number for number, sign in enumerate([*alphabet, "tr"])}
    (folder / "encoder.json").write_text(json.dumps(vocabulary))
    (folder / "vocab.bpe").write_text("#version: 0.2\nt r\n")
    return folder


def test_gpt2_and_the_tokenizer_it_leaves(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secateur.integrations.tokenizing.PIECE", 300)  # many pieces
    assert main(["data", str(text), "--out", str(tmp_path / "a"), "--tokenizer", f"gpt2:{bpe(tmp_path)}"]) == 0
    data, meta = read(tmp_path / "a")
    assert meta["vocabulary"] == data.vocabulary == 257
    tokenizer = module.read_tokenizer(str(tmp_path / "a" / "tokenizer.json"))
    whole = tokenizer.encode(PARAGRAPHS).ids
    assert torch.cat((data.train, data.held_out)).tolist() == whole
    assert tokenizer.decode(whole) == PARAGRAPHS
    assert 256 in whole  # the merge
    prepare(str(text), tmp_path / "b", str(tmp_path / "a" / "tokenizer.json"))
    assert (tmp_path / "b" / "train.bin").read_bytes() == (tmp_path / "a" / "train.bin").read_bytes()


def test_large_vocabularies_take_uint32(tmp_path: Path, text: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers other than bytes need tokenizers")
    words = tokenizers.models.WordLevel({"Paragraph": 70_000, "?": 0}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "words.json"))
    prepare(str(text), tmp_path / "a", str(tmp_path / "words.json"))
    data, meta = read(tmp_path / "a")
    assert (meta["dtype"], data.vocabulary, data.train.dtype) == ("uint32", 70_001, torch.int32)
    assert int((data.train == 70_000).sum() + (data.held_out == 70_000).sum()) == 40


def test_whole_documents_are_held_out_with_their_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"one{number}\n\ntwo{number}" for number in range(20)]
    texts[3] = texts[19]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"body": one}) for one in texts))
    assert main(["data", f"{path}:body", "--out", str(tmp_path / "a")]) == 0
    data, _ = read(tmp_path / "a")
    train, held_out = (bytes(part.tolist()).decode() for part in (data.train, data.held_out))
    assert held_out == "one18\n\ntwo18\n\none19\n\ntwo19"
    assert train == "\n\n".join(texts[:3] + texts[4:18])
    assert "removed 1 copies of held-out documents from the training text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "share", "held_out"),
    [
        ("a b\nc d\n\ne f\ng h i j k", 0.7, "e f\ng h i j k"),
        ("a b c d e f\ng h i j k l", 0.55, "g h i j k l"),
        ("aaaa bbbbbbbb cccccccc", 0.5, "cccccccc"),
        ("aaaaaaaaaa", 0.5, "aaaaa"),
    ],
)
def test_one_document_is_cut_where_it_hurts_least(text: str, share: float, held_out: str) -> None:
    train, found = split_documents([text], share)
    assert found == held_out
    assert train + found == text


def test_nothing_is_overwritten_unasked(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a"
    command = ["data", str(text), "--out", str(out)]
    assert main(command) == 0
    before = (out / "train.bin").read_bytes()
    assert main([*command, "--held-out", "0.5"]) == 2
    assert "is not empty. Name another folder, or pass overwrite=True (--overwrite)." in capsys.readouterr().err
    assert (out / "train.bin").read_bytes() == before
    assert main([*command, "--held-out", "0.5", "--overwrite"]) == 0
    assert len((out / "train.bin").read_bytes()) < len(before)
    with pytest.raises(DataError, match="holds something other than a data set and is not overwritten."):
        prepare(str(text), tmp_path, overwrite=True)
    with pytest.raises(DataError, match="book.txt is a file; a data set is saved as a folder."):
        prepare(str(text), text)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError("disk is full")

    monkeypatch.setattr(module, "_write", full)
    with pytest.raises(SaveError, match="disk is full"):
        prepare(str(text), tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 0.0}, "--held-out must be a fraction between 0 and 1, such as 0.1; got 0."),
        ({"held_out": 1.5}, "such as 0.1; got 1.5."),
        ({"tokenizer": "bytes"}, "There is no tokenizer bytes. Use byte, a tokenizer.json, or gpt2:FOLDER."),
        ({"tokenizer": "gpt2:/not/there"}, "there is not there; the folder"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, text: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(str(text), tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def test_tokenizers_that_cannot_be_read(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="book.txt is not a tokenizer.json: "):
        module.read_tokenizer(str(text))
    with pytest.raises(
        DataError, match="does not hold GPT-2's tokenizer: encoder.json and vocab.bpe, or vocab.json and m"
    ):
        module.read_tokenizer(f"gpt2:{tmp_path}")
    bpe(tmp_path)
    (tmp_path / "encoder.json").write_text("{")
    with pytest.raises(DataError, match="encoder.json and vocab.bpe are not a byte-level BPE tokenizer: "):
        module.read_tokenizer(f"gpt2:{tmp_path}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SecateurError, match=r'needs tokenizers: pip install "secateur\[lab\]"\.'):
        module.read_tokenizer(str(text))


def test_text_too_short_to_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(DataError, match="give 2 tokens in train.bin and 0 tokens in val.bin. Give a longer text."):
        prepare(str(tmp_path / "a.txt"), tmp_path / "a")


def test_half_a_surrogate_pair_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(['{"text": "odd \\ud800 sign"}'] * 2 + ['{"text": "other"}'] * 2))
    assert prepare(str(tmp_path / "a.jsonl"), tmp_path / "a")["tokens"] == {"train": 22, "val": 5}
