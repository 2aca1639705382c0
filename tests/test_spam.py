"""SPAM: what it clips, when it starts over, how the learning rate returns, and that nothing is counted twice."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import ScheduleError
from secateur.kernels.reference import clip
from secateur.optim import HISTORY, PRESETS, Spam, as_spam, clips, hold, is_cold, resets, soften, warmth


def test_the_papers_settings_and_those_of_adamwprune() -> None:
    assert as_spam("paper") == Spam() == Spam(theta=5000, every=500, warmup=150, spike=None)
    published = {"quiet": 20, "floor": 0.01, "clip_unseen": True, "restart_bias": False, "warm_decay": False}
    assert as_spam("paper") == Spam(**published)  # type: ignore[arg-type]
    theirs = {"quiet": 0, "floor": 0.001, "clip_unseen": False, "restart_bias": True, "warm_decay": True}
    assert as_spam("seeds") == as_spam("adamwprune") == Spam(theta=50, every=1000, warmup=1000, spike=2.0, **theirs)  # type: ignore[arg-type]
    assert as_spam({"theta": 10}) == Spam(theta=10)
    assert as_spam(None) is None
    assert as_spam(True) == Spam()


@pytest.mark.parametrize("wanted", ["papers", 3, {"beta": 1}, [1]])
def test_other_settings_are_refused(wanted: object) -> None:
    with pytest.raises(ScheduleError, match="spam must be 'paper', 'adamwprune', a secateur.optim.Spam"):
        as_spam(wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"theta": -1}, {"every": -5}, {"warmup": -1}, {"spike": 0.0}])
def test_negative_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ScheduleError, match="must not be negative"):
        Spam(**settings)  # type: ignore[arg-type]


def test_a_warmup_that_never_ends_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the learning rate would never recover"):
        Spam(every=100, warmup=101)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quiet": -1}, "quiet must be a number of steps"),
        ({"floor": 0.0}, "floor a factor above 0"),
        ({"floor": 1.5}, "floor a factor above 0"),
        ({"quiet": 20, "every": 20, "warmup": 5}, "nothing would ever be clipped"),
        ({"quiet": 2.5}, "whole numbers of steps"),
        ({"every": 7.5, "warmup": 1}, "whole numbers of steps"),
        ({"theta": "5000"}, "numbers for theta"),
        ({"theta": float("nan")}, "numbers for theta"),
        ({"spike": "2"}, "numbers for theta, floor and spike"),
        ({"clip_unseen": 1}, "must be True or False"),
        ({"restart_bias": None}, "must be True or False"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        Spam(**settings)  # type: ignore[arg-type]
    assert Spam(theta=0, every=20, warmup=5)  # without clipping any interval will do


def test_gradients_are_held_to_the_root_of_theta_v() -> None:
    gradient = torch.tensor([3.0, -3.0, 0.5, -0.5, 7.0])
    second = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    clipped = clip(gradient, second, theta=4.0)
    assert clipped.tolist() == [2.0, -2.0, 0.5, -0.5, 7.0]  # where v is zero there is no limit
    assert clip(gradient, second, theta=4.0, unseen=0.0).tolist() == [2.0, -2.0, 0.5, -0.5, 0.0]
    assert gradient[0] == 3.0


def test_moments_are_reset_before_every_step_whose_number_the_interval_divides() -> None:
    spam = Spam(every=5, warmup=2, quiet=1)
    assert [taken + 1 for taken in range(16) if resets(spam, taken)] == [5, 10, 15]
    assert not any(resets(Spam(every=0), taken) for taken in range(2000))


def test_nothing_is_clipped_in_the_quiet_steps() -> None:
    clipping = [taken + 1 for taken in range(1100) if clips(Spam(), taken)]
    assert clipping == [*range(20, 500), *range(520, 1000), *range(1020, 1101)]
    assert [taken + 1 for taken in range(40) if clips(Spam(every=0, warmup=0), taken)] == [*range(20, 41)]
    assert not any(clips(Spam(theta=0), taken) for taken in range(100))
    assert all(clips(PRESETS["adamwprune"], taken) for taken in range(2100))


def test_the_learning_rate_returns_along_a_cosine() -> None:
    spam = Spam(every=10, warmup=4, quiet=1)
    factors = [warmth(spam, taken) for taken in range(30)]
    assert factors[:9] == [1.0] * 9  # before the first reset only the user's own warm-up applies
    expected = [1 - 0.99 * 0.5 * (1 + math.cos(math.pi * age / 5)) for age in range(4)]
    assert factors[9:13] == pytest.approx(expected, abs=1e-15)
    assert factors[9] == pytest.approx(0.01)
    assert factors[19:23] == factors[9:13]
    assert factors[13:19] == [1.0] * 6


def test_moments_are_cold_after_a_reset_and_not_for_ever() -> None:
    spam = Spam(every=10, warmup=4, quiet=1)
    assert [taken for taken in range(25) if is_cold(spam, taken)] == [10, 11, 12, 13, 20, 21, 22, 23]
    assert hold(PRESETS["paper"]) == 150
    assert hold(PRESETS["adamwprune"]) == 500
    warm = [taken for taken in range(999, 2001) if not is_cold(PRESETS["adamwprune"], taken)]
    assert warm[0] == 999
    assert warm[1] == 1500


def test_a_norm_that_stands_out_shrinks_the_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    spam, norms = Spam(spike=3.0), torch.zeros(HISTORY)
    quiet = [1.0 + 0.01 * (step % 5) for step in range(12)]
    for taken, norm in enumerate(quiet):
        assert soften(spam, norms, torch.tensor(norm), taken).tolist() == [1.0, 1.0]
    for name in ("item", "tolist", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host looked at the device"))
    found = soften(spam, norms, torch.tensor(2.0), len(quiet))
    blind = soften(spam, norms, torch.tensor(torch.inf), len(quiet) + 1)
    monkeypatch.undo()
    assert found.tolist() == pytest.approx([0.5, 0.9])
    assert blind.tolist() == pytest.approx([0.5, 0.9])
    assert norms.isfinite().all()
    assert float(norms[len(quiet)]) == 2.0


def test_only_the_last_hundred_norms_are_remembered() -> None:
    spam, norms = Spam(spike=3.0), torch.zeros(HISTORY)
    for taken in range(HISTORY + 3):
        soften(spam, norms, torch.tensor(float(taken)), taken)
    assert sorted(norms.tolist()) == [float(number) for number in range(3, HISTORY + 3)]


class Published:
    """The step of the paper's authors (github.com/TianjinYellow/SPAM-Optimizer, commit e8185fb), stated anew in fp64.

    All momentum kept (density 1), as in their runs. Steps are counted from one.
    """

    def __init__(self, rate: float, interval: int, warmup: int, theta: float = 5000.0, quiet: int = 20) -> None:
        self.rate, self.interval, self.warmup, self.theta, self.quiet = rate, interval, warmup, theta, quiet
        self.number = 0
        self.resets: list[int] = []
        self.shares: list[float] = []  # of the entries, how many each step clipped

    def step(self, weight: Tensor, gradient: Tensor) -> Tensor:
        self.number += 1
        if self.number == 1:
            self.first, self.second = torch.zeros_like(weight), torch.zeros_like(weight)
        if self.number % self.interval == 0:
            self.first, self.second = torch.zeros_like(weight), torch.zeros_like(weight)
            self.resets.append(self.number)
        spiked = gradient**2 > self.theta * self.second
        if self.number % self.interval < self.quiet:
            spiked = torch.zeros_like(spiked)
        gradient = torch.where(spiked, gradient.sign() * (self.theta * self.second).sqrt(), gradient)
        self.shares.append(float(spiked.double().mean()))
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        size = self.rate * math.sqrt(1 - 0.999**self.number) / (1 - 0.9**self.number)
        return weight - size * self.scale() * self.first / (self.second.sqrt() + TINY)

    def scale(self) -> float:
        age = self.number - self.resets[-1] if self.resets else self.warmup
        return 1 - 0.99 * (1 + math.cos(math.pi * age / (self.warmup + 1))) / 2 if age < self.warmup else 1.0


TINY = 1e-30  # the authors add eps before the bias correction, the paper and torch after it: here it must not matter


def spiky(weight: Tensor, step: int, generator: torch.Generator) -> Tensor:
    """Gradients of a noisy quadratic. Now and then some entries are a thousand times as large; the last eight get none
    until step 30, and every fifth entry is rarely reached at all."""
    gradient = weight + 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    if step % 7 == 3:
        gradient[torch.rand(weight.shape, generator=generator) < 0.05] *= 1000
    gradient[::5] *= step % 11 == 5
    gradient[-8:] *= step >= 30
    return gradient


def clipped_share(optimizer: sc.optim.AdamW, weight: nn.Parameter, before: Tensor) -> float:
    """Of the entries, how many the last step clipped, by what it added to the first moment."""
    moment = optimizer.state[weight]["exp_avg"]
    assert weight.grad is not None
    return float((((moment - 0.9 * before) / 0.1 - weight.grad).abs() > 1e-9 * weight.grad.abs()).double().mean())


@pytest.mark.parametrize(("interval", "warmup"), [(40, 15), (50, 50), (500, 150)])
def test_the_papers_preset_is_the_authors_step(interval: int, warmup: int) -> None:
    """120 steps in fp64 with spikes, weights, both moments and the share clipped in each step."""
    torch.manual_seed(5)
    weight = nn.Parameter(torch.randn(200, dtype=torch.float64))
    theirs, published = weight.detach().clone(), Published(1e-2, interval, warmup)
    spam = replace(PRESETS["paper"], every=interval, warmup=warmup)
    ours = sc.optim.AdamW([weight], lr=1e-2, eps=TINY, weight_decay=0.0, spam=spam)
    generators = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)]
    shares = []
    for step in range(1, 121):
        weight.grad = spiky(weight.detach(), step, generators[0])
        fresh = step == 1 or resets(spam, step - 1)
        before = torch.zeros_like(theirs) if fresh else ours.state[weight]["exp_avg"].clone()
        ours.step()
        shares.append(clipped_share(ours, weight, before))
        theirs = published.step(theirs, spiky(theirs, step, generators[1]))
        state = ours.state[weight]
        found = weight.detach(), state["exp_avg"], state["exp_avg_sq"]
        for mine, wanted in zip(found, (theirs, published.first, published.second), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)  # products in another order
    assert shares == published.shares
    assert shares[:19] == [0.0] * 19
    assert max(shares[20:]) > 0.03
    if interval == 40:
        assert published.resets == [40, 80, 120]
        assert shares[39:59] == [0.0] * 20
        assert max(shares[59:79]) > 0.03


@pytest.mark.parametrize(("preset", "share"), [("paper", 0.0), ("adamwprune", 0.85)])
def test_how_much_the_second_step_clips(preset: str, share: float) -> None:
    """After one step v is a thousandth of g^2. The paper waits until it has seen 20 gradients; AdamWPrune does not, and
    its theta of 50 leaves the second gradient 0.22 of the first."""
    weight = nn.Parameter(torch.zeros(20000, dtype=torch.float64))
    optimizer = sc.optim.AdamW([weight], spam=preset)
    for _ in range(2):
        before = optimizer.state[weight]["exp_avg"].clone() if optimizer.state else torch.zeros_like(weight)
        weight.grad = torch.randn(20000, dtype=torch.float64)
        optimizer.step()
    assert clipped_share(optimizer, weight, before) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(("preset", "kept"), [("paper", 0.9**40), ("adamwprune", None)])
def test_the_papers_warm_up_scales_the_update_and_not_weight_decay(preset: str, kept: float | None) -> None:
    spam = replace(PRESETS[preset], every=30, warmup=10)
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = sc.optim.AdamW([weight], lr=0.1, weight_decay=1.0, spam=spam)
    for _ in range(40):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    factors = [warmth(spam, taken) for taken in range(40)]
    expected = math.prod(1 - 0.1 * factor for factor in factors) if kept is None else kept
    assert weight.tolist() == pytest.approx([expected] * 3, rel=1e-12)


def test_weights_that_come_back_are_not_clipped_to_zero() -> None:
    """A regrown weight has v = 0, where the published rule clips any gradient to zero until the next reset."""
    layer = nn.Linear(16, 16, bias=False)
    optimizer = sc.optim.AdamW(layer.parameters(), lr=1e-2, spam="paper")
    settings = {"score": "magnitude", "sparsity": 0.5, "every": 12, "regrow": "random", "drop": 0.5, "until": 60}
    pruner = sc.Pruner(layer, optimizer, **settings)  # type: ignore[arg-type]
    for _ in range(29):
        layer.weight.grad = torch.randn(16, 16)
        optimizer.step()
        pruner.step()
    assert [update.grown > 0 for update in pruner.updates] == [False, True]
    assert bool((layer.weight.detach()[pruner.masks["weight"]] != 0).all())
    assert copy.deepcopy(optimizer)._regrows
