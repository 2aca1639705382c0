"""Listening to an optimizer: its own steps count, not the calls of a loop that cannot know which were skipped."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from secateur.clock import Clock
from secateur.facts import Facts, was_skipped


def listen(optimizer: torch.optim.Optimizer, clock: Clock, facts: Facts) -> None:
    """Count the optimizer's steps: a GradScaler may skip one without anybody being told.

    The hooks keep neither clock nor facts alive, so a Pruner nobody holds any more is freed.
    """
    told, known = weakref.ref(clock), weakref.ref(facts)

    def before(optimizer: torch.optim.Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if (facts := known()) is not None and not was_skipped(optimizer):
            # Hooks are handed step's own arguments, the optimizer itself among them.
            closure = next((value for value in (*given, *named.values()) if callable(value)), None)
            facts.accumulate_movement(closure)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        clock, facts = told(), known()
        if clock is not None and facts is not None and not was_skipped(optimizer):
            clock.taken += 1
            facts.stepped = True

    optimizer.register_step_post_hook(after)
    if "movement_sum" in facts.kept:
        optimizer.register_step_pre_hook(before)
