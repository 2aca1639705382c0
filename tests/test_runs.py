"""Run folders: found, read, put in rows of like runs; unlike ones are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from secateur.errors import ComparisonError
from secateur.lab.config import preset_settings
from secateur.lab.runs import OF_PRESET, baselines, check_fair, differing, read_runs
from tests.run_folders import LOSSES, command, compared, entries, make_run, make_sweep


def test_runs_that_differ_in_their_seed_make_a_row(tmp_path: Path) -> None:
    found = compared(make_sweep(tmp_path, LOSSES))
    assert found.axes == ("score",)
    assert {row.label: [run.seed for run in row.runs] for row in found.rows} == {
        "score=magnitude": [0, 1, 2],
        "score=random": [0, 1, 2],
        "score=variance": [0, 1, 2],
    }
    assert found.shared["lr"] == "0.0003"
    assert "score" not in found.shared
    assert "seed" not in found.shared
    assert compared(tmp_path, ["score", "lr"]).rows[0].label == "score=magnitude, lr=0.0003"


def test_the_baseline_is_the_row_that_is_named(tmp_path: Path) -> None:
    make_sweep(tmp_path, LOSSES)
    found = entries(compared(tmp_path, None, "score=variance"))
    assert [found[f"score={name}"].verdict for name in LOSSES] == ["worse", "baseline", "inconclusive"]
    for wrong, message in (
        ("score=fisher", "--baseline score=fisher: there is no such row. The rows are: score=mag"),
        ("variance", "must name a row by a setting"),
    ):
        with pytest.raises(ComparisonError, match=message):
            compared(tmp_path, None, wrong)


def test_a_baseline_that_names_several_rows_means_the_one_like_it(tmp_path: Path) -> None:
    for sparsity in (0.5, 0.9):
        make_sweep(tmp_path / str(sparsity), LOSSES, sparsity=sparsity)
    make_run(tmp_path / "dense", [(30, 1.0, 1.5, 0.0)], score=None, sparsity=0)
    axes = ["score", "sparsity"]
    rows = compared(tmp_path, axes).rows
    chosen = {
        row.label: base and base.label for row, base in zip(rows, baselines(rows, "score=magnitude"), strict=True)
    }
    assert chosen["score=random, sparsity=0.9"] == "score=magnitude, sparsity=0.9"
    assert chosen["score=random, sparsity=0.5"] == "score=magnitude, sparsity=0.5"
    assert chosen["score=none, sparsity=0"] is None
    assert {base.label for base in baselines(rows, "score=none") if base} == {"score=none, sparsity=0"}
    assert entries(compared(tmp_path, axes, "score=magnitude"))["score=none, sparsity=0"].verdict == "no baseline"


def test_unfair_tables_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(tmp_path, {"magnitude": [2.0]})
    make_run(tmp_path / "other", [(30, 1.0, 1.5, 0.5)], score="variance", lr=1e-3, batch=8)
    code, out, err = command(capsys, tmp_path, "--by", "score")
    assert (code, out) == (2, "")
    assert err == (
        "secateur: These runs differ in more than score: lr (0.0003, 0.001); batch (not set, 8). If that is"
        " intended, say so: --by score,lr,batch. Otherwise leave out the runs that do not belong.\n"
    )
    assert command(capsys, tmp_path, "--by", "score,lr,batch")[0] == 0


def test_without_by_rows_may_differ_in_one_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(tmp_path / "one", {"magnitude": [2.0]})
    make_run(tmp_path / "two" / "lr", [(30, 1.0, 1.5, 0.5)], lr=1e-3)
    assert compared(tmp_path).axes == ("lr",)
    make_run(tmp_path / "three" / "score", [(30, 1.0, 1.5, 0.5)], score="variance")
    code, out, err = command(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert err == (
        "secateur: These runs differ in 2 settings: score (magnitude, variance); lr (0.0003, 0.001). Name the settings"
        " in which rows may differ, --by score,lr, or leave out the runs that do not belong.\n"
    )
    assert command(capsys, tmp_path, "--by", "score,lr")[0] == 0


def test_pruning_settings_of_a_dense_run_do_not_count(tmp_path: Path) -> None:
    make_sweep(tmp_path / "pruned", LOSSES)
    make_run(tmp_path / "dense", [(30, 1.0, 1.5, 0.0)], score=None, sparsity=0, schedule="constant")
    found = compared(tmp_path)
    assert found.axes == ("score", "sparsity", "schedule")
    assert found.rows[0].label == "score=none, sparsity=0, schedule=constant"
    make_run(tmp_path / "late", [(30, 1.0, 1.5, 0.5)], score="variance", schedule="late_cubic", seed=7)
    with pytest.raises(ComparisonError, match=r"in 2 settings: score .*; schedule .*--by score,schedule, or"):
        compared(tmp_path)
    shutil.rmtree(tmp_path / "late")
    make_run(tmp_path / "other", [(30, 1.0, 1.5, 0.0)], score=None, sparsity=0, schedule="constant", lr=1, seed=7)
    with pytest.raises(ComparisonError, match=r"differ in 2 settings: score .*; lr \(0.0003, 1\)"):
        compared(tmp_path)


def test_what_a_preset_sets_is_not_in_the_labels(tmp_path: Path) -> None:
    assert {*OF_PRESET, "budget"} == preset_settings("as-published", "bitter7").keys()
    plain, published = {"preset": None}, {"preset": "as-published", "prunable": "adamwprune", "end": 1.0}
    make_sweep(tmp_path / "a", {"bitter0": [2.0, 2.1]}, **plain, prunable=None, end=0.8)
    make_sweep(tmp_path / "b", {"bitter0": [2.2, 2.3]}, **published)
    axes = ["score", "preset", "prunable", "end"]
    found = [row.label for row in compared(tmp_path, axes).rows]
    assert found == ["score=bitter0, preset=none", "score=bitter0, preset=as-published"]
    make_sweep(tmp_path / "c", {"bitter0": [2.2, 2.3]}, **{**published, "end": 0.9})  # changed beside the preset
    assert compared(tmp_path, axes).rows[1].label == ("score=bitter0, preset=as-published, prunable=adamwprune, end=1")


def test_fairness_by_itself() -> None:
    one, other = {"lr": 1, "seed": 0, "out": "a"}, {"lr": 1.0, "seed": 1, "out": "b"}
    check_fair([one, other], [])
    assert differing([one, {**other, "lr": 2}]) == {"lr": ["1", "2"]}
    with pytest.raises(ComparisonError, match="differ in more than the seed: lr"):
        check_fair([one, {**other, "lr": 2}], [])
    with pytest.raises(ComparisonError, match="No run has a setting 'lrr'. Did you mean 'lr'"):
        check_fair([one], ["lrr"])
    with pytest.raises(ComparisonError, match="cannot differ by seed"):
        check_fair([one, other], ["seed"])


def test_a_seed_counts_once(tmp_path: Path) -> None:
    for name in "ab":
        make_run(tmp_path / name, [(30, 1.0, 1.5, 0.5)])
    with pytest.raises(ComparisonError, match="a and .*b have the same settings and the same seed 0"):
        compared(tmp_path)
    assert len(read_runs([tmp_path / "a", tmp_path / "a"])[0]) == 1  # named twice, read once


def test_different_measures_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [(30, 1.0, 1.5, 0.5)])
    make_run(tmp_path / "b", [(30, 1.0, 0.5, 0.5)], quality_name="accuracy", seed=1)
    with pytest.raises(ComparisonError, match="perplexity .*; accuracy"):
        compared(tmp_path)


def test_unfinished_runs_are_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(tmp_path, LOSSES)
    folder = make_run(tmp_path / "stopped", [(10, 1.0, 9.0, 0.5)], finished=False, lr=1, seed=9)
    code, out, err = command(capsys, tmp_path)
    assert code == 0
    assert err == f"secateur: {folder} is not finished (no summary.json) and is left out\n"
    assert "lr=0.0003" in out  # of the finished ones
    code, _, err = command(capsys, folder)
    assert code == 2
    assert "nothing to compare" in err


def test_folders_that_hold_no_run_are_told(tmp_path: Path) -> None:
    with pytest.raises(ComparisonError, match="There is no run in"):
        read_runs([tmp_path])
    with pytest.raises(ComparisonError, match="There is no folder"):
        read_runs([tmp_path / "none"])
    folder = make_run(tmp_path / "a", [(30, 1.0, 1.5, 0.5)])
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text("{}")  # a saved model's own
    assert [run.folder for run in read_runs([tmp_path])[0]] == [folder]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3')
    with pytest.raises(ComparisonError, match="metrics.jsonl, line 3: not JSON"):
        read_runs([tmp_path])


def test_after_a_resumed_run_the_later_line_counts(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [(10, 1.0, 3.0, 0.1), (20, 2.0, 9.0, 0.2), (20, 2.5, 2.0, 0.3)])
    (run,), _ = read_runs([tmp_path])
    assert [(one.step, one.held_out_loss) for one in run.evaluations] == [(10, 3.0), (20, 2.0)]
    assert run.sparsity == ((10, 0.1), (20, 0.3))


def test_a_run_without_a_seed_is_told(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [(30, 1.0, 1.5, 0.5)], seed=None)
    with pytest.raises(ComparisonError, match="config.json has no seed that is a whole number"):
        read_runs([tmp_path])


def test_a_budget_that_brought_no_steps_is_not_marked(tmp_path: Path) -> None:
    """Earlier versions marked such runs; those that took more steps than asked for stay marked."""
    make_run(tmp_path / "a", [(30, 3.0, 2.0, 0.5)], budget="extended", recorded={"asked_steps": 30})
    make_run(tmp_path / "b", [(51, 3.0, 2.0, 0.5)], budget="extended", score="bitter7", recorded={"asked_steps": 51})
    assert [run.extended for run in read_runs([tmp_path])[0]] == [False, True]


def test_settings_that_are_none_may_be_missing(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [(30, 3.0, 2.0, 0.5)], preset=None)
    make_run(tmp_path / "b", [(30, 3.0, 2.0, 0.5)], seed=1)
    assert len(compared(tmp_path).rows) == 1
    make_run(tmp_path / "c", [(30, 3.0, 2.0, 0.5)], seed=2, preset="as-published")
    with pytest.raises(ComparisonError, match="preset \\(none, not set, as-published\\)"):
        compared(tmp_path, ["score"])


def test_pruning_settings_of_dense_runs_do_not_count_with_by_either(tmp_path: Path) -> None:
    make_sweep(tmp_path / "dense", {"none": [1.8, 1.9]}, sparsity=0.0, schedule="cubic")
    make_sweep(tmp_path / "pruned", {"magnitude": [2.0, 2.1], "variance": [1.9, 2.0]}, schedule="late_cubic")
    assert len(compared(tmp_path, ["score"]).rows) == 3
    make_sweep(tmp_path / "more", {"variance": [1.9, 2.0]}, schedule="linear")
    with pytest.raises(ComparisonError, match="differ in more than score: schedule"):
        compared(tmp_path, ["score"])
