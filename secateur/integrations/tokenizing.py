"""Tokenize a long text in pieces that give the tokens of the whole, so that memory does not grow with the text.

Imports no torch: worker processes that only tokenize stay small.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from secateur.errors import TextError

PIECE = 1 << 18  # characters tokenized at once
REACH = 1 << 14  # characters before a piece's end in which a place to cut is searched
AROUND = 200  # characters on either side that decide whether a cut changes the tokens
TRIES = 20  # places to cut
BETWEEN = "\n\n"  # separates documents, as in published results on WikiText-2


def token_lists(tokenizer: Any, text: str) -> Iterator[list[int]]:
    """The tokens of the text, piece by piece. The tokenizer is called as those of transformers are."""
    start = 0
    while start < len(text):
        end, following = _cut(tokenizer, text, start + PIECE)
        yield _encode(tokenizer, text[start:end])
        start = following


def byte_lists(text: str) -> Iterator[list[int]]:
    """The UTF-8 bytes of the text, piece by piece."""
    for start in range(0, len(text), PIECE):
        yield list(text[start : start + PIECE].encode())


def _encode(tokenizer: Any, text: str) -> list[int]:
    # Not verbose: transformers would warn that a piece is longer than the model's context.
    try:
        numbers: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return numbers
    except (AttributeError, KeyError, TypeError) as error:  # a wrong type in the tokenizer's file shows only here
        raise TextError(f"{type(tokenizer).__name__} cannot read text: {error}. Is its file damaged?") from error


def _cut(tokenizer: Any, text: str, near: int) -> tuple[int, int]:
    """The end of a piece and the start of the next one, such that the pieces give the tokens of the whole text.

    Tries cuts between words. For tokenizers that put a space before every text, the space between words is dropped.
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
