"""For Hugging Face transformers: prune while a Trainer trains, load and save models with their masks, evaluate them.

`PrunerCallback` works with `transformers.Trainer` and its subclasses, such as TRL's.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from secateur.errors import OptimizerError, StateError
from secateur.integrations.distillation import DistillationTrainer
from secateur.integrations.evaluation import lm_eval, perplexity
from secateur.integrations.folder import load, save
from secateur.integrations.pruning import BEGIN, END, SHAPE, Pruning
from secateur.model.masks import load_masks
from secateur.model.prunable import Globs
from secateur.model.state import PRUNER, check_zeros, read_pruner, restore, write_pruner
from secateur.pruner import Pruner
from secateur.regrowth import DROP
from secateur.report import Report
from secateur.schedules import Schedule
from secateur.scores import Score

__all__ = ["DistillationTrainer", "PrunerCallback", "lm_eval", "load", "load_masks", "perplexity", "save"]

logger = logging.getLogger("secateur")

NOT_LOADED = (
    " Or the Trainer has not loaded it: weights that transformers saves under other names, such as stacked experts or"
    " those of ViT, it leaves out. Then load the model with from_pretrained(checkpoint) and give the Trainer that one."
)


class PrunerCallback(TrainerCallback):
    """Prunes the model that a Trainer trains: `Trainer(..., callbacks=[PrunerCallback(sparsity=0.8)])`.

    `sparsity` is reached between `begin` and `end`, which are fractions of the run (floats) or optimizer steps (ints),
    along a `schedule`: "cubic", "linear", "late_cubic", or a function like `secateur.cubic`. `sparsity` may also be a
    ready schedule; None takes that of an n:m `pattern`. Masks are updated every `every` steps, by default about 50
    times over the ramp. All other settings are those of `secateur.Pruner`.

    The Pruner's state is saved in each checkpoint as `pruner.safetensors`. A resumed run looks for it in the checkpoint
    named by `resume`, by the training arguments, or in `output_dir`; if there is none it stops with an error.
    `resume=False` starts a new Pruner there, whose steps count from that point.

    `pruner` is the Pruner, once training has begun. Logs and trackers get its `sparsity`.
    """

    def __init__(
        self,
        *,
        score: str | Callable[..., Tensor] | Score = "variance",
        sparsity: float | Schedule | None = 0.8,
        begin: float = BEGIN,
        end: float = END,
        every: int | None = None,
        schedule: str | Callable[..., Schedule] = SHAPE,
        scope: str = "model",
        pattern: str | None = None,
        allocation: str | None = None,
        skip: Globs = (),
        only: Globs | None = None,
        regrow: str | None = None,
        drop: float = DROP,
        until: float | None = None,
        masks: Any = None,
        resume: str | os.PathLike[str] | bool | None = None,
    ) -> None:
        self.pruning = Pruning(
            score=score, sparsity=sparsity, begin=begin, end=end, every=every, schedule=schedule, scope=scope,
            pattern=pattern, allocation=allocation, skip=skip, only=only, regrow=regrow, drop=drop, until=until,
            masks=masks,
        )  # fmt: skip
        if resume is True or not isinstance(resume, str | os.PathLike | bool | None):
            raise StateError(
                f"resume must be the path of a checkpoint, False to start a new Pruner, or None to look for one; got"
                f" {resume!r}."
            )
        self.resume = resume
        self._pruner: Pruner | None = None

    @property
    def pruner(self) -> Pruner:
        """The Pruner of this run; an error before training has begun."""
        if self._pruner is None:
            raise StateError("The Pruner is built when training begins. Call trainer.train() first.")
        return self._pruner

    def report(self) -> Report:
        """Asked and achieved sparsity, tensor by tensor: the Pruner's report."""
        return self.pruner.report()

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Refuse DeepSpeed before training begins."""
        _refuse_deepspeed(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Build the Pruner, and load its state if the run is resumed: model and optimizer are loaded and prepared."""
        _refuse_deepspeed(args)
        self._move_to_the_front()
        model, done = others["model"], state.global_step
        left = state.max_steps - (done if self.resume is False else 0)
        self._pruner = self.pruning.pruner(model, others["optimizer"], left, before=None if done else self._pruner)
        if done and self.resume is not False:
            path = self._saved_file(args, done)
            found = read_pruner(path)
            check_zeros(model, found, path, NOT_LOADED)
            restore(self._pruner, found, path)
        elif self.resume:
            raise StateError(
                f"resume={self.resume!r} names a checkpoint, but training begins at step 0. Resume the model from it"
                " too, trainer.train(resume_from_checkpoint=...), or leave out resume."
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Update the masks if it is time, and zero pruned weights. Gradients still exist, so regrowth can read them."""
        self.pruner.step()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Add the Pruner's state to the checkpoint that was just written. Shards are gathered on all processes."""
        folder, found = _checkpoint(args, state.global_step), self.pruner.for_checkpointing().state_dict()
        if not args.should_save:
            return
        if folder.is_dir():
            write_pruner(folder / PRUNER, found)
        else:  # a hyperparameter search, or a Trainer that saves in its own way
            logger.warning(
                "The Trainer has not written a checkpoint to %s, so the Pruner's state is not saved and the run cannot"
                " be resumed from this step.", folder,
            )  # fmt: skip

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Add the sparsity to the logs: those that trackers get, and the entry that the Trainer has just kept."""
        if self._pruner is None:
            return
        entry = {"sparsity": self._pruner.sparsity}
        others["logs"].update(entry)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(entry)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """If the Trainer has restored the best checkpoint, take its masks, and say so if it is less sparse."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._follow(Path(state.best_model_checkpoint), others["model"], said=state.is_world_process_zero)

    def _follow(self, best: Path, model: nn.Module, said: bool) -> None:
        """Load the masks of a checkpoint whose weights the model already has."""
        pruner, path = self.pruner, best / PRUNER
        reached, updates = pruner.sparsity, pruner.updates
        try:
            found = read_pruner(path)
            check_zeros(model, found, path, NOT_LOADED)
            restore(pruner, found, path)
        except StateError as error:  # the run is over: its weights must not be lost because of this
            logger.warning(
                "load_best_model_at_end restored %s, but its masks cannot be loaded (%s). The model is that of the"
                " checkpoint; pruner.masks are those of the last step, at sparsity %.4f.", best, error, reached,
            )  # fmt: skip
            return
        pruner.updates = [update for update in updates if update.step <= pruner.report().step]
        if said and pruner.sparsity < reached:
            logger.warning(
                "load_best_model_at_end restored %s at sparsity %.4f; the last step had reached %.4f. The masks are now"
                " those of the restored checkpoint. For the full sparsity use the last checkpoint, or compare only"
                " checkpoints after the ramp: eval_delay=... past its end.", best, pruner.sparsity, reached,
            )  # fmt: skip

    def _saved_file(self, args: TrainingArguments, step: int) -> Path:
        """Where the state of the Pruner to resume is. `train(resume_from_checkpoint=path)` does not tell callbacks the
        path, so without `resume` it is looked for in the output folder, under the number of the step."""
        named = [self.resume] if self.resume else [args.resume_from_checkpoint, _checkpoint(args, step)]
        places = [Path(place) for place in named if isinstance(place, str | os.PathLike)]
        files = [place if place.is_file() else place / PRUNER for place in places]
        for file in files:
            if file.is_file():
                return file
        raise StateError(
            f"This run resumes at step {step}, but there is no saved Pruner: no {' and no '.join(map(str, files))}."
            " Without its masks pruned weights would grow back. Pass resume=... with the checkpoint that the model is"
            " resumed from, or resume=False to start a new Pruner at this step (docs/huggingface.md, Resume)."
        )

    def _move_to_the_front(self) -> None:
        """Come before all other callbacks, so that trackers log the sparsity too.

        The Trainer puts trackers before the callbacks it is given, and passes callbacks no reference to their list, so
        the list is taken from the handler that is calling. Callbacks that were already called move back by one, so none
        is called twice or left out.
        """
        frame = inspect.currentframe()
        while frame is not None:
            handler = frame.f_locals.get("self")
            if isinstance(handler, CallbackHandler) and any(one is self for one in handler.callbacks):
                _check_alone(handler.callbacks)
                handler.callbacks.remove(self)
                handler.callbacks.insert(0, self)
                return
            frame = frame.f_back


def _check_alone(callbacks: Sequence[TrainerCallback]) -> None:
    if (count := sum(isinstance(one, PrunerCallback) for one in callbacks)) > 1:
        raise OptimizerError(
            f"This Trainer has {count} PrunerCallbacks, which would prune the same weights and write the same file."
            " Keep one: trainer.remove_callback(...)."
        )


def _checkpoint(args: TrainingArguments, step: int) -> Path:
    """The folder to which the Trainer writes the checkpoint of a step."""
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _refuse_deepspeed(args: TrainingArguments) -> None:
    kind = getattr(getattr(args, "distributed_state", None), "distributed_type", None)
    if getattr(args, "deepspeed", None) or getattr(kind, "value", kind) == "DEEPSPEED":
        raise OptimizerError(
            "DeepSpeed keeps its own flat copies of weights and optimizer state, which a Pruner cannot read or zero."
            " Use DDP, or FSDP version 2 to shard the model: TrainingArguments(fsdp=..., fsdp_config={'version': 2})."
        )
