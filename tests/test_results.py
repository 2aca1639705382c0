"""docs/results.md: tables and pictures of the campaign from its records."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from secateur.lab.compare import compare, without_common
from secateur.lab.runs import read_runs
from tests.browser import open_page
from tests.run_folders import LOSSES, command, make_sweep
from tools import results, tables

NAME = "campaign-tiny"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    make_sweep(tmp_path / "runs", {**LOSSES, "none": [1.5, 1.6, 1.7]})
    path = tmp_path / f"{NAME}_some-gpu_2026-01-02.json"
    assert command(capsys, tmp_path / "runs", "--by", "score", "--json", path)[0] == 0
    (tmp_path / f"{NAME}_some-gpu_2025-12-31.json").write_text("older, not read")
    monkeypatch.setattr("secateur.lab.record.results_folder", lambda: tmp_path)
    return path


def test_the_table_is_made_of_the_newest_record(record: Path) -> None:
    assert results.records() == {NAME: record}
    text = tables.filled(f"before <!-- begin {NAME} --> stale <!-- end {NAME} --> after")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| score")}
    assert set(rows) == {f"score={name}" for name in (*LOSSES, "none")}
    assert "baseline" in rows["score=magnitude"]
    assert "better" in rows["score=variance"]
    assert "6.686, 7.463, 8.004" in rows["score=variance"]  # exp of 1.9, 2.01, 2.08
    assert "-9.8 %" in rows["score=variance"]  # exp of the mean of -0.1, -0.09 and -0.12, less 1
    assert f"figures/{NAME}.svg" in text
    assert "Residual standard deviation of a run's perplexity" in text
    assert "(all rows; 6 degrees of freedom)" in text
    assert "12 runs; one core; torch 2; commit abc" in text
    assert text.startswith("before")
    assert text.endswith("after")


def test_rows_are_also_compared_all_else_equal(tmp_path: Path) -> None:
    make_sweep(tmp_path, {"magnitude": [2.0, 2.1], "variance": [1.9, 2.01]}, schedule="cubic")
    make_sweep(tmp_path / "late", {"magnitude": [1.8, 1.9], "variance": [1.6, 1.71]}, schedule="late")
    runs = read_runs([tmp_path])[0]
    found = compare(runs, ["score", "schedule"], "score=magnitude,schedule=cubic")
    header, rows = results.table(found)
    assert header[4:] == [
        "to score=magnitude,schedule=cubic, 95 %",
        "verdict",
        "to score=magnitude, all else equal",
        "verdict",
    ]
    words = {row[0]: row[4:] for row in rows}
    assert words["score=magnitude, schedule=cubic"] == ("-", "baseline", "-", "baseline")
    assert words["score=magnitude, schedule=late"][0].startswith("-18.1 %")  # exp(-0.2)
    assert words["score=magnitude, schedule=late"][2:] == ("-", "baseline")
    assert words["score=variance, schedule=late"][0].startswith("-32.6 %")  # exp(-0.395)
    assert words["score=variance, schedule=late"][2].startswith("-17.7 %")  # exp(-0.195)


def test_records_of_other_kinds(tmp_path: Path) -> None:
    """Dense rows beside their dense baseline, no baseline named, no magnitude, a loss that is not finite."""
    for spam, losses in {"none": [2.0, 2.1], "paper": [1.9, 2.01], "seeds": [math.nan, 2.0]}.items():
        make_sweep(tmp_path / spam, {"none": losses}, spam=spam, sparsity=0.0)
    found = compare(read_runs([tmp_path])[0], ["spam"])
    header, rows = results.table(found)
    assert header[4:] == ["to spam=none, 95 %", "verdict"]
    words = {row[0]: row[4:] for row in rows}
    assert words["spam=none"] == ("-", "baseline")
    assert words["spam=paper"][0].startswith("-9.1 %")  # exp(-0.095)
    assert words["spam=seeds"] == ("-", "inconclusive")
    assert "<!-- spam=paper -->" in results.picture(found)
    assert results.picture(found) == results.picture(found)


def test_what_is_not_on_record_is_said(record: Path) -> None:
    assert tables.NOT_YET in tables.filled("<!-- begin campaign-other --><!-- end campaign-other -->")


def test_names_tell_rows_apart_and_nothing_else() -> None:
    assert without_common(["a=1, b=2", "a=1, b=3"]) == ["b=2", "b=3"]
    assert without_common(["a=1, b=2"]) == ["a=1, b=2"]
    assert without_common([]) == []


def test_the_picture_shows_every_row(record: Path, tmp_path: Path) -> None:
    drawn = results.picture(results.comparison(record))
    (tmp_path / "page.html").write_text(f"<!doctype html><html lang='en'><body>{drawn}</body></html>")
    for name in LOSSES:
        assert (f"<!-- {name} -->" in drawn) == (name != "magnitude"), name
    size, complaints = open_page(tmp_path / "page.html", tmp_path)
    assert size > 8_000
    assert not complaints
