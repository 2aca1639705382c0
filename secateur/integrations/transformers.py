"""Hugging Face models: load them, evaluate them on text, and save them with their masks.

transformers, safetensors and lm_eval are imported when a function needs them.
"""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import DataError, ModelError, SecateurError, StateError, library
from secateur.files import appearing
from secateur.integrations import smollm2
from secateur.integrations.text import check_apart, read_text, split, windows
from secateur.oneshot.batches import (
    IGNORED,
    check_ids,
    device_of,
    is_out_of_memory,
    standard_loss,
    to_device,
    usable_device,
)
from secateur.selection.masks import pack, packed_bytes, unpack

__all__ = [
    "check_apart",
    "check_context",
    "lm_eval",
    "load",
    "load_masks",
    "perplexity",
    "read_text",
    "reading",
    "save",
    "split",
    "task_for",
    "windows",
]

EXTRA = '"secateur[hf]"'
TOKENS = "input_ids"
IN_PYTHON = "From Python: sc.prune(model, [{{{!r}: ..., 'labels': ...}}, ...]), then model.save_pretrained(FOLDER)."
MASKED = 0.15  # fraction of tokens masked to evaluate a masked language model
POSITIONS = 128  # whose logits are converted to fp32 at once: those over a vocabulary are large
MASKS = "masks.safetensors"
OTHER_BYTES = 16 << 20  # allowed for tokenizer, configs and reports


def load(
    name: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer, from a folder, from the hub, or "smollm2".

    The dtype is that of the stored weights by default. `device` is any torch device.
    """
    target = None if device is None else usable_device(device)
    if os.fspath(name) == "smollm2":
        model, tokenizer = smollm2.load()
        model = model if dtype is None else model.to(dtype)
    else:
        model, tokenizer = _pretrained(os.fspath(name), dtype)
    model = model if target is None else model.to(target)
    return model.eval(), tokenizer


def _pretrained(name: str, dtype: torch.dtype | None) -> tuple[Any, Any]:
    transformers = library("transformers", f"Loading {name}", EXTRA)
    # Names on the hub have at most one slash and never start with a dot; anything else must be a folder.
    if not Path(name).is_dir() and (Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise ModelError(f"There is no folder {name}. Give a folder, a name on the Hugging Face hub, or smollm2.")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        model, found = _kind(transformers, config).from_pretrained(
            name, dtype="auto" if dtype is None else dtype, output_loading_info=True
        )
        tokenizer = _tokenizer(transformers, name, model)
    except Exception as error:  # damaged files raise almost any type; tokenizers raises plain Exception
        if is_out_of_memory(error):
            raise
        where = "" if Path(name).is_dir() else " (there is no such folder, so it was looked up on the Hugging Face hub)"
        raise ModelError(f"{name} cannot be loaded{where}: {_one_line(error)}") from error
    if missing := sorted(found["missing_keys"]):
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        warnings.warn(f"{name} lacks {len(missing)} tensors, which are initialized at random: {shown}", stacklevel=3)
    return model, tokenizer


def _tokenizer(transformers: Any, name: str, model: Any) -> Any:
    """The model's tokenizer; None for a model that reads images or audio and has none."""
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError):  # transformers raises any of these where files are missing
        if getattr(model, "main_input_name", TOKENS) == TOKENS:
            raise
        return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _kind(transformers: Any, config: Any) -> Any:
    """The class the model was saved from; if the config names none, the first auto class that fits."""
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModel


def check_context(model: nn.Module, context: int) -> None:
    """Refuse a context beyond a learned position table; without one, warn beyond `max_position_embeddings`."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tables = [rows for name, module in model.named_modules() if (rows := _positions(name, module))]
    longest = min([*tables, *([limit] if limit else [])], default=context)
    if context <= longest:
        return
    if tables:
        raise ModelError(
            f"{type(model).__name__} has {longest:,} learned positions, and a context of {context:,} was asked for."
            f" Use at most {longest:,}."
        )
    warnings.warn(
        f"{type(model).__name__} was made for {longest:,} tokens; with {context:,} its perplexity may be worse.",
        stacklevel=2,
    )


def _positions(name: str, module: nn.Module) -> int | None:
    """The number of positions of a position table; None for other modules."""
    leaf = name.rpartition(".")[2]
    if not isinstance(module, nn.Embedding) or not (leaf == "wpe" or "position" in leaf or "pos_emb" in leaf):
        return None
    unused = (
        0 if module.padding_idx is None else module.padding_idx + 1
    )  # RoBERTa's positions start after the padding index
    return module.num_embeddings - unused


def perplexity(
    model: nn.Module, windows: Tensor, *, batch: int = 1, progress: Callable[[int, int], None] | None = None
) -> float:
    """exp of the mean cross entropy of every next token in every window. Calls `progress(done, total)` with windows."""
    if windows.ndim != 2 or not len(windows) or windows.shape[1] < 2 or batch < 1:
        raise ModelError(
            f"Perplexity needs windows [count, context] of two tokens or more and a batch of 1 or more; got"
            f" {list(windows.shape)} and {batch}."
        )
    if _is_masked(model) or _is_encoder_decoder(model):
        raise ModelError(f"{type(model).__name__} sees the tokens that it predicts; perplexity needs a causal model.")
    check_context(model, windows.shape[1])
    check_ids(model, [windows])
    # A key-value cache would be built for each window and never used.
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    device, total, done = next(model.parameters()).device, 0.0, 0
    with _evaluating(model):
        for part in windows.split(batch):
            tokens = part.to(device)
            total += _loss(model, model(tokens, **options), tokens)
            done += len(part)
            if progress is not None:
                progress(done, len(windows))
    # torch's exp of a huge loss is inf; that of math raises.
    return torch.tensor(total / (len(windows) * (windows.shape[1] - 1)), dtype=torch.float64).exp().item()


@dataclass(frozen=True)
class Task:
    """How windows of text calibrate and evaluate one kind of model."""

    measure: str  # the name of the metric
    how: str  # details of the metric
    batches: Callable[[Tensor, int], list[Any]]  # from windows and a batch size
    judge: Callable[..., float]  # the metric of (model, windows, batch=..., progress=...)


def task_for(model: nn.Module, tokenizer: Any) -> Task:
    """Perplexity for causal models; for masked language models and encoder-decoders their own loss."""
    kind, reads = type(model).__name__, getattr(model, "main_input_name", TOKENS)
    if tokenizer is None or not _writes_text(model):
        how = IN_PYTHON.format(reads if isinstance(reads, str) else TOKENS)
        raise ModelError(f"{kind} needs labelled examples, and the command line only has text to calibrate with. {how}")
    if _is_encoder_decoder(model):
        return _by_own_loss("loss", ", second half of each window from the first", _halves)
    if _is_masked(model):
        mask = getattr(tokenizer, "mask_token_id", None)
        if mask is None:
            raise ModelError(f"{kind} predicts masked tokens, and its tokenizer has no mask token. Add one to it.")
        return _by_own_loss("loss", f", {MASKED:.0%} of tokens masked", partial(_masked, mask))
    return Task("perplexity", "", lambda windows, batch: list(windows.split(batch)), perplexity)


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _is_masked(model: nn.Module) -> bool:
    return "MaskedLM" in type(model).__name__


def _writes_text(model: nn.Module) -> bool:
    """Whether the model predicts tokens: it is a causal language model, or has output embeddings."""
    auto = library("transformers.models.auto.modeling_auto", "Evaluating a model", EXTRA)
    ask = getattr(model, "get_output_embeddings", None)
    return type(model).__name__ in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or (
        callable(ask) and ask() is not None
    )


def _by_own_loss(measure: str, how: str, make: Callable[[Tensor], dict[str, Tensor]]) -> Task:
    def batches(windows: Tensor, batch: int) -> list[Any]:
        made = make(windows)
        parts = [part.split(batch) for part in made.values()]
        return [dict(zip(made, values, strict=True)) for values in zip(*parts, strict=True)]

    def judge(
        model: nn.Module, windows: Tensor, *, batch: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> float:
        return _mean_loss(model, batches(windows, batch), len(windows), progress)

    return Task(measure, how, batches, judge)


def _halves(windows: Tensor) -> dict[str, Tensor]:
    """Inputs of the encoder and labels of the decoder: the two halves of every window."""
    if windows.shape[1] < 2:
        raise ModelError("An encoder-decoder needs windows of two tokens or more; ask for a longer context.")
    given = windows.shape[1] - windows.shape[1] // 2
    return {"input_ids": windows[:, :given].contiguous(), "labels": windows[:, given:].contiguous()}


def _masked(token: int, windows: Tensor) -> dict[str, Tensor]:
    """Windows with a fixed choice of tokens masked; the labels are those tokens."""
    count = max(1, round(MASKED * windows.shape[1]))
    order = torch.rand(windows.shape, generator=torch.Generator().manual_seed(0), device="cpu").argsort(1)
    hidden = (order < count).to(windows.device)
    return {"input_ids": windows.masked_fill(hidden, token), "labels": windows.masked_fill(~hidden, IGNORED)}


def _mean_loss(
    model: nn.Module, batches: Sequence[dict[str, Tensor]], windows: int, progress: Callable[[int, int], None] | None
) -> float:
    """The mean of the model's own loss over all labels."""
    check_context(model, batches[0][TOKENS].shape[1])
    check_ids(model, batches)
    device, total, labels, done = device_of(model), 0.0, 0, 0
    with _evaluating(model):
        for batch in batches:
            count = int((batch["labels"] != IGNORED).sum())
            total += standard_loss(model, to_device(batch, device)).item() * count
            labels, done = labels + count, done + len(batch["labels"])
            if progress is not None:
                progress(done, windows)
    return total / labels


def _loss(model: nn.Module, answer: Any, tokens: Tensor) -> float:
    """Sum of the next-token cross entropy in fp32, a few positions at a time."""
    logits = answer if isinstance(answer, Tensor) else getattr(answer, "logits", None)
    if logits is None or logits.shape[:-1] != tokens.shape:
        raise ModelError(f"{type(model).__name__} does not predict a token at every position: it has no perplexity.")
    total = 0.0
    for start in range(0, tokens.shape[1] - 1, POSITIONS):
        wanted = tokens[:, start + 1 : start + 1 + POSITIONS]
        given = logits[:, start : start + wanted.shape[1]].float()
        total += nn.functional.cross_entropy(given.flatten(0, 1), wanted.flatten(), reduction="sum").item()
    return total


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """Turns errors that a model raises on text into a ModelError of one line; lack of memory stays what it is."""
    try:
        yield
    except SecateurError:
        raise
    except Exception as error:  # a model that needs other inputs than text raises almost any type
        if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            raise
        message = f"{type(model).__name__} cannot read windows of text: {_one_line(error)}"
        raise ModelError(f"{message}. {IN_PYTHON.format(TOKENS)}") from error


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; restores every module's mode."""
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module in training:
            module.training = True


def lm_eval(
    model: nn.Module, tokenizer: Any, tasks: Sequence[str], limit: int | None = None, batch: int = 1
) -> dict[str, float]:
    """Results of tasks of EleutherAI's harness as {"task metric": value}, on the first `limit` questions of each."""
    harness = library("lm_eval", "Running tasks", "lm_eval")
    wrapped = library("lm_eval.models.huggingface", "Running tasks", "lm_eval").HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=batch
    )
    with _evaluating(model):
        found = harness.simple_evaluate(model=wrapped, tasks=list(tasks), limit=limit, log_samples=False)
    return {
        f"{task} {metric.removesuffix(',none')}": float(value)
        for task, values in found["results"].items()
        for metric, value in values.items()
        if isinstance(value, int | float) and "stderr" not in metric and "," in metric
    }


def save(
    model: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    masks: Mapping[str, Tensor],
    report_texts: Mapping[str, str],
    *,
    overwrite: bool = False,
) -> Path:
    """Write the model, tokenizer, masks (one bit per weight) and reports ({file name: text}) to a folder, which appears
    only when it is complete."""
    files = library("safetensors.torch", "Saving masks", EXTRA)
    folder = Path(folder).absolute()
    check_free(folder, overwrite)
    _check_masks(getattr(model, "_orig_mod", model), masks)
    with appearing(folder) as partial:
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        packed = {name: pack(mask).cpu().contiguous() for name, mask in masks.items()}
        shapes = json.dumps({name: list(mask.shape) for name, mask in masks.items()})
        files.save_file(packed, partial / MASKS, metadata={"format": "pt", "shapes": shapes})
        for name, text in report_texts.items():
            if Path(name).name != name or (partial / name).exists():
                raise ModelError(f"A report cannot be saved as {name!r}: that is a path, or a file of the model's own.")
            (partial / name).write_text(text, encoding="utf-8")
    return folder


def load_masks(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The bool masks that `save` wrote; True is kept."""
    files = library("safetensors", "Reading masks", EXTRA)
    path = Path(folder) / MASKS
    if not path.is_file():
        raise StateError(f"There is no {MASKS} in {folder}: it was not saved by Secateur, or without its masks.")
    try:
        with files.safe_open(path, framework="pt") as opened:
            shapes = json.loads((opened.metadata() or {})["shapes"])
            packed = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except (files.SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise StateError(f"{path} does not hold masks: {error!r}. Save the model again.") from error
    if not isinstance(shapes, dict) or not all(map(_is_shape, shapes.values())):
        raise StateError(f"{path} does not hold masks: its shapes are not lists of sizes. Save the model again.")
    wrong = [name for name in packed if name not in shapes or not _fits(packed[name], shapes[name])]
    if wrong or shapes.keys() != packed.keys():
        odd = sorted({*wrong, *(shapes.keys() ^ packed.keys())})
        raise StateError(f"{path} does not fit the shapes it names, at {', '.join(odd[:3])}. Save the model again.")
    return {name: unpack(packed[name], shape) for name, shape in shapes.items()}


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and bool(shape) and all(type(size) is int and size >= 0 for size in shape)


def _fits(packed: Tensor, shape: Sequence[int]) -> bool:
    """Whether this can be the packed mask of a weight of this shape."""
    rows = packed.ndim == 2 and packed.shape[0] == shape[0]
    return packed.dtype == torch.uint8 and rows and packed.numel() == packed_bytes(shape)


def saved_bytes(model: nn.Module) -> int:
    """An estimate of the bytes that `save` writes: weights, masks of one bit per weight, tokenizer and reports."""
    weights = [*model.parameters(), *model.buffers()]
    return sum(weight.nbytes + weight.numel() // 8 for weight in weights) + OTHER_BYTES


def check_free(
    folder: str | os.PathLike[str],
    overwrite: bool,
    what: str = "model",
    signs: Sequence[str] = ("config.json", "*model*"),
) -> None:
    """Refuse to write to a file, to a folder that is not empty (unless `overwrite`), and to overwrite a folder without
    the files that mark a `what`."""
    folder, error = Path(folder), ModelError if what == "model" else DataError
    if not folder.exists():
        return
    if not folder.is_dir():
        raise error(f"{folder} is a file; a {what} is saved as a folder.")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise error(f"{folder} is not empty. Name another folder, or pass overwrite=True (--overwrite).")
    if not all(any(path.is_file() for path in folder.glob(sign)) for sign in signs):  # such as a home folder
        raise error(f"{folder} holds something other than a {what} and is not overwritten. Name another folder.")


def _check_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, mask in masks.items():
        if name not in shapes:
            raise StateError(f"There is a mask for {name!r}, which is not a parameter of {type(model).__name__}.")
        if mask.dtype != torch.bool or mask.shape != shapes[name]:
            raise StateError(
                f"The mask of {name!r} is {mask.dtype} {list(mask.shape)}; it must be torch.bool {list(shapes[name])}."
            )
