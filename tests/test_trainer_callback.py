"""PrunerCallback in Hugging Face's Trainer and TRL's: pruning, checkpoints, logs, optimizers and several processes."""

from __future__ import annotations

import inspect
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

import secateur as sc
from secateur.errors import FactError, OptimizerError, PatternError, ScheduleError, ScoreError, StateError
from secateur.integrations.pruning import ramp, spacing
from secateur.model.state import PRUNER, read_pruner, write_pruner
from secateur.selection.masks import pack
from tests import tiny
from tests.test_distributed import launch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from secateur.integrations.transformers import PrunerCallback  # noqa: E402

STEPS = 12  # of a run; half of them fall into the ramp


def rows(count: int = 32, size: int = 8) -> list[dict[str, Tensor]]:
    drawn = torch.randint(0, tiny.VOCABULARY, (count, size), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in drawn]


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return tiny.llama(num_hidden_layers=1, attention_dropout=0.1)


def trainer(folder: Path, callback: Any, model: Any = None, **changes: Any) -> Any:
    optimizer = changes.pop("optimizer_cls_and_kwargs", None)
    given = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "logging_steps": 4, "save_steps": STEPS // 2, "eval_strategy": "no",
    }  # fmt: skip
    return transformers.Trainer(
        model or llama(),
        transformers.TrainingArguments(str(folder), **{**given, **changes}),
        train_dataset=rows(),
        eval_dataset=rows(4),
        callbacks=[callback],
        optimizer_cls_and_kwargs=optimizer,
    )


def same(one: Any, other: Any) -> None:
    """Weights, optimizer state and masks of two finished Trainers are equal to the bit."""
    for (name, mine), theirs in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    mine, theirs = one.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for number, state in mine.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[number][name])), (number, name)
    masks = [callback_of(each).pruner.masks for each in (one, other)]
    assert masks[0].keys() == masks[1].keys()
    assert all(torch.equal(mask, masks[1][name]) for name, mask in masks[0].items())


def callback_of(trainer: Any) -> PrunerCallback:
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, PrunerCallback))


def zeros(model: Any, masks: dict[str, Tensor]) -> float:
    """The share of zeros in the masked weights, all of which must be where the masks are False."""
    weights = dict(model.named_parameters())
    for name, mask in masks.items():
        assert torch.equal(weights[name] != 0, mask), name
    return 1 - sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())


def test_a_trainer_reaches_the_sparsity_and_keeps_it(tmp_path: Path) -> None:
    run = trainer(tmp_path, callback := PrunerCallback(sparsity=0.8, begin=2, end=0.5), gradient_accumulation_steps=2)
    run.train()
    assert str(callback.pruner.schedule) == f"cubic(0.8, begin=2, end={STEPS // 2})"
    assert zeros(run.model, callback.pruner.masks) == pytest.approx(0.8, abs=1e-3)
    report = callback.report()
    assert report.step == STEPS
    assert [update.step for update in report.updates] == [3, 4, 5, 6]


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "variance": ({}, {}),
    "movement": ({"score": "movement", "scope": "layer"}, {"gradient_accumulation_steps": 2}),
    "regrow": ({"score": "magnitude", "regrow": "gradient"}, {}),
    "2:4": ({"score": "magnitude", "pattern": "2:4", "sparsity": None}, {"optim": "adamw_torch"}),
    "sgd": ({"score": "magnitude"}, {"optim": "sgd"}),
    "bf16": ({}, {"bf16": True}),
    "ours": ({}, {"optimizer_cls_and_kwargs": (sc.optim.AdamW, {"lr": 1e-2})}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_equals_an_unbroken_one(way: str, tmp_path: Path) -> None:
    settings, options = WAYS[way]
    settings = {"sparsity": 0.6, "begin": 0.1, "end": 0.8, **settings}
    whole = trainer(tmp_path, PrunerCallback(**settings), **options)
    whole.train()
    half = tmp_path / f"checkpoint-{STEPS // 2}"
    resumed = trainer(tmp_path, PrunerCallback(**settings), model=llama(seed=1), **options)
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    resumed.train(resume_from_checkpoint=str(half) if way != "sgd" else True)  # True is the last in the folder
    assert resumed.args.resume_from_checkpoint is None
    first = callback_of(resumed).report().updates[0].step
    assert first > STEPS // 2, "it did not begin again"
    same(whole, resumed)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run, with checkpoints in the middle of the ramp and at the end."""
    folder = tmp_path_factory.mktemp("finished")
    trainer(folder, PrunerCallback(**RAMP)).train()
    return folder


RAMP: dict[str, Any] = {"sparsity": 0.6, "begin": 0.1, "end": 0.8}
HALF = f"checkpoint-{STEPS // 2}"


def test_a_checkpoint_elsewhere_is_named_by_resume(finished: Path, tmp_path: Path) -> None:
    """Also by the training arguments, and as the file itself; otherwise the run stops before it trains."""
    moved = shutil.copytree(finished / HALF, tmp_path / "moved")
    model = llama(seed=1)
    with pytest.raises(StateError, match=r"resumes at step 6, but there is no saved Pruner.*resume=False"):
        trainer(tmp_path, PrunerCallback(**RAMP), model).train(resume_from_checkpoint=str(moved))
    ends = []
    for number, place in enumerate((moved, str(moved / PRUNER), None)):
        options = {"resume_from_checkpoint": str(moved)} if place is None else {}
        run = trainer(tmp_path / str(number), PrunerCallback(**RAMP, resume=place), llama(seed=1), **options)
        run.train(resume_from_checkpoint=str(moved))
        ends.append(run)
    same(ends[0], ends[1])
    same(ends[0], ends[2])


def test_masks_of_another_checkpoint_are_refused(finished: Path, tmp_path: Path) -> None:
    """The folder the model is resumed from is not known to the callback, and another run may have the same step."""
    trainer(tmp_path, PrunerCallback(**RAMP), llama(seed=5)).train()
    run = trainer(tmp_path, PrunerCallback(**RAMP))
    with pytest.raises(StateError, match=r"checkpoint-6.*of another checkpoint.*not zero"):
        run.train(resume_from_checkpoint=str(finished / HALF))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def replace(file: Path) -> None:
    shutil.copy(file.parent / "model.safetensors", file)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def exchange(file: Path) -> None:
    other = torch.nn.Linear(8, 8)
    write_pruner(file, sc.Pruner(other, torch.optim.AdamW(other.parameters())).for_checkpointing().state_dict())


def reshape(file: Path) -> None:
    """A mask of the right name and another shape."""
    state = read_pruner(file)
    name = next(key for key in state if key.startswith("mask."))
    write_pruner(file, {**state, name: state[name].flatten()})


DAMAGE = {
    truncate: "cannot be read .*damaged",
    replace: "not the state of a Pruner",
    empty: "cannot be read",
    exchange: "The saved Pruner has",
    reshape: "Saved 'mask.*this model needs",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_or_foreign_file_is_named(damage: Any, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / HALF, tmp_path / HALF)
    damage(tmp_path / HALF / PRUNER)
    with pytest.raises(StateError, match=rf"{PRUNER}.*{DAMAGE[damage]}"):
        trainer(tmp_path, PrunerCallback(**RAMP)).train(resume_from_checkpoint=str(tmp_path / HALF))


def test_other_settings_are_refused_on_resume(finished: Path) -> None:
    with pytest.raises(StateError, match=rf"{PRUNER}.*cubic\(0.6, begin=1, end=10\).*begin=2, end=19"):
        trainer(finished, PrunerCallback(**RAMP), max_steps=24).train(resume_from_checkpoint=str(finished / HALF))
    with pytest.raises(StateError, match="training begins at step 0"):
        trainer(finished, PrunerCallback(**RAMP, resume=finished / HALF)).train()


def test_a_dense_run_can_be_pruned_from_the_step_it_resumes_at(tmp_path: Path) -> None:
    transformers.set_seed(0)
    trainer(tmp_path, transformers.TrainerCallback()).train()
    run = trainer(tmp_path, callback := PrunerCallback(begin=0.0, end=1.0, resume=False))
    run.train(resume_from_checkpoint=str(tmp_path / HALF))
    assert str(callback.pruner.schedule) == f"cubic(0.8, begin=0, end={STEPS // 2})"  # of the steps that were left
    assert zeros(run.model, callback.pruner.masks) == pytest.approx(0.8, abs=1e-3)


def test_the_best_checkpoint_brings_its_masks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Worse:
        """An evaluation that the first checkpoint wins."""

        seen = 0

        def __call__(self, _: Any) -> dict[str, float]:
            self.seen += 1
            return {"badness": float(self.seen)}

    run = trainer(
        tmp_path, callback := PrunerCallback(**RAMP), load_best_model_at_end=True, eval_strategy="steps", eval_steps=6,
        metric_for_best_model="badness", greater_is_better=False,
    )  # fmt: skip
    run.compute_metrics = Worse()
    with caplog.at_level(logging.WARNING, "secateur"):
        run.train()
    assert run.state.best_model_checkpoint.endswith(HALF)
    reached = zeros(run.model, callback.pruner.masks)
    assert 0.1 < reached < 0.59
    assert callback.report().sparsity == callback.pruner.sparsity == pytest.approx(reached)
    assert max(update.step for update in callback.report().updates) <= STEPS // 2
    assert f"at sparsity {reached:.4f}; the last step had reached 0.6000" in caplog.text


def test_a_best_checkpoint_without_masks_is_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            (tmp_path / f"checkpoint-{state.global_step}" / PRUNER).unlink()

    run = trainer(tmp_path, PrunerCallback(**RAMP), load_best_model_at_end=True, eval_strategy="steps", eval_steps=6)
    run.add_callback(Forgetful())
    run.train()
    assert "its masks cannot be loaded" in caplog.text


def test_sparsity_is_in_the_logs_and_in_trackers(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = trainer(tmp_path, callback := PrunerCallback(**RAMP), report_to="tensorboard", eval_strategy="steps")
    others = [one for one in run.callback_handler.callbacks if one is not callback]
    run.train()
    logged = {entry["step"]: entry["sparsity"] for entry in run.state.log_history}
    assert list(logged) == [4, 8, 12]
    assert 0 < logged[4] < logged[8] < logged[12] == pytest.approx(0.6, abs=1e-3)
    assert all("sparsity" in entry for entry in run.state.log_history)
    assert run.callback_handler.callbacks == [callback, *others]
    [folder] = {file.parent for file in tmp_path.rglob("events.out.tfevents*")}
    found = events.EventAccumulator(str(folder)).Reload().Scalars("train/sparsity")
    assert {event.step: event.value for event in found} == pytest.approx(logged)


def test_every_callback_is_called_once_although_the_order_changes(tmp_path: Path) -> None:
    class Counting(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.begun = 0

        def on_train_begin(self, *_: Any, **others: Any) -> None:
            self.begun += 1

    class Later(Counting):
        pass

    run = trainer(tmp_path, Counting(), max_steps=1, save_strategy="no")
    run.add_callback(PrunerCallback(sparsity=0.5, begin=0, end=1))
    run.add_callback(Later())
    run.train()
    assert [one.begun for one in run.callback_handler.callbacks if isinstance(one, Counting)] == [1, 1]


def test_skipped_steps_of_a_gradient_scaler_do_not_count(tmp_path: Path) -> None:
    """Accelerate allows fp16 on GPUs alone; the scaler itself runs on a CPU, and its first steps overflow."""
    run = trainer(tmp_path, callback := PrunerCallback(sparsity=0.5, begin=0, end=4), max_grad_norm=0.0)
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-30)
    run.train()
    skipped = (127 - round(math.log2(run.accelerator.scaler.get_scale()))) // 30
    assert 1 <= skipped <= 3
    assert callback.report().step == STEPS - skipped == int(run.optimizer.state_dict()["state"][1]["step"])
    assert zeros(run.model, callback.pruner.masks) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "rmsprop"])
def test_magnitude_works_with_every_optimizer(optim: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, callback := PrunerCallback(score="magnitude", end=0.5), optim=optim, save_strategy="no")
    run.train()
    assert zeros(run.model, callback.pruner.masks) == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("optim", ["adafactor", "sgd"])
def test_variance_says_what_would_work_with_an_optimizer_without_variances(optim: str, tmp_path: Path) -> None:
    with pytest.raises(FactError, match=r"variance needs exp_avg_sq.*Scores that work here: .*magnitude"):
        trainer(tmp_path, PrunerCallback(), optim=optim).train()


@pytest.mark.filterwarnings("default")  # what torchao and torch.compile say about each other
@pytest.mark.parametrize(("optim", "package"), [("adamw_torch_8bit", "torchao"), ("adamw_bnb_8bit", "bitsandbytes")])
def test_optimizers_with_8_bit_state(optim: str, package: str, tmp_path: Path) -> None:
    """Their state is codes, from which `variance` reads; a run resumed in the middle of the ramp ends with its bits."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    settings = {"sparsity": 0.6, "begin": 0.1, "end": 0.8}

    def wide() -> Any:
        torch.manual_seed(0)
        return tiny.llama(num_hidden_layers=1, hidden_size=64, intermediate_size=128)  # smaller tensors stay in fp32

    whole = trainer(tmp_path, PrunerCallback(**settings), wide(), optim=optim)
    whole.train()
    pruner = callback_of(whole).pruner
    assert zeros(whole.model, pruner.masks) == pytest.approx(0.6, abs=1e-3)
    values = [value for state in whole.optimizer.state.values() for value in state.values()]
    kinds = {type(value).__name__ if package == "torchao" else getattr(value, "dtype", None) for value in values}
    assert kinds & {"OptimState8bit", torch.uint8}
    resumed = trainer(tmp_path, PrunerCallback(**settings), wide(), optim=optim)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    for (name, mine), theirs in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    masks = callback_of(resumed).pruner.masks
    assert all(torch.equal(mask, masks[name]) for name, mask in pruner.masks.items())


def test_the_default_optimizer_is_fused() -> None:
    assert transformers.TrainingArguments("unused").optim == "adamw_torch_fused"


def test_two_pruners_in_one_trainer_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, PrunerCallback())
    run.add_callback(PrunerCallback(sparsity=0.5))
    with pytest.raises(OptimizerError, match="has 2 PrunerCallbacks"):
        run.train()


def test_a_checkpoint_that_was_written_elsewhere_is_said_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path, callback := PrunerCallback(**RAMP), save_strategy="no")
    run.train()
    callback.on_save(run.args, run.state, run.control)
    assert f"not written a checkpoint to {tmp_path / f'checkpoint-{STEPS}'}" in caplog.text
    assert not list(tmp_path.rglob(PRUNER))


def test_a_compiled_model_is_pruned(tmp_path: Path) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 4, "save_steps": 2}
    whole = trainer(tmp_path, PrunerCallback(begin=0, end=4), **options)
    whole.train()
    assert type(whole.model_wrapped).__name__ == "OptimizedModule" or whole.model._compiled_call_impl is not None
    assert zeros(whole.model, callback_of(whole).pruner.masks) == pytest.approx(0.8, abs=1e-3)
    resumed = trainer(tmp_path, PrunerCallback(begin=0, end=4), llama(seed=1), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    same(whole, resumed)


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, callback := PrunerCallback())
    run.args.deepspeed = {"zero_optimization": {"stage": 2}}  # as TrainingArguments(deepspeed=...) leaves it
    with pytest.raises(OptimizerError, match="DeepSpeed keeps its own flat copies.*Use DDP, or FSDP version 2"):
        callback.on_init_end(run.args, run.state, run.control)


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"score": "varince"}, ScoreError, "variance"),
    ({"sparsity": 80}, ScheduleError, "For 80 percent write 0.8"),
    ({"begin": 1.5}, ScheduleError, r"begin must be a step .* or a fraction .* got 1.5"),
    ({"end": -1}, ScheduleError, "end must be a step"),
    ({"until": 2.0}, ScheduleError, "until must be a step"),
    ({"begin": None}, ScheduleError, "begin must be a step"),
    ({"begin": True}, ScheduleError, "begin must be a step"),
    ({"begin": "5%"}, ScheduleError, "begin must be a step .* got '5%'"),
    ({"schedule": "cubc"}, ScheduleError, "Did you mean 'cubic'"),
    ({"sparsity": sc.linear(0.5, begin=0, end=9), "end": 0.9}, ScheduleError, "Leave out begin, end and schedule"),
    ({"pattern": "2:4"}, PatternError, "Pass sparsity=None"),
    ({"sparsity": None}, PatternError, "Only an n:m pattern"),
    ({"every": 0}, ScheduleError, "every must be"),
    ({"resume": True}, StateError, "resume must be the path"),
]


@pytest.mark.parametrize(("settings", "kind", "message"), MISTAKES, ids=lambda value: str(value)[:30])
def test_mistakes_are_named_before_anything_is_loaded(settings: dict[str, Any], kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        PrunerCallback(**settings)


def test_a_ramp_longer_than_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, callback := PrunerCallback(begin=0, end=24, schedule=sc.linear), save_strategy="no").train()
    assert "ends at step 24, and training at step 12: the model will reach sparsity 0.400, not 0.800" in caplog.text
    assert callback.pruner.sparsity == pytest.approx(0.4, abs=1e-3)
    with pytest.raises(ScheduleError, match=r"steps 8 and 6 of a run of 12 optimizer steps; begin must"):
        trainer(tmp_path, PrunerCallback(begin=8, end=0.5)).train()


POINTS = [
    ((0.05, 0.6), (5, 60)),
    ((0, 1.0), (0, 100)),
    ((10, 20), (10, 20)),
    ((0.0, 1), (0, 1)),
    ((0.5, 200), (50, 200)),
]


@pytest.mark.parametrize(("given", "steps"), POINTS)
def test_floats_are_fractions_and_ints_are_steps(given: tuple[float, float], steps: tuple[int, int]) -> None:
    made: Any = ramp(0.8, 100, *given)
    assert (made.begin, made.end) == steps
    assert (made(steps[0]), made(steps[1])) == (0.0, 0.8)
    assert 1 <= spacing(made, 100) <= max(1, (made.end - made.begin) // 50)


def test_updates_are_spaced_over_the_ramp_or_the_run() -> None:
    assert spacing(sc.cubic(0.8, begin=1000, end=6000), 10_000) == 100
    assert spacing(lambda step: 0.5, 10_000) == spacing(sc.constant(0.5), 10_000) == 200
    assert spacing(sc.constant(0.5), float("inf")) == 100
    for shape in (sc.constant, sc.cubic(0.5, begin=0, end=9)):  # the second is a ready schedule
        with pytest.raises(ScheduleError, match=r"cannot be called as schedule.*goes into sparsity"):
            ramp(0.5, 100, schedule=shape)
    with pytest.raises(ScheduleError, match="must return a function of the step; it returned 0.5"):
        ramp(0.5, 100, schedule=lambda sparsity, begin, end: sparsity)


def test_regrowth_ends_at_a_fraction_of_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"score": "magnitude", "regrow": "gradient", "drop": 0.2}
    callback = PrunerCallback(sparsity=sc.constant(0.5), until=0.75, **settings)
    trainer(tmp_path, callback, save_strategy="no").train()
    assert callback.pruner.regrowth is not None
    assert (callback.pruner.regrowth.until, callback.pruner.regrowth.drop) == (9, 0.2)
    assert sum(update.grown for update in callback.report().updates) > 0


def test_a_second_training_of_the_model_keeps_its_zeros(tmp_path: Path) -> None:
    callback = PrunerCallback(sparsity=0.5)
    first = trainer(tmp_path, callback)
    first.train()
    model, masks = first.model, {name: mask.clone() for name, mask in callback.pruner.masks.items()}
    first.train()
    assert zeros(model, masks) == pytest.approx(0.5, abs=1e-3)
    trainer(tmp_path / "again", callback, model=model).train()
    assert zeros(model, masks) == pytest.approx(0.5, abs=1e-3)
    assert callback.pruner.sparsity == pytest.approx(0.5, abs=1e-3)
    trainer(tmp_path / "held", PrunerCallback(masks=callback.pruner.masks, sparsity=None), model=model).train()
    assert zeros(model, masks) == pytest.approx(0.5, abs=1e-3)
    with pytest.warns(UserWarning, match="the zeros will grow back"):  # a new callback knows nothing of the masks
        trainer(tmp_path / "new", PrunerCallback(sparsity=0.5), model=model).train()
    trainer(tmp_path / "other", callback, model=llama(1)).train()  # another model starts dense
    assert callback.pruner.updates[0].asked < 0.5


def test_the_pruner_is_there_once_training_has_begun() -> None:
    with pytest.raises(StateError, match="trainer.train"):
        PrunerCallback().report()


@pytest.mark.skipif("masks" not in inspect.signature(sc.Pruner).parameters, reason="this Pruner cannot hold masks")
def test_zeros_of_a_sparse_model_are_held(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight[:, ::2] = 0
    run = trainer(tmp_path, callback := PrunerCallback(masks="zeros", sparsity=None), model)
    run.train()
    assert zeros(run.model, callback.pruner.masks) == 0.5


def test_a_family_saved_under_other_names_is_resumed_from_a_loaded_model(tmp_path: Path) -> None:
    """The Trainer loads weights by name, and those of stacked experts have other names in the file."""

    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=tiny.VOCABULARY + 1)
        return transformers.MixtralForCausalLM(config)

    whole = trainer(tmp_path, PrunerCallback(**RAMP), model(0))
    whole.train()
    half = str(tmp_path / HALF)
    with pytest.raises(StateError, match=r"not zero.*stacked experts.*load the model with from_pretrained\(checkpoint"):
        trainer(tmp_path, PrunerCallback(**RAMP), model(1)).train(resume_from_checkpoint=half)
    loaded = transformers.MixtralForCausalLM.from_pretrained(half)
    resumed = trainer(tmp_path, PrunerCallback(**RAMP), loaded)
    resumed.train(resume_from_checkpoint=half)
    same(whole, resumed)


@pytest.mark.skipif(
    TorchVersion(transformers.__version__) < (5, 22),
    reason="older transformers ask torch for the device cpu:0 when processes on CPUs resume",
)
@pytest.mark.slow
def test_two_processes_replicated_and_sharded(tmp_path: Path) -> None:
    """DDP and FSDP2 on gloo: ranks agree, a resumed run equals an unbroken one, and the file holds whole masks."""
    found = launch(tmp_path / "out.pt", 2, "ddp", "fsdp", worker="tests.trainer_worker")
    for job in ("ddp", "fsdp"):
        one, resumed, saved = (found[f"{job}{part}"] for part in ("", " resumed", " saved"))
        assert one["agree"]
        assert resumed["agree"]
        assert one["sharded"] is (job == "fsdp")
        assert one["sparsity"] == pytest.approx(0.6, abs=1e-3)
        for kind in ("weights", "moments", "masks"):
            assert one[kind].keys() == resumed[kind].keys()
            assert all(torch.equal(tensor, resumed[kind][name]) for name, tensor in one[kind].items()), kind
        for name, mask in one["masks"].items():
            assert torch.equal(one["weights"][name] != 0, mask)
            assert torch.equal(pack(mask), saved[f"mask.{name}"])


def test_trl_trains_with_the_same_callback(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    texts = pytest.importorskip("datasets").Dataset.from_dict({"text": [f"text number {n}" for n in range(16)]})
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token

    def fine_tuned(seed: int, resume: Path | None) -> Any:
        run = trl.SFTTrainer(
            llama(seed), processing_class=tokenizer, train_dataset=texts, callbacks=[PrunerCallback(**RAMP)],
            args=trl.SFTConfig(
                str(tmp_path), max_steps=STEPS, save_steps=STEPS // 2, per_device_train_batch_size=2, max_length=16,
                learning_rate=1e-2, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=4,
            ),
        )  # fmt: skip
        run.train(resume_from_checkpoint=resume)
        return run

    whole = fine_tuned(0, None)
    assert zeros(whole.model, callback_of(whole).pruner.masks) == pytest.approx(0.6, abs=1e-3)
    assert whole.state.log_history[0]["sparsity"] > 0
    same(whole, fine_tuned(1, tmp_path / HALF))
