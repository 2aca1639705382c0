"""Gradients of late blocks without running the early ones: the same numbers, and the early ones really rest."""

from __future__ import annotations

import torch

from secateur.oneshot.calibration import CalibratedModel
from tests.trained import Tower

IDS = torch.randint(0, 17, (4, 9), generator=torch.Generator().manual_seed(0))


def test_early_blocks_run_once_and_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    model = Tower()
    calibrated = CalibratedModel(model, IDS)
    calls = [0, 0, 0]
    for number, block in enumerate(model.blocks):

        def count(*_: object, number: int = number) -> None:
            calls[number] += 1

        block.up.register_forward_hook(count)
    assert calibrated.blocks == list(model.blocks)
    whole = calibrated.gradients({"gradient_max"})
    calls[:] = [0, 0, 0]
    late = [site for site in calibrated.sites if site.name.startswith("blocks.2")]
    middle = [site for site in calibrated.sites if site.name.startswith("blocks.1")]
    for again in range(2):
        found = calibrated.gradients({"gradient_max"}, late)
        assert all(torch.equal(found[s.name]["gradient_max"], whole[s.name]["gradient_max"]) for s in late)
        assert calls == [4 + again, 4 + again, 4 + 6 * again]  # and once, whether leaving blocks out makes a difference
    found = calibrated.gradients({"gradient_max"}, middle)  # what enters it was seen on the way to the last
    assert all(torch.equal(found[s.name]["gradient_max"], whole[s.name]["gradient_max"]) for s in middle)
    assert calls == [6, 11, 16]
    with torch.no_grad():
        middle[0].parameter.mul_(2)
    calibrated.hidden_states.invalidate(middle)
    before = calibrated.gradients({"gradient_max"})
    calls[:] = [0, 0, 0]
    found = calibrated.gradients({"gradient_max"}, late)
    assert calls == [4, 4, 4]
    assert all(torch.equal(found[s.name]["gradient_max"], before[s.name]["gradient_max"]) for s in late)
    calibrated.gradients({"gradient_max"}, middle)
    assert calls == [4, 8, 8]
