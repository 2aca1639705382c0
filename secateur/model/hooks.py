"""Hooks on optimizers: count the steps they really take, and warn when the training loop looks wrong."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.errors import OptimizerError
from secateur.model.distributed import local
from secateur.model.facts import Facts, was_skipped
from secateur.model.held import Held
from secateur.schedules import Clock

CHECKED = 8  # calls of pruner.step() that check the order of the loop, which does not change later
IN_A_ROW = 3  # times before a warning: one may be a skipped step of a GradScaler or an odd iteration
IDLE = 8  # steps of one optimizer before another of the list that has not stepped is reported
ZEROS = 0.1  # share of exact zeros above which weights look pruned

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def optimizers_in(given: Any) -> list[torch.optim.Optimizer]:
    """One torch optimizer or a list of them, taken out of wrappers such as Accelerate's."""
    several = isinstance(given, list | tuple)
    if several and not given:
        raise OptimizerError("Pruner needs an optimizer; got an empty list. Pass the one whose step() your loop calls.")
    found = [_unwrapped(one) for one in (given if several else [given])]
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(found):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if owners.setdefault(id(parameter), number) != number:
                raise OptimizerError(
                    f"A parameter of shape {tuple(parameter.shape)} is in two of the {len(found)} optimizers, which"
                    " would both step it. Give every parameter to one optimizer."
                )
    return found


def _unwrapped(given: Any) -> torch.optim.Optimizer:
    """The innermost `.optimizer` of a wrapper: the one that has the state and calls its hooks."""
    if reason := _not_an_optimizer(given):
        raise OptimizerError(f"Pruner needs a torch.optim.Optimizer, or a list of them; got {reason}")
    inner, seen = given, [given]
    while (deeper := getattr(inner, "optimizer", None)) is not None and not any(deeper is one for one in seen):
        inner = deeper
        seen.append(inner)
    if not isinstance(inner, torch.optim.Optimizer):
        what = f"a {type(given).__name__}" + (f" around a {type(inner).__name__}" if inner is not given else "")
        raise OptimizerError(
            "Pruner needs a torch.optim.Optimizer, a list of them, or a wrapper with one in .optimizer, to count its"
            f" steps and read its state; got {what}. Pass the optimizer whose step() your loop calls."
        )
    return inner


def _not_an_optimizer(given: Any) -> str | None:
    """What was given instead of an optimizer, and what to do, for the mistakes that are easy to make."""
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        return f"the learning-rate scheduler {type(given).__name__}. Pass its optimizer: scheduler.optimizer."
    if isinstance(given, type):
        return f"the class {given.__name__}. Pass an instance: {given.__name__}(model.parameters(), lr=...)."
    if isinstance(given, str):
        return f"the text {given!r}. Build the optimizer first: torch.optim.AdamW(model.parameters(), lr=...)."
    if given is None:
        return "None. Pass the optimizer whose step() your loop calls; sc.prune works without one, after training."
    return None


class Handles:
    """What `attach()` returns: hooks on one optimizer or several, removed together."""

    def __init__(self, hooks: Sequence[Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class Listener:
    """Counts real optimizer steps; a GradScaler may skip some without saying so.

    The hooks reference it weakly, so that an unused Pruner is freed.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer], clock: Clock, facts: Facts, held: Held) -> None:
        self._optimizers, self._clock, self._facts, self._held = optimizers, clock, facts, held
        self._used: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._looked = self._late = self._idle = 0
        self._version: int | None = None
        self._warned: set[str] = set()
        self._stepping: set[int] = set()  # optimizers inside their step
        for number, optimizer in enumerate(optimizers):
            self._register(number, optimizer)

    def _register(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        me = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> Arguments | None:
            listener = me()
            return None if listener is None else listener._before(number, given, named)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (listener := me()) is not None:
                listener._after(number)

        # Kept out of a compiled optimizer.step(): torch.compile would guard on the counters and recompile.
        optimizer.register_step_pre_hook(torch.compiler.disable(before))
        optimizer.register_step_post_hook(torch.compiler.disable(after))

    def _before(self, number: int, given: tuple[Any, ...], named: dict[str, Any]) -> Arguments | None:
        """Look for zeros before the first step, and read the gradients: now, or after the closure has computed them.

        torch calls the hooks twice when the step of a subclass calls its parent's; only one step is counted.
        """
        if number in self._stepping:
            return None
        self._stepping.add(number)
        if not self._facts.stepped:
            self._check_zeros()
        if "movement_sum" not in self._facts.kept or was_skipped(self._optimizers[number]):
            return None
        closures = [value for value in (*given[1:], *named.values()) if callable(value)]  # the first is the optimizer
        if not closures:
            self._facts.accumulate_movement(number)
            return None
        evaluate = self._noting(closures[0], number)
        replaced = {key: evaluate if value is closures[0] else value for key, value in named.items()}
        return tuple(evaluate if value is closures[0] else value for value in given), replaced

    def _noting(self, closure: Callable[..., Any], number: int) -> Callable[..., Any]:
        """The closure, followed by reading the gradients it leaves."""
        facts = self._facts

        def evaluate(*args: Any, **options: Any) -> Any:
            loss = closure(*args, **options)
            facts.note_movement(number)
            return loss

        return evaluate

    def _after(self, number: int) -> None:
        if number not in self._stepping:
            return
        self._stepping.discard(number)
        skipped = was_skipped(self._optimizers[number])
        self._facts.settle_movement(number, taken=not skipped)
        if skipped:
            return
        self._clock.tick(number)
        self._facts.stepped = True
        self._check_others(number)
        if self._looked < CHECKED:
            self._note_gradient(number)

    def _note_gradient(self, number: int) -> None:
        """Remember one gradient this optimizer used, and its version, until the next pruner.step()."""
        for prunable in self._facts.prunables:
            gradient = prunable.parameter.grad
            if gradient is not None and self._facts.owner(prunable) == number:
                self._used[number] = prunable.parameter, gradient, local(gradient)._version
                return

    def check_order(self) -> None:
        """Warn if gradients are repeatedly newer than the step: then a backward pass ran between optimizer.step() and
        pruner.step(), on weights that should have been zero. Gradients cleared in between prove nothing."""
        if self._looked >= CHECKED:
            return
        self._looked += 1
        newer = any(
            parameter.grad is not None
            and (parameter.grad is not gradient or local(gradient)._version != version)
            and bool(local(parameter.grad).any())
            for parameter, gradient, version in self._used.values()
        )
        self._used.clear()
        self._late = self._late + 1 if newer else 0
        if self._late >= IN_A_ROW:
            self._warn(
                "order",
                "A backward pass ran between optimizer.step() and pruner.step(), so it saw weights that should have"
                " been zero. Call them in this order: loss.backward(), optimizer.step(), pruner.step(),"
                " optimizer.zero_grad(); or call pruner.attach() once instead of pruner.step().",
            )

    def warn_late(self, steps: int) -> None:
        """Warn that pruned weights moved and were trained on between two calls of pruner.step()."""
        self._warn(
            "late",
            f"The optimizer has taken {steps} steps since the last pruner.step(), so pruned weights became nonzero and"
            " backward passes saw them. Call pruner.step() after every optimizer.step() (masks are updated only"
            " every `every` steps anyway), or call pruner.attach() once.",
        )

    def check_idle(self) -> None:
        """Warn if weights change between calls although none of these optimizers ever stepped."""
        if any(self._clock.counts) or "idle" in self._warned:
            return
        weight = local(self._facts.prunables[0].parameter.detach())
        version = 0 if weight.is_inference() else weight._version
        self._idle = self._idle + 1 if self._version not in (None, version) else 0
        self._version = version
        if self._idle >= IN_A_ROW:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
            self._warn(
                "idle",
                f"The weights change, but the optimizer given to the Pruner ({kinds}) has not taken a step, so nothing"
                " will be pruned. Build the Pruner with the optimizer whose step() the loop calls; of several,"
                " with a list of them.",
            )

    def _check_others(self, number: int) -> None:
        """Warn if one of several optimizers does not step, because then no step counts."""
        counts = self._clock.counts
        if counts[number] == IDLE and 0 in counts:
            idle = type(self._optimizers[counts.index(0)]).__name__
            self._warn(
                "others",
                f"{type(self._optimizers[number]).__name__} has taken {IDLE} steps and {idle} none. With a list of"
                " optimizers a step counts for the schedule once each of them has stepped. Leave out an optimizer that"
                " does not step.",
            )

    @torch.no_grad()
    def _check_zeros(self) -> None:
        """Warn if the weights look pruned but the masks keep them all: the coming step would undo the pruning.

        Tensors that are entirely zero are ignored: they were initialized so.
        """
        if any(self._held.dead) or "zeros" in self._warned:
            return
        zeros = total = 0
        for prunable in self._facts.prunables:
            weight = local(prunable.parameter.detach())
            found = weight.numel() - int(weight.count_nonzero())
            if found < weight.numel():
                zeros, total = zeros + found, total + weight.numel()
        if zeros > ZEROS * total:
            self._warn(
                "zeros",
                f"{zeros / total:.0%} of the prunable weights are exactly zero, but this Pruner's masks keep all of"
                ' them: the zeros will grow back in this step. To hold them, build the Pruner with masks="zeros". To'
                " resume a pruned run, load the saved Pruner too, before the first optimizer.step():"
                " pruner.load_state_dict(...).",
            )

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, stacklevel=4)
