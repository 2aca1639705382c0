"""Calibration batches: take them once, move them, compute a loss, and run the model without side effects.

Batches are taken once, so everything that is compared sees the same data. During calibration dropout is off and
normalization statistics are frozen; modes, gradients and `requires_grad` flags are restored afterwards, also on errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from secateur.errors import FactError, ModelError
from secateur.selection.exact import sent

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]
Padding = dict[str, Tensor]  # masks [batch, positions], False at padding, by the sequence they belong to
INPUT, DECODER = "input", "decoder"  # what the model reads, and in an encoder-decoder what its decoder reads

LOGITS_AT_ONCE = 1 << 25  # converted to fp32 together: with a large vocabulary, all of them would outgrow the model
IGNORED = -100  # torch's target for positions without a label
SOFTER = 10.0  # logits are divided by this in the loss of a model that fits its batches
AS_MAPPINGS = "Give batches as mappings, {'input_ids': ..., 'labels': ...}, or pass loss=..."
# Set in transformers' configs during calibration. A key-value cache takes memory and makes a second run of a block see
# the first one; experts that run one by one show their inputs.
CALIBRATION_CONFIG = {"use_cache": False, "_experts_implementation": "eager"}


def take_batches(batches: Iterable[Batch] | Tensor, limit: int | None = None) -> list[Batch]:
    """The first `limit` batches (all by default) as a list. A tensor of token ids is split into its rows."""
    if not isinstance(batches, Iterable):
        raise FactError(f"batches must be a loader, a list of batches or a tensor of ids, not {batches!r}.")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise FactError(f"limit must be the number of batches to take, at least 1; got {limit!r}.")
    if isinstance(batches, Tensor) and batches.ndim == 1 and not batches.is_floating_point():
        raise FactError(f"Token ids must be [rows, positions], not {list(batches.shape)}. For one row, ids[None].")
    taken = list(batches.split(1)[:limit]) if isinstance(batches, Tensor) else list(islice(batches, limit))
    if not taken:
        raise FactError("There are no batches to calibrate with. Pass a loader, a list of batches or a tensor of ids.")
    return taken


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor in its (nested) containers moved to the device."""
    if isinstance(batch, Tensor):
        return sent(batch, device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def standard_loss(model: nn.Module, batch: Batch, temperature: float | None = None) -> Tensor:
    """The default loss, chosen by the type of the batch.

    A mapping is passed to a Hugging Face model, which computes the loss from its labels. A tensor of integers holds
    token ids and gives the next-token cross entropy. A pair is (inputs, targets): cross entropy for integer targets,
    mean squared error for others. With a temperature, cross entropies have logits divided by it, mappings included.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
        if temperature is not None:
            logits, labels = logits_of(output), batch["labels"]
            if logits.ndim != 2 or int(labels.max()) >= logits.shape[1]:
                raise FactError(f"Logits of shape {list(logits.shape)} are not of the classes in the labels.")
            return cross_entropy(logits / temperature, labels)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise FactError("The model returned no loss for this batch. Put labels into it, or pass loss=...")
        return torch.as_tensor(loss)
    if isinstance(batch, Tensor) and not batch.is_floating_point():
        return _next_token_loss(model, batch, temperature or 1.0)
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
        outputs, targets = logits_of(model(batch[0])), batch[1]
        if targets.is_floating_point():
            return nn.functional.mse_loss(outputs, targets)
        return cross_entropy(outputs / (temperature or 1.0), targets)
    inside = ", ".join(type(value).__name__ for value in batch) if isinstance(batch, tuple | list) else ""
    raise FactError(
        f"No loss is known for batches of {type(batch).__name__}{inside and f' ({inside})'}. Give token ids, (inputs,"
        " targets) or a mapping with labels, or pass loss=..., a function of the model and a batch."
    )


def has_classes(batch: Batch) -> bool:
    """Whether the standard loss of this batch is a cross entropy of logits that are at hand: of tokens or classes, but
    not where a Hugging Face model computes the loss from labels of several dimensions."""
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
        return isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
    targets = batch[1] if isinstance(batch, tuple | list) else batch
    return not targets.is_floating_point()


def run_model(model: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch, without a loss, so labels and targets are not needed."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Tensor) and not batch.is_floating_point():
        _refuse_encoder_decoder(model)
    return model(batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch)


def _next_token_loss(model: nn.Module, tokens: Tensor, temperature: float) -> Tensor:
    """Mean cross entropy of every token given the tokens before it."""
    _refuse_encoder_decoder(model)
    logits = logits_of(model(tokens))
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise FactError(
            f"{type(model).__name__} returns {list(logits.shape)} for token ids {list(tokens.shape)}: not a prediction"
            f" at every position. {AS_MAPPINGS}"
        )
    return cross_entropy(logits[:, :-1] / temperature, tokens[:, 1:])


def _has_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _refuse_encoder_decoder(model: nn.Module) -> None:
    if _has_decoder(model):
        raise FactError(f"{type(model).__name__} is an encoder-decoder: token ids alone have no target. {AS_MAPPINGS}")


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: its `logits`, the first element of a tuple, or the output itself."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    found = found[0] if isinstance(found, tuple | list) and found else found
    if not isinstance(found, Tensor):
        held = f" with {', '.join(map(repr, output))}" if isinstance(output, Mapping) else ""
        raise FactError(
            f"The model returned a {type(output).__name__}{held}, in which no logits are found. Pass loss=..., a"
            " function of the model and a batch."
        )
    return found


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in fp32. Classes are the last dimension, or the second for images."""
    if logits.ndim != 4 and logits.ndim == targets.ndim + 1 and logits.shape[:-1] == targets.shape:
        logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    if logits.ndim != 2 or logits.numel() <= LOGITS_AT_ONCE:
        return nn.functional.cross_entropy(logits.float(), targets)
    rows = max(1, LOGITS_AT_ONCE // logits.shape[1])
    chunks = zip(logits.split(rows), targets.split(rows), strict=True)
    total = sum(checkpoint(_summed, *chunk, use_reentrant=False) for chunk in chunks)
    return torch.as_tensor(total) / (targets != IGNORED).sum()


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=IGNORED)


def in_bf16(loss: Loss) -> Loss:
    """The same loss under bf16 autocast: several times faster on a GPU, with errors far below the noise of a batch."""

    def measured(model: nn.Module, batch: Batch) -> Tensor:
        # The batch's device, not the model's: offloaded blocks compute where the batch is.
        tensor = first_tensor_in(batch)
        device = device_of(model) if tensor is None else tensor.device
        with torch.autocast(device.type, torch.bfloat16):
            return loss(model, batch)

    return measured


def padding_masks(model: nn.Module, batch: Batch) -> Padding:
    """Masks of the sequences in the batch; empty if nothing is padded.

    Read from attention masks. Without one, the labels of a causal language model tell: positions after the last label
    of a row do not affect the loss. A prompt without labels counts as text.
    """
    if not isinstance(batch, Mapping):
        return {}
    given, labels = (batch[n] if isinstance(batch.get(n), Tensor) else None for n in ("attention_mask", "labels"))
    labels = labels if labels is not None and labels.ndim == 2 else None
    masks: Padding = {} if given is None or given.ndim != 2 else {INPUT: given != 0}
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    if _has_decoder(model) or "decoder_attention_mask" in batch:
        masks |= _decoder_mask(batch, labels, masks)
    elif given is None and causal and labels is not None:
        masks = {INPUT: _until_last_label(labels)}
    return masks if any(not bool(mask.all()) for mask in masks.values()) else {}


def _decoder_mask(batch: Mapping[str, Any], labels: Tensor | None, masks: Padding) -> Padding:
    """The decoder's mask: given, or told by its labels. Models make a decoder's inputs from the labels if there are
    none, and from the encoder's inputs if there are no labels either."""
    inputs = next((batch[n] for n in ("decoder_input_ids", "decoder_inputs_embeds") if batch.get(n) is not None), None)
    given = batch.get("decoder_attention_mask")
    if isinstance(given, Tensor) and given.ndim == 2:
        return {DECODER: given != 0}
    if labels is not None:
        return {DECODER: labels != IGNORED if inputs is None else _until_last_label(labels)}
    if inputs is not None:
        return {DECODER: torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)}
    return {DECODER: masks[INPUT]} if INPUT in masks else {}


def _until_last_label(labels: Tensor) -> Tensor:
    return (labels != IGNORED).flip(1).cumsum(1).flip(1) > 0


def check_ids(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Refuse token ids outside the embedding: they would raise an IndexError, or abort a CUDA process."""
    ask = getattr(model, "get_input_embeddings", None)
    try:
        table = ask() if callable(ask) else None
    except NotImplementedError:  # transformers raises it for models without an embedding
        return
    if not isinstance(table, nn.Embedding):
        return
    rows = table.num_embeddings
    found = [ids for batch in batches if (ids := _ids_in(batch)) is not None]
    outside = [i for ids in found for i in (int(ids.min()), int(ids.max())) if not 0 <= i < rows]
    if outside:
        raise ModelError(
            f"The batches have token id {outside[0]:,}, and the embedding of {type(model).__name__} has {rows:,} rows."
            " The tokenizer belongs to another model, or has tokens that this one was not resized for:"
            " model.resize_token_embeddings(len(tokenizer))."
        )


def _ids_in(batch: Batch) -> Tensor | None:
    """The token ids of a text batch; None with images or audio, whose placeholders may have other ids."""
    if isinstance(batch, tuple | list) and batch:
        batch = batch[0]  # a pair of inputs and targets
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    if any(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        return None
    return ids if isinstance(ids, Tensor) and ids.numel() else None


def first_tensor_in(batch: Batch) -> Tensor | None:
    """The first tensor in a batch, which is the model's input."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    return next((value for value in values if isinstance(value, Tensor)), None)


def tensors_in(batch: Batch) -> Iterator[Tensor]:
    """Every tensor in a batch, also in nested containers."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(value)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter, where it takes its inputs."""
    return next(model.parameters()).device


def usable_device(device: torch.device | str) -> torch.device:
    """The torch device of this name ("cpu", "cuda:1", "mps", "xpu", ...), after checking that it works here."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"There is no device {str(device)!r}. Use a name that torch knows, such as cpu, cuda, cuda:1, mps or xpu."
        ) from error
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # a torch built without CUDA asserts
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ModelError(f"Device {str(device)!r} cannot be used here: {reason}. Use another, such as cpu.") from error
    return found


def computes_bf16(device: torch.device) -> bool:
    """Whether this is an accelerator whose torch module reports support for bf16 (CUDA and XPU do)."""
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return device.type != "cpu" and supported is not None and bool(supported())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device or the host ran out of memory."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError)
        and any(said in text for said in ("out of memory", "can't allocate memory", "alloc_failed"))
    )


@contextmanager
def eval_mode(model: nn.Module, trainable: Collection[nn.Parameter] = ()) -> Iterator[None]:
    """Evaluation mode with gradients for `trainable` only; restores everything on exit.

    No backward pass runs through layers before the first trainable parameter.
    """
    restore = _settings_now(model)
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)  # one fused call for a layer hides its inputs
        for config, name in _calibration_configs(model):
            setattr(config, name, CALIBRATION_CONFIG[name])
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
            parameter.grad = None
        for parameter in trainable:
            parameter.requires_grad_(True)
        for layer in _recurrent(model):  # cuDNN has no backward pass in evaluation mode
            layer.training, layer.dropout = True, 0.0
        yield
    finally:
        restore()


def _settings_now(model: nn.Module) -> Callable[[], None]:
    """A function that restores what calibration sets: modes, gradients, configs and torch's fused attention."""
    modes = [(module, module.training) for module in model.modules()]
    dropouts = [(layer, layer.dropout) for layer in _recurrent(model)]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    settings = [(config, name, getattr(config, name)) for config, name in _calibration_configs(model)]
    fastpath = torch.backends.mha.get_fastpath_enabled()

    def restore() -> None:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for config, name, value in settings:
            setattr(config, name, value)
        for layer, dropout in dropouts:
            layer.dropout = dropout
        for module, mode in modes:
            module.training = mode
        for parameter, flag, gradient in flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
            parameter.grad = gradient

    return restore


def _recurrent(model: nn.Module) -> list[nn.RNNBase]:
    return [layer for layer in model.modules() if isinstance(layer, nn.RNNBase)]


def _calibration_configs(model: nn.Module) -> list[tuple[Any, str]]:
    """Configs with the names of their settings that calibration changes."""
    return [(config, name) for config in _configs(model) for name in CALIBRATION_CONFIG if _can_set(config, name)]


def _can_set(config: Any, name: str) -> bool:
    """Whether a config has this setting and it can be changed: a module's config may be of any type."""
    try:
        setattr(config, name, getattr(config, name))
    except (AttributeError, TypeError):
        return False
    return True


def _configs(model: nn.Module) -> list[Any]:
    """Every config of transformers' modules once; composite models have several."""
    found = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    nested = [
        value for config in found for value in getattr(config, "__dict__", {}).values() if hasattr(value, "use_cache")
    ]
    return list({id(config): config for config in (*found, *nested)}.values())


@contextmanager
def parameters_in_bf16(model: nn.Module) -> Iterator[None]:
    """Temporarily rounds fp32 parameters to bf16, so activations between matmuls take half the memory too."""
    originals = [(p, p.data) for p in model.parameters() if p.dtype == torch.float32]
    try:
        for parameter, original in originals:
            parameter.data = original.to(torch.bfloat16)
        yield
    finally:
        for parameter, original in originals:
            parameter.data = original


@contextmanager
def hooked(registrations: Iterable[Callable[[], RemovableHandle]]) -> Iterator[None]:
    """Calls these functions, each of which registers a hook; removes the hooks on exit, also if not all were made."""
    with ExitStack() as stack:
        for register in registrations:
            stack.callback(register().remove)
        yield


@contextmanager
def restore_on_error(model: nn.Module) -> Iterator[list[Callable[[], None]]]:
    """On any exception, also Ctrl-C, calls the functions that were appended to the list, last one first.

    Restores the model's settings and torch's modes too, and removes hooks: Ctrl-C between the body of a `with` and its
    exit skips that exit, and Ctrl-C in an exit cuts it short.
    """
    undo: list[Callable[[], None]] = []
    restore_modes = _modes_now()
    restore_settings = _settings_now(model) if isinstance(model, nn.Module) else lambda: None
    try:
        yield undo
    except BaseException:
        restore_modes()
        restore_settings()
        if isinstance(model, nn.Module):
            _remove_hooks(model)
        for step in reversed(undo):
            step()
        raise


def _remove_hooks(model: nn.Module) -> None:
    """Remove the hooks that functions of this package made for calibration, and no others."""
    tables = [table for module in model.modules() for table in (module._forward_pre_hooks, module._forward_hooks)]
    tables += [parameter._post_accumulate_grad_hooks or {} for parameter in model.parameters()]
    for table in tables:
        for number in [n for n, hook in table.items() if str(getattr(hook, "__module__", "")).startswith(__package__)]:
            del table[number]


def _modes_now() -> Callable[[], None]:
    """A function that switches off function and dispatch modes entered from now on, and restores the gradient mode."""
    gradients = torch.is_grad_enabled()
    functions, dispatches = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()

    def restore() -> None:
        while torch._C._len_torch_function_stack() > functions:
            torch.overrides._pop_mode()
        while torch._C._len_torch_dispatch_stack() > dispatches:
            torch.utils._python_dispatch._pop_mode()
        torch.set_grad_enabled(gradients)

    return restore
