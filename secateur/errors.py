"""Error types, and the two hints that errors give: a missing library, a misspelt name.

Every message says what was wrong, what was found, and what to do.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

# What pip installs for everything of Hugging Face, for experiments and for the demo; quoted for any shell.
HF_EXTRA, LAB_EXTRA, DEMO_EXTRA = '"secateur[hf]"', '"secateur[lab]"', '"secateur[demo]"'


class SecateurError(ValueError):
    """Base of all errors that a user of this library can fix."""


class ScoreError(SecateurError):
    """An unknown score, one that breaks the contract of scores, or one that returned NaN."""


class FactError(SecateurError):
    """A score needs a fact that does not exist, such as Adam's state under SGD."""


class OptimizerError(SecateurError):
    """Not a torch optimizer, or several that share a parameter."""


class PatternError(SecateurError):
    """A scope, pattern or allocation that is unknown or does not fit the tensors."""


class ScheduleError(SecateurError):
    """A sparsity outside [0, 1), a schedule that falls or ends before it begins, a period below one."""


class RegrowthError(SecateurError):
    """A kind of regrowth that is unknown, cannot be combined with a pattern, or has no end."""


class SiteError(SecateurError):
    """Nothing to prune, or a glob that matches no parameter."""


class ShardError(SecateurError):
    """Shards that selection does not support, or ranks that disagree."""


class StateError(SecateurError):
    """A saved state that does not belong to this model."""


class ModelError(SecateurError):
    """A model that cannot be loaded, saved or pruned as asked."""


class SaveError(SecateurError):
    """A file or folder that cannot be written. What was there is unchanged; what was to be saved is still in memory."""


class TextError(SecateurError):
    """Text that cannot be read, is too short, or is used both to calibrate and to evaluate."""


class DataError(SecateurError):
    """A data set that is unknown, missing or damaged, or that does not fit the model."""


class ComparisonError(SecateurError):
    """Runs that cannot be read, or that differ in more than their table would show."""


def library(name: str, what: str, install: str) -> Any:
    """Import an optional library, or raise an error that says what needs it and how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        package = name.partition(".")[0]
        if (missing.name or "").partition(".")[0] != package:
            raise  # it is installed; one of its own dependencies is missing
        raise SecateurError(f"{what} needs {package}: pip install {install}.") from missing


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word closest to this one; empty if none is close."""
    found = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""
