"""What the zeros buy on this device, as `secateur inspect` shows it: no ratio where outputs differ, nothing made up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import secateur as sc
from secateur.bench import decode
from secateur.cli import inspect, main
from secateur.cli.inspect import BUYS
from tests import tiny
from tests.test_saving import sparsify

CPU = torch.device("cpu")


def sparse(rows: int, columns: int, sparsity: float = 0.8) -> torch.Tensor:
    weight = torch.randn(rows, columns)
    weight.view(-1)[: round(sparsity * weight.numel())] = 0
    return weight


def measured(monkeypatch: pytest.MonkeyPatch, dense: float, packed: float, right: bool = True) -> None:
    def measure(layer: Any, calls: int) -> dict[str, Any]:
        shape = "x".join(map(str, layer.weight.shape))
        return {
            "shape": shape,
            "dtype": "float32",
            "dense_us": [dense, 2 * dense],
            "packed_us": [packed],
            "right": right,
        }

    monkeypatch.setattr(decode, "measure", measure)


def test_layers_alike_are_measured_once_and_counted_all(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, dense=300.0, packed=100.0)
    found = decode.Gains(
        CPU, only={"a.weight", "b.weight", "c.weight", "turned.weight", "full.weight"}, transposed={"turned.weight"}
    )
    weights = {
        "a.weight": sparse(16, 32), "b.weight": sparse(16, 32, 0.81), "c.weight": sparse(8, 32),
        "turned.weight": sparse(32, 16), "full.weight": torch.ones(4, 4), "embedding.weight": sparse(16, 32),
    }  # fmt: skip
    assert dict(found.watched(weights.items())) == weights
    assert [row[:4] for row in found.rows()] == [
        ("16x32", "3", "float32", "80.4%"), ("8x32", "1", "float32", "80.1%"),
    ]  # fmt: skip
    assert {row[-1] for row in found.rows()} == {"3.00x"}
    kept = sum(int((weights[name] != 0).sum()) for name in ("a.weight", "b.weight", "c.weight", "turned.weight"))
    size = (4 * kept + (3 * 16 * 32 + 8 * 32) // 8) / 1e3
    lines = found.lines()
    assert lines[0].startswith(f"Packed, 4 linear layers take {size:,.1f} kB instead of 7.2 kB (")
    assert lines[0].endswith("1 linear layer has too few zeros to be packed.")
    assert lines[-1].startswith("One input takes 0.40 ms through them instead of 1.20 (3.00x)")


def test_nothing_is_gained_where_that_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decode.Gains(CPU)
    list(found.watched([("a.weight", torch.ones(8, 8))]))
    assert found.rows() == []
    assert found.lines() == ["Nothing is gained here. No linear layer has enough zeros to be smaller packed."]
    measured(monkeypatch, dense=100.0, packed=150.0)
    found.add(sparse(16, 32))
    assert found.rows()[0][-1] == "0.67x"
    assert (
        found.lines()[-1] == "In time: nothing is gained here. One input takes 0.10 ms through them, packed or dense."
    )


def test_no_ratio_where_outputs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, dense=300.0, packed=100.0, right=False)
    found = decode.Gains(CPU)
    found.add(sparse(16, 32))
    said = " ".join([*found.rows()[0], *found.lines()])
    assert "outputs differ" in said
    assert not re.search(r"\d\.\d+x", said)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_inspect_has_the_section_in_text_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    pytest.importorskip("transformers")
    sc.save(sparsify(getattr(tiny, family)()), tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a"), "--device", "cpu", "--out", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out.partition(BUYS)[2]
    assert f"Packed, {15 if family == 'llama' else 4} linear layers take" in said
    assert re.search(r"(\d\.\d\dx|nothing is gained here)", said)
    page = (tmp_path / "page.html").read_text()
    assert f"<h2>{BUYS}</h2>" in page
    assert "linear layers take" in page


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), ValueError("other")])
def test_only_masks_that_do_not_fit_stay_as_they_are(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("secateur.inference.convert.as_in_files", fail)
    masks = {"weight": torch.ones(2, 2, dtype=torch.bool)}
    if isinstance(error, ValueError):
        assert inspect._by_file_name(torch.nn.Linear(2, 2), masks, []) == masks
        return
    with pytest.raises(type(error)):
        inspect._by_file_name(torch.nn.Linear(2, 2), masks, [])
