"""`secateur sweep`: a grid of experiments that differ in named settings and in nothing else."""

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
from secateur.lab.config import Experiment
from secateur.lab.runs import CONFIG, METRICS, SUMMARY, check_fair, shown
from secateur.settings import from_mapping, read_toml

TABLES = ("base", "axes")
DENSE = "dense"
NONE = "none"  # what TOML has no word for
NOT_PRUNED: dict[str, Any] = {"score": None, "sparsity": 0.0, "pattern": None, "regrow": None}
# Settings that say how to prune, but for the score, which is what tells a dense run from others.
PRUNING = ("sparsity", "pattern", "regrow", "schedule", "begin", "end", "every", "scope", "allocation", "drop", "until")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its experiment and the name of its folder."""

    name: str
    experiment: Experiment


def cells_of(path: Path) -> tuple[list[str], list[Cell]]:
    """The axes of a grid but for the seed, and its cells. A dense run has no sparsity: one for each seed is enough."""
    base, axes = _read(path)
    cells: dict[str, Cell] = {}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        told = dict(chosen)
        if chosen.get("score") == DENSE:  # what says how to prune is the first of its values, and not told apart
            chosen |= {axis: axes[axis][0] for axis in axes if axis in PRUNING} | NOT_PRUNED
            told = {axis: value for axis, value in told.items() if axis not in PRUNING}
        name = "-".join(f"{key}={shown(value)}" for key, value in told.items()).replace("/", "_").replace(" ", "")
        cell = Cell(name, from_mapping(Experiment, {**base, **chosen}, str(path)))
        if cells.setdefault(name, cell) != cell:
            raise SecateurError(f"{path}: two runs would be called {name}. Give them names that differ.")
    named = [axis for axis in axes if axis != "seed"]
    if DENSE in axes.get("score", []):
        named += [key for key in NOT_PRUNED if key not in named and (key in base or key == "sparsity")]
    check_fair([asdict(cell.experiment) for cell in cells.values()], named)
    return named, list(cells.values())


def _read(path: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Settings that all cells share, and the lists they are taken from."""
    found = read_toml(path)
    for table in found:
        if table not in TABLES:
            raise SecateurError(f"{path} has a table [{table}].{nearest(table, TABLES)} It takes [base] and [axes].")
    base, axes = dict(found.get("base", {})), dict(found.get("axes", {}))
    if not axes:
        raise SecateurError(f"{path} has no [axes]: nothing differs. Use secateur train for a single run.")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise SecateurError(f"{path}: axis {name} must be a list of values, such as seed = [0, 1, 2].")
        if name in base:
            raise SecateurError(f"{path}: {name} stands in [base] and in [axes]. Leave one out.")
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
    """One cell from its beginning, or from where it stopped, to its summary; `read` has its data."""
    from secateur.lab.checkpoint import RunFolder, check_place
    from secateur.lab.run import run
    from secateur.lab.runs import read_run
    from secateur.lab.trainer import Execution, Trainer

    check_place(Path(folder))
    experiment = from_mapping(Experiment, config, folder)
    data = read(experiment.data) if read else None
    trainer = Trainer(experiment, Execution(cpu=cpu, checkpoint_every=checkpoint_every), data)
    place = RunFolder(Path(folder), trainer.experiment, trainer.fingerprint)
    if place.finished:
        done = read_run(place.path)
        return {**done.summary, **asdict(done.final)}  # with numbers where JSON may have none
    check_room(place.path, max(0, trainer.room - place.bytes))
    found = run(trainer, place)
    if numbers_only:
        place.forget_weights()
    return found


def one_after_another(cells: Sequence[Cell], work: Callable[[Cell], dict[str, Any]]) -> None:
    """Run the cells here, telling how each went."""
    for number, cell in enumerate(cells, 1):
        summary = work(cell)
        said = f"{summary['quality_name']} {summary['quality']:.4f}, {summary['sparsity']:.2%} gone"
        print(f"[{number}/{len(cells)}] {cell.name}: {said}, {summary['seconds']:.0f} s", file=sys.stderr, flush=True)


def _check_ours(out: Path) -> None:
    """Refuse a folder that holds something, but no run."""
    inside = list(out.iterdir()) if out.is_dir() else []
    runs = (any((one / name).exists() for name in (CONFIG, METRICS, SUMMARY)) for one in inside)
    if inside and not any(runs) and not any(one.is_dir() and not any(one.iterdir()) for one in inside):
        raise SecateurError(f"{out} is there already and holds no runs. Name another folder with --out.")


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    cpu: bool,
    checkpoint_every: int,
    numbers_only: bool,
    resources: tuple[float, float] | None = None,
) -> None:
    """Run the cells in folders below `out`: here one after another, or on Ray with these CPUs and GPUs for each."""
    check_folder(out, replaced=False)
    _check_ours(out)
    print(f"secateur: {len(cells)} runs, in {out}", file=sys.stderr)

    def arguments(cell: Cell) -> tuple[dict[str, Any], str, bool, int, bool]:
        return asdict(cell.experiment), str(out / cell.name), cpu, checkpoint_every, numbers_only

    if resources is not None:
        on_ray([(cell.name, arguments(cell)) for cell in cells], *resources)
    else:
        from secateur.lab.data import load

        read = lru_cache(maxsize=1)(load)  # cells mostly share their data
        one_after_another(cells, lambda cell: run_cell(*arguments(cell), read))


# A cell's folder must be on storage that all nodes share, as is usual on clusters: what a node wrote is continued by
# another if the first is lost.
RETRIES = 2


def on_ray(cells: Sequence[tuple[str, tuple[Any, ...]]], cpus: float, gpus: float) -> None:
    """Run every cell once; one that fails is named, and the others go on."""
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
            summary = ray.get(done)
            said = f"{summary['quality_name']} {summary['quality']:.4f}, {summary['sparsity']:.2%} gone"
        except ray.exceptions.RayError as error:
            failed.append(name)
            said = f"failed: {str(error).strip().splitlines()[-1]}"
        print(f"[{len(cells) - len(waiting)}/{len(cells)}] {name}: {said}", file=sys.stderr, flush=True)
    if failed:
        raise SecateurError(
            f"{len(failed)} of {len(cells)} runs failed: {', '.join(failed[:3])}. Start again to go on."
        )
