"""The GPU's part of `secateur bench select`: calls in a row, with the least time the bytes need beside them."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from secateur.bench import forms
from secateur.bench.forms import SPARSITY, Form, Layers
from secateur.bench.measuring import (
    WARM_UP,
    bandwidth,
    device_of,
    floor_ms,
    milliseconds,
    samples,
    scratch_mib,
    times,
)
from secateur.lab import record
from secateur.report import text_table

OURS, PACKED = "secateur, bool masks", "secateur, packed masks"
GPU_FORMS: dict[str, Form] = {
    OURS: forms.secateur,
    PACKED: forms.secateur_packed,
    "single pass, 1 % sample": forms.single_pass,
    "2 % sample": forms.sampled,
    "topk": forms.topk,
    "kthvalue": forms.kthvalue,
}
SLOW_CALLS = 3  # of kthvalue, which takes seconds


def measure_gpu(layers: Layers, device: torch.device, speed: float, calls: int, rounds: int) -> dict[str, Any]:
    """Samples of every form at one size."""
    milliseconds: dict[str, list[float]] = {name: [] for name in GPU_FORMS}
    # Ours is told once which tensors there are; the others read them off the same list.
    calls_of: dict[str, Callable[[], list[Tensor]]] = {name: partial(form, layers) for name, form in GPU_FORMS.items()}
    calls_of |= {OURS: forms.ours(layers), PACKED: forms.ours(layers, packed=True)}
    for _ in range(rounds):
        for name in GPU_FORMS:
            slow = name == "kthvalue"
            count, warm_up = (min(calls, SLOW_CALLS), 1) if slow else (calls, WARM_UP)
            milliseconds[name] += samples(calls_of[name], device, count, warm_up)
    expected = forms.sorted_masks(layers)
    agrees = {name: forms.equal(GPU_FORMS[name](layers), expected, layers) for name in (OURS, PACKED)}
    del expected
    weights = forms.weights_of(layers)
    read = sum(weight.nbytes + moment.nbytes for weight, moment in layers)
    return {
        "weights": weights,
        "right": all(agrees.values()),
        "agrees": agrees,
        "milliseconds": milliseconds,
        "floor_ms": {name: floor_ms(read + weights / (8 if name == PACKED else 1), speed) for name in GPU_FORMS},
        "pruned": {name: forms.pruned(form(layers), layers) for name, form in GPU_FORMS.items()},
        "scratch_mib": {name: scratch_mib(partial(form, layers), device) for name, form in GPU_FORMS.items()},
    }


def gpu_table(size: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows for one size; ratios only if both of our masks were right."""
    sizes = f"{size['weights'] / 1e6:.2f} M weights"
    header = (sizes, "ms", "to ours", "floor ms", "to floor", "scratch MiB", "pruned, off by")
    ours = statistics.median(size["milliseconds"][OURS])
    rows = []
    for name, taken in size["milliseconds"].items():
        median, floor = statistics.median(taken), size["floor_ms"][name]
        ratios = times(median / ours, size["right"]), times(median / floor, size["right"])
        off = size["pruned"][name] - round(SPARSITY * size["weights"])
        scratch = f"{size['scratch_mib'][name]:.0f}"
        rows.append((name, f"{median:.2f}", ratios[0], f"{floor:.2f}", ratios[1], scratch, f"{off:+,}" if off else "0"))
    return header, rows


FORMS: dict[str, Form] = {
    "secateur": forms.secateur,
    "single pass, 1 % sample": forms.single_pass,
    "2 % sample": forms.sampled,
    "kthvalue": forms.kthvalue,
    "global_unstructured": forms.global_unstructured,
}
SLOW = ("kthvalue", "global_unstructured")  # seconds a call: one a round is enough
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dims": [1024, 2048], "layers": 12, "calls": 5, "rounds": 4},
    "cuda": {"dims": [4096], "layers": 24, "calls": 30, "rounds": 1},
}


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device = device_of(options)
    dims, layers, calls, rounds = (getattr(options, name) or value for name, value in DEFAULTS[device.type].items())
    data: dict[str, Any] = {"seed": 0, "sparsity": SPARSITY, "dtype": options.dtype, "sizes": []}
    speed = bandwidth(device) if device.type == "cuda" else 0.0
    for dim in dims:
        made = forms.make([(dim, dim)] * layers, device, getattr(torch, options.dtype))
        if device.type == "cuda":
            size = measure_gpu(made, device, speed, calls, rounds)
        else:
            size = measure(made, calls, rounds)
        data["sizes"].append({"dim": dim, "layers": layers, **size})
        print(text_table(*(gpu_table if device.type == "cuda" else table)(size)), end="\n\n")
    if speed:
        data["bandwidth"] = speed
    print(record.save("select", data, options, device))
    return 0


def give_pages_back() -> None:
    """Ask glibc for what `free` left in its hands; elsewhere there is nothing to ask."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def measure(layers: forms.Layers, calls: int, rounds: int) -> dict[str, Any]:
    """Samples of every form at one size, on the CPU."""
    cpu = torch.device("cpu")
    in_a_row: dict[str, list[float]] = {name: [] for name in FORMS}
    now_and_then: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(rounds):
        for name, form in FORMS.items():
            if name not in SLOW:
                form(layers)
                in_a_row[name] += [milliseconds(partial(form, layers), cpu) for _ in range(calls)]
            for _ in range(1 if name in SLOW else calls):
                give_pages_back()
                now_and_then[name].append(milliseconds(partial(form, layers), cpu))
    return {
        "weights": forms.weights_of(layers),
        "right": forms.equal(FORMS["secateur"](layers), forms.sorted_masks(layers), layers),
        "in_a_row": in_a_row,
        "now_and_then": now_and_then,
        "pruned": {name: forms.pruned(form(layers), layers) for name, form in FORMS.items()},
        "scratch_mib": {name: scratch_mib(partial(form, layers), cpu) for name, form in FORMS.items()},
    }


def table(size: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows for one size; ratios only if the masks were right."""
    sizes = f"{size['weights'] / 1e6:.2f} M weights"
    header = (sizes, "ms now and then", "to ours", "ms in a row", "to ours", "scratch MiB", "pruned, off by")
    wanted = round(SPARSITY * size["weights"])
    rows = []
    for name in size["pruned"]:
        cells = [name]
        for kind in ("now_and_then", "in_a_row"):
            if not size[kind][name]:
                cells += ["-", "-"]
                continue
            median, ours = (statistics.median(size[kind][which]) for which in (name, "secateur"))
            cells += [f"{median:.0f}", times(median / ours, size["right"])]
        off = size["pruned"][name] - wanted
        rows.append((*cells, f"{size['scratch_mib'][name]:.0f}", f"{off:+,}" if off else "0"))
    return header, rows
