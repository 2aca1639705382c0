"""What is measured while a run trains: the load of other processes, threads by it, parts of a step, callbacks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate", reason="accelerate is not installed")

from secateur.errors import ModelError, StateError
from secateur.lab import checkpoint, monitor
from secateur.lab.config import OPTIMIZERS, Experiment
from secateur.lab.models import language_model
from secateur.lab.monitor import CpuLoad, LoadMeter, Monitor, Stopwatch, cpu_load, threads_for
from secateur.lab.run import render_run, run_headline
from secateur.lab.trainer import Callback, Execution, Trainer

HOW = Execution(cpu=True)
SMALL = Experiment(model="gpt-1x16", batch=4, context=8, steps=4, warmup=1, evaluate_every=2, evaluation=2)


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
    trainer = Trainer(
        replace(SMALL, **({"score": score, "sparsity": 0.5, "every": 2} if score else {})), HOW, None, [events]
    )
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


class FakeNvml:
    """The part of pynvml that the monitor calls, with its names, structures, units and errors."""

    class NVMLError(Exception):
        pass

    class NotSupportedError(NVMLError):
        pass

    def __init__(self, without: str = "") -> None:
        self.without, self.uuids, self.begun = without, [], 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.begun += 1
        if self.without == "driver":
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:  # noqa: N802
        self.uuids.append(uuid)
        if not uuid.startswith("GPU-"):
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=87, memory=19)  # percent of the last sample period

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=10**10, free=6 * 10**9, used=4 * 10**9)

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:  # noqa: N802
        if self.without == "power":
            raise self.NotSupportedError("Not Supported")
        return 412_345  # milliwatts


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FakeNvml]:
    """Puts a fake of pynvml and of one GPU in place."""

    def put(without: str = "") -> FakeNvml:
        fake = FakeNvml(without)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="6f3a-11"))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 10**9)
        return fake

    return put


def watched(seconds: float = 0.1) -> Monitor:
    with Monitor(torch.device("cuda", 0), every=0.01) as found:
        time.sleep(seconds)
    return found


def test_a_gpu_is_sampled_by_its_uuid(nvml: Callable[[str], FakeNvml]) -> None:
    fake = nvml("")
    found = watched()
    assert fake.uuids == ["GPU-6f3a-11"]
    assert found.off is None
    assert found.means() == {"busy": 87.0, "memory_access": 19.0, "memory_bytes": 4e9, "watts": 412.345}
    assert [sample["seconds"] for sample in found.samples] == sorted(sample["seconds"] for sample in found.samples)
    assert found.peak_bytes == 3 * 10**9


def test_a_gpu_that_reports_no_power_is_sampled_all_the_same(nvml: Callable[[str], FakeNvml]) -> None:
    nvml("power")
    assert watched().means().keys() == {"busy", "memory_access", "memory_bytes"}


def test_why_a_gpu_is_not_sampled(nvml: Callable[[str], FakeNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    nvml("driver")
    found = watched(0)
    assert (found.samples, found.off) == ([], "NVML answers: Driver Not Loaded")
    assert found.peak_bytes == 3 * 10**9  # torch knows it without NVML
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert watched(0).off == 'pynvml is not installed: pip install nvidia-ml-py, or "secateur[gpu]"'


def test_the_fake_has_no_name_that_pynvml_lacks() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    for name in vars(FakeNvml):
        if name.startswith("nvml"):
            assert callable(getattr(pynvml, name))
    assert issubclass(pynvml.NVMLError_NotSupported, pynvml.NVMLError)
    assert {field for field, *_ in pynvml.c_nvmlUtilization_t._fields_} == {"gpu", "memory"}
    assert "used" in {field for field, *_ in pynvml.c_nvmlMemory_t._fields_}


def test_the_memory_of_a_run_on_a_cpu() -> None:
    with Monitor(torch.device("cpu"), every=0.01) as found:
        held = torch.ones(1 << 24)  # 64 MB
        time.sleep(0.1)
        del held
    with Monitor(torch.device("cpu")) as later:
        pass
    assert found.peak_bytes >= later.peak_bytes > 1e7
    assert found.samples == []


def test_all_gpus_of_a_run_are_on_its_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    line = '{"step": 1, "loss": 3.0, "lr": 0.1, "sparsity": 0.0, "held_out_loss": 2.0}\n'
    (tmp_path / "metrics.jsonl").write_text(line)
    samples = [{"gpu": gpu, "seconds": n, "busy": 9.0, "memory_access": 5.0 * gpu} for gpu in (0, 1) for n in (1, 2)]
    (tmp_path / "gpu.json").write_text(json.dumps(samples))
    more = {"seen": 9000, "epochs": 3.8, "peak_bytes": 5 * 10**9, "gpu": monitor.means_of(samples)}
    page = render_run(tmp_path, "run", {**SUMMARY, **more})
    assert "<h2>GPU: memory access, %</h2><p>A line for every GPU.</p>" in page
    assert "power" not in page  # which was not sampled
    for cell in ("tokens a second</td><td>1,000", "passes over the data</td><td>3.80", "memory access, %</td><td>2.5"):
        assert cell in page.replace(' class="number"', "")
