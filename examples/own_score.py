"""Register a score of your own and use it by name, with an option.

The argument names say what a score reads: the weight, any tensor the optimizer keeps in its shape, and a few numbers.
"""

import torch
from torch import nn

import secateur as sc


@sc.score
def signal_to_noise(weight, exp_avg, exp_avg_sq, floor=1e-12):
    """|w| |m| / (sqrt v + floor): weights whose gradient points the same way every step are kept."""
    return weight.abs() * exp_avg.abs() / (exp_avg_sq.sqrt() + floor)


if __name__ == "__main__":
    assert "signal_to_noise" in sc.scores()
    torch.manual_seed(0)
    target = nn.Linear(64, 64)
    for name in ("magnitude", "signal_to_noise", "signal_to_noise(floor=1e-6)", "variance"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        pruner = sc.Pruner(model, optimizer, score=name, sparsity=sc.cubic(0.8, begin=20, end=160), every=10)
        for _ in range(200):
            inputs = torch.randn(64, 64)
            loss = nn.functional.mse_loss(model(inputs), target(inputs).detach())
            loss.backward()
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()
        assert pruner.report().pruned == round(0.8 * 2 * 64 * 256)
        print(f"{name:>28}: loss {loss.item():.4f} at {pruner.sparsity:.2%}")
