"""Calibration: gradient statistics over batches, default losses, devices, and a model that is restored afterwards."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import FactError, ModelError
from secateur.model.prunable import find_prunable
from secateur.oneshot import batches as batches_module
from secateur.oneshot.batches import (
    check_ids,
    eval_mode,
    restore_on_error,
    standard_loss,
    take_batches,
    usable_device,
)
from secateur.oneshot.gradients import GradientPass, gather_gradients


class Noisy(nn.Module):
    """Everything that behaves differently in training: dropout as module and function, batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(inputs)).relu())
        return self.last(nn.functional.dropout(hidden, 0.5, self.training))


@pytest.fixture
def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(7, 6), torch.randint(0, 3, (7,))) for _ in range(4)]


def test_statistics_against_a_plain_loop(batches: list[tuple[Tensor, Tensor]]) -> None:
    torch.manual_seed(1)
    model = Noisy().eval()
    prunables, _ = find_prunable(model, only="*")
    found = gather_gradients(model, batches, prunables, {"exp_avg", "exp_avg_sq", "gradient", "gradient_max"})
    for prunable in prunables:
        gradients = []
        for batch in batches:
            (gradient,) = torch.autograd.grad(standard_loss(model, batch), prunable.parameter)
            gradients.append(gradient)
        stacked = torch.stack(gradients)
        mine = found[prunable.name]
        assert torch.allclose(mine["exp_avg"], stacked.mean(0), atol=1e-8)
        assert torch.allclose(mine["exp_avg_sq"], stacked.square().mean(0), atol=1e-10)
        assert torch.allclose(mine["gradient"], stacked.abs().mean(0), atol=1e-8)
        assert torch.equal(mine["gradient_max"], stacked.abs().amax(0))


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(batches: list[tuple[Tensor, Tensor]], fails: bool) -> None:
    model = Noisy().train()
    model.drop.eval()  # a mode of its own
    model.last.bias.requires_grad_(False)
    model.first.weight.grad = kept = torch.ones_like(model.first.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    prunables, _ = find_prunable(model, only="*")

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if fails:
            raise RuntimeError("the user's own")
        assert not model.training
        return standard_loss(model, batch)

    if fails:
        with pytest.raises(RuntimeError, match="the user's own"):
            gather_gradients(model, batches, prunables, {"gradient"}, GradientPass(loss))
    else:
        gather_gradients(model, batches, prunables, {"gradient"}, GradientPass(loss))
    assert [module.training for module in model.modules()] == modes
    assert model.first.weight.grad is kept
    assert model.norm.weight.grad is None
    assert [p.requires_grad for p in model.parameters()] == [True, True, True, True, True, False]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_gradients_are_freed_as_they_come(batches: list[tuple[Tensor, Tensor]]) -> None:
    model = Noisy().eval()
    prunables, _ = find_prunable(model, only="*")
    alive: list[int] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        alive.append(sum(p.grad is not None for p in model.parameters()))
        return standard_loss(model, batch)

    gather_gradients(model, batches, prunables, {"gradient"}, GradientPass(loss))
    assert alive == [0] * len(batches)


def test_a_frozen_beginning_does_no_backward(batches: list[tuple[Tensor, Tensor]]) -> None:
    model = Noisy().eval()
    prunables, _ = find_prunable(model, only="last")
    asked: list[bool] = []
    model.first.register_forward_hook(lambda module, given, output: asked.append(output.requires_grad))
    gather_gradients(model, batches, prunables, {"gradient"})
    assert not any(asked)


def test_a_shuffled_loader_is_read_once() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(20.0), torch.arange(20))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    drawn = take_batches(loader, limit=3)
    assert len(drawn) == 3
    assert len({number for batch in drawn for number in batch[1].tolist()}) == 12  # of one pass, so none comes twice
    assert len(take_batches(torch.zeros(5, 3, dtype=torch.int64))) == 5


def test_hooks_of_callables_without_a_module_survive_an_error() -> None:
    """`__module__` of a callable object may be anything; only hooks of calibration are taken off."""
    from types import SimpleNamespace

    class Hook(SimpleNamespace):
        def __call__(self, *_: object) -> None: ...

    model = nn.Linear(4, 3)
    model.register_forward_hook(Hook(__module__=None))
    with pytest.raises(KeyError), restore_on_error(model):
        raise KeyError
    assert len(model._forward_hooks) == 1


def test_default_losses_and_errors_without_one() -> None:
    model = nn.Linear(4, 3)
    inputs = torch.randn(5, 4)
    with torch.no_grad():
        assert torch.equal(standard_loss(model, (inputs, torch.zeros(5, 3))), model(inputs).square().mean())
    with pytest.raises(FactError, match=r"No loss is known for batches of Tensor.*loss=\.\.\."):
        standard_loss(model, inputs)
    with pytest.raises(FactError, match="no batches"):
        take_batches([])
    with pytest.raises(FactError, match=r"Token ids must be \[rows, positions\], not \[7\]"):
        take_batches(torch.zeros(7, dtype=torch.int64))
    prunables, _ = find_prunable(model, only="*")
    with pytest.raises(FactError, match=r"one number that depends on the weights.*\(5, 3\)"):
        gather_gradients(model, [inputs], prunables, {"gradient"}, GradientPass(lambda model, batch: model(batch)))
    with eval_mode(model):
        assert not any(p.requires_grad for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_outputs_of_all_kinds_have_logits_or_are_named() -> None:
    model, targets = nn.Linear(4, 3), torch.randn(5, 3)
    inputs, returned = torch.randn(5, 4), nn.Identity()
    expected = (model(inputs) - targets).square().mean()

    def loss_of(wrap: Any, batch: Any) -> Tensor:
        returned.forward = lambda inputs: wrap(model(inputs))
        return standard_loss(returned, batch)

    ways: list[Any] = [lambda y: y, lambda y: (y, None), lambda y: {"logits": y}, lambda y: SimpleNamespace(logits=y)]
    assert all(torch.equal(loss_of(way, (inputs, targets)), expected) for way in ways)
    assert torch.equal(loss_of(lambda y: {"loss": y.sum()}, {"inputs": inputs}), model(inputs).sum())
    with pytest.raises(FactError, match=r"returned a dict with 'out', in which no logits are found. Pass loss="):
        loss_of(lambda y: {"out": y}, (inputs, targets))
    with pytest.raises(FactError, match=r"No loss is known for batches of tuple \(Tensor, list\)"):
        loss_of(lambda y: y, (inputs, [1, 2]))


def test_large_logits_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 50, 11, dtype=torch.bfloat16), torch.randint(0, 11, (3, 50))
    targets[0, :7] = -100
    found = []
    for most in (1 << 25, 40):
        monkeypatch.setattr(batches_module, "LOGITS_AT_ONCE", most)
        mine = logits.clone().requires_grad_()
        loss = batches_module.cross_entropy(mine, targets)
        loss.backward()
        found.append((loss.detach(), mine.grad))
    torch.testing.assert_close(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0.01, atol=1e-6)


def test_a_loss_in_bf16() -> None:
    """Matmuls are rounded; weights and gradients stay fp32."""
    torch.manual_seed(0)
    model = nn.Linear(64, 8)
    batch = torch.randn(32, 64), torch.randint(0, 8, (32,))
    prunables, _ = find_prunable(model, only="*")
    exact = gather_gradients(model, [batch], prunables, {"exp_avg"})["weight"]["exp_avg"]
    found = gather_gradients(
        model, [batch], prunables, {"exp_avg"}, GradientPass(batches_module.in_bf16(standard_loss))
    )
    rough = found["weight"]["exp_avg"]
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=0.1, atol=1e-3)


class Reads(nn.Module):
    """A model whose `get_input_embeddings` raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.layer = error, nn.Linear(3, 3)

    def get_input_embeddings(self) -> nn.Module:
        raise self.error


def test_only_a_missing_embedding_is_ignored() -> None:
    ids = [torch.zeros(1, 3, dtype=torch.int64)]
    check_ids(Reads(NotImplementedError("no embedding")), ids)
    for error in (ZeroDivisionError("a bug"), torch.OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(type(error), match=str(error)):
            check_ids(Reads(error), ids)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), "meta"])
def test_devices_by_any_torch_name(device: Any) -> None:
    assert usable_device(device) == torch.device(device)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "There is no device 'gpu'. Use a name that torch knows, such as cpu, cuda, cuda:1, mps or xpu"),
        ("cuda:x", "There is no device 'cuda:x'"),
        (0.5, "There is no device '0.5'"),
        ("vulkan", "Device 'vulkan' cannot be used here: "),
    ],
)
def test_devices_that_cannot_be_used(device: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        usable_device(device)
    with pytest.raises(ModelError, match=message):
        sc.prune(nn.Sequential(nn.Linear(4, 4)), [(torch.randn(2, 4), torch.randn(2, 4))], device=device, only="*")


@pytest.mark.parametrize("other", ["mps", "xpu", "cuda"])
def test_an_accelerator_that_is_not_here_is_a_typed_error(other: str) -> None:
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device(other):
        pytest.skip(f"{other} is here")
    with pytest.raises(ModelError, match=f"Device '{other}' cannot be used here: "):
        usable_device(other)


@pytest.mark.parametrize("work", [sc.prune, sc.probe])
def test_a_memory_limit_that_has_no_effect_is_refused(work: Callable[..., Any]) -> None:
    batches = [(torch.randn(2, 4), torch.randn(2, 4))]
    with pytest.raises(FactError, match="memory limits CUDA devices and has no effect on cpu"):
        work(nn.Sequential(nn.Linear(4, 4)), batches, memory="1GB", only="*")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"limit": -1}, "limit must be the number of batches to take, at least 1; got -1"),
        ({"limit": 1.5}, "limit must be .* got 1.5"),
        ({"loss": "mse"}, "loss must be a function of model and batch; got 'mse'"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(FactError, match=said):
        sc.prune(nn.Linear(4, 4), [(torch.randn(2, 4), torch.randn(2, 4))] * 2, sparsity=0.5, **settings)
    with pytest.raises(ModelError, match="A torch.nn.Module is needed, not a str"):
        sc.prune("folder", [torch.randn(2, 4)])  # type: ignore[arg-type]
