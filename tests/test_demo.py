"""The demo, shortened: a true table, a page that opens in a browser without network and without complaint."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from secateur.cli import main
from secateur.lab import page
from secateur.lab.corpus import batches, standard_library, windows
from secateur.lab.demo import demo
from secateur.lab.training import Run

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
        assert [snapshot.step for snapshot in run.snapshots] == [10, 24]
    assert dense.loss[-1] < dense.loss[0]
    assert f"Report: {path.resolve()}" in printed


class Collector(HTMLParser):
    """Everything a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data") and value and not value.startswith(("#", "data:")):
                self.fetched.append(f"{tag} {value}")


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
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is installed, so nobody looked at the page (Debian: apt-get install chromium)")
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    quiet += " --disable-component-update --disable-sync --enable-logging=stderr --log-level=0 --window-size=1150,2400"
    picture = tmp_path / "page.png"
    command = [chromium, *quiet.split(), f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    done = subprocess.run([*command, shown[0].as_uri()], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert picture.stat().st_size > 50_000  # an empty page of this size is a tenth of that
    assert "CONSOLE" not in done.stderr
    broken = tmp_path / "broken.html"
    broken.write_text("<script>console.error('seen')</script>")
    again = subprocess.run([*command, broken.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    assert "CONSOLE" in again.stderr  # the check above can fail


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
    page.write(tmp_path / "a.html", "one")
    page.write(tmp_path / "a.html", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    assert (tmp_path / "a.html").read_text() == "two"
