"""For Lightning: prune while its Trainer trains, with the Pruner's state in every checkpoint.

The callback also works in the Trainer of the package `pytorch_lightning`, which has the same hooks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from secateur.errors import OptimizerError, StateError
from secateur.integrations.pruning import BEGIN, END, SHAPE, Pruning
from secateur.model.prunable import Globs
from secateur.pruner import Handles, Pruner
from secateur.regrowth import DROP
from secateur.report import Report
from secateur.schedules import Schedule
from secateur.scores import Score

__all__ = ["PrunerCallback"]

logger = logging.getLogger("secateur")


class PrunerCallback(Callback):
    """Prunes the module that a Lightning Trainer trains: `Trainer(..., callbacks=[PrunerCallback(sparsity=0.8)])`.

    `sparsity` is reached between `begin` and `end`, which are fractions of the run (floats) or optimizer steps (ints),
    along a `schedule`: "cubic", "linear", "late_cubic", or a function like `secateur.cubic`. `sparsity` may also be a
    ready schedule; None takes that of an n:m `pattern`. Masks are updated every `every` steps, by default about 50
    times over the ramp. All other settings are those of `secateur.Pruner`. The module must have one optimizer.

    A resumed run takes the Pruner's state from the checkpoint; if there is none in it, training stops with an error.
    `resume=False` starts a new Pruner there, whose steps count from that point.

    `pruner` is the Pruner, once training has begun. Its `sparsity` is logged at every step.
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
        resume: bool = True,
    ) -> None:
        self.pruning = Pruning(
            score=score, sparsity=sparsity, begin=begin, end=end, every=every, schedule=schedule, scope=scope,
            pattern=pattern, allocation=allocation, skip=skip, only=only, regrow=regrow, drop=drop, until=until,
            masks=masks,
        )  # fmt: skip
        if not isinstance(resume, bool):
            raise StateError(
                f"resume must be True or False; got {resume!r}. Lightning gives callbacks their state from the"
                " checkpoint of trainer.fit(..., ckpt_path=...)."
            )
        self.resume = resume
        self._pruner: Pruner | None = None
        self._attached: Handles | None = None
        self._saved: dict[str, Tensor] | None = None  # from a checkpoint, until the optimizer exists

    @property
    def state_key(self) -> str:
        """The name of the Pruner's state in checkpoints."""
        return "secateur.PrunerCallback"

    @property
    def pruner(self) -> Pruner:
        """The Pruner of this run; an error before training has begun."""
        if self._pruner is None:
            raise StateError("The Pruner is built when training begins. Call trainer.fit(...) first.")
        return self._pruner

    def report(self) -> Report:
        """Asked and achieved sparsity, tensor by tensor: the Pruner's report."""
        return self.pruner.report()

    def state_dict(self) -> dict[str, Any]:
        """The Pruner's state in whole tensors. Lightning calls this on all processes, which gather their shards."""
        return (self._saved or {}) if self._pruner is None else self._pruner.for_checkpointing().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts: Lightning restores callbacks before the optimizer exists."""
        self._saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the Pruner, load its state if there is one, and let it follow every optimizer step."""
        optimizer = _the_optimizer(trainer)
        saved, self._saved = self._saved, None
        if saved is None and self._pruner is not None and trainer.global_step:
            # another fit() of the same Trainer, with a new optimizer
            saved = self._pruner.for_checkpointing().state_dict()
        if saved is None and trainer.global_step and self.resume:
            raise StateError(
                f"This run resumes at step {trainer.global_step}, but its checkpoint has no state of a PrunerCallback."
                " Without masks pruned weights would grow back. Resume from a checkpoint that was saved with the"
                " callback, or pass resume=False to start a new Pruner at this step."
            )
        total = trainer.estimated_stepping_batches
        steps = float("inf") if total < 0 else total
        fresh = not self.resume or saved is None
        assert trainer.model is not None
        left = steps - (trainer.global_step if fresh else 0)
        self._pruner = self.pruning.pruner(trainer.model, optimizer, left, before=self._pruner if fresh else None)
        if saved is not None and self.resume:
            self._pruner.load_state_dict(saved)
        self._attached = self._pruner.attach()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *others: Any) -> None:
        """Zero pruned weights in the averages that other callbacks keep, and log the sparsity."""
        for average in _averages(trainer):
            self.pruner.apply_to(average)
        pl_module.log("sparsity", self.pruner.sparsity, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop following the optimizer, and say so if it took too few steps for the schedule."""
        self._detach()
        schedule, step = self.pruner.schedule, self.report().step
        end = getattr(schedule, "end", None)
        if end is not None and step < end:
            logger.warning(
                "Training ended after %d optimizer steps, and the schedule ends at step %d: the model has sparsity"
                " %.4f, not %.4f. Where a module steps its optimizer by itself (manual optimization) Lightning knows"
                " the number of batches only: give begin and end as steps.",
                step, end, self.pruner.sparsity, schedule(end),
            )  # fmt: skip

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop following the optimizer."""
        self._detach()

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.remove()
            self._attached = None


def _averages(trainer: Trainer) -> list[nn.Module]:
    """The averaged copies of the module, which Lightning's WeightAveraging and StochasticWeightAveraging write into it
    when training ends, and WeightAveraging into checkpoints. They remember values from before the pruning."""
    copies = (getattr(callback, "_average_model", None) for callback in getattr(trainer, "callbacks", ()))
    return [copy for copy in copies if isinstance(copy, nn.Module)]


def _the_optimizer(trainer: Trainer) -> Any:
    if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__):  # of either package
        raise OptimizerError(
            "DeepSpeed keeps its own flat copies of weights and optimizer state, which a Pruner cannot read or zero."
            " Use DDPStrategy, or ModelParallelStrategy with fully_shard to shard the model."
        )
    if len(trainer.optimizers) != 1:
        raise OptimizerError(
            f"configure_optimizers returned {len(trainer.optimizers)} optimizers; PrunerCallback needs one. For"
            " several, build a secateur.Pruner(self, [first, second], ...) in on_train_start and call its attach()."
        )
    return trainer.optimizers[0]
