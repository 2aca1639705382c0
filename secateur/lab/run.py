"""Train in a run's folder: log metrics, keep checkpoints and the best weights, continue after a kill, summarize."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from torch import Tensor

from secateur.errors import LAB_EXTRA, SaveError, library
from secateur.files import appearing
from secateur.lab.checkpoint import BEST, GPU, GRADIENT, WEIGHTS, RunFolder
from secateur.lab.data import Tokens
from secateur.lab.monitor import LoadMeter, Monitor, OneWeight, means_of
from secateur.lab.record import commit, hardware, versions
from secateur.lab.trainer import Callback, Trainer
from secateur.model.prunable import plain_name


def run(trainer: Trainer, folder: RunFolder) -> dict[str, Any]:
    """Train until the last step or until the time is up, from the checkpoint if there is one; returns the summary."""
    with folder.held() if trainer.accelerator.is_main_process else nullcontext():
        trainer.accelerator.wait_for_everyone()  # until the folder is in order
        try:
            return _run(trainer, folder)
        except SaveError as error:
            raise SaveError(f"{error} Free some space: the same command continues from the last checkpoint.") from error


def _run(trainer: Trainer, folder: RunFolder) -> dict[str, Any]:
    wanted, progress = trainer.experiment, trainer.progress
    if trainer.execution.tracker:
        trainer.accelerator.init_trackers("secateur", config={k: str(v) for k, v in asdict(wanted).items()})
    if folder.checkpoint is not None:
        trainer.load(folder.checkpoint)
        if progress.best < math.inf:
            folder.check_best()
    if trainer.accelerator.is_main_process:
        folder.rewind(progress.noted)
    recorder = Recorder(trainer, folder)
    trainer.callbacks.insert(0, recorder)
    meter = LoadMeter()
    with Monitor(trainer.accelerator.device) as monitor:
        if monitor.off and trainer.accelerator.device.type == "cuda" and trainer.accelerator.is_main_process:
            print(f"secateur: the GPU is not monitored: {monitor.off}", file=sys.stderr)
        found = trainer.train()
    samples, peaks = _of_all_processes(trainer, monitor)
    summary = summarize(trainer, found) | {
        "gpu": means_of(samples),
        "gpu_off": monitor.off,
        "peak_bytes": max(peaks),
        # The processes of one run count each other as other processes.
        "cpu_load": asdict(meter.load()) if trainer.accelerator.num_processes == 1 else None,
        "gradient_of": {"name": recorder.one_weight.name, "index": recorder.one_weight.index},
    }
    if trainer.accelerator.is_main_process and progress.step == wanted.steps_taken:  # else it is to be continued
        extras = {GRADIENT: progress.gradients, GPU: samples}
        folder.finish(summary, trainer.pruner.report().to_json() if trainer.pruner else None, extras)
    trainer.accelerator.end_training()
    return summary


def _of_all_processes(trainer: Trainer, monitor: Monitor) -> tuple[list[dict[str, float]], list[int]]:
    """The samples of every process's GPU, and the most memory each process used."""
    gather = library("accelerate.utils", "Training", LAB_EXTRA).gather_object
    mine = trainer.accelerator.process_index
    return gather([{"gpu": mine, **sample} for sample in monitor.samples]), gather([monitor.peak_bytes])


class Recorder(Callback):
    """Writes metrics, the best weights and checkpoints to the run's folder as the run trains."""

    def __init__(self, trainer: Trainer, folder: RunFolder) -> None:
        self._folder = folder
        self.one_weight = OneWeight(trainer.accelerator.unwrap_model(trainer.model), trainer.experiment.seed)

    def on_gradients(self, trainer: Trainer) -> None:
        self.one_weight.note()

    def after_step(self, trainer: Trainer, loss: Tensor, evaluation: dict[str, float] | None) -> None:
        step, how, over = trainer.progress.step, trainer.execution, trainer.over
        if step % how.log_every == 0 or over:
            self._log(trainer, {"loss": float(loss), "lr": trainer.experiment.rate(step)})
        if evaluation is not None:
            self._log(trainer, evaluation)
            self._keep_best(trainer, evaluation["held_out_loss"])
        if step % how.checkpoint_every == 0 or over:
            trainer.progress.gradients += self.one_weight.taken()
            trainer.save(self._folder)

    def _log(self, trainer: Trainer, numbers: dict[str, float]) -> None:
        progress = trainer.progress
        progress.noted += 1
        if not trainer.accelerator.is_main_process:
            return
        line = {"step": progress.step, "seconds": round(progress.seconds, 3), "seen": trainer.seen}
        self._folder.note({**line, **numbers, "sparsity": trainer.sparsity})
        if trainer.execution.tracker:
            trainer.accelerator.log({**numbers, "sparsity": trainer.sparsity}, step=progress.step)

    def _keep_best(self, trainer: Trainer, loss: float) -> None:
        """Save the weights if their held-out loss is the lowest so far at the final sparsity."""
        pruner = trainer.pruner
        if (pruner is not None and pruner.report().asked < trainer.final_sparsity) or not loss < trainer.progress.best:
            return
        trainer.progress.best = loss
        state = trainer.accelerator.get_state_dict(trainer.model)
        if trainer.accelerator.is_main_process:
            save_file = library("safetensors.torch", "Saving weights", LAB_EXTRA).save_file
            with appearing(self._folder.path / BEST) as fresh:
                whole = {plain_name(name): tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
                save_file(whole, str(fresh / WEIGHTS), {"step": str(trainer.progress.step)})


def summarize(trainer: Trainer, found: dict[str, float]) -> dict[str, Any]:
    """The result of a run and what it ran on. Quality is that of the last step, at the final sparsity."""
    report = trainer.pruner.report() if trainer.pruner else None
    tokens = isinstance(trainer.data, Tokens)
    size = trainer.data.train.numel() if isinstance(trainer.data, Tokens) else len(trainer.data.inputs)
    layers = report.tensors if report else ()
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
        "layers": [{"name": row.name, "numel": row.numel, "sparsity": row.sparsity} for row in layers],
        "processes": trainer.accelerator.num_processes,
        "micro_batch": trainer.micro_batch,
        "versions": versions() | {"accelerate": library("accelerate", "Training", LAB_EXTRA).__version__},
        "commit": commit(),
        "hardware": hardware(trainer.accelerator.device),
        "budget": trainer.experiment.budget,
        "train_size": size,  # tokens or images
        "epochs": float(f"{trainer.seen / size:.4g}"),  # above 1 the data repeats
        "breakdown_ms": trainer.stopwatch.milliseconds(),
    }
