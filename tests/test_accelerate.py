"""A Pruner in the saved states of Accelerate: resumed to the bit, by one process and by two, and nothing pickled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import secateur as sc
from secateur.errors import OptimizerError, SaveError, StateError
from secateur.model.state import PRUNER
from tests.test_distributed import launch

pytest.importorskip("accelerate")

from secateur.integrations.accelerate import load_pruner, prepare, save_pruner
from tests.accelerate_worker import HALF, built, unbroken_and_resumed


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


WAYS: dict[str, dict[str, Any]] = {
    "variance": {},
    "movement": {"score": "movement"},
    "regrow": {"score": "magnitude", "regrow": "gradient"},
    "ours": {"optimizer": sc.optim.AdamW},
    "sgd": {"score": "magnitude", "optimizer": torch.optim.SGD},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_equals_an_unbroken_one(way: str, tmp_path: Path) -> None:
    one, other = unbroken_and_resumed(tmp_path, **WAYS[way])
    assert one.pruner.sparsity == pytest.approx(0.6, abs=1e-3)
    assert other.pruner.report().updates[0].step > HALF
    assert_equal(one.ended(), other.ended())
    assert PRUNER in os.listdir(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("custom_checkpoint")]


@pytest.mark.slow
def test_two_processes_replicated_and_sharded(tmp_path: Path) -> None:
    """Their files hold whole masks, so one process can load them."""
    found = launch(tmp_path / "out.pt", 2, "ddp", "fsdp", worker="tests.accelerate_worker")
    for job in ("ddp", "fsdp"):
        assert_equal(found[job], found[f"{job} resumed"])
        alone = built()
        load_pruner(alone.accelerator, alone.pruner, tmp_path / job)
        assert alone.pruner.report().step == HALF
        assert 0.1 < alone.pruner.sparsity < 0.6
        kept = {name.removeprefix("mask "): mask for name, mask in found[job].items() if name.startswith("mask ")}
        for name, mask in alone.pruner.masks.items():  # pruned weights never come back
            assert not (kept[name] & ~mask).any()


def test_a_removed_pruner_is_no_longer_saved(tmp_path: Path) -> None:
    run = built()
    handle = prepare(run.accelerator, run.pruner)
    with pytest.raises(StateError, match="already saves a Pruner.*handle.remove"):
        prepare(run.accelerator, run.pruner)
    handle.remove()
    run.train(0, 2)
    run.accelerator.save_state(str(tmp_path))
    assert PRUNER not in os.listdir(tmp_path)
    prepare(run.accelerator, run.pruner)
    with pytest.raises(StateError, match=rf"{PRUNER} cannot be read"):
        run.accelerator.load_state(str(tmp_path))


def test_a_refused_state_changes_nothing(tmp_path: Path) -> None:
    run = built()
    run.train(0, 4)
    save_pruner(run.accelerator, run.pruner, tmp_path / "new" / "folder")
    other = built(seed=1, score="magnitude")
    prepare(other.accelerator, other.pruner)
    before = {name: weight.clone() for name, weight in other.model.state_dict().items()}
    run.accelerator.save_state(str(tmp_path))
    (tmp_path / "new" / "folder" / PRUNER).rename(tmp_path / PRUNER)
    with pytest.raises(StateError, match=rf"{PRUNER}: The saved Pruner has score 'variance.*this one has"):
        other.accelerator.load_state(str(tmp_path))
    assert_equal(before, dict(other.model.state_dict()))
    assert other.pruner.sparsity == 0
    load_pruner(other.accelerator, other.pruner, tmp_path, strict=False)
    assert other.pruner.sparsity == run.pruner.sparsity


def test_mistakes_are_named(tmp_path: Path) -> None:
    run = built()
    with pytest.raises(StateError, match=r"in this order; got Pruner and Accelerator"):
        save_pruner(run.pruner, run.accelerator, tmp_path)
    (tmp_path / PRUNER).mkdir()
    with pytest.raises(SaveError, match=f"{PRUNER} cannot be written"):
        save_pruner(run.accelerator, run.pruner, tmp_path)
    assert os.listdir(tmp_path) == [PRUNER]


def test_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import DistributedType

    run = built()
    monkeypatch.setattr(run.accelerator.state, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(OptimizerError, match="DEEPSPEED keeps its own copies.*Use DDP, or FSDP version 2"):
        prepare(run.accelerator, run.pruner)
