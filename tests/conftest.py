"""What every test shares: small models, one seed, and a hypothesis profile without a deadline (machines are noisy)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import torch

if not torch.cuda.is_available():
    # Triton asks once, when it is first imported, whether its kernels are interpreted. Only tests/test_kernels.py wants
    # them; all other tests are about plain torch.
    os.environ |= {"TRITON_INTERPRET": "1", "SECATEUR_KERNELS": "off"}

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a hub
signal.signal(signal.SIGINT, signal.default_int_handler)  # `make test &` ignores Ctrl-C, and some tests send it
torch.set_num_threads(1)  # tensors here are small, and threads that wait for each other cost more than they bring

import pytest
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# These files take longest and go first, so that no worker is left with a long one while the others are done.
LONG = (
    "train",
    "kernels",
    "selection",
    "many",
    "trainer_callback",
    "distributed",
    "sweep",
    "api",
    "saving",
    "finetune",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_on() -> Iterator[None]:
    """Fails a test after which one of torch's modes is still active: it would change what later tests compute."""
    yield
    active = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), torch.is_grad_enabled()
    assert active == (0, 0, True), active


class Block(nn.Module):
    """A small network with every kind of tensor that the rules for prunable tensors tell apart."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.lm_head = nn.Linear(width, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(torch.relu(self.up(self.norm(hidden))))
        return self.lm_head(hidden)


@pytest.fixture
def block() -> Block:
    return Block()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, after: Callable[[], None] = lambda: None
) -> None:
    """Steps of next-token-like training on random tokens; `after` runs after each optimizer step."""
    for _ in range(steps):
        tokens = torch.randint(0, 10, (4, 6))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens * 7 % 10).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()
