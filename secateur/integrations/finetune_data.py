"""Text for `secateur finetune`: windows to train on and windows held out, from a text or a streamed dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from secateur.errors import TextError
from secateur.integrations.text import BETWEEN, read_text, rows_within, stream_documents, token_pieces

STREAMED = "dataset:"


@dataclass(frozen=True)
class Texts:
    """What to train on, and the windows that never train."""

    train: Dataset[dict[str, Tensor]]
    calibration: Tensor  # the first windows to train on
    evaluation: Tensor
    notes: tuple[str, ...] = ()


def read_texts(
    tokenizer: Any,
    data: str,
    eval_data: str | None,
    *,
    context: int,
    needed: int,
    calibration: int,
    evaluation: int,
) -> Texts:
    """Windows of `context` tokens: `evaluation` of them held out, and up to `needed` to train on.

    The windows held out come from `eval_data`, or else are the first ones of `data`, so that a longer run is evaluated
    on the same text. A dataset is streamed; other text that is too short is trained on several times.
    """
    if eval_data is not None and eval_data == data:
        raise TextError("--eval-data is the text of --data. Leave it out: the first windows of --data evaluate.")
    held_out = None
    if eval_data is not None:
        held_out = _first(_pieces(tokenizer, eval_data), context, evaluation)
        _check_enough(len(held_out), evaluation, eval_data, context, "to evaluate on")
    skip = 0 if held_out is not None else evaluation
    most = skip + (calibration if data.startswith(STREAMED) else max(needed, calibration))
    rows = _first(_pieces(tokenizer, data), context, most)
    _check_enough(len(rows) - skip, 1, data, context, f"to train on beside {skip} held out" if skip else "to train on")
    train, held_out, notes = _apart(rows[skip:], rows[:skip] if held_out is None else held_out)
    if data.startswith(STREAMED):
        return Texts(Stream(data, tokenizer, context, skip, held_out), train[:calibration], held_out, notes)
    if len(train) < needed:
        notes = (*notes, f"{data} has {len(train):,} windows to train on, each seen {needed / len(train):.1f} times.")
    return Texts(Windows(train[:needed]), train[:calibration], held_out, notes)


def _apart(train: Tensor, held_out: Tensor) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Both without windows that occur anywhere in the text of the other, and a note if there were any."""
    shared = rows_within(held_out, train.flatten())
    if len(shared) == len(held_out):
        raise TextError(
            f"All {len(held_out)} windows held out occur in the text to train on, so no text is left to evaluate on."
            " Give a text that shares nothing with --data as --eval-data."
        )
    held_out = _without(held_out, shared)
    learned = rows_within(train, held_out.flatten())
    if len(learned) == len(train):
        raise TextError("Every window to train on occurs in the text held out. Give two texts that share nothing.")
    notes: tuple[str, ...] = ()
    if shared or learned:
        notes = (f"Left out because they occur in both texts: {len(shared)} windows to evaluate on, {len(learned)} to"
                 " train on.",)  # fmt: skip
    return _without(train, learned), held_out, notes


def _without(rows: Tensor, numbers: list[int]) -> Tensor:
    keep = torch.ones(len(rows), dtype=torch.bool)
    keep[numbers] = False
    return rows[keep]


def _first(pieces: Iterable[Tensor], context: int, most: int) -> Tensor:
    found = list(islice(split_windows(pieces, context), most))
    return torch.stack(found) if found else torch.empty((0, context), dtype=torch.int64)


def _pieces(tokenizer: Any, name: str) -> Iterator[Tensor]:
    if not name.startswith(STREAMED):
        return token_pieces(tokenizer, read_text(name))
    return (piece for text in stream_documents(name) for piece in token_pieces(tokenizer, text + BETWEEN))


def _check_enough(found: int, needed: int, name: str, context: int, what: str) -> None:
    if found < needed:
        raise TextError(
            f"{name} has {max(0, found):,} windows of {context:,} tokens {what}, and {needed:,} are needed. Give a"
            " longer text, a shorter --context, or a smaller --evaluation."
        )


def split_windows(pieces: Iterable[Tensor], context: int) -> Iterator[Tensor]:
    """Consecutive windows of `context` tokens; what remains at the end is dropped."""
    left = torch.empty(0, dtype=torch.int64)
    for piece in pieces:
        left = torch.cat((left, piece))
        whole = left.numel() // context * context
        yield from left[:whole].view(-1, context)
        left = left[whole:]


def _item(row: Tensor) -> dict[str, Tensor]:
    return {"input_ids": row, "labels": row}


class Windows(Dataset[dict[str, Tensor]]):
    """Windows in memory, as Trainer takes them."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return _item(self.rows[number])


class Stream(IterableDataset[dict[str, Tensor]]):
    """Windows of a dataset that is read as it is needed, without the first `skip` and without any that is held out."""

    def __init__(self, name: str, tokenizer: Any, context: int, skip: int, held_out: Tensor) -> None:
        self._name, self._tokenizer, self._context, self._skip = name, tokenizer, context, skip
        self._held_out = set(map(tuple, held_out.tolist()))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = split_windows(_pieces(self._tokenizer, self._name), self._context)
        return (_item(row) for row in islice(rows, self._skip, None) if tuple(row.tolist()) not in self._held_out)
