"""Options of `secateur train` under the names AdamWPrune's own trainer gives them, so that its commands still work.

| AdamWPrune                     | here                                              |
|--------------------------------|---------------------------------------------------|
| --target-sparsity 0.5          | --sparsity 0.5                                    |
| --max-iters 1000               | --steps 1000                                      |
| --pruning-method magnitude     | --score magnitude                                 |
| --pruning-method state         | --score bitter0, or the score of --variant        |
| --pruning-method none          | no score: a dense run                             |
| --variant bitter7              | --score bitter7                                   |
"""

from __future__ import annotations

import argparse
from typing import Any

from secateur.cli.options import positive, sparsity
from secateur.errors import SecateurError

METHODS = ("none", "magnitude", "movement", "state")
STATE_SCORE = "bitter0"  # AdamWPrune's score for state pruning when no variant is named
DENSE: dict[str, Any] = {"score": None, "sparsity": 0.0, "pattern": None, "regrow": None}


def add_aliases(parser: argparse.ArgumentParser) -> None:
    """AdamWPrune's names, in a group of their own."""
    group = parser.add_argument_group("AdamWPrune's names for the same settings")
    group.add_argument("--variant", help="the score of state pruning: bitter0 to bitter9")
    group.add_argument("--pruning-method", choices=METHODS, help="state: by Adam's moments; none: dense")
    group.add_argument("--target-sparsity", dest="sparsity", type=sparsity, metavar="SPARSITY", help="--sparsity")
    group.add_argument("--max-iters", dest="steps", type=positive, metavar="STEPS", help="--steps")


def score_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Settings that --variant and --pruning-method ask for; nothing where neither is given."""
    method, variant = options.pruning_method, options.variant
    if options.score and (variant or method):
        raise SecateurError("--score and AdamWPrune's --variant or --pruning-method name the score twice. Use one.")
    if variant and method not in (None, "state"):
        raise SecateurError(f"--variant {variant} goes with --pruning-method state, not with {method}.")
    if method == "none":
        return dict(DENSE)
    if not variant and not method:
        return {}
    return {"score": variant or (STATE_SCORE if method == "state" else method)}
