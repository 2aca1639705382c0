"""Datasets by name: one table of them, text as tokens, and `secateur data`, which turns text into token files."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.errors import DataError, nearest
from secateur.files import appearing, check_folder, check_room, claimed, existing_folder, read_json, write
from secateur.integrations.folder import check_free
from secateur.integrations.text import VOCABULARY, read_documents, standard_library, stream_documents
from secateur.integrations.tokenizing import BETWEEN
from secateur.lab.encoding import (
    CODES,
    dtype_for,
    is_held_out,
    read_tokenizer,
    token_bytes,
    token_numbers,
    vocabulary_of,
)
from secateur.lab.images import Images, cifar, digits, fingerprint_of, generator, mnist
from secateur.lab.shards import PARTS, Shards, prepare_stream, read_shards

__all__ = ["FORMS", "Images", "Tokens", "load", "prepare"]

HELD_OUT = 10  # one part in ten is held out where the data does not come split
STREAMED = 1 << 27  # bytes read of a streamed dataset
CHUNK = 1 << 22  # tokens at a time in the search for the largest one
DTYPES = {"uint16": torch.uint16, "uint32": torch.int32}  # torch maps uint32 as int32: no vocabulary reaches 2^31
LETTERS_PER_TOKEN = 4  # a rough guess for tokenizers, to check the free disk space
DATASET = "dataset:"


@dataclass(frozen=True, eq=False)
class Tokens:
    """Flat training and held-out tokens; .bin files are memory-mapped."""

    train: Tensor | Shards
    held_out: Tensor | Shards
    vocabulary: int
    name: str

    def batch(self, step: int, size: int, context: int, seed: int) -> Tensor:
        """Random windows of the training tokens, int64 [size, context + 1]; a function of the arguments alone."""
        self._check_room(self.train, "training", context)
        starts = torch.randint(0, self.train.numel() - context, (size,), generator=generator("tokens", seed, step))
        return self._windows(self.train, starts, context)

    def evaluation(self, context: int, most: int | None = None) -> Tensor:
        """Consecutive held-out windows without overlap, int64 [n, context + 1]: all, or `most` of them evenly spread.

        A remainder shorter than a window is dropped.
        """
        self._check_room(self.held_out, "held-out", context)
        count = self.held_out.numel() // (context + 1)
        taken = count if most is None else min(most, count)
        if taken < 1:
            raise DataError(f"evaluation must be at least 1 window, got {most}; {self.name} has {count:,}.")
        starts = torch.arange(taken) * count // taken * (context + 1)
        return self._windows(self.held_out, starts, context)

    def fingerprint(self) -> str:
        """A hash that tells this data from other data of the same name."""
        parts = [part.parts if isinstance(part, Shards) else [part] for part in (self.train, self.held_out)]
        return fingerprint_of(*parts[0], *parts[1])

    def check_vocabulary(self, model: int) -> None:
        """Refuse a model whose embedding is smaller than this vocabulary."""
        if self.vocabulary > model:
            raise DataError(
                f"{self.name} has a vocabulary of {self.vocabulary:,}, the model one of {model:,}. Give the model at"
                f" least {self.vocabulary:,}, or tokenize the text with the model's own tokenizer."
            )

    def _check_room(self, tokens: Tensor | Shards, which: str, context: int) -> None:
        if context < 1 or tokens.numel() <= context:
            raise DataError(
                f"{self.name} has {tokens.numel():,} {which} tokens; a window of context {context:,} takes"
                f" {context + 1:,}. Use a context of at least 1 that fits, or more text."
            )

    def _windows(self, tokens: Tensor | Shards, starts: Tensor, context: int) -> Tensor:
        found = tokens[starts[:, None] + torch.arange(context + 1)].long()
        low, high = (int(edge) for edge in found.aminmax())
        if low < 0 or high >= self.vocabulary:
            raise DataError(
                f"{self.name} holds the token {high if low >= 0 else low}, outside its vocabulary of"
                f" {self.vocabulary:,}: check the vocabulary and dtype in its meta.json or tokenizer.json."
            )
        return found


def python_tokens(name: str) -> Tokens:
    """The source of Python's standard library, as bytes."""
    found = standard_library()
    return Tokens(found.train, found.held_out, VOCABULARY, name)


def text_tokens(path: str, name: str) -> Tokens:
    """A file as bytes; the last tenth is held out."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{file} is {'a folder' if file.exists() else 'not there'}; text:FILE takes one file.")
    size = file.stat().st_size
    if size < HELD_OUT:
        raise DataError(f"{file} has {size} bytes, too few to hold out a tenth. Give a longer text.")
    mapped = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    first = size - size // HELD_OUT
    return Tokens(mapped[:first], mapped[first:], VOCABULARY, name)


def dataset_tokens(path: str, name: str) -> Tokens:
    """The first documents of a Hugging Face dataset as bytes, streamed; a tenth of the documents is held out."""
    parts = split_by_content(stream_documents(f"dataset:{path}"))
    if not all(parts):
        raise DataError(f"{name} has too few documents to hold out a tenth. Use a larger dataset or split.")
    train, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return Tokens(train, held_out, VOCABULARY, name)


def split_by_content(documents: Iterable[str]) -> tuple[bytearray, bytearray]:
    """Training and held-out bytes. The split is by a hash of the document, so that copies land on the same side."""
    parts = bytearray(), bytearray()
    for document in documents:
        raw = (document + BETWEEN).encode()
        parts[is_held_out(raw, 1 / HELD_OUT)].extend(raw)
        if sum(map(len, parts)) >= STREAMED:
            break
    return parts


def file_tokens(path: str, name: str) -> Tokens:
    """train.bin and val.bin of a folder, flat little-endian integers, with an optional meta.json or tokenizer.json; or
    the shards that its meta.json lists."""
    folder = existing_folder(path)
    meta = read_json(folder / "meta.json", dict) if (folder / "meta.json").exists() else {}
    size = meta.get("vocabulary", meta.get("vocab_size", _tokenizer_size(folder)))
    if size is not None and (type(size) is not int or size < 1):
        raise DataError(f"{folder / 'meta.json'} says vocabulary {size!r}; it must be a whole number of at least 1.")
    dtype = meta.get("dtype", "uint16")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DataError(f"{folder / 'meta.json'} says dtype {dtype!r}; {' and '.join(DTYPES)} are known.")
    if dtype == "uint16" and (size or 0) > 1 << 16:
        raise DataError(
            f'{folder} has a vocabulary of {size:,}, too large for uint16. Put {{"dtype": "uint32"}} into meta.json.'
        )
    if "shards" in meta and size is not None:
        train, held_out = (read_shards(folder, meta, partial(_mapped, dtype), part) for part in PARTS)
        return Tokens(train, held_out, size, name)
    mapped = [_mapped(dtype, folder / f"{part}.bin", _count(meta, part)) for part in PARTS]
    return Tokens(mapped[0], mapped[1], size or 1 + max(map(_largest, mapped)), name)


def _count(meta: dict[str, Any], part: str) -> int | None:
    counts = meta.get("tokens")
    return counts.get(part) if isinstance(counts, dict) else None


def _mapped(dtype: str, path: Path, count: int | None) -> Tensor:
    if not path.is_file():
        raise DataError(f"There is no {path.name} in {path.parent}. `secateur data TEXT --out FOLDER` writes one.")
    size, each = path.stat().st_size, DTYPES[dtype].itemsize
    if size == 0 or size % each or count not in (None, size // each):
        should = f"{count * each:,} bytes" if count else f"a multiple of {each} bytes and at least one token"
        raise DataError(f"{path} has {size:,} bytes of {dtype}; it should have {should}: truncated? Write it again.")
    return torch.from_file(str(path), shared=False, size=size // each, dtype=DTYPES[dtype])


def _tokenizer_size(folder: Path) -> int | None:
    """The vocabulary size according to tokenizer.json, if there is one."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    found = read_json(path, dict)
    try:
        known = found["model"]["vocab"]
        numbers = list(known.values()) if isinstance(known, dict) else list(range(len(known)))  # Unigram has a list
        return 1 + max(numbers + [token["id"] for token in found.get("added_tokens", [])])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f'{path} has no vocabulary: {error!r}. Put {{"vocabulary": N}} into meta.json.') from error


def _largest(tokens: Tensor) -> int:
    return max(int(part.long().max()) for part in tokens.split(CHUNK))


# Every dataset: the form users write, and a function of what follows the colon and of the whole name. A new dataset is
# one more entry.
DATASETS: dict[str, Callable[[str, str], Tokens | Images]] = {
    "python": lambda _, name: python_tokens(name),
    "digits": lambda _, name: digits(name),
    "tokens:FOLDER": file_tokens,
    "text:FILE": text_tokens,
    "dataset:NAME[:CONFIG]": dataset_tokens,
    "mnist:FOLDER": mnist,
    "fashion-mnist:FOLDER": mnist,
    "cifar10:FOLDER": lambda path, name: cifar(path, name, 10),
    "cifar100:FOLDER": lambda path, name: cifar(path, name, 100),
}
FORMS = {form.partition(":")[0]: form for form in DATASETS}


def load(spec: str) -> Tokens | Images:
    """The dataset named by `spec`, such as "python" or "mnist:FOLDER"; FORMS lists all of them."""
    word, _, rest = spec.partition(":")
    if word not in FORMS:
        raise DataError(f"There is no dataset {spec!r}.{nearest(word, FORMS)} Use one of {', '.join(FORMS.values())}.")
    form = FORMS[word]
    if bool(rest) != (":" in form):
        raise DataError(f"{spec!r} {'takes nothing after the colon' if rest else 'lacks a place'}: write {form!r}.")
    return DATASETS[form](rest, spec)


def prepare(
    source: str,
    out: Path,
    tokenizer: str = "byte",
    held_out: float = 0.1,
    *,
    overwrite: bool = False,
    **streamed: Any,
) -> dict[str, Any]:
    """Write token files, meta.json and the tokenizer into a folder; returns what is in meta.json.

    The folder appears only when it is complete. `held_out` is the fraction of the text for validation. A `dataset:` is
    streamed into shards, with the settings `tokens`, `column` and `workers` (see `prepare_stream`); other text is read
    whole into train.bin and val.bin.
    """
    folder = out.expanduser().absolute()
    if not 0 < held_out < 1:
        raise DataError(f"--held-out must be a fraction between 0 and 1, such as 0.1; got {held_out:g}.")
    given = [f"--{name}" for name, value in streamed.items() if value is not None]
    if given and not source.startswith(DATASET):
        raise DataError(f"{' and '.join(given)} goes with dataset:NAME, which is streamed; {source} is read whole.")
    with claimed(folder):
        check_free(folder, overwrite, "data set", ("meta.json",))
        check_folder(folder)
        if not source.startswith(DATASET):
            return _prepare(source, folder, tokenizer, held_out)
        wanted = {name: value for name, value in streamed.items() if value is not None}
        return prepare_stream(source, folder, tokenizer, held_out, overwrite=overwrite, **wanted)


def _prepare(source: str, folder: Path, tokenizer: str, held_out: float) -> dict[str, Any]:
    encoder = read_tokenizer(tokenizer)
    size = vocabulary_of(encoder)
    dtype = dtype_for(size)
    documents = read_documents(source)
    letters = sum(map(len, documents)) // (1 if encoder is None else LETTERS_PER_TOKEN)
    check_room(folder, letters * array(CODES[dtype]).itemsize)
    digest = hashlib.sha256(BETWEEN.join(documents).encode()).hexdigest()
    with appearing(folder) as fresh:
        parts = zip(PARTS, split_documents(documents, held_out), strict=True)
        counts = {part: _write(fresh / f"{part}.bin", dtype, token_numbers(encoder, text)) for part, text in parts}
        if not all(counts.values()):
            found = " and ".join(f"{count:,} tokens in {part}.bin" for part, count in counts.items())
            raise DataError(f"{source} would give {found}. Give a longer text.")
        if encoder is not None:
            write(fresh / "tokenizer.json", encoder.to_str(pretty=True))
        meta = {"vocabulary": size, "dtype": dtype, "tokens": counts, "tokenizer": tokenizer}
        meta |= {"source": source, "sha256": digest, "held_out": held_out}
        write(fresh / "meta.json", json.dumps(meta, indent=1) + "\n")
    return meta


def split_documents(documents: Sequence[str], share: float) -> tuple[str, str]:
    """Training and held-out text. Whole documents from the end are held out; a single document is split in two.

    Copies of held-out documents are removed from the training text.
    """
    if len(documents) == 1:
        place = _boundary(documents[0], share)
        return documents[0][:place], documents[0][place:]
    wanted, first = share * sum(map(len, documents)), len(documents)
    while wanted > 0 and first > 1:
        first -= 1
        wanted -= len(documents[first])
    held_out = set(documents[first:])
    train = [document for document in documents[:first] if document not in held_out]
    if len(train) < first:
        copies = first - len(train)
        print(f"secateur: removed {copies:,} copies of held-out documents from the training text", file=sys.stderr)
    return BETWEEN.join(train), BETWEEN.join(documents[first:])


def _boundary(text: str, share: float) -> int:
    """Where to split a document: after the next paragraph, line or word that ends in the first half of the rest."""
    place = round(len(text) * (1 - share))
    for mark in (BETWEEN, "\n", " "):
        found = text.find(mark, place, (place + len(text)) // 2)
        if found >= 0:
            return found + len(mark)
    return place


def _write(path: Path, dtype: str, pieces: Iterable[Sequence[int]]) -> int:
    """Write the tokens and return how many there were."""
    count = 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(token_bytes(dtype, piece))
            count += len(piece)
    return count
