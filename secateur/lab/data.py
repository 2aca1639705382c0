"""Text as tokens: what a language model trains on, and what it is judged on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.errors import DataError, nearest
from secateur.files import existing_folder, read_json
from secateur.integrations import text
from secateur.integrations.text import BETWEEN, stream_documents
from secateur.lab.images import Images, cifar, digits, fingerprint_of, generator, mnist

HELD_OUT = 10  # one part in so many, where the data does not come split
STREAMED = 1 << 27  # bytes read of a dataset that arrives as a stream
CHUNK = 1 << 22  # tokens looked at together when the largest is sought
DTYPES = {"uint16": torch.uint16, "uint32": torch.int32}  # torch reads uint32 as int32: no vocabulary reaches 2^31


@dataclass(frozen=True, eq=False)
class Tokens:
    """Flat training and held-out tokens; those of .bin files stay on disk and are read as they are used."""

    train: Tensor
    held_out: Tensor
    vocabulary: int
    name: str

    def batch(self, step: int, size: int, context: int, seed: int) -> Tensor:
        """Random windows of the training tokens: int64 [size, context + 1]; depends on the arguments alone."""
        self._check_room(self.train, "training", context)
        starts = torch.randint(0, self.train.numel() - context, (size,), generator=generator("tokens", seed, step))
        return self._windows(self.train, starts, context)

    def evaluation(self, context: int, most: int | None = None) -> Tensor:
        """Consecutive windows of the held-out tokens, none overlapping: int64 [n, context + 1].

        All of them, so that only an end shorter than a window is left out; or `most` of them, spread evenly.
        """
        self._check_room(self.held_out, "held-out", context)
        count = self.held_out.numel() // (context + 1)
        taken = count if most is None else min(most, count)
        if taken < 1:
            raise DataError(f"{most} windows evaluate nothing; ask for at least 1 of the {count:,} in {self.name}.")
        starts = torch.arange(taken) * count // taken * (context + 1)
        return self._windows(self.held_out, starts, context)

    def fingerprint(self) -> str:
        """What tells this data from other data of the same name."""
        return fingerprint_of(self.train, self.held_out)

    def check_vocabulary(self, model: int) -> None:
        """Refuse a model that has no embedding for some of these tokens."""
        if self.vocabulary > model:
            raise DataError(
                f"{self.name} has a vocabulary of {self.vocabulary:,}, the model one of {model:,}. Give the model at"
                f" least {self.vocabulary:,}, or tokenize the text with the model's own tokenizer."
            )

    def _check_room(self, tokens: Tensor, which: str, context: int) -> None:
        if context < 1 or tokens.numel() <= context:
            raise DataError(
                f"{self.name} has {tokens.numel():,} {which} tokens; a window of context {context:,} takes"
                f" {context + 1:,}. Use a context of at least 1 that fits, or more text."
            )

    def _windows(self, tokens: Tensor, starts: Tensor, context: int) -> Tensor:
        found = tokens[starts[:, None] + torch.arange(context + 1)].long()
        low, high = (int(edge) for edge in found.aminmax())
        if low < 0 or high >= self.vocabulary:
            raise DataError(
                f"{self.name} holds the token {high if low >= 0 else low}, outside its vocabulary of"
                f" {self.vocabulary:,}: its tokenizer or dtype is another than meta.json or tokenizer.json says."
            )
        return found


def python_tokens(name: str) -> Tokens:
    """The bytes of Python's standard library."""
    found = text.standard_library()
    return Tokens(found.train, found.held_out, text.VOCABULARY, name)


def text_tokens(path: str, name: str) -> Tokens:
    """The bytes of a file, the last tenth held out."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{file} is {'a folder' if file.exists() else 'not there'}; text:FILE takes one file.")
    size = file.stat().st_size
    if size < HELD_OUT:
        raise DataError(f"{file} has {size} bytes, too few to hold a tenth of them out. Give a longer text.")
    mapped = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    first = size - size // HELD_OUT
    return Tokens(mapped[:first], mapped[first:], text.VOCABULARY, name)


def dataset_tokens(path: str, name: str) -> Tokens:
    """The bytes of the first documents of a Hugging Face dataset, streamed; a tenth of the documents is held out."""
    parts = split_by_content(stream_documents(f"dataset:{path}"))
    if not all(parts):
        raise DataError(f"{name} has too few documents to hold a tenth of them out.")
    train, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return Tokens(train, held_out, text.VOCABULARY, name)


def split_by_content(documents: Iterable[str]) -> tuple[bytearray, bytearray]:
    """Training and held-out bytes. A document's content says where it goes, so its copies go there too."""
    parts = bytearray(), bytearray()
    for document in documents:
        raw = (document + BETWEEN).encode()
        parts[zlib.crc32(raw) % HELD_OUT == 0].extend(raw)
        if sum(map(len, parts)) >= STREAMED:
            break
    return parts


def file_tokens(path: str, name: str) -> Tokens:
    """train.bin and val.bin of a folder, flat little-endian numbers, with meta.json or tokenizer.json beside them."""
    folder = existing_folder(path)
    meta = read_json(folder / "meta.json", dict) if (folder / "meta.json").exists() else {}
    told = meta.get("vocabulary", meta.get("vocab_size", _tokenizer_size(folder)))
    if told is not None and (type(told) is not int or told < 1):
        raise DataError(f"{folder / 'meta.json'} says vocabulary {told!r}; a whole number of at least 1 is needed.")
    dtype = meta.get("dtype", "uint16")
    if dtype not in DTYPES:
        raise DataError(f"{folder / 'meta.json'} says dtype {dtype!r}; {' and '.join(DTYPES)} are known.")
    if dtype == "uint16" and (told or 0) > 1 << 16:
        raise DataError(
            f'{folder} has {told:,} tokens, more than uint16 holds. Write meta.json: {{"dtype": "uint32"}}.'
        )
    train, held_out = (_mapped(folder / f"{part}.bin", dtype, _count(meta, part)) for part in ("train", "val"))
    return Tokens(train, held_out, told or 1 + max(map(_largest, (train, held_out))), name)


def _count(meta: dict[str, Any], part: str) -> int | None:
    counts = meta.get("tokens")
    return counts.get(part) if isinstance(counts, dict) else None


def _mapped(path: Path, dtype: str, count: int | None) -> Tensor:
    if not path.is_file():
        raise DataError(f"There is no {path.name} in {path.parent}. `secateur data TEXT --out FOLDER` writes one.")
    size, each = path.stat().st_size, DTYPES[dtype].itemsize
    if size == 0 or size % each or count not in (None, size // each):
        should = f"{count * each:,} bytes" if count else f"a multiple of {each} bytes and at least one token"
        raise DataError(f"{path} has {size:,} bytes of {dtype}; it should have {should}: truncated? Write it again.")
    return torch.from_file(str(path), shared=False, size=size // each, dtype=DTYPES[dtype])


def _tokenizer_size(folder: Path) -> int | None:
    """One more than the largest number in tokenizer.json, if it is there."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    found = read_json(path, dict)
    try:
        known = found["model"]["vocab"]
        numbers = list(known.values()) if isinstance(known, dict) else list(range(len(known)))  # Unigram has a list
        return 1 + max(numbers + [token["id"] for token in found.get("added_tokens", [])])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f'{path} holds no vocabulary: {error!r}. Say it in meta.json: {{"vocabulary": N}}.') from error


def _largest(tokens: Tensor) -> int:
    return max(int(part.long().max()) for part in tokens.split(CHUNK))


__all__ = ["FORMS", "Images", "Tokens", "load"]

Reader = Callable[[str, str], Tokens | Images]  # what follows the colon, and the whole for the name
READERS: dict[str, Reader] = {
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
FORMS = {form.partition(":")[0]: form for form in READERS}


def load(spec: str) -> Tokens | Images:
    """The data that a spec names; see FORMS for all there are."""
    word, _, rest = spec.partition(":")
    if word not in FORMS:
        raise DataError(f"No data {spec!r}.{nearest(word, FORMS)} Use one of {', '.join(FORMS.values())}.")
    form = FORMS[word]
    if bool(rest) != (":" in form):
        raise DataError(f"{spec!r} {'says too much' if rest else 'does not say where'}; the form is {form!r}.")
    return READERS[form](rest, spec)
