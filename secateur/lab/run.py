"""One run: its folder, training in it, its summary and its page.

`metrics.jsonl` grows while the run trains, beside checkpoints and the best weights. A run that was killed continues
from its last checkpoint. `summary.json` marks it as finished.
"""

from __future__ import annotations

import html
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from secateur.errors import LAB_EXTRA, SaveError, SecateurError, StateError, library
from secateur.files import appearing, check_folder, clear, locked, read_json, write
from secateur.lab.checkpoint import BEST, CHECKPOINT, check_checkpoint, check_tensors
from secateur.lab.config import Experiment
from secateur.lab.data import Tokens
from secateur.lab.figures import BLUE, GREEN, GREY, ORANGE, WIDTH, block, document, figure, warning_box
from secateur.lab.monitor import CpuLoad, LoadMeter, Monitor, OneWeight, gradient_lines, means_of
from secateur.lab.record import commit, hardware, versions
from secateur.lab.runs import CONFIG, METRICS, SUMMARY, measure_of, read_run
from secateur.lab.trainer import Callback, Trainer
from secateur.model.prunable import plain_name
from secateur.report import heat_map, html_table

WEIGHTS = "model.safetensors"
REPORT, GRADIENT, GPU, PAGE = "report.json", "gradient.json", "gpu.json", "report.html"
LOCK = ".lock"
ADVICE = "Restore a copy of it, or name another folder with --out."
GPU_FIGURES = {  # of a sample: what it is in words, and its unit
    "busy": ("busy, %", 1.0),
    "memory_access": ("memory access, %", 1.0),
    "memory_bytes": ("memory, GB", 1e9),
    "watts": ("power, W", 1.0),
}

Lines = Sequence[Mapping[str, Any]]  # of metrics.jsonl


def check_place(path: Path) -> None:
    """Raise if a run cannot use a folder: it is not writable, holds something else, or another process trains there.

    Call it before reading data, which may take long.
    """
    check_folder(path, replaced=False)
    others = [] if (path / CONFIG).exists() or not path.exists() else [one.name for one in path.iterdir()]
    if any(name != LOCK and not name.startswith(f".{CONFIG}.") for name in others):  # what a killed run may leave
        raise SecateurError(f"{path} exists already and holds no run. Name another folder with --out.")
    first = os.environ.get("RANK", "0") == "0"  # the lock is held by the first process of this run
    if first and (path / LOCK).exists():
        with locked(path / LOCK, _busy(path)):
            pass


def _busy(path: Path) -> str:
    return f"Another process is training in {path}. Wait for it, or name another folder with --out."


class RunFolder:
    """The folder of a run. One that holds another experiment is refused."""

    def __init__(self, path: Path, experiment: Experiment, fingerprint: str) -> None:
        self.path = path
        config = asdict(experiment) | {"fingerprint": fingerprint}
        config = json.loads(json.dumps(config))  # as it reads back: tuples become lists
        if (path / CONFIG).exists():
            found = read_json(path / CONFIG, dict, StateError, ADVICE)
            if "fingerprint" not in found:
                raise SecateurError(f"{path} exists already and holds no run. Name another folder with --out.")
            # A setting that is none may be missing: the version that began the run did not have it.
            differing = sorted(key for key in {*found, *config} if found.get(key) != config.get(key))
            if differing:
                raise SecateurError(
                    f"{path} holds a run with other settings ({', '.join(differing)}). Name another folder with --out."
                )
        else:
            check_place(path)
            path.mkdir(parents=True, exist_ok=True)
            write(path / CONFIG, json.dumps(config, indent=1) + "\n")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other processes, and remove what a killed one left half-written."""
        with locked(self.path / LOCK, _busy(self.path)):
            for name in (CHECKPOINT, BEST, CONFIG, METRICS, SUMMARY, REPORT, GRADIENT, GPU, PAGE):
                clear(self.path / name)
            for name in (CHECKPOINT, BEST):  # left by a killed process; nobody else writes here now
                (self.path / f".{name}.lock").unlink(missing_ok=True)
            yield

    @property
    def finished(self) -> bool:
        """Whether there is a summary. Raises if any file of the run is damaged."""
        if not (self.path / SUMMARY).exists():
            return False
        run = read_run(self.path)
        measure_of([run])
        for name, kind in (REPORT, dict), (GRADIENT, list), (GPU, list):
            if (self.path / name).exists() or (name == REPORT and run.summary.get("layers")):
                read_json(self.path / name, kind, StateError, ADVICE)
        if (self.path / BEST).exists():
            self.check_best()
        if (self.path / CHECKPOINT).exists():
            check_checkpoint(self.path / CHECKPOINT)
        return True

    def check_best(self) -> None:
        """Raise if the best weights are damaged."""
        check_tensors(self.path / BEST / WEIGHTS)

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint, or None."""
        return self.path / CHECKPOINT if (self.path / CHECKPOINT).exists() else None

    def forget_weights(self) -> None:
        """Delete the weights of a finished run, but not its numbers."""
        for name in (CHECKPOINT, BEST):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def rewind(self, count: int) -> None:
        """Keep the first `count` lines of metrics.jsonl, those up to the checkpoint. The steps after it will be taken
        again, and the last line may be truncated."""
        path = self.path / METRICS
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[:count] if path.exists() else []
            found = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError) as error:
            raise StateError(f"{path} is damaged ({error}). {ADVICE}") from error
        whole = [line for line in found if isinstance(line, dict) and type(line.get("step")) is int]
        if len(whole) < count:
            raise StateError(f"{path} is damaged: it has {len(whole)} of {count} lines. {ADVICE}")
        write(path, "".join(line + "\n" for line in lines))

    def note(self, numbers: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(numbers) + "\n")
        except OSError as error:
            raise SaveError(f"{self.path / METRICS} cannot be written ({error.strerror}).") from error

    def finish(self, summary: Mapping[str, Any], report: str | None, extras: Mapping[str, Any]) -> None:
        """Write the report, the non-empty `extras` by file name, and last the summary, which marks a finished run."""
        for name, numbers in extras.items():
            if numbers:
                write(self.path / name, json.dumps(numbers) + "\n")
        if report is not None:
            write(self.path / REPORT, report + "\n")
        write(self.path / SUMMARY, json.dumps(summary, indent=1) + "\n")


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
            trainer.save(self._folder.path)

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


# The page


def render_run(folder: Path, name: str, summary: Mapping[str, Any]) -> str:
    """The page of a finished run, from the files in its folder."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    load = CpuLoad(**summary["cpu_load"]) if summary.get("cpu_load") else None
    rows = [
        (summary["quality_name"], f"{summary['quality']:.4f}"),
        ("held-out loss", f"{summary['held_out_loss']:.4f}"),
        ("steps", f"{summary['steps']:,} of {summary['asked_steps']:,}"),
        *([("budget", summary["budget"])] if summary["budget"] != "normal" else []),
        ("sparsity of prunable weights", f"{summary['sparsity']:.4%}"),
        ("seconds", f"{summary['seconds']:.1f}"),
        *_resources(summary),
    ]
    packages = ", ".join(f"{package} {version}" for package, version in summary["versions"].items())
    footer = html.escape(f"{summary['hardware']}; {packages}; commit {summary['commit']}.")
    warning = warning_box(load.warning if load else None)
    parts = [warning, f"<p>{html.escape(name)}</p>", html_table(("", "value"), rows)]
    return document(run_headline(summary), parts, _run_figures(folder, lines, summary), footer)


def _resources(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Throughput, memory and use of the GPU, as far as the run recorded them."""
    tokens = "tokens" if summary["quality_name"] == "perplexity" else "images"
    rows = []
    if summary.get("seen") and summary["seconds"]:
        rows.append((f"{tokens} a second", f"{summary['seen'] / summary['seconds']:,.0f}"))
    if summary.get("epochs"):
        rows.append(("passes over the data", f"{summary['epochs']:.2f}"))
    if summary.get("peak_bytes"):
        rows.append(("most memory in use, GB", f"{summary['peak_bytes'] / 1e9:.2f}"))
    gpu = summary.get("gpu") or {}
    rows += [(f"GPU: {words}", f"{gpu[key] / unit:.1f}") for key, (words, unit) in GPU_FIGURES.items() if key in gpu]
    return rows


def run_headline(summary: Mapping[str, Any]) -> str:
    """The result of a run in one line."""
    pruned = f"{100 * summary['sparsity']:.3g} % gone" if summary["sparsity"] else "Dense"
    return f"{pruned}: {summary['quality_name']} {summary['quality']:.4g} after {summary['steps']:,} steps"


def _run_figures(folder: Path, lines: Lines, summary: Mapping[str, Any]) -> list[str]:
    figures = [block("Loss", "Line: training batches. Dots: the whole held-out set.", _loss(lines))]
    if summary["layers"]:
        cells = heat_map([(one["name"], one["sparsity"]) for one in summary["layers"]])
        figures.append(block("Sparsity by layer", "", cells))
        figures.append(block("Sparsity", "Of the prunable weights.", _line(lines, "sparsity", "fraction pruned", BLUE)))
    figures.append(block("Learning rate", "", _line(lines, "lr", "learning rate", GREY)))
    if summary["breakdown_ms"]:
        said = "Mean of the sampled steps, with a sync after each part, so the sum exceeds the time of a usual step."
        figures.append(block("Time of a step", said, _bars(summary["breakdown_ms"])))
    if (folder / GRADIENT).exists():
        one = summary["gradient_of"]
        said = f"Element {one['index']} of {one['name']}, with Adam's moving averages of it."
        values = json.loads((folder / GRADIENT).read_text(encoding="utf-8"))
        figures.append(block("The gradient of one weight", said, _gradient(values)))
    if (folder / GPU).exists():
        samples = json.loads((folder / GPU).read_text(encoding="utf-8"))
        shown = {key: text for key, text in GPU_FIGURES.items() if key in samples[0]}
        said = "A line for every GPU." if len({one.get("gpu") for one in samples}) > 1 else ""
        figures += [
            block(f"GPU: {words}", said, _gpu(samples, key, words, unit)) for key, (words, unit) in shown.items()
        ]
    return figures


def _loss(lines: Lines) -> str:
    def draw(axes: Any) -> None:
        for key, style, colour in (("loss", "-", GREY), ("held_out_loss", "o-", BLUE)):
            found = [(line["step"], line[key]) for line in lines if key in line]
            if found:
                axes.plot(*zip(*found, strict=True), style, color=colour, markersize=3.5, linewidth=1.2)
        axes.set(xlabel="step", ylabel="loss, nats")

    return figure(draw, width=WIDTH, height=2.6)


def _line(lines: Lines, key: str, label: str, colour: str) -> str:
    def draw(axes: Any) -> None:
        axes.plot(*zip(*[(line["step"], line[key]) for line in lines if key in line], strict=True), color=colour)
        axes.set(xlabel="step", ylabel=label, ylim=(0, None))

    return figure(draw, width=WIDTH, height=2.2)


def _bars(milliseconds: Mapping[str, float]) -> str:
    def draw(axes: Any) -> None:
        axes.barh(list(milliseconds), list(milliseconds.values()), color=BLUE)
        axes.set(xlabel="milliseconds")
        axes.invert_yaxis()

    return figure(draw, width=WIDTH, height=2.2)


def _gradient(values: Sequence[float]) -> str:
    def draw(axes: Any) -> None:
        for (label, line), colour in zip(gradient_lines(values).items(), (GREY, ORANGE, BLUE, GREEN), strict=True):
            thin = 0.6 if colour == GREY else 1.4
            axes.plot(range(1, len(line) + 1), line, color=colour, linewidth=thin, label=label)
        axes.set(xlabel="step", ylabel="gradient")
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return figure(draw, width=WIDTH, height=3.2)


def _gpu(samples: Sequence[Mapping[str, float]], key: str, label: str, unit: float) -> str:
    def draw(axes: Any) -> None:
        for number in dict.fromkeys(one.get("gpu", 0) for one in samples):  # a line for every GPU of the run
            own = [one for one in samples if one.get("gpu", 0) == number and key in one]
            axes.plot([one["seconds"] for one in own], [one[key] / unit for one in own], linewidth=1.2)
        axes.set(xlabel="seconds", ylabel=label, ylim=(0, None))

    return figure(draw, width=WIDTH, height=2.2)
