"""A run's folder and its checkpoints: tensors as safetensors, everything else as JSON. Nothing is pickled.

`state.json` has the progress of the run and the names of its files. Each process writes its own random state. The first
process writes weights and optimizer state; with a sharded model every process writes its shards. A run continues with
as many processes as it began with, so each process reads the shards it wrote.
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

from secateur.errors import LAB_EXTRA, SaveError, SecateurError, StateError, library
from secateur.files import check_folder, clear, locked, read_json, write
from secateur.lab.config import Experiment
from secateur.lab.runs import CONFIG, METRICS, SUMMARY, measure_of, read_run
from secateur.model.distributed import like, local, unwrap, whole
from secateur.model.held import compact
from secateur.model.prunable import plain_name
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


WEIGHTS = "model.safetensors"
REPORT, GRADIENT, GPU = "report.json", "gradient.json", "gpu.json"
LOCK = ".lock"
ADVICE = "Restore a copy of it, or name another folder with --out."


def check_place(path: Path) -> None:
    """Raise if a run cannot use a folder: it is not writable, holds something else, or another process trains there.

    Call it before reading data, which may take long.
    """
    check_folder(path, replaced=False)
    others = [] if (path / CONFIG).exists() or not path.exists() else [one.name for one in path.iterdir()]
    if any(name != LOCK and not name.startswith(f".{CONFIG}.") for name in others):  # what a killed run may leave
        raise SecateurError(f"{path} exists already and holds no run. Name another folder with --out.")
    first = os.environ.get("RANK", "0") == "0"  # the lock is held by the first process of this run
    if first and (path / LOCK).exists():
        with locked(path / LOCK, _busy(path)):
            pass


def _busy(path: Path) -> str:
    return f"Another process is training in {path}. Wait for it, or name another folder with --out."


class RunFolder:
    """The folder of a run. One that holds another experiment is refused."""

    def __init__(self, path: Path, experiment: Experiment, fingerprint: str) -> None:
        self.path = path
        config = asdict(experiment) | {"fingerprint": fingerprint}
        config = json.loads(json.dumps(config))  # as it reads back: tuples become lists
        if (path / CONFIG).exists():
            found = read_json(path / CONFIG, dict, StateError, ADVICE)
            if "fingerprint" not in found:
                raise SecateurError(f"{path} exists already and holds no run. Name another folder with --out.")
            # A setting that is none may be missing: the version that began the run did not have it.
            differing = sorted(key for key in {*found, *config} if found.get(key) != config.get(key))
            if differing:
                raise SecateurError(
                    f"{path} holds a run with other settings ({', '.join(differing)}). Name another folder with --out."
                )
        else:
            check_place(path)
            path.mkdir(parents=True, exist_ok=True)
            write(path / CONFIG, json.dumps(config, indent=1) + "\n")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other processes, and remove what a killed one left half-written."""
        with locked(self.path / LOCK, _busy(self.path)):
            for name in (CHECKPOINT, BEST, CONFIG, METRICS, SUMMARY, REPORT, GRADIENT, GPU, "report.html"):
                clear(self.path / name)
            for name in (CHECKPOINT, BEST):  # left by a killed process; nobody else writes here now
                (self.path / f".{name}.lock").unlink(missing_ok=True)
            yield

    @property
    def finished(self) -> bool:
        """Whether there is a summary. Raises if any file of the run is damaged."""
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
        """Raise if the best weights are damaged."""
        check_tensors(self.path / BEST / WEIGHTS)

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint, or None."""
        return self.path / CHECKPOINT if (self.path / CHECKPOINT).exists() else None

    def forget_weights(self) -> None:
        """Delete the weights of a finished run, but not its numbers."""
        for name in (CHECKPOINT, BEST):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def rewind(self, count: int) -> None:
        """Keep the first `count` lines of metrics.jsonl, those up to the checkpoint. The steps after it will be taken
        again, and the last line may be truncated."""
        path = self.path / METRICS
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[:count] if path.exists() else []
            found = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError) as error:
            raise StateError(f"{path} is damaged ({error}). {ADVICE}") from error
        whole = [line for line in found if isinstance(line, dict) and type(line.get("step")) is int]
        if len(whole) < count:
            raise StateError(f"{path} is damaged: it has {len(whole)} of {count} lines. {ADVICE}")
        write(path, "".join(line + "\n" for line in lines))

    def note(self, numbers: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(numbers) + "\n")
        except OSError as error:
            raise SaveError(f"{self.path / METRICS} cannot be written ({error.strerror}).") from error

    def finish(self, summary: Mapping[str, Any], report: str | None, extras: Mapping[str, Any]) -> None:
        """Write the report, the non-empty `extras` by file name, and last the summary, which marks a finished run."""
        for name, numbers in extras.items():
            if numbers:
                write(self.path / name, json.dumps(numbers) + "\n")
        if report is not None:
            write(self.path / REPORT, report + "\n")
        write(self.path / SUMMARY, json.dumps(summary, indent=1) + "\n")
