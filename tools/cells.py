"""Experiments that are measured cell by cell: a record after each one, and the next call continues from it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from secateur.lab import record

Cell = dict[str, Any]


def plain(value: Any) -> Any:
    """The value as it is read back from JSON."""
    return json.loads(json.dumps(value))


class Cells:
    """The cells of one theme on record, each known by the settings in it."""

    def __init__(self, theme: str, key: Callable[[Mapping[str, Any]], Any], folder: Path | None = None) -> None:
        self.theme, self._key = theme, key
        self.path = next(reversed(dated(theme, folder)), None)
        self.about: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8")) if self.path else {}
        self._found: dict[str, Cell] = {self._name(cell): cell for cell in self.about.get("cells", [])}

    def _name(self, cell: Mapping[str, Any]) -> str:
        return json.dumps(self._key(cell), sort_keys=True)

    @property
    def found(self) -> list[Cell]:
        return list(self._found.values())

    def has(self, cell: Mapping[str, Any]) -> bool:
        return self._name(plain(cell)) in self._found

    def add(self, cell: Cell, about: Mapping[str, Any], options: argparse.Namespace, device: torch.device) -> None:
        """Add a cell and write the whole record; an older file of the same theme is replaced."""
        cell = plain(cell | {"commit": record.commit()})
        self._found[self._name(cell)] = cell
        made = record.save(self.theme, dict(about) | {"cells": self.found}, options, device)
        if self.path is not None and self.path != made:
            self.path.unlink(missing_ok=True)
        self.path = made


def dated(theme: str, folder: Path | None = None) -> list[Path]:
    """The records of a theme, oldest first."""
    paths = (folder or record.results_folder()).glob(f"{theme}_*.json")
    return sorted(paths, key=lambda path: (path.stem.rpartition("_")[2], path.stem))


def by(cells: Sequence[Cell], *names: str) -> dict[tuple[Any, ...], list[Cell]]:
    """Cells grouped by these entries, in order of appearance."""
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault(tuple(cell[name] for name in names), []).append(cell)
    return found
