"""`secateur compare`: its tables, at the end and at equal steps and seconds, its JSON and its page."""

from __future__ import annotations

import json
import math
import shutil
from collections import namedtuple
from pathlib import Path

import numpy
import pytest
from scipy import stats

from secateur.cli import main
from secateur.errors import ComparisonError
from secateur.lab.compare import short_names
from secateur.lab.compare_page import COLOURS, few_rows, layer_means, lines_of, render, styles, summary
from secateur.lab.costs import mean_of
from secateur.lab.runs import read_runs
from secateur.lab.statistics import Difference, difference, ratio
from tests.browser import Collector, open_page
from tests.damage import damage, damages, refused
from tests.run_folders import LOSSES, command, compared, entries, make_run, make_sweep
from tests.test_api import run_blocked


def test_the_table_says_what_the_seeds_say(tmp_path: Path) -> None:
    found = entries(compared(make_sweep(tmp_path, LOSSES)))
    assert [found[f"score={name}"].verdict for name in LOSSES] == ["baseline", "better", "inconclusive"]
    variance = found["score=variance"]
    assert variance.values == {0: 1.9, 1: 2.01, 2: 2.08}
    assert variance.spread.mean == pytest.approx(numpy.mean(LOSSES["variance"]))
    assert variance.spread.deviation == pytest.approx(numpy.std(LOSSES["variance"], ddof=1))
    expected = stats.ttest_rel(LOSSES["variance"], LOSSES["magnitude"]).confidence_interval(0.95)
    assert variance.difference is not None
    assert variance.difference.interval == pytest.approx((expected.low, expected.high))


def test_what_differences_are_worth_stands_under_the_table_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(make_sweep(tmp_path / "runs", LOSSES))
    values = numpy.array(list(LOSSES.values()))
    left = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    deviation = math.sqrt((left**2).sum() / 4)
    words = (
        f"Residual standard deviation of a run's perplexity, after row and seed means: {100 * deviation:.2g} %"
        " (all rows; 4 degrees of freedom). Differences below "
    )
    path = tmp_path / "numbers.json"
    assert words in command(capsys, tmp_path / "runs", "--by", "score", "--json", path)[1]
    assert words in render(found).replace("&#x27;", "'").replace("\N{NBSP}", " ")
    final, _, equal_seconds = json.loads(path.read_text())["tables"]
    assert final["scatter"]["deviation"] == pytest.approx(deviation)
    assert equal_seconds["scatter"] is None  # runs of a row may be at different steps there


def test_higher_accuracy_is_better(tmp_path: Path) -> None:
    finals = {"magnitude": [0.5, 0.51, 0.52], "variance": [0.6, 0.62, 0.61]}
    found = compared(make_sweep(tmp_path, finals, quality_name="accuracy"))
    assert entries(found)["score=variance"].verdict == "better"
    assert "ratio" not in str(found)
    assert "+19.61 [" in str(found)  # percent of 0.51


def test_extended_budgets_are_marked_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(tmp_path, {"magnitude": [2.0, 2.1]})
    make_sweep(tmp_path, {"variance": [1.0, 1.1]}, budget="extended")
    with pytest.raises(ComparisonError, match=r"budget \(normal, extended\)"):
        compared(tmp_path, ["score"])
    found = compared(tmp_path, ["score", "budget"])
    for table in found.tables:
        marked = [entry.label.endswith("[extended]") for entry in table.entries]
        assert marked == [False, True]
        assert any("budget=extended" in note for note in table.notes)
    assert command(capsys, tmp_path, "--by", "score,budget")[1].count("score=variance [extended]") == 4
    assert render(found).count("<td>score=variance [extended]</td>") == 4  # in three tables, and that of costs


def test_an_extended_row_is_marked_in_figures_and_is_not_the_best(tmp_path: Path) -> None:
    for level in (0.5, 0.8):
        make_sweep(tmp_path / str(level), {"magnitude": [2.0, 2.1], "bitter7": [1.9, 2.0]}, sparsity=level)
    make_sweep(tmp_path / "more", {"bitter7": [1.0, 1.12]}, sparsity=0.5, budget="extended")
    found = compared(tmp_path, ["score", "sparsity", "budget"], "score=magnitude")
    assert short_names([row.label for row in found.rows])["score=bitter7, sparsity=0.5 [extended]"] == (
        "bitter7 [extended]"
    )
    assert found.findings[0][0].startswith("50 % sparsity: bitter7 has 9.5 % lower perplexity than magnitude")
    (entry,) = [one for one in found.final if one.extended]
    assert entry.verdict == "no baseline"  # none has that budget
    twins = entries(compared(tmp_path, ["score", "sparsity", "budget"], "budget=normal"))
    assert twins["score=bitter7, sparsity=0.5 [extended]"].baseline == "score=bitter7, sparsity=0.5"
    assert twins["score=bitter7, sparsity=0.5 [extended]"].verdict == "better"


def test_equal_steps_and_equal_seconds(tmp_path: Path) -> None:
    fast = [(10, 1.0, 3.0, 0.2), (20, 2.0, 2.5, 0.5), (30, 3.0, 2.2, 0.5)]
    slow = [(10, 2.0, 2.9, 0.1), (20, 4.0, 2.4, 0.4), (25, 5.0, 2.0, 0.6)]
    make_run(tmp_path / "fast", fast)
    make_run(tmp_path / "slow", slow, score="variance")
    found = compared(tmp_path)
    steps, seconds = entries(found, "equal_steps"), entries(found, "equal_seconds")
    assert [one.values for one in steps.values()] == [{0: 2.5}, {0: 2.4}]  # 20 is the last step both have
    assert [one.values for one in seconds.values()] == [{0: 2.2}, {0: 2.9}]  # by second 3
    assert [one.early for one in steps.values()] == [False, True]
    assert [one.early for one in seconds.values()] == [False, True]
    text = str(found)
    assert "step 20, the last at which every run was evaluated" in text
    assert "within 3.0 s" in text
    assert "Final sparsity not reached yet: score=variance (40.00% of 60.00%)" in text
    assert "hardware" not in text


def test_what_cannot_be_compared_at_a_moment_is_said(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [(10, 1.0, 3.0, 0.5)])
    make_run(tmp_path / "b", [(20, 2.0, 3.0, 0.5)], score="variance", hardware="another")
    found = compared(tmp_path)
    assert entries(found, "equal_steps") == {}
    text = str(found)
    assert "There is no step at which every run was evaluated." in text
    assert f"Left out, because they were not evaluated by then: {tmp_path / 'b'}." in text
    assert "not on the same hardware (another; one core)" in text
    assert render(found).startswith("<!doctype html>")


def dense_and_pruned(folder: Path, sparsities: tuple[float, ...] = (0.5, 0.9)) -> Path:
    """Dense runs, and two scores at each sparsity, the sparser the worse."""
    make_sweep(folder / "dense", {"none": [1.8, 1.9, 2.0]}, sparsity=0.0)
    for sparsity in sparsities:
        worse = {name: [value + sparsity / 10 for value in LOSSES[name]] for name in ("magnitude", "variance")}
        make_sweep(folder / str(sparsity), worse, sparsity=sparsity)
    return folder


def test_the_headline_is_the_best_row_against_its_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(dense_and_pruned(tmp_path), ["score", "sparsity"], "score=magnitude")
    (first, below), (last, under) = found.findings
    share = stats.ttest_rel(LOSSES["variance"], LOSSES["magnitude"]).confidence_interval(0.95)
    low, high = (100 * math.expm1(edge) for edge in (share.low, share.high))
    for level, headline in ((50, first), (90, last)):
        start = f"{level} % sparsity: variance has 9.8 % lower perplexity than magnitude"
        assert headline == f"{start} [{low:+.1f}, {high:+.1f}]"
    assert below.startswith("95 % interval over 3 seeds. From dense: variance ")
    from_dense = numpy.mean(LOSSES["variance"]) + 0.09 - 1.9
    assert f"variance {100 * math.expm1(from_dense):+.1f} % [" in under
    text = command(capsys, tmp_path, "--by", "score,sparsity", "--baseline", "score=magnitude")[1]
    assert text.rstrip().endswith(f"{last}. {under}")
    assert f"<h1>{last}</h1>" in render(found).replace("\N{NBSP}", " ")


@pytest.mark.parametrize(
    ("finals", "said"),
    [
        ({"magnitude": [2.0, 2.1], "variance": [2.1, 2.3]}, "50 % sparsity: no row is better than magnitude"),
        ({"magnitude": [2.0, 2.1], "variance": [1.9, 2.15]}, "no measurable difference from magnitude; the best is"),
        ({"magnitude": [2.0], "variance": [1.9]}, "with 1 seed: too few to tell"),
        ({"magnitude": [2.0, 2.1], "variance": [1.9, 2.0]}, "than magnitude at each of 2 seeds: without a spread"),
        ({"magnitude": [2.0, 2.1], "variance": [2.0, 2.1]}, "50 % sparsity: no row is better than magnitude"),
        ({"magnitude": [2.0, 2.1]}, "all runs has perplexity 7.768"),
        ({"magnitude": [math.nan, 2.1]}, "no row has a finite perplexity"),
        ({"magnitude": [math.nan, 2.1], "variance": [1.9, 2.0]}, "variance is best; magnitude has no number"),
    ],
)
def test_headlines_of_other_outcomes(tmp_path: Path, finals: dict[str, list[float]], said: str) -> None:
    found = compared(make_sweep(tmp_path, finals))
    assert said in found.findings[-1][0]
    assert render(found).startswith("<!doctype html>")


def test_rows_that_are_alike_at_every_seed_are_said_to_be_equal(tmp_path: Path) -> None:
    make_sweep(tmp_path, {"magnitude": [2.0, 2.1], "variance": [2.0, 2.1]})
    ((headline, _),) = compared(tmp_path, ["score"], "score=variance").findings
    assert headline == "50 % sparsity: magnitude equals variance at each of 2 seeds"


def test_a_baseline_of_another_sparsity_is_named_with_it(tmp_path: Path) -> None:
    found = compared(dense_and_pruned(tmp_path), ["score", "sparsity"], "score=magnitude,sparsity=0.5")
    assert "than magnitude at 50 % [" in found.findings[-1][0]
    assert "at 50 %" not in found.findings[0][0]


def test_dense_runs_are_found_for_rows_alike_in_all_but_pruning(tmp_path: Path) -> None:
    for lr in (1e-3, 1e-2):
        make_sweep(tmp_path / f"dense{lr}", {"none": [1.8, 1.9]}, sparsity=0.0, lr=lr, schedule="constant")
        make_sweep(tmp_path / f"pruned{lr}", {"variance": [2.0 + lr, 2.1 + lr]}, lr=lr)
    found = entries(compared(tmp_path, ["score", "sparsity", "lr", "schedule"]))
    for lr in ("0.001", "0.01"):
        entry = found[f"score=variance, sparsity=0.5, lr={lr}, schedule=cubic"]
        assert entry.dense == f"score=none, sparsity=0, lr={lr}, schedule=constant"
        assert entry.from_dense is not None
        assert entry.from_dense.mean == pytest.approx(0.2 + float(lr))


def test_the_short_table_of_the_page(tmp_path: Path) -> None:
    found = compared(dense_and_pruned(tmp_path), ["score", "sparsity"], "score=magnitude")
    head, rows = summary(found)
    assert head == ("row", "against baseline", "from dense", "perplexity", "sparsity", "seconds", "tokens/s")
    assert [row[0] for row in rows] == [
        "dense",
        "variance, 50 %",
        "magnitude, 50 %",
        "variance, 90 %",
        "magnitude, 90 %",
    ]
    assert rows[1][1].startswith("-9.8 % [")
    assert rows[1][1].endswith(" better")
    assert rows[2][1] == "baseline"
    assert rows[0][2] == "-"


def test_a_page_of_many_rows_draws_a_few_of_them(tmp_path: Path) -> None:
    finals = {f"score{number}": [2 + number / 10, 2.1 + number / 10] for number in range(12)}
    found = compared(make_sweep(tmp_path, finals))
    labels = [row.label for row in few_rows(found)]
    assert sorted(labels) == [f"score=score{number}" for number in range(8)]
    assert len({style for label, style in styles(found).items() if label in labels}) == 8  # all look different
    assert "8 of 12 rows" in render(found)


def test_one_seed_prints_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(tmp_path, {"magnitude": [2.0], "variance": [1.0]})
    code, out, _ = command(capsys, tmp_path)
    assert code == 0
    (row,) = [line for line in out.splitlines() if line.startswith("score=variance")][:1]
    assert "[" not in row
    assert "inconclusive" in row
    assert "-1.0000" in row
    assert "fewer than two seeds are shared" in out


def test_perplexities_are_compared_on_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = command(capsys, make_sweep(tmp_path, LOSSES))[1]
    (row,) = [line for line in out.splitlines() if line.startswith("score=variance")][:1]
    assert f"{math.exp(numpy.mean(LOSSES['variance'])):.5g}" in row
    assert f"{math.exp(numpy.mean(LOSSES['variance']) - numpy.mean(LOSSES['magnitude'])):.4f} [" in row
    assert out.count("Perplexities are compared on a log scale") == 3


def test_a_ruined_run_is_said_and_no_number_is_made_of_it(tmp_path: Path) -> None:
    found = compared(make_sweep(tmp_path, {"magnitude": [2.0, 2.1], "variance": [math.nan, 2.0]}))
    entry = entries(found)["score=variance"]
    assert entry.verdict == "inconclusive"
    assert "is not a finite number: score=variance" in str(found)
    assert json.loads(found.to_json())["tables"][0]["entries"][1]["values"]["0"] is None
    assert "<svg" in render(found)


def test_the_json_is_read_as_the_folders_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(tmp_path / "runs", LOSSES | {"odd": [math.nan, 2.0]})
    file = tmp_path / "numbers.json"
    first = command(capsys, tmp_path / "runs", "--json", file, "--by", "score", "--baseline", "score=variance")
    assert command(capsys, file) == first  # with the baseline it was made with
    assert command(capsys, file, "--baseline", "score=magnitude") != first
    assert compared(file).to_json() == compared(tmp_path / "runs").to_json()
    make_sweep(tmp_path / "more", {"fisher": [1.5, 1.6]})
    assert "score=fisher" in command(capsys, file, tmp_path / "more")[1]


def test_runs_are_read_in_the_order_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, file = (
        make_sweep(tmp_path / "b", {"b": [1.0]}),
        make_sweep(tmp_path / "a", {"a": [1.0]}),
        tmp_path / "c",
    )
    command(capsys, make_sweep(tmp_path / "kept", {"c": [1.0]}), "--json", file)
    found = read_runs([first, file, second, file, first])[0]
    assert [run.settings["score"] for run in found] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "holds no runs"),
        ("[base]", "cannot be read as JSON.* Give a file written by `secateur compare --json`"),
        ('{"runs": [3]}', "is damaged, or not from"),
        (
            '{"runs": [{"settings": [], "summary": {}, "path": [], "evaluations": [], "folder": "x"}]}',
            "has no seed that is a whole number",
        ),
        ("[]", "holds a list; a dict is needed"),
        ("\udcff", "cannot be read as JSON"),
    ],
)
def test_files_that_hold_no_runs(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "file").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ComparisonError, match=said) as error:
        compared(tmp_path / "file")
    assert "ComparisonError" not in str(error.value)


def test_the_json_holds_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(tmp_path / "runs", LOSSES)
    file = tmp_path / "numbers.json"
    assert command(capsys, tmp_path / "runs", "--json", file)[0] == 0
    plain = json.loads(file.read_text())
    numbers = json.loads(compared(tmp_path / "runs").to_json())
    assert {name: plain[name] for name in numbers} == numbers
    assert plain["command"].startswith("secateur compare")
    assert plain.keys() - numbers.keys() >= {"date", "commit", "hardware", "versions"}
    values = {
        entry["label"]: {int(seed): value for seed, value in entry["values"].items()}
        for entry in plain["tables"][0]["entries"]
    }
    assert values == {f"score={name}": dict(enumerate(several)) for name, several in LOSSES.items()}
    again = difference(values["score=variance"], values["score=magnitude"])
    kept = {entry["label"]: entry for entry in plain["tables"][0]["entries"]}["score=variance"]
    assert again == Difference(**{**kept["difference"], "interval": tuple(kept["difference"]["interval"])})
    assert kept["ratio"]["mean"] == ratio(again).mean
    assert len(plain["runs"]) == 9
    assert plain["runs"][0]["summary"]["commit"] == "abc"


def test_the_page_holds_all_it_needs_and_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sparsity in (0.5, 0.9):
        make_sweep(tmp_path / "runs" / str(sparsity), LOSSES, sparsity=sparsity, data="<b>&")
    page = tmp_path / "compare.html"
    code, out, _ = command(capsys, tmp_path / "runs", "--by", "score,sparsity", "--out", page)
    assert code == 0
    assert f"Page: {page}" in out
    text = page.read_text()
    collector = Collector()
    collector.feed(text)
    assert collector.fetched == []
    assert "script" not in collector.tags
    assert "url(" not in text.replace("url(#", "")
    assert collector.tags.count("table") == 5  # the short one, three full ones, and that of costs
    assert collector.tags.count("figure") == collector.tags.count("svg") == 5
    assert "data=&lt;b&gt;&amp;" in text
    size, complaints = open_page(page, tmp_path)
    assert size > 50_000
    assert complaints == []


def test_pictures_show_what_the_runs_say(tmp_path: Path) -> None:
    for sparsity in (0.9, 0.5):
        make_sweep(tmp_path / str(sparsity), LOSSES, sparsity=sparsity)
    rows = compared(tmp_path, ["score", "sparsity"]).rows
    lines = lines_of(rows)
    assert list(lines) == ["score=magnitude", "score=random", "score=variance"]
    assert all(len(members) == 2 for members in lines.values())
    assert layer_means(rows[0]) == {f"layers.{n}.weight": 0.25 * (n + 1) for n in range(3)}


def test_a_page_goes_where_a_folder_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(capsys, tmp_path, "--out", "/no/such/folder/compare.html")
    assert code == 2
    assert "There is no folder /no/such/folder" in err


@pytest.mark.parametrize(("missing", "what"), [("scipy", "A confidence interval"), ("matplotlib", "The page")])
def test_it_says_what_it_needs(tmp_path: Path, missing: str, what: str) -> None:
    make_sweep(tmp_path / "runs", LOSSES)
    words = ["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")]
    done = run_blocked(f"from secateur.cli import main; sys.exit(main({words!r}))", [missing])
    assert done.returncode == 2
    assert done.stderr.strip() == f'secateur: {what} needs {missing}: pip install "secateur[lab]".'


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json"])
def test_a_damaged_run_is_named_in_a_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(tmp_path / "whole", LOSSES)
    for how, content in damages(tmp_path / "whole" / "random-1" / name).items():
        if (name, how) in {("summary.json", "missing"), ("config.json", "huge"), ("config.json", "negative")}:
            continue  # an unfinished run; other settings
        shutil.copytree(tmp_path / "whole", tmp_path / how)
        damage(tmp_path / how / "random-1" / name, how, content)
        assert "random-1" in refused(capsys, main(["compare", str(tmp_path / how)]))


def test_a_damaged_file_of_numbers_is_named_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    assert command(capsys, make_sweep(tmp_path / "runs", LOSSES), "--json", file)[0] == 0
    for how, content in damages(file).items():
        if how in ("texts", "huge", "not a number", "negative"):  # which has no numbers of its own
            continue
        shutil.copy(file, tmp_path / "copy.json")
        damage(tmp_path / "copy.json", how, content)
        assert "copy.json" in refused(capsys, main(["compare", str(tmp_path / "copy.json")]))
        shutil.rmtree(tmp_path / "copy.json") if how == "a folder" else (tmp_path / "copy.json").unlink(missing_ok=True)
    plain = json.loads(file.read_text())
    for key, value in {"axes": 3, "baseline": ["a"], "runs": {"a": 1}}.items():
        (tmp_path / "copy.json").write_text(json.dumps({**plain, key: value}))
        assert "copy.json" in refused(capsys, main(["compare", str(tmp_path / "copy.json")]))


def test_pages_and_records_have_a_place_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secateur.lab.demo.demo", lambda *_: pytest.fail("the demo ran"))
    monkeypatch.setattr("secateur.lab.runs.read_runs", lambda *_: pytest.fail("runs were read"))
    (tmp_path / "file").write_text("mine")
    for words in (["demo"], ["compare", str(tmp_path)], ["bench", "demo"]):
        said = refused(capsys, main([*words, "--out", str(tmp_path / "file" / "out")]))
        assert str(tmp_path / "file") in said
    for words in (["demo"], ["compare", str(tmp_path)]):
        assert "is not a file" in refused(capsys, main([*words, "--out", str(tmp_path)]))
    assert "is a file" in refused(capsys, main(["bench", "demo", "--out", str(tmp_path / "file")]))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 100_000))
    for words in (
        ["demo", "--out", "page.html"],
        ["compare", ".", "--json", "a.json"],
        ["bench", "demo", "--out", "a"],
    ):
        monkeypatch.chdir(tmp_path)
        assert "and the disk has 0 MB left" in refused(capsys, main(words))


def compiled_and_not(folder: Path, scores: tuple[str, ...] = ("magnitude", "variance")) -> Path:
    """Rows with what they cost: eager and compiled, which takes half the time and twice the memory."""
    for place, score in enumerate(scores):
        for compiled in (False, True):
            for seed in range(2):
                recorded = {
                    "seconds": 10.0 if compiled else 20.0, "seen": 4000, "asked_steps": 30,
                    "peak_bytes": (4 if compiled else 2) * 10**9 + seed * 10**8,
                    "gpu": {"busy": 90.0, "memory_access": 40.0 + 10 * compiled, "memory_bytes": 5e9},
                }  # fmt: skip
                points = [(30, recorded["seconds"], 2.0 - 0.1 * place + 0.01 * seed, 0.5)]
                name = f"{score}-{compiled}-{seed}"
                make_run(folder / name, points, score=score, compile=compiled, seed=seed, recorded=recorded)
    return folder


def test_what_each_row_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled_and_not(tmp_path / "runs")
    path = tmp_path / "numbers.json"
    code, out, _ = command(capsys, tmp_path / "runs", "--by", "score,compile", "--json", path)
    assert code == 0
    lines = out.splitlines()
    start = lines.index("What each row cost, mean over seeds")
    assert "tokens/s" in lines[start + 2]
    assert "memory access, %" in lines[start + 2]
    (row,) = [line for line in lines[start:] if line.startswith("score=variance, compile=true ")]
    assert row.split()[2:] == ["10", "400", "4.05", "5.00", "90.0", "50.0"]
    (found,) = [row for row in json.loads(path.read_text())["costs"] if row["row"] == "score=variance, compile=true"]
    assert found["tokens/s"] == 400
    assert found["peak memory, GB"] == pytest.approx(4.05)
    again = command(capsys, path)[1]
    assert again[again.index("What each row cost") :] == out[out.index("What each row cost") :]


def test_compiled_against_eager(tmp_path: Path) -> None:
    found = compared(compiled_and_not(tmp_path), ["score", "compile"])
    text = str(found)
    start = text.index("Compiled against eager")
    (changes,) = [line for line in text[start:].splitlines() if line.startswith("score=variance ")]
    for cell in ("20 to 10 (-50.0 %)", "2.05 to 4.05 (+97.6 %)", "40.0 to 50.0 (+25.0 %)", "6.719 to 6.719 (+0.0 %)"):
        assert f" {cell}" in changes
    page = render(found)
    assert page.count('<div class="figures">') == 2  # a figure alone in a grid would fill the width of the page
    for title in ("Compiled against eager", "Perplexity against memory"):
        assert f"<h2>{title}</h2>" in page
    assert "Compiled against eager" not in str(compared(make_sweep(tmp_path / "other", LOSSES)))


def test_costs_that_not_all_runs_recorded_are_not_averaged(tmp_path: Path) -> None:
    compiled_and_not(tmp_path, ("magnitude",))
    make_run(tmp_path / "one", [(30, 20.0, 2.0, 0.5)], compile=False, seed=2)
    for seed, damaged in enumerate(({"peak_bytes": "x"}, {"peak_bytes": None, "gpu": 3}), 3):
        make_run(tmp_path / f"{seed}", [(30, 20.0, 2.0, 0.5)], compile=True, seed=seed, recorded=damaged)
    eager, compiled = compared(tmp_path, ["compile"]).rows
    for row in (eager, compiled):
        assert mean_of(row, "peak") is None
        assert mean_of(row, "seconds") is not None
    assert "Perplexity against memory" not in render(compared(tmp_path, ["compile"]))


def test_the_page_of_costs_opens(tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    page.write_text(render(compared(compiled_and_not(tmp_path / "runs"), ["score", "compile"])))
    size, complaints = open_page(page, tmp_path)
    assert size > 20_000
    assert complaints == []


def test_rows_that_were_evaluated_once_are_seen(tmp_path: Path) -> None:
    """A line of one point has no length: it gets a mark, which matplotlib draws by reference."""

    def marks(evaluations: int) -> int:
        folder = tmp_path / str(evaluations)
        points = [(10, 1.0, 2.5, 0.5), (20, 2.0, 2.0, 0.5)][-evaluations:]
        for score, seed in (("magnitude", 0), ("magnitude", 1), ("variance", 0), ("variance", 1)):
            make_run(folder / f"{score}-{seed}", points, score=score, seed=seed)
        page = render(compared(folder, ["score"])).lower()
        return sum(page.count(f'style="fill: {colour}; stroke: {colour}"') for colour in map(str.lower, COLOURS))

    assert marks(1) > marks(2)
