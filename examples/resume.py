"""Save a run in the middle of its schedule, load it into new objects, and continue: the weights agree to the bit."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import secateur as sc


def build() -> tuple[nn.Module, torch.optim.Optimizer, sc.Pruner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pruner = sc.Pruner(model, optimizer, sparsity=sc.cubic(0.8, begin=10, end=90), every=10)
    return model, optimizer, pruner


def train(model: nn.Module, optimizer: torch.optim.Optimizer, pruner: sc.Pruner, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        nn.functional.mse_loss(model(inputs), inputs).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    whole = build()
    train(*whole, range(100))

    first = build()
    train(*first, range(45))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save([part.state_dict() for part in first], path)
        print(f"saved at step 45 with {first[2].sparsity:.1%} pruned: {path.stat().st_size:,} bytes")
        second = build()
        for part, state in zip(second, torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)
    train(*second, range(45, 100))

    for mine, theirs in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    print(f"resumed to step 100 with {second[2].sparsity:.1%} pruned: equal to the uninterrupted run, to the bit")
