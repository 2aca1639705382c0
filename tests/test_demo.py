"""The demo, shortened: a true table, and a page that opens in a browser without network and without complaint."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from secateur.cli import main
from secateur.files import write
from secateur.integrations.text import standard_library
from secateur.lab import demo as module
from secateur.lab.demo import Run, above_dense, demo, generate, headline
from secateur.lab.models import GPT, GPTShape
from secateur.lab.monitor import CpuLoad
from tests.browser import Collector, open_page

Shown = tuple[Path, str, list[Run]]
BUSY = CpuLoad(cpus=2, used=1.9)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A small model's run of 40 steps on a machine that seems busy, what it printed, and where its page is."""
    path = tmp_path_factory.mktemp("demo") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *parts, **_: printed.append(" ".join(map(str, parts))))
        patch.setattr(module, "cpu_load", lambda: BUSY)
        patch.setattr(module, "DENSE", replace(module.DENSE, model="gpt-2x32", batch=8, evaluation=16))
        patch.setattr(module, "GENERATED", 20)
        runs = demo(path, steps=40)
    return path, "\n".join(printed), runs


def test_the_table_shows_what_happened(shown: Shown) -> None:
    path, printed, runs = shown
    dense, magnitude, variance = runs
    assert [run.name for run in runs] == ["dense", "magnitude", "variance"]
    assert dense.loss[0] == magnitude.loss[0] == variance.loss[0]  # same weights, same batch
    assert dense.loss[:4] == magnitude.loss[:4]  # nothing is pruned yet
    assert dense.sparsity[-1] == 0
    for run in (magnitude, variance):
        assert run.report is not None
        assert run.report.pruned == round(0.8 * run.report.prunable)
        cost = 100 * (run.perplexity / dense.perplexity - 1)
        assert re.search(
            rf"{run.name} +{run.perplexity:.3f} +\{cost:+.1f}% +80.00% +{run.report.model_sparsity:.2%}", printed
        )
        assert [snapshot.step for snapshot in run.snapshots] == [10, 20, 30]
    assert [step for step, _ in dense.held_out] == [25, 40]
    assert dense.loss[-1] < dense.loss[0]
    assert f"Report: {path.resolve()}" in printed
    assert headline(runs) in printed


def test_a_busy_machine_gets_one_thread_and_a_warning(shown: Shown) -> None:
    path, printed, _ = shown
    said = "The machine was busy: other processes used 1.9 of 2 CPUs."
    assert f"1 of {torch.get_num_threads()} torch threads, as 0.1 of 2 CPUs are idle" in printed
    assert said in printed
    assert re.search('class="warning">The machine was busy: ', path.read_text())


def test_a_headline_says_the_result_best_first() -> None:
    losses = {"dense": 2.0, "magnitude": 2.0 + math.log(1.061), "variance": 2.0 + math.log(1.028)}
    gone = {"dense": 0.0, "magnitude": 0.8, "variance": 0.8}
    runs = [Run(name, sparsity=[gone[name]], held_out=[(9, loss)]) for name, loss in losses.items()]
    assert headline(runs) == "80 % gone: +2.8 % perplexity by variance, +6.1 % by magnitude"
    assert above_dense(runs[1], runs[0]) == [(9, pytest.approx(6.1))]


def test_the_page_holds_all_it_needs(shown: Shown) -> None:
    path, _, runs = shown
    text = path.read_text()
    collector = Collector()
    collector.feed(text)
    assert collector.fetched == []
    assert "script" not in collector.tags
    assert "url(" not in text.replace("url(#", "")
    assert f"<h1>{headline(runs)}</h1>" in text
    assert collector.tags.count("pre") == 3  # one text from each model
    assert collector.tags.count("svg") == 3  # the distance from dense, and a histogram for each score
    assert text.count(' title="') == sum(len(run.report.tensors) for run in runs if run.report)  # cells of heat maps


def test_figures_are_legible_on_a_phone(shown: Shown) -> None:
    """Labels of 10 points keep at least 9 pixels where a figure is 320 pixels wide."""
    widths = [float(width) for width in re.findall(r'viewBox="0 0 ([\d.]+) ', shown[0].read_text())]
    assert widths
    assert all(10 * 320 / width > 9 for width in widths)


def test_the_page_opens_in_a_browser_without_complaint(shown: Shown, tmp_path: Path) -> None:
    size, complaints = open_page(shown[0], tmp_path)
    assert size > 50_000
    assert complaints == []


def test_a_model_writes_the_same_text_again() -> None:
    torch.manual_seed(0)
    model = GPT(GPTShape(256, context=8, layers=1, width=16, heads=1))
    before = torch.random.get_rng_state()
    text = generate(model, "def ", context=8, count=20)
    assert text == generate(model, "def ", context=8, count=20) != generate(model, "def ", context=8, count=20, seed=1)
    assert not text.startswith("def ")  # the continuation alone
    assert torch.equal(torch.random.get_rng_state(), before)


def test_training_and_held_out_files_are_apart() -> None:
    corpus = standard_library()
    assert corpus.files[0] > corpus.files[1] > 5
    assert corpus.train.numel() > 1_000_000
    assert corpus.held_out.numel() > 50_000


def test_bad_arguments_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", "/no/such/folder/report.html"]) == 2
    assert "There is no folder /no/such/folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--steps", "3"])
    assert "at least 20 steps" in capsys.readouterr().err


def test_the_smallest_demo_reaches_its_sparsity() -> None:
    """The last mask update of 20 steps comes after the ramp."""
    experiment = replace(module.DENSE, steps=20, score="variance", sparsity=0.8, **module.RAMP)
    ramp = experiment.ramp()
    assert callable(ramp)
    assert ramp(20 // experiment.every * experiment.every) == 0.8


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write(tmp_path / "a.html", "one")
    write(tmp_path / "a.html", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    assert (tmp_path / "a.html").read_text() == "two"
