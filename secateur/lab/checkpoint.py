"""Checkpoints of a run: tensors as safetensors, all else as JSON. Nothing is pickled, so nothing in them can run.

`state.json` says how far the run is and which files belong to it. Each process writes its own random state; weights and
optimizer are the first process's, or, of a model in shards, the shards of each. A run goes on with as many processes as
it was begun with, so a shard is read by the process that wrote it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import SaveError, SecateurError, StateError, library
from secateur.files import check_folder, clear, locked, read_json, write
from secateur.lab.config import Experiment
from secateur.lab.runs import CONFIG, METRICS, SUMMARY, measure_of, read_run
from secateur.model.distributed import like, local, unwrap, whole
from secateur.model.prunable import plain_name
from secateur.pruner import Pruner

FORMAT = 1
STATE = "state.json"
CHECKPOINT, BEST = FOLDERS = ("checkpoint", "best")  # of a run, which hold tensors
EXTRA = '"secateur[lab]"'
PICKLES = (".bin", ".ckpt", ".distcp", ".pickle", ".pkl", ".pt", ".pth")
KINDS = {"step": int, "seconds": float, "best": float, "processes": int, "noted": int, "gradients": list}


class Progress:
    """How far a run is; saved with its checkpoints."""

    def __init__(self) -> None:
        self.step, self.seconds, self.best, self.processes = 0, 0.0, math.inf, 1
        self.noted = 0  # lines of numbers written so far
        self.gradients: list[float] = []  # of one weight, step by step


class Checkpoint:
    """A folder that a run of one process, or this process's part of a run of several, is saved in and read from."""

    def __init__(self, folder: Path, rank: int, sharded: bool) -> None:
        self.folder, self.rank = folder, rank
        self._owner = rank if sharded else 0  # whose weights this process saves and reads
        self._common: dict[str, Any] = {}

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, pruner: Pruner | None, state: Progress) -> None:
        """Write this process's files. The first process writes what is common to all; `finish` comes last."""
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
        """Write the list of all processes' files: the last thing to be written, by the first process."""
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        write(self.folder / STATE, json.dumps({**self._common, "files": files}) + "\n")

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, pruner: Pruner | None, state: Progress) -> None:
        """Put everything back as it was saved, or raise: a file that is missing, damaged or of another run is named."""
        found = check_checkpoint(self.folder)
        if found["processes"] != state.processes:
            raise StateError(f"{self.folder} was written by {found['processes']} processes: go on with as many.")
        weights, moments, draws = self._read("model"), self._read("optimizer"), self._read("random", self.rank)
        masks = {} if pruner is None else self._read("pruner", 0)
        with self._named("model"):
            _restore_weights(model, weights)
        with self._named("optimizer"):
            _restore_optimizer(optimizer, found.get("optimizer"), moments)
        if pruner is not None:
            with self._named("pruner", 0):
                pruner.load_state_dict(masks)
        with self._named("random", self.rank):
            _restore_random(draws)
        vars(state).update({name: found[name] for name in KINDS})

    def _path(self, name: str, rank: int | None = None) -> Path:
        return self.folder / f"{name}-{self._owner if rank is None else rank}.safetensors"

    def _write(self, name: str, tensors: Mapping[str, Tensor], rank: int | None = None) -> None:
        files = library("safetensors.torch", "Saving checkpoints", EXTRA)
        plain = {key: _alone(local(tensor.detach()).cpu().contiguous()) for key, tensor in tensors.items()}
        try:
            files.save_file(plain, self._path(name, rank))
        except (OSError, library("safetensors", "Saving checkpoints", EXTRA).SafetensorError) as error:
            raise SaveError(f"{self._path(name, rank)} cannot be written ({error}).") from error

    def _read(self, name: str, rank: int | None = None) -> dict[str, Tensor]:
        files = library("safetensors.torch", "Reading checkpoints", EXTRA)
        try:
            found: dict[str, Tensor] = files.load_file(self._path(name, rank))
            return found
        except (OSError, library("safetensors", "Reading checkpoints", EXTRA).SafetensorError) as error:
            raise damaged(self._path(name, rank), str(error)) from error

    @contextmanager
    def _named(self, name: str, rank: int | None = None) -> Iterator[None]:
        """An error inside becomes one that names the file."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise damaged(self._path(name, rank), str(error)) from error


def damaged(path: Path, why: str) -> StateError:
    """The error for a file of a run's weights or checkpoint, or for the folder of either, that cannot be used."""
    run = next((part.parent for part in (path, *path.parents) if part.name in FOLDERS), path.parent)
    return StateError(
        f"{path} is damaged or of another run ({' '.join(why.split())}). Put back a copy of it, or delete {run} to"
        " begin again."
    )


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """What `state.json` says, once every file of a checkpoint has been opened. Pickles are refused by name: reading one
    runs whatever is in it."""
    if not folder.is_dir():
        raise damaged(folder, "it is not a folder")
    for path in sorted(folder.rglob("*")):
        if path.suffix in PICKLES:
            raise StateError(
                f"{path} is a pickle, which can run code, and is not read. A checkpoint holds {STATE} and .safetensors"
                f" files; earlier versions wrote pickles. Delete {folder} to begin again, or finish with the version"
                " that wrote it."
            )
    found: dict[str, Any] = read_json(folder / STATE, dict, StateError, f"Delete {folder} to begin again.")
    if found.get("format") != FORMAT:
        raise damaged(folder / STATE, f"its format is {found.get('format')!r}, not {FORMAT}")
    for name, kind in KINDS.items():
        value = found.get(name)
        whole_number = type(value) is int and value >= 0
        if not (whole_number if kind is int else type(value) in (int, float) if kind is float else type(value) is list):
            raise damaged(folder / STATE, f"its {name} is {str(value)[:40]!r}")
    if not all(type(value) in (int, float) for value in found["gradients"]):
        raise damaged(folder / STATE, "its gradients are no numbers")
    files = found.get("files")
    if not isinstance(files, list) or not all(isinstance(name, str) and Path(name).name == name for name in files):
        raise damaged(folder / STATE, "it names no files")
    for name in files:
        check_tensors(folder / name)
    return found


def check_tensors(path: Path) -> None:
    """Refuse a safetensors file that is missing, cut short or no such file; its numbers are not read."""
    library("safetensors", "Reading weights", EXTRA)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise damaged(path, str(error)) from error


def _alone(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is a part of something larger, which would be saved with it."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once: tied ones under the first of their names."""
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
    """What an optimizer remembers, plain values and tensors apart, by `state.INDEX.NAME` and `group.NUMBER.NAME`. What
    groups were made with is left out: the run's settings say it."""
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
        raise ValueError(f"it holds {len(saved)} tensors, and {STATE} names {len(names)} others")
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


WEIGHTS = "model.safetensors"
REPORT, GRADIENT, GPU = "report.json", "gradient.json", "gpu.json"
LOCK = ".lock"
ADVICE = "Put back a copy of it, or name another folder with --out."


def check_place(path: Path) -> None:
    """Refuse a folder that a run cannot have, before its data is read: it cannot be written, holds something else, or
    another process trains there."""
    check_folder(path, replaced=False)
    others = [] if (path / CONFIG).exists() or not path.exists() else [one.name for one in path.iterdir()]
    if any(name != LOCK and not name.startswith(f".{CONFIG}.") for name in others):  # those a killed run may leave
        raise SecateurError(f"{path} is there already and holds no run. Name another folder with --out.")
    first = os.environ.get("RANK", "0") == "0"  # the processes of one run must not meet each other here
    if first and (path / LOCK).exists():
        with locked(path / LOCK, _busy(path)):
            pass


def _busy(path: Path) -> str:
    return f"Another process is training in {path}. Wait for it, or name another folder with --out."


class RunFolder:
    """Where a run writes. A folder that holds another experiment is refused; one with a checkpoint is continued."""

    def __init__(self, path: Path, experiment: Experiment, fingerprint: str) -> None:
        self.path = path
        config = json.loads(json.dumps(asdict(experiment) | {"fingerprint": fingerprint}))  # as the file gives it back
        if (path / CONFIG).exists():
            found = read_json(path / CONFIG, dict, StateError, ADVICE)
            if found != config:
                differing = sorted(key for key in {*found, *config} if found.get(key) != config.get(key))
                raise SecateurError(
                    f"{path} holds a run with other settings ({', '.join(differing)}). Name another folder with --out."
                )
        else:
            check_place(path)
            path.mkdir(parents=True, exist_ok=True)
            write(path / CONFIG, json.dumps(config, indent=1) + "\n")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other process trains here. What a killed one left half done is cleared away first."""
        with locked(self.path / LOCK, _busy(self.path)):
            for name in (CHECKPOINT, BEST, CONFIG, METRICS, SUMMARY, REPORT, GRADIENT, GPU, "report.html"):
                clear(self.path / name)
            for name in (CHECKPOINT, BEST):  # a killed process leaves its lock; nobody else writes here now
                (self.path / f".{name}.lock").unlink(missing_ok=True)
            yield

    @property
    def finished(self) -> bool:
        """Whether there is a summary. If anything of the run is damaged that is an error, and not the end of it."""
        if not (self.path / SUMMARY).exists():
            return False
        run = read_run(self.path)
        measure_of([run])
        for name, kind in (REPORT, dict), (GRADIENT, list), (GPU, list):
            if (self.path / name).exists() or (name == REPORT and run.summary.get("layers")):
                read_json(self.path / name, kind, StateError, ADVICE)
        if (self.path / BEST).exists():
            self.check_best()
        if (self.path / CHECKPOINT).exists():
            check_checkpoint(self.path / CHECKPOINT)
        return True

    def check_best(self) -> None:
        """Refuse to go on beside best weights that are damaged."""
        check_tensors(self.path / BEST / WEIGHTS)

    @property
    def bytes(self) -> int:
        """What the run takes on the disk."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint, if there is one."""
        return self.path / CHECKPOINT if (self.path / CHECKPOINT).exists() else None

    def forget_weights(self) -> None:
        """Keep the numbers of a finished run and none of its weights."""
        for name in (CHECKPOINT, BEST):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def rewind(self, count: int) -> None:
        """Keep the first `count` lines of numbers, which were there when the checkpoint was written. The steps of those
        that follow are taken again; the last may have been cut short."""
        path = self.path / METRICS
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[:count] if path.exists() else []
            found = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError) as error:
            raise StateError(f"{path} is damaged ({error}). {ADVICE}") from error
        whole = [line for line in found if isinstance(line, dict) and type(line.get("step")) is int]
        if len(whole) < count:
            raise StateError(f"{path} is damaged: it has {len(whole)} of the {count} lines it had. {ADVICE}")
        write(path, "".join(line + "\n" for line in lines))

    def note(self, numbers: Mapping[str, Any]) -> None:
        """Add a line of numbers."""
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(numbers) + "\n")
        except OSError as error:
            raise SaveError(f"{self.path / METRICS} cannot be written ({error.strerror}).") from error

    def finish(self, summary: Mapping[str, Any], report: str | None, looks: Mapping[str, Any]) -> None:
        """Write the report, whatever else was looked at, and then the summary: a folder that has one is done."""
        for name, numbers in looks.items():
            if numbers:
                write(self.path / name, json.dumps(numbers) + "\n")
        if report is not None:
            write(self.path / REPORT, report + "\n")
        write(self.path / SUMMARY, json.dumps(summary, indent=1) + "\n")
