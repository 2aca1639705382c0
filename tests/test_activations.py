"""Input statistics of weights: linear layers, convolutions, experts, attention and hand-written matmuls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.errors import FactError
from secateur.model.prunable import find_prunable
from secateur.oneshot.activations import InputStatistics, check_seen, gather_inputs


def watched(model: nn.Module, inputs: Tensor, **settings: Any) -> tuple[InputStatistics, dict[str, Any]]:
    prunables, _ = find_prunable(model, only="*")
    found = InputStatistics(prunables, **settings)
    gather_inputs(model, [inputs], found, forward=lambda model, batch: model(batch))
    check_seen(found, prunables)
    return found, {prunable.name: prunable for prunable in prunables}


def test_norms_and_products_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(5, 3), torch.randn(4, 7, 5)
    found, prunables = watched(model, inputs, products=True)
    flat = inputs.reshape(-1, 5)
    assert torch.allclose(found.norms(prunables["weight"]), flat.norm(dim=0).expand(3, 5), atol=1e-5)
    assert torch.allclose(found.products["weight"][0], flat.T @ flat, atol=1e-4)
    assert found.tokens["weight"].tolist() == [28]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(4, 6, 3, padding=1),
        nn.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 0)),
        nn.Conv2d(4, 6, 3, dilation=2, padding="same"),
        nn.Conv2d(4, 6, 3, groups=2, padding=1, padding_mode="circular"),
        nn.Conv3d(4, 2, 2, stride=(1, 2, 1)),
    ],
)
def test_products_of_convolutions_predict_the_outputs(layer: nn.Module) -> None:
    """The sum of squared outputs is w^T (X^T X) w for every kernel: true only if the patches are the right ones."""
    torch.manual_seed(0)
    assert isinstance(layer.bias, nn.Parameter)
    layer.bias.data.zero_()
    inputs = torch.randn(3, 4, *([8] * (layer.weight.ndim - 2)))  # type: ignore[operator,union-attr]
    found, prunables = watched(layer, inputs, products=True)
    outputs = layer(inputs).detach().transpose(0, 1).flatten(1).square().sum(1)
    products = found.products["weight"]
    kernels = layer.weight.detach().flatten(1).chunk(len(products))  # type: ignore[operator,union-attr]
    predicted = torch.cat([((k @ p) * k).sum(1) for k, p in zip(kernels, products, strict=True)])
    assert torch.allclose(predicted, outputs, rtol=1e-4)
    norms = found.norms(prunables["weight"])
    assert norms.shape == layer.weight.shape
    diagonals = [p.diagonal().sqrt().expand(len(k), -1) for k, p in zip(kernels, products, strict=True)]
    assert torch.allclose(norms.reshape(norms.shape[0], -1), torch.cat(diagonals), rtol=1e-4)


class Experts(nn.Module):
    """Two products with stacked weights, one expert at a time, as transformers' mixtures do it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 4))
        self.down = nn.Parameter(torch.randn(3, 4, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        output = torch.zeros_like(inputs)
        for expert in range(2):  # the third sees nothing
            mine = inputs[expert::2]
            hidden = nn.functional.linear(mine, self.up[expert]).relu()
            output[expert::2] = nn.functional.linear(hidden, self.down[expert])
        return output


def test_experts_each_have_their_own() -> None:
    torch.manual_seed(0)
    model, inputs = Experts(), torch.randn(9, 4)
    found, prunables = watched(model, inputs)
    assert found.tokens["up"].tolist() == [5, 4, 0]
    norms = found.norms(prunables["up"])
    assert torch.allclose(norms[0], inputs[0::2].norm(dim=0).expand(8, 4), atol=1e-5)
    assert torch.allclose(norms[1], inputs[1::2].norm(dim=0).expand(8, 4), atol=1e-5)
    assert bool((norms[2] == 0).all())
    assert found.reached(prunables["down"]).tolist() == [True, True, False]


def test_batched_experts() -> None:
    torch.manual_seed(0)

    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_transposed = True
            self.up = nn.Parameter(torch.randn(3, 4, 8))

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.bmm(inputs.expand(3, -1, -1), self.up)

    inputs = torch.randn(6, 4)
    found, prunables = watched(Batched(), inputs)
    assert torch.allclose(found.norms(prunables["up"]), inputs.norm(dim=0)[None, :, None].expand(3, 4, 8), atol=1e-5)


def test_conv1d_of_transformers_equals_a_linear_layer() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    turned = transformers.pytorch_utils.Conv1D(6, 5)
    straight = nn.Linear(5, 6)
    straight.weight.data, straight.bias.data = turned.weight.data.t().clone(), turned.bias.data.clone()
    inputs = torch.randn(2, 7, 5)
    one, one_sites = watched(turned, inputs, products=True)
    two, two_sites = watched(straight, inputs, products=True)
    assert torch.allclose(one.norms(one_sites["weight"]), two.norms(two_sites["weight"]).t())
    assert torch.equal(one.products["weight"], two.products["weight"])


def test_attention_is_seen() -> None:
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))

    found, prunables = watched(Attention(), torch.randn(2, 5, 8), products=True)
    assert torch.equal(found.products["v.weight"], found.products["q.weight"])
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # in evaluation, one call for all of it otherwise
    found, prunables = watched(layer, torch.randn(2, 5, 8))
    assert set(found.squares) == set(prunables)


class Cross(nn.Module):
    """Queries from the first 4 positions; keys and values from the others, which are one tensor or two."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        self.attention, self.apart = nn.MultiheadAttention(8, 2, batch_first=True, bias=False), apart

    def forward(self, both: Tensor) -> Tensor:
        x, y = both[:, :4], both[:, 4:]
        found: Tensor = self.attention(x, y, 2 * y if self.apart else y, need_weights=False)[0]
        return found


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("apart", [False, True])
def test_each_row_of_cross_attention_has_its_own_inputs(apart: bool, batch: int) -> None:
    torch.manual_seed(0)
    both = torch.randn(batch, 10, 8) * torch.cat([torch.ones(4), torch.full((6,), 9.0)])[:, None]
    found, prunables = watched(Cross(apart), both, products=True)
    x, y = both[:, :4].reshape(-1, 8), both[:, 4:].reshape(-1, 8)
    name = "attention.in_proj_weight"
    inputs = [x, y, 2 * y if apart else y]
    assert found.tokens[name].tolist() == [4 * batch, 6 * batch, 6 * batch]
    for product, mine in zip(found.products[name], inputs, strict=True):
        torch.testing.assert_close(product, mine.T @ mine, rtol=1e-4, atol=1e-3)
    expected = torch.cat([mine.norm(dim=0).expand(8, 8) for mine in inputs])
    torch.testing.assert_close(found.norms(prunables[name]), expected)
    assert found.reached(prunables[name]).tolist() == [True]


def test_self_attention_is_one_matrix() -> None:
    torch.manual_seed(0)
    layer, inputs = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)
    found, _ = watched(layer, inputs, products=True)
    flat = inputs.transpose(0, 1).reshape(-1, 8)
    assert torch.equal(found.products["self_attn.in_proj_weight"], (flat.T @ flat)[None])


RANGES = {
    "in order": lambda w, x: [nn.functional.linear(x[:2], w[:4]), nn.functional.linear(x[2:], w[4:])],
    "the wider first": lambda w, x: [nn.functional.linear(x[2:], w[4:]), nn.functional.linear(x[:2], w[:4])],
    "transposed": lambda w, x: [x[:2] @ w[:4].t(), x[2:] @ w[4:].t()],
    "on the left": lambda w, x: [w[:4] @ x[:2].mT, w[4:] @ x[2:].mT],
}


@pytest.mark.parametrize("way", RANGES)
def test_ranges_of_rows(way: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(5, 7, 6)
    found, prunables = watched(Sided(lambda w, x: RANGES[way](w, x)[0], (10, 6)), inputs)
    assert found.tokens["layer.weight"].tolist() == [14, 14, 21, 21, 21]
    norms = found.norms(prunables["layer.weight"])
    parts = ((inputs[:2], 4), (inputs[2:], 6))
    expected = torch.cat([part.reshape(-1, 6).norm(dim=0).expand(n, 6) for part, n in parts])
    torch.testing.assert_close(norms, expected)


def test_rows_called_whole_and_by_ranges() -> None:
    """In one batch and in several, in any order."""
    torch.manual_seed(0)
    batches = list(torch.randn(4, 7, 6))

    def way(w: Tensor, x: Tensor) -> Tensor:
        if x is batches[0]:
            return nn.functional.linear(x, w)
        if x is batches[1]:
            return nn.functional.linear(x, w[6:])
        return nn.functional.linear(x, w[:4]).sum() + nn.functional.linear(2 * x, w).sum()

    model = Sided(way, (12, 6))
    prunables, _ = find_prunable(model, only="*")
    found = InputStatistics(prunables)
    gather_inputs(model, batches, found, forward=lambda model, batch: model(batch))
    a, b, c, d = (batch.square().sum(0) for batch in batches)
    rows = [a + 5 * c + 5 * d] * 4 + [a + 4 * c + 4 * d] * 2 + [a + b + 4 * c + 4 * d] * 6
    torch.testing.assert_close(found.norms(prunables[0]), torch.stack(rows).sqrt())


def test_columns_of_a_transposed_layer() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    inputs = torch.randn(5, 6)

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = transformers.pytorch_utils.Conv1D(9, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.layer.weight[:, :3] + (3 * x) @ self.layer.weight[:, 6:]

    found, prunables = watched(Turned(), inputs)
    norm = inputs.norm(dim=0)[:, None].expand(6, 3)
    torch.testing.assert_close(found.norms(prunables["layer.weight"]), torch.cat([norm, 0 * norm, 3 * norm], 1))


def test_ranges_without_a_common_size_are_refused_for_products_alone() -> None:
    def way(w: Tensor, x: Tensor) -> Tensor:
        return torch.cat([nn.functional.linear(x, part) for part in w.split(10)], -1)

    inputs = torch.randn(4, 6)
    found, prunables = watched(Sided(way, (101, 6)), inputs)
    torch.testing.assert_close(found.norms(prunables["layer.weight"]), inputs.norm(dim=0).expand(101, 6))
    with pytest.raises(FactError, match=r"'layer.weight' is multiplied by ranges of its rows.*skip="):
        watched(Sided(way, (101, 6)), inputs, products=True)


def test_a_weight_without_a_matmul() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)

    found, prunables = watched(Idle(), torch.randn(2, 4))
    assert found.reached(prunables["used.weight"]).tolist() == [True]
    assert found.reached(prunables["idle.weight"]).tolist() == [False]
    assert bool((found.norms(prunables["idle.weight"]) == 0).all())


def test_a_weight_that_computes_unseen_is_refused_by_name() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return (self.layer.weight * inputs[:, None]).sum(-1)

    with pytest.raises(FactError, match=r"The inputs of 'layer.weight' cannot be seen.*skip="):
        watched(Scaled(), torch.randn(2, 4))


class Sided(nn.Module):
    """A weight used in some way by hand."""

    def __init__(self, way: Any, shape: tuple[int, int] = (3, 5)) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(shape[1], shape[0], bias=False), way

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.way(self.layer.weight, inputs)
        return found


WAYS = {
    "on the left": lambda w, x: w @ x.mT,
    "matmul on the left": lambda w, x: torch.matmul(w, x.mT),
    "one by one on the left": lambda w, x: torch.stack([w @ row for row in x.reshape(-1, 5)]),
    "transposed on the right": lambda w, x: x @ w.t(),
    "einsum": lambda w, x: torch.einsum("bti,oi->bto", x, w),
    "einsum, weight first": lambda w, x: torch.einsum("oi,bti->bot", w, x),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_is_seen_on_either_side(way: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, 5)
    found, prunables = watched(Sided(WAYS[way]), inputs, products=True)
    flat = inputs.reshape(-1, 5)
    assert found.tokens["layer.weight"].tolist() == [8]
    assert torch.allclose(found.norms(prunables["layer.weight"]), flat.norm(dim=0).expand(3, 5), atol=1e-5)
    assert torch.allclose(found.products["layer.weight"][0], flat.T @ flat, atol=1e-4)


def test_a_square_weight_used_from_its_outputs_is_refused() -> None:
    watched(Sided(lambda w, x: x @ w.t(), (5, 5)), torch.randn(2, 4, 5))
    for way in (lambda w, x: x @ w, lambda w, x: w.t() @ x.mT):
        with pytest.raises(FactError, match="along its output dimension"):
            watched(Sided(way, (5, 5)), torch.randn(2, 4, 5))
