"""A run's checkpoints: tensors as safetensors, everything else as JSON. Nothing is pickled.

`state.json` has the progress of the run and the names of its files. Each process writes its own random state. The first
process writes weights and optimizer state; with a sharded model every process writes its shards. A run continues with
as many processes as it began with, so each process reads the shards it wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import LAB_EXTRA, SaveError, StateError, library
from secateur.files import read_json, write
from secateur.model.distributed import like, local, unwrap, whole
from secateur.model.prunable import plain_name
from secateur.model.state import compact
from secateur.oneshot.batches import is_out_of_memory
from secateur.pruner import Pruner

FORMAT = 1
STATE = "state.json"
CHECKPOINT, BEST = FOLDERS = ("checkpoint", "best")  # hold tensors
PICKLES = (".bin", ".ckpt", ".distcp", ".pickle", ".pkl", ".pt", ".pth")
KINDS = {"step": int, "seconds": float, "best": float, "processes": int, "noted": int, "gradients": list}
KINDS |= {"scale": float, "growth": int}
LATER = {"scale": 0.0, "growth": 0}  # values for checkpoints from before these existed


class Progress:
    """How far a run is; saved in its checkpoints."""

    def __init__(self) -> None:
        self.step, self.seconds, self.best, self.processes = 0, 0.0, math.inf, 1
        self.noted = 0  # lines of metrics.jsonl written so far
        self.gradients: list[float] = []  # of one weight, by step
        self.scale, self.growth = 0.0, 0  # state of the GradScaler in fp16


class Checkpoint:
    """A checkpoint folder, as one process writes and reads it."""

    def __init__(self, folder: Path, rank: int, sharded: bool) -> None:
        self.folder, self.rank = folder, rank
        self._owner = rank if sharded else 0  # rank of the process whose weights this one reads
        self._common: dict[str, Any] = {}

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, pruner: Pruner | None, state: Progress) -> None:
        """Write this process's files. Call `finish` on the first process once all have saved."""
        extras, tensors = _optimizer_state(optimizer)
        if self._owner == self.rank:
            self._write("model", _weights(model))
            self._write("optimizer", tensors)
        self._write("random", _random_state(next(model.parameters()).device), self.rank)
        gathered = {} if pruner is None else {name: whole(one) for name, one in pruner.state_dict().items()}
        if self.rank == 0:
            if pruner is not None:
                self._write("pruner", gathered, 0)
            self._common = {"format": FORMAT, **vars(state), "optimizer": extras}

    def finish(self) -> None:
        """Write `state.json`, which lists the files of all processes, last."""
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        write(self.folder / STATE, json.dumps({**self._common, "files": files}) + "\n")

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, pruner: Pruner | None, state: Progress) -> None:
        """Restore what was saved. The error for a missing, damaged or foreign file names it."""
        found = check_checkpoint(self.folder)
        if found["processes"] != state.processes:
            raise StateError(
                f"{self.folder} was written by {found['processes']} processes, and this run has {state.processes}."
                f" Continue it with {found['processes']}."
            )
        weights, moments, random = self._read("model"), self._read("optimizer"), self._read("random", self.rank)
        masks = {} if pruner is None else self._read("pruner", 0)
        with self._named("model"):
            _restore_weights(model, weights)
        with self._named("optimizer"):
            _restore_optimizer(optimizer, found.get("optimizer"), moments)
        if pruner is not None:
            with self._named("pruner", 0):
                pruner.load_state_dict(masks)
        with self._named("random", self.rank):
            _restore_random(random)
        vars(state).update({name: found[name] for name in KINDS})

    def _path(self, name: str, rank: int | None = None) -> Path:
        return self.folder / f"{name}-{self._owner if rank is None else rank}.safetensors"

    def _write(self, name: str, tensors: Mapping[str, Tensor], rank: int | None = None) -> None:
        files = library("safetensors.torch", "Saving checkpoints", LAB_EXTRA)
        plain = compact({key: local(tensor.detach()).cpu().contiguous() for key, tensor in tensors.items()})
        try:
            files.save_file(plain, self._path(name, rank))
        except (OSError, library("safetensors", "Saving checkpoints", LAB_EXTRA).SafetensorError) as error:
            raise SaveError(f"{self._path(name, rank)} cannot be written ({error}).") from error

    def _read(self, name: str, rank: int | None = None) -> dict[str, Tensor]:
        files = library("safetensors.torch", "Reading checkpoints", LAB_EXTRA)
        try:
            found: dict[str, Tensor] = files.load_file(self._path(name, rank))
            return found
        except (OSError, library("safetensors", "Reading checkpoints", LAB_EXTRA).SafetensorError) as error:
            raise damaged(self._path(name, rank), str(error)) from error

    @contextmanager
    def _named(self, name: str, rank: int | None = None) -> Iterator[None]:
        """Turn errors of restoring a file's content into one that names the file."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise damaged(self._path(name, rank), str(error)) from error


def damaged(path: Path, why: str) -> StateError:
    """The error for a file or folder of a run's weights or checkpoint that cannot be used."""
    run = next((part.parent for part in (path, *path.parents) if part.name in FOLDERS), path.parent)
    return StateError(
        f"{path} is damaged or of another run ({' '.join(why.split())}). Restore a copy of it, or delete {run} to"
        " start again."
    )


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """The content of `state.json`, after checking that every file can be opened and none is a pickle."""
    if not folder.is_dir():
        raise damaged(folder, "it is not a folder")
    for path in sorted(folder.rglob("*")):
        if path.suffix in PICKLES:
            raise StateError(
                f"{path} is a pickle, which can run code, and is not read. A checkpoint holds {STATE} and .safetensors"
                f" files; earlier versions wrote pickles. Delete {folder} to start again, or finish with the version"
                " that wrote it."
            )
    found: dict[str, Any] = read_json(folder / STATE, dict, StateError, f"Delete {folder} to start again.")
    if found.get("format") != FORMAT:
        raise damaged(folder / STATE, f"its format is {found.get('format')!r}, not {FORMAT}")
    found = LATER | found
    for name, kind in KINDS.items():
        value = found.get(name)
        whole_number = type(value) is int and value >= 0
        if not (whole_number if kind is int else type(value) in (int, float) if kind is float else type(value) is list):
            raise damaged(folder / STATE, f"its {name} is {str(value)[:40]!r}")
    if not all(type(value) in (int, float) for value in found["gradients"]):
        raise damaged(folder / STATE, "its gradients are not all numbers")
    files = found.get("files")
    if not isinstance(files, list) or not all(isinstance(name, str) and Path(name).name == name for name in files):
        raise damaged(folder / STATE, "it has no list of file names")
    for name in files:
        check_tensors(folder / name)
    return found


def check_tensors(path: Path) -> None:
    """Raise if a safetensors file is missing, truncated or not one; reads only its header."""
    library("safetensors", "Reading weights", LAB_EXTRA)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise damaged(path, str(error)) from error


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; tied ones only under their first name."""
    found, seen = {}, set()
    for name, tensor in unwrap(model).state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[plain_name(name)] = tensor
    return found


@torch.no_grad()
def _restore_weights(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    live = {name: local(tensor.detach()) for name, tensor in _weights(model).items()}
    if live.keys() != saved.keys():
        raise KeyError(
            f"it lacks {sorted(live.keys() - saved.keys())[:3]}, has {sorted(saved.keys() - live.keys())[:3]}"
        )
    for name, tensor in live.items():
        if (tensor.dtype, tensor.shape) != (saved[name].dtype, saved[name].shape):
            raise ValueError(f"{name} is {saved[name].dtype} {list(saved[name].shape)}")
    for name, tensor in live.items():
        tensor.copy_(saved[name])


def _optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The optimizer's state as plain values and tensors, by `state.INDEX.NAME` and `group.NUMBER.NAME`, without the
    options of the groups, which come from the run's settings."""
    state = optimizer.state_dict()
    made = {*optimizer.defaults, "params", "param_names"}
    found = {f"state.{index}.{name}": value for index, one in state["state"].items() for name, value in one.items()}
    for number, group in enumerate(state["param_groups"]):
        found |= {f"group.{number}.{name}": value for name, value in group.items() if name not in made}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in found.items() if name not in tensors}
    return {"plain": plain, "tensors": sorted(tensors)}, tensors


def _restore_optimizer(optimizer: torch.optim.Optimizer, extras: Any, saved: Mapping[str, Tensor]) -> None:
    plain, names = dict(extras["plain"]), extras["tensors"]
    if sorted(saved) != names or not all(value is None or isinstance(value, int | float) for value in plain.values()):
        raise ValueError(f"its {len(saved)} tensors are not the {len(names)} that {STATE} lists")
    state = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state["state"] = {}
    for key, value in {**plain, **saved}.items():
        where, number, name = key.split(".", 2)
        if where == "group":
            state["param_groups"][int(number)][name] = value
            continue
        parameter = parameters[int(number)]
        if isinstance(value, Tensor) and value.ndim:
            if value.shape != local(parameter).shape:
                raise ValueError(f"{key} has the shape {list(value.shape)}")
            value = like(value.to(local(parameter).device), parameter)
        state["state"].setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(state)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _restore_random(saved: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(saved["cpu"])
    if "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], "cuda")
