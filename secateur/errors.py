"""Typed errors, one line each, and the two hints errors give: a missing library, a misspelt name.

Every message says what was asked, what was found, and what to do.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


class SecateurError(ValueError):
    """Any mistake a user of this library can make and mend."""


class ScoreError(SecateurError):
    """An unknown score, one that breaks the contract of scores, or one that gave NaN."""


class FactError(SecateurError):
    """A score needs a fact that does not exist here, such as Adam's state under SGD."""


class OptimizerError(SecateurError):
    """Something that is no torch optimizer, or several that share a parameter."""


class PatternError(SecateurError):
    """A scope, pattern or allocation that does not exist or does not fit the tensors."""


class ScheduleError(SecateurError):
    """A sparsity outside [0, 1), a schedule that falls, a ramp that ends before it begins, a period below one."""


class RegrowthError(SecateurError):
    """A kind of regrowth that does not exist, does not go with a pattern, or has no end."""


class SiteError(SecateurError):
    """Nothing to prune, or a name pattern that matches nothing."""


class ShardError(SecateurError):
    """Shards laid out in a way the selection cannot serve, or replicas that disagree."""


class StateError(SecateurError):
    """A saved state that does not belong to this model."""


class ModelError(SecateurError):
    """A model that cannot be loaded or saved, or that cannot do what is asked of it."""


class SaveError(SecateurError):
    """Something that cannot be written. What stood there before is untouched, and what was to be saved is in memory."""


class TextError(SecateurError):
    """Text that cannot be read, is too short, or serves both to calibrate and to evaluate."""


class DataError(SecateurError):
    """A data set that is unknown, not there or damaged, or that does not fit what is to read it."""


class ComparisonError(SecateurError):
    """Runs that cannot be read, or that differ in more than a table of them would say."""


def library(name: str, what: str, install: str) -> Any:
    """The module of this name, or an error that says what needs it and which pip command brings it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        package = name.partition(".")[0]
        if (missing.name or "").partition(".")[0] != package:
            raise  # it is installed, but something it needs itself is not
        raise SecateurError(f"{what} needs {package}: pip install {install}.") from missing


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that is most like this one; nothing where none is."""
    found = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""
