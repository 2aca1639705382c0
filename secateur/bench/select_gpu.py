"""The GPU's part of `secateur bench select`: calls in a row, with the least time the bytes need beside them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from secateur.bench import forms
from secateur.bench.forms import SPARSITY, Form, Layers
from secateur.bench.measuring import WARM_UP, floor_ms, samples, scratch_mib, times

OURS, PACKED = "secateur, bool masks", "secateur, packed masks"
FORMS: dict[str, Form] = {
    OURS: forms.secateur,
    PACKED: forms.secateur_packed,
    "single pass, 1 % sample": forms.single_pass,
    "2 % sample": forms.sampled,
    "topk": forms.topk,
    "kthvalue": forms.kthvalue,
}
SLOW_CALLS = 3  # of kthvalue, which takes seconds


def measure(layers: Layers, device: torch.device, speed: float, calls: int, rounds: int) -> dict[str, Any]:
    """Samples of every form at one size."""
    milliseconds: dict[str, list[float]] = {name: [] for name in FORMS}
    # Ours is told once which tensors there are; the others read them off the same list.
    calls_of: dict[str, Callable[[], list[Tensor]]] = {name: partial(form, layers) for name, form in FORMS.items()}
    calls_of |= {OURS: forms.ours(layers), PACKED: forms.ours(layers, packed=True)}
    for _ in range(rounds):
        for name in FORMS:
            slow = name == "kthvalue"
            count, warm_up = (min(calls, SLOW_CALLS), 1) if slow else (calls, WARM_UP)
            milliseconds[name] += samples(calls_of[name], device, count, warm_up)
    expected = forms.sorted_masks(layers)
    agrees = {name: forms.equal(FORMS[name](layers), expected, layers) for name in (OURS, PACKED)}
    del expected
    weights = forms.weights_of(layers)
    read = sum(weight.nbytes + moment.nbytes for weight, moment in layers)
    return {
        "weights": weights,
        "right": all(agrees.values()),
        "agrees": agrees,
        "milliseconds": milliseconds,
        "floor_ms": {name: floor_ms(read + weights / (8 if name == PACKED else 1), speed) for name in FORMS},
        "pruned": {name: forms.pruned(form(layers), layers) for name, form in FORMS.items()},
        "scratch_mib": {name: scratch_mib(partial(form, layers), device) for name, form in FORMS.items()},
    }


def table(size: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
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
