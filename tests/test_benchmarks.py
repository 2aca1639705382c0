"""The benchmarks measure what they say: forms prune about the same, ours exactly; wrong masks print no ratio."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import record, sampling, select


def test_every_form_prunes_about_half() -> None:
    layers = select.make(128, 3)
    for name, form in select.FORMS.items():
        gone = sum(int((~mask).sum()) for mask in form(layers))
        assert abs(gone - 3 * 128 * 128 // 2) < 2500, name
    assert select.right(layers)


def test_a_wrong_mask_prints_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    size = select.measure(64, 2, calls=1, rounds=1)
    assert size["right"]
    assert size["pruned"]["secateur"] == 64 * 64
    assert select.table(size)[1][0][:3:2] == ("secateur", "1.00x")
    assert not any("x" in cell for row in select.table({**size, "right": False})[1] for cell in (row[2], row[4]))
    layers = select.make(64, 2)
    monkeypatch.setattr(select, "secateur", lambda layers: [torch.ones(64 * 64, dtype=torch.bool)] * 2)
    assert not select.right(layers)


def test_sampling_drifts_upwards() -> None:
    scores = sampling.scores_of(64, 2)
    achieved = sampling.once(scores, 0.5, draws=3)
    assert len(set(achieved)) > 1
    assert sampling.drift(scores, 0.5, updates=30) >= max(achieved)


def test_results_carry_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    path = record.save("trial", {"samples": [1.0]})
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    saved = json.loads(path.read_text())
    assert saved["samples"] == [1.0]
    assert saved.keys() >= {"date", "command", "commit", "hardware", "memory", "versions"}
    for committed in (Path(record.__file__).parent / "results").glob("*.json"):
        assert json.loads(committed.read_text()).keys() >= {"date", "command", "commit", "hardware", "versions"}
