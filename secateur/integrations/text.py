"""Text for calibration and evaluation: read it, split it into windows of tokens, and keep the two apart.

The built-in text is the source code of Python's standard library, also as bytes for small models (`standard_library`).
"""

from __future__ import annotations

import json
import os
import reprlib
import sysconfig
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.errors import SecateurError, TextError, library, one_line
from secateur.integrations.folder import offline_if_unreachable
from secateur.integrations.tokenizing import BETWEEN, token_lists
from secateur.oneshot.batches import is_out_of_memory

SOURCES = "a file, FILE.jsonl[:FIELD], dataset:NAME[:CONFIG][:SPLIT] or builtin"
TRAIN = "train"  # the split of a dataset unless another is named
SPLITS = (TRAIN, "validation", "test")
SAVED = ("dataset_info.json", "dataset_dict.json")  # in folders that `save_to_disk` of datasets wrote
BASE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that it has an inverse modulo 2^64


def read_text(source: str | os.PathLike[str]) -> str:
    """The text of a file, of `FILE.jsonl[:FIELD]`, of `dataset:NAME[:CONFIG][:SPLIT]`, or of "builtin".

    "builtin" is the source code of Python's standard library. A dataset comes from Hugging Face's `datasets`, by
    default its split "train". Datasets and .jsonl files have their text in the field "text"; a .jsonl file may name
    another one.
    """
    return BETWEEN.join(read_documents(source))


def read_documents(source: str | os.PathLike[str]) -> list[str]:
    """The documents of a source of `read_text`: lines of a .jsonl file, rows of a dataset, or one for other text."""
    name = os.fspath(source)
    if name == "builtin":
        corpus = standard_library()
        texts = [bytes(torch.cat((corpus.train, corpus.held_out)).tolist()).decode(errors="replace")]
    elif name.startswith("dataset:"):
        texts = _dataset(name)
    else:
        path, field = _file_and_field(name)
        text = _file(Path(path))
        texts = _documents(text, path, field) if path.endswith(".jsonl") else [text]
    if not any(text.strip() for text in texts):
        raise TextError(f"{name} holds no text.")
    return texts


def check_source(source: str | os.PathLike[str]) -> None:
    """Check before long work that a source of `read_text` is there and can be read."""
    name = os.fspath(source)
    if name.startswith("dataset:"):
        _rows(name, streaming=True)
    elif name != "builtin":
        path, field = _file_and_field(name)
        text = _file(Path(path))
        if path.endswith(".jsonl"):
            _documents(text.partition("\n")[0], path, field)


def _file_and_field(name: str) -> tuple[str, str]:
    path, separator, field = name.rpartition(":")
    return (path, field) if separator and path.endswith(".jsonl") else (name, "text")


def _as_dataset(folder: Path) -> str:
    """A hint at the way to read a folder of parquet files; empty if there are none."""
    return f" Its parquet files are read as dataset:{folder}." if any(folder.glob("*.parquet")) else ""


def _file(path: Path) -> str:
    if path.is_dir():
        raise TextError(f"{path} is a folder. Give one text file or one .jsonl file.{_as_dataset(path)}")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TextError(f"There is no file {path}. Text is read from {SOURCES}.") from None
    except UnicodeDecodeError as error:
        instead = _as_dataset(path.parent) if path.suffix == ".parquet" else " Convert it first."
        raise TextError(f"{path} is not UTF-8 text: byte {error.start} is invalid.{instead}") from error
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}.") from error


def _documents(lines: str, path: str, field: str) -> list[str]:
    """The strings under this field of one JSON object per line."""
    texts = []
    for number, line in enumerate(lines.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except json.JSONDecodeError as error:
            raise TextError(f"Line {number} of {path} is not JSON: {error.msg} at column {error.colno}.") from error
        text = document.get(field) if isinstance(document, dict) else None
        if not isinstance(text, str):
            raise TextError(
                f"Line {number} of {path} has no text under {field!r}; it has {_held(document, field)}. Name the field:"
                f" {path}:FIELD."
            )
        texts.append(text.encode(errors="replace").decode())  # JSON may hold half of a surrogate pair
    return texts


def _held(document: Any, field: str) -> str:
    """What a line of JSON has instead of text in this field."""
    if not isinstance(document, dict):
        return f"a {type(document).__name__}"
    return f"{reprlib.repr(document[field])} there" if field in document else ", ".join(map(repr, document))


def _dataset(name: str) -> list[str]:
    rows = _rows(name)
    if "text" not in rows.column_names:
        raise TextError(f"{name} has no column 'text'; it has {', '.join(map(repr, rows.column_names))}.")
    return list(rows["text"])


def stream_documents(name: str) -> Iterator[str]:
    """The documents of a dataset as a stream, for datasets too large to download."""
    return iter(DocumentStream(name))


class DocumentStream:
    """The documents of a dataset one by one, without rows that hold no text. `position()` is where the stream is, as
    plain JSON, and a stream that is given it goes on from there."""

    def __init__(self, name: str, column: str = "text", position: Mapping[str, Any] | None = None) -> None:
        start = dict(position or {})
        self._name, self._column, self._state = name, column, start.get("state")
        self.rows, self.empty = int(start.get("rows", 0)), int(start.get("empty", 0))
        self._source = _rows(name, streaming=True)
        if self.rows and self._state is not None and hasattr(self._source, "load_state_dict"):
            self._source.load_state_dict(self._state)  # begins in the right file
        elif self.rows:
            self._source = self._source.skip(self.rows)

    def __iter__(self) -> Iterator[str]:
        try:
            for row in self._source:
                self.rows += 1
                text = self._text(row)
                if text:
                    yield text
                else:
                    self.empty += 1
        except TextError:
            raise
        except Exception as error:  # the network and damaged files raise almost any type
            if is_out_of_memory(error):
                raise
            raise TextError(f"{self._name} cannot be read any further: {one_line(error)}") from error

    def _text(self, row: Mapping[str, Any]) -> str:
        """The text of a row; empty if it has none."""
        if self._column not in row:
            raise TextError(f"{self._name} has no column {self._column!r}; it has {', '.join(map(repr, row))}.")
        text = row[self._column]
        if text is not None and not isinstance(text, str):
            raise TextError(f"Column {self._column!r} of {self._name} holds {type(text).__name__}, not text.")
        return "" if text is None or not text.strip() else text

    def position(self) -> dict[str, Any]:
        """Where the stream is after the document it gave last."""
        state = self._source.state_dict() if hasattr(self._source, "state_dict") else None
        return {"rows": self.rows, "empty": self.empty, "state": state}


def _rows(name: str, **how: bool) -> Any:
    """The rows of a dataset by its name: in a folder, or on the hub."""
    parts = name.split(":")[1:]
    if not 1 <= len(parts) <= 3 or not all(parts):
        raise TextError(f"{name!r} does not name a dataset; the form is dataset:NAME[:CONFIG][:SPLIT].")
    datasets = library("datasets", f"Reading {name}", "datasets")
    folder = Path(parts[0]).expanduser()
    if folder.is_file():
        raise TextError(f"{folder} is a file. Name it without dataset:, or its folder, dataset:{folder.parent}.")
    if parts[0].startswith((".", "/", "~")) and not folder.is_dir():
        raise TextError(f"There is no folder {folder}. Give a name on the Hugging Face hub, or a folder of data files.")
    with nullcontext() if folder.is_dir() else offline_if_unreachable() as why:
        try:
            if any((folder / mark).is_file() for mark in SAVED):
                return _saved(datasets.load_from_disk(str(folder)), parts[1:], **how)
            split = parts.pop() if len(parts) > 2 or parts[-1] in SPLITS else TRAIN
            parts[0] = str(folder) if folder.is_dir() else parts[0]
            return datasets.load_dataset(*parts, split=split, **how)
        except Exception as error:  # no network, no such name or split: almost any type
            if is_out_of_memory(error):
                raise
            said = one_line(error) if why is None else f"it is no folder and not in the cache of the hub, and {why}"
            raise TextError(f"{name} cannot be read: {said}") from error


def _saved(found: Any, named: Sequence[str], streaming: bool = False) -> Any:
    """A dataset that `save_to_disk` wrote: one split, or several by name; `named` is what follows the folder."""
    usual = TRAIN if isinstance(found, Mapping) else str(found.split or TRAIN)
    splits = found if isinstance(found, Mapping) else {usual: found}
    split = ":".join(named) or usual
    if split not in splits:
        raise TextError(f"it has no split {split!r} but {', '.join(map(repr, splits))}")
    return splits[split].to_iterable_dataset() if streaming else splits[split]


def windows(tokenizer: Any, text: str, context: int, count: int | None = None) -> Tensor:
    """Consecutive windows of `context` tokens without overlap, int64 [count, context]; the remainder is dropped."""
    for name, number in (("context", context), ("count", count)):
        if number is not None and number < 1:
            raise TextError(f"{name} must be at least 1, got {number}.")
    pieces, have = [], 0
    for piece in token_pieces(tokenizer, text):
        pieces.append(piece)
        have += piece.numel()
        if count is not None and have >= count * context:
            break
    kept = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
    found = have // context if count is None else min(count, have // context)
    if found < (count or 1):
        raise TextError(
            f"The text has {have:,} tokens: {found:,} windows of {context:,}, and {count or 1:,} are needed."
            " Give a longer text or a shorter context."
        )
    return kept[: found * context].view(found, context)


def token_pieces(tokenizer: Any, text: str) -> Iterator[Tensor]:
    """The tokens of the text, piece by piece."""
    for numbers in token_lists(tokenizer, text):
        yield torch.tensor(numbers, dtype=torch.int64)


def split(windows: Tensor, calibration: int | None = None, evaluation: int | None = None) -> tuple[Tensor, Tensor]:
    """Windows for calibration and for evaluation: the first third and the rest, or these numbers of windows."""
    first = max(1, len(windows) // 3) if calibration is None else calibration
    rest = len(windows) - first if evaluation is None else evaluation
    if first < 1 or rest < 1 or first + rest > len(windows):
        raise TextError(
            f"{len(windows)} windows cannot be split into {first} for calibration and {max(rest, 1)} for evaluation."
            " Give a longer text, a shorter context, or smaller numbers, each at least 1."
        )
    return windows[:first], windows[first : first + rest]


def check_apart(calibration: Tensor, evaluation: Tensor) -> None:
    """Refuse windows of one side that occur anywhere in the text of the other side."""
    for some, others, name in ((calibration, evaluation, "calibration"), (evaluation, calibration, "evaluation")):
        shared = rows_within(some.cpu(), others.cpu().flatten())
        if shared:
            raise TextError(
                f"{len(shared)} of {len(some)} {name} windows are in the other text too, the first is window"
                f" {shared[0]}. A mask looks better on the text that chose it: give two texts that share nothing, or"
                " one to split()."
            )


def rows_within(rows: Tensor, tokens: Tensor) -> list[int]:
    """The rows that occur in the tokens at any offset, found by hash and then compared."""
    context = rows.shape[1]
    places = tokens.numel() - context + 1
    if places < 1 or not len(rows):
        return []
    powers = torch.full((tokens.numel(),), BASE, dtype=torch.int64).cumprod(0)
    # The hash is the sum of token times BASE^place, modulo 2^64; dividing by BASE^start makes it independent of start.
    sums = torch.nn.functional.pad((tokens + 1) * powers, (1, 0)).cumsum(0)
    inverse = pow(BASE, -1, 1 << 64)
    back = torch.full((places,), inverse - (inverse >> 63 << 64), dtype=torch.int64).cumprod(0)
    found, order = ((sums[context:] - sums[:-context]) * back).sort()
    mine = ((rows + 1) * powers[:context]).sum(1) * back[0]
    first = torch.searchsorted(found, mine).clamp(max=places - 1)
    starts = order[first]
    return [
        row
        for row in (found[first] == mine).nonzero().flatten().tolist()
        if torch.equal(tokens[starts[row] : starts[row] + context], rows[row])
    ]


VOCABULARY = 256  # a token is a byte
HELD_OUT = 12  # one file in twelve is held out


@dataclass(frozen=True)
class Corpus:
    """Training and held-out tokens, from different files."""

    train: Tensor
    held_out: Tensor
    files: tuple[int, int]


def standard_library() -> Corpus:
    """The modules of the running Python's standard library. A file is held out or not by its name alone."""
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
