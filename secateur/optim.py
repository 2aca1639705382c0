"""Optimizers that apply masks inside their own step: the protocol for them, and AdamW with masks and SPAM.

SPAM is spike-aware Adam with momentum reset (Huang et al. 2025). It has three parts, each of which can be turned off.
Clipping limits a gradient to sqrt(theta v), where v is Adam's second moment before the step. Every `every` steps both
moments are reset, and the learning rate warms up again along a cosine over `warmup` steps. A gradient norm far above
the last hundred shrinks both moments (from AdamWPrune; not in the paper).

The functions of SPAM are pure. `taken` is the number of steps already taken, so the next step is number `taken + 1`.
That number alone decides which steps clip, reset or warm up: the host never reads the device for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim.optimizer import _use_grad_for_differentiable

from secateur import kernels
from secateur.errors import ScheduleError, StateError
from secateur.kernels import reference
from secateur.kernels.reference import AdamWTensors, Hyper
from secateur.model.distributed import local
from secateur.selection.masks import to_bits

__all__ = ["AdamW", "MaskedOptimizer", "Spam"]

HISTORY = 100  # gradient norms remembered
ENOUGH = 10  # norms needed before one can count as a spike
SHRINK = (0.5, 0.9)  # factors on the two moments after a spike


@dataclass(frozen=True)
class Spam:
    """Settings of SPAM. The defaults follow the paper and its authors' code (docs/kernels.md: where these differ)."""

    theta: float = 5000.0  # clip where g^2 > theta v; 0: no clipping
    every: int = 500  # steps between resets; 0: none
    warmup: int = 150  # steps over which the learning rate returns after a reset
    spike: float | None = None  # standard deviations above the mean that make a norm a spike; None: no detection
    quiet: int = 20  # steps without clipping, at the start and after each reset
    floor: float = 0.01  # factor on the learning rate right after a reset; a cosine raises it to 1
    clip_unseen: bool = True  # clip to zero where v is zero; False: leave such gradients alone
    restart_bias: bool = False  # restart bias correction with the moments; False: keep counting all steps
    warm_decay: bool = False  # the warm-up scales weight decay too; False: only the update

    def __post_init__(self) -> None:
        whole = all(type(count) is int for count in (self.every, self.warmup, self.quiet))
        numbers = self.theta, self.floor, self.spike or 1.0
        if not whole or not all(type(n) in (int, float) and not math.isnan(n) for n in numbers):
            raise ScheduleError(
                "SPAM takes whole numbers of steps (every, warmup, quiet) and numbers for theta, floor and spike;"
                f" got {self}."
            )
        if self.theta < 0 or self.every < 0 or self.warmup < 0 or (self.spike is not None and self.spike <= 0):
            raise ScheduleError(f"SPAM's settings must not be negative; got {self}.")
        if self.every and self.warmup > self.every:
            raise ScheduleError(
                f"warmup={self.warmup} is longer than every={self.every}: the learning rate would never recover. Pass a"
                " warmup of at most every."
            )
        self._check_clipping()

    def _check_clipping(self) -> None:
        """Check the settings of clipping, the floor and the flags."""
        if self.quiet < 0 or not 0 < self.floor <= 1:
            raise ScheduleError(
                "quiet must be a number of steps, 0 or more, and floor a factor above 0 and at most 1; got"
                f" quiet={self.quiet!r} and floor={self.floor!r}."
            )
        if self.theta and 0 < self.every <= self.quiet:
            raise ScheduleError(
                f"With quiet={self.quiet} and a reset every={self.every} steps nothing would ever be clipped. Pass a"
                " quiet below every, or theta=0 to turn clipping off."
            )
        flags = self.clip_unseen, self.restart_bias, self.warm_decay
        if not all(isinstance(flag, bool) for flag in flags):
            raise ScheduleError(f"clip_unseen, restart_bias and warm_decay must be True or False; got {self}.")


PRESETS = {
    "paper": Spam(),
    "adamwprune": Spam(
        theta=50.0, every=1000, warmup=1000, spike=2.0, quiet=0, floor=0.001, clip_unseen=False, restart_bias=True,
        warm_decay=True,
    ),
}  # fmt: skip
PRESETS["seeds"] = PRESETS["adamwprune"]  # its first name, which recipes and saved runs have


def as_spam(wanted: Spam | str | Mapping[str, Any] | bool | None) -> Spam | None:
    """Settings by name ("paper", "adamwprune"), from a mapping, or as given."""
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        return Spam()
    if isinstance(wanted, Spam):
        return wanted
    if isinstance(wanted, str) and wanted in PRESETS:
        return PRESETS[wanted]
    if isinstance(wanted, Mapping) and wanted.keys() <= asdict(Spam()).keys():
        return Spam(**wanted)
    raise ScheduleError(
        "spam must be 'paper', 'adamwprune', a secateur.optim.Spam, a mapping of its settings, or None; got"
        f" {wanted!r}."
    )


def resets(spam: Spam, taken: int) -> bool:
    """Whether the moments are reset before the next step: step `every`, 2 `every`, and so on."""
    return spam.every > 0 and (taken + 1) % spam.every == 0


def since_reset(spam: Spam, taken: int) -> int | None:
    """Steps from the last reset to the next step: 0 if that step resets first, None if there was no reset yet."""
    return (taken + 1) % spam.every if spam.every and taken + 1 >= spam.every else None


def clips(spam: Spam, taken: int) -> bool:
    """Whether the next step clips: only once v has averaged `quiet` gradients, from the start or from a reset."""
    age = since_reset(spam, taken)
    return spam.theta > 0 and (taken + 1 if age is None else age) >= spam.quiet


def warmth(spam: Spam, taken: int) -> float:
    """The factor on the group's learning rate in the next step."""
    age = since_reset(spam, taken)
    if age is None or age >= spam.warmup:
        return 1.0
    return spam.floor + (1 - spam.floor) * 0.5 * (1 - math.cos(math.pi * age / (spam.warmup + 1)))


def hold(spam: Spam) -> int:
    """Steps after a reset during which masks are not updated from the moments.

    While the learning rate warms up, v averages few gradients: after n steps its relative error is about sqrt(2 / n),
    12 % at the paper's 150, so a score |w| v^(1/4) is off by 3 %. At most half of the time between resets, or masks
    would never be updated.
    """
    return min(spam.warmup, spam.every // 2)


def is_cold(spam: Spam, taken: int) -> bool:
    """Whether the moments are too young to rank weights by, after `taken` steps."""
    if not spam.every:
        return False
    return taken >= spam.every and taken % spam.every < hold(spam)


def soften(spam: Spam, norms: Tensor, norm: Tensor, taken: int) -> Tensor:
    """Factors on both moments after a possible spike, computed on the device without a sync. Records the norm."""
    seen = min(taken, HISTORY)
    factors = torch.ones(2, dtype=torch.float32, device=norm.device)
    if spam.spike is not None and seen >= ENOUGH:
        past = norms[:seen]
        stands_out = (norm - past.mean()) > spam.spike * past.std()
        factors = torch.where(stands_out, torch.tensor(SHRINK, dtype=torch.float32, device=norm.device), factors)
    last = norms[(taken - 1) % HISTORY] if taken else torch.zeros_like(norm)
    norms[taken % HISTORY] = torch.where(norm.isfinite(), norm, last)  # one overflow would hide every later spike
    return factors


@runtime_checkable
class MaskedOptimizer(Protocol):
    """A torch optimizer that keeps pruned weights and their state at zero in its own step.

    A Pruner gives its masks to any optimizer that has these members, and then need not zero anything after each step.
    Optimizers without them work too: the Pruner zeroes weights and state from outside.
    """

    @property
    def cold(self) -> bool:
        """Whether its moments are too young to rank weights by, as after a reset. Mask updates wait meanwhile."""

    def delay(self, steps: int) -> int:
        """How many steps late a mask update will be that is due `steps` from now, because moments are cold then."""

    def holds(self, masks: Mapping[Tensor, Tensor]) -> bool:
        """Whether its step keeps these parameters zero where these very mask tensors say so."""

    def set_masks(self, masks: Mapping[Tensor, Tensor], *, others: bool = False, regrows: bool = False) -> None:
        """Apply these masks (True is kept) from the next step on; see `AdamW.set_masks`."""


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with masks and SPAM inside the step; same arguments, same state, same results.

    `spam` is None, "paper", "adamwprune" or a `Spam`. State dicts load into torch's AdamW and the other way round.
    Masks come from a Pruner, or from you through `set_masks`. On NVIDIA GPUs one Triton kernel does the whole step, to
    within 4 units in the last place of torch's fused step (docs/kernels.md). Elsewhere, and with foreach=True,
    capturable or differentiable, torch's own step runs and masks are applied after it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        spam: Spam | str | Mapping[str, Any] | None = None,
    ) -> None:
        self.spam = as_spam(spam)
        self._masks: dict[int, Tensor] = {}
        self._regrows = False
        self._ready: dict[int, tuple[Any, Any, Any]] = {}  # cached step of each group, with what it depends on
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach,
            capturable=capturable, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        # A GradScaler then unscales, and skips steps, before it calls step(): kernels and torch see the same gradients.
        self._step_supports_amp_scaling = False

    def __getstate__(self) -> dict[str, Any]:
        held = [[self._masks.get(id(p)) for p in group["params"]] for group in self.param_groups]
        return {**super().__getstate__(), "spam": self.spam, "held": held, "_regrows": self._regrows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = state.pop("held", None)
        super().__setstate__(state)
        self.__dict__.setdefault("spam", None)
        self.__dict__.setdefault("_masks", {})
        self.__dict__.setdefault("_regrows", False)
        self._ready = {}
        self._step_supports_amp_scaling = False
        for group, masks in zip(self.param_groups, held or [], strict=False):
            found = zip(group["params"], masks, strict=True)
            self._masks |= {id(parameter): mask for parameter, mask in found if mask is not None}

    def holds(self, masks: Mapping[Tensor, Tensor]) -> bool:
        """Whether the step applies exactly these mask tensors to these parameters."""
        return all(self._masks.get(id(parameter)) is mask for parameter, mask in masks.items())

    def set_masks(self, masks: Mapping[Tensor, Tensor], *, others: bool = False, regrows: bool = False) -> None:
        """Apply these masks (True is kept) from the next step on; an empty mapping removes all masks.

        With `others`, parameters that are not given keep their masks. `regrows` says that masks will bring weights
        back; these have no second moment at first, so SPAM then no longer clips where v is zero. A mask is bool in the
        shape of the local shard of its parameter (packed here where kernels run), or flat bits as a Pruner keeps them.
        """
        known = {id(p) for group in self.param_groups for p in group["params"]}
        held: dict[int, Tensor] = dict(self._masks) if others else {}
        for parameter, mask in masks.items():
            part = local(parameter.detach())
            flat = mask.dtype == torch.uint8 and mask.shape == (-(-part.numel() // 32) * 4,)
            whole = mask.dtype == torch.bool and mask.shape == part.shape
            if id(parameter) not in known or not (flat or whole) or mask.device != part.device:
                raise StateError(
                    f"set_masks takes bool masks in the shape of parameters of this optimizer; got a"
                    f" {mask.dtype} mask of shape {tuple(mask.shape)} for a parameter of shape {tuple(part.shape)}."
                )
            packs = not flat and kernels.serves(part, mask) and part.is_contiguous()
            held[id(parameter)] = to_bits(mask.reshape(-1)) if packs else mask
        self._masks = held
        self._regrows = regrows or (others and self._regrows)

    @property
    def taken(self) -> int:
        """Optimizer steps taken with SPAM on; saved with the parameter groups."""
        return int(self.param_groups[0].get("spam_steps", 0))

    @property
    def cold(self) -> bool:
        """Whether SPAM reset the moments too recently to rank weights by them."""
        return self.spam is not None and is_cold(self.spam, self.taken)

    def delay(self, steps: int) -> int:
        """How many steps late, because of a SPAM reset, a mask update will be that is due `steps` from now."""
        spam, due = self.spam, self.taken + steps
        return 0 if spam is None else next(late for late in range(spam.every + 1) if not is_cold(spam, due + late))

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Pruned weights and their state are zero after it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.spam is not None and resets(self.spam, self.taken):
            self._start_over()
        soft = self._soften()
        for group in self.param_groups:
            self._step_group(group, soft)
        if self.spam is not None:
            taken = self.taken + 1
            for group in self.param_groups:
                group["spam_steps"] = taken
        return loss

    def _step_group(self, group: dict[str, Any], soft: Tensor | None) -> None:
        lists: list[list[Any]] = [[] for _ in range(6)]
        self._init_group(group, *lists)
        hyper = self._hyper(group)
        places = _places(lists, group, hyper)
        known, masks, ready = self._ready.get(id(group), (None, None, []))
        if places is not None and known == places and masks is self._masks:
            kernels.take_adamw(ready, lists[1], hyper, soft)
        else:
            self._ready.pop(id(group), None)
            ready = self._step_uncached(group, lists, hyper, soft)
            if ready is not None and places is not None:
                self._ready[id(group)] = places, self._masks, ready
        self._keep_zero([p for p in group["params"] if p.grad is None and id(p) in self._masks])

    def _step_uncached(self, group: dict[str, Any], lists: list[list[Any]], hyper: Hyper, soft: Tensor | None) -> Any:
        """Build and run an uncached step: each parameter by kernel or by torch. Returns what to cache, if kernels took
        all of them."""
        largest = lists[4] or [None] * len(lists[0])
        fast, slow = [], []
        for p, g, m, v, top, _ in zip(*lists[:4], largest, lists[5], strict=True):
            part = AdamWTensors(p, g, m, v, top, self.state[p]["step"], self._masks.get(id(p)))
            here = _local(part)
            if kernels.takes(here, group):
                fast.append(replace(here, step=self._step_on(p, torch.device("cpu"))))
            else:
                wanted = here.parameter.device if group["fused"] or group["capturable"] else torch.device("cpu")
                part = part if group["differentiable"] else here
                slow.append(replace(part, step=self._step_on(p, wanted)))
        ready = kernels.prepare_adamw(fast, hyper)
        kernels.take_adamw(ready, [part.gradient for part in fast], hyper, soft)
        if slow:
            reference.adamw(slow, hyper, group, soft)
        return None if slow else ready

    def _keep_zero(self, idle: list[Tensor]) -> None:
        """Apply the masks of parameters that had no gradient and so no step."""
        kept = [(t, self._masks[id(p)]) for p in idle for t in (p.detach(), *self.state.get(p, {}).values())]
        kept = [(local(t), mask) for t, mask in kept if isinstance(t, Tensor) and t.ndim]
        if kept:
            kernels.zero([t for t, _ in kept], [mask for _, mask in kept])

    def _step_on(self, parameter: Tensor, device: torch.device) -> Tensor:
        """The parameter's step count, moved to this device if loading a state put it elsewhere."""
        state = self.state[parameter]
        if state["step"].device != device:
            state["step"] = state["step"].to(device)
        step: Tensor = state["step"]
        return step

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        beta1, beta2 = group["betas"]
        settings = beta1, beta2, group["eps"]
        if self.spam is None:
            return Hyper(group["lr"], *settings, group["weight_decay"], group["maximize"], group["amsgrad"])
        factor = warmth(self.spam, self.taken)
        rate = group["lr"] if factor == 1.0 else group["lr"] * factor
        decay = group["weight_decay"] if self.spam.warm_decay else group["weight_decay"] / factor
        clipping = clips(self.spam, self.taken)
        theta = self.spam.theta if clipping else math.inf if self.spam.theta else 0.0
        unseen = 0.0 if clipping and self.spam.clip_unseen and not self._regrows else math.inf
        return Hyper(rate, *settings, decay, group["maximize"], group["amsgrad"], theta, unseen)

    def _start_over(self) -> None:
        """Reset both moments, and with `restart_bias` the step count that corrects their bias."""
        names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        if self.spam is not None and self.spam.restart_bias:
            names.append("step")
        for state in self.state.values():
            for name in names:
                if name in state:
                    state[name].zero_()

    def _soften(self) -> Tensor | None:
        """SPAM's factors on the moments, if it looks for spikes of the gradient norm."""
        if self.spam is None or self.spam.spike is None:
            return None
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        norms = self.param_groups[0].get("spam_norms")
        if norms is None or norms.device != norm.device:
            fresh = torch.zeros(HISTORY, dtype=torch.float32, device=norm.device)
            norms = self.param_groups[0]["spam_norms"] = fresh if norms is None else norms.to(norm.device)
        return soften(self.spam, norms, norm.float(), self.taken)


def _local(part: AdamWTensors) -> AdamWTensors:
    """The same with only what this process holds of every tensor."""
    return replace(
        part,
        parameter=local(part.parameter.detach()),
        gradient=local(part.gradient.detach()),
        exp_avg=local(part.exp_avg),
        exp_avg_sq=local(part.exp_avg_sq),
        max_exp_avg_sq=None if part.max_exp_avg_sq is None else local(part.max_exp_avg_sq),
    )


def _places(lists: list[list[Any]], group: Mapping[str, Any], hyper: Hyper) -> list[Any] | None:
    """Everything a cached step depends on: tensors, their addresses (except of gradients, which move), types, settings.

    None if a gradient is a DTensor. A cached step references its tensors, so their ids stay unique."""
    parameters, gradients, first, second, largest, steps = lists
    if any(type(g) is not Tensor for g in gradients):
        return None
    state = (*first, *second, *largest)
    found: list[Any] = [
        group["foreach"], group["capturable"], group["differentiable"], type(group["lr"]), hyper.amsgrad,
        hyper.theta > 0,
    ]  # fmt: skip
    # One flat list: hundreds of small ones in every step would keep Python's garbage collector busy.
    for parameter in parameters:
        found += id(parameter), parameter.data_ptr(), parameter.dtype, parameter.is_contiguous()
    for gradient in gradients:
        found += gradient.data_ptr() & 15 == 0, gradient.dtype, gradient.is_contiguous(), gradient.device
    found += map(id, state)
    found += [tensor.data_ptr() for tensor in state]
    found += map(id, steps)
    return found
