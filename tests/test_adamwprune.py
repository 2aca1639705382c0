"""AdamWPrune's and GradProbe's own options and presets: each works, or is refused by name with what to use instead."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed")

from secateur.cli import main
from secateur.cli.adamwprune import REFUSED, SETTINGS
from secateur.cli.train import add_options, changes_of
from secateur.errors import SecateurError
from secateur.lab.config import VARIANTS, Experiment, every_layer, read_experiment
from secateur.lab.sweep import cells_of
from secateur.lab.trainer import Execution, Trainer, dry_run, random_data

ROOT = Path(__file__).parent.parent
# Every option that the five documents of AdamWPrune and GradProbe name: those of commands, and those of GradProbe's
# functions as options. Beside each, what to write after it.
DOCUMENTED: dict[str, dict[str, str]] = {
    "bitter7 sampling": {"--dim": "4096", "--layers": "24", "--num-calls": "10", "--iterations": "20"},
    "variants": {
        "--optimizer": "adamwprune",
        "--adamwprune-variant": "bitter3",
        "--pruning-method": "state",
        "--target-sparsity": "0.5",
        "--max-iters": "10000",
    },
    "torch.compile": {"--compile": ""},
    "GradProbe performance": {
        "--low_memory_mode": "True",
        "--use_fp16": "True",
        "--use_gradient_checkpointing": "False",
        "--device": "cpu",
        "--batch_size": "2",
    },
    "layerwise WANDA": {
        "--layerwise": "True",
        "--experimental_tune_both_steps": "True",
        "--num_batches": "100",
        "--reduction_factor": "0.1",
        "--gradient_threshold": "1.0",
    },
}
# The other options of AdamWPrune's trainer of GPT-2 for pruning, optimizers and data.
TRAINER = {
    "--model-name": "gpt2", "--block-size": "1024", "--learning-rate": "6e-4", "--weight-decay": "0.1",
    "--warmup-steps": "200", "--eval-interval": "100", "--pruning-warmup": "1000", "--adamwprune-ramp-end-step": "3000",
    "--spam-theta": "50", "--spam-interval": "1000", "--spam-warmup-steps": "1000", "--spam-spike-threshold": "2",
    "--spam-enable-clip": "", "--spam-periodic-reset": "", "--spam-warmup": "", "--batch-size": "8",
    "--gradient-accumulation": "8", "--num-epochs": "10", "--max-time": "60", "--min-lr": "6e-5", "--decay-lr": "",
    "--dataset": "finewebedu", "--data-dir": "data", "--dropout": "0.1", "--log-interval": "10",
    "--eval-samples": "200",
    "--save-checkpoint": "", "--checkpoint-interval": "1000", "--output-dir": "out", "--json-output": "a.json",
    "--tracker": "wandb", "--tracker-project": "p", "--tracker-run-name": "r", "--ablation-mode": "",
    "--ablation-steps": "V0", "--architecture": "vanilla", "--flash-attention": "", "--dry-run": "",
}  # fmt: skip
NAMED = {option: value for options in (*DOCUMENTED.values(), TRAINER) for option, value in options.items()}


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="secateur train")
    add_options(parser)
    return parser.parse_args(words)


def settings(*words: str) -> dict[str, Any]:
    return changes_of(parsed(*words))


@pytest.mark.parametrize("option", NAMED)
def test_every_option_they_name_works_or_is_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [option, NAMED[option]] if NAMED[option] else [option]
    plain = f"--{option[2:].replace('_', '-')}"
    if plain not in REFUSED:
        assert parsed(*words)
        return
    with pytest.raises(SystemExit):
        main(["train", *words])
    shown = capsys.readouterr().err
    assert shown.startswith(f"secateur: {plain} is not an option of secateur train: ")
    assert len(shown.splitlines()) == 1
    assert any(
        word in shown for word in ("--", "secateur", "metrics.jsonl", "setting", "kernels")
    )  # what to use instead


def test_nothing_is_refused_that_no_document_names() -> None:
    plain = {f"--{option[2:].replace('_', '-')}" for option in NAMED}
    assert plain >= REFUSED.keys() | SETTINGS.keys()


def test_the_commands_of_the_variants_document() -> None:
    for variant in ("bitter3", "bitter4", "bitter5"):
        words = f"--optimizer adamwprune --adamwprune-variant {variant} --pruning-method state --target-sparsity 0.5"
        found = settings(*words.split(), "--max-iters", "10000")
        assert found == {"optimizer": "adamwprune", "score": variant, "sparsity": 0.5, "steps": 10000}
        assert read_experiment(None, {**found, "model": "gpt2"}).steps_taken == 10000
    assert read_experiment(None, {**found, "budget": "extended"}).steps_taken == 13000


def test_settings_under_their_own_names() -> None:
    words = "--adamwprune-variant bitter7 --target-sparsity 0.5 --pruning-warmup 100 --adamwprune-ramp-end-step 300"
    experiment = read_experiment(None, settings(*words.split()))
    ramp: Any = experiment.ramp()
    assert (ramp.begin, ramp.end) == (100, 300)
    words = "--optimizer adamwspam --spam-theta 40 --spam-interval 200 --spam-warmup-steps 20 --spam-spike-threshold 3"
    spam = read_experiment(None, settings(*words.split())).spam_settings
    assert spam is not None
    assert (spam.theta, spam.every, spam.warmup, spam.spike, spam.quiet) == (40, 200, 20, 3, 0)  # the rest: its preset


def test_steps_at_the_edge_mean_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    found = settings("--variant", "bitter7", "--pruning-warmup", "0", "--warmup-steps", "0")
    assert (found["begin"], found["warmup"]) == (0, 0)
    for words, said in (
        (["--adamwprune-ramp-end-step", "1"], "must be 0 or at least 2: 1 would mean the last step"),
        (["--pruning-warmup", "-1"], "got '-1'"),
        (["--max-time", "0"], "must be a number of seconds above 0, got '0'"),
        (["--max-time", "nan"], "must be a number of seconds above 0, got 'nan'"),
    ):
        with pytest.raises(SystemExit):
            main(["train", *words])
        assert said in capsys.readouterr().err


def test_dense_leaves_out_what_the_recipe_says_of_pruning() -> None:
    recipe = ROOT / "recipes" / "gpt-small-variance-set-80.toml"
    experiment = read_experiment(recipe, settings("--pruning-method", "none"))
    assert (experiment.score, experiment.sparsity, experiment.regrow, experiment.schedule) == (None, 0.0, None, "cubic")
    assert (experiment.model, experiment.batch) == ("gpt-8x512", 64)
    with pytest.raises(SecateurError, match="end does nothing without a score"):
        read_experiment(recipe, {"score": None, "end": 0.9})


PUBLISHED = {  # ramp and steps of 1000
    "bitter0": ("linear", 1000), "bitter1": ("linear", 1000), "bitter2": ("linear", 1210),
    "bitter3": ("late_cubic", 1300), "bitter4": ("late_cubic", 1300), "bitter5": ("late_cubic", 1300),
    "bitter6": ("late_cubic", 1300), "bitter7": ("late_cubic", 1700), "bitter8": ("late_cubic", 1000),
    "bitter9": ("late_cubic", 1300), "magnitude": ("late_cubic", 1000), "movement": ("linear", 1000),
}  # fmt: skip


@pytest.mark.parametrize("score", VARIANTS)
def test_as_published(score: str) -> None:
    experiment = read_experiment(None, {"preset": "as-published", "score": score, "sparsity": 0.5})
    ramp: Any = experiment.ramp()
    assert (experiment.schedule, experiment.steps_taken) == PUBLISHED[score]
    assert (ramp.begin, ramp.end, ramp(1000)) == (10, 1000, 0.5)
    assert experiment.prunable == "adamwprune"


def test_every_layer_and_the_tied_head_are_pruned_as_published() -> None:
    """GPT-2 has 49 modules: 4 in each of 12 layers, and the head."""
    words = {"preset": "as-published", "score": "bitter7", "sparsity": 0.5}
    for model, prunable in (("gpt-2x32", 2 * 12 * 32**2 + 256 * 32), ("lenet5", 61_470)):
        experiment = read_experiment(None, {**words, "model": model, "data": "python" if "gpt" in model else "mnist:x"})
        assert f"{prunable // 2:,} of {prunable:,} weights pruned, as asked" in dry_run(experiment, cpu=True)
    pytest.importorskip("transformers", reason="transformers is not installed")
    experiment = Experiment(model="gpt2", context=8, batch=2)
    trainer = Trainer(experiment, Execution(cpu=True, most_layers=1), random_data(experiment, 8))
    assert len(every_layer(trainer.model)) == 4 + 1


def test_what_stands_beside_a_preset_changes_it() -> None:
    words = {"preset": "as-published", "score": "bitter3", "sparsity": 0.5}
    assert read_experiment(None, {**words, "schedule": "cubic"}).schedule == "cubic"
    recipe = ROOT / "recipes" / "gpt-small-variance-80.toml"  # with a late cubic ramp
    assert read_experiment(recipe, {"preset": "as-published", "score": "bitter0"}).schedule == "linear"


def test_presets_beside_our_defaults_in_a_grid(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(
        '[base]\nmodel = "gpt-2x32"\nsparsity = 0.5\n[axes]\nscore = ["dense", "bitter0", "bitter7"]\n'
        'preset = ["none", "as-published"]\nseed = [0]\n'
    )
    axes, cells = cells_of(path)
    found = {cell.name: cell.experiment for cell in cells}
    assert set(found) == {"score=dense-seed=0"} | {
        f"score={score}-preset={preset}-seed=0"
        for score in ("bitter0", "bitter7")
        for preset in ("none", "as-published")
    }
    assert axes[:2] == ["score", "preset"]
    assert {"schedule", "begin", "end", "prunable", "budget"} <= set(axes)
    assert found["score=bitter7-preset=as-published-seed=0"].steps_taken == 1700
    assert found["score=bitter7-preset=none-seed=0"].steps_taken == 1000


def test_a_grid_extends_the_budget_of_those_that_have_one(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(
        '[base]\nmodel = "gpt-2x32"\nsparsity = 0.5\n[axes]\nscore = ["magnitude", "bitter7"]\n'
        'budget = ["normal", "extended"]\nseed = [0]\n'
    )
    found = {cell.name: cell.experiment.steps_taken for cell in cells_of(path)[1]}
    assert found == {
        "score=magnitude-budget=normal-seed=0": 1000,
        "score=bitter7-budget=normal-seed=0": 1000,
        "score=bitter7-budget=extended-seed=0": 1700,
    }
