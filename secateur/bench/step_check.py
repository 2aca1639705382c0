"""Whether our AdamW does what torch's does: without that, no ratio is printed."""

from __future__ import annotations

from typing import Any

import torch

from secateur.bench.step_forms import (
    CLIPPED,
    DENSE,
    MASKED,
    RATE,
    THETA,
    Weights,
    make,
    masked_by,
    own,
    step_and_mask,
    torchs,
)

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
