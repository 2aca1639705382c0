"""The parts of benchmarks: forms prune alike, sampling drifts, cells of training are exact, tables render."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from secateur.bench import accuracy, measuring, pace, scale, select, step, train
from secateur.bench import train as cell
from secateur.scores import resolve
from tools import tables

CPU = torch.device("cpu")


@pytest.mark.parametrize("score", ["bitter7", "variance", "magnitude"])
def test_every_form_prunes_what_is_asked(score: str) -> None:
    case = select.Case(select.make([(128, 128)] * 3, CPU), resolve(score), 0.4)
    for name, form in {**select.RIVALS["cpu"], **select.RIVALS["gpu"]}.items():
        assert abs(select.pruned(form(case), case) - case.count) < 2500, name
    expected = select.sorted_masks(case)
    assert select.equal(select.ours(case)(), expected, case)
    assert select.equal(select.ours(case, packed=True)(), expected, case)
    assert select.pruned(select.topk(case), case) == select.pruned(select.kthvalue(case), case)


def test_the_gpu_table_shows_floor_and_bar() -> None:
    """Measured on the CPU at a toy size; the code is the same on GPUs."""
    case = select.Case(select.make([(64, 64)] * 2, CPU, torch.bfloat16), resolve("variance"))
    size = {**select.measure_gpu(case, CPU, speed=1e9, calls=2, rounds=1), "score": "variance"}
    assert size["right"]
    assert size["floor_ms"][select.OURS] == pytest.approx(2 * 64 * 64 * 5 / 1e9 * 1e3, abs=1e-5)
    assert size["floor_ms"][select.PACKED] == pytest.approx(2 * 64 * 64 * 4.125 / 1e9 * 1e3, abs=1e-5)
    header, rows = select.table(size)
    assert header[0] == "0.01 M weights, variance"
    assert rows[0][0] == select.OURS
    assert rows[0][header.index("to ours")] == "1.00x"
    assert all(len(row) == len(header) for row in rows)
    assert not any("x" in cell for row in select.table({**size, "right": False})[1] for cell in row[1:6])
    bar = header.index("bar 1.5 ms")
    assert {row[bar] for row in rows} == {"-"}  # it is stated for another size
    large = {**size, "weights": select.BAR_WEIGHTS, "milliseconds": {**size["milliseconds"], select.OURS: [1.2]}}
    large["milliseconds"][select.PACKED] = [1.8]
    assert [row[bar] for row in select.table(large)[1]][:3] == ["met by 20.0%", "missed by 20.0%", "-"]
    assert {row[bar] for row in select.table({**large, "dtype": "bfloat16"})[1]} == {"-"}
    assert select.table({**large, "right": False})[1][0][bar] == "masks differ"


def test_a_figure_against_its_bar() -> None:
    found = [measuring.against(value, 1.6) for value in (1.2, 1.6, 2.0, 16.0)]
    assert found == ["met by 25.0%", "met by 0.0%", "missed by 25.0%", "missed, 10.0 times the bar"]
    assert measuring.against(1.0, 1.6, right=False) == "masks differ"


def test_scratch_leaves_out_what_is_returned() -> None:
    def work() -> list[torch.Tensor]:
        held = torch.zeros(1 << 20, dtype=torch.float32)
        return [held.to(torch.uint8)]

    assert measuring.scratch_mib(work, CPU) == pytest.approx(4.0, abs=0.1)


def test_sampling_is_off_and_drifts_upwards() -> None:
    scores = accuracy.scores_of(64, 2, resolve("variance"), CPU)
    found = accuracy.measure(scores, 0.5, draws=3, updates=30)
    assert len(set(found["achieved"])) > 1
    assert found["after_updates"] >= max(found["achieved"])
    assert accuracy.share_below(scores, found["exact_cut"]) == 0.5
    assert [abs(cut / found["exact_cut"] - 1) for cut in found["cuts"]] == pytest.approx(found["relative_errors"])


@pytest.mark.parametrize("method", ["dense", "magnitude", "variance", "bitter7-own"])
def test_a_cell_of_training_is_exact(method: str) -> None:
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


def test_random_tokens_are_the_same_again_and_never_read() -> None:
    tokens = cell.RandomTokens.for_plan(cell.Plan(device="cpu", tiny=True, batch=2, steps=6, every=3))
    first = tokens.batch(1, 2, 32, seed=0)
    assert first.shape == (2, 33)
    assert torch.equal(first, tokens.batch(1, 2, 32, seed=0))
    assert not torch.equal(first, tokens.batch(2, 2, 32, seed=0))
    on_a_device = cell.RandomTokens(tokens.train.to("meta"), tokens.held_out, tokens.vocabulary, tokens.name)
    assert on_a_device.fingerprint() == "random tokens"


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
    assert [row[3] for row in rows] == ["-", "met by 0.0%", "-"]
    assert rows[1][7] == "+1.000"
    for spoiled in ({"exact": False}, {"finite": False}):
        assert train.table([cells[0], a_cell("bitter7", 90.0, **spoiled)])[1][1][2] == "not comparable"


def test_tables_render_from_records_of_the_right_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secateur.lab.record.results_folder", lambda: tmp_path)
    names = ("accuracy", "demo", "pace", "probe", "quality", "scale", "select", "select-gpu", "step", "train")
    empty = "".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in names)
    assert tables.filled(empty).count(tables.NOT_YET) == len(names)
    common = {"versions": {"torch": "2", "python": "3"}, "commit": "abc", "date": "2026-01-02", "command": "run"}
    size = scale.measure(select.Case(select.make([(100, 1000)], CPU), resolve("bitter7")), CPU, 1e9, calls=1)

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
        milliseconds={step.FUSED: [2.0], step.MASKED: [1.9]},
        floor_ms={step.FUSED: 1.0, step.MASKED: 1.0},
    )
    text = tables.filled(empty)
    assert text.count("New GPU") == 3
    assert "copies at 4.19 TB/s" in text
    assert "Old GPU" not in text
    assert "threads" not in text
    assert "| torch fused, dense | 2.000 | 1.00x | - | 1.000 | 2.00x |" in text
    assert "| secateur, masked | 1.900 | 0.95x | missed by 5.6% | 1.000 | 1.90x |" in text
    assert tables.filled(text) == text


def test_a_pace_is_compared_round_by_round() -> None:
    """Both were twice as slow in the second round, which must not count."""
    common = {"mode": "compile", "finite": True, "exact": True, "pruned": 0}
    rows = [
        {**common, "method": "dense", "step_ms": [10.0, 20.0, 10.0]},
        {**common, "method": "bitter7-own", "step_ms": [10.1, 20.2, 10.3]},
    ]
    lines = pace.table(rows)[1]
    assert [line[2:5] for line in lines] == [("1.000x",) * 3, ("1.010x", "1.010x", "1.030x")]
    assert [line[0] for line in lines] == ["compile, dense", "compile, bitter7, secateur.optim.AdamW"]
    assert [line[5] for line in lines] == ["-", "met by 0.0%"]
    slower = {**rows[1], "step_ms": [10.4, 20.8, 10.4]}
    assert pace.table([rows[0], slower])[1][1][5] == "missed by 3.0%"
    for spoiled in ({"exact": False}, {"finite": False}):
        assert pace.table([rows[0], {**rows[1], **spoiled}])[1][1][2] == "not comparable"


@pytest.mark.parametrize(
    ("part", "bars"),
    [
        ("select-gpu", ["1.5 ms"]),
        ("step", ["0.9x"]),
        ("pace", ["1.01x"]),
        ("train", ["1.01x"]),
        ("scale", ["1.6x", "64 MiB"]),
    ],
)
def test_committed_records_render_with_their_bars(part: str, bars: list[str]) -> None:
    """Records from before there were bars and several scores too."""
    text = tables.PARTS[part]()
    assert all(f"| bar {bar} |" in text for bar in bars)
    assert re.search(r"\| (met|missed) by [\d.]+% \|", text)
    assert "bitter7" in text or part == "step"


def test_committed_records_of_cpus_render() -> None:
    assert all(column in tables.PARTS["select"]() for column in ("ms (cold)", "ms (warm)", "count error"))
    assert "threshold error, mean" in tables.PARTS["accuracy"]()


def test_memory_is_returned_only_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows' loader takes no None (TypeError), and other C libraries than glibc have no malloc_trim."""
    asked: list[type[Exception]] = []
    for error in (TypeError, OSError, AttributeError):

        def refuse(_: None, error: type[Exception] = error) -> None:
            asked.append(error)
            raise error

        monkeypatch.setattr("ctypes.CDLL", refuse)
        select.return_memory()
    assert asked == [TypeError, OSError, AttributeError]
    trimmed: list[int] = []
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(malloc_trim=trimmed.append))
    select.return_memory()
    assert trimmed == [0]
