"""Recipes: how a trained model is pruned, by a name or from a TOML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from secateur.errors import SecateurError, nearest
from secateur.settings import from_mapping, read_toml


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
    if Path(wanted).suffix != ".toml":
        raise SecateurError(
            f"No recipe {wanted!r}.{nearest(wanted, NAMED)} Use one of {', '.join(NAMED)}, or a .toml file."
        )
    return from_mapping(Recipe, read_toml(Path(wanted)), wanted)
