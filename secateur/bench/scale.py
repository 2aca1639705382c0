"""Measure one mask update from a million weights to 6.98 billion in bf16: does the time follow the bytes moved?

The weights are the first N of the Mistral-7B shape (32 layers of q, k, v, o, gate, up and down), the last tensor cut
short by rows. Second moments are bf16 too, and masks are packed. The floor is the time to read weights and moments and
write the masks once at the measured copy bandwidth. The bars: at most 1.6 times the floor, at most 64 MiB of scratch
memory. Every size is checked: the count must be exact and the masks those of a stable sort or, where memory does not
allow one, of the selection in plain torch. Otherwise no ratio is shown.

Example: secateur bench scale --device cpu --up-to 1000000
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.bench import select
from secateur.bench.measuring import against, bandwidth, floor_ms, kind, ratio, samples, scratch_mib
from secateur.bench.select import ADAMWPRUNE, Case
from secateur.errors import SecateurError
from secateur.lab import record
from secateur.report import text_table
from secateur.selection.exact import prune_exactly

LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
MISTRAL_7B = LAYER * 32
SIZES = (10**6, 10**7, 10**8, 402_653_184, 10**9, 2_500_000_000, sum(rows * width for rows, width in MISTRAL_7B))
UP_TO = {"cpu": 10**7, "gpu": SIZES[-1]}
SORTED_UP_TO = 1 << 30  # largest size that is checked by a stable sort
SORT_BYTES = 40  # that the sort takes per weight
BAR_FLOOR, BAR_MIB = 1.6, 64


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device: torch.device = options.device
    limit = options.up_to or UP_TO[kind(device)]
    if limit < SIZES[0]:
        raise SecateurError(f"--up-to {limit} leaves nothing: the smallest size is {SIZES[0]:,} weights.")
    scores = [select.check_score(name) for name in options.scores]
    speed = bandwidth(device)
    data: dict[str, Any] = {
        "seed": options.seed, "sparsity": options.sparsity, "dtype": "bfloat16", "scores": options.scores,
        "bandwidth": speed, "sizes": [],
    }  # fmt: skip
    for size in [size for size in SIZES if size <= limit]:
        layers = select.make(list(shapes_of(size)), device, torch.bfloat16, options.seed)
        for score in scores:
            data["sizes"].append(measure(Case(layers, score, options.sparsity), device, speed, options.calls))
            path = record.save("scale", data, options, device)
        del layers
    print(text_table(*table(data["sizes"])), end="\n\n")
    print(path)
    return 0


def shapes_of(weights: int) -> Iterator[tuple[int, int]]:
    """The shapes of the first `weights` of Mistral-7B, in whole rows."""
    for rows, width in MISTRAL_7B:
        taken = min(rows, weights // width)
        if taken:
            yield taken, width
        weights -= taken * width
        if taken < rows:
            return


def measure(case: Case, device: torch.device, speed: float, calls: int) -> dict[str, Any]:
    """Times, memory and correctness at one size."""
    update = select.ours(case, packed=True)
    taken = samples(update, device, calls)
    scratch = scratch_mib(update, device)
    masks = update()
    moved = sum(w.nbytes + v.nbytes for w, v in case.layers) + case.weights / 8
    counted = select.pruned(masks, case)
    how, expected = right_masks(case, device)
    return {
        "score": str(case.score),
        "weights": case.weights,
        "tensors": len(case.layers),
        "milliseconds": taken,
        "bytes_moved": moved,
        "floor_ms": floor_ms(moved, speed),
        "scratch_mib": scratch,
        "pruned": counted,
        "checked_by": how,
        "right": counted == case.count and select.equal(masks, expected, case),
    }


def right_masks(case: Case, device: torch.device) -> tuple[str, Sequence[Tensor]]:
    """The right masks, and how they were found."""
    free = None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # blocks cached from a smaller size would count as used
        free = torch.cuda.mem_get_info(device)[0]
    if case.weights <= SORTED_UP_TO and (free is None or free > SORT_BYTES * case.weights):
        return "stable sort", select.sorted_masks(case)
    return "selection in plain torch", prune_exactly(select.scored_tensors(case), case.count)[1]


def table(sizes: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows; ratios only where the masks were right. Records without a score are of bitter7."""
    columns = ("ms", "GB moved", "floor ms", "to floor", f"bar {BAR_FLOOR}x", "scratch MiB", f"bar {BAR_MIB} MiB")
    header = ("weights", "score", *columns, "pruned", "equal to")
    rows = []
    for size in sizes:
        median, right = statistics.median(size["milliseconds"]), size["right"]
        to_floor = median / size["floor_ms"]
        rows.append(
            (
                f"{size['weights']:,}",
                size.get("score", ADAMWPRUNE),
                f"{median:.3f}",
                f"{size['bytes_moved'] / 1e9:.3f}",
                f"{size['floor_ms']:.3f}",
                ratio(to_floor, right),
                against(to_floor, BAR_FLOOR, right),
                f"{size['scratch_mib']:.1f}",
                against(size["scratch_mib"], BAR_MIB, right),
                f"{size['pruned']:,}",
                size["checked_by"] if right else "differs",
            )
        )
    return header, rows
