"""`secateur bench patterns`: quality beside speed, continued where it stopped, and no speed where outputs differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from secateur.bench import patterns
from secateur.cli import main
from tests import tiny
from tests.damage import refused

OPTIONS = "--device cpu --model model --text text.txt --models pruned --context 16 --windows 6"


def cell(pattern: str | None = None, asked: float | None = None, **changes: Any) -> dict[str, Any]:
    made = {"pattern": pattern, "asked": asked, "sparsity": asked or (0.5 if pattern else 0.0), "perplexity": 30.0}
    return {**made, "bytes": 0.5625, "ms": [20.0, 10.0, 12.0], "right": True, "exact": True, **changes}


def test_speeds_are_to_dense_and_to_unstructured_zeros() -> None:
    cells = [cell(ms=[24.0, 30.0, 24.0]), cell("8:16", ms=[8.0, 9.0, 10.0]), cell(asked=0.5), cell(asked=0.75)]
    header, rows = patterns.table(cells)
    assert len(header) == len(rows[0])
    assert [row[0] for row in rows] == ["dense", "8:16", "unstructured 50%", "unstructured 75%"]
    assert rows[1][4:] == ("9.0", "111.1", "2.67x", "3.00x")
    assert patterns.conclusion(cells) == "Fastest steps to those of unstructured zeros at 50%: 8:16 1.25x."


def test_the_picture_leaves_out_wrong_outputs() -> None:
    pytest.importorskip("matplotlib")
    cells = [cell(), cell("8:16"), cell(asked=0.75)]
    whole = patterns.picture(cells)
    assert whole.startswith("<svg")
    assert len(patterns.picture([*cells[:2], cell(asked=0.75, right=False)])) < len(whole)


def test_no_speed_where_outputs_differ() -> None:
    cells = [cell(ms=[24.0]), cell("2:4", right=False), cell(asked=0.5)]
    row = patterns.table(cells)[1][1]
    assert set(row[5:]) == {"outputs differ"}
    assert patterns.conclusion(cells) == ""


def test_a_second_run_measures_speed_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    tiny.llama().save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    Path("text.txt").write_text(" ".join(f"{number} and then some" for number in range(40)), encoding="utf-8")
    words = ["bench", "patterns", *OPTIONS.split(), "--tokens", "2", "--sparsity", "0.5", "--out", "records"]
    assert main([*words, "--patterns"]) == 0
    assert {path.name for path in Path("pruned").iterdir()} == {"dense", "0.5"}
    kept = (Path("pruned") / "0.5" / "cell.json").read_text()
    assert main([*words, "--patterns", "2:4"]) == 0  # continues with what is missing
    assert (Path("pruned") / "0.5" / "cell.json").read_text() == kept
    (path,) = Path("records").iterdir()
    cells = json.loads(path.read_text())["cells"]
    assert [patterns.label(one) for one in cells] == ["dense", "2:4", "unstructured 50%"]
    assert all(one["right"] and len(one["ms"]) == 2 for one in cells)
    assert cells[1]["sparsity"] == cells[2]["sparsity"] == 0.5
    assert cells[1]["packed_layers"] == cells[2]["packed_layers"] > 0
    monkeypatch.setattr(patterns._Pruning, "__call__", lambda *_: pytest.fail("pruned again"))
    assert main([*words, "--patterns", "2:4"]) == 0
    capsys.readouterr()
    other = [word if word != "16" else "8" for word in words]
    said = refused(capsys, main([*other, "--patterns", "2:4"]))
    assert said.endswith(
        "was made with other settings: context 16, not 8. Delete the folder to prune it again, or name another with"
        " --models."
    )
    assert "No pattern 'half'" in refused(capsys, main([*words, "--patterns", "half"]))
    assert "0.5" not in capsys.readouterr().out
