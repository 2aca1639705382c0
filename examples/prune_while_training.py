"""Prune while training: the same network dense, and at 99 % by two scores.

The data is synthetic: 10 clusters in 32 dimensions with overlapping borders. Ten seconds on a CPU.
"""

import torch
from torch import nn

import secateur as sc

STEPS, SPARSITY = 400, 0.99


def make_data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    centres = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 10, (count,), generator=generator)
    return centres[targets] + 1.5 * torch.randn(count, 32, generator=generator), targets


def train(score: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pruner = None
    if score:
        schedule = sc.cubic(SPARSITY, begin=40, end=320)
        pruner = sc.Pruner(model, optimizer, score=score, sparsity=schedule, every=10, only="*")
    for step in range(STEPS):
        inputs, targets = make_data(128, seed=1 + step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if pruner:
            pruner.step()
        optimizer.zero_grad()
    if pruner:
        report = pruner.report()
        assert report.pruned == round(SPARSITY * report.prunable)  # exact to the weight
    return model


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    inputs, targets = make_data(5000, seed=10**6)
    return (model(inputs).argmax(1) == targets).float().mean().item()


if __name__ == "__main__":
    for score in (None, "magnitude", "variance"):
        print(f"{score or 'dense':>10}: {accuracy(train(score)):.1%} held-out accuracy")
