"""Every benchmark runs through the command line and leaves a whole record; what is not equal is not compared."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from secateur import optim
from secateur.bench import NAMES, measuring, scale, select, step
from secateur.cli import bench as cli_bench
from secateur.cli import main
from secateur.lab import record

TOY = {
    "select": "--device cpu --dims 64 --layers 2 --calls 1 --rounds 1",
    "accuracy": "--up-to 100000 --draws 3 --updates 4",
    "step": "--device cpu --dim 32 --layers 2 --calls 2 --rounds 1",
    "train": "--device cpu --tiny --modes eager --scores bitter7 --optimizers secateur --repeats 1",
    "pace": "--device cpu --tiny --modes eager --scores variance",
    "scale": "--device cpu --up-to 1000000 --calls 1",
    "probe": "--device cpu --shape tiny --sequences 4 --length 12 --batches 1 2",
    "quality": "--device cpu --model model --text text.txt --context 16 --windows 9 --sparsity 0.5",
    "decode": "--device cpu --shapes 64x96 --sparsity 0.5 --calls 5",
    "patterns": "--device cpu --model model --text text.txt --models pruned --context 16 --windows 6 --sparsity 0.5"
    " --patterns 2:4 --tokens 3",
    "demo": "--steps 20",
}
KEYS = {
    "select": {"seed", "sparsity", "dtype", "scores", "sizes"},
    "accuracy": {"seed", "draws", "updates", "results"},
    "step": {
        "seed",
        "sparsity",
        "dim",
        "layers",
        "weights",
        "bandwidth",
        "agreement",
        "milliseconds",
        "floor_ms",
        "right",
    },
    "train": {"seed", "plan", "tokens", "cells"},
    "pace": {"seed", "plan", "tokens", "rows"},
    "scale": {"seed", "sparsity", "dtype", "scores", "bandwidth", "sizes"},
    "probe": {"seed", "shape", "prunable", "passes", "recommended", "jobs"},
    "quality": {"seed", "model", "context", "windows", "dense", "cells"},
    "decode": {"kernel", "calls", "cells"},
    "patterns": {"seed", "model", "text", "context", "windows", "kernel", "cells"},
    "demo": {"seed", "header", "rows", "held_out_loss"},
}
ALWAYS = {"theme", "date", "command", "commit", "hardware", "memory", "versions"}
RATIO = re.compile(r"(?<!bar )\d\.\d+x")  # but for the bars in the headers


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


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    from secateur.lab import demo

    monkeypatch.setattr(demo, "DENSE", replace(demo.DENSE, model="gpt-1x32", batch=4, evaluation=8))
    monkeypatch.setattr(demo, "GENERATED", 20)


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
    if name in ("train", "pace", "probe", "quality", "patterns"):
        pytest.importorskip("transformers", reason="the models come from transformers, which is not installed")
    if name in ("quality", "patterns"):
        request.getfixturevalue("model_and_text")
    if name == "demo":
        request.getfixturevalue("small_demo")
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
    right = select.ours

    def one_off(case: select.Case, packed: bool = False) -> Callable[[], list[torch.Tensor]]:
        masks = right(case, packed)()
        if not packed:
            masks[0][:2] = ~masks[0][:2]
        return lambda: masks

    monkeypatch.setattr(select, "ours", one_off)
    size = bench("select", tmp_path)["sizes"][0]
    assert size["agrees"] == {select.OURS: False, select.PACKED: True}
    assert not size["right"]
    printed = capsys.readouterr().out
    assert "masks differ" in printed
    assert not RATIO.search(printed)


def test_no_ratio_for_packed_masks_that_swap_two_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = select.ours

    def swapped(case: select.Case, packed: bool = False) -> Callable[[], list[torch.Tensor]]:
        """The count is still exact; only the comparison with the sort can tell."""
        masks = right(case, packed)()
        place = int((masks[0][1:] != masks[0][:-1]).nonzero()[0])
        masks[0][place : place + 2] = masks[0][place : place + 2].flip(0)
        return lambda: masks

    monkeypatch.setattr(select, "ours", swapped)
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

    monkeypatch.setattr(step.optim, "AdamW", Hasty)
    saved = bench("step", tmp_path)
    assert not saved["right"]
    assert saved["agreement"]["masked is as dense, zero where masked"]["right"]
    printed = capsys.readouterr().out
    assert "results differ" in printed
    assert not RATIO.search(printed)


def test_no_ratio_for_an_optimizer_that_forgets_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim.AdamW, "set_masks", lambda self, masks: None)
    found = step.agreement(step.Setup(32, 2, torch.device("cpu")))
    assert found["dense is as torch's"]["right"]
    assert not found["masked is as dense, zero where masked"]["right"]
    assert not found["clipped is as torch's on clipped gradients"]["right"]


def test_options_that_cannot_work_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", "--up-to", "5", "--out", str(tmp_path)]) == 2
    assert "smallest size is 1,000,000" in capsys.readouterr().err
    assert main(["bench", "train", "--tiny", "--steps", "5", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "must be a multiple" in capsys.readouterr().err
    for given in ("xpu:7", "nonsense", "meta"):
        assert main(["bench", "step", "--device", given]) == 2
        assert f"--device {given}: there is no such device here" in capsys.readouterr().err
    assert main(["bench", "select", "--sparsity", "50", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "Write 0.5 for 50 %" in capsys.readouterr().err
    assert main(["bench", "scale", "--scores", "movement", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "also reads movement_sum. Use bitter1, bitter2, bitter7, fisher" in capsys.readouterr().err
    assert main(["bench", "select", "--scores", "varience", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "Did you mean 'variance'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "select", "--calls", "0"])
    assert not list(tmp_path.iterdir())


def test_what_is_not_installed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["bench", "train", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert 'GPT-2 needs transformers: pip install "secateur[hf]"' in capsys.readouterr().err


def test_the_seven_billion_are_those_of_the_model() -> None:
    assert scale.SIZES[-1] == 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336) == 6_979_321_856
    for size in scale.SIZES:
        taken = sum(rows * width for rows, width in scale.shapes_of(size))
        assert size - 14336 < taken <= size


def test_the_commit_is_stated_or_found_or_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    monkeypatch.delenv("SECATEUR_COMMIT", raising=False)
    home = tmp_path / "package" / "lab"
    home.mkdir(parents=True)
    monkeypatch.setattr(record, "HERE", home)
    assert record.commit() == "unknown"
    git("init", "--initial-branch", "main")
    (home / "record.py").touch()
    assert record.commit() == "unknown"  # a file git does not know: this is the checkout of another project
    git("add", ".")
    git("commit", "--message", "first")
    first = git("rev-parse", "--short=12", "HEAD").strip()
    assert record.commit() == first
    (home / "other.py").touch()
    assert record.commit() == f"{first}+changes"
    git("checkout", "--detach")
    git("commit", "--allow-empty", "--message", "in no branch")
    assert record.commit() == "unknown"
    monkeypatch.setenv("SECATEUR_COMMIT", "abc123")
    assert record.commit() == "abc123"


def test_memory_is_unknown_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert record.memory().endswith(" GiB")
    monkeypatch.delattr(os, "sysconf")
    assert record.memory() == "unknown"


def test_every_benchmark_describes_itself_and_its_example_parses(capsys: pytest.CaptureFixture[str]) -> None:
    for name in NAMES:
        with pytest.raises(SystemExit) as ended:
            main(["bench", name, "--help"])
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        described = importlib.import_module(f"secateur.bench.{name}").__doc__ or ""
        assert described.split()[:6] == printed.partition("\n\n")[2].split()[:6], name
        example = " ".join(printed.partition("Example: ")[2].partition("\n\n")[0].split())
        parser = argparse.ArgumentParser()
        cli_bench.add_options(parser)
        assert example.startswith(f"secateur bench {name} "), name
        assert parser.parse_args(shlex.split(example)[2:]).name == name


def test_one_record_holds_every_score_and_its_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = bench("scale", tmp_path)["sizes"]
    assert [size["score"] for size in sizes] == ["variance", "bitter7"]
    assert all(size["right"] for size in sizes)
    header, rows = scale.table(sizes)
    for column, bar in (("bar 1.6x", 1.6), ("bar 64 MiB", 64)):
        cells = [row[header.index(column)] for row in rows]
        figures = [row[header.index(column) - 1].rstrip("x") for row in rows]
        assert all(
            cell.startswith("met" if float(f) <= bar else "missed") for cell, f in zip(cells, figures, strict=True)
        )
    assert "bar 64 MiB" in capsys.readouterr().out


def test_committed_records_carry_what_they_need() -> None:
    committed = list(record.results_folder().glob("*.json"))
    assert committed
    for path in committed:
        found = json.loads(path.read_text())
        assert found.keys() >= ALWAYS, path
        runs = [run["summary"] for run in found.get("runs", [])]  # of the lab, each with its own
        assert all({"versions", "commit", "hardware"} <= run.keys() for run in runs), path


def test_records_go_to_the_current_folder_but_to_their_place_in_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert record.results_folder().resolve() == tmp_path
    monkeypatch.chdir(record.ROOT / "tests")
    assert record.results_folder() == record.ROOT / "benchmarks" / "results"
