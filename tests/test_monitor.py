"""What is measured while a run trains: the load of other processes, threads by it, parts of a step, callbacks."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate", reason="accelerate is not installed")

from secateur.errors import ModelError, StateError
from secateur.lab import checkpoint, monitor
from secateur.lab.config import OPTIMIZERS, Experiment
from secateur.lab.models import language_model
from secateur.lab.monitor import CpuLoad, LoadMeter, Stopwatch, cpu_load, threads_for
from secateur.lab.page import render_run, run_headline
from secateur.lab.trainer import Callback, Execution, Trainer

HOW = Execution(cpu=True)
SMALL = Experiment(model="gpt-1x16", batch=4, context=8, steps=4, warmup=1, every=2, evaluate_every=2, evaluation=2)


@pytest.mark.parametrize(
    ("cpus", "used", "most", "threads"),
    [
        (2, 0.0, 2, 2),
        (2, 0.2, 2, 2),
        (2, 1.0, 2, 1),
        (2, 2.0, 2, 1),  # one thread is the least
        (64, 40.0, 64, 24),
        (64, 0.0, 4, 4),  # never more than torch was given
    ],
)
def test_threads_are_the_idle_cpus(cpus: int, used: float, most: int, threads: int) -> None:
    count, why = CpuLoad(cpus, used).threads(most)
    assert count == threads
    assert why == f"{threads} of {most} torch threads, as {cpus - used:.1f} of {cpus} CPUs are idle"


def test_a_busy_machine_is_warned_of() -> None:
    assert CpuLoad(2, 0.5).warning is None
    assert CpuLoad(4, 3.04).warning == (
        "The machine was busy: other processes used 3.0 of 4 CPUs. Times are unreliable."
    )


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with threads_for(CpuLoad(2, 2.0)) as why:
            assert torch.get_num_threads() == 1
            assert why.startswith("1 of 2 torch threads")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_this_process_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"wall": 100.0, "own": 5.0, "idle": [10.0, 20.0]}
    monkeypatch.setattr(time, "perf_counter", lambda: clocks["wall"])
    monkeypatch.setattr(time, "process_time", lambda: clocks["own"])
    monkeypatch.setattr(monitor, "_idle_seconds", lambda: clocks["idle"])
    meter = LoadMeter()
    clocks.update(wall=110.0, own=13.0, idle=[10.0, 25.0])  # of 20 CPU seconds 8 were ours, 5 idle
    assert meter.load() == CpuLoad(2, 0.7)
    clocks.update(own=500.0)
    assert meter.load().used == 0.0


def test_another_process_is_counted() -> None:
    code = "print('on', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert cpu_load(0.3).used > 0.3
        finally:
            process.kill()


def test_a_stopwatch_times_the_steps_it_is_asked_for() -> None:
    for every, steps in ((0, 0), (1, 6), (3, 2)):
        watch = Stopwatch(torch.device("cpu"), every)
        for step in range(1, 7):
            watch.start(step)
            watch.lap("data")
        assert watch.steps == steps
        assert bool(watch.milliseconds()) == bool(steps)


class Events(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_gradients(self, trainer: Trainer) -> None:
        assert any(p.grad is not None for p in trainer.model.parameters())
        self.seen.append("gradients")

    def before_masks(self, trainer: Trainer) -> None:
        self.seen.append("masks")

    def after_step(self, trainer: Trainer, loss: Tensor, evaluation: dict[str, float] | None) -> None:
        assert loss.isfinite()
        self.seen.append(f"step {trainer.progress.step}{' evaluated' if evaluation else ''}")


@pytest.mark.parametrize("score", [None, "variance"])
def test_callbacks_come_in_order(score: str | None) -> None:
    events = Events()
    trainer = Trainer(replace(SMALL, score=score, sparsity=0.5 if score else 0.0), HOW, None, [events])
    found = trainer.train()
    masks = ["masks"] if score else []
    ends = ["step 1", "step 2 evaluated", "step 3", "step 4 evaluated"]
    assert events.seen == [event for end in ends for event in ("gradients", *masks, end)]
    assert found == trainer.evaluate()
    assert trainer.over


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_keeps_the_state_it_says(name: str) -> None:
    experiment = Experiment(optimizer=name)
    model = language_model("gpt-1x16", 32, 8)
    optimizer = experiment.build_optimizer(model)
    model(torch.zeros(1, 8, dtype=torch.int64)).square().mean().backward()
    optimizer.step()
    weight = model.get_parameter("layers.0.up.weight")
    large = [value for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.ndim]
    assert len(large) == OPTIMIZERS[name].states
    assert all(value.shape == weight.shape for value in large)


def test_running_out_of_memory_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = checkpoint.Checkpoint(tmp_path, 0, False)
    with pytest.raises(torch.OutOfMemoryError), saved._named("model"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(StateError, match="model-0.safetensors is damaged"), saved._named("model"):
        raise RuntimeError("RNG state is wrong size")


@pytest.mark.parametrize("name", ["gpt-0x64", "gpt-2x0", "gpt-2x129", "gpt-2x64x3", "gpt-2x64x0"])
def test_sizes_that_no_gpt_can_have(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} needs at least one layer and a width that its . heads divide"):
        language_model(name, 256, 8)


def test_heads_of_a_small_gpt() -> None:
    for name, heads in {"gpt-1x32": 1, "gpt-1x128": 2, "gpt-1x32x4": 4}.items():
        assert language_model(name, 256, 8).shape.heads == heads


SUMMARY: dict[str, Any] = {
    "quality_name": "perplexity", "quality": 7.4951, "held_out_loss": 2.0, "steps": 450, "asked_steps": 450,
    "budget": "normal", "sparsity": 0.8, "seconds": 9.0, "layers": [{"name": "a.0.up", "numel": 4, "sparsity": 0.8}],
    "breakdown_ms": {"data": 1.0}, "versions": {"torch": "2"}, "hardware": "CPU", "commit": "abc",
    "cpu_load": {"cpus": 2, "used": 1.5},
}  # fmt: skip


def test_the_page_of_a_run_says_its_result(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    lines = '{"step": 1, "loss": 3.0, "lr": 0.1, "sparsity": 0.0}\n{"step": 2, "held_out_loss": 2.0, "sparsity": 0.8}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    page = render_run(tmp_path, "gpt <small>", SUMMARY)
    assert "<h1>80 % gone: perplexity 7.495 after 450 steps</h1>" in page
    assert 'class="warning">The machine was busy: other processes used 1.5 of 2 CPUs.' in page
    assert "gpt &lt;small&gt;" in page
    assert page.count(' title="') == 1  # the one cell of the heat map
    quiet = render_run(tmp_path, "run", {**SUMMARY, "cpu_load": None, "layers": [], "sparsity": 0.0})
    assert "<h1>Dense: perplexity 7.495 after 450 steps</h1>" in quiet
    assert 'class="warning"' not in quiet
    assert run_headline({**SUMMARY, "sparsity": 0.955}).startswith("95.5 % gone: ")
