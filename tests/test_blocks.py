"""Blocks: gradients of late blocks without running the early ones, and errors that must not be hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.oneshot.blocks import Chain, HiddenStates, find_blocks
from secateur.oneshot.calibration import CalibratedModel
from tests.interrupts import hooks
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
    late = [prunable for prunable in calibrated.prunables if prunable.name.startswith("blocks.2")]
    middle = [prunable for prunable in calibrated.prunables if prunable.name.startswith("blocks.1")]
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


def test_hooks_go_when_the_third_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated, plain = CalibratedModel(Tower(), IDS), nn.Module.register_forward_pre_hook

    def register(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is calibrated.model.blocks[2]:  # type: ignore[index]
            assert hooks(calibrated.model) == 2
            raise KeyboardInterrupt
        return plain(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "register_forward_pre_hook", register)
    with pytest.raises(KeyboardInterrupt):
        find_blocks(calibrated.model, IDS, calibrated.forward, calibrated.prunables)
    assert hooks(calibrated.model) == 0


NO_SHAPE_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    NotImplementedError("no kernel"),
]
SHAPE_ERRORS = [RuntimeError("The size of tensor a (4) must match"), IndexError("index 4"), ValueError("wrong size")]


class FailsOnLarge(nn.Module):
    """Raises an error for more than two rows."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise self.error
        return x


def two_batches(error: Exception) -> Chain:
    return Chain([FailsOnLarge(error)], [torch.ones(2, 3)] * 2, [[((), {})]] * 2, [{}, {}])


@pytest.mark.parametrize("error", NO_SHAPE_ERRORS, ids=lambda error: type(error).__name__)
def test_only_shape_errors_mean_that_batches_cannot_be_merged(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)[:8].replace("[", ".")):
        two_batches(error).merged(1 << 20)


@pytest.mark.parametrize("error", SHAPE_ERRORS, ids=lambda error: type(error).__name__)
def test_batches_stay_apart_after_a_shape_error(error: Exception) -> None:
    assert len(two_batches(error).merged(1 << 20).states) == 2


def cached(error: Exception) -> tuple[HiddenStates, list[Any]]:
    """A cache that is filled, and whose next decision computes a loss that fails without the early block."""
    model = Tower()
    prunables = [prunable for prunable in CalibratedModel(model, IDS).prunables if prunable.name.startswith("blocks.2")]
    losses = iter([lambda: 1.0])

    def first_loss() -> float:
        compute = next(losses, None)
        if compute is None:
            raise error
        return compute()

    states = HiddenStates(list(model.blocks), 1, first_loss)
    with states.from_cache(prunables):
        model(IDS)
    return states, prunables


@pytest.mark.parametrize("error", NO_SHAPE_ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_that_skipped_blocks_do_not_explain_is_raised(error: Exception) -> None:
    states, prunables = cached(error)
    with pytest.raises(type(error), match=str(error)[:8].replace("[", ".")), states.from_cache(prunables):
        pass


@pytest.mark.parametrize(
    "error", [*SHAPE_ERRORS, TypeError("None"), AttributeError("x")], ids=lambda e: type(e).__name__
)
def test_blocks_run_if_the_model_needs_more_than_their_state(error: Exception) -> None:
    states, prunables = cached(error)
    with states.from_cache(prunables):
        assert not states._skippable[2]
