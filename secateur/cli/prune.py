"""Prune a trained language model, evaluate it on other text before and after, and save it with masks and a report."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from secateur.cli.oneshot import add_shared, device_for, run_job
from secateur.cli.options import import_torch

if TYPE_CHECKING:
    from secateur.report import Outcome

SUMMARY = "prune a trained model, evaluate it on other text, save it"
EXAMPLE = "secateur prune smollm2 --sparsity 0.5 --out smollm2-50"
# The names of `secateur.oneshot`'s recipes, the default first; importing them from there would import torch.
RECIPES = (
    "recommended", "repaired", "rounds", "variance", "fisher", "gradient", "wanda", "magnitude", "sparsegpt",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    parser.add_argument("--recipe", default=RECIPES[0], help=f"{', '.join(RECIPES)}, or a .toml file ({RECIPES[0]})")
    parser.add_argument("--pattern", help="shape of the zeros: 2:4, 4:8, block:RxC (none)")


def run(options: argparse.Namespace) -> int:
    import_torch()
    from secateur.oneshot.prune import prune
    from secateur.oneshot.recipes import read_recipe
    from secateur.selection.tiles import parse_pattern

    recipe = asdict(read_recipe(options.recipe))
    given = {"pattern": options.pattern, "skip": options.skip, "only": options.only}
    recipe |= {key: value for key, value in given.items() if value}
    pattern = parse_pattern(recipe["pattern"])
    fixed = pattern is not None and pattern.sparsity is not None  # 2:4 is 50 %
    sparsity = 0.5 if options.sparsity is None and not fixed else options.sparsity

    def work(model: Any, batches: list[Any]) -> Outcome:
        where = {"memory": options.memory, "device": device_for(options), "progress": True}
        return prune(model, batches, sparsity=sparsity, **where, **recipe)

    return run_job(options, work)
