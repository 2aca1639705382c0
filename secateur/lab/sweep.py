"""`secateur sweep`: a grid of runs that differ only in named settings, trained here or on Ray."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from secateur.errors import SecateurError, library, nearest
from secateur.files import check_folder, check_room
from secateur.lab.checkpoint import RunFolder, check_place
from secateur.lab.config import Experiment
from secateur.lab.data import load
from secateur.lab.run import run
from secateur.lab.runs import CONFIG, METRICS, PRUNING, SUMMARY, check_fair, read_run, shown
from secateur.lab.trainer import Execution, Trainer
from secateur.settings import from_mapping, read_toml

TABLES = ("base", "axes")
DENSE = "dense"
NONE = "none"  # TOML has no null
NOT_PRUNED: dict[str, Any] = {"score": None, "sparsity": 0.0, "pattern": None, "regrow": None}
# On Ray, cells must be on storage that all nodes share: if a node is lost, another continues its cell.
RETRIES = 2


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its experiment and the name of its folder."""

    name: str
    experiment: Experiment


def cells_of(path: Path) -> tuple[list[str], list[Cell]]:
    """The axes of a grid, without the seed, and its cells. A dense cell is not repeated for every sparsity."""
    base, axes = _read(path)
    cells: dict[str, Cell] = {}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        named = dict(chosen)
        if chosen.get("score") == DENSE:  # pruning settings have no effect: take the first of each, and name none
            chosen |= {axis: axes[axis][0] for axis in axes if axis in PRUNING} | NOT_PRUNED
            named = {axis: value for axis, value in named.items() if axis not in PRUNING}
        name = "-".join(f"{key}={shown(value)}" for key, value in named.items()).replace("/", "_").replace(" ", "")
        cell = Cell(name, from_mapping(Experiment, {**base, **chosen}, str(path)))
        if cells.setdefault(name, cell) != cell:
            raise SecateurError(f"{path}: two runs would have the folder {name}. Change one of the values.")
    differ = [axis for axis in axes if axis != "seed"]
    if DENSE in axes.get("score", []):
        differ += [key for key in NOT_PRUNED if key not in differ and (key in base or key == "sparsity")]
    check_fair([asdict(cell.experiment) for cell in cells.values()], differ)
    return differ, list(cells.values())


def _read(path: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The settings that all cells share, and the axes with their values."""
    found = read_toml(path)
    for table in found:
        if table not in TABLES:
            raise SecateurError(f"{path} has a table [{table}].{nearest(table, TABLES)} Use [base] and [axes].")
    base, axes = dict(found.get("base", {})), dict(found.get("axes", {}))
    if not axes:
        raise SecateurError(f"{path} has no [axes], so there is one run only: use `secateur train`.")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise SecateurError(f"{path}: axis {name} must be a list of values, such as seed = [0, 1, 2].")
        if name in base:
            raise SecateurError(f"{path}: {name} is in [base] and in [axes]. Remove one of them.")
    axes = {name: [None if value == NONE else value for value in values] for name, values in axes.items()}
    if "recipe" in base:
        base = {**read_toml(path.parent / base.pop("recipe")), **base}
    return base, axes


def run_cell(
    config: Mapping[str, Any],
    folder: str,
    cpu: bool,
    checkpoint_every: int,
    numbers_only: bool,
    read: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Train one cell, or continue it, and return its summary; `read` loads the dataset by name."""
    check_place(Path(folder))
    experiment = from_mapping(Experiment, config, folder)
    data = read(experiment.data) if read else None
    trainer = Trainer(experiment, Execution(cpu=cpu, checkpoint_every=checkpoint_every), data)
    place = RunFolder(Path(folder), trainer.experiment, trainer.fingerprint)
    if place.finished:
        done = read_run(place.path)
        return {**done.summary, **asdict(done.final)}  # whose numbers are numbers: JSON has null for NaN
    check_room(place.path, max(0, trainer.room - place.bytes))
    found = run(trainer, place)
    if numbers_only:
        place.forget_weights()
    return found


def one_after_another(cells: Sequence[Cell], work: Callable[[Cell], dict[str, Any]]) -> None:
    """Run the cells here and print the result of each."""
    for number, cell in enumerate(cells, 1):
        summary = work(cell)
        _print_result(number, len(cells), cell.name, f"{_result(summary)}, {summary['seconds']:.0f} s")


def _result(summary: Mapping[str, Any]) -> str:
    return f"{summary['quality_name']} {summary['quality']:.4f}, {summary['sparsity']:.2%} sparsity"


def _print_result(number: int, count: int, name: str, text: str) -> None:
    print(f"[{number}/{count}] {name}: {text}", file=sys.stderr, flush=True)


def _check_ours(out: Path) -> None:
    """Refuse a folder with other things than runs in it."""
    inside = list(out.iterdir()) if out.is_dir() else []
    runs = (any((one / name).exists() for name in (CONFIG, METRICS, SUMMARY)) for one in inside)
    if inside and not any(runs) and not any(one.is_dir() and not any(one.iterdir()) for one in inside):
        raise SecateurError(f"{out} exists and holds no runs. Name another folder with --out.")


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    cpu: bool,
    checkpoint_every: int,
    numbers_only: bool,
    resources: tuple[float, float] | None = None,
) -> None:
    """Run the cells in folders below `out`, one after another here, or on Ray with these CPUs and GPUs per cell."""
    check_folder(out, replaced=False)
    _check_ours(out)
    print(f"secateur: {len(cells)} runs, in {out}", file=sys.stderr)

    def arguments(cell: Cell) -> tuple[dict[str, Any], str, bool, int, bool]:
        return asdict(cell.experiment), str(out / cell.name), cpu, checkpoint_every, numbers_only

    if resources is not None:
        on_ray([(cell.name, arguments(cell)) for cell in cells], *resources)
    else:
        read = lru_cache(maxsize=1)(load)  # most grids have one dataset
        one_after_another(cells, lambda cell: run_cell(*arguments(cell), read))


def on_ray(cells: Sequence[tuple[str, tuple[Any, ...]]], cpus: float, gpus: float) -> None:
    """Run every cell; those that fail are named at the end, and the others continue."""
    ray = library("ray", "--engine ray", '"secateur[ray]"')
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES)(run_cell)
    waiting = {task.remote(*arguments): name for name, arguments in cells}
    failed: list[str] = []
    while waiting:
        (done,), _ = ray.wait(list(waiting), num_returns=1)
        name = waiting.pop(done)
        try:
            text = _result(ray.get(done))
        except ray.exceptions.RayError as error:
            failed.append(name)
            text = f"failed: {str(error).strip().splitlines()[-1]}"
        _print_result(len(cells) - len(waiting), len(cells), name, text)
    if failed:
        raise SecateurError(
            f"{len(failed)} of {len(cells)} runs failed: {', '.join(failed[:3])}. Run the same command to continue."
        )
