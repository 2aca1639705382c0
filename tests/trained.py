"""Small trained models for the tests of what is done after training."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


@lru_cache
def _classifier() -> tuple[nn.Sequential, Batches]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4)
    )
    inputs = torch.randn(480, 16)
    targets = (inputs @ torch.randn(16, 4) + torch.sin(3 * inputs[:, :4])).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    model.zero_grad()
    return model, list(zip(inputs.split(40), targets.split(40), strict=True))


def classifier() -> tuple[nn.Sequential, Batches]:
    """A trained classifier of its own, and its data in batches."""
    model, batches = _classifier()
    return copy.deepcopy(model), batches


def loss_of(model: nn.Module, batches: Batches) -> float:
    with torch.no_grad():
        return float(torch.stack([nn.functional.cross_entropy(model(x), y) for x, y in batches]).mean())


class Block(nn.Module):
    """A residual block that returns a tuple and is called with more than its state, as transformers' are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, scale: Tensor, *, shift: Tensor) -> tuple[Tensor, None]:
        return hidden + scale * self.down(torch.tanh(self.up(hidden) + shift)), None


class Tower(nn.Module):
    """Token ids through three such blocks to logits."""

    def __init__(self, words: int = 17, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, torch.tensor(0.5 + number), shift=hidden.new_zeros(1))[0]
        return self.lm_head(hidden)
