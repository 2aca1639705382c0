"""What the processes of tests/test_sweep.py do: jobs that end in every way, and a program that runs two that wait."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from secateur.errors import SecateurError
from secateur.lab.sweep import Job, Outcomes, Workers

DONE = {"steps": 3, "asked_steps": 3, "quality_name": "perplexity", "quality": 2.0, "sparsity": 0.5, "seconds": 1.0}


def work(how: str, folder: str) -> dict[str, Any]:
    """End as `how` says."""
    began = time.time()
    if how == "bad input":
        raise SecateurError("No such score.")
    if how == "bug":
        raise RuntimeError("shapes differ")
    if how == "killed":
        os._exit(9)
    if how == "waits":
        Path(folder, f"{os.getpid()}.pid").touch()
        time.sleep(600)
    time.sleep(0.2)
    Path(folder, "times").write_text(f"{began} {time.time()}")
    return {**DONE, "steps": 2} if how == "time is up" else DONE


def job(folder: Path, how: str) -> Job:
    """A job that ends so, in a folder of its own."""
    (folder / how).mkdir(parents=True, exist_ok=True)
    return Job(how, folder / how, (how, str(folder / how)))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    both = [Job(name, place, ("waits", str(place))) for name in ("one", "two")]
    Workers(2).run(both, work, Outcomes(2, lambda: None), None)
