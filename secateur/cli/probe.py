"""Prune a trained language model and keep every weight whose removal makes a gradient grow (GradProbe).

The sparsity reached is lower than the one asked for, because the probe keeps what it rejects; --exact meets it. With
--until the level rises step by step until the perplexity on held-out text has risen too far. That text follows the
calibration text in --data and is not the one that the perplexity before and after is measured on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from secateur.cli.options import import_torch
from secateur.cli.prune import Gauge, add_shared, device_for, run_job
from secateur.errors import SecateurError

if TYPE_CHECKING:
    from secateur.report import Outcome

SUMMARY = "prune only weights whose removal the gradients accept (GradProbe)"
EXAMPLE = "secateur probe smollm2 --until --order reverse --group block --max-drop 5% --out smollm2-probed"
TUNES: dict[str, bool | str] = {"off": False, "on": True, "both": "both"}
LEVELS = {"--start": 0.1, "--step": 0.1, "--end": 0.99}  # sparsities of the levels
MAX_DROP = "1.0"
SINGLE = {
    "--sparsity": "it raises the sparsity itself, from --start to --end",
    "--exact": "--max-drop decides the sparsity, not --sparsity",
    "--tolerances": "--tune tries tolerances, and keeps the best",
}  # not taken with --until


def add_options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    parser.add_argument("--score", default="wanda", help="proposes the candidates; see secateur scores (wanda)")
    parser.add_argument("--scope", help="where weights compete to be candidates: model, layer or row (the score's own)")
    parser.add_argument(
        "--order", default="joint", help="joint: all layers at once; reverse, forward, size: one after another (joint)"
    )
    parser.add_argument("--group", help="layers probed together, not for joint: a number, or block (1)")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative growth of a gradient to accept (0)")
    parser.add_argument("--shrink", type=float, default=0.1, help="factor applied to candidates in the probe (0.1)")
    parser.add_argument(
        "--refresh", action="store_true", help="choose candidates anew for every group, from the weights as they are"
    )
    parser.add_argument(
        "--exact", action="store_true", help="reach the sparsity asked for: rank candidates by gradient growth"
    )
    parser.add_argument(
        "--tolerances", type=float, nargs="+", metavar="T", help="also report what these would give (joint)"
    )
    levels = parser.add_argument_group("levels", "Raise the sparsity while quality on held-out text lasts.")
    levels.add_argument("--until", action="store_true", help="probe at rising sparsity until --max-drop is exceeded")
    levels.add_argument("--start", type=float, help="sparsity of the first level (0.1)")
    levels.add_argument("--step", type=float, help="sparsity added at each level (0.1)")
    levels.add_argument("--end", type=float, help="sparsity of the last level (0.99)")
    levels.add_argument(
        "--max-drop", type=max_drop, metavar="X", help="perplexity (or loss) that may be lost: a number, or 5%% (1.0)"
    )
    levels.add_argument(
        "--tune", choices=tuple(TUNES),
        help="when a level fails, try smaller tolerances; both: at the level before it too (on, if --tolerance is"
        " above 0)",
    )  # fmt: skip


def max_drop(text: str) -> str:
    """A number, or a percentage of the dense model's figure."""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0 or a percentage such as 5%, got {text!r}")
    return text


def run(options: argparse.Namespace) -> int:
    _check_mode(options)
    group = _group(options.group)
    import_torch()
    from secateur.oneshot.calibration import check_calibrated
    from secateur.oneshot.probe import ORDERS, Job
    from secateur.scores import resolve
    from secateur.selection import check_choice

    if options.order not in ORDERS:
        raise SecateurError(f"--order must be one of {', '.join(ORDERS)}; got {options.order!r}.")
    score = resolve(options.score)
    check_calibrated(score)
    how = Job(score, options.scope, options.shrink, options.tolerance, options.order, group, options.refresh)
    how.check(options.exact, options.tolerances or ())  # before the model is loaded
    check_choice(0.5, options.scope or "model", None, None)
    shared: dict[str, Any] = {
        "score": options.score, "scope": options.scope, "order": options.order, "group": group,
        "tolerance": options.tolerance, "shrink": options.shrink, "refresh": options.refresh, "skip": options.skip,
        "only": options.only, "memory": options.memory, "progress": True,
    }  # fmt: skip
    work = _search(options, shared) if options.until else _single(options, shared)
    return run_job(options, work, decides=options.until)


def _check_mode(options: argparse.Namespace) -> None:
    """Refuse options that have no effect beside the others."""

    def given(flag: str) -> bool:
        return getattr(options, flag.strip("-").replace("-", "_")) not in (None, False)

    for flag in (*LEVELS, "--max-drop", "--tune"):
        if given(flag) and not options.until:
            raise SecateurError(f"{flag} is for levels that rise. Add --until, or leave {flag} out.")
    for flag, reason in SINGLE.items():
        if given(flag) and options.until:
            raise SecateurError(f"{flag} has no effect with --until: {reason}. Leave one of them out.")
    if options.order == "joint":
        for flag in ("--group", "--refresh"):
            if given(flag) and (flag == "--group" or not options.until):
                raise SecateurError(
                    f"{flag} has no effect with --order joint, which takes all layers at once. Leave it out, or use"
                    " --order reverse."
                )
    _check_tolerances(options)


def _check_tolerances(options: argparse.Namespace) -> None:
    """Refuse tolerances where none is used, and --exact where it has no sparsity to meet."""
    if options.exact and (options.tolerance or options.tolerances):
        raise SecateurError(
            "--exact ranks candidates without a tolerance. Leave it out, or leave out --tolerance and --tolerances."
        )
    if options.exact and options.order != "joint" and options.scope == "model":
        raise SecateurError(f"--exact with --order {options.order} prunes every layer alike: use --scope layer or row.")
    if options.tolerances and options.order != "joint":
        raise SecateurError("--tolerances are tried on the gradients of one joint probe: use --order joint.")
    if options.tune in ("on", "both") and options.tolerance == 0:
        raise SecateurError(
            f"--tune {options.tune} tries smaller tolerances, and there is none below 0. Pass a --tolerance above 0,"
            " such as 1, or leave --tune out."
        )


def _group(text: str | None) -> int | str:
    if text is None or text == "block":
        return text or 1
    if not text.isdecimal():
        raise SecateurError(f"--group must be a number of layers, or block; got {text!r}.")
    return int(text)


def _single(options: argparse.Namespace, shared: dict[str, Any]) -> Callable[[Any, list[Any], Gauge], Outcome]:
    """One probe; the score alone at the same sparsity is compared on the evaluation text."""
    from secateur.oneshot.probe import probe

    def work(model: Any, batches: list[Any], gauge: Gauge) -> Outcome:
        outcome = probe(
            model, batches, sparsity=0.5 if options.sparsity is None else options.sparsity, exact=options.exact,
            tolerances=options.tolerances or (), evaluate=lambda _: gauge(), device=device_for(options), **shared,
        )  # fmt: skip
        _, (_, gauge.after), *others = outcome.found  # before and after are reported anyway
        return replace(outcome, found=tuple((f"{gauge}, {name}", value) for name, value in others))

    return work


def _search(options: argparse.Namespace, shared: dict[str, Any]) -> Callable[[Any, list[Any], Gauge], Outcome]:
    """Levels that rise; every level and tolerance tried is reported with its figure on the text that decides."""
    from secateur.oneshot.probe import Levels, probe_until

    start, step, end = (LEVELS[flag] if given is None else given for flag, given in (
        ("--start", options.start), ("--step", options.step), ("--end", options.end)
    ))  # fmt: skip
    drop, tune = options.max_drop or MAX_DROP, TUNES.get(options.tune)
    Levels(lambda _: 0.0, start, step, end, 0.0, tune or False).check(options.tolerance)  # before the model is loaded

    def work(model: Any, batches: list[Any], gauge: Gauge) -> Outcome:
        gauge.before = gauge() if drop.endswith("%") else None
        relative = 1.0 if gauge.before is None else gauge.before / 100
        outcome = probe_until(
            model, batches, lambda _: -gauge(), start=start, step=step, end=end, tune=tune,
            max_drop=relative * float(drop.removesuffix("%")), device=device_for(options), **shared,
        )  # fmt: skip
        notes = outcome.notes
        if not outcome.pruned:
            notes = (*notes, f"No level stayed within --max-drop {drop}: the model is dense, as it was.")
        found = tuple((f"{gauge}, {name}", -value) for name, value in outcome.found)
        return replace(outcome, found=found, notes=notes)

    return work
