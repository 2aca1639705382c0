"""Training on Hugging Face Accelerate: one process or many, the same numbers; killed and continued, the same bits."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import SecateurError, library
from secateur.files import PAGE, appearing
from secateur.lab.checkpoint import CHECKPOINT, Checkpoint, Progress, RunFolder
from secateur.lab.config import Experiment, read_experiment
from secateur.lab.data import Images, Tokens, load
from secateur.lab.models import image_model, is_language_model, language_model, loss_of, seeded
from secateur.lab.monitor import OneWeight, Stopwatch
from secateur.model.distributed import local

EXTRA = '"secateur[lab]"'


@dataclass(frozen=True)
class Execution:
    """How a run is carried out, which should not change its numbers."""

    cpu: bool = False
    micro_batch: int | None = None  # rows of a process at a time; None: as many as fit
    checkpoint_every: int = 500
    max_seconds: float | None = None
    tracker: str | None = None
    logs: Path | None = None  # where a tracker writes
    log_every: int = 10
    most_layers: int = 1000  # of a language model, for a dry run


class Trainer:
    """A run: model, optimizer, pruner and data under one accelerator."""

    def __init__(self, experiment: Experiment, execution: Execution, data: Tokens | Images | None = None) -> None:
        accelerate = library("accelerate", "Training", EXTRA)
        self.experiment, self.execution = experiment, execution
        self.data = load(experiment.data) if data is None else data
        # Autocast is ours, not the accelerator's: its state is the process's own and could not change between runs.
        self.accelerator = accelerate.Accelerator(
            cpu=execution.cpu, log_with=execution.tracker, project_dir=str(execution.logs) if execution.logs else None,
            step_scheduler_with_optimizer=False,
        )  # fmt: skip
        if self.in_shards:
            # Every process makes the same model. Sending it from the first, by way of no memory, would untie weights.
            self.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        self.progress = Progress()
        model = seeded(experiment.seed, lambda: build_model(experiment, self.data, execution.most_layers)).to(
            self.accelerator.device
        )
        torch.manual_seed(experiment.seed)  # what is drawn while training, such as dropout
        optimizer = experiment.build_optimizer(model)
        model = torch.compile(model) if experiment.compile else model  # type: ignore[assignment]
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.pruner = experiment.build_pruner(self.model, self.optimizer.optimizer)
        world = self.accelerator.num_processes
        if experiment.batch % world:
            raise SecateurError(f"A batch of {experiment.batch} cannot be shared out to {world} processes evenly.")
        self.rows = experiment.batch // world
        self.micro = execution.micro_batch or fitting(self)
        self.progress.processes = world
        next(iter(self._held_out()), None)  # says now if the held-out set is too small
        self.fingerprint = self.data.fingerprint()
        self.stopwatch = Stopwatch(self.accelerator.device)
        self.one_weight = OneWeight(self.accelerator.unwrap_model(self.model), experiment.seed)

    def micro_batches(self, step: int) -> Iterator[Any]:
        """This process's share of a step's batch, in parts that fit."""
        wanted, mine = self.experiment, self.accelerator.process_index
        if isinstance(self.data, Tokens):
            batch: Any = (self.data.batch(step, wanted.batch, wanted.context, wanted.seed),)
        else:
            batch = self.data.batch(step, wanted.batch, wanted.seed, self.accelerator.device)
        share = [part[mine * self.rows : (mine + 1) * self.rows].to(self.accelerator.device) for part in batch]
        for parts in zip(*(part.split(self.micro) for part in share), strict=True):
            yield parts[0] if len(parts) == 1 else parts

    def _alone(self) -> nn.Module:
        """The model without what holds processes together, which may have unequal numbers of batches to judge, and not
        compiled, which the last and shorter batch would be anew. Averages of normalisation are the first process's, as
        they are in training."""
        self._share_buffers()
        if self.in_shards:
            return self.model
        model: nn.Module = self.accelerator.unwrap_model(self.model)
        return getattr(model, "_orig_mod", model)

    def _share_buffers(self) -> None:
        """Averages of normalisation as the first process has them."""
        for buffer in self.model.buffers() if self.accelerator.num_processes > 1 else ():
            torch.distributed.broadcast(buffer, 0)

    def loss(self, batch: Any, model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Mean loss of a batch and how many predictions were right, in the experiment's precision."""
        rounded = self.experiment.precision == "bf16"
        with torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=rounded):
            return loss_of(self.model if model is None else model, batch)

    def step(self) -> Tensor:
        """One optimizer step; the mean loss of this process's share."""
        wanted, step = self.experiment, self.progress.step + 1
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = wanted.rate(step)
        self.stopwatch.start(step)
        parts = list(self.micro_batches(step))
        self.stopwatch.lap("data")
        loss = self._backward(parts)
        self.one_weight.note()
        if wanted.clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), wanted.clip)
        self.optimizer.step()
        self.stopwatch.lap("optimizer")
        if self.pruner is not None:
            self.pruner.step()
            self.stopwatch.lap("masks")
        self.optimizer.zero_grad(set_to_none=True)
        if self.in_shards:  # DDP does it by itself
            self._share_buffers()
        self.progress.step = step
        return loss

    def _backward(self, parts: list[Any]) -> Tensor:
        """Gradients of all parts of a batch added up, exchanged with other processes once; the mean loss."""
        total = torch.zeros((), device=self.accelerator.device)
        for number, part in enumerate(parts):
            rows = len(part[0] if isinstance(part, tuple) else part)
            last = number == len(parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                loss = self.loss(part)[0] * (rows / self.rows)
                self.stopwatch.lap("forward")
                self.accelerator.backward(loss)
                self.stopwatch.lap("backward")
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy over the whole fixed held-out set, shared out to the processes."""
        model = self._alone()
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        for batch, counts in self._judged():
            loss, right = self.loss(batch, model)
            if not counts:
                continue
            count = batch[1].numel() if isinstance(batch, tuple) else batch[:, 1:].numel()
            sums += torch.stack([loss.double() * count, right.double(), torch.tensor(count).to(sums)])
        loss_sum, right_sum, count_sum = self.accelerator.reduce(sums, "sum").tolist()
        mean = loss_sum / count_sum
        quality = math.exp(min(mean, 700.0)) if isinstance(self.data, Tokens) else right_sum / count_sum
        return {"held_out_loss": mean, "quality": quality}

    def _judged(self) -> Iterator[tuple[Any, bool]]:
        """Held-out batches of this process, and whether they count. A model in shards needs all processes at every
        pass: one that has no batch left goes along with one that does not count."""
        own = self._held_out()
        while True:
            batch = next(own, None)
            if not self._any(batch is not None):
                return
            yield (next(self.micro_batches(1)), False) if batch is None else (batch, True)

    def _any(self, mine: bool) -> bool:
        """Whether it is so here or, where the model is in shards, on any process."""
        if not self.in_shards:
            return mine
        return bool(self.accelerator.reduce(torch.tensor(float(mine), device=self.accelerator.device), "sum") > 0)

    def _held_out(self) -> Iterator[Any]:
        mine, world = self.accelerator.process_index, self.accelerator.num_processes
        if isinstance(self.data, Tokens):
            windows = self.data.evaluation(self.experiment.context, self.experiment.evaluation)
            own = windows[mine::world]
            for part in own.split(self.micro) if len(own) else ():  # nothing, split, is an empty batch
                yield part.to(self.accelerator.device)
        else:
            for number, (inputs, targets) in enumerate(self.data.evaluation(self.micro)):
                if number % world == mine:
                    yield inputs.to(self.accelerator.device), targets.to(self.accelerator.device)

    def save(self, folder: RunFolder) -> None:
        """Write a checkpoint in the place of the last; killed at any moment, one of them is whole."""
        utils = library("accelerate.utils", "Training", EXTRA)
        with appearing(folder.path / CHECKPOINT) if self.accelerator.is_main_process else nullcontext() as fresh:
            where = Path(utils.broadcast_object_list([str(fresh)])[0])
            kept = Checkpoint(where, self.accelerator.process_index, self.in_shards)
            kept.save(self.model, self.optimizer.optimizer, self.pruner, self.progress)
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                kept.finish()
        self.accelerator.wait_for_everyone()

    def load(self, checkpoint: Path) -> None:
        """Go back to where a checkpoint was written."""
        kept = Checkpoint(checkpoint, self.accelerator.process_index, self.in_shards)
        kept.load(self.model, self.optimizer.optimizer, self.pruner, self.progress)
        if self.progress.step > self.experiment.steps_taken:
            raise SecateurError(f"{checkpoint} is of step {self.progress.step}, past the end of this run.")

    @property
    def room(self) -> int:
        """Bytes that a run needs on the disk at most: a checkpoint and the best weights, each beside the one before."""
        weights = sum(local(tensor.detach()).nbytes for tensor in self.model.parameters())
        weights *= self.accelerator.num_processes if self.in_shards else 1
        states = {"sgd": 1, "adamwadv": 3, "adamwspam": 3}.get(self.experiment.optimizer, 2)  # as large as the weights
        return 2 * weights * (1 + states) + 2 * weights + PAGE

    @property
    def in_shards(self) -> bool:
        return bool(self.accelerator.distributed_type == "FSDP")

    @property
    def sparsity(self) -> float:
        return self.pruner.sparsity if self.pruner else 0.0

    @property
    def final_sparsity(self) -> float:
        """What the schedule asks for in the end."""
        schedule = self.pruner.schedule if self.pruner else None
        return float(getattr(schedule, "target", 0.0))

    @property
    def seen(self) -> int:
        """Tokens or pictures so far."""
        each = self.experiment.context if isinstance(self.data, Tokens) else 1
        return self.progress.step * self.experiment.batch * each


def build_model(experiment: Experiment, data: Tokens | Images, most_layers: int = 1000) -> nn.Module:
    """The experiment's model for its data."""
    reads_tokens = is_language_model(experiment.model)
    if reads_tokens != isinstance(data, Tokens):
        kind = "text" if reads_tokens else "pictures"
        raise SecateurError(f"{experiment.model} reads {kind}, which {experiment.data!r} is not. Change model or data.")
    if isinstance(data, Tokens):
        return language_model(experiment.model, data.vocabulary, experiment.context, most_layers)
    return image_model(experiment.model, data.inputs.shape[1], data.classes, data.inputs.shape[-1])


def fitting(trainer: Trainer) -> int:
    """Rows at a time: all of them where they fit, else half as many, and so on; said once, with the reason."""
    size = trainer.rows
    if trainer.accelerator.device.type != "cuda":
        return size
    if trainer.in_shards:  # a process without room would leave the others waiting
        return size
    model = trainer._alone()  # whether it fits here is nobody else's business
    model.eval()  # averages of normalisation stay as they are
    while size > 1:
        trainer.micro = size
        try:
            with torch.random.fork_rng(devices=[trainer.accelerator.device]):
                trainer.loss(next(trainer.micro_batches(1)), model)[0].backward()
            break
        except torch.OutOfMemoryError:
            size = -(-size // 2)
        finally:
            trainer.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    if size < trainer.rows and trainer.accelerator.is_main_process:
        why = f"{trainer.rows} do not fit the GPU; the step is the same but for dropout and batch normalisation"
        print(f"secateur: {size} rows at a time: {why}", file=sys.stderr)
    return size


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
