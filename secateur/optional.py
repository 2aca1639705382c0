"""Libraries the core does without: imported when they are needed, and asked for by name where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from secateur.errors import SecateurError


def library(name: str, what: str, install: str) -> Any:
    """The module of this name, or an error that says what needs it and which pip command brings it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        package = name.partition(".")[0]
        if (missing.name or "").partition(".")[0] != package:
            raise  # it is installed, but something it needs itself is not
        raise SecateurError(f"{what} needs {package}: pip install {install}.") from missing
