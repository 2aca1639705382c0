"""Every benchmark runs through the command line and leaves a whole record; what is not equal is not compared."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from secateur import optim
from secateur.bench import NAMES, forms, measuring, scale, select, step
from secateur.bench import step as step_forms
from secateur.cli import main
from secateur.lab import record

TOY = {
    "select": "--device cpu --dims 64 --layers 2 --calls 1 --rounds 1",
    "accuracy": "--up-to 100000 --draws 3 --updates 4",
    "step": "--device cpu --dim 32 --layers 2 --calls 2 --rounds 1",
    "train": "--device cpu --tiny --modes eager --methods bitter7-own --repeats 1",
    "pace": "--device cpu --tiny --modes eager --methods bitter7 bitter7-own",
    "scale": "--device cpu --up-to 1000000 --calls 1",
    "probe": "--device cpu --shape tiny --sequences 4 --length 12 --batches 1 2",
    "quality": "--device cpu --model model --text text.txt --context 16 --windows 9 --sparsities 0.5",
    "demo": "--steps 20",
}
KEYS = {
    "select": {"seed", "sparsity", "dtype", "sizes"},
    "accuracy": {"seed", "draws", "updates", "results"},
    "step": {"seed", "dim", "layers", "weights", "bandwidth", "agreement", "milliseconds", "floor_ms", "right"},
    "train": {"seed", "plan", "tokens", "cells"},
    "pace": {"seed", "plan", "tokens", "rows"},
    "scale": {"seed", "sparsity", "dtype", "bandwidth", "sizes"},
    "probe": {"seed", "shape", "prunable", "passes", "recommended", "jobs"},
    "quality": {"seed", "model", "context", "windows", "dense", "cells"},
    "demo": {"seed", "header", "rows", "held_out_loss"},
}
ALWAYS = {"theme", "date", "command", "commit", "hardware", "memory", "versions"}
RATIO = re.compile(r"\d\.\d+x")


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth of a toy may be off; measuring it must not take seconds."""
    monkeypatch.setitem(measuring.COPIED, "cpu", 1 << 20)


@pytest.fixture
def model_and_text(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model and a text in the current folder."""
    from tests import tiny

    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    tiny.llama().save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    Path("text.txt").write_text(" ".join(f"{number} and then some" for number in range(40)), encoding="utf-8")


def bench(name: str, folder: Path) -> dict[str, Any]:
    """A toy run's record."""
    assert main(["bench", name, *TOY[name].split(), "--out", str(folder)]) == 0
    (path,) = folder.iterdir()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("name", list(NAMES))
def test_a_benchmark_writes_a_whole_record(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if name in ("train", "pace", "probe", "quality"):
        pytest.importorskip("transformers", reason="the models come from transformers, which is not installed")
    if name == "quality":
        request.getfixturevalue("model_and_text")
    saved = bench(name, tmp_path)
    printed = capsys.readouterr().out
    assert saved.keys() >= ALWAYS | KEYS[name]
    assert saved["command"] == shlex.join(["secateur", "bench", name, *TOY[name].split()])
    assert saved["versions"].keys() >= {"python", "torch", "secateur"}
    assert str(next(tmp_path.iterdir())) in printed
    if name not in ("accuracy", "probe", "demo"):
        assert RATIO.search(printed)


def test_no_ratio_without_the_right_masks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_off(layers: forms.Layers) -> list[torch.Tensor]:
        masks = forms.secateur(layers)
        masks[0][:2] = ~masks[0][:2]
        return masks

    monkeypatch.setitem(select.FORMS, "secateur", one_off)
    assert not bench("select", tmp_path)["sizes"][0]["right"]
    printed = capsys.readouterr().out
    assert "masks differ" in printed
    assert not RATIO.search(printed)


def test_no_ratio_for_packed_masks_that_swap_two_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = forms.ours

    def swapped(layers: forms.Layers, packed: bool = False) -> Callable[[], list[torch.Tensor]]:
        """The count is exact still; only the comparison with the sort can tell."""
        masks = right(layers, packed)()
        place = int((masks[0][1:] != masks[0][:-1]).nonzero()[0])
        masks[0][place : place + 2] = masks[0][place : place + 2].flip(0)
        return lambda: masks

    monkeypatch.setattr(forms, "ours", swapped)
    size = bench("scale", tmp_path)["sizes"][0]
    assert size["pruned"] == round(0.5 * size["weights"])
    assert not size["right"]
    assert not RATIO.search(capsys.readouterr().out)


def test_no_ratio_for_an_optimizer_that_steps_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hasty(optim.AdamW):
        def __init__(self, weights: Any, *, lr: float, **settings: Any) -> None:
            super().__init__(weights, lr=1.001 * lr, **settings)

    monkeypatch.setattr(step_forms.optim, "AdamW", Hasty)
    saved = bench("step", tmp_path)
    assert not saved["right"]
    assert saved["agreement"]["masked is as dense, zero where masked"]["right"]
    printed = capsys.readouterr().out
    assert "results differ" in printed
    assert not RATIO.search(printed)


def test_no_ratio_for_an_optimizer_that_forgets_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim.AdamW, "set_masks", lambda self, masks: None)
    found = step.agreement(32, 2, torch.device("cpu"))
    assert found["dense is as torch's"]["right"]
    assert not found["masked is as dense, zero where masked"]["right"]
    assert not found["clipped is as torch's on clipped gradients"]["right"]


def test_options_that_cannot_work_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", "--up-to", "5", "--out", str(tmp_path)]) == 2
    assert "smallest size is 1,000,000" in capsys.readouterr().err
    assert main(["bench", "train", "--tiny", "--steps", "5", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "must be a multiple" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["bench", "step", "--device", "cuda"]) == 2
        assert "there is no such device here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "select", "--calls", "0"])
    assert not list(tmp_path.iterdir())


def test_what_is_not_installed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["bench", "train", "--tiny", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "needs transformers: pip install 'secateur[hf]'" in capsys.readouterr().err


def test_the_seven_billion_are_those_of_the_model() -> None:
    assert scale.SIZES[-1] == 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336) == 6_979_321_856
    for size in scale.SIZES:
        taken = sum(rows * width for rows, width in scale.shapes_of(size))
        assert size - 14336 < taken <= size


def test_the_commit_is_told_or_found_or_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SECATEUR_COMMIT", raising=False)
    monkeypatch.setattr(record, "HERE", tmp_path)
    assert record.commit() == "unknown"
    monkeypatch.setenv("SECATEUR_COMMIT", "abc123")
    assert record.commit() == "abc123"


def test_committed_records_carry_what_they_need() -> None:
    committed = list(record.results_folder().glob("*.json"))
    assert committed
    for path in committed:
        found = json.loads(path.read_text())
        assert found.keys() >= ALWAYS, path
        runs = [run["summary"] for run in found.get("runs", [])]  # of the lab, each with its own
        assert all({"versions", "commit", "hardware"} <= run.keys() for run in runs), path
