"""Text for calibration and evaluation: read it, cut it into windows of tokens, keep the two apart."""

from __future__ import annotations

import json
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.errors import SecateurError, TextError, library

PIECE = 1 << 18  # characters tokenized at once, so that memory does not grow with the text
REACH = 1 << 14  # characters before a piece's end in which a place to cut is sought
AROUND = 200  # characters on either side that decide whether a cut changes the tokens
TRIES = 20
BETWEEN = "\n\n"  # what stands between documents, as in the published tables of WikiText-2
SOURCES = "a file, FILE.jsonl[:FIELD], dataset:NAME[:CONFIG][:SPLIT] or builtin"
SPLITS = ("train", "validation", "test")
BASE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that it has an inverse modulo 2^64


def read_text(source: str | Path) -> str:
    """The text of a file, of `FILE.jsonl[:FIELD]`, of `dataset:NAME[:CONFIG][:SPLIT]`, or of "builtin".

    "builtin" is the source of Python's standard library. A dataset is read from Hugging Face's `datasets`, from its
    split "train" unless another is named; it and a .jsonl file are read from the field "text" unless another is named.
    """
    return BETWEEN.join(read_documents(source))


def read_documents(source: str | Path) -> list[str]:
    """The same, document by document: a line of a .jsonl file, a row of a dataset; any other text is one."""
    name = str(source)
    if name == "builtin":
        corpus = standard_library()
        texts = [bytes(torch.cat((corpus.train, corpus.held_out)).tolist()).decode(errors="replace")]
    elif name.startswith("dataset:"):
        texts = _dataset(name)
    else:
        path, separator, field = name.rpartition(":")
        if not (separator and path.endswith(".jsonl")):
            path, field = name, "text"
        text = _file(Path(path))
        texts = _documents(text, path, field) if path.endswith(".jsonl") else [text]
    if not any(text.strip() for text in texts):
        raise TextError(f"{name} holds no text.")
    return texts


def _file(path: Path) -> str:
    if path.is_dir():
        raise TextError(f"{path} is a folder. Give one text file or one .jsonl file.")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TextError(f"There is no file {path}. Text is read from {SOURCES}.") from None
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text: byte {error.start} does not fit. Convert it first.") from error
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}.") from error


def _documents(lines: str, path: str, field: str) -> list[str]:
    """One JSON object a line, each with a string under this field."""
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
            found = ", ".join(map(repr, document)) if isinstance(document, dict) else f"a {type(document).__name__}"
            raise TextError(
                f"Line {number} of {path} has no text under {field!r}; it has {found}. Name the field: {path}:FIELD."
            )
        texts.append(text.encode(errors="replace").decode())  # JSON may hold half of a surrogate pair
    return texts


def _dataset(name: str) -> list[str]:
    rows = _rows(name)
    if "text" not in rows.column_names:
        raise TextError(f"{name} has no column 'text'; it has {', '.join(map(repr, rows.column_names))}.")
    return list(rows["text"])


def stream_documents(name: str) -> Iterator[str]:
    """The documents of a dataset as they arrive, none kept: for one too large to download."""
    try:
        for row in _rows(name, streaming=True):
            if not isinstance(row.get("text"), str):
                raise TextError(f"{name} has no column 'text'; it has {', '.join(map(repr, row))}.")
            yield row["text"]
    except TextError:
        raise
    except Exception as error:  # of many kinds: the network between one row and the next, a damaged file
        raise TextError(f"{name} cannot be read on: {error}") from error


def _rows(name: str, **how: bool) -> Any:
    parts = name.split(":")[1:]
    split = parts.pop() if len(parts) > 2 or parts[-1] in SPLITS else "train"
    if not 1 <= len(parts) <= 2 or not all((*parts, split)):
        raise TextError(f"{name!r} does not name a dataset; the form is dataset:NAME[:CONFIG][:SPLIT].")
    datasets = library("datasets", f"Reading {name}", "datasets")
    try:
        return datasets.load_dataset(*parts, split=split, **how)
    except Exception as error:  # of many kinds: no network, no such name, no such split
        raise TextError(f"{name} cannot be read: {error}") from error


def windows(tokenizer: Any, text: str, context: int, count: int | None = None) -> Tensor:
    """Consecutive windows of `context` tokens that do not overlap: int64 [count, context]; what is left is dropped."""
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
    """The tokens of the text, some of them at a time."""
    start = 0
    while start < len(text):
        end, following = _cut(tokenizer, text, start + PIECE)
        yield torch.tensor(_encode(tokenizer, text[start:end]), dtype=torch.int64)
        start = following


def _encode(tokenizer: Any, text: str) -> list[int]:
    # Not verbose: longer than the model's context is what we mean it to be.
    try:
        numbers: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return numbers
    except (AttributeError, KeyError, TypeError) as error:  # a setting of the wrong type, found only when it is used
        raise TextError(f"{type(tokenizer).__name__} cannot read text: {error}. Is its file damaged?") from error


def _cut(tokenizer: Any, text: str, near: int) -> tuple[int, int]:
    """Where a piece ends and the next begins, so that the pieces give the tokens of the whole.

    Tried between words. Tokenizers that put a space before every text want the one between them left out.
    """
    if near >= len(text):
        return len(text), len(text)
    for space in islice(re.compile(r"(?<=\w) (?=\w)").finditer(text, near - min(REACH, PIECE // 2), near), TRIES):
        cut = space.start()
        begin = max(0, cut - AROUND)
        whole, before = _encode(tokenizer, text[begin : cut + AROUND]), _encode(tokenizer, text[begin:cut])
        for following in (cut, cut + 1):
            if before + _encode(tokenizer, text[following : cut + AROUND]) == whole:
                return cut, following
    return near, near


def split(windows: Tensor, calibration: int | None = None, evaluation: int | None = None) -> tuple[Tensor, Tensor]:
    """Windows that calibrate and windows that evaluate: the first third and the rest, or as many as are named."""
    first = max(1, len(windows) // 3) if calibration is None else calibration
    rest = len(windows) - first if evaluation is None else evaluation
    if first < 1 or rest < 1 or first + rest > len(windows):
        raise TextError(
            f"{len(windows)} windows do not part into {first} that calibrate and {max(rest, 1)} that evaluate."
            " Give a longer text, a shorter context, or smaller numbers, each at least 1."
        )
    return windows[:first], windows[first : first + rest]


def check_apart(calibration: Tensor, evaluation: Tensor) -> None:
    """Refuse windows that share text: one that lies anywhere in the consecutive windows of the other side."""
    for some, others, name in ((calibration, evaluation, "calibration"), (evaluation, calibration, "evaluation")):
        shared = _within(some.cpu(), others.cpu().flatten())
        if shared:
            raise TextError(
                f"{len(shared)} of {len(some)} {name} windows are in the other text too, the first of them window"
                f" {shared[0]}. A text that chose the mask flatters it: give two that share nothing, or one to split()."
            )


def _within(rows: Tensor, tokens: Tensor) -> list[int]:
    """Which rows occur in the tokens, at any offset: found by their hashes, then compared."""
    context = rows.shape[1]
    places = tokens.numel() - context + 1
    if places < 1 or not len(rows):
        return []
    powers = torch.full((tokens.numel(),), BASE, dtype=torch.int64).cumprod(0)
    # A hash is the sum of token times BASE^place, modulo 2^64; dividing by BASE^start makes it the same at any start.
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
HELD_OUT = 12  # one file in so many


@dataclass(frozen=True)
class Corpus:
    """Training and held-out tokens, from different files."""

    train: Tensor
    held_out: Tensor
    files: tuple[int, int]


def standard_library() -> Corpus:
    """Every module of the running Python's standard library. Which files are held out depends on their names alone."""
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
