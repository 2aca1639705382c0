"""Hooks on optimizers: count the steps they really take, and warn when the loop around them cannot be right."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from secateur.errors import OptimizerError
from secateur.model.distributed import local
from secateur.model.facts import Facts, was_skipped
from secateur.model.held import Held
from secateur.schedules import Clock

CHECKED = 8  # calls of pruner.step() in which the order of the loop is looked at: it does not change later
IN_A_ROW = 3  # times something must be seen before a warning: one may be a GradScaler's or an odd iteration's
IDLE = 8  # steps of one optimizer of a list during which another may rest
ZEROS = 0.1  # share of exact zeros from which weights are taken for pruned

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def optimizers_in(given: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers meant by one or a list of them, out of the wrappers of Accelerate and others."""
    several = isinstance(given, list | tuple)
    if several and not given:
        raise OptimizerError("Pruner needs an optimizer; got an empty list.")
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
    """The optimizer in the `.optimizer` of a wrapper, as deep as it goes: it has the state, and calls its hooks."""
    inner, seen = given, [given]
    while (deeper := getattr(inner, "optimizer", None)) is not None and not any(deeper is one for one in seen):
        inner = deeper
        seen.append(inner)
    if not isinstance(inner, torch.optim.Optimizer):
        what = f"a {type(given).__name__}" + (f" around a {type(inner).__name__}" if inner is not given else "")
        raise OptimizerError(
            f"Pruner counts the steps and reads the state of a torch.optim.Optimizer (or a list of them, or a wrapper"
            f" with one in .optimizer); got {what}."
        )
    return inner


class Listener:
    """Counts the steps of optimizers: a GradScaler may skip one without anybody being told.

    The hooks do not keep it alive, so a Pruner nobody holds any more is freed.
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

        # Under a compiled optimizer.step() they stay out of the graph: what they count would be guarded on, and fail.
        optimizer.register_step_pre_hook(torch.compiler.disable(before))
        optimizer.register_step_post_hook(torch.compiler.disable(after))

    def _before(self, number: int, given: tuple[Any, ...], named: dict[str, Any]) -> Arguments | None:
        """Look for zeros before the first step, and read the gradients: now, or when a closure has made them.

        The step of a subclass may call that of its parent, and torch calls the hooks for both: one step is counted.
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
        """The closure, followed by a look at the gradients it leaves."""
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
        """Remember one gradient this optimizer has used, and its version, until the Pruner acts."""
        for site in self._facts.sites:
            gradient = site.parameter.grad
            if gradient is not None and self._facts.owner(site) == number:
                self._used[number] = site.parameter, gradient, local(gradient)._version
                return

    def check_order(self) -> None:
        """Warn if gradients are newer than the steps, again and again: a backward pass ran between optimizer.step() and
        pruner.step(), on weights that should have been zero. Gradients that were cleared meanwhile say nothing."""
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
            f"The optimizer has taken {steps} steps since the last pruner.step(), so pruned weights came back meanwhile"
            " and backward passes saw them. Call pruner.step() after every optimizer.step() (masks are updated only"
            " every `every` steps anyway), or call pruner.attach() once.",
        )

    def check_idle(self) -> None:
        """Warn if weights change from call to call while no optimizer of ours has ever stepped."""
        if any(self._clock.counts) or "idle" in self._warned:
            return
        weight = local(self._facts.sites[0].parameter.detach())
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
        """Warn if one optimizer of several does not step, because then no step counts."""
        counts = self._clock.counts
        if counts[number] == IDLE and 0 in counts:
            resting = type(self._optimizers[counts.index(0)]).__name__
            self._warn(
                "others",
                f"{type(self._optimizers[number]).__name__} has taken {IDLE} steps and {resting} none. With a list of"
                " optimizers a step counts for the schedule when each of them has stepped. Leave out an optimizer that"
                " rests.",
            )

    @torch.no_grad()
    def _check_zeros(self) -> None:
        """Warn if the weights look pruned and the masks do not know: the step about to be taken would undo it.

        Tensors that are zero altogether do not count: they were made so.
        """
        if any(self._held.dead) or "zeros" in self._warned:
            return
        zeros = total = 0
        for site in self._facts.sites:
            weight = local(site.parameter.detach())
            found = weight.numel() - int(weight.count_nonzero())
            if found < weight.numel():
                zeros, total = zeros + found, total + weight.numel()
        if zeros > ZEROS * total:
            self._warn(
                "zeros",
                f"{zeros / total:.0%} of the prunable weights are exactly zero, but this Pruner's masks keep all of"
                " them: the zeros will grow back in this step. To resume a pruned run, load the saved Pruner too:"
                " pruner.load_state_dict(...), before the first optimizer.step().",
            )

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, stacklevel=4)
