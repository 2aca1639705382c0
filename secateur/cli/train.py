"""Train a network, pruned or dense, from a recipe or settings. The run folder gets metrics, checkpoints and a page.

The same command continues a run that was interrupted. --dry-run tries the settings in seconds, on random data.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.cli.adamwprune import add_aliases, alias_settings
from secateur.cli.options import (
    add_out,
    add_seed,
    add_sparsity,
    add_tracker,
    add_training_device,
    check_tracker,
    import_torch,
    positive,
    seconds,
    training_on_cpu,
)
from secateur.errors import LAB_EXTRA, SecateurError, library
from secateur.files import check_room, folder_name, write
from secateur.settings import parse

if TYPE_CHECKING:
    from secateur.lab.config import Experiment

SUMMARY = "train a network, pruned or dense, from a recipe or settings"
EXAMPLE = "secateur train --set model=gpt-2x64 --score variance --sparsity 0.8 --steps 200 --out runs/small"
MISSING = (
    "train needs a recipe or settings: secateur train RECIPE.toml, or secateur train --set model=gpt-2x64"
    " --score variance --sparsity 0.8. secateur train --help lists the options."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", type=Path, help="a .toml file of settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes", help="change a setting; repeatable"
    )
    parser.add_argument("--score", help="the score to prune by; see secateur scores (no score: dense)")
    add_sparsity(parser, "0")
    parser.add_argument("--steps", type=positive, help="optimizer steps (1000)")
    add_seed(parser)
    parser.add_argument("--optimizer", help="adamw, adam, sgd, adamwadv, adamwspam, adamwprune (adamw)")
    parser.add_argument("--preset", help="as-published: ramp, budget and layers as AdamWPrune's for the score")
    parser.add_argument(
        "--budget", help="extended: 21, 30 or 70 %% more steps, for the scores AdamWPrune gave more (normal)"
    )
    parser.add_argument("--compile", action="store_true", default=None, help="compile the model")
    add_training_device(parser)
    add_out(parser, "folder of the run (runs/MODEL-SCORE-SPARSITY-SEED)")
    parser.add_argument(
        "--max-time", type=seconds, metavar="SECONDS", help="stop after this; the same command continues"
    )
    parser.add_argument("--micro-batch", type=positive, help="rows in a forward pass (as many as fit)")
    parser.add_argument(
        "--checkpoint-every", type=positive, default=500, metavar="STEPS", help="steps between checkpoints (500)"
    )
    add_tracker(parser, "tensorboard if it is installed")
    parser.add_argument("--dry-run", action="store_true", help="two small steps on random data; counts pruned weights")
    add_aliases(parser)


def changes_of(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that these options change."""
    names = ("optimizer", "score", "sparsity", "steps", "seed", "preset", "budget", "compile")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return given | alias_settings(options) | parse(options.changes)


def run(options: argparse.Namespace) -> int:
    changes = changes_of(options)
    if options.recipe is None and not changes:
        raise SecateurError(MISSING)
    import_torch()
    from secateur.lab.config import read_experiment
    from secateur.lab.trainer import dry_run

    experiment = read_experiment(options.recipe, changes)
    on_cpu = training_on_cpu(options.device)
    if options.dry_run:
        print(dry_run(experiment, on_cpu))
        return 0
    return _train(experiment, on_cpu, options)


def _train(experiment: Experiment, on_cpu: bool, options: argparse.Namespace) -> int:
    from secateur.lab.run import PAGE, RunFolder, check_place, render_run, run
    from secateur.lab.trainer import Execution, ShowProgress, Trainer

    path = options.out or Path("runs") / name_of(experiment)
    check_place(path)
    execution = Execution(
        on_cpu, options.micro_batch, options.checkpoint_every, options.max_time, _tracker(options.tracker), path
    )
    trainer = Trainer(experiment, execution)  # raises for most mistakes, so before the folder is made
    with trainer.accelerator.main_process_first():
        folder = RunFolder(path, experiment, trainer.fingerprint)
    if folder.finished:
        print(f"secateur: {path} is finished already: see {path / 'summary.json'}", file=sys.stderr)
        return 0
    check_room(path, max(0, trainer.room - folder.bytes))
    first = trainer.accelerator.is_main_process
    trainer.callbacks += [ShowProgress("training")] if first else []
    summary = run(trainer, folder)
    if first and not folder.finished:
        print(f"Stopped after {summary['steps']} of {summary['asked_steps']} steps; the same command continues.")
    elif first:
        library("matplotlib", "The page of a run", LAB_EXTRA)
        write(path / PAGE, render_run(path, name_of(experiment), summary))
        print(finished_line(experiment, summary, path))
    return 0


def _tracker(wanted: str | None) -> str | None:
    check_tracker(wanted)
    if wanted is None:
        return "tensorboard" if importlib.util.find_spec("tensorboard") is not None else None
    return None if wanted == "none" else wanted


def name_of(experiment: Experiment) -> str:
    """A name from the settings that are changed most often."""
    pruned = f"{experiment.score}-{experiment.pattern or f'{experiment.sparsity:g}'}" if experiment.score else "dense"
    return folder_name(f"{experiment.model}-{pruned}-seed{experiment.seed}")


def finished_line(experiment: Experiment, summary: dict[str, Any], path: Path) -> str:
    """A finished run in two lines."""
    budget = ", extended budget" if experiment.budget == "extended" else ""
    return (
        f"{name_of(experiment)}: {summary['quality_name']} {summary['quality']:.4f} (held-out loss"
        f" {summary['held_out_loss']:.4f}) after {summary['steps']} steps{budget}, {summary['seconds']:.0f} s;"
        f" {summary['sparsity']:.4%} of {summary['prunable'] or 0:,} prunable weights pruned\nSaved in {path}"
    )
