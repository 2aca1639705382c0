"""One mask update from a million weights to 6.98 billion, in bf16: does the time stay with the bytes that must move?

Weights are the first so many of the Mistral-7B shape (32 layers of q, k, v, o, gate, up and down), the last tensor cut
short by rows; second moments are bf16 too, the score is bitter7 at 50 %, masks are packed. The floor is the bytes
(weights and moments read once, masks written) over the measured copy bandwidth. Every size is checked: the count must
be exact, and the masks those of a stable sort, or where memory does not allow one those of the selection in plain
torch. Otherwise no ratio is printed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.bench import forms
from secateur.bench.measuring import bandwidth, device_of, floor_ms, samples, scratch_mib, times
from secateur.errors import SecateurError
from secateur.lab import record
from secateur.report import text_table
from secateur.selection.exact import prune_exactly

LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
MISTRAL_7B = LAYER * 32
SIZES = (10**6, 10**7, 10**8, 402_653_184, 10**9, 2_500_000_000, sum(rows * width for rows, width in MISTRAL_7B))
UP_TO = {"cpu": 10**7, "cuda": SIZES[-1]}
SORTED_UP_TO = 1 << 30  # weights a stable sort is made of; it takes about 40 bytes each
SORT_BYTES = 40


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device = device_of(options)
    limit = options.up_to or UP_TO[device.type]
    if limit < SIZES[0]:
        raise SecateurError(f"--up-to {limit} leaves nothing: the smallest size is {SIZES[0]:,} weights.")
    speed = bandwidth(device)
    sizes = [measure(size, device, speed, options.calls) for size in SIZES if size <= limit]
    print(text_table(*table(sizes)), end="\n\n")
    data = {"seed": 0, "sparsity": forms.SPARSITY, "dtype": "bfloat16", "bandwidth": speed, "sizes": sizes}
    print(record.save("scale", data, options, device))
    return 0


def shapes_of(weights: int) -> Iterator[tuple[int, int]]:
    """The first so many weights of the Mistral-7B shape, in whole rows."""
    for rows, width in MISTRAL_7B:
        taken = min(rows, weights // width)
        if taken:
            yield taken, width
        weights -= taken * width
        if taken < rows:
            return


def measure(wanted: int, device: torch.device, speed: float, calls: int) -> dict[str, Any]:
    """Times, memory and correctness at one size."""
    layers = forms.make(list(shapes_of(wanted)), device, torch.bfloat16)
    update = forms.ours(layers, packed=True)
    taken = samples(update, device, calls)
    scratch = scratch_mib(update, device)
    masks = update()
    weights = forms.weights_of(layers)
    moved = sum(w.nbytes + v.nbytes for w, v in layers) + weights / 8
    counted = forms.pruned(masks, layers)
    how, expected = truth(layers, device)
    return {
        "weights": weights,
        "tensors": len(layers),
        "milliseconds": taken,
        "bytes_moved": moved,
        "floor_ms": floor_ms(moved, speed),
        "scratch_mib": scratch,
        "pruned": counted,
        "checked_by": how,
        "right": counted == round(forms.SPARSITY * weights) and forms.equal(masks, expected, layers),
    }


def truth(layers: forms.Layers, device: torch.device) -> tuple[str, Sequence[Tensor]]:
    """The masks as they must be, and how they were found."""
    weights = forms.weights_of(layers)
    room = None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # blocks kept from a smaller size would count as taken
        room = torch.cuda.mem_get_info(device)[0]
    if weights <= SORTED_UP_TO and (room is None or room > SORT_BYTES * weights):
        return "stable sort", forms.sorted_masks(layers)
    count = round(forms.SPARSITY * weights)
    return "selection in plain torch", prune_exactly(forms.pieces_of(layers), count)[1]


def table(sizes: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows; ratios only where the masks were right."""
    header = ("weights", "ms", "GB moved", "floor ms", "to floor", "scratch MiB", "pruned", "equal to")
    rows = []
    for size in sizes:
        median = statistics.median(size["milliseconds"])
        cells = [f"{size['weights']:,}", f"{median:.3f}", f"{size['bytes_moved'] / 1e9:.3f}", f"{size['floor_ms']:.3f}"]
        ratio = times(median / size["floor_ms"], size["right"])
        found = size["checked_by"] if size["right"] else "differs"
        rows.append((*cells, ratio, f"{size['scratch_mib']:.1f}", f"{size['pruned']:,}", found))
    return header, rows
