"""`secateur data`: text to a folder of tokens that `tokens:FOLDER` reads, held-out text apart from training text."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from secateur.errors import DataError, library
from secateur.files import appearing, check_folder, check_room, claimed, existing_folder, write
from secateur.integrations.folder import check_free
from secateur.integrations.text import BETWEEN, PIECE, VOCABULARY, read_documents, token_pieces

CODES = {"uint16": "H", "uint32": "I"}  # as Python's arrays call them
LETTERS = 4  # of a token, about, where tokens are not bytes
GPT2 = "gpt2:"
GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # as OpenAI and as Hugging Face name them


def prepare(
    source: str, out: Path, tokenizer: str = "byte", held_out: float = 0.1, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write train.bin, val.bin, meta.json and the tokenizer; the folder appears when whole. Gives what is in meta."""
    folder = out.expanduser().absolute()
    if not 0 < held_out < 1:
        raise DataError(f"--held-out is a share between 0 and 1, both left out; got {held_out:g}.")
    with claimed(folder):
        check_free(folder, overwrite, "data set", ("meta.json",))
        check_folder(folder)
        return _prepare(source, folder, tokenizer, held_out)


def _prepare(source: str, folder: Path, tokenizer: str, held_out: float) -> dict[str, Any]:
    encoder = read_tokenizer(tokenizer)
    size = VOCABULARY if encoder is None else 1 + max(encoder.get_vocab().values())
    dtype = "uint16" if size <= 1 << 16 else "uint32"
    documents = read_documents(source)
    letters = sum(map(len, documents)) // (1 if encoder is None else LETTERS)
    check_room(folder, letters * array(CODES[dtype]).itemsize)
    digest = hashlib.sha256(BETWEEN.join(documents).encode()).hexdigest()
    with appearing(folder) as partial:
        parts = zip(("train", "val"), split_documents(documents, held_out), strict=True)
        counts = {part: _write(partial / f"{part}.bin", CODES[dtype], _numbers(encoder, text)) for part, text in parts}
        if not all(counts.values()):
            raise DataError(f"{source} gives {counts['train']:,} and {counts['val']:,} tokens. Give a longer text.")
        if encoder is not None:
            encoder.save(str(partial / "tokenizer.json"))
        told = {"vocabulary": size, "dtype": dtype, "tokens": counts, "tokenizer": tokenizer}
        meta = {**told, "source": source, "sha256": digest, "held_out": held_out}
        write(partial / "meta.json", json.dumps(meta, indent=1) + "\n")
    return meta


def read_tokenizer(name: str) -> Any:
    """A tokenizer of the library `tokenizers`; None where tokens are bytes."""
    if name == "byte":
        return None
    tokenizers = library("tokenizers", f"The tokenizer {name}", "'secateur[lab]'")
    if name.startswith(GPT2):
        return _gpt2(tokenizers, existing_folder(name.removeprefix(GPT2)))
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(f"There is no tokenizer {name}. Use byte, a tokenizer.json, or gpt2:FOLDER.")
    try:
        found = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise DataError(f"{path} is no tokenizer.json: {error}.") from error
    found.no_truncation()
    found.no_padding()
    return found


def _gpt2(tokenizers: Any, folder: Path) -> Any:
    for names in GPT2_FILES:
        vocabulary, merges = (folder / name for name in names)
        if vocabulary.is_file() and merges.is_file():
            break
    else:
        pairs = ", or ".join(" and ".join(names) for names in GPT2_FILES)
        raise DataError(f"{folder} does not hold GPT-2's tokenizer: {pairs}.")
    try:
        found = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # as above
        raise DataError(f"{vocabulary} and {merges.name} are no byte-level BPE: {error}.") from error
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    return found


def split_documents(documents: Sequence[str], share: float) -> tuple[str, str]:
    """Training and held-out text: whole documents from the end; one document is cut between paragraphs or lines.

    Copies of held-out documents are taken out of the training text.
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
        copies = f"secateur: {first - len(train):,} copies of held-out documents are left out of the training text"
        print(copies, file=sys.stderr)
    return BETWEEN.join(train), BETWEEN.join(documents[first:])


def _boundary(text: str, share: float) -> int:
    """Where the held-out end begins: after the next paragraph, line or word, if one ends in the half that follows."""
    place = round(len(text) * (1 - share))
    for mark in (BETWEEN, "\n", " "):
        found = text.find(mark, place, (place + len(text)) // 2)
        if found >= 0:
            return found + len(mark)
    return place


def _numbers(encoder: Any, text: str) -> Iterator[Iterable[int]]:
    """The tokens of a text, some of them at a time."""
    if encoder is None:
        for start in range(0, len(text), PIECE):
            yield list(text[start : start + PIECE].encode())
        return

    def encode(piece: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": encoder.encode(piece, add_special_tokens=False).ids}

    for numbers in token_pieces(encode, text):
        yield numbers.tolist()


def _write(path: Path, code: str, pieces: Iterable[Iterable[int]]) -> int:
    """Little endian, on any machine; how many tokens there were."""
    count = 0
    with path.open("wb") as file:
        for piece in pieces:
            numbers = array(code, piece)
            if sys.byteorder == "big":
                numbers.byteswap()
            numbers.tofile(file)
            count += len(numbers)
    return count
