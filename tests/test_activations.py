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
    sites, _ = find_prunable(model, only="*")
    found = InputStatistics(sites, **settings)
    gather_inputs(model, [inputs], found, forward=lambda model, batch: model(batch))
    check_seen(found, sites)
    return found, {site.name: site for site in sites}


def test_norms_and_products_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(5, 3), torch.randn(4, 7, 5)
    found, sites = watched(model, inputs, products=True)
    flat = inputs.reshape(-1, 5)
    assert torch.allclose(found.norms(sites["weight"]), flat.norm(dim=0).expand(3, 5), atol=1e-5)
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
    found, sites = watched(layer, inputs, products=True)
    outputs = layer(inputs).detach().transpose(0, 1).flatten(1).square().sum(1)
    products = found.products["weight"]
    kernels = layer.weight.detach().flatten(1).chunk(len(products))  # type: ignore[operator,union-attr]
    predicted = torch.cat([((k @ p) * k).sum(1) for k, p in zip(kernels, products, strict=True)])
    assert torch.allclose(predicted, outputs, rtol=1e-4)
    norms = found.norms(sites["weight"])
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
    found, sites = watched(model, inputs)
    assert found.tokens["up"].tolist() == [5, 4, 0]
    norms = found.norms(sites["up"])
    assert torch.allclose(norms[0], inputs[0::2].norm(dim=0).expand(8, 4), atol=1e-5)
    assert torch.allclose(norms[1], inputs[1::2].norm(dim=0).expand(8, 4), atol=1e-5)
    assert bool((norms[2] == 0).all())
    assert found.reached(sites["down"]).tolist() == [True, True, False]


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
    found, sites = watched(Batched(), inputs)
    assert torch.allclose(found.norms(sites["up"]), inputs.norm(dim=0)[None, :, None].expand(3, 4, 8), atol=1e-5)


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

    found, sites = watched(Attention(), torch.randn(2, 5, 8), products=True)
    assert torch.equal(found.products["v.weight"], found.products["q.weight"])
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # in evaluation, one call for all of it otherwise
    found, sites = watched(layer, torch.randn(2, 5, 8))
    assert set(found.squares) == set(sites)


def test_a_weight_without_a_matmul() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)

    found, sites = watched(Idle(), torch.randn(2, 4))
    assert found.reached(sites["used.weight"]).tolist() == [True]
    assert found.reached(sites["idle.weight"]).tolist() == [False]
    assert bool((found.norms(sites["idle.weight"]) == 0).all())


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
    found, sites = watched(Sided(WAYS[way]), inputs, products=True)
    flat = inputs.reshape(-1, 5)
    assert found.tokens["layer.weight"].tolist() == [8]
    assert torch.allclose(found.norms(sites["layer.weight"]), flat.norm(dim=0).expand(3, 5), atol=1e-5)
    assert torch.allclose(found.products["layer.weight"][0], flat.T @ flat, atol=1e-4)


def test_a_square_weight_used_from_its_outputs_is_refused() -> None:
    watched(Sided(lambda w, x: x @ w.t(), (5, 5)), torch.randn(2, 4, 5))
    for way in (lambda w, x: x @ w, lambda w, x: w.t() @ x.mT):
        with pytest.raises(FactError, match="along its output dimension"):
            watched(Sided(way, (5, 5)), torch.randn(2, 4, 5))
