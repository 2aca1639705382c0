"""Hugging Face models in folders: load them, and save them with their masks and reports.

transformers is imported when a function needs it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import DataError, ModelError, library
from secateur.files import appearing
from secateur.integrations import smollm2
from secateur.integrations.evaluation import TOKENS, one_line
from secateur.model.mask_files import EXTRA, check_masks, save_masks
from secateur.oneshot.batches import is_out_of_memory, usable_device

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
        raise ModelError(f"{name} cannot be loaded{where}: {one_line(error)}") from error
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
    library("safetensors", "Saving masks", EXTRA)  # fail before anything is written
    folder = Path(folder).absolute()
    check_free(folder, overwrite)
    check_masks(getattr(model, "_orig_mod", model), masks)
    with appearing(folder) as partial:
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        save_masks(partial, masks)
        for name, text in report_texts.items():
            if Path(name).name != name or (partial / name).exists():
                raise ModelError(f"A report cannot be saved as {name!r}: that is a path, or a file of the model's own.")
            (partial / name).write_text(text, encoding="utf-8")
    return folder


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
