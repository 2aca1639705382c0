"""Processes for tests that need processes of their own, forked from one that has imported torch and its companions.

A new interpreter spends two to six seconds of CPU time on these imports; a forked one starts in milliseconds. The
process that forks computes nothing and has no thread of Python, so all begin as a new interpreter would.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",  # the first optimizer step of a process imports it
    "accelerate",
    "transformers",
    "secateur.pruner",
    "secateur.oneshot.prune",
    "hypothesis",
    "pytest",
)  # what is not installed is passed over; nothing here may start CUDA, which cannot be forked


@dataclass(frozen=True)
class Done:
    """How processes ended: their exit codes, and all they have printed."""

    codes: list[int | None]
    said: str

    @property
    def well(self) -> bool:
        return not any(self.codes) and None not in self.codes


def start(module: str, *words: str, log: Path, **environment: str) -> BaseProcess:
    """`python -m module words` in a process of its own, in the root of the clone; `log` gets all it prints.

    It has the caller's environment, and `environment` on top. The process that forks keeps that of whoever came first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = context.Process(target=_run, args=(module, words, log, whole), daemon=True)
    process.start()
    return process


def _run(module: str, words: tuple[str, ...], log: Path, environment: dict[str, str]) -> None:
    import torch

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_ranks(ranks: int, module: str, *words: str, log: Path, seconds: float = 300, **environment: str) -> Done:
    """The same module in several processes, told their ranks as torchrun tells them. One that fails ends all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": f"{port}", "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", **environment}
    started = [start(module, *words, log=log, RANK=f"{rank}", LOCAL_RANK=f"{rank}", **shared) for rank in range(ranks)]
    until = time.monotonic() + seconds
    while any(one.exitcode is None for one in started) and time.monotonic() < until:
        if any(one.exitcode for one in started):
            break
        time.sleep(0.01)
    codes = [one.exitcode for one in started]
    for one in started:
        one.kill()
        one.join()
    return Done(codes, log.read_text(errors="replace") if log.exists() else "")
