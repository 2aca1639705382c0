"""Optimizers of all kinds: wrapped, several at once, with closures, with state of a few bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import FactError, OptimizerError
from secateur.model.facts import decode
from secateur.scores import resolve
from tests.conftest import Block, train


def zeros_of(pruner: sc.Pruner, model: nn.Module) -> int:
    """Pruned weights, all of which are zero."""
    for name, mask in pruner.masks.items():
        assert bool((model.get_parameter(name)[~mask] == 0).all()), name
    return sum(int((~mask).sum()) for mask in pruner.masks.values())


class Wrapper:
    """As DeepSpeed, Lightning and others do it: no Optimizer itself."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize("make", [torch.optim.AdamW, sc.optim.AdamW])
def test_accelerates_wrapper_is_looked_into(make: Any, block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    inner = make(block.parameters(), lr=0.01)
    optimizer = accelerate.Accelerator(cpu=True).prepare(inner)
    assert optimizer is not inner
    pruner = sc.Pruner(block, optimizer, sparsity=0.5, every=2)
    calls: list[int] = []
    real = pruner.apply
    monkeypatch.setattr(pruner, "apply", lambda: calls.append(1) or real())
    train(block, optimizer, 6, pruner.step)
    assert zeros_of(pruner, block) == 1024
    assert pruner.report().step == 6
    assert len(calls) == (2 if make is sc.optim.AdamW else 6)  # ours masks in its own step once it has masks


def test_wrappers_of_wrappers_are_looked_into(block: Block) -> None:
    inner = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, Wrapper(Wrapper(inner)), every=1)  # type: ignore[arg-type]
    handle = pruner.attach()
    train(block, inner, 2)
    assert zeros_of(pruner, block) == 1024
    handle.remove()
    train(block, inner, 1)
    assert pruner.report().step == 2


class Averaging:
    """As Schedule-Free and Lookahead: weights of its own move towards the optimizer's, and evaluation uses those."""

    def __init__(self, inner: Any, name: str) -> None:
        setattr(self, name, inner)
        self.inner, self.state = inner, {}  # type: ignore[var-annotated]

    def step(self) -> None:
        self.inner.step()
        for parameter in (p for group in self.inner.param_groups for p in group["params"]):
            own = self.state.setdefault(parameter, {"slow": parameter.detach().clone()})
            own["slow"].lerp_(parameter.detach(), 0.1)

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def eval(self) -> None:
        for parameter, own in self.state.items():
            parameter.copy_(own["slow"])


@pytest.mark.parametrize("name", ["optimizer", "base_optimizer", "base"])
def test_weights_that_a_wrapper_keeps_are_zeroed_too(name: str, block: Block) -> None:
    optimizer = Averaging(torch.optim.AdamW(block.parameters(), lr=0.01), name)
    pruner = sc.Pruner(block, optimizer, sparsity=0.5, every=2)  # type: ignore[arg-type]
    train(block, optimizer, 6, pruner.step)  # type: ignore[arg-type]
    optimizer.eval()
    assert zeros_of(pruner, block) == 1024


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: None, "got None. Pass the optimizer whose step"),
        (lambda m: "adam", "got the text 'adam'. Build the optimizer first"),
        (lambda m: torch.optim.AdamW, r"got the class AdamW. Pass an instance: AdamW\(model.parameters"),
        (
            lambda m: torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.AdamW(m.parameters()), 10),
            "got the learning-rate scheduler CosineAnnealingLR. Pass its optimizer",
        ),
        (lambda m: [torch.optim.AdamW(m.parameters()), None], "got None"),
        (lambda m: m.parameters(), "got a generator. Pass the optimizer whose step"),
        (lambda m: m, "got a Block"),
        (lambda m: list(m.parameters()), "got a Parameter"),
        (lambda m: Wrapper("adam"), "got a Wrapper around a str"),
        (lambda m: [], "got an empty list"),
        (lambda m: [torch.optim.AdamW(m.parameters()), torch.optim.SGD(m.up.parameters())], "is in two of the 2"),
    ],
)
def test_what_is_no_optimizer_is_refused(make: Any, said: str, block: Block) -> None:
    with pytest.raises(OptimizerError, match=said):
        sc.Pruner(block, make(block))


def test_an_optimizer_without_steps_of_its_own_is_refused(block: Block) -> None:
    """LOMO trained a dense model under a Pruner without a word: it writes weights while gradients are computed."""
    fused = type("Lomo", (torch.optim.SGD,), {})
    for optimizer in (fused(block.parameters()), Wrapper(type("Mine", (fused,), {})(block.parameters()))):
        with pytest.raises(OptimizerError, match=r"changes weights during the backward pass.*8-bit AdamW"):
            sc.Pruner(block, optimizer)  # type: ignore[arg-type]


class Two(nn.Module):
    """Matrices for Muon and a convolution for AdamW, both prunable."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 20, bias=False), nn.Linear(20, 12, bias=False)
        self.conv = nn.Conv1d(1, 8, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.second(torch.relu(self.first(inputs)))
        return self.conv(hidden[:, None]).square().mean()


def two(**options: Any) -> tuple[Two, list[torch.optim.Optimizer], sc.Pruner]:
    model = Two()
    muon = torch.optim.Muon([model.first.weight, model.second.weight], lr=0.02)
    adamw = sc.optim.AdamW([model.conv.weight], lr=0.01)
    settings = {"score": "magnitude", "sparsity": sc.linear(0.5, begin=0, end=6), "every": 2, "only": "*", **options}
    return model, [muon, adamw], sc.Pruner(model, [muon, adamw], **settings)


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randn(4, 12, generator=generator)).backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("attached", [False, True])
def test_muon_and_adamw_share_one_budget(attached: bool) -> None:
    model, optimizers, pruner = two()
    if attached:
        pruner.attach()
    total = sum(p.numel() for p in model.parameters())
    for seed in range(8):
        step(model, optimizers, seed)
        if not attached:
            pruner.step()
        assert pruner.report().step == seed + 1  # one step, not two
    assert [update.step for update in pruner.updates] == [2, 4, 6]
    assert zeros_of(pruner, model) == round(0.5 * total)
    shares = {row.sparsity for row in pruner.report().tensors}
    assert len(shares) > 1  # one budget, not one for each
    for optimizer, layer in ((optimizers[0], model.first), (optimizers[1], model.conv)):
        mask = next(m for n, m in pruner.masks.items() if model.get_parameter(n) is layer.weight)
        shaped = [t for t in optimizer.state[layer.weight].values() if isinstance(t, Tensor) and t.ndim]
        assert shaped
        assert all(bool((t[~mask] == 0).all()) for t in shaped)


def test_each_site_is_read_from_its_own_optimizer() -> None:
    """SGD's momentum and Adam's first moment have other names, so a score of moments works for tensors of one kind."""
    model = Two()
    first = torch.optim.AdamW([model.first.weight], betas=(0.5, 0.9))
    second = torch.optim.Adam([model.second.weight], betas=(0.8, 0.99))
    pruner = sc.Pruner(model, [first, second], score="bitter8", sparsity=0.5, every=1)
    step(model, [first, second], 1)
    pruner.step()
    assert zeros_of(pruner, model) == 240
    alone = sc.Pruner(model, second, score="bitter8", only="second")
    both, one = (p.pieces()[-1].score(slice(0, 240)) for p in (pruner, alone))
    assert torch.equal(both, one)


def test_tensors_without_the_state_a_score_needs_are_named() -> None:
    model, optimizers, pruner = two(score="variance")
    step(model, optimizers, 1)
    said = r"exp_avg_sq; Muon keeps momentum_buffer for 'first.weight', 'second.weight'. Scores that work.* magnitude"
    with pytest.raises(FactError, match=said) as told:
        pruner.step()
    assert "variance" not in str(told.value).partition("work here")[2]


def test_a_step_counts_when_all_have_stepped_and_masks_hold_between() -> None:
    model, (muon, adamw), pruner = two(sparsity=0.5, every=1)
    step(model, [muon, adamw], 1)
    pruner.step()
    assert pruner.report().step == 1
    step(model, [muon], 2)
    assert bool((model.first.weight[~pruner.masks["first.weight"]] != 0).any())
    pruner.step()
    assert pruner.report().step == 1  # half a step
    assert zeros_of(pruner, model) > 0
    step(model, [adamw], 3)
    pruner.step()
    assert pruner.report().step == 2


@pytest.mark.parametrize("attached", [False, True])
def test_optimizers_that_step_in_the_backward_pass(attached: bool) -> None:
    """One for each parameter. Between their steps the backward pass still reads weights, which must not change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    own = {parameter: torch.optim.AdamW([parameter], lr=0.01) for parameter in model.parameters()}

    def take(parameter: Tensor) -> None:
        own[parameter].step()  # type: ignore[index]
        own[parameter].zero_grad()  # type: ignore[index]

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(take)
    pruner = sc.Pruner(model, [*own.values()], sparsity=sc.linear(0.5, begin=0, end=4), every=1, only="*")
    if attached:
        pruner.attach()
    for step in range(6):
        model(torch.randn(4, 8)).square().mean().backward()
        if not attached:
            pruner.step()
        assert zeros_of(pruner, model) == min(24 * (step + 1), 96)
    assert pruner.report().step == 6


def test_an_optimizer_of_a_list_that_rests_is_told() -> None:
    model, (muon, _), pruner = two(sparsity=0.5, every=1)
    for seed in range(7):
        step(model, [muon], seed)
        pruner.step()
    with pytest.warns(UserWarning, match="Muon has taken 8 steps and AdamW none. With a list of optimizers a step"):
        step(model, [muon], 7)
    step(model, [muon], 8)  # said once


def test_several_optimizers_in_the_wrong_order_are_told() -> None:
    model, (muon, adamw), pruner = two(sparsity=0.5, every=100)

    def loop() -> None:
        for _ in range(8):
            model(torch.randn(4, 12)).backward()
            muon.step()
            pruner.step()
            adamw.step()
            model.zero_grad()

    with pytest.warns(UserWarning, match="Call them in this order"):
        loop()


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "ours": lambda p: sc.optim.AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_closure_gives_the_same_movement(kind: str, named: bool) -> None:
    """Beside a loop that calls backward() before the step."""
    found = []
    for closed in (False, True):
        torch.manual_seed(0)
        model = Two()
        optimizer = OPTIMIZERS[kind](model.parameters())
        pruner = sc.Pruner(model, optimizer, score="movement", sparsity=0.5, every=2, only="*")
        for seed in range(5):

            def closure(seed: int = seed, model: nn.Module = model, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = model(torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)))
                loss.backward()
                return loss

            if closed:
                loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
                assert float(loss.detach()) > 0
            else:
                closure()
                optimizer.step()
            pruner.step()
        found.append((pruner.state_dict(), model.state_dict()))
    (sums, weights), (others, same) = found
    assert float(sums["movement_sum.first.weight"].abs().max()) > 0
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    for name, value in sums.items():
        torch.testing.assert_close(value, others[name], rtol=1e-6, atol=1e-9)


def test_of_many_evaluations_the_last_counts() -> None:
    """LBFGS calls its closure several times a step. Weights and gradients of the last call count, once a step."""
    layer = nn.Linear(6, 6, bias=False)
    optimizer = torch.optim.LBFGS(layer.parameters(), lr=0.1, max_iter=4)
    pruner = sc.Pruner(layer, optimizer, score="movement", sparsity=0.5, every=2, only="*")
    seen: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (layer(torch.eye(6)) - 1).pow(4).sum()
        loss.backward()
        seen.append(-layer.weight.detach() * layer.weight.grad)
        return loss

    expected = torch.zeros(6, 6)
    for _ in range(2):
        before = len(seen)
        optimizer.step(closure)  # type: ignore[arg-type]
        assert len(seen) - before > 1
        expected += seen[-1]
        torch.testing.assert_close(pruner.state_dict()["movement_sum.weight"], expected)
        pruner.step()
    assert pruner.report().step == 2
    assert zeros_of(pruner, layer) == 18


def test_a_closure_that_fails_leaves_no_movement() -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    pruner = sc.Pruner(layer, optimizer, score="movement", every=1)

    def closure(fails: bool) -> Tensor:
        optimizer.zero_grad()
        loss = layer(torch.ones(4)).sum()
        loss.backward()
        if fails:
            raise RuntimeError("out of data")
        return loss

    with pytest.raises(RuntimeError, match="out of data"):
        optimizer.step(lambda: closure(True))
    assert not bool(pruner.state_dict()["movement_sum.weight"].any())


class Codes(Tensor):
    """State as torchao keeps it: a wrapper that shows floats and stores bytes. Here value = code / 8 - 8."""

    codes: Tensor
    table = torch.arange(256) / 8 - 8

    @staticmethod
    def __new__(cls, codes: Tensor, packed: bool = False) -> Codes:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, packed: bool = False) -> None:
        if packed:
            self.hidden = codes
        else:
            self.codes, self.qmap = codes, Codes.table

    def dequantize(self) -> Tensor:
        return Codes.table[getattr(self, "codes", getattr(self, "hidden", None)).int()]

    def __repr__(self) -> str:  # type: ignore[override]
        return "Codes"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            args[0].hidden.copy_(((args[1] + 8) * 8).round().to(torch.uint8))
            return args[0]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} on Codes")


class Opaque(Codes):
    dequantize = Tensor.dequantize  # type: ignore[assignment]

    def __tensor_flatten__(self) -> Any:
        return ["codes"], None


class Coded(torch.optim.SGD):
    """SGD that leaves Adam's moments behind in a few bits, as an optimizer of another library would."""

    keep: Any = None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.keep(self.state[parameter], parameter)
        return loss


def coded(keep: Any, **options: Any) -> tuple[nn.Linear, Coded, sc.Pruner]:
    layer = nn.Linear(16, 24, bias=False)
    optimizer = Coded(layer.parameters(), lr=0.01)
    optimizer.keep = keep
    pruner = sc.Pruner(layer, optimizer, **{"score": "variance", "sparsity": 0.5, "every": 1, "only": "*", **options})
    layer.weight.grad = torch.randn(24, 16)
    return layer, optimizer, pruner


@pytest.mark.parametrize("packed", [False, True])
def test_state_in_a_tensor_subclass_is_read_and_zeroed(packed: bool) -> None:
    codes = torch.randint(65, 256, (24, 16), dtype=torch.uint8)
    layer, optimizer, pruner = coded(lambda state, p: state.setdefault("exp_avg_sq", Codes(codes, packed)))
    before = codes.clone()
    optimizer.step()
    score = (layer.weight.detach().abs() * Codes.table[before.int()].sqrt().sqrt()).flatten()
    pruner.step()
    mask = pruner.masks["weight"]
    assert torch.equal(mask.flatten(), score >= score.sort().values[192])
    assert bool((codes[~mask] == 64).all())  # the code of zero
    assert torch.equal(codes[mask], before[mask])


class Once(Codes):
    """State that must not be encoded a second time."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.copy_.default
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_state_is_not_encoded_again_before_anything_is_pruned() -> None:
    codes = torch.randint(65, 256, (24, 16), dtype=torch.uint8)
    keep = lambda state, p: state.setdefault("exp_avg_sq", Once(codes, True))  # noqa: E731
    _, optimizer, pruner = coded(keep, sparsity=sc.linear(0.5, begin=30, end=40))
    for _ in range(2):
        optimizer.step()
        pruner.step()
    assert pruner.sparsity == 0


class Nibbles(Codes):
    """State of 4 bits as torchao keeps it: two codes a byte, the first in the upper half, and one scale. The table ends
    at -0.75, so a tensor whose largest value is negative shrinks whenever it is encoded."""

    table = torch.tensor([*(-0.75, -0.5, -0.25), 0.0, *(number / 12 for number in range(1, 13))])

    @staticmethod
    def __new__(cls, codes: Tensor, size: torch.Size) -> Nibbles:
        return Tensor._make_wrapper_subclass(cls, size, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, size: torch.Size) -> None:
        self.codes, self.qmap = codes, Nibbles.table

    def dequantize(self) -> Tensor:
        return Nibbles.table[torch.stack([self.codes >> 4, self.codes & 15], dim=-1).int()].view(self.shape)


def test_zeroing_state_of_4_bits_leaves_the_other_values_as_they_are() -> None:
    """Decoded, zeroed and encoded after each step, kept moments shrank and a resumed run differed."""
    torch.manual_seed(0)
    state = Nibbles(torch.randint(0, 256, (192,), dtype=torch.uint8), torch.Size((24, 16)))
    before = state.dequantize()
    _, optimizer, pruner = coded(lambda kept, p: kept.setdefault("exp_avg", state), score="magnitude")
    optimizer.step()
    pruner.step()
    assert torch.equal(state.dequantize(), before * pruner.masks["weight"])


def test_state_that_can_be_neither_read_nor_zeroed_is_refused() -> None:
    keep = lambda state, p: state.setdefault("exp_avg_sq", Opaque(torch.zeros(24, 16, dtype=torch.uint8)))  # noqa: E731
    _, optimizer, pruner = coded(keep, score="magnitude")
    optimizer.step()
    with pytest.raises(FactError, match=r"Coded keeps 'exp_avg_sq' of 'weight' as a Opaque, which has no dequantize"):
        pruner.step()
    _, other, resumed = coded(keep, score="magnitude")
    _, plain, saved = coded(lambda state, p: None, score="magnitude")
    plain.step()
    saved.step()
    resumed.load_state_dict(saved.state_dict())
    other.step()
    with pytest.raises(FactError, match="so it can neither be read"):
        resumed.step()


@pytest.mark.parametrize("beside", ["projector", "GG", "Q", None])
def test_state_in_another_basis_is_neither_read_nor_zeroed(beside: str | None) -> None:
    """SOAP, GaLore, Conda, ... turn or project gradients first; without `beside`, Shampoo's factor of a square weight.
    A zero in such state would reach other weights: SOAP divides by the root of it."""
    state = {"momentum_buffer": torch.rand(16, 16)} | ({} if beside is None else {beside: object()})
    turned = {"pre_cond_0", "exp_avg_sq"} if beside else {"pre_cond_0"}
    state |= {name: torch.rand(16, 16) for name in turned}
    before = {name: state[name].clone() for name in turned}

    def pruner_of(score: str) -> tuple[sc.Pruner, nn.Linear]:
        layer = nn.Linear(16, 16, bias=False)
        optimizer = Coded(layer.parameters(), lr=0.01)
        optimizer.keep = lambda own, _: own.update(state)
        pruner = sc.Pruner(layer, optimizer, score=score, sparsity=0.5, every=1, only="*")
        layer.weight.grad = torch.randn(16, 16)
        optimizer.step()
        return pruner, layer

    pruner, layer = pruner_of("magnitude")
    pruner.step()
    assert zeros_of(pruner, layer) == 128
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    if beside is None:
        assert bool((state["momentum_buffer"][~pruner.masks["weight"]] == 0).all())  # type: ignore[index]
        return
    message = rf"Coded keeps its moments in another basis than the weights \(by '{beside}'\), .* work here: .*magnitude"
    with pytest.raises(FactError, match=message):
        pruner_of("variance")[0].step()


class Normed(torch.optim.SGD):
    """SGD whose step of a tensor has length lr, as LAMB and StableAdamW scale theirs."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=self.param_groups[0]["lr"])
        return loss


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize("kind", [Normed, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SGD])
def test_pruned_weights_do_not_count_in_steps_that_depend_on_whole_tensors(kind: Any, by_closure: bool) -> None:
    def run(by_hand: bool) -> tuple[nn.Linear, sc.Pruner]:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8, bias=False)
        optimizer = kind(layer.parameters(), lr=0.1)
        pruner = sc.Pruner(layer, optimizer, score="magnitude", sparsity=0.5, every=1, only="*")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (layer(torch.randn(4, 8)) - 1).square().sum()
            loss.backward()
            if by_hand:
                pruner.mask_gradients()
            return loss

        for _ in range(4):
            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            pruner.step()
        return layer, pruner

    (layer, pruner), (other, _) = run(False), run(True)
    assert torch.equal(layer.weight, other.weight)
    gone = layer.weight.grad[~pruner.masks["weight"]]  # type: ignore[index]
    assert bool(gone.any()) == (kind is torch.optim.SGD)  # a pass over the gradients is spared where it changes nothing


def test_rigl_keeps_the_gradients_of_pruned_weights(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(8, 8, bias=False)
    optimizer = Normed(layer.parameters(), lr=0.1)
    pruner = sc.Pruner(layer, optimizer, score="magnitude", sparsity=0.5, every=1, regrow="gradient", until=3, only="*")
    for _ in range(4):
        layer.weight.grad = torch.randn(8, 8)
        optimizer.step()
        pruner.step()
    assert bool(layer.weight.grad.all())  # type: ignore[union-attr]
    assert "The step of Normed may depend on all gradients of a tensor" in caplog.text


def heavy(state: dict[str, Any], parameter: Tensor, *more: str) -> None:
    """heavyball's state: a dict for each view of a parameter, with names that tell which transform made a number."""
    inner = state.setdefault(0, {"step": torch.tensor(0)})  # type: ignore[call-overload]
    for name in ("exp_avg_0", "exp_avg_sq_0", *more):
        inner.setdefault(
            f"update_by_adam_{name}", torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1))
        )
    inner["step"] += 1


def test_state_in_dicts_inside_is_read_and_zeroed() -> None:
    layer, optimizer, pruner = coded(heavy, score="bitter8", sparsity=0.5, every=1)
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    optimizer.step()
    inner = optimizer.state[layer.weight][0]
    plain = {
        name.split("_", 3)[-1].removesuffix("_0"): value.clone() for name, value in inner.items() if name != "step"
    }
    weight = layer.weight.detach().clone()
    pruner.step()
    facts = {"weight": weight, "exp_avg": plain["exp_avg"], "step": torch.tensor(1.0).double(), "beta1": 0.9}
    scores = resolve("bitter8")(**facts)
    assert scores[pruner.masks["weight"]].min() >= scores[~pruner.masks["weight"]].max()
    for name in ("update_by_adam_exp_avg_0", "update_by_adam_exp_avg_sq_0"):
        assert torch.equal(inner[name] != 0, pruner.masks["weight"])


def test_dicts_inside_with_another_basis_are_left_alone() -> None:
    def soap(state: dict[str, Any], parameter: Tensor) -> None:
        heavy(state, parameter, "Q_3")

    layer, optimizer, pruner = coded(soap, score="magnitude", sparsity=0.5, every=1)
    layer.weight.grad = torch.randn(24, 16)
    optimizer.step()
    pruner.step()
    assert bool(optimizer.state[layer.weight][0]["update_by_adam_exp_avg_0"].all())


def test_state_of_aggmo_is_zeroed() -> None:
    """A momentum for each beta."""
    layer, optimizer, pruner = coded(
        lambda state, parameter: state.setdefault("averages", {0.0: torch.ones(24, 16), 0.9: torch.ones(24, 16)}),
        score="magnitude", sparsity=0.5, every=1,
    )  # fmt: skip
    layer.weight.grad = torch.randn(24, 16)
    optimizer.step()
    pruner.step()
    for average in optimizer.state[layer.weight]["averages"].values():
        assert torch.equal(average != 0, pruner.masks["weight"])


def numbered(state: dict[str, Any], parameter: Tensor) -> None:
    """bitsandbytes' keys: codes, a table of values and the largest value of each 256."""
    if "state1" in state:
        return
    for number in (1, 2):
        size = (2, *parameter.shape) if number == 1 else parameter.shape  # AdEMAMix stacks two averages
        state[f"state{number}"] = torch.randint(1, 256, size, dtype=torch.uint8)
        state[f"qmap{number}"] = torch.linspace(0, 1, 256)
        state[f"absmax{number}"] = torch.rand(2, 2) if number == 1 else torch.rand(2)


def test_numbered_state_of_bitsandbytes_is_read_and_zeroed() -> None:
    layer, optimizer, pruner = coded(numbered)
    optimizer.optimizer_name = "ademamix"  # type: ignore[attr-defined]
    optimizer.step()
    state = optimizer.state[layer.weight]
    before = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    variance = before["qmap2"][before["state2"].int()].flatten()
    variance *= before["absmax2"].repeat_interleave(256)[:384]
    score = layer.weight.detach().abs().flatten() * variance.sqrt().sqrt()
    pruner.step()
    mask = pruner.masks["weight"]
    assert torch.equal(mask.flatten(), score >= score.sort().values[192])
    assert bool((state["state2"][~mask] == 0).all())
    assert bool((state["state1"][:, ~mask] == 0).all())
    assert all(torch.equal(state[f"state{n}"][..., mask], before[f"state{n}"][..., mask]) for n in (1, 2))


def test_stacked_floats_of_bitsandbytes_are_zeroed() -> None:
    def keep(state: dict[str, Any], parameter: Tensor) -> None:
        state.setdefault("state1", torch.ones(2, *parameter.shape))
        state.setdefault("state2", torch.ones(parameter.shape))

    layer, optimizer, pruner = coded(keep)
    optimizer.optimizer_name = "ademamix"  # type: ignore[attr-defined]
    optimizer.step()
    pruner.step()
    mask, state = pruner.masks["weight"], optimizer.state[layer.weight]
    assert torch.equal(state["state1"], mask.float().expand(2, -1, -1))
    assert torch.equal(state["state2"], mask.float())


@pytest.mark.filterwarnings("default")  # what torchao and torch.compile say about each other
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao(kind: str) -> None:
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    torch.manual_seed(0)
    layer = nn.Linear(128, 64, bias=False)
    optimizer = getattr(optim, kind)(layer.parameters(), lr=1e-3)
    pruner = sc.Pruner(layer, optimizer, score="bitter8", sparsity=0.5, every=1, only="*")
    for _ in range(3):
        layer.weight.grad = torch.randn(64, 128)
        optimizer.step()
        pruner.step()
    mask = pruner.masks["weight"]
    assert zeros_of(pruner, layer) == 4096
    first, second = (optimizer.state[layer.weight][name].dequantize() for name in ("exp_avg", "exp_avg_sq"))
    assert bool((first[~mask] == 0).all())
    assert float(second[~mask].max()) <= float(second.max()) / 15  # 4 bits have no zero in the table of v
    assert float(second[mask].max()) > 0
    pruner.apply()  # as when a run is resumed
    again = [optimizer.state[layer.weight][name].dequantize() for name in ("exp_avg", "exp_avg_sq")]
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW", "SGD8bit", "Lion8bit", "AdEMAMix8bit"])
def test_bitsandbytes(kind: str) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    layer = nn.Linear(96, 100, bias=False)
    options = {"momentum": 0.9} if kind == "SGD8bit" else {}
    optimizer = getattr(bnb.optim, kind)(layer.parameters(), lr=1e-3, **options)
    score = "variance" if "Ad" in kind else "magnitude"
    pruner = sc.Pruner(layer, optimizer, score=score, sparsity=0.5, every=1, only="*")
    for _ in range(3):
        layer.weight.grad = torch.randn(100, 96)
        optimizer.step()
        state = optimizer.state[layer.weight]
        for number in ("1", "2") if kind == "AdamW8bit" else ():
            codes, table, largest = (state[f"{part}{number}"] for part in ("state", "qmap", "absmax"))
            theirs = bnb.functional.dequantize_blockwise(codes, absmax=largest, code=table, blocksize=256)
            torch.testing.assert_close(decode(codes, table, largest, codes.numel()), theirs)
        pruner.step()
    mask = pruner.masks["weight"]
    assert zeros_of(pruner, layer) == 4800
    for number in ("1", "2"):
        codes = state.get(f"state{number}")
        if codes is not None:
            zero = int((state[f"qmap{number}"] == 0).nonzero()) if f"qmap{number}" in state else 0
            assert bool((codes[..., ~mask] == zero).all())
            assert bool((codes[..., mask] != zero).any())


@pytest.mark.parametrize("score", ["magnitude", "movement"])
def test_a_step_that_calls_its_parents_counts_once(score: str, block: Block) -> None:
    class Mine(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.AdamW(block.parameters())  # from now on torch hooks the step of this class and that of the subclass
    plain = Block()
    plain.load_state_dict(block.state_dict())
    sums = []
    for model, kind in ((block, Mine), (plain, torch.optim.AdamW)):
        optimizer = kind(model.parameters())
        pruner = sc.Pruner(model, optimizer, score=score, sparsity=sc.linear(0.5, begin=0, end=8), every=1)
        torch.manual_seed(0)
        train(model, optimizer, 4, pruner.step)
        assert pruner.report().step == 4
        sums.append(pruner.masks)
    assert all(torch.equal(mask, sums[1][name]) for name, mask in sums[0].items())
