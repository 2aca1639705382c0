"""Probe a trained network: prune only candidates whose gradients do not grow, then search for the highest sparsity."""

import copy

import torch
from torch import nn

import secateur as sc


def make_data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    centres = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 10, (count,), generator=generator)
    return centres[targets] + 1.5 * torch.randn(count, 32, generator=generator), targets


def trained() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(300):
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
    batches = [make_data(64, seed=10**5 + number) for number in range(8)]
    print(f"dense: {accuracy(dense):.1%}")

    model = copy.deepcopy(dense)
    report = sc.probe(model, batches, score="wanda", sparsity=0.5, order="reverse", evaluate=accuracy)
    assert report.sparsity <= 0.5  # the veto spares some of the candidates
    print(f"probe: asked 50 %, pruned {report.sparsity:.1%}, accuracy {accuracy(model):.1%}")

    model = copy.deepcopy(dense)
    report = sc.probe_until(model, batches, accuracy, start=0.2, step=0.2, max_drop=0.01)
    print(f"probe_until: pruned {report.sparsity:.1%} within one point of accuracy, {accuracy(model):.1%}")
    for name, value in report.found:
        print(f"  {name}: {value:.3f}")
