"""A dataset of any size as token files: streamed, tokenized in parallel, written in shards, resumed after a kill.

Documents become tokens in the order of the dataset and are appended to `train-00000.bin`, ... and `val-00000.bin`, ...
in `.NAME.unfinished` beside the folder. Every few seconds the files are flushed to disk and progress.json says how much
of them counts; whatever lies beyond is cut off when the same command continues. So files are the same with and without
a kill, and for any number of workers. Memory holds a few blocks of documents for each worker, however long the dataset.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.errors import DataError, TextError
from secateur.files import check_room, clear, read_json, resuming, write
from secateur.integrations.text import DocumentStream
from secateur.lab.encoding import CODES, Encoded, Encoding, dtype_for, encode_blocks, read_tokenizer, vocabulary_of
from secateur.progress import ProgressBar

SHARD = 100_000_000  # tokens in a file
BLOCK = 1 << 20  # characters that a worker gets at once
COMMIT_SECONDS = 5.0  # between two commits; what is done since the last one is done again after a kill
READ = 1 << 22  # bytes at a time when files are checked
PARTS = ("train", "val")
PROGRESS = "progress.json"


class Shards:
    """Mapped token files read as one flat tensor."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = list(parts)
        self._ends = list(accumulate(part.numel() for part in self.parts))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def numel(self) -> int:
        """How many tokens there are."""
        return self._ends[-1]

    def __getitem__(self, places: Tensor) -> Tensor:
        """The tokens at these places, int64 in the shape of `places`."""
        which = torch.bucketize(places, torch.tensor(self._ends), right=True)
        found = torch.empty(places.shape, dtype=torch.int64)
        for number in which.unique().tolist():
            here = which == number
            found[here] = self.parts[number][places[here] - (self._ends[number] - self.parts[number].numel())].long()
        return found


@dataclass(frozen=True)
class Job:
    """What determines the tokens of an unfinished folder. How many are asked for does not: more continue fewer."""

    source: str
    column: str
    tokenizer: str  # SHA-256 of the tokenizer's JSON, or "byte"
    held_out: float
    shard: int


@dataclass
class Entry:
    """A token file: its name, its tokens that count, and their CRC-32."""

    file: str
    tokens: int
    crc32: int


class Part:
    """The files of one part, which only grow."""

    def __init__(self, folder: Path, name: str, itemsize: int, shard: int, entries: Sequence[dict[str, Any]]) -> None:
        self.name, self.entries = name, [Entry(**entry) for entry in entries]
        self._folder, self._itemsize, self._shard = folder, itemsize, shard
        self._changed: set[str] = set()

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.entries)

    def restore(self) -> None:
        """Cut off what is beyond the last commit, and check that the rest is what was written."""
        for path in self._folder.glob(f"{self.name}-*.bin"):
            if path.name not in {entry.file for entry in self.entries}:
                path.unlink()
        for entry in self.entries:
            path, size = self._folder / entry.file, entry.tokens * self._itemsize
            if not path.is_file() or path.stat().st_size < size or checksum(path, size) != entry.crc32:
                raise DataError(f"{path} is not what was written to it. Delete {self._folder} to begin again.")
            os.truncate(path, size)

    def append(self, tokens: bytes) -> None:
        """Append tokens to the last file, and begin another where it is full."""
        start = 0
        while start < len(tokens):
            if not self.entries or self.entries[-1].tokens == self._shard:
                self.entries.append(Entry(f"{self.name}-{len(self.entries):05}.bin", 0, 0))
            last = self.entries[-1]
            taken = tokens[start : start + (self._shard - last.tokens) * self._itemsize]
            with (self._folder / last.file).open("ab") as file:
                file.write(taken)
            last.tokens += len(taken) // self._itemsize
            last.crc32 = zlib.crc32(taken, last.crc32)
            self._changed.add(last.file)
            start += len(taken)

    def sync(self) -> None:
        """Flush what was appended to disk."""
        for name in sorted(self._changed):
            with (self._folder / name).open("rb+") as file:
                os.fsync(file.fileno())
        self._changed.clear()

    def plain(self) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in self.entries]


def checksum(path: Path, size: int) -> int:
    """CRC-32 of the first bytes of a file."""
    found, left = 0, size
    with path.open("rb") as file:
        while left and (part := file.read(min(READ, left))):
            found, left = zlib.crc32(part, found), left - len(part)
    return found


class Unfinished:
    """The folder of a job in progress: its two parts, and the place in the dataset that they reach to."""

    def __init__(self, folder: Path, job: Job, itemsize: int, overwrite: bool) -> None:
        self.folder, self.job = folder, job
        kept = self._kept(overwrite)
        self.position: dict[str, Any] = kept.get("position", {})
        self.complete, self.asked = bool(kept.get("complete")), kept.get("asked")
        self._written = 0.0
        files = kept.get("files", {part: [] for part in PARTS})
        self.parts = {part: Part(folder, part, itemsize, job.shard, files[part]) for part in PARTS}
        for part in self.parts.values():
            part.restore()

    def _kept(self, overwrite: bool) -> dict[str, Any]:
        """What an earlier call of the same job left; an error if it was another job."""
        path = self.folder / PROGRESS
        clear(path)
        if not path.exists():
            return {}
        kept: dict[str, Any] = read_json(path, dict, advice=f"Delete {self.folder} to begin again.")
        theirs, ours = kept.get("job", {}), asdict(self.job)
        differ = [name for name in ours if theirs.get(name) != ours[name]]
        if not differ:
            return kept
        if not overwrite:
            told = ", ".join(f"{name} {theirs.get(name)!r} there, {ours[name]!r} here" for name in differ)
            raise DataError(
                f"{self.folder} holds another unfinished job ({told}). Give its settings to continue it, name another"
                " --out, or pass --overwrite to discard it."
            )
        path.unlink()
        return {}

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts.values())

    def take(self, found: Encoded, position: dict[str, Any], most: int | None, itemsize: int) -> int:
        """Append a block, up to `most` tokens in all; returns how many were appended."""
        left = None if most is None else most - self.tokens
        counts = [0, 0]
        for apart, count in found.documents:
            counts[apart] += count if left is None else min(count, left - sum(counts))
        for part, tokens, count in zip(self.parts.values(), (found.train, found.held_out), counts, strict=True):
            part.append(tokens[: count * itemsize])
        self.position = position
        return sum(counts)

    def commit(self, complete: bool = False) -> None:
        """Make what was appended count: not often, unless it is `complete`."""
        if not complete and time.monotonic() - self._written < COMMIT_SECONDS:
            return
        for part in self.parts.values():
            part.sync()
        files = {name: part.plain() for name, part in self.parts.items()}
        kept = {"job": asdict(self.job), "complete": complete, "asked": self.asked, "position": self.position}
        kept |= {"files": files}
        write(self.folder / PROGRESS, json.dumps(kept) + "\n")
        self._written = time.monotonic()


def blocks_of(stream: DocumentStream) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Documents in blocks of about BLOCK characters, each with the place in the dataset after it."""
    documents: list[str] = []
    size = 0
    for document in stream:
        documents.append(document)
        size += len(document)
        if size >= BLOCK:
            yield documents, stream.position()
            documents, size = [], 0
    if documents:
        yield documents, stream.position()


def prepare_stream(
    source: str,
    folder: Path,
    tokenizer: str,
    held_out: float,
    *,
    column: str = "text",
    tokens: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Stream a dataset into a folder of token shards; returns what is in meta.json. The caller holds the folder.

    It ends after exactly `tokens`, training and held-out together; None takes the whole dataset.
    """
    encoder = read_tokenizer(tokenizer)
    size = vocabulary_of(encoder)
    encoding = Encoding(None if encoder is None else encoder.to_str(), dtype_for(size), held_out)
    itemsize = array(CODES[encoding.dtype]).itemsize
    digest = hashlib.sha256(encoding.tokenizer.encode()).hexdigest() if encoding.tokenizer else "byte"
    job = Job(source, column, digest, held_out, SHARD)
    check_room(folder, (tokens or 0) * itemsize)
    with resuming(folder) as partial:
        work = Unfinished(partial, job, itemsize, overwrite)
        _check_asked(work, tokens)
        if not work.complete:
            _fill(work, encoding, tokens, workers or _workers_for(encoder), itemsize)
        meta = {"vocabulary": size, "dtype": encoding.dtype, "tokenizer": tokenizer, "source": source}
        meta |= {"tokens": {name: part.tokens for name, part in work.parts.items()}, "held_out": held_out}
        meta |= {"rows": work.position.get("rows", 0), "empty_rows": work.position.get("empty", 0)}
        meta |= {"shards": {name: part.plain() for name, part in work.parts.items()}}
        if encoder is not None:
            write(partial / "tokenizer.json", encoder.to_str(pretty=True))
        write(partial / "meta.json", json.dumps(meta, indent=1) + "\n")
    (folder / PROGRESS).unlink(missing_ok=True)  # not before: a kill would forget what is done
    return meta


def _workers_for(encoder: Any) -> int:
    """Bytes need no tokenizer; otherwise a worker for each CPU of this process."""
    if encoder is None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_asked(work: Unfinished, tokens: int | None) -> None:
    """Refuse fewer tokens than an unfinished folder has, or others than those it was completed for."""
    have = work.tokens
    if (tokens is not None and have > tokens) or (work.complete and tokens != work.asked):
        asked = "all" if tokens is None else f"{tokens:,}"
        ask = "Give the --tokens it was begun with" if work.complete else "Ask for at least as many"
        raise DataError(
            f"{work.folder} already has {have:,} tokens of this job, and {asked} are asked for. {ask}, or delete the"
            " folder to begin again."
        )
    work.asked = tokens


def _fill(work: Unfinished, encoding: Encoding, tokens: int | None, workers: int, itemsize: int) -> None:
    """Stream and tokenize until there are enough tokens or no documents."""
    stream = DocumentStream(work.job.source, work.job.column, work.position or None)
    bar = ProgressBar("tokenizing", tokens or 0, work.tokens, unit="token")
    try:
        with closing(encode_blocks(blocks_of(stream), encoding, workers)) as encoded:
            while tokens is None or work.tokens < tokens:
                found = next(encoded, None)
                if found is None:
                    break
                bar.tick(f"{work.position.get('rows', 0):,} rows", work.take(*found, tokens, itemsize))
                work.commit()
    finally:
        bar.close()
    _check_enough(work, tokens, stream.rows)
    work.commit(complete=True)


def _check_enough(work: Unfinished, tokens: int | None, rows: int) -> None:
    """Refuse a dataset without text, with fewer tokens than asked for, or with nothing in one of the parts."""
    source, have = work.job.source, work.tokens
    if not have:
        raise TextError(f"{source} holds no text: {rows:,} rows, all empty in column {work.job.column!r}.")
    if tokens is not None and have < tokens:
        work.commit()
        raise DataError(
            f"{source} has {have:,} tokens and --tokens asks for {tokens:,}. Ask for at most {have:,}, or leave out"
            " --tokens to take them all."
        )
    for name, part in work.parts.items():
        if not part.tokens:
            raise DataError(f"{source} would give no tokens in {name}: too few documents to hold out a part of them.")


def read_shards(folder: Path, meta: dict[str, Any], mapped: Callable[[Path, int], Tensor], part: str) -> Shards:
    """The files of a part that meta.json lists, each mapped and checked by `mapped`."""
    try:
        entries = [Entry(**entry) for entry in meta["shards"][part]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / 'meta.json'} lists no shards of {part}: {error!r}. Write it again.") from error
    if not entries or any(type(entry.tokens) is not int or entry.tokens < 1 for entry in entries):
        raise DataError(f"{folder / 'meta.json'} lists shards of {part} without tokens. Write it again.")
    return Shards([mapped(folder / Path(entry.file).name, entry.tokens) for entry in entries])
