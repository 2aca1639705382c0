"""A training run that can be killed at any moment: `python -m tests.resume_worker FOLDER STEPS SCORE [LAST]`.

Two steps past LAST it waits to be killed: on a busy machine the signal may come late.

A checkpoint is written after every step, to a temporary name that is then renamed. Nothing in it is pickled.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import secateur as sc
from tests.conftest import Block


def main() -> None:
    folder, steps, score = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    last = int(sys.argv[4]) if sys.argv[4:] else steps
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    schedule = sc.cubic(0.9, begin=3, end=steps - 4)
    pruner = sc.Pruner(model, optimizer, score=score, sparsity=schedule, every=5)
    saved, first = folder / "checkpoint.pt", 1
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        pruner.load_state_dict(state["pruner"])
        torch.set_rng_state(state["random"])
        first = state["step"] + 1
    for step in range(first, steps + 1):
        tokens = torch.randint(0, 10, (4, 6))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens * 7 % 10).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pruner.step()
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"pruner": pruner.state_dict(), "random": torch.get_rng_state()}
        torch.save(state, folder / "checkpoint.tmp")
        os.replace(folder / "checkpoint.tmp", saved)
        print(step, flush=True)
        if step == last + 2:
            time.sleep(60)


if __name__ == "__main__":
    main()
