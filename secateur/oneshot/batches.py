"""Calibration: what a few batches of data tell about the weights of a trained model.

Batches are drawn once, so that everything that is compared has seen the same data. While the model is asked, dropout is
off and normalisation frozen; afterwards modes, gradients and flags are as they were, whatever happened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from secateur.errors import FactError, ModelError
from secateur.selection.exact import sent

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]

LOGITS = 1 << 25  # that are taken to fp32 at a time: those of a large vocabulary would take more room than the model
IGNORED = -100  # the target that is none, as torch has it
AS_MAPPINGS = "Give batches as mappings, {'input_ids': ..., 'labels': ...}, or pass loss=..."
# What transformers' models are told while they are watched: no keys and values kept for generation, which would take
# room and make a second run of a block see the first; and experts one after another, so that their inputs are seen.
WATCHABLE = {"use_cache": False, "_experts_implementation": "eager"}


def draw(batches: Iterable[Batch] | Tensor, limit: int | None = None) -> list[Batch]:
    """The batches of one call, taken once. A tensor of token ids is taken row by row."""
    drawn = list(batches.split(1)[:limit]) if isinstance(batches, Tensor) else list(islice(batches, limit))
    if not drawn:
        raise FactError("There are no batches to calibrate with. Pass a loader, a list of batches or a tensor of ids.")
    return drawn


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device, whatever holds them."""
    if isinstance(batch, Tensor):
        return sent(batch, device)
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
        return _next_tokens(model, batch)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        outputs, targets = logits_of(model(batch[0])), batch[1]
        compare = nn.functional.mse_loss if targets.is_floating_point() else cross_entropy
        return compare(outputs, targets)
    raise FactError(
        f"No loss is known for batches of {type(batch).__name__}. Give token ids, (inputs, targets) or a mapping with"
        " labels, or pass loss=..., a function of the model and a batch."
    )


def run_model(model: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch; no loss, so no labels or targets are needed."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Tensor) and not batch.is_floating_point():
        _check_one_side(model)
    return model(batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch)


def real_positions(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Masks `[batch, positions]` of what is not padding, one for each sequence the batch holds; none if all is real.

    An attention mask tells. Without one, a causal language model's labels do: what follows the last label of a row has
    no part in the loss and nothing real attends to it. A prompt without labels is real.
    """
    if not isinstance(batch, Mapping):
        return []
    names = [name for name in ("attention_mask", "decoder_attention_mask") if isinstance(batch.get(name), Tensor)]
    masks = [batch[name] != 0 for name in names if batch[name].ndim == 2]
    labels = batch.get("labels")
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    if not names and causal and isinstance(labels, Tensor) and labels.ndim == 2:
        masks = [(labels != IGNORED).flip(1).cumsum(1).flip(1) > 0]
    return masks if any(not bool(mask.all()) for mask in masks) else []


def _next_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of every token given those before it."""
    _check_one_side(model)
    logits = logits_of(model(tokens))
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise FactError(
            f"{type(model).__name__} gives {list(logits.shape)} for token ids {list(tokens.shape)}: not a prediction at"
            f" every place. {AS_MAPPINGS}"
        )
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


def _check_one_side(model: nn.Module) -> None:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise FactError(
            f"{type(model).__name__} is an encoder-decoder: token ids alone give it no target. {AS_MAPPINGS}"
        )


def check_ids(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Refuse token ids beyond the model's embedding; they would be an index error, or end a CUDA process."""
    ask = getattr(model, "get_input_embeddings", None)
    try:
        table = ask() if callable(ask) else None
    except Exception:  # a foreign model's own method
        return
    if not isinstance(table, nn.Embedding):
        return
    rows = table.num_embeddings
    highest = max((int(ids.max()) for batch in batches if (ids := _ids_in(batch)) is not None), default=0)
    if highest >= rows:
        raise ModelError(
            f"The batches have token id {highest:,}, and the embedding of {type(model).__name__} has {rows:,} rows. The"
            " tokenizer belongs to another model, or has tokens that this one was not resized for:"
            " model.resize_token_embeddings(len(tokenizer))."
        )


def _ids_in(batch: Batch) -> Tensor | None:
    """The token ids of a batch of text. Pictures and sound among them may have ids of their own."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    parts = batch.values() if isinstance(batch, Mapping) else [batch]
    if any(isinstance(part, Tensor) and part.is_floating_point() for part in parts):
        return None
    return ids if isinstance(ids, Tensor) and ids.numel() else None


def in_bf16(loss: Loss) -> Loss:
    """The same loss with products in bf16, as autocast has them: several times as fast on a GPU, and far finer than
    what one batch tells of all text."""

    def measured(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(kind_of_device(model, batch), torch.bfloat16):
            return loss(model, batch)

    return measured


def kind_of_device(model: nn.Module, batch: Batch) -> str:
    """Where a batch is, which is where it will be computed, wherever the model lives."""
    found = first_in(batch)
    return (device_of(model) if found is None else found.device).type


def first_in(batch: Batch) -> Tensor | None:
    """The first tensor in a batch, which is what the model reads."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    return next((part for part in parts if isinstance(part, Tensor)), None)


def tensors_in(batch: Batch) -> Iterator[Tensor]:
    """Every tensor in a batch, whatever holds it."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)


@contextmanager
def halved(model: nn.Module) -> Iterator[None]:
    """Inside, fp32 parameters are rounded to bf16, so that what lies between products is half as large too; afterwards
    they are the tensors they were."""
    homes = [(p, p.data) for p in model.parameters() if p.dtype == torch.float32]
    try:
        for parameter, home in homes:
            parameter.data = home.to(torch.bfloat16)
        yield
    finally:
        for parameter, home in homes:
            parameter.data = home


def logits_of(output: Any) -> Tensor:
    """The logits in whatever a model returns."""
    found = getattr(output, "logits", output[0] if isinstance(output, tuple | list) else output)
    return torch.as_tensor(found)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all predictions; classes are last, or, in pictures, second."""
    if logits.ndim != 4 and logits.ndim == targets.ndim + 1 and logits.shape[:-1] == targets.shape:
        logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    if logits.ndim != 2 or logits.numel() <= LOGITS:
        return nn.functional.cross_entropy(logits.float(), targets)
    rows = max(1, LOGITS // logits.shape[1])
    parts = zip(logits.split(rows), targets.split(rows), strict=True)
    total = sum(checkpoint(_summed, *part, use_reentrant=False) for part in parts)
    return torch.as_tensor(total) / (targets != IGNORED).sum()


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=IGNORED)


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
        with _recurrent(model):
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


@contextmanager
def _recurrent(model: nn.Module) -> Iterator[None]:
    """Recurrent layers in training mode without dropout: cuDNN has no backward pass in evaluation mode."""
    layers = [(layer, layer.dropout) for layer in model.modules() if isinstance(layer, nn.RNNBase)]
    try:
        for layer, _ in layers:
            layer.training, layer.dropout = True, 0.0
        yield
    finally:
        for layer, dropout in layers:
            layer.dropout = dropout


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration transformers' modules go by, each once; composite models have several."""
    found = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    inner = [part for config in found for part in vars(config).values() if hasattr(part, "use_cache")]
    return list({id(config): config for config in (*found, *inner)}.values())
