"""Forms of a masked AdamW step: torch's own, masked from outside, and ours."""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur import optim
from secateur.bench.measuring import bandwidth, device_of, floor_ms, samples, times
from secateur.lab import record
from secateur.report import text_table

Weights = list[nn.Parameter]

RATE = 1e-4
DECAY = 0.1
THETA = 5000.0  # SPAM's own bound on g^2 / v

FUSED = "torch fused, dense"
FOREACH = "torch foreach, dense"
DENSE, MASKED, CLIPPED = "secateur, dense", "secateur, masked", "secateur, masked, SPAM clipping"
FORMS = (
    FUSED,
    "torch fused, then _foreach_mul_",
    FOREACH,
    DENSE,
    MASKED,
    CLIPPED,
)


def make(dim: int, layers: int, device: torch.device) -> tuple[Weights, list[Tensor]]:
    """Weights with gradients, and masks that keep a random half, from a fixed seed on the device."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(scale: float) -> Tensor:
        return torch.empty(dim, dim, device=device).normal_(generator=generator).mul_(scale)

    weights = [nn.Parameter(normal(0.02)) for _ in range(layers)]
    for weight in weights:
        weight.grad = normal(1e-3)
    return weights, [normal(1.0) > 0 for _ in range(layers)]


def build(name: str, weights: Weights, masks: list[Tensor]) -> Callable[[], Any]:
    """A form's step, ready to be called."""
    if name.startswith("secateur"):
        return own(name, weights, masks).step
    optimizer = torchs(weights, fused=name != FOREACH)
    return optimizer.step if name in (FUSED, FOREACH) else partial(step_and_mask, optimizer, weights, masks)


def torchs(weights: Weights, fused: bool) -> torch.optim.AdamW:
    """torch's own, fused or foreach."""
    return torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY, fused=fused, foreach=not fused)


def own(name: str, weights: Weights, masks: list[Tensor]) -> torch.optim.Optimizer:
    """Ours, set up as the form is called."""
    spam = optim.Spam(theta=THETA, every=0, warmup=0, quiet=0, clip_unseen=False) if name == CLIPPED else None
    optimizer = optim.AdamW(weights, lr=RATE, weight_decay=DECAY, spam=spam)
    if name != DENSE:
        optimizer.set_masks(dict(zip(weights, masks, strict=True)))
    return optimizer


def masked_by(optimizer: torch.optim.Optimizer, weights: Weights) -> list[Tensor]:
    """Everything a mask zeroes: weights, then first moments, then second."""
    moments = [optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq") for weight in weights]
    return [*(weight.detach() for weight in weights), *moments]


def step_and_mask(optimizer: torch.optim.Optimizer, weights: Weights, masks: list[Tensor]) -> None:
    """Masking from outside the step: one more read and write of the weights and both moments."""
    optimizer.step()
    torch._foreach_mul_(masked_by(optimizer, weights), masks * 3)


STEPS = 3
# Ours and torch's round at different places. After so many steps a weight may be off by this many units in its last
# place, and by this share of a learning rate: 1 - beta1 keeps six or seven digits in fp32, and updates inherit that.
ULPS, RATE_SHARE = 2 * STEPS, 1e-5 * STEPS


def agreement(dim: int, layers: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Ours against torch's after some steps from one start, each step with new gradients.

    Dense: torch's fused step (foreach on CPUs), within the tolerance. Masked: exactly zero where masked and exactly our
    dense step elsewhere, moments too. Clipped: torch's step on gradients clipped beforehand, then masked.
    """
    plain, plain_clipped = "torch", "torch, clipped"
    copies = {name: make(dim, layers, device)[0] for name in (plain, plain_clipped, DENSE, MASKED, CLIPPED)}
    masks = make(dim, layers, device)[1]
    theirs = {name: torchs(copies[name], fused=device.type == "cuda") for name in (plain, plain_clipped)}
    ours = {name: own(name, copies[name], masks) for name in (DENSE, MASKED, CLIPPED)}
    generator = torch.Generator(device).manual_seed(1)
    for _ in range(STEPS):
        for peers in zip(*copies.values(), strict=True):
            gradient = torch.empty_like(peers[0]).normal_(generator=generator).mul_(1e-3)
            for weight in peers:
                weight.grad = gradient.clone()
        clip(theirs[plain_clipped], copies[plain_clipped])
        theirs[plain].step()
        step_and_mask(theirs[plain_clipped], copies[plain_clipped], masks)
        for optimizer in ours.values():
            optimizer.step()
    dense, masked = (masked_by(ours[name], copies[name]) for name in (DENSE, MASKED))
    exact = all(torch.equal(m, torch.where(k, d, 0.0)) for m, d, k in zip(masked, dense, masks * 3, strict=True))
    return {
        "dense is as torch's": distance(copies[DENSE], copies[plain]),
        "masked is as dense, zero where masked": {"right": exact},
        "clipped is as torch's on clipped gradients": distance(copies[CLIPPED], copies[plain_clipped]),
    }


@torch.no_grad()
def clip(optimizer: torch.optim.Optimizer, weights: Weights) -> None:
    """SPAM's rule in plain torch: |g| <= sqrt(theta v), where there is a v yet."""
    for weight in weights:
        second = optimizer.state[weight].get("exp_avg_sq")
        if second is not None and weight.grad is not None:
            limit = torch.where(second > 0, (THETA * second).sqrt(), torch.inf)
            weight.grad = weight.grad.clamp(-limit, limit)


@torch.no_grad()
def distance(ours: Weights, theirs: Weights) -> dict[str, Any]:
    """How far apart weights are at most, as a share of the learning rate, and whether that is within the tolerance."""
    right, most = True, 0.0
    for a, b in zip(ours, theirs, strict=True):
        off = (a - b).abs()
        allowed = ULPS * torch.finfo(b.dtype).eps * b.abs() + RATE_SHARE * RATE
        right = right and bool((off <= allowed).all())
        most = max(most, float(off.max()) / RATE)
    return {"right": right, "largest_share_of_rate": most, "allowed": {"ulps": ULPS, "share_of_rate": RATE_SHARE}}


ROW = 10  # steps from one wait for the device to the next: in training the host runs ahead of it
DEFAULTS = {"cpu": {"dim": 512, "layers": 4, "calls": 10}, "cuda": {"dim": 4096, "layers": 24, "calls": 30}}


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
