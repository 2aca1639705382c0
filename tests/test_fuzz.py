"""A little of `make soak` in every run of the suite: random cases, whose seed a failure prints (tests/fuzzing.py)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from tests import fuzzing, oracle

COUNTS = {"selections": 1500, "recipes": 300, "states": 150, "folders": 24, "commands": 24}
SECONDS = 40.0  # of a target at most, on a machine that is busy


@pytest.mark.parametrize("target", COUNTS)
def test_random_cases_keep_the_promises(target: str) -> None:
    found = fuzzing.fuzz(target, seed=0, count=COUNTS[target], seconds=SECONDS)
    assert len(found) > 1, f"every case of {target} ends alike: {found}"


def test_every_target_is_tried() -> None:
    assert COUNTS.keys() == fuzzing.TARGETS.keys()


def test_a_failure_prints_what_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(draw: fuzzing.Draw) -> str:
        fuzzing.check(draw.random() < 0.8, "as it should not be")
        return "fine"

    monkeypatch.setitem(fuzzing.TARGETS, "broken", breaks)
    with pytest.raises(
        fuzzing.Broken, match=r"--only broken --seed 3 --case \d+: AssertionError: as it should not be"
    ) as first:
        fuzzing.fuzz("broken", seed=3, count=100)
    number = int(str(first.value).partition("--case ")[2].partition(":")[0])
    with pytest.raises(fuzzing.Broken):
        fuzzing.one("broken", 3, number)


def test_other_random_numbers_are_left_alone() -> None:
    state = torch.random.get_rng_state()
    fuzzing.fuzz("selections", seed=1, count=3)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("seed", range(20))
def test_the_sort_of_the_fuzzer_is_the_oracles(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.choice(np.array([-1.0, -0.0, 0.0, 2.0, math.inf, -math.inf], dtype=np.float32), (5, 9))
    alive = rng.random((5, 9)) > 0.3
    rows = np.repeat(np.arange(5), 9)
    found = fuzzing.lowest_go(scores.reshape(-1), alive.reshape(-1), rows, np.full(5, 4))
    expected = oracle.select_groups(torch.from_numpy(scores), 4, torch.from_numpy(alive))
    assert np.array_equal(found.reshape(5, 9), expected.numpy())
