"""Shapes of zeros and ways to spread a budget: 2:4 groups, blocks, equal rows, allocations over layers."""

import torch
from torch import nn

import secateur as sc

CHOICES = {
    "one cut for the model": {"sparsity": 0.75},
    "every layer alike": {"sparsity": 0.75, "scope": "layer"},
    "every row alike": {"sparsity": 0.75, "scope": "row"},
    "2:4": {"sparsity": None, "pattern": "2:4"},
    "blocks of 8x8": {"sparsity": 0.75, "pattern": "block:8x8", "scope": "layer"},
    "erk over layers": {"sparsity": 0.75, "allocation": "erk"},
    "lamp over layers": {"sparsity": 0.75, "allocation": "lamp"},
}


def pruned(**settings) -> sc.Pruner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pruner = sc.Pruner(model, optimizer, score="magnitude", every=20, **settings)
    for _ in range(20):
        inputs = torch.randn(64, 32)
        model(inputs).square().mean().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    return pruner


if __name__ == "__main__":
    for name, settings in CHOICES.items():
        pruner = pruned(**settings)
        layers = ", ".join(f"{row.name} {row.sparsity:.1%}" for row in pruner.report().tensors)
        print(f"{name:>22}: {pruner.sparsity:.2%} in all; {layers}")
        masks = pruner.masks.values()
        if settings.get("pattern") == "2:4":
            assert all(bool((mask.view(-1, 4).sum(1) == 2).all()) for mask in masks)
        if settings.get("scope") == "row":
            assert all(len(mask.sum(1).unique()) == 1 for mask in masks)

    scores = {"mine": torch.rand(100, 100), "yours": torch.rand(50, 40)}  # tensors of your own, without a model
    masks = sc.select(scores, 0.9)
    assert sum(int((~mask).sum()) for mask in masks.values()) == round(0.9 * 12_000)
