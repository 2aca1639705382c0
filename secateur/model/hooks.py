"""Hooks on optimizers: count the steps they really take, and warn when the training loop looks wrong."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.errors import OptimizerError, StateError
from secateur.model.distributed import local
from secateur.model.facts import Facts, was_skipped
from secateur.model.masks import SPARSE, Held
from secateur.schedules import Clock

CHECKED = 8  # times that the order of the loop is checked, which does not change later
IN_A_ROW = 3  # times before a warning: one may be a skipped step of a GradScaler or an odd iteration
IDLE = 8  # steps of one optimizer before another of the list that has not stepped is reported
FUSED_BACKWARD = ("Lomo", "AdaLomo", "LayerWiseDummyOptimizer")  # LOMO, and layerwise GaLore and APOLLO of transformers

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def optimizers_in(given: Any) -> tuple[list[torch.optim.Optimizer], list[list[Any]]]:
    """One torch optimizer or a list of them, taken out of wrappers such as Accelerate's, and the wrappers of each."""
    several = isinstance(given, list | tuple)
    if several and not given:
        raise OptimizerError("Pruner needs an optimizer; got an empty list. Pass the one whose step() your loop calls.")
    chains = [_chain(one) for one in (given if several else [given])]
    found = [chain[-1] for chain in chains]
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(found):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if owners.setdefault(id(parameter), number) != number:
                raise OptimizerError(
                    f"A parameter of shape {tuple(parameter.shape)} is in two of the {len(found)} optimizers, which"
                    " would both step it. Give every parameter to one optimizer."
                )
    return found, [chain[:-1] for chain in chains]


def _chain(given: Any) -> list[Any]:
    """A wrapper, what it wraps, and so on to the innermost optimizer: the one that has the state and calls its hooks.
    It is in `.optimizer`; SAM has it in `.base_optimizer`, Schedule-Free in `.base`."""
    if reason := _not_an_optimizer(given):
        raise OptimizerError(f"Pruner needs a torch.optim.Optimizer, or a list of them; got {reason}")
    inner, seen = given, [given]
    while (deeper := _inside(inner)) is not None and not any(deeper is one for one in seen):
        inner = deeper
        seen.append(inner)
    if not isinstance(inner, torch.optim.Optimizer):
        what = f"a {type(given).__name__}" + (f" around a {type(inner).__name__}" if inner is not given else "")
        raise OptimizerError(
            "Pruner needs a torch.optim.Optimizer, a list of them, or a wrapper with one in .optimizer, to count its"
            f" steps and read its state; got {what}. Pass the optimizer whose step() your loop calls."
        )
    if any(kind.__name__ in FUSED_BACKWARD for kind in type(inner).__mro__):
        raise OptimizerError(
            f"{type(inner).__name__} changes weights during the backward pass and takes no steps, after which pruned"
            " weights could be zeroed. Use an optimizer with a step: 8-bit AdamW (torchao, bitsandbytes) needs little"
            " memory, and Adafactor does with score='magnitude'."
        )
    return seen


def _inside(wrapper: Any) -> Any:
    """What this wraps, or None."""
    others = (getattr(wrapper, name, None) for name in ("base_optimizer", "base"))
    other = next((one for one in others if isinstance(one, torch.optim.Optimizer)), None)
    return getattr(wrapper, "optimizer", None) or other


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

    `waiting` are weights that are not pruned because no optimizer trains them, by name. The hooks reference the
    listener weakly, so that an unused Pruner is freed.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        clock: Clock,
        facts: Facts,
        held: Held,
        waiting: Mapping[str, Tensor],
    ) -> None:
        self._optimizers, self._clock, self._facts, self._held = optimizers, clock, facts, held
        self._waiting = dict(waiting)
        self._trained = [_trained(optimizer) for optimizer in optimizers]  # how many parameters each has
        self._used: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._looked = self._late = self._idle = self._between = 0
        self._warned: set[str] = set()
        self._stepping: set[int] = set()  # optimizers inside their step
        for number, optimizer in enumerate(optimizers):
            self._register(number, optimizer)
        self.note_weights()

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
        self._check_joined(number)
        self._stepping.add(number)
        self._check_between()
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
        self.note_weights()  # also at the second call, as a subclass may write masks after its parent's step
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

    def note_weights(self) -> None:
        """Remember the weights as they are: an optimizer's step or pruner.step() has just left them so."""
        self._version = self._versions()

    def moved(self) -> bool:
        """Whether anything else has written to the weights since. Writes through `.data` leave no trace."""
        return self._versions() != self._version

    def _versions(self) -> int:
        weights = (local(prunable.parameter.detach()) for prunable in self._facts.prunables)
        return sum(0 if weight.is_inference() else weight._version for weight in weights)

    def check_idle(self) -> bool:
        """Whether the weights changed although none of these optimizers stepped; warns when that goes on."""
        moved = self.moved()
        self._idle = self._idle + 1 if moved else 0
        if self._idle >= IN_A_ROW:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
            self._warn(
                "idle",
                f"The weights change, but the optimizer given to the Pruner ({kinds}) takes no steps. pruner.step()"
                " still zeroes pruned weights, but the schedule stands still, and what another optimizer keeps for them"
                " is not zeroed. Build the Pruner with the optimizer whose step() the loop calls; of several, with a"
                " list of them. To go on from these masks, pass masks=pruner.masks.",
            )
        return moved

    @torch.no_grad()
    def _check_between(self) -> None:
        """Warn if pruned weights were written to after the last pruner.step(), so that a forward pass saw them."""
        if self._between >= CHECKED or not any(self._held.dead) or not self.moved():
            return
        self._between += 1
        weights = (local(prunable.parameter.detach()) for prunable in self._facts.prunables)
        if any(dead and bool(w.masked_fill(self._held.bools(number), 0).any())
               for number, (w, dead) in enumerate(zip(weights, self._held.dead, strict=True))):  # fmt: skip
            self._warn(
                "between",
                "Pruned weights were changed after the last pruner.step(), so the forward pass saw values that should"
                " have been zero. Call pruner.step() after everything that writes to the weights. attach() acts inside"
                " the optimizer's step: where a wrapper such as Lookahead writes to them afterwards, call"
                " pruner.step() after the wrapper's step() instead.",
            )

    def _check_joined(self, number: int) -> None:
        """Refuse a step in which weights that joined the optimizer later would lose their zeros; warn of dense ones."""
        optimizer = self._optimizers[number]
        if _trained(optimizer) == self._trained[number]:
            return
        has = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        joined = {name: weight for name, weight in self._waiting.items() if id(weight) in has}
        sparse = [name for name, weight in joined.items() if SPARSE < _zeros(weight) < 1]
        if sparse:
            raise StateError(
                f"{len(sparse)} tensors with zeros joined {type(optimizer).__name__} after this Pruner was made, and"
                f" this step would undo their zeros: {', '.join(map(repr, sparse[:3]))}. Build the Pruner after"
                " add_param_group(), or give the optimizer every parameter from the start, frozen ones too: a frozen"
                ' layer does not train, and masks="zeros" with sparsity=None holds its zeros once it does. No weight'
                " was changed."
            )
        self._trained[number] = _trained(optimizer)
        if joined:
            self._warn(
                "joined",
                f"{len(joined)} tensors joined {type(optimizer).__name__} after the Pruner was made and stay dense:"
                f" {', '.join(map(repr, list(joined)[:3]))}. To prune them too, build the Pruner after"
                " add_param_group().",
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
        if zeros > SPARSE * total:
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


def _trained(optimizer: torch.optim.Optimizer) -> int:
    """How many parameters an optimizer has."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


@torch.no_grad()
def _zeros(parameter: Tensor) -> float:
    """The share of exact zeros in the local shard of a parameter."""
    weight = local(parameter.detach())
    return 1 - int(weight.count_nonzero()) / max(1, weight.numel())
