"""One contract for every registered score, and the direction of those that read Adam's momentum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import FactError, ScoreError
from secateur.scores import _REGISTERED, Score, power, resolve

STATED = {  # name -> facts it declares, as documented
    "bitter0": {"weight", "exp_avg", "exp_avg_sq"},
    "bitter1": {"weight"},
    "bitter2": {"weight"},
    "bitter3": {"weight", "exp_avg"},
    "bitter4": {"weight", "exp_avg"},
    "bitter5": {"weight", "exp_avg", "exp_avg_sq"},
    "bitter6": {"weight", "exp_avg", "exp_avg_sq"},
    "bitter7": {"weight", "exp_avg_sq"},
    "bitter8": {"weight", "exp_avg", "step", "beta1"},
    "bitter9": {"weight", "exp_avg", "exp_avg_sq"},
    "displacement": {"weight", "initial_weight"},
    "fisher": {"weight", "exp_avg_sq"},
    "gradient": {"weight", "gradient"},
    "magnitude": {"weight"},
    "movement": {"movement_sum"},
    "random": {"index"},
    "variance": {"weight", "exp_avg_sq"},
    "wanda": {"weight", "input_norm"},
}


def made_up_facts(size: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Facts of the sizes that training meets: v near 1e-10, m near 1e-5."""
    draw = torch.Generator().manual_seed(5)

    def normal(scale: float) -> Tensor:
        return (torch.randn(size, generator=draw) * scale).to(dtype)

    return {
        "weight": normal(0.02),
        "exp_avg": normal(1e-5),
        "exp_avg_sq": normal(1e-5).square(),
        "initial_weight": normal(0.02),
        "movement_sum": normal(1e-3),
        "input_norm": normal(3.0).abs(),
        "gradient": normal(1e-5).abs(),
        "index": torch.arange(size),
        "step": 7.0,
        "beta1": 0.9,
        "beta2": 0.999,
    }


def evaluate(name: str, facts: dict[str, Any]) -> Tensor:
    score = resolve(name)
    return score(**{need: facts[need] for need in score.needs})


@pytest.mark.parametrize("name", sc.scores())
def test_contract(name: str) -> None:
    """Shape, dtype, finiteness, determinism, no changed input, the same bits in parts, and a documented formula."""
    facts = made_up_facts(1001)
    before = {key: value.clone() for key, value in facts.items() if isinstance(value, Tensor)}
    whole = evaluate(name, facts)
    assert whole.shape == (1001,)
    assert whole.dtype == torch.float32
    assert bool(whole.isfinite().all())
    assert torch.equal(whole, evaluate(name, facts))
    assert all(torch.equal(facts[key], value) for key, value in before.items())
    for start, stop in ((0, 3), (3, 500), (500, 1001)):
        part = {key: value[start:stop] if isinstance(value, Tensor) else value for key, value in facts.items()}
        assert torch.equal(evaluate(name, part), whole[start:stop])
    assert resolve(name).function.__doc__


@pytest.mark.parametrize("name", sc.scores())
def test_agrees_with_float64(name: str) -> None:
    """fp32 rounds each operation to 6e-8; the longest chain has eight, and bitter5 and 9 subtract."""
    facts = made_up_facts(1000)
    double = {
        key: value.double() if isinstance(value, Tensor) and key != "index" else value for key, value in facts.items()
    }
    torch.testing.assert_close(evaluate(name, facts).double(), evaluate(name, double).double(), rtol=2e-6, atol=1e-8)


def test_every_stated_score_is_there_with_its_needs() -> None:
    assert {name: set(resolve(name).needs) for name in sc.scores() if name in STATED} == STATED
    assert set(STATED) <= set(sc.scores())
    assert sc.scores() == sorted(sc.scores())


def test_formulas_by_hand() -> None:
    w, m, v, eps = -0.5, 0.04, 0.0016, 1e-8
    facts = {"weight": torch.tensor([w]), "exp_avg": torch.tensor([m]), "exp_avg_sq": torch.tensor([v])}
    facts |= {"step": 3.0, "beta1": 0.9, "initial_weight": torch.tensor([0.3]), "movement_sum": torch.tensor([2.5])}
    facts |= {"input_norm": torch.tensor([6.0]), "gradient": torch.tensor([0.25])}
    bitter3 = abs(w) * math.sqrt(abs(m) + eps)
    pull = math.copysign(1, w) * m / (math.sqrt(v) + eps)
    expected = {
        "bitter0": w * w * abs(m) / (math.sqrt(v) + eps),
        "magnitude": abs(w),
        "bitter3": bitter3,
        "bitter4": bitter3,
        "bitter5": -pull + 0.1 * abs(w),
        "bitter6": bitter3 * math.sqrt(m * m / (v + eps)),
        "bitter7": abs(w) * (v + eps) ** 0.25,
        "bitter8": abs(w) * math.sqrt(abs(m / (1 - 0.9**3)) + eps),
        "bitter9": bitter3 - 0.1 * pull,
        "variance": abs(w) * v**0.25,
        "fisher": abs(w) * math.sqrt(v),
        "displacement": w * (w - 0.3),
        "movement": 2.5,
        "wanda": abs(w) * 6.0,
        "gradient": abs(w) * 0.25,
    }
    for name, value in expected.items():
        assert float(evaluate(name, facts)) == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("name", ["bitter5", "bitter9"])
def test_weights_adam_pushes_toward_zero_go_first(name: str) -> None:
    """Four weights of the same size, two growing and two shrinking under a real Adam: the shrinking score lower."""
    layer = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.5, 0.5, -0.5, -0.5]]))
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    before = layer.weight.detach().abs().clone()
    for _ in range(3):
        layer.weight.grad = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
        optimizer.step()
    shrinking = (layer.weight.detach().abs() < before).flatten()
    assert shrinking.tolist() == [True, False, False, True]
    pruner = sc.Pruner(layer, optimizer, score=name, every=1, only="*")
    scores = pruner.pieces()[0].score(slice(0, 4))
    assert float(scores[shrinking].max()) < float(scores[~shrinking].min())
    layer.weight.grad = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    optimizer.step()
    pruner.step()
    assert torch.equal(~pruner.masks["weight"].flatten(), shrinking)


def test_bitter8_reads_the_optimizers_own_beta_and_step() -> None:
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), betas=(0.5, 0.99))
    for _ in range(2):
        layer.weight.grad = torch.randn(8, 8)
        optimizer.step()
    found = sc.Pruner(layer, optimizer, score="bitter8", only="*").pieces()[0].score(slice(0, 64))
    state = optimizer.state[layer.weight]
    m_hat = state["exp_avg"] / (1 - 0.5**2)
    torch.testing.assert_close(found, (layer.weight.detach().abs() * (m_hat.abs() + 1e-8).sqrt()).flatten())


def test_variance_hears_what_bitter7s_eps_drowns() -> None:
    """Two weights alike but for v, both far below eps: bitter7 cannot tell them apart to 3 %, variance can."""
    facts = {"weight": torch.tensor([0.1, 0.1]), "exp_avg_sq": torch.tensor([1e-10, 1e-9])}
    quiet, loud = evaluate("bitter7", facts).tolist()
    assert loud / quiet < 1.03
    quiet, loud = evaluate("variance", facts).tolist()
    assert loud / quiet > 1.7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_storage_is_computed_in_fp32(dtype: torch.dtype) -> None:
    layer = nn.Linear(16, 16, bias=False).to(dtype)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer.weight.grad = torch.randn(16, 16).to(dtype)
    optimizer.step()
    state = optimizer.state[layer.weight]
    assert state["exp_avg_sq"].dtype == dtype
    found = sc.Pruner(layer, optimizer, score="fisher", only="*").pieces()[0].score(slice(0, 256))
    expected = layer.weight.detach().float().abs() * state["exp_avg_sq"].float().sqrt()
    assert torch.equal(found, expected.flatten())


@pytest.mark.parametrize("sixteenths", range(1, 17))
def test_power_is_close_to_pow_and_never_an_alias(sixteenths: int) -> None:
    values = torch.rand(100).square() * 1e-6
    kept = values.clone()
    result = power(values, sixteenths / 16)
    torch.testing.assert_close(result, values.double().pow(sixteenths / 16).float(), rtol=1e-6, atol=0)
    result.zero_()
    assert torch.equal(values, kept)


@pytest.mark.parametrize("exponent", [0.0, 0.3, 1.5, -0.25])
def test_power_refuses_what_roots_cannot_give(exponent: float) -> None:
    with pytest.raises(ScoreError, match="multiple of 1/16"):
        power(torch.ones(1), exponent)


def test_options_in_the_name() -> None:
    facts = {"weight": torch.tensor([2.0]), "exp_avg_sq": torch.tensor([16.0])}
    assert float(resolve("variance(q=0.5)")(**facts)) == 8.0
    assert str(resolve("variance(q=0.5)")) == "variance(q=0.5)"
    assert resolve("variance(q=3/8)").options == {"q": 0.375}
    with pytest.raises(ScoreError, match=r"no option 'power'. Its options: q=0.25"):
        resolve("variance(power=1)")
    with pytest.raises(ScoreError, match=r"multiple of 1/16"):
        resolve("variance(q=0.3)")
    with pytest.raises(ScoreError, match="Cannot read"):
        resolve("variance(q)")
    with pytest.raises(ScoreError, match="Did you mean 'variance'"):
        resolve("varianc")


@pytest.fixture
def table() -> Iterator[dict[str, Score]]:
    """The score table, put back as it was."""
    before = dict(_REGISTERED)
    yield _REGISTERED
    _REGISTERED.clear()
    _REGISTERED.update(before)


def test_a_new_score_is_six_lines(table: dict[str, Score], block: nn.Module) -> None:
    @sc.score
    def adam_fisher(weight: Tensor, exp_avg_sq: Tensor) -> Tensor:
        """w^2 v: diagonal Fisher from Adam's second moment."""
        return weight.square() * exp_avg_sq

    assert "adam_fisher" in sc.scores()
    assert float(adam_fisher(torch.tensor(2.0), torch.tensor(3.0))) == 12.0
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9)
    pruner = sc.Pruner(block, optimizer, score=adam_fisher)
    for parameter in block.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(
        FactError,
        match=r"adam_fisher needs exp_avg_sq; SGD keeps momentum_buffer. Scores that work here: bitter1,.*magnitude",
    ):
        pruner.step()


def test_before_the_first_step_the_message_says_so(block: nn.Module) -> None:
    pruner = sc.Pruner(block, torch.optim.AdamW(block.parameters()), score="variance")
    with pytest.raises(
        FactError, match=r"variance needs exp_avg_sq; AdamW has no state yet: .*first optimizer.step\(\)"
    ):
        pruner.pieces()


def test_scores_that_break_the_contract_are_refused(table: dict[str, Score]) -> None:
    def whole_tensor(weight: Tensor) -> Tensor:
        return weight / weight.sum()

    def drawn(weight: Tensor) -> Tensor:
        return torch.rand_like(weight)

    def one_number(weight: Tensor) -> Tensor:
        return weight.norm()

    def rows_please(weight: Tensor) -> Tensor:
        return weight.norm(dim=1)

    def prefix(weight: Tensor) -> Tensor:
        return weight.cumsum(0)

    def relative(weight: Tensor) -> Tensor:
        return weight / weight[0]

    def writes(weight: Tensor) -> Tensor:
        return weight.abs_()

    with pytest.raises(ScoreError, match="'writes' writes into its arguments"):
        sc.score(writes)
    for function in (whole_tensor, drawn, one_number, prefix, relative):
        with pytest.raises(ScoreError, match="must be elementwise and deterministic"):
            sc.score(function)
    with pytest.raises(ScoreError, match="failed on flat tensors of 8"):
        sc.score(rows_please)
    with pytest.raises(ScoreError, match="exists already"):
        sc.score(lambda weight: weight, aliases=("magnitude",))
    with pytest.raises(ScoreError, match="is not a registered score"):
        resolve(whole_tensor)


def test_random_is_uniform_and_differs_by_seed() -> None:
    index = torch.arange(100_000)
    first, second = (resolve(f"random(seed={seed})")(index=index) for seed in (0, 1))
    assert abs(float(first.mean()) - 0.5) < 0.005
    assert float(first.min()) >= 0
    assert float(first.max()) < 1
    assert float((first == second).float().mean()) < 0.001
    assert abs(float(torch.corrcoef(torch.stack((first[:-1], first[1:])))[0, 1])) < 0.02
    far = resolve("random")(index=index + 2**33)
    assert float((far == first).float().mean()) < 0.001
