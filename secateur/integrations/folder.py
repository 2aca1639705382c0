"""Hugging Face models in folders and on the hub: load with a tokenizer, save with masks and reports, push.

How a folder is written and read is the business of `secateur.inference.saving`. Whether the hub can be reached is asked
first, because its libraries would try again for half a minute before they say so. transformers and huggingface_hub are
imported when a function needs them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from secateur.errors import HF_EXTRA, ModelError, library, nearest, one_line
from secateur.inference import saving
from secateur.inference.saving import check_free
from secateur.integrations import smollm2
from secateur.integrations.evaluation import TOKENS
from secateur.oneshot.batches import usable_device

__all__ = ["check_free", "check_model", "load", "offline_if_unreachable", "push_to_hub", "save", "saved_bytes"]

BUILT_IN = "smollm2"
OTHER_BYTES = 16 << 20  # allowed for tokenizer, configs and reports
PATIENCE = 5.0  # seconds to wait for the hub's answer


def load(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    packed: bool | None = None,
) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer, from a folder, from the hub, or "smollm2".

    The dtype is that of the stored weights by default. `device` is any torch device. Packed folders give packed layers
    unless `packed` is False.
    """
    target = None if device is None else usable_device(device)
    if os.fspath(name) == BUILT_IN:
        model, tokenizer = smollm2.load()
        model = model if dtype is None else model.to(dtype)
    else:
        check_model(name)
        model = saving.load(name, dtype=dtype, packed=packed)
        tokenizer = _tokenizer(os.fspath(name), model)
    model = model if target is None else model.to(target)
    return model.eval(), tokenizer


def check_model(name: str | os.PathLike[str]) -> None:
    """Refuse a name that is no folder, is not in the hub's cache, and cannot be looked up because the hub cannot be
    reached."""
    text = os.fspath(name)
    if text == BUILT_IN or Path(text).exists() or text.count("/") > 1 or text.startswith((".", "~", "/")):
        return
    library("transformers", f"Loading {text}", HF_EXTRA)
    hub = library("huggingface_hub", f"Loading {text}", HF_EXTRA)
    try:
        if isinstance(hub.try_to_load_from_cache(text, "config.json"), str):
            return
    except hub.errors.HFValidationError as error:
        raise ModelError(f"{text} is neither a folder nor a name on the Hugging Face hub: {error}") from error
    if (why := unreachable()) is not None:
        raise ModelError(
            f"There is no folder {text}, no model of that name in the cache of the Hugging Face hub, and"
            f" {why}.{nearest(text, [BUILT_IN])} Check the name, or the connection."
        )


def unreachable() -> str | None:
    """Why the hub cannot be reached; None if it can, if the user asked for offline mode, and if there is a proxy, which
    is not checked."""
    constants = library("huggingface_hub.constants", "The Hugging Face hub", HF_EXTRA)
    if getproxies() or constants.HF_HUB_OFFLINE:
        return None
    where = urlsplit(constants.ENDPOINT)
    try:
        port = where.port or (80 if where.scheme == "http" else 443)
        socket.create_connection((where.hostname or "", port), PATIENCE).close()
    except OSError as error:
        return f"{where.hostname} cannot be reached ({error})"
    return None


@contextmanager
def offline_if_unreachable() -> Iterator[str | None]:
    """Yields why the hub is unreachable, or None. If it is, its libraries are in offline mode inside: they look in
    their caches and give up at once."""
    constants = library("huggingface_hub.constants", "The Hugging Face hub", HF_EXTRA)
    why, before = unreachable(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or why is not None
    try:
        yield why
    finally:
        constants.HF_HUB_OFFLINE = before


def _tokenizer(name: str, model: Any) -> Any:
    """The model's tokenizer; None for a model that reads images or audio and has none."""
    transformers = library("transformers", f"Loading {name}", HF_EXTRA)
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # damaged files raise almost any type; tokenizers raises plain Exception
        missing = isinstance(error, OSError | ValueError | TypeError | KeyError)  # as transformers does without files
        if missing and getattr(model, "main_input_name", TOKENS) != TOKENS:
            return None
        raise saving.not_loaded(name, error, "The tokenizer of ") from error


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
    only when it is complete. The weights are dense, as every program reads them."""
    return saving.write_folder(model, folder, tokenizer=tokenizer, masks=masks, texts=report_texts, overwrite=overwrite)


def saved_bytes(model: nn.Module) -> int:
    """An estimate of the bytes that `save` writes: weights, masks of one bit per weight, tokenizer and reports."""
    weights = [*model.parameters(), *model.buffers()]
    return sum(weight.nbytes + weight.numel() // 8 for weight in weights) + OTHER_BYTES


def push_to_hub(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    message: str = "Upload a model made sparse with Secateur",
) -> str:
    """Upload a saved folder to the Hugging Face hub with huggingface_hub, all files in one commit; returns its address.

    The repository is made if there is none. `token` is that of `hf auth login` by default.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"There is no folder {folder}. Save the model first: sc.save(model, {str(folder)!r}).")
    hub = library("huggingface_hub", "Uploading a model", HF_EXTRA)
    api = hub.HfApi(token=token)
    # Without a network, huggingface_hub raises errors of the HTTP library it uses, which depends on its version.
    failures = [kind for kind in hub.errors.HfHubHTTPError.__mro__ if kind.__name__.endswith("HTTPError")]
    try:
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message)
    except (*failures, hub.errors.HFValidationError, OSError) as error:
        raise ModelError(f"{folder} was not uploaded to {repo_id}: {one_line(error)}") from error
    return str(getattr(done, "repo_url", None) or made)
