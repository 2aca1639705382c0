"""One step of AdamW over many square layers: torch's own, masked after the fact, and ours with the mask inside.

The mask removes a random half. Every form is warmed up, then timed call by call from an idle device to an idle device;
the forms take turns for some rounds. The floor is what the bytes need: 28 a weight in fp32 (weight, gradient and both
moments read, all but the gradient written), an eighth of one more with a packed mask. No ratio is printed unless, after
some steps from one start, ours agrees with torch's: step_check.py says how closely.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from secateur.bench.measuring import add_device, bandwidth, device_of, floor_ms, positive, samples, times
from secateur.bench.step_check import agreement
from secateur.bench.step_forms import FORMS, FUSED, build, make
from secateur.lab import record
from secateur.report import text_table

ROW = 10  # steps from one wait for the device to the next: in training the host runs ahead of it
DEFAULTS = {"cpu": {"dim": 512, "layers": 4, "calls": 10}, "cuda": {"dim": 4096, "layers": 24, "calls": 30}}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--dim", type=positive, help="layers of DIM x DIM (CPU: 512, GPU: 4096)")
    parser.add_argument("--layers", type=positive, help="how many of them (CPU: 4, GPU: 24)")
    parser.add_argument("--calls", type=positive, help="timed steps of each form in a round (CPU: 10, GPU: 30)")
    parser.add_argument("--rounds", type=positive, default=2, help="rounds in which the forms take turns (2)")
    record.add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device = device_of(options)
    dim, layers, calls = (getattr(options, name) or value for name, value in DEFAULTS[device.type].items())
    speed = bandwidth(device)
    data: dict[str, Any] = {
        "seed": 0,
        "dim": dim,
        "layers": layers,
        "weights": dim * dim * layers,
        "bandwidth": speed,
        "agreement": agreement(dim, layers, device),
        "milliseconds": measure(dim, layers, device, calls, options.rounds),
    }
    data["floor_ms"] = {name: floor_ms(bytes_moved(name, data["weights"]), speed) for name in FORMS}
    data["right"] = all(found["right"] for found in data["agreement"].values())
    print(text_table(*table(data)), end="\n\n")
    for what, found in data["agreement"].items():
        print(f"{what}: {'yes' if found['right'] else 'NO'}")
    print(record.save("step", data, options, device))
    return 0


def measure(dim: int, layers: int, device: torch.device, calls: int, rounds: int) -> dict[str, list[float]]:
    """Samples of every form. Each is built anew in its turn, so that only one optimizer's state is there at a time."""
    weights, masks = make(dim, layers, device)
    taken: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(rounds):
        for name in FORMS:
            step = build(name, weights, masks)
            in_a_row = samples(lambda step=step: [step() for _ in range(ROW)], device, calls)  # type: ignore[misc]
            taken[name] += [round(milliseconds / ROW, 5) for milliseconds in in_a_row]
            gc.collect()  # an optimizer with hooks is part of a cycle, and its state would stay for a while
    return taken


def bytes_moved(name: str, weights: int) -> float:
    """What a form cannot do without: masks count for the forms that take one in the step."""
    return weights * (28.125 if name.startswith("secateur, masked") else 28.0)


def table(data: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows; ratios only if ours agreed with torch."""
    header = (f"{data['weights'] / 1e6:.2f} M weights", "ms", "to torch fused", "floor ms", "to floor")
    fused = statistics.median(data["milliseconds"][FUSED])
    rows = []
    for name, taken in data["milliseconds"].items():
        median, floor = statistics.median(taken), data["floor_ms"][name]
        ratios = median / fused, median / floor
        to_fused, to_floor = (times(ratio, data["right"], "results differ") for ratio in ratios)
        rows.append((name, f"{median:.3f}", to_fused, f"{floor:.3f}", to_floor))
    return header, rows
