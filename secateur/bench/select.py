"""Measure one mask update: exact selection beside AdamWPrune's forms, topk and torch's global pruning.

Every form prunes the same made-up weights by the same score to the same sparsity; there is one table for each size and
score. Ratios are shown only if the masks of secateur equal those of a stable sort, bool and packed. On a GPU, "floor"
is the time to read the weights and moments and write the masks once at the measured copy bandwidth, and the bar is 1.5
ms at 402,653,184 fp32 weights. On a CPU, "cold" calls start after the allocator has returned its memory.

Example: secateur bench select --device cpu --dims 512 --scores variance
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from secateur.bench import forms
from secateur.bench.forms import Case, Form
from secateur.bench.measuring import (
    WARM_UP,
    against,
    bandwidth,
    floor_ms,
    kind,
    milliseconds,
    ratio,
    samples,
    scratch_mib,
)
from secateur.lab import record
from secateur.report import text_table

OURS, PACKED = "secateur, bool masks", "secateur, packed masks"
EXACT: dict[str, Form] = {OURS: forms.secateur, PACKED: forms.secateur_packed}
SAMPLED: dict[str, Form] = {"single pass, 1 % sample": forms.single_pass, "2 % sample": forms.sampled}
FORMS: dict[str, dict[str, Form]] = {
    "gpu": {**EXACT, **SAMPLED, "topk": forms.topk, "kthvalue": forms.kthvalue},
    "cpu": {**EXACT, **SAMPLED, "kthvalue": forms.kthvalue, "global_unstructured": forms.global_unstructured},
}
SLOW = {"gpu": ("kthvalue",), "cpu": ("kthvalue", "global_unstructured")}  # seconds per call, so only a few are timed
SLOW_CALLS = 3  # on a GPU
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dims": [1024, 2048], "layers": 12, "calls": 5, "rounds": 4},
    "gpu": {"dims": [4096], "layers": 24, "calls": 30, "rounds": 1},
}
BAR_MS, BAR_WEIGHTS = 1.5, 402_653_184  # on a GPU, fp32


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device: torch.device = options.device
    scores = [forms.check_score(name) for name in options.scores]
    dims, layers, calls, rounds = (getattr(options, name) or value for name, value in DEFAULTS[kind(device)].items())
    data: dict[str, Any] = {
        "seed": options.seed, "sparsity": options.sparsity, "dtype": options.dtype, "scores": options.scores,
        "sizes": [],
    }  # fmt: skip
    speed = bandwidth(device) if kind(device) == "gpu" else 0.0
    for dim in dims:
        made = forms.make([(dim, dim)] * layers, device, getattr(torch, options.dtype), options.seed)
        for score in scores:
            case = Case(made, score, options.sparsity)
            measured = measure_gpu(case, device, speed, calls, rounds) if speed else measure_cpu(case, calls, rounds)
            size = {"dim": dim, "layers": layers, "dtype": options.dtype, "score": str(score), **measured}
            data["sizes"].append(size)
            print(text_table(*table(size)), end="\n\n", flush=True)
    if speed:
        data["bandwidth"] = speed
    print(record.save("select", data, options, device))
    return 0


def _calls(case: Case, where: str) -> dict[str, Callable[[], list[Tensor]]]:
    """Every form, ready to be called. Ours prepares its tensors once, as a Pruner does."""
    calls: dict[str, Callable[[], list[Tensor]]] = {name: partial(form, case) for name, form in FORMS[where].items()}
    return calls | {OURS: forms.ours(case), PACKED: forms.ours(case, packed=True)}


def _checked(case: Case, calls: Mapping[str, Callable[[], list[Tensor]]], device: torch.device) -> dict[str, Any]:
    """Whether our masks are right, what every form prunes, and its scratch memory."""
    expected = forms.sorted_masks(case)
    agrees = {name: forms.equal(calls[name](), expected, case) for name in EXACT}
    del expected
    return {
        "weights": case.weights,
        "asked": case.count,
        "right": all(agrees.values()),
        "agrees": agrees,
        "pruned": {name: forms.pruned(call(), case) for name, call in calls.items()},
        "scratch_mib": {name: scratch_mib(call, device) for name, call in calls.items()},
    }


def measure_gpu(case: Case, device: torch.device, speed: float, calls: int, rounds: int) -> dict[str, Any]:
    """Samples of every form at one size, with the floor of the memory bandwidth."""
    taken: dict[str, list[float]] = {name: [] for name in FORMS["gpu"]}
    forms_by_name = _calls(case, "gpu")
    for _ in range(rounds):
        for name, call in forms_by_name.items():
            count, warm_up = (min(calls, SLOW_CALLS), 1) if name in SLOW["gpu"] else (calls, WARM_UP)
            taken[name] += samples(call, device, count, warm_up)
    read = sum(weight.nbytes + moment.nbytes for weight, moment in case.layers)
    floors = {name: floor_ms(read + case.weights / (8 if name == PACKED else 1), speed) for name in taken}
    return {**_checked(case, forms_by_name, device), "milliseconds": taken, "floor_ms": floors}


def measure_cpu(case: Case, calls: int, rounds: int) -> dict[str, Any]:
    """Samples of every form at one size, warm and cold."""
    cpu = torch.device("cpu")
    warm: dict[str, list[float]] = {name: [] for name in FORMS["cpu"]}
    cold: dict[str, list[float]] = {name: [] for name in FORMS["cpu"]}
    forms_by_name = _calls(case, "cpu")
    for _ in range(rounds):
        for name, call in forms_by_name.items():
            slow = name in SLOW["cpu"]
            if not slow:
                warm[name] += samples(call, cpu, calls, warm_up=1)
            for _ in range(1 if slow else calls):
                return_memory()
                cold[name].append(milliseconds(call, cpu))
    return {**_checked(case, forms_by_name, cpu), "in_a_row": warm, "now_and_then": cold}


def return_memory() -> None:
    """Ask glibc to return freed memory to the system; other C libraries have no such call."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # Windows does not take None
        ctypes.CDLL(None).malloc_trim(0)


def table(size: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows for one size and score; ratios only if our masks were right."""
    return gpu_table(size) if "floor_ms" in size else cpu_table(size)


def _title(size: dict[str, Any]) -> str:
    """Records without a score are of bitter7."""
    return f"{size['weights'] / 1e6:.2f} M weights, {size.get('score', forms.ADAMWPRUNE)}"


def _error(size: dict[str, Any], name: str) -> str:
    """How many weights too many or too few a form pruned; records without the count asked for half."""
    off = size["pruned"][name] - size.get("asked", round(0.5 * size["weights"]))
    return f"{off:+,}" if off else "0"


def _bar(size: dict[str, Any], name: str, median: float) -> str:
    stated = size["weights"] == BAR_WEIGHTS and size.get("dtype", "float32") == "float32"
    return against(median, BAR_MS, size["right"]) if stated and name in EXACT else "-"


def gpu_table(size: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of a size measured on a GPU."""
    columns = ("ms", f"bar {BAR_MS} ms", "to ours", "floor ms", "to floor", "scratch MiB", "count error")
    ours = statistics.median(size["milliseconds"][OURS])
    rows = []
    for name, taken in size["milliseconds"].items():
        median, floor = statistics.median(taken), size["floor_ms"][name]
        to_ours, to_floor = ratio(median / ours, size["right"]), ratio(median / floor, size["right"])
        figures = f"{median:.2f}", _bar(size, name, median), to_ours, f"{floor:.2f}", to_floor
        rows.append((name, *figures, f"{size['scratch_mib'][name]:.0f}", _error(size, name)))
    return (_title(size), *columns), rows


def cpu_table(size: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of a size measured on a CPU."""
    columns = ("ms (cold)", "to ours", "ms (warm)", "to ours", "scratch MiB", "count error")
    own = OURS if OURS in size["pruned"] else "secateur"  # as older records name it
    rows = []
    for name in size["pruned"]:
        cells = [name]
        for which in ("now_and_then", "in_a_row"):
            if not size[which][name]:
                cells += ["-", "-"]
                continue
            median, ours = (statistics.median(size[which][one]) for one in (name, own))
            cells += [f"{median:.0f}", ratio(median / ours, size["right"])]
        rows.append((*cells, f"{size['scratch_mib'][name]:.0f}", _error(size, name)))
    return (_title(size), *columns), rows
