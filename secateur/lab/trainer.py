"""The training loop of the lab, the demo and the benchmarks, on Hugging Face Accelerate.

One process or several give the same numbers up to rounding. A run that was killed continues with the same bits.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.errors import LAB_EXTRA, SecateurError, library
from secateur.files import PAGE, appearing
from secateur.lab.checkpoint import CHECKPOINT, Checkpoint, Progress
from secateur.lab.config import OPTIMIZERS, Experiment, without_idle
from secateur.lab.data import Images, Tokens, load
from secateur.lab.models import image_model, is_language_model, language_model, predict, seeded, size_of
from secateur.lab.monitor import Stopwatch
from secateur.model.distributed import local, unwrap
from secateur.model.prunable import find_prunable, unfit_for
from secateur.model.state import rounding
from secateur.progress import ProgressBar
from secateur.selection.tiles import parse_pattern


@dataclass(frozen=True)
class Execution:
    """How a run is carried out; none of it should change the numbers."""

    cpu: bool = False
    micro_batch: int | None = None  # rows in a forward pass of a process; None: as many as fit
    checkpoint_every: int = 500
    max_seconds: float | None = None  # of one call of `train`, which a later one continues
    tracker: str | None = None
    logs: Path | None = None  # folder for the tracker
    log_every: int = 10
    most_layers: int = 1000  # truncates language models, for a dry run


class Callback:
    """What a caller adds to the training loop. Every method does nothing unless overridden."""

    def on_gradients(self, trainer: Trainer) -> None:
        """After the backward passes of a step, before clipping."""

    def before_masks(self, trainer: Trainer) -> None:
        """After the optimizer's step, before the pruner's; not called in dense runs."""

    def after_step(self, trainer: Trainer, loss: Tensor, evaluation: dict[str, float] | None) -> None:
        """After a step, with its evaluation if one was due."""


class ShowProgress(Callback):
    """A progress bar on stderr."""

    def __init__(self, name: str) -> None:
        self._name, self._note = name, ""
        self._bar: ProgressBar | None = None

    def after_step(self, trainer: Trainer, loss: Tensor, evaluation: dict[str, float] | None) -> None:
        step = trainer.progress.step
        if self._bar is None:
            self._bar = ProgressBar(self._name, trainer.experiment.steps_taken, step - 1)
        if step % trainer.execution.log_every == 0 or trainer.over:  # not every step: a GPU would have to be awaited
            self._note = f"loss {float(loss):.3f}, {trainer.sparsity:.1%} pruned"
        self._bar.tick(self._note)
        if trainer.over:
            self._bar.close()


class Trainer:
    """Model, optimizer, pruner and data of an experiment, and the loop that trains them."""

    def __init__(
        self,
        experiment: Experiment,
        execution: Execution,
        data: Tokens | Images | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        accelerate = library("accelerate", "Training", LAB_EXTRA)
        self.experiment, self.execution = experiment, execution
        self.callbacks = list(callbacks)
        self.data = load(experiment.data) if data is None else data
        # No mixed_precision here: Accelerate's setting holds for the whole process and could not differ between runs.
        self.accelerator = accelerate.Accelerator(
            cpu=execution.cpu, log_with=execution.tracker, project_dir=str(execution.logs) if execution.logs else None,
            step_scheduler_with_optimizer=False,
        )  # fmt: skip
        if self.sharded:
            # Every process builds the same model. Broadcasting it from the first to meta tensors would untie weights.
            self.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        self.progress = Progress()
        model = seeded(experiment.seed, lambda: build_model(experiment, self.data, execution.most_layers)).to(
            self.accelerator.device
        )
        torch.manual_seed(experiment.seed)  # for dropout and the like
        optimizer = experiment.build_optimizer(model)
        model = torch.compile(model) if experiment.compile else model  # type: ignore[assignment]
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.pruner = experiment.build_pruner(self.model, self.optimizer.optimizer)
        world = self.accelerator.num_processes
        if experiment.batch % world:
            raise SecateurError(
                f"A batch of {experiment.batch} cannot be divided evenly among {world} processes. Change batch."
            )
        self.rows = experiment.batch // world
        self.micro_batch = execution.micro_batch or find_micro_batch(self)
        self.progress.processes = world
        self.scaler = self._build_scaler()
        next(iter(self._held_out()), None)  # raises now if the held-out set is too small
        self.fingerprint = self.data.fingerprint()
        self.stopwatch = Stopwatch(self.accelerator.device)
        self.over = False  # whether the last step is done or the time is up

    def _build_scaler(self) -> torch.amp.GradScaler | None:
        """What keeps small gradients of fp16 from becoming zero; None in other precisions, which need none."""
        if self.experiment.precision != "fp16":
            return None
        if self.sharded:
            raise SecateurError("precision fp16 does not work with a sharded model. Use bf16.")
        return torch.amp.GradScaler(self.accelerator.device.type)

    def train(self) -> dict[str, float]:
        """Take the remaining steps, or as many as the time allows; returns the last evaluation."""
        wanted, progress = self.experiment, self.progress
        before, began = progress.seconds, time.perf_counter()
        found: dict[str, float] | None = None
        self.over = progress.step >= wanted.steps_taken
        while not self.over:
            loss = self.step()
            spent = time.perf_counter() - began
            progress.seconds = before + spent
            self.over = self._is_over(spent)
            due = progress.step % wanted.evaluate_every == 0 or self.over
            found = self.evaluate() if due else None
            for callback in self.callbacks:
                callback.after_step(self, loss, found)
        return found or self.evaluate()  # none if it was killed after the last checkpoint

    def _is_over(self, spent: float) -> bool:
        """Whether the last step is done or, after `spent` seconds, the time is up; the same on all processes."""
        done, limit = self.progress.step >= self.experiment.steps_taken, self.execution.max_seconds
        if done or limit is None:
            return done
        late = torch.tensor(float(spent > limit), device=self.accelerator.device)
        return bool(self.accelerator.reduce(late, "sum") > 0)

    def micro_batches(self, step: int) -> Iterator[Any]:
        """This process's rows of a step's batch, in micro-batches."""
        wanted, mine = self.experiment, self.accelerator.process_index
        if isinstance(self.data, Tokens):
            batch: Any = (self.data.batch(step, wanted.batch, wanted.context, wanted.seed),)
        else:
            batch = self.data.batch(step, wanted.batch, wanted.seed, self.accelerator.device)
        share = [part[mine * self.rows : (mine + 1) * self.rows].to(self.accelerator.device) for part in batch]
        for parts in zip(*(part.split(self.micro_batch) for part in share), strict=True):
            yield parts[0] if len(parts) == 1 else parts

    def bare_model(self) -> nn.Module:
        """The model to evaluate: not wrapped, since processes may have unequal numbers of batches, and not compiled,
        since the shorter last batch would recompile it. A sharded model stays wrapped."""
        self._broadcast_buffers()
        if self.sharded:
            return self.model
        model: nn.Module = self.accelerator.unwrap_model(self.model)
        return getattr(model, "_orig_mod", model)

    def _broadcast_buffers(self) -> None:
        """Give every process the first one's running averages of normalization layers."""
        for buffer in self.model.buffers() if self.accelerator.num_processes > 1 else ():
            torch.distributed.broadcast(buffer, 0)

    def _autocast(self) -> torch.autocast:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.experiment.precision)
        return torch.autocast(self.accelerator.device.type, dtype or torch.bfloat16, enabled=dtype is not None)

    def loss(self, batch: Any, model: nn.Module | None = None) -> Tensor:
        """Mean cross entropy of a batch, in the experiment's precision."""
        with self._autocast():
            return functional.cross_entropy(*predict(self.model if model is None else model, batch))

    def step(self) -> Tensor:
        """One optimizer step; returns the mean loss of this process's rows."""
        wanted, step = self.experiment, self.progress.step + 1
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = wanted.rate(step)
        self.stopwatch.start(step)
        parts = list(self.micro_batches(step))
        self.stopwatch.lap("data")
        loss = self._backward(parts)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer.optimizer)
        for callback in self.callbacks:
            callback.on_gradients(self)
        if self.pruner is not None and wanted.mask_gradients:
            self.pruner.mask_gradients()
        if wanted.clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), wanted.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer.optimizer)  # skipped if a gradient overflowed
            self.scaler.update()
        self.stopwatch.lap("optimizer")
        if self.pruner is not None:
            for callback in self.callbacks:
                callback.before_masks(self)
            self.pruner.step()
            self.stopwatch.lap("masks")
        self.optimizer.zero_grad(set_to_none=True)
        if self.sharded:  # DDP does it by itself
            self._broadcast_buffers()
        self.progress.step = step
        return loss

    def _backward(self, parts: list[Any]) -> Tensor:
        """Accumulate the gradients of all micro-batches, with one all-reduce; returns the mean loss."""
        total = torch.zeros((), device=self.accelerator.device)
        for number, part in enumerate(parts):
            rows = len(part[0] if isinstance(part, tuple) else part)
            last = number == len(parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                loss = self.loss(part) * (rows / self.rows)
                self.stopwatch.lap("forward")
                self.accelerator.backward(loss if self.scaler is None else self.scaler.scale(loss))
                self.stopwatch.lap("backward")
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and quality (perplexity or accuracy) on the whole held-out set, shared among the processes."""
        model = self.bare_model()
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        for batch, counts in self._evaluation_batches():
            with self._autocast():
                logits, targets = predict(model, batch)
                loss = functional.cross_entropy(logits, targets)
            if counts:
                correct = (logits.argmax(-1) == targets).sum()
                count = torch.tensor(targets.numel()).to(sums)
                sums += torch.stack([loss.double() * count, correct.double(), count])
        loss_sum, correct_sum, count_sum = self.accelerator.reduce(sums, "sum").tolist()
        mean = loss_sum / count_sum
        quality = math.exp(min(mean, 700.0)) if isinstance(self.data, Tokens) else correct_sum / count_sum
        return {"held_out_loss": mean, "quality": quality}

    def _evaluation_batches(self) -> Iterator[tuple[Any, bool]]:
        """Held-out batches of this process, and whether each counts. A forward pass of a sharded model needs all
        processes: one that has no batch left joins with a training batch that does not count."""
        own = self._held_out()
        while True:
            batch = next(own, None)
            if not self._any_process(batch is not None):
                return
            yield (next(self.micro_batches(1)), False) if batch is None else (batch, True)

    def _any_process(self, mine: bool) -> bool:
        """Whether it is true here or, if the model is sharded, on any process."""
        if not self.sharded:
            return mine
        return bool(self.accelerator.reduce(torch.tensor(float(mine), device=self.accelerator.device), "sum") > 0)

    def _held_out(self) -> Iterator[Any]:
        mine, world = self.accelerator.process_index, self.accelerator.num_processes
        if isinstance(self.data, Tokens):
            windows = self.data.evaluation(self.experiment.context, self.experiment.evaluation)
            own = windows[mine::world]
            for part in own.split(self.micro_batch) if len(own) else ():  # splitting nothing gives an empty batch
                yield part.to(self.accelerator.device)
        else:
            for number, (inputs, targets) in enumerate(self.data.evaluation(self.micro_batch)):
                if number % world == mine:
                    yield inputs.to(self.accelerator.device), targets.to(self.accelerator.device)

    def save(self, folder: Path) -> None:
        """Replace the checkpoint in the folder of a run atomically."""
        utils = library("accelerate.utils", "Training", LAB_EXTRA)
        if self.scaler is not None:
            state = self.scaler.state_dict()
            self.progress.scale, self.progress.growth = state["scale"], state["_growth_tracker"]
        with appearing(folder / CHECKPOINT) if self.accelerator.is_main_process else nullcontext() as fresh:
            where = Path(utils.broadcast_object_list([str(fresh)])[0])
            kept = Checkpoint(where, self.accelerator.process_index, self.sharded)
            kept.save(self.model, self.optimizer.optimizer, self.pruner, self.progress)
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                kept.finish()
        self.accelerator.wait_for_everyone()

    def load(self, checkpoint: Path) -> None:
        """Restore a checkpoint."""
        kept = Checkpoint(checkpoint, self.accelerator.process_index, self.sharded)
        kept.load(self.model, self.optimizer.optimizer, self.pruner, self.progress)
        if self.scaler is not None and self.progress.scale:
            state = {"scale": self.progress.scale, "_growth_tracker": self.progress.growth}
            self.scaler.load_state_dict(self.scaler.state_dict() | state)
        if self.progress.step > self.experiment.steps_taken:
            raise SecateurError(
                f"{checkpoint} is of step {self.progress.step}, but the run has {self.experiment.steps_taken} steps."
                " Name another folder with --out."
            )

    @property
    def room(self) -> int:
        """Bytes of disk a run needs at most: a checkpoint and the best weights, each beside the previous one."""
        weights = sum(local(tensor.detach()).nbytes for tensor in self.model.parameters())
        weights *= self.accelerator.num_processes if self.sharded else 1
        return 2 * weights * (1 + OPTIMIZERS[self.experiment.optimizer].states) + 2 * weights + PAGE

    @property
    def sharded(self) -> bool:
        return bool(self.accelerator.distributed_type == "FSDP")

    @property
    def sparsity(self) -> float:
        return self.pruner.sparsity if self.pruner else 0.0

    @property
    def final_sparsity(self) -> float:
        """The sparsity at the end of the schedule."""
        schedule = self.pruner.schedule if self.pruner else None
        return float(getattr(schedule, "target", 0.0))

    @property
    def seen(self) -> int:
        """Tokens or images trained on so far."""
        return self.progress.step * self.experiment.step_size


def build_model(experiment: Experiment, data: Tokens | Images, most_layers: int = 1000) -> nn.Module:
    """The experiment's model, sized for its data."""
    reads_tokens = is_language_model(experiment.model)
    if reads_tokens != isinstance(data, Tokens):
        kind = "text" if reads_tokens else "images"
        raise SecateurError(f"{experiment.model} reads {kind}, which {experiment.data!r} is not. Change model or data.")
    if isinstance(data, Tokens):
        return language_model(experiment.model, data.vocabulary, experiment.context, most_layers)
    return image_model(experiment.model, data.inputs.shape[1], data.classes, data.inputs.shape[-1])


def find_micro_batch(trainer: Trainer) -> int:
    """Rows in a forward pass: all of them, or half as many until they fit the GPU, which is reported."""
    size = trainer.rows
    if trainer.accelerator.device.type != "cuda" or trainer.sharded:  # a process out of memory would block the others
        return size
    model = trainer.bare_model()  # without DDP: each process tries by itself
    model.eval()  # leaves running averages as they are
    while size > 1:
        trainer.micro_batch = size
        try:
            with torch.random.fork_rng(devices=[trainer.accelerator.device]):
                trainer.loss(next(trainer.micro_batches(1)), model).backward()
            break
        except torch.OutOfMemoryError:
            size = -(-size // 2)
        finally:
            trainer.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    if size < trainer.rows and trainer.accelerator.is_main_process:
        why = f"{trainer.rows} do not fit the GPU. The step is the same except for dropout and batch normalization"
        print(f"secateur: {size} rows per forward pass: {why}", file=sys.stderr)
    return size


IMAGE_SHAPES = {"cifar10": (3, 32, 10), "cifar100": (3, 32, 100), "digits": (1, 8, 10)}  # channels, pixels, classes
MNIST_SHAPE = (1, 28, 10)
DRY_VOCABULARY = 256  # small: a large one would take most of the time
FEW_LAYERS = 2  # of a language model that does not fit in memory
DRY_SETTINGS = {
    "steps": 2,
    "batch": 2,
    "every": 1,
    "warmup": 1,
    "begin": 0.0,
    "end": 1.0,
    "until": 1.0,
    "evaluate_every": 1,
    "evaluation": 1,
    "compile": False,
    "budget": "normal",
}


def dry_run(experiment: Experiment, cpu: bool = False) -> str:
    """Two steps with mask updates and evaluations on random data; returns one line that says it worked.

    The model has all its layers if they fit in memory. The number of pruned weights must be the one asked for.
    """
    context = min(32, experiment.context)
    wanted = without_idle({**asdict(experiment), **DRY_SETTINGS, "context": context})
    data, losses = random_data(experiment, context), _Losses()
    layers, depth = _depth(experiment, data, cpu)
    trainer = Trainer(Experiment(**wanted), Execution(cpu=cpu, most_layers=layers), data, [losses])
    found = trainer.train()
    if not all(map(math.isfinite, (*losses.found, found["held_out_loss"]))):
        raise SecateurError(f"The loss is not finite: {losses.found}, {found}. Lower lr, or change the settings.")
    if trainer.pruner is None:
        return f"ok: {experiment.model}{depth}, dense"
    report = trainer.pruner.report()
    if not report.pruned:
        raise SecateurError(
            f"Two mask updates pruned none of {report.prunable:,} weights. Raise sparsity, or change the pattern."
        )
    check_pruned(trainer, report.pruned, report.prunable)
    pruned = f"{report.pruned:,} of {report.prunable:,} weights pruned, as asked"
    return f"ok: {experiment.model}{depth}, {experiment.score}, {pruned}"


def check_pruned(trainer: Trainer, pruned: int, prunable: int) -> None:
    """Raise unless as many weights are pruned as the sparsity means, to the weight where one cut holds for all."""
    pruner, wanted = trainer.pruner, trainer.experiment
    if pruner is None:
        return
    asked, pattern = trainer.final_sparsity, parse_pattern(wanted.pattern)
    expected, off = round(asked * prunable), 0.0
    if pruner.scope != "model" or pruner.allocation is not None or pattern is not None:  # each part is rounded
        scope = pruner.scope if pruner.allocation is None else "row" if pruner.scope == "row" else "layer"
        tensors, _ = find_prunable(unwrap(trainer.model), wanted.skip, wanted.only(trainer.model), unfit_for(pattern))
        off = rounding(tensors, scope, pattern)
    if abs(pruned - expected) > off:
        raise SecateurError(
            f"{pruned:,} of {prunable:,} weights were pruned, but a sparsity of {asked:g} means {expected:,}"
            f"{f' up to {off:,.0f} by rounding' if off else ''}. Report this with the settings of the run."
        )


def _depth(experiment: Experiment, data: Tokens | Images, cpu: bool) -> tuple[int, str]:
    """How many layers of a language model fit in half of the free memory, and a note: all of them, or few."""
    if not isinstance(data, Tokens):
        return FEW_LAYERS, ""
    layers, width = size_of(experiment.model)
    weights = 12 * layers * width**2 + (data.vocabulary + experiment.context) * width
    needed = 4 * weights * (2 + OPTIMIZERS[experiment.optimizer].states)  # weights, gradients, state of the optimizer
    if cpu or not torch.cuda.is_available():
        free = library("psutil", "Measuring the memory", LAB_EXTRA).virtual_memory().available
    else:
        free = torch.cuda.mem_get_info()[0]
    if 2 * needed <= free:
        return layers, f" (all {layers} layers)"
    few = min(FEW_LAYERS, layers)
    return few, f" ({few} of {layers} layers: all of them need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free)"


class _Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def after_step(self, trainer: Trainer, loss: Tensor, evaluation: dict[str, float] | None) -> None:
        self.found.append(float(loss))


def random_data(experiment: Experiment, context: int) -> Tokens | Images:
    """Random data of the shape that the experiment reads, without reading any."""
    generator = torch.Generator().manual_seed(0)
    source = experiment.data.partition(":")[0]
    if is_language_model(experiment.model):
        tokens = torch.randint(0, DRY_VOCABULARY, (8 * (context + 1),), generator=generator, dtype=torch.int32)
        return Tokens(tokens, tokens, DRY_VOCABULARY, "random tokens")
    channels, size, classes = IMAGE_SHAPES.get(source, MNIST_SHAPE)
    inputs = torch.randint(0, 256, (4, channels, size, size), generator=generator, dtype=torch.uint8)
    targets = torch.randint(0, classes, (4,), generator=generator)
    half = (0.5,) * channels
    return Images(inputs, targets, inputs, targets, classes, half, half, "random images", False)
