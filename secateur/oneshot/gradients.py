"""Statistics of gradients over some batches, each gradient folded in and freed the moment it exists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from secateur.errors import FactError
from secateur.model.distributed import SOLO, Ranks
from secateur.model.prunable import Prunable
from secateur.oneshot.activations import Inputs
from secateur.oneshot.batches import Batch, Loss, device_of, halved, quiet, real_positions, standard_loss, to_device
from secateur.oneshot.offload import Ferry

# Facts made of gradients over all batches, and what one batch's gradient, this share of all, does to each. Adam's
# names, because they are Adam's quantities with a horizon of all batches: scores that read them work after training.
GRADIENT_FACTS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "exp_avg": lambda mean, g, share: mean.add_(g, alpha=share),
    "exp_avg_sq": lambda mean, g, share: mean.addcmul_(g, g, value=share),
    "gradient": lambda mean, g, share: mean.add_(g.abs(), alpha=share),
    "gradient_max": lambda most, g, _: torch.maximum(most, g.abs(), out=most),
}
MEANS = ("exp_avg", "exp_avg_sq", "gradient")
CHUNK = 1 << 23  # numbers rounded by chance at a time


class Gradients:
    """Statistics of gradients, gathered inside a `with`.

    Those of the first `room` weights stay where the weights are, the others on the host, from where each is fetched
    when its gradient is there. Kept in bf16, means are rounded up or down by chance, so that what is small beside them
    still counts on average. With several ranks, gradients wait for the end of a turn and are then folded in on every
    rank, batch after batch: the same sums in the same order as in one process.
    """

    def __init__(
        self,
        sites: Sequence[Prunable],
        wanted: Collection[str],
        batches: int,
        dtype: torch.dtype = torch.float32,
        room: int | None = None,
        ranks: Ranks = SOLO,
    ) -> None:
        self._sites, self._share, self._ranks = sites, 1 / batches, ranks
        self._numbers = {id(site.parameter): number for number, site in enumerate(sites)}
        self._waiting: list[tuple[int, Tensor]] = []  # this rank's gradients of a turn, in the order they came
        names = [name for name in GRADIENT_FACTS if name in wanted]
        self.facts: dict[str, dict[str, Tensor]] = {}
        for site in sites:
            stays = room is None or site.parameter.numel() <= room
            room = None if room is None else room - site.parameter.numel() if stays else room
            self.facts[site.name] = {name: _zeros(site.parameter, dtype, stays) for name in names}
        self._of = {id(site.parameter): self.facts[site.name] for site in sites}
        self._shelf = Shelf()
        self._draws: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> Gradients:
        self._handles = [site.parameter.register_post_accumulate_grad_hook(self._hook) for site in self._sites]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._shelf.settle()

    def _hook(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:  # or else a ferry has delivered it
            self.fold(parameter, gradient)

    def fold(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take in a batch's gradient of a parameter, wherever it is."""
        facts = self._of.get(id(parameter), {})
        if self._ranks.size == 1:
            self._fold(parameter, gradient)
        elif facts:  # kept where the statistic is: where that has no room, gradients have none
            self._waiting.append((self._numbers[id(parameter)], gradient.to(next(iter(facts.values())).device)))

    def exchange(self, device: torch.device) -> None:
        """The end of a turn: fold in the gradients of all ranks, on this device."""
        waiting, self._waiting = self._waiting, []
        self._ranks.share("gradients", waiting, self._take, device)

    def _take(self, number: int, gradient: Tensor) -> None:
        parameter = self._sites[number].parameter
        if not parameter.is_contiguous():  # laid out as backward does, so that kernels round alike
            gradient = torch.empty_like(parameter, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
        self._fold(parameter, gradient)

    def _fold(self, parameter: Tensor, gradient: Tensor) -> None:
        for name, statistic in self._of.get(id(parameter), {}).items():
            with self._shelf.lent(statistic, gradient.device) as near:
                if near.dtype == torch.float32 or name not in MEANS:
                    GRADIENT_FACTS[name](near, gradient.to(near.dtype), self._share)
                else:
                    self._fold_rounded(name, near, gradient)

    def _fold_rounded(self, name: str, statistic: Tensor, gradient: Tensor) -> None:
        device = gradient.device
        draw = self._draws.setdefault(device, torch.Generator(device).manual_seed(0))
        for kept, new in zip(statistic.view(-1).split(CHUNK), gradient.reshape(-1).split(CHUNK), strict=True):
            kept.copy_(rounded_by_chance(GRADIENT_FACTS[name](kept.float(), new.float(), self._share), draw))


def _zeros(parameter: Tensor, dtype: torch.dtype, stays: bool) -> Tensor:
    if stays:
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
    return empty_on_host(parameter.shape, dtype, torch.cuda.is_available()).zero_()


def rounded_by_chance(values: Tensor, draw: torch.Generator) -> Tensor:
    """fp32 numbers that are exact in bf16: either neighbour, the nearer one likelier. Overwrites what it is given."""
    nan = values.isnan()  # whose bits may not overflow into those of a number
    bits = values.view(torch.int32)
    bits += torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=draw)
    bits &= -(1 << 16)
    return values.masked_fill_(nan, torch.nan)


def gather_gradients(
    model: nn.Module,
    batches: Sequence[Batch],
    sites: Sequence[Prunable],
    wanted: Collection[str],
    *,
    loss: Loss = standard_loss,
    dtype: torch.dtype = torch.float32,
    room: int | None = None,
    ferry: Ferry | None = None,
    rounded: bool = False,
    every: bool = False,
    watch: Inputs | None = None,
    tick: Callable[[], None] = lambda: None,
    ranks: Ranks = SOLO,
) -> Mapping[str, dict[str, Tensor]]:
    """Facts of each site by name, from one backward pass for every batch; `watch` stands around the forward passes.
    With `rounded`, of a model whose fp32 parameters are rounded to bf16 meanwhile. If these are `every` site of the
    model, the loss must depend on one. Each of the `ranks` takes its share of the batches."""
    device = device_of(model) if ferry is None else ferry.device
    torch.clear_autocast_cache()  # where autocast is on outside, it would go on with casts of what weights once were
    trained, gathering = [site.parameter for site in sites], Gradients(sites, wanted, len(batches), dtype, room, ranks)
    before: Tensor | None = None
    depends = False
    crossing = nullcontext() if ferry is None else ferry.delivering(gathering.fold)
    with quiet(model, trained), torch.enable_grad(), gathering, crossing, halved(model) if rounded else nullcontext():
        for turn in range(ranks.turns(len(batches))):
            for number in ranks.mine(len(batches))[turn : turn + 1]:
                value = _backward(model, to_device(batches[number], device), loss, watch)
                depends |= value.requires_grad
                _check_number(before)  # not this one, for which a device would have to be waited for
                before = value.detach()
            gathering.exchange(device)
            if watch is not None:
                watch.finish(ranks, device)
            tick()
        _check_number(before)
    if watch is not None:
        watch.agree(ranks)
    if every and not any(told[0] for told in ranks.tell("loss", [depends])):
        raise FactError(
            "The loss does not depend on any prunable weight: it has no gradient in any batch. Compute it without"
            " no_grad, detach, item or argmax, from the output of the model that is passed to loss(model, batch)."
        )
    return gathering.facts


def _backward(model: nn.Module, batch: Batch, loss: Loss, watch: Inputs | None) -> Tensor:
    """The loss of a batch, after its backward pass if these weights had a part in it."""
    if watch is not None:
        watch.batch(real_positions(model, batch))
    with watch or nullcontext():
        value = loss(model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise FactError(f"The loss must be one number that depends on the weights; it is {shape}.")
    if value.requires_grad:
        value.backward()
    return value


def _check_number(loss: Tensor | None) -> None:
    if loss is not None and bool(loss.isnan()):
        raise FactError("The loss of a batch is NaN: nothing can be learned from its gradients.")


def on_host(tensor: Tensor) -> Tensor:
    """A copy on the host, from where a GPU can fetch parts quickly."""
    return empty_on_host(tensor.shape, tensor.dtype, tensor.device.type == "cuda").copy_(tensor)


def empty_on_host(shape: torch.Size, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Room on the host; pinned, a GPU copies from and to it while it computes."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)


class Shelf:
    """Lends tensors that are on the host to the device, one after another.

    Copies go by a stream of their own, beside the computation. Gradients come in the same order for every batch, so
    whatever followed a tensor the last time is fetched while that tensor is still in use.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._ahead: dict[int, tuple[Tensor, torch.cuda.Event]] = {}  # on their way, by the id of what is on the host
        self._follows: dict[int, Tensor] = {}
        self._last: Tensor | None = None

    @contextmanager
    def lent(self, tensor: Tensor, device: torch.device) -> Iterator[Tensor]:
        """The tensor on the device, to be changed inside; afterwards the host has what it became."""
        if tensor.device == device:
            yield tensor
        elif device.type != "cuda":
            near = tensor.to(device)
            yield near
            tensor.copy_(near)
        else:
            yield from self._lent(tensor, device)

    def _lent(self, tensor: Tensor, device: torch.device) -> Iterator[Tensor]:
        side = self._streams.setdefault(device, torch.cuda.Stream(device))
        here = torch.cuda.current_stream(device)
        known = id(tensor) in self._ahead
        near, arrived = self._ahead.pop(id(tensor)) if known else self._fetch(tensor, side)
        if self._last is not None:
            self._follows[id(self._last)] = tensor
        self._last = tensor
        following = self._follows.get(id(tensor))
        if following is not None and following is not tensor and id(following) not in self._ahead:
            self._ahead[id(following)] = self._fetch(following, side)
        here.wait_event(arrived)
        near.record_stream(here)
        yield near
        side.wait_event(here.record_event())
        near.record_stream(side)
        with torch.cuda.stream(side):
            tensor.copy_(near, non_blocking=True)

    def _fetch(self, tensor: Tensor, side: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(side):
            return tensor.to(side.device, non_blocking=True), side.record_event()

    def settle(self) -> None:
        """Wait until everything is back on the host."""
        self._ahead.clear()
        for stream in self._streams.values():
            stream.synchronize()
