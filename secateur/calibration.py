"""Calibration: what a few batches of data tell about the weights of a trained model.

Batches are drawn once, so that everything that is compared has seen the same data. While the model is asked, dropout is
off and normalisation frozen; afterwards modes, gradients and flags are as they were, whatever happened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import FactError
from secateur.sites import Site

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]

# Facts made of gradients over all batches, and what a batch's gradient adds to each. Adam's names, because they are
# Adam's quantities with a horizon of all batches: so every score that reads them works after training too.
GRADIENT_FACTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exp_avg": lambda sum_, g: sum_.add_(g),
    "exp_avg_sq": lambda sum_, g: sum_.addcmul_(g, g),
    "gradient": lambda sum_, g: sum_.add_(g.abs()),
    "gradient_max": lambda most, g: torch.maximum(most, g.abs(), out=most),
}
MEANS = ("exp_avg", "exp_avg_sq", "gradient")
# What transformers' models are told while they are watched: no keys and values kept for generation, which would take
# room and make a second run of a block see the first; and experts one after another, so that their inputs are seen.
WATCHABLE = {"use_cache": False, "_experts_implementation": "eager"}
CHUNK = 1 << 23  # numbers rounded by chance at a time


def draw(batches: Iterable[Batch] | Tensor, limit: int | None = None) -> list[Batch]:
    """The batches of one call, taken once. A tensor of token ids is taken row by row."""
    drawn = list(batches.split(1)[:limit]) if isinstance(batches, Tensor) else list(islice(batches, limit))
    if not drawn:
        raise FactError("There are no batches to calibrate with. Pass a loader, a list of batches or a tensor of ids.")
    return drawn


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device, whatever holds them."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def standard_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that is meant when none is given.

    A mapping is what a Hugging Face model takes, labels among it. Integers are token ids, each to be predicted from
    those before it. A pair is inputs and targets: cross entropy for integer targets, squared error for others.
    """
    if isinstance(batch, Mapping):
        found = getattr(model(**batch), "loss", None)
        if found is None:
            raise FactError("The model returned no loss for this batch. Put labels into it, or pass loss=...")
        return torch.as_tensor(found)
    if isinstance(batch, Tensor) and not batch.is_floating_point():
        return cross_entropy(logits_of(model(batch))[:, :-1], batch[:, 1:])
    if isinstance(batch, tuple | list) and len(batch) == 2:
        outputs, targets = logits_of(model(batch[0])), batch[1]
        compare = nn.functional.mse_loss if targets.is_floating_point() else cross_entropy
        return compare(outputs, targets)
    raise FactError(
        f"No loss is known for batches of {type(batch).__name__}. Give token ids, (inputs, targets) or a mapping with"
        " labels, or pass loss=..., a function of the model and a batch."
    )


def logits_of(output: Any) -> Tensor:
    """The logits in whatever a model returns."""
    found = getattr(output, "logits", output[0] if isinstance(output, tuple | list) else output)
    return torch.as_tensor(found)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all predictions; classes are last, or, in pictures, second."""
    if logits.ndim != 4 and logits.ndim == targets.ndim + 1 and logits.shape[:-1] == targets.shape:
        logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    return nn.functional.cross_entropy(logits.float(), targets)


def device_of(model: nn.Module) -> torch.device:
    """Where the model takes its inputs."""
    return next(model.parameters()).device


@contextmanager
def quiet(model: nn.Module, trained: Collection[nn.Parameter] = ()) -> Iterator[None]:
    """Evaluation mode with gradients for `trained` alone; everything is as before afterwards.

    What comes before the first trained parameter then needs no backward pass, since nothing there asks for one.
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    settings = [(c, name, getattr(c, name)) for c in _configs(model) for name in WATCHABLE if hasattr(c, name)]
    fast = torch.backends.mha.get_fastpath_enabled()  # one call for a whole layer, in which nobody sees the inputs
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        for config, name, _ in settings:
            setattr(config, name, WATCHABLE[name])
        for parameter, flag, _ in flags:
            if flag:
                parameter.requires_grad_(False)
            parameter.grad = None
        for parameter in trained:
            parameter.requires_grad_(True)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for config, name, value in settings:
            setattr(config, name, value)
        for module, mode in modes:
            module.training = mode
        for parameter, flag, gradient in flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
            parameter.grad = gradient


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration transformers' modules go by, each once; composite models have several."""
    found = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    inner = [part for config in found for part in vars(config).values() if hasattr(part, "use_cache")]
    return list({id(config): config for config in (*found, *inner)}.values())


class Gradients:
    """Statistics of gradients, gathered inside a `with`: each gradient is folded in and freed the moment it exists.

    Kept in bf16, sums are rounded up or down by chance, so that what is small beside them still counts on average.
    """

    def __init__(self, sites: Sequence[Site], wanted: Collection[str], dtype: torch.dtype = torch.float32) -> None:
        self._sites, self._wanted = sites, [name for name in GRADIENT_FACTS if name in wanted]
        self.batches = 0
        self.facts: dict[str, dict[str, Tensor]] = {
            site.name: {name: torch.zeros_like(site.parameter, dtype=dtype) for name in self._wanted} for site in sites
        }
        self._draw = {device: torch.Generator(device).manual_seed(0) for device in {s.parameter.device for s in sites}}

    def __enter__(self) -> Gradients:
        self._handles = [
            site.parameter.register_post_accumulate_grad_hook(self._fold(self.facts[site.name])) for site in self._sites
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _fold(self, facts: Mapping[str, Tensor]) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            gradient = parameter.grad
            parameter.grad = None
            assert gradient is not None
            for name, statistic in facts.items():
                if statistic.dtype == torch.float32 or name not in MEANS:
                    GRADIENT_FACTS[name](statistic, gradient.to(statistic.dtype))
                else:
                    self._fold_rounded(name, statistic, gradient)

        return hook

    def _fold_rounded(self, name: str, statistic: Tensor, gradient: Tensor) -> None:
        parts = zip(statistic.view(-1).split(CHUNK), gradient.reshape(-1).split(CHUNK), strict=True)
        for kept, new in parts:
            kept.copy_(rounded_by_chance(GRADIENT_FACTS[name](kept.float(), new.float()), self._draw[kept.device]))

    def finish(self) -> None:
        """Sums become means."""
        for facts in self.facts.values():
            for name in MEANS:
                if name in facts:
                    facts[name].div_(self.batches)


def rounded_by_chance(values: Tensor, draw: torch.Generator) -> Tensor:
    """fp32 numbers that are exact in bf16: either neighbour, the nearer one likelier. Overwrites what it is given."""
    bits = values.view(torch.int32)
    bits += torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=draw)
    bits &= -(1 << 16)
    return values


def gather_gradients(
    model: nn.Module,
    batches: Sequence[Batch],
    sites: Sequence[Site],
    wanted: Collection[str],
    *,
    loss: Loss = standard_loss,
    dtype: torch.dtype = torch.float32,
    watch: AbstractContextManager[Any] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Tensor]]:
    """Facts of each site by name, from one backward pass for every batch; `watch` stands around the forward passes."""
    device = device_of(model)
    trained, gathering = [site.parameter for site in sites], Gradients(sites, wanted, dtype)
    with quiet(model, trained), torch.enable_grad(), gathering as found:
        for batch in batches:
            with watch or nullcontext():
                value = loss(model, to_device(batch, device))
            if not isinstance(value, Tensor) or value.numel() != 1:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise FactError(f"The loss must be one number that depends on the weights; it is {shape}.")
            if bool(value.isnan()):
                raise FactError("The loss of a batch is NaN: nothing can be learned from its gradients.")
            if value.requires_grad:  # or else these weights had no part in it, which is no evidence
                value.backward()
            found.batches += 1
            tick()
    found.finish()
    return found.facts
