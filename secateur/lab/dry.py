"""A dry run: an experiment's model, optimizer, score and schedule on two small steps of made-up data.

`python -m secateur.lab.dry FOLDER` does it with every recipe in a folder.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

from secateur.errors import SecateurError
from secateur.lab.config import Experiment, read_experiment
from secateur.lab.data import Images, Tokens
from secateur.lab.trainer import Execution, Trainer
from secateur.lab.zoo import is_language_model

PICTURES = {"cifar10": (3, 32, 10), "cifar100": (3, 32, 100), "digits": (1, 8, 10)}  # channels, pixels, classes
PICTURE = (1, 28, 10)
BYTES = 256  # tokens there are: a large vocabulary would take most of the time and show nothing
SMALL = {
    "steps": 2,
    "batch": 2,
    "every": 1,
    "warmup": 1,
    "begin": 0.0,
    "end": 1.0,
    "until": 1.0,
    "evaluate_every": 1,
    "evaluation": 1,
}


def dry_run(experiment: Experiment, cpu: bool = False) -> str:
    """Shapes, forward, backward, two steps with mask updates and an evaluation; a line that says it went well."""
    context = min(32, experiment.context)
    small = replace(experiment, **SMALL, context=context, compile=False, budget="normal")  # type: ignore[arg-type]
    trainer = Trainer(small, Execution(cpu=cpu, most_layers=2), made_up(experiment, context))
    losses = [float(trainer.step()) for _ in range(2)]
    found = trainer.evaluate()
    if not all(map(math.isfinite, (*losses, found["held_out_loss"]))):
        raise SecateurError(f"The loss is not finite: {losses}, {found}.")
    if trainer.pruner is not None:
        report = trainer.pruner.report()
        if not report.pruned:
            raise SecateurError(f"Two updates of the masks pruned nothing of {report.prunable:,} weights.")
        return f"ok: {experiment.model}, {experiment.score}, {report.pruned:,} of {report.prunable:,} gone"
    return f"ok: {experiment.model}, dense"


def made_up(experiment: Experiment, context: int) -> Tokens | Images:
    """Random data of the kind the experiment reads; none of it needs to be there."""
    draw = torch.Generator().manual_seed(0)
    source = experiment.data.partition(":")[0]
    if is_language_model(experiment.model):
        tokens = torch.randint(0, BYTES, (8 * (context + 1),), generator=draw, dtype=torch.int32)
        return Tokens(tokens, tokens, BYTES, "made up")
    channels, size, classes = PICTURES.get(source, PICTURE)
    inputs = torch.randint(0, 256, (4, channels, size, size), generator=draw, dtype=torch.uint8)
    targets = torch.randint(0, classes, (4,), generator=draw)
    middle = (0.5,) * channels
    return Images(inputs, targets, inputs, targets, classes, middle, middle, "made up", False)


def main(folder: Path) -> int:
    """Every recipe in the folder; the exit code."""
    recipes = sorted(folder.glob("*.toml"))
    for recipe in recipes:
        try:
            print(f"{recipe.stem}: {dry_run(read_experiment(recipe, {}))}", flush=True)
        except SecateurError as error:
            print(f"{recipe.stem}: {error}", file=sys.stderr)
            return 1
    return 0 if recipes else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
