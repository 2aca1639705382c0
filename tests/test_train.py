"""`secateur train`: models, settings, the loop, killed and continued, one process and two."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from secateur.cli import main
from secateur.cli.train import add_options, changes_of, name_of
from secateur.errors import SecateurError
from secateur.lab import models, monitor
from secateur.lab.config import Experiment, read_experiment
from secateur.lab.run import RunFolder, run
from secateur.lab.trainer import Execution, Trainer, dry_run
from secateur.optim import PRESETS
from secateur.pruner import Pruner
from tests.damage import damage, damages, hostile_pickle, refused, small_disk
from tests.processes import Done, run_ranks

ROOT = Path(__file__).parent.parent
SMALL = Experiment(
    model="gpt-2x32", data="python", steps=20, batch=8, context=16, warmup=4, every=4, evaluate_every=10, evaluation=6,
    score="variance", sparsity=0.6, optimizer="adamwprune",
)  # fmt: skip
HOW = Execution(cpu=True, checkpoint_every=6, log_every=1)


def numbers(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.accelerator.get_state_dict(trainer.model).items()}


def test_lenet_on_digits_at_70_percent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / "lenet5-digits-variance-70.toml")
    assert main(["train", recipe, "--out", str(tmp_path / "run"), "--cpu"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["quality_name"] == "accuracy"
    assert summary["quality"] >= 0.95
    assert summary["pruned"] == round(0.7 * summary["prunable"])
    assert summary["seconds"] < 120
    assert "accuracy 0.9" in capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text()
    for title in ("Loss", "Sparsity by layer", "Time of a step", "The gradient of one weight"):
        assert f"<h2>{title}</h2>" in page
    assert not re.search(r'(src|href)="http', page)  # nothing is fetched from anywhere
    assert main(["train", recipe, "--out", str(tmp_path / "run"), "--cpu"]) == 0
    assert "is finished already" in capsys.readouterr().err


def test_compiled_or_not_is_the_same_but_for_rounding(tmp_path: Path) -> None:
    """And compiled once for all runs of a process."""
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    found = {}
    for name, settings in {"plain": {}, "compiled": {"compile": True}, "other": {"compile": True, "seed": 1}}.items():
        experiment = replace(SMALL, model="gpt-1x32", **settings)  # one layer: half as much to compile
        found[name] = run(Trainer(experiment, HOW), RunFolder(tmp_path / name, experiment, ""))
    assert graphs["unique_graphs"] == before + 1
    assert found["compiled"]["held_out_loss"] == pytest.approx(found["plain"]["held_out_loss"], rel=1e-4)
    assert found["other"]["held_out_loss"] != found["compiled"]["held_out_loss"]
    assert found["compiled"]["gradient_of"] == found["plain"]["gradient_of"]
    saved = [load_file(tmp_path / name / "best" / "model.safetensors") for name in ("plain", "compiled")]
    assert saved[0].keys() == saved[1].keys()


def test_a_compiled_model_is_judged_uncompiled_also_behind_ddp(tmp_path: Path) -> None:
    trainer = Trainer(replace(SMALL, compile=True), HOW)
    plain = trainer.bare_model()
    assert not hasattr(plain, "_orig_mod")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        trainer.model = torch.nn.parallel.DistributedDataParallel(trainer.model)
        assert trainer.bare_model() is plain
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", SMALL, "")
    other = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{other}; input()", str(tmp_path / "run" / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        half_written = tmp_path / "run" / ".checkpoint.0123abcd"
        half_written.mkdir()
        with pytest.raises(SecateurError, match="Another process is training"):
            run(Trainer(SMALL, HOW), folder)
        assert half_written.exists()  # it is the other's
        process.kill()
    assert run(Trainer(SMALL, HOW), folder)["steps"] == SMALL.steps
    assert not half_written.exists()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "adamwspam", "score": "movement"},
        {"optimizer": "sgd", "score": "magnitude"},
        {"compile": True},
    ],
)
def test_killed_and_continued_to_the_bit(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = replace(SMALL, **settings)
    whole = Trainer(experiment, HOW)
    run(whole, RunFolder(tmp_path / "whole", experiment, ""))
    real = Trainer.step

    def dying(self: Trainer) -> torch.Tensor:
        if self.progress.step == 15:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Trainer, "step", dying)
    with pytest.raises(KeyboardInterrupt):
        run(Trainer(experiment, HOW), RunFolder(tmp_path / "broken", experiment, ""))
    monkeypatch.setattr(Trainer, "step", real)
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16, "lo')  # cut off in the middle of a line
    again = Trainer(experiment, HOW)
    run(again, RunFolder(tmp_path / "broken", experiment, ""))
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(whole).items())
    assert numbers(tmp_path / "broken") == numbers(tmp_path / "whole")
    looks = [json.loads((tmp_path / name / "gradient.json").read_text()) for name in ("broken", "whole")]
    assert looks[0] == looks[1]
    assert len(looks[0]) == experiment.steps


def test_micro_batches_give_the_same_step() -> None:
    losses = []
    for micro in (8, 3):
        trainer = Trainer(SMALL, Execution(cpu=True, micro_batch=micro))
        losses.append([float(trainer.step()) for _ in range(6)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "adamwprune"])
def test_fp16_with_scaled_gradients(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As good as fp32, continued to the bit, with the scale; a step whose gradients overflow is skipped."""
    experiment = replace(SMALL, precision="fp16", optimizer=optimizer)
    whole = Trainer(experiment, HOW)
    assert whole.scaler is not None
    seen: list[torch.Tensor] = []
    whole.model.register_forward_hook(lambda *arguments: seen.append(arguments[2].detach()))
    found = run(whole, RunFolder(tmp_path / "whole", experiment, ""))
    assert seen[0].dtype == torch.float16
    plain = run(Trainer(replace(SMALL, optimizer=optimizer), HOW), RunFolder(tmp_path / "fp32", SMALL, ""))
    assert found["held_out_loss"] == pytest.approx(plain["held_out_loss"], rel=0.02)
    assert found["pruned"] == plain["pruned"]
    folder = RunFolder(tmp_path / "broken", experiment, "")
    with monkeypatch.context() as patched:
        patched.setattr(torch.amp.GradScaler, "__init__", partialmethod(torch.amp.GradScaler.__init__, init_scale=2.0))
        run(Trainer(experiment, replace(HOW, max_seconds=0.0)), folder)
    again = Trainer(experiment, HOW)
    assert again.scaler is not None
    assert folder.checkpoint is not None
    again.load(folder.checkpoint)
    assert again.scaler.get_scale() == 2.0
    again.scaler.load_state_dict({**again.scaler.state_dict(), "scale": 1e38})  # every gradient overflows
    before = weights(again)
    again.step()
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in before.items())
    assert again.scaler.get_scale() == pytest.approx(5e37)


def test_fp16_is_refused_for_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(SMALL, HOW)
    trainer.experiment = replace(SMALL, precision="fp16")
    monkeypatch.setattr(Trainer, "sharded", True)
    with pytest.raises(SecateurError, match="fp16 does not work with a sharded model. Use bf16."):
        trainer._build_scaler()


def test_a_checkpoint_from_before_fp16_is_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", SMALL, "")
    run(Trainer(SMALL, replace(HOW, max_seconds=0.0)), folder)
    path = tmp_path / "run" / "checkpoint" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in state.items() if name not in ("scale", "growth")}))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    old = {name: value for name, value in config.items() if name not in ("preset", "prunable", "spam_theta")}
    (tmp_path / "run" / "config.json").write_text(json.dumps(old))
    trainer = Trainer(SMALL, replace(HOW, max_seconds=0.0))
    run(trainer, RunFolder(tmp_path / "run", SMALL, ""))
    assert trainer.progress.step == 2


def test_steps_and_shares_mean_the_same() -> None:
    shares = Experiment(**PRUNED, steps=400, begin=0.25, end=0.75, warmup=0.1, regrow="random", until=0.9)
    steps = Experiment(**PRUNED, steps=400, begin=100, end=300, warmup=40, regrow="random", until=360)
    assert shares.ramp() == steps.ramp()
    assert (shares.until_step, shares.warmup_steps) == (steps.until_step, steps.warmup_steps) == (360, 40)
    assert [shares.rate(step) for step in (1, 40, 41, 400)] == [steps.rate(step) for step in (1, 40, 41, 400)]
    assert Experiment(**PRUNED, end=1).end_step == 1000  # all of the steps, not the first
    assert Experiment(warmup=1).warmup_steps == 1
    longer = Experiment(score="bitter7", sparsity=0.5, budget="extended", end=1600)
    assert (longer.end_step, longer.steps_taken) == (1600, 1700)


def test_settings_of_spam_by_name() -> None:
    assert Experiment().spam_settings is None
    assert Experiment(optimizer="adamwspam").spam_settings == PRESETS["paper"]
    found = Experiment(optimizer="adamwprune", spam="adamwprune", spam_theta=9.0, spam_spike=0.0).spam_settings
    assert found == replace(PRESETS["adamwprune"], theta=9.0, spike=None)
    optimizer: Any = Experiment(optimizer="adamwspam", spam_quiet=7).build_optimizer(torch.nn.Linear(2, 2))
    assert optimizer.spam.quiet == 7
    words = options("--set", "optimizer=adamwspam", "--set", "spam_floor=0.5", "--set", "spam_warm_decay=true")
    assert read_experiment(None, words).spam_settings == replace(PRESETS["paper"], floor=0.5, warm_decay=True)


def test_a_dry_run_counts_the_pruned_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in ({}, {"scope": "row"}, {"score": "bitter4"}, {"pattern": "2:4", "sparsity": 0.0}):
        assert ", as asked" in dry_run(replace(SMALL, **settings), cpu=True)
    real = Pruner.report
    monkeypatch.setattr(Pruner, "report", lambda self: replace(real(self), tensors=real(self).tensors[1:]))
    with pytest.raises(SecateurError, match=r"of 21,504 weights were pruned, but a sparsity of 0.6 means 12,902"):
        dry_run(SMALL, cpu=True)


def test_a_dry_run_of_a_model_that_does_not_fit_has_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: namedtuple("Memory", "available")(800_000))
    assert "gpt-4x32 (2 of 4 layers: all of them need 0.0 GB, and 0.0 GB are free)" in dry_run(
        replace(SMALL, model="gpt-4x32"), cpu=True
    )


def test_the_time_limit_is_of_one_call(tmp_path: Path) -> None:
    """A run that already took longer than the limit goes on for that long again."""
    folder = RunFolder(tmp_path / "run", SMALL, "")
    run(Trainer(SMALL, replace(HOW, max_seconds=0.0)), folder)
    state = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())
    (tmp_path / "run" / "checkpoint" / "state.json").write_text(json.dumps({**state, "seconds": 900.0}))
    summary = run(Trainer(SMALL, replace(HOW, max_seconds=300.0)), folder)
    assert (summary["steps"], summary["seconds"] > 900) == (20, True)
    assert summary["train_size"] > summary["seen"]
    assert 0 < summary["epochs"] < 1
    assert summary["peak_bytes"] > 1e7


def test_time_runs_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", SMALL, "")
    summary = run(Trainer(SMALL, replace(HOW, max_seconds=0.0)), folder)
    assert (summary["steps"], summary["asked_steps"]) == (1, 20)
    assert not folder.finished
    assert run(Trainer(SMALL, HOW), folder)["steps"] == 20
    assert folder.finished


def test_best_is_of_the_final_sparsity(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = RunFolder(tmp_path / "run", SMALL, "")
    run(Trainer(SMALL, HOW), folder)
    saved = load_file(str(tmp_path / "run" / "best" / "model.safetensors"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    zeros = sum(int((saved[row["name"]] == 0).sum()) for row in report["tensors"])
    assert zeros >= round(0.6 * report["prunable"])


def test_a_folder_of_another_experiment_is_refused(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run", SMALL, "")
    with pytest.raises(SecateurError, match=r"other settings \(lr, seed\)"):
        RunFolder(tmp_path / "run", replace(SMALL, seed=1, lr=0.5), "")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(SecateurError, match="holds no run"):
        RunFolder(tmp_path / "mine", SMALL, "")


def words_for(out: Path, **settings: Any) -> list[str]:
    """The words of `secateur train` for SMALL."""
    words = {key: getattr(SMALL, key) for key in ("model", "steps", "batch", "context", "warmup", "every")}
    words |= {"evaluate_every": 10, "evaluation": 6, "score": "variance", "sparsity": 0.6, **settings}
    rest = ["train", "--cpu", "--tracker=none", "--checkpoint-every=6", f"--out={out}"]
    return [*rest, *(f"--set={key}={value}" for key, value in words.items())]


def in_shards(out: Path, dies_after: int = -1, **settings: Any) -> Done:
    """`secateur train` of SMALL on two processes, with FSDP2."""
    log = out.with_suffix(".log")
    return run_ranks(2, "tests.fsdp_worker", *words_for(out, **settings), log=log, DIES_AFTER=f"{dies_after}")


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Gradients are averaged in another order, so only nearly; but every process has the same masks, exactly."""
    qualities = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        if processes == 1:
            done = run_ranks(1, "secateur", *words_for(out), log=tmp_path / "log")
            assert done.well, done.said
        else:
            torchrun = ["torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "secateur"]
            command = [sys.executable, "-m", *torchrun, *words_for(out)]  # as users launch it
            launched = subprocess.run(command, timeout=180, cwd=ROOT, capture_output=True, text=True, check=False)
            assert launched.returncode == 0, launched.stderr
        summary = json.loads((out / "summary.json").read_text())
        assert summary["processes"] == processes
        assert summary["pruned"] == round(0.6 * summary["prunable"])
        qualities.append(summary["held_out_loss"])
    assert qualities[1] == pytest.approx(qualities[0], rel=1e-3)


def test_a_process_without_held_out_windows_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty batch would have a mean loss that is not a number."""
    trainer = Trainer(replace(SMALL, evaluation=1), HOW)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    shares = []
    for process in range(2):
        monkeypatch.setattr(type(trainer.accelerator), "process_index", process)
        shares.append([len(batch) for batch in trainer._held_out()])
    assert shares == [[1], []]


def test_averages_in_shards_are_those_that_are_judged_and_saved(tmp_path: Path) -> None:
    settings = {"model": "lenet5", "data": "digits", "batch": 32, "context": 128, "evaluation": "none"}
    done = in_shards(tmp_path / "run", **settings)
    assert done.well, done.said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    experiment = replace(SMALL, model="lenet5", data="digits", batch=32, context=128, evaluation=None)
    alone = Trainer(experiment, Execution(cpu=True, micro_batch=16))
    alone.model.load_state_dict(load_file(tmp_path / "run" / "best" / "model.safetensors"))
    assert summary["held_out_loss"] == pytest.approx(alone.evaluate()["held_out_loss"], rel=1e-6)


def test_shards_train_as_one_and_go_on_to_the_same_bits(tmp_path: Path) -> None:
    """FSDP2 by Accelerate, with nine held-out windows: two batches for one process, one for the other."""
    done = in_shards(tmp_path / "whole", evaluation=9)
    assert done.well, done.said
    done = in_shards(tmp_path / "killed", dies_after=13, evaluation=9)
    assert 9 in done.codes, done.said
    assert not (tmp_path / "killed" / "summary.json").exists()
    done = in_shards(tmp_path / "killed", evaluation=9)
    assert done.well, done.said
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    whole, killed = (load_file(tmp_path / name / "best" / "model.safetensors") for name in ("whole", "killed"))
    assert [name for name in whole if not torch.equal(whole[name], killed[name])] == []
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    gone = sum(int((tensor == 0).sum()) for name, tensor in whole.items() if "layers" in name and tensor.ndim == 2)
    assert gone == summary["pruned"] == round(0.6 * summary["prunable"])
    alone = Trainer(replace(SMALL, optimizer="adamw", evaluation=9), HOW)
    found = run(alone, RunFolder(tmp_path / "alone", alone.experiment, alone.fingerprint))
    assert summary["held_out_loss"] == pytest.approx(found["held_out_loss"], rel=1e-3)


def options(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return changes_of(parser.parse_args(words))


def test_the_names_of_the_seeds() -> None:
    words = (
        "--optimizer",
        "adamwprune",
        "--variant",
        "bitter7",
        "--target-sparsity",
        "0.5",
        "--max-iters",
        "9",
        "--compile",
    )
    assert options(*words) == {
        "optimizer": "adamwprune",
        "score": "bitter7",
        "sparsity": 0.5,
        "steps": 9,
        "compile": True,
    }
    assert options("--pruning-method", "state") == {"score": "bitter0"}
    assert options("--pruning-method", "movement", "--set", "lr=3e-4") == {"score": "movement", "lr": 3e-4}
    assert options("--pruning-method", "none") == {"score": None}
    with pytest.raises(SecateurError, match="goes with --pruning-method state"):
        options("--variant", "bitter3", "--pruning-method", "magnitude")


def test_the_extended_budget_is_that_of_adamwprune() -> None:
    more = {"bitter2": 1210, "bitter3": 1300, "bitter3(eps=1e-6)": 1300, "bitter4": 1300, "bitter7": 1700}
    for score, steps in more.items():
        experiment = Experiment(score=score, sparsity=0.5, budget="extended")
        assert experiment.steps_taken == steps
        assert experiment.ramp().end == 800  # type: ignore[union-attr]
        assert experiment.rate(steps) == pytest.approx(1e-4)
    assert Experiment(score="bitter3", sparsity=0.5).steps_taken == 1000
    for score in ("magnitude", "bitter0", "bitter8", "variance"):
        with pytest.raises(SecateurError, match="budget does nothing for this score: AdamWPrune gave it no more steps"):
            Experiment(score=score, sparsity=0.5, budget="extended")


PRUNED = {"score": "variance", "sparsity": 0.5}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": "adamm"}, "Did you mean 'adam"),
        ({"model": "gpt3"}, "No model 'gpt3'. Did you mean 'gpt2'?"),
        ({"sparsity": 0.5}, "sparsity does nothing without a score"),
        ({"score": "variance"}, "needs a sparsity above 0"),
        ({"score": "varianc", "sparsity": 0.5}, "varianc"),
        ({**PRUNED, "begin": 0.9}, "begin and end must be fractions"),
        ({**PRUNED, "begin": 900}, "begin and end must be fractions"),
        ({**PRUNED, "end": 1001}, "in a run of 1000 steps"),
        ({**PRUNED, "end": 100.5}, "end must be a fraction of the steps or a whole number of them"),
        ({**PRUNED, "begin": math.nan}, "begin must be a fraction of the steps or a whole number of them; got nan"),
        ({**PRUNED, "end": math.inf}, "end must be a fraction of the steps or a whole number of them; got inf"),
        ({"scope": "layer"}, "scope does nothing without a score"),
        ({"allocation": "erk", "end": 0.9}, "end, allocation do nothing without a score"),
        ({"skip": ["head"]}, "skip does nothing without a score"),
        ({"optimizer": "sgd", "beta1": 0.8}, "beta1 does nothing with sgd"),
        ({**PRUNED, "schedule": "constant", "begin": 0.2}, "begin does nothing with schedule constant"),
        ({"score": "variance", "pattern": "2:4", "end": 0.9}, "end does nothing with a pattern alone"),
        ({**PRUNED, "drop": 0.1}, "drop does nothing without regrow"),
        ({"model": "lenet5", "data": "digits", "context": 64}, "context does nothing with a model of images"),
        ({"spam_theta": 50}, "spam_theta does nothing without spam"),
        ({"optimizer": "adamwspam", "spam_warmup": 900}, "spam_*: warmup=900 is longer than every=500"),
        ({"preset": "as-published"}, "It got no score."),
        ({**PRUNED, "preset": "as-published"}, "needs a score of AdamWPrune: bitter0,"),
        ({**PRUNED, "preset": "published"}, "There is no preset 'published'. Did you mean 'as-published'?"),
        ({"precision": "fp8"}, "Use one of fp32, bf16, fp16."),
        ({"score": "variance", "sparsity": 0.5, "regrow": "random"}, "Set until to more than end"),
        ({"spam": "paper"}, "spam goes with adamwspam"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"lr": -1}, "lr must be between 0"),
        ({"beta2": 1.5}, "beta2 must be between"),
        ({"regrow": "gradient"}, "regrow does nothing without a score"),
        ({"mask_gradients": True}, "mask_gradients does nothing without a score"),
        ({"mask_gradients": True, **PRUNED, "clip": 0}, "mask_gradients does nothing without clipping"),
        ({"mask_gradients": True, **PRUNED, "regrow": "gradient", "until": 0.9}, "ranks pruned weights"),
        ({"learning_rate": 1e-3}, "no setting 'learning_rate'"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SecateurError) as error:
        read_experiment(None, changes)
    assert said in str(error.value)


def test_masked_gradients_change_a_run_only_by_clipping() -> None:
    pruned = replace(SMALL, steps=4, evaluate_every=4, every=1, begin=0.0, end=0.1, sparsity=0.8)
    losses = {
        (clip, masked): Trainer(replace(pruned, clip=clip, mask_gradients=masked), HOW).train()["held_out_loss"]
        for clip in (1e3, 0.01)
        for masked in (False, True)
    }
    assert losses[1e3, False] == losses[1e3, True]
    assert losses[0.01, False] != losses[0.01, True]


def test_model_and_data_must_go_together() -> None:
    with pytest.raises(SecateurError, match="lenet5 reads images, which 'python' is not"):
        Trainer(Experiment(model="lenet5"), HOW)


@pytest.mark.parametrize(
    "recipe", ["lenet5-mnist-variance-90", "resnet18-variance-90", "gpt-python-variance-80", "gpt-small-dense"]
)
def test_dry_runs(recipe: str) -> None:
    assert dry_run(read_experiment(ROOT / "recipes" / f"{recipe}.toml", {}), cpu=True).startswith("ok: ")


def test_every_recipe_is_an_experiment() -> None:
    recipes = sorted((ROOT / "recipes").glob("*.toml"))
    assert len(recipes) >= 10
    for recipe in recipes:
        assert recipe.read_text().startswith("# ")
        assert name_of(read_experiment(recipe, {}))


def test_sizes_of_models() -> None:
    """As published for these networks."""
    sizes = {("lenet5", 1, 10, 28): 61_750, ("resnet18", 3, 10, 32): 11_173_962, ("resnet50", 3, 1000, 224): 25_557_032}
    for (name, *shape), size in sizes.items():
        with torch.device("meta"):
            assert sum(p.numel() for p in models.image_model(name, *shape).parameters()) == size


def test_the_time_of_each_part_of_a_step() -> None:
    trainer = Trainer(SMALL, Execution(cpu=True, micro_batch=3))
    trainer.stopwatch.every = 2
    began = time.perf_counter()
    for _ in range(4):
        trainer.step()
    whole = time.perf_counter() - began
    found = trainer.stopwatch.milliseconds()
    assert trainer.stopwatch.steps == 2
    assert set(found) == set(monitor.PARTS)
    assert all(value > 0 for value in found.values())
    assert 2 * sum(found.values()) < 1e3 * whole
    assert Trainer(SMALL, HOW).stopwatch.milliseconds() == {}


def test_averages_are_adams() -> None:
    values = torch.randn(12, generator=torch.Generator().manual_seed(0)).tolist()
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], betas=(0.9, 0.999))
    first, second = [], []
    for step, value in enumerate(values, 1):
        parameter.grad = torch.tensor([value])
        optimizer.step()
        state = optimizer.state[parameter]
        first.append(float(state["exp_avg"]) / (1 - 0.9**step))
        second.append((float(state["exp_avg_sq"]) / (1 - 0.999**step)) ** 0.5)
    lines = monitor.gradient_lines(values)
    assert lines["gradient"] == values
    assert lines["average, beta1 0.9"] == pytest.approx(first, rel=1e-5)
    assert lines["root of averaged square, beta2 0.999"] == pytest.approx(second, rel=1e-5)


def test_a_ruined_model_is_never_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Trainer.evaluate
    monkeypatch.setattr(
        Trainer,
        "evaluate",
        lambda self: {**real(self), **({"held_out_loss": math.nan} if self.progress.step == 20 else {})},
    )
    trainer = Trainer(replace(SMALL, score=None, sparsity=0.0, every=20), HOW)
    run(trainer, RunFolder(tmp_path / "run", trainer.experiment, ""))
    assert math.isfinite(trainer.progress.best)


def test_killed_while_a_checkpoint_takes_its_place(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", SMALL, "")
    run(Trainer(SMALL, replace(HOW, max_seconds=0.0)), folder)
    (folder.path / "checkpoint").rename(folder.path / ".checkpoint.0123abcd.old")
    (folder.path / ".checkpoint.0123abcd").mkdir()
    trainer = Trainer(SMALL, replace(HOW, max_seconds=0.0))
    run(trainer, RunFolder(tmp_path / "run", SMALL, ""))
    assert trainer.progress.step == 2  # it went on, it did not begin again
    assert not list(folder.path.glob(".checkpoint*"))


def test_other_data_is_another_experiment(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three " * 500)
    experiment = replace(SMALL, data=f"text:{tmp_path / 'a.txt'}")
    before = Trainer(experiment, HOW).fingerprint
    RunFolder(tmp_path / "run", experiment, before)
    (tmp_path / "a.txt").write_text("one two tree  " * 500)
    after = Trainer(experiment, HOW).fingerprint
    with pytest.raises(SecateurError, match=r"other settings \(fingerprint\)"):
        RunFolder(tmp_path / "run", experiment, after)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with a `finished` run and one that was `stopped` after its last checkpoint, and the command for both."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").write_text("one two three four five " * 400)
    settings = {"model": "gpt-1x16", "data": f"text:{folder / 'text'}", "steps": 8, "batch": 4, "context": 8}
    settings |= {"warmup": 2, "every": 2, "evaluate_every": 4, "evaluation": 3, "score": "variance", "sparsity": 0.5}
    words = ["train", "--cpu", "--tracker=none", "--checkpoint-every=4"]
    words += [f"--set={key}={value}" for key, value in settings.items()]
    assert main([*words, "--out", str(folder / "finished")]) == 0
    shutil.copytree(folder / "finished", folder / "stopped")
    (folder / "stopped" / "summary.json").unlink()
    return folder, words


RESUMED = ("config.json", "metrics.jsonl", "best/model.safetensors", "checkpoint/state.json")
TENSORS = tuple(f"checkpoint/{name}-0.safetensors" for name in ("model", "optimizer", "pruner", "random"))
REPORTS = ("summary.json", "report.json", "gradient.json")
# What stands for itself: reports that are written again, and those whose numbers nobody reads.
HARMLESS = {("gradient.json", "missing"), ("gradient.json", "another type"), ("summary.json", "missing")}
HARMLESS |= {("report.json", how) for how in ("no keys", "texts", "huge", "not a number", "negative")}


@pytest.mark.parametrize(
    ("which", "name"),
    [("finished", name) for name in (*RESUMED, *TENSORS, *REPORTS)] + [("stopped", name) for name in RESUMED + TENSORS],
)
def test_damaged_runs_are_refused_in_a_line_and_never_finished(
    which: str, name: str, runs: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = runs
    for how, content in damages(folder / which / name).items():
        if (name, how) in HARMLESS:
            continue
        run_folder = tmp_path / how
        shutil.copytree(folder / which, run_folder)
        damage(run_folder / name, how, content)
        said = refused(capsys, main([*words, "--out", str(run_folder)]))
        assert str(tmp_path) in said
        assert (run_folder / "summary.json").exists() == (which == "finished")


@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "random_states_0.pkl", "optimizer.bin", "scheduler.bin"])
def test_a_pickle_in_a_checkpoint_is_refused_by_name_and_not_run(
    name: str, runs: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = runs
    for old in (False, True):  # beside a checkpoint of ours, or in one as earlier versions wrote them
        run_folder = tmp_path / f"run{old}"
        shutil.copytree(folder / "stopped", run_folder)
        if old:
            shutil.rmtree(run_folder / "checkpoint")
            (run_folder / "checkpoint").mkdir()
        (run_folder / "checkpoint" / name).write_bytes(hostile_pickle(tmp_path / "harm"))
        said = refused(capsys, main([*words, "--out", str(run_folder)]))
        assert f"checkpoint/{name} is a pickle, which can run code, and is not read." in said
        assert "to start again" in said
        assert not (tmp_path / "harm").exists()


def test_a_tensor_file_that_is_a_pickle_is_not_run(
    runs: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = runs
    for name in TENSORS:
        run_folder = tmp_path / Path(name).stem
        shutil.copytree(folder / "stopped", run_folder)
        (run_folder / name).write_bytes(hostile_pickle(tmp_path / "harm"))
        assert f"{name} is damaged" in refused(capsys, main([*words, "--out", str(run_folder)]))
    assert not (tmp_path / "harm").exists()


def test_a_checkpoint_of_another_model_is_refused(
    runs: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = runs
    other = [word.replace("gpt-1x16", "gpt-1x32") for word in words]
    assert main([*other, "--out", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    for name in TENSORS[:3]:
        run_folder = tmp_path / Path(name).stem
        shutil.copytree(folder / "stopped", run_folder)
        shutil.copy(tmp_path / "other" / name, run_folder / name)
        assert f"{name} is damaged or of another run" in refused(capsys, main([*words, "--out", str(run_folder)]))


def test_a_place_that_cannot_be_is_refused_before_data_is_read(
    runs: tuple[Path, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, words = runs
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr("secateur.lab.trainer.load", lambda _: pytest.fail("data was read"))
        for out, said in (("file", "is a file"), ("file/run", "Nothing can be"), ("mine", "holds no run")):
            assert said in refused(capsys, main([*words, "--out", str(tmp_path / out)]))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1_000_000))
    assert "and the disk has 1 MB left" in refused(capsys, main([*words, "--out", str(tmp_path / "run")]))


def test_a_full_disk_leaves_the_last_checkpoint(
    runs: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled once the first checkpoint is written; with space again, the run ends as one that was left alone."""
    folder, words = runs
    monkeypatch.setattr("secateur.cli.train.check_room", lambda *_: None)  # which would refuse so small a disk
    real = Trainer.step

    def filling(self: Trainer) -> torch.Tensor:
        if self.progress.step == 5:
            with pytest.raises(OSError, match="No space left"):
                (disk / "other").write_bytes(bytes(1 << 20))
        return real(self)

    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        with monkeypatch.context() as patched:
            patched.setattr(Trainer, "step", filling)
            code = main([*words, "--out", str(disk / "run")])
        said = refused(capsys, code)
        assert "No space left on device" in said
        assert said.endswith("Free some space: the same command continues from the last checkpoint.")
        (disk / "other").unlink()
        assert json.loads((disk / "run" / "checkpoint" / "state.json").read_text())["step"] == 4
        assert main([*words, "--out", str(disk / "run")]) == 0
        weights = [load_file(path / "best" / "model.safetensors") for path in (disk / "run", folder / "finished")]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
        assert numbers(disk / "run") == numbers(folder / "finished")


def test_half_a_settings_file_of_a_killed_run_does_not_stand_in_its_way(
    runs: tuple[Path, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.json.0123abcd.tmp").write_text("{")
    assert main([*runs[1], "--out", str(tmp_path / "run")]) == 0
    (tmp_path / "run" / "summary.json").unlink()  # killed after its last checkpoint, whose lock is left
    (tmp_path / "run" / ".checkpoint.lock").touch()
    assert main([*runs[1], "--out", str(tmp_path / "run")]) == 0
    assert not list((tmp_path / "run").glob(".*"))


@pytest.mark.parametrize("name", ["best/model.safetensors", "checkpoint/state.json", "checkpoint"])
def test_what_a_damaged_run_says_to_delete_is_that_run(
    name: str, runs: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs[0] / "finished", folder)
    if (folder / name).is_dir():
        shutil.rmtree(folder / name)
    (folder / name).write_text('{"format": 0}')
    capsys.readouterr()
    assert main([*runs[1], "--out", str(folder)]) == 2
    assert f"or delete {folder} to start again" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert main([*runs[1], "--out", str(folder)]) == 0
    assert (folder / "best" / "model.safetensors").is_file()
