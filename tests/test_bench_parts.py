"""The parts of benchmarks: forms prune alike, sampling drifts, cells of training are exact, tables render."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from secateur.bench import accuracy, forms, measuring, pace, scale, select, step, tables, train
from secateur.bench import select as select_gpu
from secateur.bench import train as cell

CPU = torch.device("cpu")


def test_every_form_prunes_about_half() -> None:
    layers = forms.make([(128, 128)] * 3, CPU)
    for name, form in {**select.FORMS, **select_gpu.GPU_FORMS}.items():
        assert abs(forms.pruned(form(layers), layers) - 3 * 128 * 128 // 2) < 2500, name
    expected = forms.sorted_masks(layers)
    assert forms.equal(forms.secateur(layers), expected, layers)
    assert forms.equal(forms.secateur_packed(layers), expected, layers)
    assert forms.pruned(forms.topk(layers), layers) == forms.pruned(forms.kthvalue(layers), layers)


def test_the_gpu_table_stands_by_its_floor() -> None:
    """Measured on the CPU at a toy size: what runs on GPUs is the same code."""
    layers = forms.make([(64, 64)] * 2, CPU, torch.bfloat16)
    size = select_gpu.measure_gpu(layers, CPU, speed=1e9, calls=2, rounds=1)
    assert size["right"]
    assert size["floor_ms"][select_gpu.OURS] == pytest.approx(2 * 64 * 64 * 5 / 1e9 * 1e3, abs=1e-5)
    assert size["floor_ms"][select_gpu.PACKED] == pytest.approx(2 * 64 * 64 * 4.125 / 1e9 * 1e3, abs=1e-5)
    header, rows = select_gpu.gpu_table(size)
    assert rows[0][:3:2] == (select_gpu.OURS, "1.00x")
    assert all(len(row) == len(header) for row in rows)
    assert not any("x" in row[2] + row[4] for row in select_gpu.gpu_table({**size, "right": False})[1])


def test_scratch_leaves_out_what_is_returned() -> None:
    def work() -> list[torch.Tensor]:
        held = torch.zeros(1 << 20, dtype=torch.float32)
        return [held.to(torch.uint8)]

    assert measuring.scratch_mib(work, CPU) == pytest.approx(4.0, abs=0.1)


def test_sampling_is_off_and_drifts_upwards() -> None:
    scores = accuracy.scores_of(64, 2)
    found = accuracy.measure(scores, 0.5, draws=3, updates=30)
    assert len(set(found["achieved"])) > 1
    assert found["after_updates"] >= max(found["achieved"])
    assert accuracy.share_below(scores, found["exact_cut"]) == 0.5
    assert [abs(cut / found["exact_cut"] - 1) for cut in found["cuts"]] == pytest.approx(found["relative_errors"])


@pytest.mark.parametrize("method", list(cell.METHODS))
def test_a_cell_of_training_is_exact(method: str) -> None:
    pytest.importorskip("transformers", reason="GPT-2 comes from transformers, which is not installed")
    plan = cell.Plan(device="cpu", tiny=True, batch=2, steps=6, every=3)
    found = cell.measure(plan, "eager", method)
    assert found["finite"]
    assert found["exact"]
    if method == cell.DENSE:
        assert (found["pruned"], found["updates"]) == (0, 0)
    else:
        assert found["pruned"] == round(0.5 * found["prunable"]) > 0
        assert found["updates"] == plan.last_step // plan.every  # one a period: two warm-up, two timed, one inside
        assert found["shares"]["pruner"] > 0


def test_recompiles_are_counted() -> None:
    double = torch.compile(lambda x: x * 2, dynamic=False, backend="eager")
    double(torch.ones(3))
    before = cell.compiled_frames()
    double(torch.ones(3))
    assert cell.compiled_frames() == before
    double(torch.ones(4))
    assert cell.compiled_frames() == before + 1


def a_cell(method: str, milliseconds: float, **changes: Any) -> dict[str, Any]:
    return {
        "mode": "eager",
        "method": method,
        "step_ms": milliseconds,
        "tokens_per_second": 1e5,
        "peak_allocated": 1000 << 20,
        "peak_reserved": 1200 << 20,
        "recompiles": 0,
        "shares": {"pruner": 0.01, "optimizer": 0.1},
        "finite": True,
        "prunable": None if method == cell.DENSE else 1 << 20,
        "pruned": 0,
        "exact": True,
        **changes,
    }


def test_cells_are_compared_with_the_mean_of_dense() -> None:
    cells = [a_cell("dense", 99.0), a_cell("bitter7", 101.0, peak_allocated=1001 << 20), a_cell("dense", 101.0)]
    rows = train.table(cells)[1]
    assert [row[2] for row in rows] == ["0.990x", "1.010x", "1.010x"]
    assert rows[1][6] == "+1.000"
    for spoiled in ({"exact": False}, {"finite": False}):
        assert train.table([cells[0], a_cell("bitter7", 90.0, **spoiled)])[1][1][2] == "not comparable"


def test_tables_render_from_records_of_the_right_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "results_folder", lambda: tmp_path)
    empty = "".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in tables.PARTS)
    assert tables.filled(empty).count(tables.NOT_YET) == len(tables.PARTS) - 1  # scores come from the code
    common = {"versions": {"torch": "2", "python": "3"}, "commit": "abc", "date": "2026-01-02", "command": "run"}
    size = scale.measure(10**5, CPU, 1e9, calls=1)

    def write(theme: str, date: str, hardware: str, **data: Any) -> None:
        record = {**common, "hardware": hardware, "date": date, **data}
        (tmp_path / f"{theme}_{hardware.replace(' ', '-')}_{date}.json").write_text(json.dumps(record))

    write("scale", "2026-01-01", "Old GPU", sizes=[size])
    write("scale", "2026-01-02", "New GPU", sizes=[size], bandwidth=4.19e12)
    write("scale", "2026-01-03", "Some CPU, 2 threads", sizes=[size])
    write("train-eager", "2026-01-02", "New GPU", cells=[a_cell("dense", 10.0)])
    write(
        "step",
        "2026-01-02",
        "New GPU",
        weights=9,
        right=True,
        milliseconds={step.FUSED: [2.0]},
        floor_ms={step.FUSED: 1.0},
    )
    text = tables.filled(empty)
    assert text.count("New GPU") == 3
    assert "copies at 4.19 TB/s" in text
    assert "Old GPU" not in text
    assert "threads" not in text
    assert "| torch fused, dense | 2.000 | 1.00x | 1.000 | 2.00x |" in text
    assert tables.filled(text) == text


def test_a_pace_is_told_round_by_round() -> None:
    """Both were twice as slow in the second round: of no matter."""
    common = {"mode": "compile", "finite": True, "exact": True, "pruned": 0}
    rows = [
        {**common, "method": "dense", "step_ms": [10.0, 20.0, 10.0]},
        {**common, "method": "bitter7-own", "step_ms": [10.1, 20.2, 10.3]},
    ]
    assert [line[2:5] for line in pace.table(rows)[1]] == [("1.000x",) * 3, ("1.010x", "1.010x", "1.030x")]
    for spoiled in ({"exact": False}, {"finite": False}):
        assert pace.table([rows[0], {**rows[1], **spoiled}])[1][1][2] == "not comparable"
