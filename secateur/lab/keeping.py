"""What a run's checkpoints keep beside model and optimizer: how far it is, and its masks."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from secateur.pruner import Pruner
from secateur.shards import whole


class Progress:
    """How far a run is; saved with its checkpoints."""

    def __init__(self) -> None:
        self.step, self.seconds, self.best, self.processes = 0, 0.0, math.inf, 1
        self.gradients: list[float] = []  # of one weight, step by step

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Gathered:
    """A Pruner for Accelerate to keep. It writes what the first process has, so shards are put together before."""

    def __init__(self, pruner: Pruner) -> None:
        self._pruner, self.load_state_dict = pruner, pruner.load_state_dict

    def state_dict(self) -> dict[str, Tensor]:
        return {name: whole(tensor) for name, tensor in self._pruner.state_dict().items()}
