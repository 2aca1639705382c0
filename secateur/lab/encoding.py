"""Text to token files: tokenizers by name, tokens as bytes, and worker processes that tokenize documents.

Imports no torch, so that a worker is small and starts quickly.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from array import array
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from secateur.errors import LAB_EXTRA, DataError, SecateurError, library
from secateur.files import existing_folder
from secateur.integrations.tokenizing import BETWEEN, byte_lists, token_lists

BYTES = 256  # kinds of tokens without a tokenizer
CODES = {"uint16": "H", "uint32": "I"}  # type codes of Python's arrays
AHEAD = 2  # blocks in work or waiting, for each worker
GPT2 = "gpt2:"
GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # the names at OpenAI and at Hugging Face
Place = TypeVar("Place")


def read_tokenizer(name: str) -> Any:
    """A tokenizer of the library `tokenizers`; None for bytes."""
    if name == "byte":
        return None
    tokenizers = library("tokenizers", f"The tokenizer {name}", LAB_EXTRA)
    if name.startswith(GPT2):
        return _gpt2(tokenizers, existing_folder(name.removeprefix(GPT2)))
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(f"There is no tokenizer {name}. Use byte, a tokenizer.json, or gpt2:FOLDER.")
    try:
        found = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise DataError(f"{path} is not a tokenizer.json: {error}.") from error
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
    except Exception as error:  # the library raises no narrower class
        raise DataError(f"{vocabulary} and {merges.name} are not a byte-level BPE tokenizer: {error}.") from error
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    return found


def vocabulary_of(encoder: Any) -> int:
    """Kinds of tokens of a tokenizer; None is bytes."""
    return BYTES if encoder is None else 1 + max(encoder.get_vocab().values())


def dtype_for(vocabulary: int) -> str:
    """The type that token files of such a vocabulary have."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def token_numbers(encoder: Any, text: str) -> Iterator[list[int]]:
    """The tokens of a text, in pieces."""

    def encode(piece: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": encoder.encode(piece, add_special_tokens=False).ids}

    return byte_lists(text) if encoder is None else token_lists(encode, text)


def token_bytes(dtype: str, numbers: Iterable[int]) -> bytes:
    """Tokens as they are in a file: flat and little-endian on any machine."""
    tokens = array(CODES[dtype], numbers)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def is_held_out(document: bytes, share: float) -> bool:
    """Whether a document is held out, by a hash of its bytes: copies land on the same side, in any order."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") < share * 2**64


@dataclass(frozen=True)
class Encoding:
    """What a worker needs to know: the tokenizer as JSON (None: bytes), the files' dtype, the share held out."""

    tokenizer: str | None
    dtype: str
    held_out: float


@dataclass(frozen=True)
class Encoded:
    """Documents as tokens: of each whether it is held out and its number of tokens, and the bytes of both parts."""

    documents: list[tuple[bool, int]]
    train: bytes
    held_out: bytes


def encoded(documents: Iterable[str], encoder: Any, encoding: Encoding) -> Encoded:
    """The tokens of documents, each followed by an empty line."""
    found: list[tuple[bool, int]] = []
    parts = bytearray(), bytearray()
    for document in documents:
        text = document.encode(errors="replace").decode() + BETWEEN  # a source may hold half of a surrogate pair
        apart, count = is_held_out(text.encode(), encoding.held_out), 0
        for numbers in token_numbers(encoder, text):
            parts[apart].extend(token_bytes(encoding.dtype, numbers))
            count += len(numbers)
        found.append((apart, count))
    return Encoded(found, bytes(parts[False]), bytes(parts[True]))


def encode_blocks(
    blocks: Iterable[tuple[Sequence[str], Place]], encoding: Encoding, workers: int
) -> Generator[tuple[Encoded, Place], None, None]:
    """Tokenize blocks of documents in `workers` processes (1: in this one), and yield them in their order, each with
    the place that came with it. At most AHEAD blocks for each worker are in memory."""
    if workers == 1:
        encoder = _from_text(encoding.tokenizer)
        for documents, place in blocks:
            yield encoded(documents, encoder, encoding), place
        return
    # A spawned process imports this module alone; a forked one would inherit torch's and the dataset's threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (encoding,))
    waiting: deque[tuple[Future[Encoded], Place]] = deque()
    try:
        for documents, place in blocks:
            waiting.append((pool.submit(_work, documents), place))
            if len(waiting) >= AHEAD * workers:
                done, where = waiting.popleft()
                yield done.result(), where
        for done, where in waiting:
            yield done.result(), where
    except BrokenProcessPool as error:
        raise SecateurError(
            "A worker process ended unexpectedly, perhaps for lack of memory. The same command continues; with fewer"
            f" --workers than {workers} it takes less memory."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Any, Encoding] | None = None  # of a worker process: its tokenizer and settings


def _from_text(tokenizer: str | None) -> Any:
    if tokenizer is None:
        return None
    return library("tokenizers", "A tokenizer", LAB_EXTRA).Tokenizer.from_str(tokenizer)


def _begin_worker(encoding: Encoding) -> None:
    global _worker
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = _from_text(encoding.tokenizer), encoding


def end_with_parent() -> None:
    """In a worker process: leave Ctrl-C, which reaches the whole group, to the parent, which ends its workers; and end
    when the parent was killed and cannot."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (parent := multiprocessing.parent_process()) is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(documents: Sequence[str]) -> Encoded:
    assert _worker is not None
    return encoded(documents, *_worker)
