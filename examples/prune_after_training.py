"""Prune a trained network from a few batches: five methods at the same sparsity.

`recommended` is five rounds of `variance` with reconstruction after each.
"""

import copy

import torch
from torch import nn

import secateur as sc

METHODS = {
    "magnitude": {"score": "magnitude"},
    "wanda": {"score": "wanda"},
    "variance": {},
    "sparsegpt": {"method": "sparsegpt"},
    "recommended": {"rounds": 5, "reconstruct": "every"},
}


def make_data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    centres = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 10, (count,), generator=generator)
    return centres[targets] + 1.5 * torch.randn(count, 32, generator=generator), targets


def trained() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(400):
        inputs, targets = make_data(128, seed=1 + step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    inputs, targets = make_data(5000, seed=10**6)
    return (model(inputs).argmax(1) == targets).float().mean().item()


if __name__ == "__main__":
    dense = trained()
    batches = [make_data(64, seed=10**5 + number) for number in range(16)]
    print(f"{'dense':>12}: {accuracy(dense):.1%}")
    for name, settings in METHODS.items():
        model = copy.deepcopy(dense)
        report = sc.prune(model, batches, sparsity=0.8, **settings)
        print(f"{name:>12}: {accuracy(model):.1%} at {report.sparsity:.2%}")
