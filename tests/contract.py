"""Small networks of every kind trained on handwritten digits, and their accuracy after each method of pruning.

`python -m tests.contract` prints the table of docs/after-training.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import secateur as sc

TRAINED, CALIBRATION, EPOCHS, BATCH = 1200, 256, 15, 40
METHODS: dict[str, Callable[[nn.Module, Any, float], Any]] = {
    "magnitude": lambda m, b, s: sc.prune(m, b, sparsity=s, score="magnitude"),
    "variance": lambda m, b, s: sc.prune(m, b, sparsity=s),
    "fisher": lambda m, b, s: sc.prune(m, b, sparsity=s, score="fisher"),
    "gradient": lambda m, b, s: sc.prune(m, b, sparsity=s, score="gradient"),
    "wanda": lambda m, b, s: sc.prune(m, b, sparsity=s, score="wanda"),
    "sparsegpt": lambda m, b, s: sc.prune(m, b, sparsity=s, method="sparsegpt"),
    "rounds": lambda m, b, s: sc.prune(m, b, sparsity=s, rounds=5),
    "repaired": lambda m, b, s: sc.prune(m, b, sparsity=s, rounds=5, reconstruct=True),
    "recommended": lambda m, b, s: sc.prune(m, b, sparsity=s, rounds=5, reconstruct="every"),
    "probe (exact)": lambda m, b, s: sc.probe(m, b, sparsity=s, exact=True),
    "probe (exact, variance)": lambda m, b, s: sc.probe(m, b, sparsity=s, exact=True, score="variance"),
}


class Attention(nn.Module):
    """A pre-norm transformer block around a feed-forward part."""

    def __init__(self, width: int, feed: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed = nn.MultiheadAttention(width, 4, batch_first=True), feed

    def forward(self, x: Tensor) -> Tensor:
        near = self.norm1(x)
        x = x + self.attention(near, near, near, need_weights=False)[0]
        return x + self.feed(self.norm2(x))


class Experts(nn.Module):
    """Each token goes to the expert its router likes best; the last expert is never taken."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) * (2 * width) ** -0.5)
        self.num_experts = experts

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(flat)[:, :-1].softmax(1).max(1)
        out = torch.zeros_like(flat)
        for expert in range(self.num_experts):
            rows = (chosen == expert).nonzero().flatten()
            if len(rows):
                hidden = functional.relu(functional.linear(flat[rows], self.up[expert]))
                made = functional.linear(hidden, self.down[expert]) * weight[rows, None]
                out = out.index_add(0, rows, made)
        return out.view_as(x)


class Rows(nn.Module):
    """Reads the eight rows of a picture as tokens."""

    def __init__(self, feed: Callable[[int], nn.Module], width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, width), nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.ModuleList(Attention(width, feed(width)) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images[:, 0]) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x))))))


def _feed(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _pool() -> list[nn.Module]:
    return [nn.ReLU(), nn.MaxPool2d(2)]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    ),
    "convolutional": lambda: nn.Sequential(
        nn.ZeroPad2d(4), nn.Conv2d(1, 6, 5), *_pool(), nn.Conv2d(6, 16, 3), *_pool(), nn.Flatten(),
        nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    ),
    "BatchNorm": lambda: nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Residual(16), nn.MaxPool2d(2),
        Residual(16), nn.Flatten(), nn.Linear(256, 10),
    ),
    "MoE": lambda: Rows(Experts),
    "transformer": lambda: Rows(_feed),
}  # fmt: skip


@lru_cache
def digits() -> tuple[Tensor, Tensor]:
    """Pictures `[count, 1, 8, 8]` in [0, 1] and their classes, in an order of their own."""
    datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")
    found = datasets.load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(1))
    return torch.tensor(found.images, dtype=torch.float32)[order, None] / 16, torch.tensor(found.target)[order]


@lru_cache
def _trained(name: str) -> nn.Module:
    images, classes = digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NETWORKS[name]()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(EPOCHS):
        for start in range(0, TRAINED, BATCH):
            part = slice(start, start + BATCH)
            optimizer.zero_grad()
            functional.cross_entropy(model(images[part]), classes[part]).backward()
            optimizer.step()
    model.zero_grad()
    return model.eval()


def trained(name: str) -> nn.Module:
    """A network of this kind, trained on the first pictures; a copy of its own."""
    return copy.deepcopy(_trained(name))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Pictures of the training set that calibrate."""
    images, classes = digits()
    return list(zip(images[:CALIBRATION].split(32), classes[:CALIBRATION].split(32), strict=True))


def right(model: nn.Module) -> Tensor:
    """Which of the held-out pictures the model gets right."""
    images, classes = digits()
    with torch.no_grad():
        return model(images[TRAINED:]).argmax(1) == classes[TRAINED:]


@lru_cache
def result(name: str, method: str, sparsity: float) -> tuple[Tensor, Any]:
    """Held-out pictures a pruned network gets right, and the report."""
    model = trained(name)
    report = METHODS[method](model, batches(), sparsity)
    return right(model), report


def below(one: Tensor, other: Tensor) -> float:
    """By how many standard errors `one` is right less often than `other`, on the same pictures (paired)."""
    apart = float((one != other).sum())
    return float(other.sum() - one.sum()) / apart**0.5 if apart else 0.0


def table(sparsities: tuple[float, ...] = (0.5, 0.8)) -> str:
    """Held-out accuracy of every method on every network, as markdown."""
    head = ["method", *(f"{name}, {sparsity:.0%}" for name in NETWORKS for sparsity in sparsities)]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    rows.append(["dense", *(f"{float(right(trained(n)).float().mean()):.3f}" for n in NETWORKS for _ in sparsities)])
    for method in METHODS:
        found = [result(name, method, sparsity)[0] for name in NETWORKS for sparsity in sparsities]
        rows.append([method, *(f"{float(one.float().mean()):.3f}" for one in found)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
