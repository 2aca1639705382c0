"""The demo, shortened: a true table, a page that opens in a browser without network and without complaint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from secateur.cli import main
from secateur.files import write
from secateur.integrations.text import standard_library
from secateur.lab.demo import Run, batches, demo, windows
from tests.browser import Collector, open_page

Shown = tuple[Path, str, list[Run]]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A run of 40 steps, what it printed, and where its page is."""
    path = tmp_path_factory.mktemp("demo") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *parts, **_: printed.append(" ".join(map(str, parts))))
        runs = demo(path, steps=40)
    return path, "\n".join(printed), runs


def test_the_table_tells_what_happened(shown: Shown) -> None:
    path, printed, runs = shown
    dense, magnitude, variance = runs
    assert [run.name for run in runs] == ["dense", "magnitude", "variance"]
    assert dense.loss[0] == magnitude.loss[0] == variance.loss[0]  # same weights, same batch
    assert dense.loss[:4] == magnitude.loss[:4]  # nothing is pruned yet
    assert dense.sparsity[-1] == 0
    for run in (magnitude, variance):
        assert run.report is not None
        assert run.report.pruned == round(0.8 * run.report.prunable)
        assert re.search(rf"{run.name} +{run.perplexity:.3f} +80.000\d% +75.82\d\d%", printed)
        assert [snapshot.step for snapshot in run.snapshots] == [10, 20, 30]
    assert dense.loss[-1] < dense.loss[0]
    assert f"Report: {path.resolve()}" in printed


def test_the_page_holds_all_it_needs(shown: Shown) -> None:
    text = shown[0].read_text()
    collector = Collector()
    collector.feed(text)
    assert collector.fetched == []
    assert "script" not in collector.tags
    assert "url(" not in text.replace("url(#", "")
    assert collector.tags.count("figure") == collector.tags.count("svg") == 5
    assert "80.000" in text


def test_the_page_opens_in_a_browser_without_complaint(shown: Shown, tmp_path: Path) -> None:
    size, complaints = open_page(shown[0], tmp_path)
    assert size > 50_000
    assert complaints == []


def test_training_and_held_out_files_are_apart() -> None:
    corpus = standard_library()
    assert corpus.files[0] > corpus.files[1] > 5
    assert corpus.train.numel() > 1_000_000
    assert corpus.held_out.numel() > 50_000
    first = next(batches(corpus.train, 3, 8, seed=1))
    assert torch.equal(first, next(batches(corpus.train, 3, 8, seed=1)))
    assert first.shape == (3, 9)
    assert sum(len(part) for part in windows(corpus.held_out, 4, 8, 10)) == 10


def test_bad_arguments_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", "/no/such/folder/report.html"]) == 2
    assert "There is no folder /no/such/folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--steps", "3"])
    assert "at least 20 steps" in capsys.readouterr().err


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write(tmp_path / "a.html", "one")
    write(tmp_path / "a.html", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    assert (tmp_path / "a.html").read_text() == "two"
