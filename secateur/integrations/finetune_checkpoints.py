"""The folder of checkpoints of `secateur finetune`: what a run began with, and what it can be continued from."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from secateur.errors import SaveError, StateError
from secateur.files import read_json, write
from secateur.selection.masks import INTEGERS

PLAN, BEFORE, COMPLETE, PRUNED = "plan.json", "before.json", "complete", "pruned"
CHECKPOINT = "checkpoint-"
FULL = ("No space left", "quota exceeded")  # how errors of a full disk read, whatever their type
TORCH_FULL = ("unexpected pos", "file write failed", "iostream error")  # how those of torch.save read
INSTEAD = "remove that folder, or name another --out."  # of continuing what is there


@dataclass
class Before:
    """The model before: its figure on the held-out windows, what it wrote, and checksums of what the run was given."""

    figure: float
    prompts: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    contents: dict[str, str] = field(default_factory=dict)  # by name; earlier versions kept none


def last_complete(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    found = [path for path in folder.glob(f"{CHECKPOINT}*") if (path / COMPLETE).is_file()]
    return max(found, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The number of the step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(CHECKPOINT))


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a run whose model is saved."""
    if (folder / PLAN).is_file():
        shutil.rmtree(folder, ignore_errors=True)


def has_work(folder: Path) -> bool:
    """Whether there is something to continue from."""
    return last_complete(folder) is not None or (folder / PRUNED).is_dir()


def claim_plan(plan: Mapping[str, Any], folder: Path, main: bool) -> Path | None:
    """The checkpoint to continue from. Refuses a folder in which another plan has made progress."""
    mine = json.loads(json.dumps(plan))
    begun = mine
    if (folder / PLAN).exists():
        begun = read_json(folder / PLAN, dict, StateError, f"Remove {folder}, and start again.")
    odd = sorted(name for name in mine.keys() | begun.keys() if begun.get(name) != mine.get(name))
    if odd and has_work(folder):
        changed = ", ".join(f"{name} {begun.get(name)} (now {mine.get(name)})" for name in odd)
        raise StateError(
            f"{folder} holds a run that began with other settings: {changed}. Finish it with the command that began"
            f" it, {INSTEAD}"
        )
    if main:
        if odd:
            remove_checkpoints(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / PLAN, json.dumps(mine, indent=2) + "\n")
    return last_complete(folder)


@contextmanager
def saying_if_full(folder: Path) -> Iterator[None]:
    """Turns errors that libraries raise when the disk of this folder is full, some without a word of it, into one that
    says so."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        words = FULL + TORCH_FULL if type(error) is RuntimeError else FULL
        if not any(word in str(error) for word in words):
            raise
        last = last_complete(folder)
        then = f"it continues from step {step_of(last)}" if last else "it begins anew"
        raise SaveError(
            f"{folder} could not be written: its disk is full ({shutil.disk_usage(folder).free / 1e6:,.1f} MB left)."
            f" Free some space, and run the same command again: {then}."
        ) from error


def read_before(folder: Path, given: Mapping[str, str]) -> Before | None:
    """What a run that began with the same contents found; None if there is none. Refuses one that made progress with
    other contents."""
    if not (folder / BEFORE).exists():
        return None
    found = Before(**read_json(folder / BEFORE, dict, StateError, f"Remove {folder / BEFORE}, and run it again."))
    changed = [f"the {name}" for name, value in found.contents.items() if given.get(name) != value]
    if not changed:
        return found
    if has_work(folder):
        raise StateError(
            f"{folder} holds a run that began with other contents under the same names: {', '.join(changed)}. Put back"
            f" what it began with, {INSTEAD}"
        )
    return None


def checksum_of_text(windows: Tensor) -> str:
    """A checksum of tokens and their order."""
    return hashlib.sha256(windows.numpy().tobytes()).hexdigest()


@torch.no_grad()
def checksum_of_weights(model: torch.nn.Module) -> str:
    """A checksum that is equal on all devices and reads the weights once, where they are: of names, shapes, and the sum
    of each tensor's bits as integers. It misses values that have only changed places within a tensor."""
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        total = int(weight.view(INTEGERS[weight.element_size()]).sum(dtype=torch.int64))
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)} {total};".encode())
    return found.hexdigest()
