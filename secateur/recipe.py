"""Recipes: how a trained model is pruned, by a name or from a TOML file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from secateur.errors import SecateurError


@dataclass(frozen=True)
class Recipe:
    """The settings of `secateur.prune` but for data and sparsity."""

    score: str = "variance"
    scope: str | None = None
    pattern: str | None = None
    allocation: str | None = None
    rounds: int = 1
    reconstruct: bool | str = False
    method: str | None = None
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None


RECOMMENDED = "recommended"
NAMED = {
    RECOMMENDED: Recipe(rounds=5, reconstruct="every"),
    "repaired": Recipe(rounds=5, reconstruct=True),
    "rounds": Recipe(rounds=5),
    "variance": Recipe(),
    "fisher": Recipe(score="fisher"),
    "gradient": Recipe(score="gradient"),
    "wanda": Recipe(score="wanda"),
    "magnitude": Recipe(score="magnitude"),
    "sparsegpt": Recipe(method="sparsegpt"),
}


def read_recipe(wanted: str) -> Recipe:
    """A recipe by its name, or from a TOML file whose keys are the fields of `Recipe`."""
    if wanted in NAMED:
        return NAMED[wanted]
    path = Path(wanted)
    if path.suffix != ".toml":
        near = difflib.get_close_matches(wanted, NAMED, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SecateurError(f"No recipe {wanted!r}.{hint} Use one of {', '.join(NAMED)}, or a .toml file.")
    try:
        return from_mapping(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SecateurError(f"Cannot read the recipe {path}: {reason}.") from error
    except tomllib.TOMLDecodeError as error:
        raise SecateurError(f"{path} is not TOML: {error}.") from error


def from_mapping(found: Mapping[str, Any], source: str) -> Recipe:
    """A recipe from keys and values, each checked."""
    known = {field.name: field for field in fields(Recipe)}
    for key, value in found.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SecateurError(f"{source} has a key {key!r} that no recipe has.{hint} Known: {', '.join(known)}.")
        if not _fits(key, value):
            raise SecateurError(f"{source}: {key} = {value!r} is not what {key} takes ({known[key].type}).")
    lists = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
    return Recipe(**{**found, **lists})


def _fits(key: str, value: Any) -> bool:
    if key == "rounds":
        return isinstance(value, int) and not isinstance(value, bool)
    if key == "reconstruct":
        return isinstance(value, bool | str)
    if key in ("skip", "only"):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, str)
