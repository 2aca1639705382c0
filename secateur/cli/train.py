"""`secateur train`: an experiment from a recipe or from options, the seeds' names among them."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

from secateur.bench.measuring import positive
from secateur.errors import SecateurError, library
from secateur.files import check_room, write
from secateur.lab.config import BUDGETS, OPTIMIZERS, Experiment, read_experiment
from secateur.settings import parse

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
METHODS = ("none", "magnitude", "movement", "state")
STATE_SCORE = "bitter0"  # what the seeds take for state pruning when no variant is named


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", type=Path, help="a .toml file, such as recipes/gpt2-variance-80.toml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes", help="change a setting"
    )
    parser.add_argument("--out", type=Path, help="folder of the run (runs/MODEL-SCORE-SPARSITY-SEED)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS)
    parser.add_argument("--variant", help="bitter0 to bitter9: the score of state pruning")
    parser.add_argument("--pruning-method", choices=METHODS)
    parser.add_argument("--target-sparsity", type=float)
    parser.add_argument("--max-iters", type=positive, help="optimizer steps")
    parser.add_argument(
        "--budget", choices=BUDGETS, help="extended: the seeds' 21 %% or 30 %% more steps for some scores"
    )
    parser.add_argument("--compile", action="store_true", default=None)
    parser.add_argument("--max-time", type=float, metavar="SECONDS", help="stop after so long")
    parser.add_argument("--micro-batch", type=positive, help="rows at a time (as many as fit)")
    parser.add_argument("--checkpoint-every", type=positive, default=500, metavar="STEPS", help="(500)")
    parser.add_argument("--cpu", action="store_true", help="even if there is a GPU")
    parser.add_argument("--tracker", choices=(*TRACKERS, "none"), help="(tensorboard if it is installed)")
    parser.add_argument("--dry-run", action="store_true", help="two small steps on made-up data: does it work?")
    parser.set_defaults(run=run_train)


def changes_of(options: argparse.Namespace) -> dict[str, Any]:
    """Settings that the options ask for."""
    told = {
        "optimizer": options.optimizer, "sparsity": options.target_sparsity, "steps": options.max_iters,
        "budget": options.budget, "compile": options.compile,
    }  # fmt: skip
    found = {key: value for key, value in told.items() if value is not None}
    method, variant = options.pruning_method, options.variant
    if variant and method not in (None, "state"):
        raise SecateurError(f"--variant {variant} goes with --pruning-method state, not with {method}.")
    if method == "none":
        found |= {"score": None, "sparsity": 0.0, "pattern": None, "regrow": None}
    elif variant or method:
        found["score"] = variant or (STATE_SCORE if method == "state" else method)
    return found | parse(options.changes)


def run_train(options: argparse.Namespace) -> int:
    """The command `secateur train`."""
    from secateur.lab.checkpoint import RunFolder, check_place
    from secateur.lab.run import run
    from secateur.lab.trainer import EXTRA, Execution, Trainer, dry_run

    experiment = read_experiment(options.recipe, changes_of(options))
    if options.dry_run:
        print(dry_run(experiment, options.cpu))
        return 0
    path = options.out or Path("runs") / name_of(experiment)
    check_place(path)
    execution = Execution(
        options.cpu, options.micro_batch, options.checkpoint_every, options.max_time, _tracker(options.tracker), path
    )
    trainer = Trainer(experiment, execution)  # before a folder is made for it: much can be wrong
    with trainer.accelerator.main_process_first():
        folder = RunFolder(path, experiment, trainer.fingerprint)
    if folder.finished:
        print(f"secateur: {path} is finished already: see {path / 'summary.json'}", file=sys.stderr)
        return 0
    check_room(path, max(0, trainer.room - folder.bytes))
    summary = run(trainer, folder, Teller())
    if trainer.accelerator.is_main_process and not folder.finished:
        print(f"Stopped after {summary['steps']} of {summary['asked_steps']} steps; the same command goes on.")
    elif trainer.accelerator.is_main_process:
        library("matplotlib", "The page of a run", EXTRA)
        page = importlib.import_module("secateur.lab.runpage").render(path, name_of(experiment), summary)
        write(path / "report.html", page)
        print(told(experiment, summary, path))
    return 0


def _tracker(wanted: str | None) -> str | None:
    if wanted == "none":
        return None
    found = wanted or "tensorboard"
    if importlib.util.find_spec(found) is not None:
        return found
    if wanted is not None:
        raise SecateurError(f"--tracker {wanted}: it is not installed. pip install {wanted}, or pass --tracker none.")
    return None


def name_of(experiment: Experiment) -> str:
    """A name that tells runs of one model apart by what is mostly changed."""
    pruned = f"{experiment.score}-{experiment.pattern or f'{experiment.sparsity:g}'}" if experiment.score else "dense"
    return f"{experiment.model}-{pruned}-seed{experiment.seed}".replace("/", "_").replace(" ", "")


def told(experiment: Experiment, summary: dict[str, Any], path: Path) -> str:
    """A finished run in a few lines."""
    budget = ", extended budget" if experiment.budget != "normal" else ""
    return (
        f"{name_of(experiment)}: {summary['quality_name']} {summary['quality']:.4f} (held-out loss"
        f" {summary['held_out_loss']:.4f}) after {summary['steps']} steps{budget}, {summary['seconds']:.0f} s;"
        f" {summary['sparsity']:.4%} of {summary['prunable'] or 0:,} prunable weights gone\nSaved in {path}"
    )


class Teller:
    """Tells how far a run is: one line on stderr, every second at most."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, trainer: Any, loss: float) -> None:
        progress, steps = trainer.progress, trainer.experiment.steps_taken
        now = time.perf_counter()
        if now - self._last < 1 and progress.step < steps:
            return
        self._last = now
        left = progress.seconds / progress.step * (steps - progress.step)
        line = f"step {progress.step}/{steps}, loss {loss:.3f}, {trainer.sparsity:.1%} gone, {left:.0f} s left"
        end = "\n" if progress.step == steps or not sys.stderr.isatty() else ""
        print(f"\r{line:79}" if sys.stderr.isatty() else line, end=end, file=sys.stderr, flush=True)
