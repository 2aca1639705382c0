"""PrunerCallback in Lightning's Trainer: pruning, checkpoints, closures, both packages and several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import secateur as sc
from secateur.errors import OptimizerError, ScheduleError, StateError
from tests.test_accelerate import assert_equal
from tests.test_distributed import launch

pytest.importorskip("lightning")

from lightning.pytorch import Trainer, callbacks

from secateur.integrations.lightning import PrunerCallback
from tests.lightning_worker import BATCHES, EPOCHS, RAMP, Module, Work, ended, fitted

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # torch, of Lightning's code
    pytest.mark.filterwarnings("ignore:The .train_dataloader. does not have many workers"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),  # runs resume into folders of their own
]
STEPS = 2 * BATCHES * EPOCHS  # one process sees all batches
HALF = f"step={STEPS // 2}.ckpt"

WAYS: dict[str, dict[str, Any]] = {
    "variance": {},
    "movement": {"settings": {"score": "movement"}},  # reads gradients, which a closure computes inside the step
    "accumulated": {"accumulate_grad_batches": 2},
    "regrow": {"settings": {"score": "magnitude", "regrow": "gradient"}},
    "ours": {"optimizer": sc.optim.AdamW},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_equals_an_unbroken_one(way: str, tmp_path: Path) -> None:
    options = WAYS[way]
    whole = fitted(tmp_path / "whole", **options)
    assert whole[1].pruner.sparsity == pytest.approx(0.6, abs=2e-3)
    half = tmp_path / "whole" / f"step={whole[0].global_step // 2}.ckpt"
    resumed = fitted(tmp_path / "resumed", resume=half, **options)
    assert resumed[1].report().updates[0].step > whole[0].global_step // 2
    assert_equal(ended(*whole), ended(*resumed))


def test_zeros_stay_and_the_sparsity_is_logged(tmp_path: Path) -> None:
    trainer, callback = fitted(tmp_path)
    weights = dict(trainer.lightning_module.named_parameters())
    assert all(torch.equal(weights[name] != 0, mask) for name, mask in callback.pruner.masks.items())
    assert str(callback.pruner.schedule) == f"cubic(0.6, begin={STEPS // 10}, end={STEPS * 8 // 10})"
    assert callback.report().step == STEPS
    assert trainer.callback_metrics["sparsity"] == pytest.approx(callback.pruner.sparsity)
    weight, optimizer = weights["net.0.weight"], trainer.optimizers[0]
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.ne(0).all(), "once the fit has ended nothing follows the optimizer"


def test_the_state_has_a_key_of_its_own_and_no_pickled_objects(tmp_path: Path) -> None:
    fitted(tmp_path, max_epochs=1)
    saved = torch.load(tmp_path / "step=10.ckpt", weights_only=True)["callbacks"]["secateur.PrunerCallback"]
    assert {"settings", "steps", "asked", "mask.net.0.weight"} <= saved.keys()


def test_a_checkpoint_without_the_callback_is_refused(tmp_path: Path) -> None:
    fitted(tmp_path)
    checkpoint = torch.load(tmp_path / HALF, weights_only=True)
    del checkpoint["callbacks"]["secateur.PrunerCallback"]
    torch.save(checkpoint, dense := tmp_path / "dense.ckpt")
    with pytest.raises(StateError, match="resumes at step 20, but its checkpoint has no state of a PrunerCallback"):
        fitted(tmp_path / "again", resume=dense)
    with pytest.warns(UserWarning, match="the zeros will grow back"):
        _, callback = fitted(tmp_path / "new", resume=dense, settings={"resume": False, "begin": 0.0, "end": 1.0})
    assert str(callback.pruner.schedule) == f"cubic(0.6, begin=0, end={STEPS // 2})"  # of the steps that were left
    assert callback.report().step == STEPS // 2


def test_other_settings_are_refused_on_resume(tmp_path: Path) -> None:
    fitted(tmp_path)
    with pytest.raises(StateError, match="The saved Pruner has schedule 'cubic.0.6, begin=4, end=32") as error:
        fitted(tmp_path / "longer", resume=tmp_path / HALF, max_epochs=2 * EPOCHS)
    assert "PrunerCallback(resume=False, masks='zeros', ...)" in str(error.value)
    settings = {"resume": False, "masks": "zeros", "sparsity": 0.7}  # as it says
    _, callback = fitted(tmp_path / "on", resume=tmp_path / HALF, max_epochs=2 * EPOCHS, settings=settings)
    assert callback.pruner.sparsity == pytest.approx(0.7, abs=2e-3)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_another_fit_of_the_same_trainer_goes_on(tmp_path: Path) -> None:
    trainer, callback = fitted(tmp_path, settings={"begin": 4, "end": 32})
    trainer.fit_loop.max_epochs += 1
    trainer.fit(trainer.lightning_module, trainer.train_dataloader)
    assert callback.report().step == STEPS + 2 * BATCHES
    assert callback.pruner.sparsity == pytest.approx(0.6, abs=2e-3)


def test_the_trainer_of_pytorch_lightning_works_too(tmp_path: Path) -> None:
    library = pytest.importorskip("pytorch_lightning")

    class Other(Work, library.LightningModule):  # type: ignore[misc]
        pass

    whole = fitted(tmp_path / "whole", library=library, module=Other)
    assert_equal(
        ended(*whole),
        ended(*fitted(tmp_path / "resumed", library=library, module=Other, resume=tmp_path / "whole" / HALF)),
    )


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    class Two(Module):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[0].parameters()), torch.optim.SGD(self.net[2].parameters())]

    with pytest.raises(OptimizerError, match=r"returned 2 optimizers; PrunerCallback needs one.*\[first, second\]"):
        fitted(tmp_path, module=Two)


def test_a_run_without_an_end_needs_steps(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="no known number of steps.*pass begin and end as steps"):
        fitted(tmp_path, max_epochs=-1)


def test_fewer_steps_than_batches_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Manual optimization that accumulates steps less often than Lightning expects, so the ramp was cut short."""

    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            self.manual_backward(self.net(batch).square().mean())
            if index % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    data = torch.utils.data.DataLoader(torch.randn(16, Module().net[0].in_features), batch_size=2)
    for settings, told in (({"begin": 0.0, "end": 0.75}, True), ({"begin": 0, "end": 3}, False)):
        callback = PrunerCallback(sparsity=0.6, score="magnitude", **settings)
        Trainer(max_epochs=1, callbacks=[callback], **options).fit(Manual(), data)
        assert callback.report().step == 4
        assert ("after 4 optimizer steps, and the schedule ends at step 6" in caplog.text) is told
        caplog.clear()


def test_mistakes_are_named() -> None:
    with pytest.raises(StateError, match=r"resume must be True or False; got 'x.ckpt'.*ckpt_path"):
        PrunerCallback(resume="x.ckpt")  # type: ignore[arg-type]
    with pytest.raises(StateError, match="trainer.fit"):
        PrunerCallback().report()
    assert PrunerCallback().state_dict() == {}


@pytest.mark.slow
def test_two_processes_replicated_and_sharded(tmp_path: Path) -> None:
    found = launch(tmp_path / "out.pt", 2, "ddp", "fsdp", worker="tests.lightning_worker")
    for job in ("ddp", "fsdp"):
        assert_equal(found[job], found[f"{job} resumed"])
        for name, mask in found[job].items():
            if name.startswith("mask "):
                assert torch.equal(found[job][name.removeprefix("mask ")] != 0, mask)


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["EMA", "SWA"])
def test_averaged_weights_keep_the_zeros_while_they_train_and_at_the_end(
    kind: str, first: bool, tmp_path: Path
) -> None:
    averaging: Any = callbacks.EMAWeightAveraging(decay=0.9)
    if kind == "SWA":
        averaging = callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    pruning = PrunerCallback(**RAMP)
    saving = callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    both = [pruning, averaging] if first else [averaging, pruning]
    trainer, _ = fitted(tmp_path, callbacks=[*both, saving])
    weights, masks = dict(trainer.lightning_module.named_parameters()), pruning.pruner.masks
    assert pruning.pruner.sparsity == pytest.approx(0.6, abs=2e-3)
    assert all(torch.equal(weights[name] != 0, mask) for name, mask in masks.items())
    saved = torch.load(tmp_path / f"step={STEPS}.ckpt", weights_only=True)["state_dict"]  # EMA: the average
    assert not any(bool(saved[name][~mask].any()) for name, mask in masks.items())
