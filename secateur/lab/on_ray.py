"""Cells of a sweep on a Ray cluster: each with its share of CPUs and GPUs, as many at a time as there is room for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from secateur.errors import SecateurError
from secateur.lab.sweep import run_cell
from secateur.optional import library

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
