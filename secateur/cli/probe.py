"""Prune a trained language model and keep every weight whose removal makes a gradient grow (GradProbe).

Without --exact the sparsity reached may be lower than the one asked for: the probe keeps what it rejects.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from secateur.cli.oneshot import add_shared, device_for, run_job
from secateur.cli.options import import_torch
from secateur.errors import SecateurError

if TYPE_CHECKING:
    from secateur.report import Outcome

SUMMARY = "prune only weights whose removal the gradients accept (GradProbe)"
EXAMPLE = "secateur probe smollm2 --sparsity 0.5 --tolerance 0.1 --out smollm2-probed"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    parser.add_argument("--score", default="wanda", help="proposes the candidates; see secateur scores (wanda)")
    parser.add_argument(
        "--order", default="joint", help="joint: all layers at once; reverse, forward, size: one after another (joint)"
    )
    parser.add_argument("--group", default="1", help="layers probed together: a number, or block (1)")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative growth of a gradient to accept (0)")
    parser.add_argument("--shrink", type=float, default=0.1, help="factor applied to candidates in the probe (0.1)")
    parser.add_argument(
        "--exact", action="store_true", help="reach the sparsity asked for: rank candidates by gradient growth"
    )


def run(options: argparse.Namespace) -> int:
    if options.group != "block" and not options.group.isdecimal():
        raise SecateurError(f"--group must be a number of layers, or block; got {options.group!r}.")
    group = options.group if options.group == "block" else int(options.group)
    import_torch()
    from secateur.oneshot.probe import ORDERS, probe
    from secateur.scores import resolve

    resolve(options.score)
    if options.order not in ORDERS:
        raise SecateurError(f"--order must be one of {', '.join(ORDERS)}; got {options.order!r}.")

    def work(model: Any, batches: list[Any]) -> Outcome:
        return probe(
            model, batches, score=options.score, sparsity=0.5 if options.sparsity is None else options.sparsity,
            order=options.order, group=group, tolerance=options.tolerance, shrink=options.shrink, exact=options.exact,
            skip=options.skip, only=options.only, memory=options.memory, device=device_for(options), progress=True,
        )  # fmt: skip

    return run_job(options, work)
