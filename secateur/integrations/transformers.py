"""Models of Hugging Face: load, judge, save. Its libraries are imported when called, and not before."""

from __future__ import annotations

import inspect
import json
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
from secateur.oneshot.batches import IGNORED, check_ids, device_of, standard_loss, to_device
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
MASKED = 0.15  # share of the tokens that a masked language model is judged by
POSITIONS = 128  # predictions judged at once: the softmax over a vocabulary is large


def load(
    name: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer, from a folder, from the hub, or "smollm2".

    The dtype is that of the stored weights unless another is named.
    """
    if str(name) == "smollm2":
        model, tokenizer = smollm2.load()
        model = model if dtype is None else model.to(dtype)
    else:
        model, tokenizer = _pretrained(str(name), dtype)
    try:
        model = model if device is None else model.to(device)
    except RuntimeError as error:  # no such device, or it is full
        raise ModelError(f"{name} cannot be moved to {str(device)!r}: {error}") from error
    return model.eval(), tokenizer


def _pretrained(name: str, dtype: torch.dtype | None) -> tuple[Any, Any]:
    transformers = library("transformers", f"Loading {name}", EXTRA)
    # The hub's names have one slash at most and never begin with a dot; all else can only be meant as a folder.
    if not Path(name).is_dir() and (Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise ModelError(f"There is no folder {name}. Give a folder, a name on the Hugging Face hub, or smollm2.")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        model, found = _kind(transformers, config).from_pretrained(
            name, dtype="auto" if dtype is None else dtype, output_loading_info=True
        )
        tokenizer = _tokenizer(transformers, name, model)
    except Exception as error:  # of many kinds: no network, no such name, a file cut short, code we do not run
        where = "" if Path(name).is_dir() else " (it is no folder here, so the Hugging Face hub was asked)"
        raise ModelError(f"{name} cannot be loaded{where}: {_one_line(error)}") from error
    if missing := sorted(found["missing_keys"]):
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        warnings.warn(f"{name} lacks {len(missing)} tensors, which start at random: {shown}", stacklevel=3)
    return model, tokenizer


def _tokenizer(transformers: Any, name: str, model: Any) -> Any:
    """The model's tokenizer; None for a model that reads pictures or sound and has none."""
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception:
        if getattr(model, "main_input_name", TOKENS) == TOKENS:
            raise
        return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _kind(transformers: Any, config: Any) -> Any:
    """The class the model was saved from; where none is named, the first of three kinds that the model can be."""
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
    """Refuse a context beyond a table of positions; warn of one beyond what a model without a table was made for."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tables = [rows for name, module in model.named_modules() if (rows := _positions(name, module))]
    longest = min([*tables, *([limit] if limit else [])], default=context)
    if context <= longest:
        return
    if tables:
        raise ModelError(
            f"{type(model).__name__} has learned {longest:,} positions, and a context of {context:,} was asked for."
            f" Ask for {longest:,} at most."
        )
    warnings.warn(
        f"{type(model).__name__} was made for {longest:,} tokens; with {context:,} its perplexity may suffer.",
        stacklevel=2,
    )


def _positions(name: str, module: nn.Module) -> int | None:
    """How many positions this module has a row for; None when it is no table of positions."""
    leaf = name.rpartition(".")[2]
    if not isinstance(module, nn.Embedding) or not (leaf == "wpe" or "position" in leaf or "pos_emb" in leaf):
        return None
    unused = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from after its padding
    return module.num_embeddings - unused


def perplexity(
    model: nn.Module, windows: Tensor, *, batch: int = 1, progress: Callable[[int, int], None] | None = None
) -> float:
    """exp of the mean cross entropy of every next token in every window. `progress` is told windows done and in all."""
    if windows.ndim != 2 or not len(windows) or windows.shape[1] < 2 or batch < 1:
        raise ModelError(
            f"Perplexity needs windows [count, context] of two tokens or more and a batch of 1 or more; got"
            f" {list(windows.shape)} and {batch}."
        )
    if _is_masked(model) or _is_encoder_decoder(model):
        raise ModelError(f"{type(model).__name__} sees the tokens it would predict; perplexity needs a causal model.")
    check_context(model, windows.shape[1])
    check_ids(model, [windows])
    # A cache of keys and values would be made for each window and never used.
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    device, total, done = next(model.parameters()).device, 0.0, 0
    with _judged(model):
        for part in windows.split(batch):
            tokens = part.to(device)
            total += _loss(model, model(tokens, **options), tokens)
            done += len(part)
            if progress is not None:
                progress(done, len(windows))
    # By torch: exp of a ruined model's loss is infinity there and an error in math.
    return torch.tensor(total / (len(windows) * (windows.shape[1] - 1)), dtype=torch.float64).exp().item()


@dataclass(frozen=True)
class Task:
    """How windows of text calibrate and judge a model of one kind."""

    measure: str  # the name of the figure
    how: str  # what is added to it
    batches: Callable[[Tensor, int], list[Any]]  # of windows, so many at a time
    judge: Callable[..., float]  # of a model, windows, batch=... and progress=...


def task_for(model: nn.Module, tokenizer: Any) -> Task:
    """Perplexity for causal models; for masked language models and encoder-decoders their own loss."""
    kind, reads = type(model).__name__, getattr(model, "main_input_name", TOKENS)
    if tokenizer is None or not _writes_text(model):
        how = IN_PYTHON.format(reads if isinstance(reads, str) else TOKENS)
        raise ModelError(
            f"{kind} needs labelled examples, which the command line has none of: it prunes by text. {how}"
        )
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
    """Whether the model predicts tokens: its kind is known for it, or it has a layer that makes them."""
    auto = library("transformers.models.auto.modeling_auto", "Judging a model", EXTRA)
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
    """What an encoder reads and what a decoder is to write."""
    if windows.shape[1] < 2:
        raise ModelError("An encoder-decoder needs windows of two tokens or more; ask for a longer context.")
    given = windows.shape[1] - windows.shape[1] // 2
    return {"input_ids": windows[:, :given].contiguous(), "labels": windows[:, given:].contiguous()}


def _masked(token: int, windows: Tensor) -> dict[str, Tensor]:
    """Windows with some tokens masked, always the same ones; labels are the tokens there."""
    count = max(1, round(MASKED * windows.shape[1]))
    order = torch.rand(windows.shape, generator=torch.Generator().manual_seed(0), device="cpu").argsort(1)
    hidden = (order < count).to(windows.device)
    return {"input_ids": windows.masked_fill(hidden, token), "labels": windows.masked_fill(~hidden, IGNORED)}


def _mean_loss(
    model: nn.Module, batches: Sequence[dict[str, Tensor]], windows: int, progress: Callable[[int, int], None] | None
) -> float:
    """The model's own loss, as a mean over all labels."""
    check_context(model, batches[0][TOKENS].shape[1])
    check_ids(model, batches)
    device, total, labels, done = device_of(model), 0.0, 0, 0
    with _judged(model):
        for batch in batches:
            count = int((batch["labels"] != IGNORED).sum())
            total += standard_loss(model, to_device(batch, device)).item() * count
            labels, done = labels + count, done + len(batch["labels"])
            if progress is not None:
                progress(done, windows)
    return total / labels


def _loss(model: nn.Module, answer: Any, tokens: Tensor) -> float:
    """Cross entropy of the next tokens, summed in fp32 over a few positions at a time."""
    logits = answer if isinstance(answer, Tensor) else getattr(answer, "logits", None)
    if logits is None or logits.shape[:-1] != tokens.shape:
        raise ModelError(f"{type(model).__name__} does not predict a token at every place: it has no perplexity.")
    total = 0.0
    for start in range(0, tokens.shape[1] - 1, POSITIONS):
        wanted = tokens[:, start + 1 : start + 1 + POSITIONS]
        given = logits[:, start : start + wanted.shape[1]].float()
        total += nn.functional.cross_entropy(given.flatten(0, 1), wanted.flatten(), reduction="sum").item()
    return total


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """Inside, whatever goes wrong in a model that is given text is an error that says so in one line."""
    try:
        yield
    except (SecateurError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of many kinds: a foreign model's own code
        said = f"{type(model).__name__} cannot read windows of text: {_one_line(error)}"
        raise ModelError(f"{said}. {IN_PYTHON.format(TOKENS)}") from error


@contextmanager
def _judged(model: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients; afterwards every module is in the mode it was in."""
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
    """Tasks of EleutherAI's harness, as {"task metric": value}; `limit` questions of each, or all."""
    harness = library("lm_eval", "Running tasks", "lm_eval")
    wrapped = library("lm_eval.models.huggingface", "Running tasks", "lm_eval").HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=batch
    )
    with _judged(model):
        found = harness.simple_evaluate(model=wrapped, tasks=list(tasks), limit=limit, log_samples=False)
    return {
        f"{task} {metric.removesuffix(',none')}": float(value)
        for task, values in found["results"].items()
        for metric, value in values.items()
        if isinstance(value, int | float) and "stderr" not in metric and "," in metric
    }


EXTRA = '"secateur[hf]"'
MASKS = "masks.safetensors"
OTHERS = 16 << 20  # bytes to allow for tokenizer, settings and reports


def save(
    model: Any,
    tokenizer: Any,
    folder: str | Path,
    masks: Mapping[str, Tensor],
    report_texts: Mapping[str, str],
    *,
    overwrite: bool = False,
) -> Path:
    """Write model, tokenizer, masks (a bit a weight) and reports ({file name: text}); the folder appears when whole."""
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


def load_masks(folder: str | Path) -> dict[str, Tensor]:
    """The masks that `save` wrote, as bools: True is kept."""
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
        raise StateError(f"{path} does not hold masks: its shapes are no lists of sizes. Save the model again.")
    wrong = [name for name in packed if name not in shapes or not _fits(packed[name], shapes[name])]
    if wrong or shapes.keys() != packed.keys():
        odd = sorted({*wrong, *(shapes.keys() ^ packed.keys())})
        raise StateError(f"{path} does not fit the shapes it names, at {', '.join(odd[:3])}. Save the model again.")
    return {name: unpack(packed[name], shape) for name, shape in shapes.items()}


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and bool(shape) and all(type(size) is int and size >= 0 for size in shape)


def _fits(packed: Tensor, shape: Sequence[int]) -> bool:
    """Whether these are the bits of a mask of this shape."""
    rows = packed.ndim == 2 and packed.shape[0] == shape[0]
    return packed.dtype == torch.uint8 and rows and packed.numel() == packed_bytes(shape)


def saved_bytes(model: nn.Module) -> int:
    """About what `save` will write: the weights as they are, a mask of a bit a weight, a tokenizer and reports."""
    weights = [*model.parameters(), *model.buffers()]
    return sum(weight.nbytes + weight.numel() // 8 for weight in weights) + OTHERS


def check_free(
    folder: Path, overwrite: bool, what: str = "model", signs: Sequence[str] = ("config.json", "*model*")
) -> None:
    """Refuse what is no folder, what would be lost unasked, and what is not such a thing by the files all have."""
    error = ModelError if what == "model" else DataError
    if not folder.exists():
        return
    if not folder.is_dir():
        raise error(f"{folder} is a file; a {what} is saved as a folder.")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise error(f"{folder} is not empty. Name another folder, or say overwrite=True (--overwrite).")
    if not all(any(path.is_file() for path in folder.glob(sign)) for sign in signs):  # a home folder, say, or a run's
        raise error(f"{folder} holds something other than a {what} and is not overwritten. Name another folder.")


def _check_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, mask in masks.items():
        if name not in shapes:
            raise StateError(f"There is a mask for {name!r}, which is no parameter of {type(model).__name__}.")
        if mask.dtype != torch.bool or mask.shape != shapes[name]:
            raise StateError(
                f"The mask of {name!r} is {mask.dtype} {list(mask.shape)}; it must be torch.bool {list(shapes[name])}."
            )
