"""Gradient statistics over calibration batches; each gradient is accumulated and freed as soon as it exists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from secateur.errors import FactError
from secateur.model.distributed import SOLO, Ranks
from secateur.model.prunable import Prunable
from secateur.oneshot.activations import InputStatistics
from secateur.oneshot.batches import (
    Batch,
    Loss,
    device_of,
    eval_mode,
    hooked,
    padding_masks,
    parameters_in_bf16,
    standard_loss,
    to_device,
)
from secateur.oneshot.offload import BlockOffload, MemoryPlan

# Facts made from the gradients of all batches: how one batch's gradient, with a share of 1 / batches, updates each.
# They have Adam's names because they are Adam's moments with a horizon of all batches, so scores that read Adam's state
# also work after training.
GRADIENT_FACTS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "exp_avg": lambda mean, g, share: mean.add_(g, alpha=share),
    "exp_avg_sq": lambda mean, g, share: mean.addcmul_(g, g, value=share),
    "gradient": lambda mean, g, share: mean.add_(g.abs(), alpha=share),
    "gradient_max": lambda largest, g, _: torch.maximum(largest, g.abs(), out=largest),
}
MEANS = ("exp_avg", "exp_avg_sq", "gradient")
CHUNK = 1 << 23  # elements that are rounded stochastically at a time


@dataclass(frozen=True)
class GradientPass:
    """How `gather_gradients` runs the model.

    `bf16` rounds fp32 parameters to bf16 meanwhile. `inputs` records the forward passes. With `check_loss`, a loss that
    depends on none of the weights is an error. `tick` is called after every batch.
    """

    loss: Loss = standard_loss
    plan: MemoryPlan = field(default_factory=MemoryPlan)
    offload: BlockOffload | None = None
    bf16: bool = False
    inputs: InputStatistics | None = None
    check_loss: bool = False
    tick: Callable[[], None] = lambda: None
    ranks: Ranks = SOLO


def gather_gradients(
    model: nn.Module,
    batches: Sequence[Batch],
    prunables: Sequence[Prunable],
    wanted: Collection[str],
    how: GradientPass | None = None,
) -> Mapping[str, dict[str, Tensor]]:
    """The wanted facts of each weight by name, from one backward pass per batch; ranks share the batches."""
    how = how or GradientPass()
    ranks, inputs = how.ranks, how.inputs
    device = device_of(model) if how.offload is None else how.offload.device
    torch.clear_autocast_cache()  # an autocast around this call would reuse casts of earlier weights
    statistics = GradientStatistics(prunables, wanted, len(batches), how.plan, ranks)
    to_host = nullcontext() if how.offload is None else how.offload.gradients_to(statistics.add)
    rounded = parameters_in_bf16(model) if how.bf16 else nullcontext()
    previous: Tensor | None = None
    depends = False
    parameters = [prunable.parameter for prunable in prunables]
    with eval_mode(model, parameters), torch.enable_grad(), statistics, to_host, rounded:
        for turn in range(ranks.turns(len(batches))):
            for number in ranks.mine(len(batches))[turn : turn + 1]:
                value = _backward(model, to_device(batches[number], device), how.loss, inputs)
                depends |= value.requires_grad
                _check_not_nan(previous)  # the loss before this one, which does not wait for the device
                previous = value.detach()
            statistics.exchange(device)
            if inputs is not None:
                inputs.finish_batch(ranks, device)
            how.tick()
        _check_not_nan(previous)
    if inputs is not None:
        inputs.sync(ranks)
    if how.check_loss and not any(answer[0] for answer in ranks.tell("loss", [depends])):
        raise FactError(
            "The loss does not depend on any prunable weight: it has no gradient in any batch. Compute it without"
            " no_grad, detach, item or argmax, from the output of the model that is passed to loss(model, batch)."
        )
    return statistics.facts


def _backward(model: nn.Module, batch: Batch, loss: Loss, inputs: InputStatistics | None) -> Tensor:
    """The loss of a batch, after its backward pass if it depends on a weight."""
    if inputs is not None:
        inputs.start_batch(padding_masks(model, batch))
    with inputs or nullcontext():
        value = loss(model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise FactError(f"The loss must be one number that depends on the weights; it is {shape}.")
    if value.requires_grad:
        value.backward()
    return value


def _check_not_nan(loss: Tensor | None) -> None:
    if loss is not None and bool(loss.isnan()):
        raise FactError("The loss of a batch is NaN, so its gradients are useless. Check the batches and the loss.")


class GradientStatistics:
    """Accumulates gradient statistics inside a `with`.

    The plan says which statistics stay beside the weights and which go to the host. Means in bf16 are rounded
    stochastically, so that increments far below their size still count on average. With several ranks, gradients wait
    until every rank has its batch and are then added in batch order on every rank: the same sums as in one process.
    """

    def __init__(
        self,
        prunables: Sequence[Prunable],
        wanted: Collection[str],
        batches: int,
        plan: MemoryPlan,
        ranks: Ranks = SOLO,
    ) -> None:
        self._prunables, self._share, self._ranks = prunables, 1 / batches, ranks
        self._numbers = {id(prunable.parameter): number for number, prunable in enumerate(prunables)}
        self._pending: list[tuple[int, Tensor]] = []  # this rank's gradients of one batch, in order of arrival
        names = [name for name in GRADIENT_FACTS if name in wanted]
        room = plan.on_device
        self.facts: dict[str, dict[str, Tensor]] = {}
        for prunable in prunables:
            stays = room is None or prunable.parameter.numel() <= room
            room = None if room is None else room - prunable.parameter.numel() if stays else room
            self.facts[prunable.name] = {name: _zeros(prunable.parameter, plan.dtype, stays) for name in names}
        self._facts_of = {id(prunable.parameter): self.facts[prunable.name] for prunable in prunables}
        self._cache = HostCache()
        self._generators: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> GradientStatistics:
        parameters = (prunable.parameter for prunable in self._prunables)
        self._hooks = hooked(partial(one.register_post_accumulate_grad_hook, self._hook) for one in parameters)
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__(None, None, None)
        self._cache.synchronize()

    def _hook(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:  # None if block offload has passed it to `add`
            self.add(parameter, gradient)

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add one batch's gradient of a parameter, on any device."""
        facts = self._facts_of.get(id(parameter), {})
        if self._ranks.size == 1:
            self._accumulate(parameter, gradient)
        elif facts:  # kept beside the statistic: if that did not fit on the device, gradients do not either
            self._pending.append((self._numbers[id(parameter)], gradient.to(next(iter(facts.values())).device)))

    def exchange(self, device: torch.device) -> None:
        """Accumulate the pending gradients of all ranks, on this device."""
        pending, self._pending = self._pending, []
        self._ranks.share("gradients", pending, self._receive, device)

    def _receive(self, number: int, gradient: Tensor) -> None:
        parameter = self._prunables[number].parameter
        if not parameter.is_contiguous():  # with the strides that backward gives it, so kernels round alike
            gradient = torch.empty_like(parameter, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
        self._accumulate(parameter, gradient)

    def _accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        for name, statistic in self._facts_of.get(id(parameter), {}).items():
            with self._cache.on_device(statistic, gradient.device) as near:
                if near.dtype == torch.float32 or name not in MEANS:
                    GRADIENT_FACTS[name](near, gradient.to(near.dtype), self._share)
                else:
                    self._accumulate_rounded(name, near, gradient)

    def _accumulate_rounded(self, name: str, statistic: Tensor, gradient: Tensor) -> None:
        device = gradient.device
        generator = self._generators.setdefault(device, torch.Generator(device).manual_seed(0))
        for kept, new in zip(statistic.view(-1).split(CHUNK), gradient.reshape(-1).split(CHUNK), strict=True):
            kept.copy_(stochastic_round(GRADIENT_FACTS[name](kept.float(), new.float(), self._share), generator))


def has_gradients(prunable: Prunable, statistic: Tensor) -> Tensor:
    """For each matrix of a weight, whether a gradient statistic has a nonzero element."""
    matrices = prunable.parameter.shape[0] if len(prunable.layout.rows) > 1 else 1
    near = statistic.to(prunable.parameter.device)
    return torch.linalg.vector_norm(near.reshape(matrices, -1), float("inf"), dim=1) != 0


def _zeros(parameter: Tensor, dtype: torch.dtype, stays: bool) -> Tensor:
    if stays:
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
    return empty_on_host(parameter.shape, dtype, torch.cuda.is_available()).zero_()


def stochastic_round(values: Tensor, generator: torch.Generator) -> Tensor:
    """Rounds fp32 values in place to one of their two bf16 neighbours, the nearer one more likely."""
    nan = values.isnan()  # their bits must not overflow into those of a number
    bits = values.view(torch.int32)
    bits += torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    bits &= -(1 << 16)
    return values.masked_fill_(nan, torch.nan)


def on_host(tensor: Tensor) -> Tensor:
    """A copy on the host; pinned if the tensor is on a CUDA device."""
    return empty_on_host(tensor.shape, tensor.dtype, tensor.device.type == "cuda").copy_(tensor)


def empty_on_host(shape: torch.Size, dtype: torch.dtype, pinned: bool) -> Tensor:
    """An uninitialized host tensor; CUDA copies from and to pinned memory while it computes."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)


class HostCache:
    """Statistics in host memory that are copied to the device to be updated, with prefetch on CUDA.

    CUDA copies run on their own stream. Gradients arrive in the same order for every batch, so the tensor that followed
    this one last time is prefetched while this one is in use. Other devices copy synchronously.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._prefetched: dict[int, tuple[Tensor, torch.cuda.Event]] = {}  # by the id of the host tensor
        self._next: dict[int, Tensor] = {}
        self._last: Tensor | None = None

    @contextmanager
    def on_device(self, tensor: Tensor, device: torch.device) -> Iterator[Tensor]:
        """The tensor on the device; changes are copied back to the host on exit."""
        if tensor.device == device:
            yield tensor
        elif device.type != "cuda":
            near = tensor.to(device)
            yield near
            tensor.copy_(near)
        else:
            yield from self._on_cuda(tensor, device)

    def _on_cuda(self, tensor: Tensor, device: torch.device) -> Iterator[Tensor]:
        copies = self._streams.setdefault(device, torch.cuda.Stream(device))
        compute = torch.cuda.current_stream(device)
        prefetched = id(tensor) in self._prefetched
        near, arrived = self._prefetched.pop(id(tensor)) if prefetched else self._fetch(tensor, copies)
        if self._last is not None:
            self._next[id(self._last)] = tensor
        self._last = tensor
        following = self._next.get(id(tensor))
        if following is not None and following is not tensor and id(following) not in self._prefetched:
            self._prefetched[id(following)] = self._fetch(following, copies)
        compute.wait_event(arrived)
        near.record_stream(compute)
        yield near
        copies.wait_event(compute.record_event())
        near.record_stream(copies)
        with torch.cuda.stream(copies):
            tensor.copy_(near, non_blocking=True)

    def _fetch(self, tensor: Tensor, copies: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(copies):
            return tensor.to(copies.device, non_blocking=True), copies.record_event()

    def synchronize(self) -> None:
        """Wait until all changes are on the host."""
        self._prefetched.clear()
        for stream in self._streams.values():
            stream.synchronize()
