"""Evaluate Hugging Face models on text: perplexity or their own loss, and tasks of lm-eval.

transformers and lm_eval are imported when a function needs them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import HF_EXTRA, ModelError, SecateurError, library, one_line
from secateur.oneshot.batches import IGNORED, check_ids, device_of, is_out_of_memory, standard_loss, to_device

TOKENS = "input_ids"
IN_PYTHON = "From Python: sc.prune(model, [{{{!r}: ..., 'labels': ...}}, ...]), then model.save_pretrained(FOLDER)."
MASKED = 0.15  # fraction of tokens masked to evaluate a masked language model
POSITIONS = 128  # whose logits are converted to fp32 at once: those over a vocabulary are large


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
    if not is_causal(model):
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


def is_causal(model: nn.Module) -> bool:
    """Whether a model of text predicts each token from those before it alone."""
    return not (_is_masked(model) or _is_encoder_decoder(model))


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _is_masked(model: nn.Module) -> bool:
    return "MaskedLM" in type(model).__name__


def _writes_text(model: nn.Module) -> bool:
    """Whether the model predicts tokens: it is a causal language model, or has output embeddings."""
    auto = library("transformers.models.auto.modeling_auto", "Evaluating a model", HF_EXTRA)
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
        message = f"{type(model).__name__} cannot read windows of text: {one_line(error)}"
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


def lm_eval(model: nn.Module, tokenizer: Any, tasks: Sequence[str], limit: int | None = None) -> dict[str, float]:
    """Results of tasks of EleutherAI's harness as {"task metric": value}, on the first `limit` questions of each."""
    harness = library("lm_eval", "Running tasks", "lm_eval")
    wrapped = library("lm_eval.models.huggingface", "Running tasks", "lm_eval").HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=1
    )
    with _evaluating(model):
        found = harness.simple_evaluate(model=wrapped, tasks=list(tasks), limit=limit, log_samples=False)
    return {
        f"{task} {metric.removesuffix(',none')}": float(value)
        for task, values in found["results"].items()
        for metric, value in values.items()
        if isinstance(value, int | float) and "stderr" not in metric and "," in metric
    }
