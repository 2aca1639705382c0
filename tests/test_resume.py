"""A run killed at any step and resumed is bit-identical to one that was left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import secateur as sc
from tests.conftest import Block, train

ROOT = Path(__file__).parent.parent
STEPS = 40


def run(folder: Path, score: str, kill_after: int | None = None) -> None:
    """Run the worker; when told, SIGKILL it as soon as it reports that step, in the midst of whatever it does next."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.resume_worker", str(folder), str(STEPS), score]
    command += [] if kill_after is None else [str(kill_after)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if kill_after is not None and int(line) == kill_after:
                worker.send_signal(signal.SIGKILL)
    assert worker.returncode == (0 if kill_after is None else -signal.SIGKILL)


def flatten(state: Any, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(state, Tensor):
        return {prefix: state}
    if isinstance(state, dict):
        return {name: t for key, value in state.items() for name, t in flatten(value, f"{prefix}.{key}").items()}
    return {}


@pytest.mark.parametrize("score", ["bitter7", "movement"])
def test_killed_and_resumed_is_the_same_to_the_bit(score: str, tmp_path: Path) -> None:
    run(tmp_path / "whole", score)
    for kill_after in (4, 5, 19, 37):  # between updates, at one, in the ramp, past its end
        run(tmp_path / "killed", score, kill_after)
    run(tmp_path / "killed", score)
    whole, killed = (
        flatten(torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)) for name in ("whole", "killed")
    )
    assert whole.keys() == killed.keys()
    assert any("max_exp_avg_sq" in name for name in whole)
    assert any("mask" in name for name in whole)
    assert [name for name in whole if not torch.equal(whole[name], killed[name])] == []


def test_state_is_tensors_only_and_survives_safetensors(block: Block, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=0.7, every=1)
    train(block, optimizer, 3, pruner.step)
    state = pruner.state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    safetensors.save_file(state, tmp_path / "pruner.safetensors")
    other = sc.Pruner(block, torch.optim.AdamW(block.parameters()), sparsity=0.7, every=1)
    other.load_state_dict(safetensors.load_file(tmp_path / "pruner.safetensors"))
    assert all(torch.equal(mask, pruner.masks[name]) for name, mask in other.masks.items())
    assert other.sparsity == pruner.sparsity
    assert other.report().step == 3
    packed = sum(value.nbytes for name, value in state.items() if name.startswith("mask."))
    assert packed == pruner.report().packed_mask_bytes == 2048 // 8


def test_states_from_before_rows_were_marked_are_taken(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=0.7, every=1)
    train(block, optimizer, 1, pruner.step)
    older = {name: value for name, value in pruner.state_dict().items() if not name.startswith("rows.")}
    other = sc.Pruner(block, torch.optim.AdamW(block.parameters()), sparsity=0.7, every=1)
    other.load_state_dict(older)
    assert all(torch.equal(mask, pruner.masks[name]) for name, mask in other.masks.items())
    with pytest.raises(sc.SecateurError, match="1 entries missing"):
        other.load_state_dict({**older, "rows.up.weight": pruner.state_dict()["rows.up.weight"]})


def test_channels_last_facts_are_saved_contiguous(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    layer = torch.nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    pruner = sc.Pruner(layer, torch.optim.AdamW(layer.parameters()), score="displacement", only="*")
    safetensors.save_file(pruner.state_dict(), tmp_path / "pruner.safetensors")
    saved = safetensors.load_file(tmp_path / "pruner.safetensors")
    pruner.load_state_dict(saved)
    assert torch.equal(saved["initial_weight.weight"], layer.weight)


def test_loading_zeroes_what_the_masks_say(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=0.5, every=1)
    train(block, optimizer, 1, pruner.step)
    fresh = Block()
    again = sc.Pruner(fresh, torch.optim.AdamW(fresh.parameters()), sparsity=0.5, every=1)
    again.load_state_dict(pruner.state_dict())
    assert all(bool((fresh.get_parameter(name)[~mask] == 0).all()) for name, mask in again.masks.items())


def test_facts_and_marks_of_rows_are_saved_and_come_back(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, score="movement", sparsity=0.5, every=1)
    train(block, optimizer, 3, pruner.step)
    state = pruner.state_dict()
    assert bool((state["movement_sum.up.weight"] != 0).any())
    assert len(state["rows.up.weight"].unique()) > 48  # of 64 rows: those of another process would show
    other = sc.Pruner(block, torch.optim.AdamW(block.parameters()), score="movement", sparsity=0.5, every=1)
    other.load_state_dict(state)
    again = other.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in state.items())
