"""Prune a trained language model, evaluate it on other text before and after, and save it with masks and a report."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.cli.oneshot import Gauge, add_shared, device_for, run_job
from secateur.cli.options import import_torch
from secateur.errors import SecateurError, nearest
from secateur.settings import from_mapping, read_toml

if TYPE_CHECKING:
    from secateur.report import Outcome

SUMMARY = "prune a trained model, evaluate it on other text, save it"
EXAMPLE = "secateur prune smollm2 --sparsity 0.5 --out smollm2-50"


@dataclass(frozen=True)
class Recipe:
    """The settings of `prune` without data and sparsity."""

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


def read_recipe(wanted: str | os.PathLike[str]) -> Recipe:
    """A recipe by its name, or from a TOML file whose keys are the fields of `Recipe`."""
    name = os.fspath(wanted)
    if name in NAMED:
        return NAMED[name]
    if Path(name).suffix != ".toml":
        raise SecateurError(
            f"No recipe {name!r}.{nearest(name, NAMED)} Use one of {', '.join(NAMED)}, or a .toml file."
        )
    return from_mapping(Recipe, read_toml(Path(name)), name)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    parser.add_argument("--recipe", default=RECOMMENDED, help=f"{', '.join(NAMED)}, or a .toml file ({RECOMMENDED})")
    parser.add_argument("--pattern", help="shape of the zeros: 2:4, 4:8, block:RxC (none)")


def run(options: argparse.Namespace) -> int:
    recipe = asdict(read_recipe(options.recipe))
    given = {"pattern": options.pattern, "skip": options.skip, "only": options.only}
    recipe |= {key: value for key, value in given.items() if value}
    import_torch()
    from secateur.oneshot.prune import prune
    from secateur.selection.tiles import parse_pattern

    pattern = parse_pattern(recipe["pattern"])
    fixed = pattern is not None and pattern.sparsity is not None  # 2:4 is 50 %
    sparsity = 0.5 if options.sparsity is None and not fixed else options.sparsity

    def work(model: Any, batches: list[Any], _: Gauge) -> Outcome:
        where = {"memory": options.memory, "device": device_for(options), "progress": True}
        return prune(model, batches, sparsity=sparsity, **where, **recipe)

    return run_job(options, work)
