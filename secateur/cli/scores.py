"""List the scores: formula, the facts each reads, its options and defaults. Weights with the lowest score go first.

w is a weight, m and v are Adam's first and second moments (exp_avg and exp_avg_sq), g a gradient, x an input feature.
Pass options in the name: variance(q=3/8). Scope is the default after training; a Pruner uses scope "model".
"""

from __future__ import annotations

import argparse

from secateur.cli.options import import_torch

SUMMARY = "list the scores, their formulas, and what they read"
EXAMPLE = "secateur scores"
HEADER = ("score", "reads", "options", "scope", "allocation", "formula")


def add_options(parser: argparse.ArgumentParser) -> None:
    del parser  # it takes none


def run(options: argparse.Namespace) -> int:
    del options
    import_torch()
    from secateur.report import text_table

    print(text_table(HEADER, rows(), left=len(HEADER)))
    return 0


def rows() -> list[tuple[str, ...]]:
    """A row under HEADER for every registered score."""
    from secateur.scores import resolve, scores

    found: list[tuple[str, ...]] = []
    for name in scores():
        score = resolve(name)
        settings = ", ".join(f"{key}={value:g}" for key, value in score.defaults.items())
        formula = (score.function.__doc__ or "-").strip().partition("\n")[0]
        found.append(
            (name, ", ".join(score.needs), settings or "-", score.scope or "model", score.allocation or "-", formula)
        )
    return found
