"""Measure one AdamW step: torch's fused and foreach steps, and secateur's: dense, masked, and with SPAM clipping.

All forms step the same made-up fp32 weights; masks are random. Times are of ten steps at a time, since in training the
host runs ahead of the device. Ratios are shown only if secateur's steps agree with torch's. The floor is the time to
read and write weights and moments once, and to read gradients and masks, at the measured copy bandwidth. The bar: at
most 0.9 times torch's fused dense step.

Example: secateur bench step --device cpu --dim 256 --layers 2
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur import optim
from secateur.bench.measuring import against, bandwidth, floor_ms, kind, ratio, samples
from secateur.lab import record
from secateur.report import text_table

Weights = list[nn.Parameter]

RATE = 1e-4
DECAY = 0.1
THETA = 5000.0  # SPAM's own bound on g^2 / v

FUSED = "torch fused, dense"
FOREACH = "torch foreach, dense"
DENSE, MASKED, CLIPPED = "secateur, dense", "secateur, masked", "secateur, masked, SPAM clipping"
FORMS = (FUSED, "torch fused, then _foreach_mul_", FOREACH, DENSE, MASKED, CLIPPED)
BAR = 0.9  # times torch's fused dense step

TIMED = 10  # steps between two waits for the device
DEFAULTS = {"cpu": {"dim": 512, "layers": 4, "calls": 10}, "gpu": {"dim": 4096, "layers": 24, "calls": 30}}


@dataclass(frozen=True)
class Setup:
    """What every form steps: layers of dim x dim on a device, a random `sparsity` of them masked."""

    dim: int
    layers: int
    device: torch.device
    sparsity: float = 0.5
    seed: int = 0

    @property
    def weights(self) -> int:
        return self.dim * self.dim * self.layers


def make(setup: Setup) -> tuple[Weights, list[Tensor]]:
    """Weights with gradients, and masks, made on the device."""
    dim, device = setup.dim, setup.device
    generator = torch.Generator(device).manual_seed(setup.seed)

    def normal(scale: float) -> Tensor:
        return torch.empty(dim, dim, device=device).normal_(generator=generator).mul_(scale)

    weights = [nn.Parameter(normal(0.02)) for _ in range(setup.layers)]
    for weight in weights:
        weight.grad = normal(1e-3)
    threshold = statistics.NormalDist().inv_cdf(setup.sparsity)
    return weights, [normal(1.0) > threshold for _ in range(setup.layers)]


def build(name: str, weights: Weights, masks: list[Tensor]) -> Callable[[], Any]:
    """The step of a form, ready to be called."""
    if name.startswith("secateur"):
        return own(name, weights, masks).step
    optimizer = torchs(weights, fused=name != FOREACH)
    return optimizer.step if name in (FUSED, FOREACH) else partial(step_and_mask, optimizer, weights, masks)


def torchs(weights: Weights, fused: bool) -> torch.optim.AdamW:
    """torch's AdamW, fused or foreach."""
    return torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY, fused=fused, foreach=not fused)


def own(name: str, weights: Weights, masks: list[Tensor]) -> torch.optim.Optimizer:
    """secateur's AdamW, set up for the form of this name."""
    spam = optim.Spam(theta=THETA, every=0, warmup=0, quiet=0, clip_unseen=False) if name == CLIPPED else None
    optimizer = optim.AdamW(weights, lr=RATE, weight_decay=DECAY, spam=spam)
    if name != DENSE:
        optimizer.set_masks(dict(zip(weights, masks, strict=True)))
    return optimizer


def masked_by(optimizer: torch.optim.Optimizer, weights: Weights) -> list[Tensor]:
    """Everything that a mask zeroes: weights, first moments, second moments."""
    moments = [optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq") for weight in weights]
    return [*(weight.detach() for weight in weights), *moments]


def step_and_mask(optimizer: torch.optim.Optimizer, weights: Weights, masks: list[Tensor]) -> None:
    """Masking after the step: one more read and write of the weights and both moments."""
    optimizer.step()
    torch._foreach_mul_(masked_by(optimizer, weights), masks * 3)


STEPS = 3
# Ours and torch's round at different places. After STEPS steps a weight may differ by ULPS units in the last place and
# RATE_SHARE of a learning rate: 1 - beta1 has six or seven digits in fp32, and updates inherit that error.
ULPS, RATE_SHARE = 2 * STEPS, 1e-5 * STEPS


def agreement(setup: Setup) -> dict[str, dict[str, Any]]:
    """Whether our steps agree with torch's after STEPS steps from the same start with the same gradients.

    Dense: torch's fused step (foreach on CPUs), within the tolerance. Masked: exactly zero where masked and exactly our
    dense step elsewhere, moments included. Clipped: torch's step on gradients clipped beforehand, then masked.
    """
    device = setup.device
    plain, plain_clipped = "torch", "torch, clipped"
    copies = {name: make(setup)[0] for name in (plain, plain_clipped, DENSE, MASKED, CLIPPED)}
    masks = make(setup)[1]
    theirs = {name: torchs(copies[name], fused=device.type == "cuda") for name in (plain, plain_clipped)}
    ours = {name: own(name, copies[name], masks) for name in (DENSE, MASKED, CLIPPED)}
    generator = torch.Generator(device).manual_seed(setup.seed + 1)
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
    """SPAM's rule in plain torch: |g| <= sqrt(theta v), once there is a v."""
    for weight in weights:
        second = optimizer.state[weight].get("exp_avg_sq")
        if second is not None and weight.grad is not None:
            limit = torch.where(second > 0, (THETA * second).sqrt(), torch.inf)
            weight.grad = weight.grad.clamp(-limit, limit)


@torch.no_grad()
def distance(ours: Weights, theirs: Weights) -> dict[str, Any]:
    """The largest difference of weights as a share of the learning rate, and whether all are within the tolerance."""
    right, most = True, 0.0
    for a, b in zip(ours, theirs, strict=True):
        off = (a - b).abs()
        allowed = ULPS * torch.finfo(b.dtype).eps * b.abs() + RATE_SHARE * RATE
        right = right and bool((off <= allowed).all())
        most = max(most, float(off.max()) / RATE)
    return {"right": right, "largest_share_of_rate": most, "allowed": {"ulps": ULPS, "share_of_rate": RATE_SHARE}}


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device: torch.device = options.device
    dim, layers, calls = (getattr(options, name) or value for name, value in DEFAULTS[kind(device)].items())
    setup = Setup(dim, layers, device, options.sparsity, options.seed)
    speed = bandwidth(device)
    data: dict[str, Any] = {
        "seed": options.seed,
        "sparsity": options.sparsity,
        "dim": dim,
        "layers": layers,
        "weights": setup.weights,
        "bandwidth": speed,
        "agreement": agreement(setup),
        "milliseconds": measure(setup, calls, options.rounds),
    }
    data["floor_ms"] = {name: floor_ms(bytes_moved(name, data["weights"]), speed) for name in FORMS}
    data["right"] = all(found["right"] for found in data["agreement"].values())
    print(text_table(*table(data)), end="\n\n")
    for what, found in data["agreement"].items():
        print(f"{what}: {'yes' if found['right'] else 'NO'}")
    print(record.save("step", data, options, device))
    return 0


def measure(setup: Setup, calls: int, rounds: int) -> dict[str, list[float]]:
    """Samples of every form. Each is built again in its turn, so that only one optimizer's state is allocated."""
    weights, masks = make(setup)
    taken: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(rounds):
        for name in FORMS:
            step = build(name, weights, masks)
            several = samples(lambda step=step: [step() for _ in range(TIMED)], setup.device, calls)  # type: ignore[misc]
            taken[name] += [round(milliseconds / TIMED, 5) for milliseconds in several]
            gc.collect()  # an optimizer with hooks is part of a reference cycle, which would keep its state alive
    return taken


def bytes_moved(name: str, weights: int) -> float:
    """The bytes a form must move; masks count for the forms that read them inside the step."""
    return weights * (28.125 if name.startswith("secateur, masked") else 28.0)


def table(data: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows; ratios only if ours agreed with torch."""
    title = f"{data['weights'] / 1e6:.2f} M weights"
    header = (title, "ms", "to torch fused", f"bar {BAR}x", "floor ms", "to floor")
    fused = statistics.median(data["milliseconds"][FUSED])
    rows = []
    for name, taken in data["milliseconds"].items():
        median, floor = statistics.median(taken), data["floor_ms"][name]
        to_fused, to_floor = (ratio(median / base, data["right"], "results differ") for base in (fused, floor))
        bar = against(median / fused, BAR, data["right"], "results differ") if name.startswith("secateur") else "-"
        rows.append((name, f"{median:.3f}", to_fused, bar, f"{floor:.3f}", to_floor))
    return header, rows
