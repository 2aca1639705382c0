"""Stages: their seconds, and progress on stderr only if asked for, with tqdm or without it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import secateur as sc
from secateur import progress
from secateur.progress import Stages

BATCHES = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]


class Bar:
    """Stands in for tqdm's bar."""

    made: ClassVar[list[Bar]] = []
    disable = False

    def __init__(self, **settings: Any) -> None:
        self.settings, self.steps, self.open, self.notes = settings, 0, True, [""]
        Bar.made.append(self)

    def set_postfix_str(self, note: str, refresh: bool) -> None:
        self.notes.append(note)

    def update(self, by: int) -> None:
        self.steps += by

    def close(self) -> None:
        self.open = False


def run(show: bool) -> Stages:
    stages = Stages(torch.device("cpu"), show)
    for _ in range(2):
        with stages.stage("gradients", 3) as tick:
            for _ in range(3):
                tick()
    return stages


def test_nothing_is_printed_unless_asked(capfd: pytest.CaptureFixture[str]) -> None:
    stages = run(show=False)
    sc.prune(torch.nn.Sequential(torch.nn.Linear(8, 8)), BATCHES, only="*")
    assert capfd.readouterr() == ("", "")
    (stage,) = stages.done
    assert stage.name == "gradients"
    assert stage.seconds > 0
    assert stage.peak_bytes is None


def test_a_tqdm_bar_shows_the_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    run(show=True)
    assert [bar.steps for bar in Bar.made] == [3, 3]
    assert not any(bar.open for bar in Bar.made)
    expected = {"total": 3, "initial": 0, "desc": "gradients", "leave": False, "disable": None}
    assert Bar.made[0].settings == expected
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split()[0] for line in shown.err.splitlines()] == ["gradients"] * 2


def test_plain_lines_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr(progress, "LINE_SECONDS", -1.0)
    sc.prune(torch.nn.Sequential(torch.nn.Linear(8, 8)), BATCHES, only="*", progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["gradients", "1/3,"],
        ["gradients", "2/3,"],
        ["gradients", "3/3,"],
    ]
    assert lines[3].startswith("gradients")
    assert lines[3].endswith(" s")


def test_a_continued_bar_begins_where_the_job_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    bar = progress.ProgressBar("training", 9, done=4)
    bar.tick("loss 2.50")
    bar.close()
    assert Bar.made[0].settings["initial"] == 4
    assert Bar.made[0].notes[-1] == "loss 2.50"


def test_lines_where_stderr_is_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    monkeypatch.setattr(progress, "LINE_SECONDS", -1.0)
    bar = progress.ProgressBar("training", 9, done=4)
    bar.tick("loss 2.50")
    assert capsys.readouterr().err.split(maxsplit=1)[1].startswith("5/9, loss 2.50, ")
