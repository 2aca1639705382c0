"""SPAM: what it clips, when it starts over, how the learning rate returns, and that nothing is counted twice."""

from __future__ import annotations

import math

import pytest
import torch

from secateur.errors import ScheduleError
from secateur.kernels.reference_steps import clip
from secateur.spam import HISTORY, PRESETS, Spam, as_spam, hold, is_cold, resets, soften, warmth


def test_the_papers_settings_and_those_of_the_seeds() -> None:
    assert as_spam("paper") == Spam() == Spam(theta=5000, every=500, warmup=150, spike=None)
    assert as_spam("seeds") == Spam(theta=50, every=1000, warmup=1000, spike=2.0)
    assert as_spam({"theta": 10}) == Spam(theta=10)
    assert as_spam(None) is None
    assert as_spam(True) == Spam()


@pytest.mark.parametrize("wanted", ["papers", 3, {"beta": 1}, [1]])
def test_other_settings_are_refused(wanted: object) -> None:
    with pytest.raises(ScheduleError, match="spam is one of 'paper', 'seeds'"):
        as_spam(wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"theta": -1}, {"every": -5}, {"warmup": -1}, {"spike": 0.0}])
def test_negative_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ScheduleError, match="must not be negative"):
        Spam(**settings)  # type: ignore[arg-type]


def test_a_warmup_that_never_ends_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the learning rate would never return"):
        Spam(every=100, warmup=101)


def test_gradients_are_held_to_the_root_of_theta_v() -> None:
    gradient = torch.tensor([3.0, -3.0, 0.5, -0.5, 7.0])
    second = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    clipped = clip(gradient, second, theta=4.0)
    assert clipped.tolist() == [2.0, -2.0, 0.5, -0.5, 7.0]  # nothing is known where v is zero
    assert gradient[0] == 3.0


def test_it_starts_over_every_so_many_steps_and_not_at_the_first() -> None:
    spam = Spam(every=5, warmup=2)
    assert [taken for taken in range(16) if resets(spam, taken)] == [5, 10, 15]
    assert not any(resets(Spam(every=0), taken) for taken in range(2000))


def test_the_learning_rate_returns_along_a_cosine() -> None:
    spam = Spam(every=10, warmup=4)
    factors = [warmth(spam, taken) for taken in range(30)]
    assert factors[:10] == [1.0] * 10  # before the first reset the user's own warm-up rules
    expected = [0.5 * (1 - math.cos(math.pi * step / 5)) for step in (1, 2, 3, 4)]
    assert factors[10:14] == expected
    assert factors[20:24] == expected
    assert all(0 < factor < 1 for factor in expected)
    assert factors[14:20] == [1.0] * 6


def test_moments_are_cold_after_a_reset_and_not_for_ever() -> None:
    spam = Spam(every=10, warmup=4)
    assert [taken for taken in range(25) if is_cold(spam, taken)] == [11, 12, 13, 14, 21, 22, 23, 24]
    assert hold(PRESETS["paper"]) == 150
    assert hold(PRESETS["seeds"]) == 500
    warm = [taken for taken in range(1000, 2001) if not is_cold(PRESETS["seeds"], taken)]
    assert warm[0] == 1000
    assert warm[1] == 1501


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
