"""`secateur sweep`: cells that differ in named settings alone, killed and continued, here and on Ray."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed")

from secateur.cli import main
from secateur.errors import SecateurError
from secateur.lab.config import read_experiment
from secateur.lab.runs import differing
from secateur.lab.sweep import Outcomes, Workers, cells_of
from tests import sweep_worker
from tests.damage import damage, damages, refused

ROOT = Path(__file__).parent.parent
BASE = """
[base]
model = "gpt-2x32"
data = "python"
steps = 12
batch = 8
context = 16
warmup = 2
every = 3
evaluate_every = 6
evaluation = 4
"""
PRUNED = 'score = "magnitude"\nsparsity = 0.5\n'


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(BASE + 'sparsity = 0.5\n[axes]\nscore = ["magnitude", "variance"]\nseed = [0]\n', encoding="utf-8")
    return path


def test_cells(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(
        BASE + '[axes]\nscore = ["dense", "magnitude"]\nsparsity = [0.5, 0.8]\nseed = [0, 1]\n', encoding="utf-8"
    )
    axes, cells = cells_of(path)
    assert axes == ["score", "sparsity"]
    found = {(c.experiment.score, c.experiment.sparsity, c.experiment.seed) for c in cells}
    assert found == {(None, 0.0, s) for s in (0, 1)} | {("magnitude", p, s) for p in (0.5, 0.8) for s in (0, 1)}
    assert len({cell.name for cell in cells}) == len(cells) == 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BASE, "has no [axes]"),
        (BASE + "[axis]\nseed = [0]", "Did you mean 'axes'?"),
        (BASE + "[axes]\nseed = 3", "must be a list"),
        (BASE + "[axes]\nsteps = [3]", "is in [base] and in [axes]"),
        (BASE + "[axes]\nsede = [3]", "Did you mean 'seed'?"),
        (BASE + PRUNED + '[axes]\nregrow = ["gradiant"]', "Did you mean 'gradient'?"),
        (BASE + PRUNED + '[axes]\nscope = ["models"]', "Did you mean 'model'?"),
        (BASE + '[axes]\nscope = ["model", "layer"]', "scope would do nothing in any of its runs"),
        (BASE + "until = 0.9\n" + PRUNED + "[axes]\nseed = [0]", "until would do nothing in any of its runs"),
        (BASE + PRUNED + "[axes]\n", "has no [axes]"),
        (BASE + PRUNED + '[axes]\npreset = ["as-publish"]', "Did you mean 'as-published'?"),
        ("axes = [3]", "must be a table [axes], or several [[axes]]"),
        ("axes = 3", "must be a table [axes], or several [[axes]]; got 3"),
        ("base = 3", "base must be a table [base] with settings; got 3"),
        ('[base]\nrecipe = "nowhere.toml"\n[axes]\nseed = [0]', "Cannot read"),
        ("[base]\nrecipe = 3\n[axes]\nseed = [0]", "Cannot read"),
    ],
)
def test_grids_that_cannot_be(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(text, encoding="utf-8")
    with pytest.raises(SecateurError) as error:
        cells_of(tmp_path / "grid.toml")
    assert said in str(error.value)


def test_none_is_a_value_of_an_axis(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(
        BASE + 'sparsity = 0.5\nuntil = 0.9\n[axes]\nscore = ["dense", "magnitude"]\nregrow = ["none", "random"]\n'
        'allocation = ["none", "erk"]\nseed = [0]', encoding="utf-8",
    )  # fmt: skip
    found = {cell.name: cell.experiment for cell in cells_of(path)[1]}
    assert set(found) == {"score=dense-seed=0"} | {
        f"score=magnitude-regrow={back}-allocation={share}-seed=0"
        for back in ("none", "random")
        for share in ("none", "erk")
    }
    assert {(one.regrow, one.allocation) for one in found.values()} >= {(None, None), ("random", "erk")}


def test_a_base_may_be_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("steps = 7\nbatch = 3\n", encoding="utf-8")
    (tmp_path / "grid.toml").write_text('[base]\nrecipe = "mine.toml"\nbatch = 4\n[axes]\nseed = [5]', encoding="utf-8")
    experiment = cells_of(tmp_path / "grid.toml")[1][0].experiment
    assert (experiment.steps, experiment.batch, experiment.seed) == (7, 4, 5)


def test_a_dense_run_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    text = (
        BASE.replace("every = 3\n", "")
        + 'regrow = "random"\nuntil = 0.9\n[axes]\nscore = ["dense", "magnitude"]\nsparsity = [0.5]\n'
    )
    path.write_text(text + 'every = [2, 3]\nscope = ["model", "layer"]\n', encoding="utf-8")
    _, cells = cells_of(path)
    assert sum(cell.experiment.score is None for cell in cells) == 1
    assert len(cells) == 5


def test_every_grid_in_the_recipes_is_one() -> None:
    grids = sorted((ROOT / "recipes" / "sweeps").glob("*.toml"))
    assert grids
    for path in grids:
        axes, cells = cells_of(path)
        assert "score" in axes
        assert len(cells) > 10


def test_no_two_recipes_differ_in_one_setting() -> None:
    """Such a pair is a recipe and `secateur train RECIPE --set NAME=VALUE`, or a grid."""
    recipes = {path.name: asdict(read_experiment(path, {})) for path in (ROOT / "recipes").glob("*.toml")}
    for (one, first), (other, second) in itertools.combinations(recipes.items(), 2):
        assert len(differing([first, second])) > 1, f"{one} and {other}"


def test_shares_of_a_sweep_make_the_whole(grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for share, done in (
        ("2/2", {"score=variance-seed=0"}),
        ("1/2", {"score=variance-seed=0", "score=magnitude-seed=0"}),
    ):
        assert main(["sweep", str(grid), "--out", str(tmp_path / "runs"), "--cpu", "--part", share]) == 0
        assert {path.parent.name for path in tmp_path.glob("runs/*/summary.json")} == done
    for share in ("0/2", "3/2", "1", "1/x"):
        with pytest.raises(SystemExit):
            main(["sweep", str(grid), "--part", share])
        assert "the second of three" in capsys.readouterr().err


def test_numbers_only(grid: Path, tmp_path: Path) -> None:
    for name, more in (("whole", []), ("lean", ["--numbers-only"])):
        assert main(["sweep", str(grid), "--out", str(tmp_path / name), "--cpu", "--part", "1/2", *more]) == 0
    found = {
        name: {p.name for p in (tmp_path / name / "score=magnitude-seed=0").iterdir()} for name in ("whole", "lean")
    }
    assert found["whole"] - found["lean"] == {"checkpoint", "best"}
    assert (
        main(["sweep", str(grid), "--out", str(tmp_path / "lean"), "--cpu"]) == 0
    )  # the finished one is not begun again


def test_killed_and_continued(grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed as soon as one cell is done; then the other is done too, and the first is not done again."""
    assert main(["sweep", str(grid), "--out", str(tmp_path / "whole"), "--cpu"]) == 0
    command = [sys.executable, "-m", "secateur", "sweep", str(grid), "--out", str(tmp_path / "broken"), "--cpu"]
    first = tmp_path / "broken" / "score=magnitude-seed=0" / "summary.json"
    quiet = subprocess.DEVNULL
    same = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums round alike
    with subprocess.Popen(command, cwd=ROOT, env=same, stderr=quiet, stdout=quiet) as process:
        deadline = time.monotonic() + 120
        while not first.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    done = os.stat(first).st_mtime_ns
    capsys.readouterr()
    assert main(["sweep", str(grid), "--out", str(tmp_path / "broken"), "--cpu"]) == 0
    assert os.stat(first).st_mtime_ns == done
    assert "secateur compare" in capsys.readouterr().out
    for cell in ("score=magnitude-seed=0", "score=variance-seed=0"):
        found, right = (
            json.loads((tmp_path / name / cell / "summary.json").read_text()) for name in ("broken", "whole")
        )
        assert found["held_out_loss"] == right["held_out_loss"]
        assert found["pruned"] == right["pruned"] == round(0.5 * right["prunable"])


def test_a_damaged_cell_is_never_a_finished_one(grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", str(grid), "--cpu", "--part", "1/2", "--out"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    cell = "score=magnitude-seed=0"
    for name in ("summary.json", "metrics.jsonl", "config.json", "checkpoint/optimizer-0.safetensors"):
        for how, content in damages(tmp_path / "whole" / cell / name).items():
            if (name, how) == ("summary.json", "missing"):
                continue
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / "whole", copy)
            damage(copy / cell / name, how, content)
            code = main([*command, str(copy)])
            said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("secateur: ")]
            assert (code, len(said)) == (2, 2), (name, how, said)  # the first says what it will do
            assert cell in said[1]
            shutil.rmtree(copy)


def test_a_folder_that_holds_something_else_is_refused(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    for out, said in (("grid.toml", "is a file"), ("grid.toml/out", "Nothing can be written")):
        assert said in refused(capsys, main(["sweep", str(grid), "--cpu", "--out", str(tmp_path / out)]))
    assert "holds no runs" in refused(capsys, main(["sweep", str(grid), "--cpu", "--out", str(tmp_path / "mine")]))


def test_on_a_ray_cluster_of_two_nodes(grid: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
        assert sum(node["Alive"] for node in ray.nodes()) == 2
        assert main(["sweep", str(grid), "--out", str(tmp_path / "runs"), "--cpu", "--engine", "ray"]) == 0
    finally:
        ray.shutdown()
        cluster.shutdown()
    for cell in ("score=magnitude-seed=0", "score=variance-seed=0"):
        assert json.loads((tmp_path / "runs" / cell / "summary.json").read_text())["sparsity"] == 0.5


def test_workers_that_fail_do_not_end_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [sweep_worker.job(tmp_path, how) for how in ("bad input", "well", "killed", "bug", "time is up")]
    written: list[int] = []
    outcomes = Outcomes(len(jobs), lambda: written.append(1))
    Workers(3).run(jobs, sweep_worker.work, outcomes, None)
    assert outcomes.ended == 5
    assert outcomes.unfinished == ["time is up"]
    assert len(written) == 1  # after the one that finished
    assert sorted(outcomes.failed) == [
        "bad input (No such score)",
        f"bug (RuntimeError: shapes differ (see {tmp_path / 'bug' / 'error.txt'}))",
        "killed (its process ended with code 9)",
    ]
    assert "in work" in (tmp_path / "bug" / "error.txt").read_text()
    assert not (tmp_path / "bad input" / "error.txt").exists()
    with pytest.raises(SecateurError, match="3 of 5 runs failed: "):
        outcomes.check()
    assert "well: perplexity 2.0000, 50.00% sparsity" in capsys.readouterr().err


def test_no_more_at_a_time_than_asked_and_none_after_the_time(tmp_path: Path) -> None:
    jobs = [sweep_worker.job(tmp_path / str(number), "well") for number in range(3)]
    outcomes = Outcomes(3, lambda: None)
    Workers(2).run(jobs, sweep_worker.work, outcomes, time.time() - 1)
    assert outcomes.ended == 0
    Workers(1).run(jobs[:2], sweep_worker.work, outcomes, time.time() + 600)
    assert outcomes.ended == 2
    (_, first), (second, _) = sorted(tuple(map(float, (job.folder / "times").read_text().split())) for job in jobs[:2])
    assert first <= second


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_workers_end_with_their_parent(how: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.sweep_worker", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, env=environment) as process:
        assert waited(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
        process.send_signal(how)
    found = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert waited(lambda: not any(Path(f"/proc/{pid}").exists() and alive(pid) for pid in found))


def waited(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended may still be listed until its parent asks for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_sweep_in_pieces_with_a_record(grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped by the time, continued by two workers; then the folders are lost, and the record is enough."""
    record = tmp_path / "record.json"
    command = ["sweep", str(grid), "--cpu", "--numbers-only", "--checkpoint-every", "2", "--record", str(record)]
    assert main([*command, "--out", str(tmp_path / "runs"), "--max-time", "0.001"]) == 0
    assert "The time is up: 2 of 2 runs are not finished; the same command continues." in capsys.readouterr().out
    assert not record.exists()
    assert main([*command, "--out", str(tmp_path / "runs"), "--max-time", "600", "--workers", "2"]) == 0
    assert f"secateur compare {record} --by score" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert sorted(run["settings"]["score"] for run in found["runs"]) == ["magnitude", "variance"]
    assert found["baseline"] == "score=magnitude"
    assert all(run["summary"]["epochs"] > 0 for run in found["runs"])
    shutil.rmtree(tmp_path / "runs")
    assert main([*command, "--out", str(tmp_path / "other")]) == 0
    assert "2 runs, 2 of them in the record already" in capsys.readouterr().err
    assert not list(tmp_path.glob("other/*"))
    assert main(["compare", str(record)]) == 0


def test_a_record_grows_with_every_run_and_continues(grid: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = ["sweep", str(grid), "--cpu", "--record", str(record), "--out"]
    for part, count in (("2/2", 1), ("1/2", 2)):
        assert main([*command, str(tmp_path / part[0]), "--part", part]) == 0
        assert len(json.loads(record.read_text())["runs"]) == count


def test_blocks_of_axes_add_up(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(
        BASE + '[[axes]]\nscore = ["dense", "bitter7"]\nsparsity = [0.5]\nseed = [0, 1]\n'
        '[[axes]]\nscore = ["bitter7"]\nsparsity = [0.5, 0.8]\nbudget = ["extended"]\nseed = [0]\n'
        '[[axes]]\nscore = ["bitter7"]\nsparsity = [0.5]\nseed = [1]\n'
    )
    axes, cells = cells_of(path)
    assert axes == ["score", "sparsity", "budget"]
    assert [cell.name for cell in cells] == [
        "score=dense-seed=0",
        "score=dense-seed=1",
        "score=bitter7-sparsity=0.5-seed=0",
        "score=bitter7-sparsity=0.5-seed=1",
        "score=bitter7-sparsity=0.5-budget=extended-seed=0",
        "score=bitter7-sparsity=0.8-budget=extended-seed=0",
    ]


def test_a_setting_of_all_cells(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {cell.experiment.steps for cell in cells_of(grid, {"steps": 5, "lr": 0.1})[1]} == {5}
    assert "--set score: " in refused(capsys, main(["sweep", str(grid), "--set", "score=variance"]))
    assert "Did you mean 'steps'?" in refused(capsys, main(["sweep", str(grid), "--set", "step=3"]))


def test_a_dry_run_tries_every_cell_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "grid.toml"
    axes = '[axes]\nscore = ["dense", "magnitude"]\nsparsity = [0.5]\nscope = ["model", "layer"]\nseed = [0, 1]\n'
    path.write_text(BASE + axes)
    assert main(["sweep", str(path), "--cpu", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "score=dense-seed=0: ok: gpt-2x32 (all 2 layers), dense"
    assert lines[1].startswith(
        "score=magnitude-sparsity=0.5-scope=model-seed=0: ok: gpt-2x32 (all 2 layers), magnitude"
    )
    assert lines[1].endswith("12,288 of 24,576 weights pruned, as asked")
    assert lines[-1] == "6 runs, 72 steps, 9,216 tokens or images in all"
    assert len(lines) == 4
    assert not (tmp_path / "sweeps").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "1"], "--cpus and --gpus go with --engine ray"),
        (["--engine", "ray", "--workers", "2"], "--workers does not go with --engine ray"),
    ],
)
def test_options_that_do_not_go_together(
    words: list[str], said: str, grid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, main(["sweep", str(grid), *words]))
