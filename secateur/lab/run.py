"""A run's folder: its settings, its numbers line by line, its checkpoint, and the summary that says it is finished."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch

from secateur.errors import SaveError, library
from secateur.files import appearing
from secateur.lab.checkpoint import BEST, GPU, GRADIENT, WEIGHTS, RunFolder
from secateur.lab.data import Tokens
from secateur.lab.monitor import Monitor
from secateur.lab.record import commit, hardware, versions
from secateur.lab.trainer import EXTRA, Trainer
from secateur.model.prunable import plain_name

Tell = Callable[[Trainer, float], None]


def run(trainer: Trainer, folder: RunFolder, tell: Tell = lambda *_: None) -> dict[str, Any]:
    """Train to the end, or until the time is up; continue from a checkpoint if there is one. The summary."""
    with folder.held() if trainer.accelerator.is_main_process else nullcontext():
        trainer.accelerator.wait_for_everyone()  # until the folder is in order
        try:
            return _run(trainer, folder, tell)
        except SaveError as error:
            raise SaveError(f"{error} Free some space: the same command goes on from the last checkpoint.") from error


def _run(trainer: Trainer, folder: RunFolder, tell: Tell) -> dict[str, Any]:
    wanted, how, progress = trainer.experiment, trainer.execution, trainer.progress
    if how.tracker:
        trainer.accelerator.init_trackers("secateur", config={k: str(v) for k, v in asdict(wanted).items()})
    if folder.checkpoint is not None:
        trainer.load(folder.checkpoint)
        if progress.best < math.inf:
            folder.check_best()
    if trainer.accelerator.is_main_process:
        folder.rewind(progress.noted)
    with Monitor(trainer.accelerator.device) as monitor:
        found = _train(trainer, folder, tell)
    summary = summarise(trainer, found) | {"gpu": monitor.means()}
    if trainer.accelerator.is_main_process and progress.step == wanted.steps_taken:  # or else it is to go on one day
        looks = {GRADIENT: progress.gradients, GPU: monitor.samples}
        folder.finish(summary, trainer.pruner.report().to_json() if trainer.pruner else None, looks)
    trainer.accelerator.end_training()
    return summary


def _train(trainer: Trainer, folder: RunFolder, tell: Tell) -> dict[str, float]:
    """All steps that are left; the last evaluation."""
    wanted, how, progress = trainer.experiment, trainer.execution, trainer.progress
    before, began = progress.seconds, time.perf_counter()
    found: dict[str, float] = {}
    over = progress.step >= wanted.steps_taken
    while not over:
        loss = trainer.step()
        progress.seconds = before + time.perf_counter() - began
        over = _over(trainer)
        if progress.step % how.log_every == 0 or over:
            _note(trainer, folder, {"loss": float(loss), "lr": wanted.rate(progress.step)})
            if trainer.accelerator.is_main_process:
                tell(trainer, float(loss))
        if progress.step % wanted.evaluate_every == 0 or over:
            found = trainer.evaluate()
            _note(trainer, folder, found)
            _keep_best(trainer, folder, found["held_out_loss"])
        if progress.step % how.checkpoint_every == 0 or over:
            progress.gradients += trainer.one_weight.taken()
            trainer.save(folder)
    return found or trainer.evaluate()  # killed between the last checkpoint and the summary


def _over(trainer: Trainer) -> bool:
    """Whether this was the last step, or the time is up; the processes agree on it."""
    limit = trainer.execution.max_seconds
    if trainer.progress.step == trainer.experiment.steps_taken or limit is None:
        return trainer.progress.step == trainer.experiment.steps_taken
    late = torch.tensor(float(trainer.progress.seconds > limit), device=trainer.accelerator.device)
    return bool(trainer.accelerator.reduce(late, "sum") > 0)


def _note(trainer: Trainer, folder: RunFolder, numbers: dict[str, float]) -> None:
    progress = trainer.progress
    progress.noted += 1
    if not trainer.accelerator.is_main_process:
        return
    folder.note(
        {"step": progress.step, "seconds": round(progress.seconds, 3), "seen": trainer.seen, **numbers,
         "sparsity": trainer.sparsity}
    )  # fmt: skip
    if trainer.execution.tracker:
        trainer.accelerator.log({**numbers, "sparsity": trainer.sparsity}, step=progress.step)


def _keep_best(trainer: Trainer, folder: RunFolder, loss: float) -> None:
    """The weights with the lowest held-out loss so far, among those of the sparsity that was asked for."""
    pruner = trainer.pruner
    if (pruner is not None and pruner.report().asked < trainer.final_sparsity) or not loss < trainer.progress.best:
        return
    trainer.progress.best = loss
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        save_file = library("safetensors.torch", "Saving weights", EXTRA).save_file
        with appearing(folder.path / BEST) as fresh:
            whole = {plain_name(name): tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
            save_file(whole, str(fresh / WEIGHTS), {"step": str(trainer.progress.step)})


def summarise(trainer: Trainer, found: dict[str, float]) -> dict[str, Any]:
    """What a finished run says of itself: quality at the last step, at the final sparsity."""
    report = trainer.pruner.report() if trainer.pruner else None
    tokens = isinstance(trainer.data, Tokens)
    return {
        "quality_name": "perplexity" if tokens else "accuracy",
        "higher_is_better": not tokens,
        **found,
        "steps": trainer.progress.step,
        "asked_steps": trainer.experiment.steps_taken,
        "seconds": round(trainer.progress.seconds, 3),
        "seen": trainer.seen,
        "sparsity": trainer.sparsity,
        "prunable": report.prunable if report else None,
        "pruned": report.pruned if report else 0,
        "layers": [{"name": row.name, "numel": row.numel, "sparsity": row.sparsity} for row in report.tensors]
        if report
        else [],
        "processes": trainer.accelerator.num_processes,
        "micro_batch": trainer.micro,
        "versions": versions() | {"accelerate": library("accelerate", "Training", EXTRA).__version__},
        "commit": commit(),
        "hardware": hardware(trainer.accelerator.device),
        "budget": trainer.experiment.budget,
        "breakdown_ms": trainer.stopwatch.milliseconds(),
        "gradient_of": {"name": trainer.one_weight.name, "index": trainer.one_weight.index},
    }
