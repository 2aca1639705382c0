"""Ctrl-C at any line of the package, and weights compared to the bit."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import secateur

HERE = str(Path(secateur.__file__).parent)


def lines_of(work: Callable[[], Any], stop: int | None = None) -> int:
    """How many lines of the package some work takes; at the line `stop` it is interrupted, as by Ctrl-C."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        if event == "line":
            count += 1
            if count == stop:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def unharmed(model: nn.Module, work: Callable[[nn.Module], Any], stops: int) -> int:
    """Interrupt some work on a model at so many lines drawn from all, the last ones among them, and check that its
    weights, hooks and modes of torch are as they were. Returns how often it was interrupted: sometimes work takes a few
    lines fewer than counted."""
    work(copy.deepcopy(model))  # the first time takes more lines
    before, lines, raised = bits(model), lines_of(lambda: work(copy.deepcopy(model))), 0
    draw = random.Random(0)
    for stop in [*(draw.randrange(1, lines) for _ in range(stops)), *range(lines - stops // 2, lines)]:
        mine = copy.deepcopy(model)
        try:
            lines_of(lambda: work(mine), stop)  # noqa: B023
        except KeyboardInterrupt:
            raised += 1
            assert modes() == (0, 0, True), (stop, modes())
            assert hooks(mine) == 0, stop
            assert all(torch.equal(now, then) for now, then in zip(bits(mine), before, strict=True)), stop
    return raised


def modes() -> tuple[int, int, bool]:
    """Active function modes, active dispatch modes, and whether gradients are enabled."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), torch.is_grad_enabled()


def hooks(model: nn.Module) -> int:
    """How many forward hooks the modules of a model have, and hooks for gradients its parameters."""
    on_modules = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
    return on_modules + sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())


def bits(model: nn.Module) -> list[Tensor]:
    """A copy of all weights, as integers: -0.0 is not 0.0."""
    return [parameter.detach().clone().view(torch.int32) for parameter in model.parameters()]
