"""A run killed at any step and resumed is bit-identical to one that was left alone."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import secateur as sc
from secateur.errors import ScheduleError, StateError
from secateur.model.prunable import find_prunable
from secateur.model.state import SETTINGS, encoded, rounding, settings_in
from secateur.selection.tiles import parse_pattern
from tests.conftest import Block, train
from tests.processes import start

STEPS = 40


def run(folder: Path, score: str, kill_after: int | None = None) -> None:
    """Run the worker; when told, SIGKILL it as soon as it reports that step, in the midst of whatever it does next."""
    folder.mkdir(exist_ok=True)
    words = [str(folder), str(STEPS), score, *([] if kill_after is None else [str(kill_after)])]
    log = folder / "log"
    log.write_text("")
    worker = start("tests.resume_worker", *words, log=log)
    while kill_after is not None and str(kill_after) not in log.read_text().split():
        assert worker.is_alive(), log.read_text()
        time.sleep(0.001)
    if kill_after is not None:
        worker.kill()
    worker.join(timeout=60)
    assert worker.exitcode == (0 if kill_after is None else -signal.SIGKILL), log.read_text()


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


def saved_by(block: Block, steps: int = 3, **settings: Any) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, **{"sparsity": 0.5, "every": 1, **settings})
    train(block, optimizer, steps, pruner.step)
    return pruner.state_dict()


def fresh(**settings: Any) -> sc.Pruner:
    block = Block()
    return sc.Pruner(block, torch.optim.AdamW(block.parameters()), **{"sparsity": 0.5, "every": 1, **settings})


def untouched(pruner: sc.Pruner) -> bool:
    report = pruner.report()
    return (report.step, report.asked, report.pruned) == (0, 0.0, 0)


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ({}, {"pattern": "2:4"}, r"saved Pruner has pattern None; this one has pattern '2:4'"),
        ({"pattern": "2:4"}, {}, r"has pattern '2:4'; this one has pattern None"),
        ({}, {"score": "magnitude"}, r"has score 'variance\(q=0.25\)'; this one has score 'magnitude\(\)'"),
        ({}, {"score": "variance(q=3/8)"}, r"'variance\(q=0.25\)'; this one has score 'variance\(q=0.375\)'"),
        ({}, {"score": "movement"}, r"this one has score 'movement\(\)'"),
        ({}, {"scope": "layer"}, r"has scope 'model'; this one has scope 'layer'"),
        ({"allocation": "erk"}, {}, r"has allocation 'erk'; this one has allocation None"),
        ({}, {"sparsity": 0.6}, r"schedule 'constant\(0.5\)'; this one has schedule 'constant\(0.6\)'"),
        ({}, {"regrow": "random", "until": 9}, r"regrow None; this one has regrow 'random\(drop=0.3, until=9\)'"),
        ({"score": "magnitude", "scope": "layer"}, {}, r"score 'magnitude\(\)', scope 'layer'; this one has score"),
        ({"sparsity": lambda step: 0.5}, {}, r"schedule '<function .*lambda>>'; this one has schedule 'constant"),
    ],
)
def test_a_state_of_other_settings_is_refused(theirs: Any, ours: Any, said: str, block: Block) -> None:
    pruner = fresh(**ours)
    with pytest.raises(StateError, match=said):
        pruner.load_state_dict(saved_by(block, **theirs))
    assert untouched(pruner)


def test_the_same_settings_in_other_words_are_taken(block: Block) -> None:
    state = saved_by(block, score="variance", allocation=None)
    fresh(score="variance(q=1/4)", every=7, skip="lm_head").load_state_dict(state)  # `every` may differ
    lambdas = saved_by(Block(), sparsity=lambda step: 0.5)
    assert b" at 0x" not in bytes(lambdas["settings"].tolist())


@pytest.mark.parametrize(("theirs", "ours"), [("global", "model"), ("model", "global")])
def test_scope_global_and_model_are_the_same_setting(theirs: str, ours: str, block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    saved = sc.Pruner(block, optimizer, scope=theirs, every=1)
    train(block, optimizer, 1, saved.step)
    state = saved.state_dict()
    state[SETTINGS] = encoded({**settings_in(state), "scope": theirs})  # as another program may have written it
    loaded = sc.Pruner(block, optimizer, scope=ours, every=1)
    loaded.load_state_dict(state)
    assert loaded.scope == saved.scope == "model"
    assert loaded.sparsity == 0.5


def test_settings_have_one_size_however_long(block: Block) -> None:
    """torch.distributed.checkpoint loads into tensors of the shape that was saved."""

    class Long:
        def __init__(self, letter: str) -> None:
            self.letter = letter

        def __call__(self, step: int) -> float:
            return 0.5

        def __str__(self) -> str:
            return "é" * 5000 + self.letter

    state = saved_by(block, sparsity=Long("a"))
    assert state["settings"].shape == saved_by(Block())["settings"].shape == (4096,)
    fresh(sparsity=Long("a")).load_state_dict(state)
    with pytest.raises(StateError, match="schedule"):
        fresh(sparsity=Long("b")).load_state_dict(state)


def test_states_from_before_settings_were_saved_are_taken(block: Block) -> None:
    state = saved_by(block)
    del state["settings"]
    pruner = fresh(pattern="2:4")
    pruner.load_state_dict(state)
    assert pruner.sparsity == 0.5


def test_training_may_be_extended_on_purpose(block: Block) -> None:
    """A longer ramp asks for less at first than is gone already; nothing happens until it asks for more."""
    state = saved_by(block, steps=6, sparsity=sc.linear(0.4, begin=0, end=8))
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters())
    pruner = sc.Pruner(model, optimizer, sparsity=sc.linear(0.6, begin=0, end=20), every=1)
    pruner.load_state_dict(state, strict=False)
    assert pruner.sparsity == pytest.approx(0.3, abs=1e-3)
    seen = []
    train(model, optimizer, 14, lambda: (pruner.step(), seen.append(pruner.sparsity))[1])
    assert seen[:4] == [seen[0]] * 4  # steps 7 to 10 ask for at most 0.3
    assert seen == sorted(seen)
    assert pruner.report().pruned == round(0.6 * 2048)
    resumed = fresh(sparsity=sc.linear(0.6, begin=0, end=20))
    resumed.load_state_dict(pruner.state_dict())  # what was gone on with is what is saved
    assert resumed.sparsity == pruner.sparsity


def test_masks_carried_to_a_pattern_come_to_keep_it(block: Block) -> None:
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters())
    pruner = sc.Pruner(model, optimizer, sparsity=None, pattern="2:4", every=1)
    state = saved_by(block)
    pruner.load_state_dict(state, strict=False)
    again = fresh(sparsity=None, pattern="2:4")
    again.load_state_dict(pruner.state_dict())
    train(model, optimizer, 1, pruner.step)
    for name, mask in pruner.masks.items():
        assert bool((mask.view(-1, 4).sum(1) <= 2).all())
        gone = torch.tensor(list(state[f"mask.{name}"].flatten()))
        assert int(mask.sum()) < sum(int(byte).bit_count() for byte in gone)  # nothing came back
    third = fresh(sparsity=None, pattern="2:4")
    third.load_state_dict(pruner.state_dict())
    assert third.sparsity == pruner.sparsity > 0.5


def test_another_score_may_go_on_from_the_masks(block: Block) -> None:
    state = saved_by(block, score="movement")
    for score in ("magnitude", "displacement"):
        pruner = fresh(score=score)
        pruner.load_state_dict(state, strict=False)
        assert pruner.sparsity == 0.5
    del state["mask.up.weight"]
    with pytest.raises(StateError, match="1 entries missing"):
        pruner.load_state_dict(state, strict=False)


NONSENSE: dict[str, tuple[Any, str]] = {
    "negative": ({"steps": torch.tensor([-1, -1, -1])}, r"saved steps are \[-1, -1, -1\]"),
    "seen-late": ({"steps": torch.tensor([2, 3, 2])}, r"saved steps are \[2, 3, 2\]"),
    "settled-late": ({"steps": torch.tensor([3, 2, 3])}, r"saved steps are \[3, 2, 3\]"),
    "nan": ({"asked": torch.tensor(torch.nan).double()}, "saved sparsity is nan"),
    "one": ({"asked": torch.tensor(1.0).double()}, "saved sparsity is 1.0"),
    "below": ({"asked": torch.tensor(-0.1).double()}, "saved sparsity is -0.1"),
    "more": ({"asked": torch.tensor(0.9).double()}, "remove 1024 of 2048 weights at an asked sparsity of 0.9"),
    "less": ({"asked": torch.tensor(0.1).double()}, "remove 1024 of 2048 weights at an asked sparsity of 0.1"),
    "unbegun": ({"steps": torch.tensor([0, 0, 0])}, "0.5 after 0 steps"),
    "masks": ({"mask.up.weight": torch.full((64, 2), 255, dtype=torch.uint8)}, "contradict each other"),
    "text": ({"settings": torch.full((4096,), 7, dtype=torch.uint8)}, "settings cannot be read"),
    "list": ({"settings": torch.tensor([*b"[1]", *bytes(4093)], dtype=torch.uint8)}, "not an object"),
    "size": ({"settings": torch.zeros(9, dtype=torch.uint8)}, "settings cannot be read"),
    "kind": ({"settings": None}, "settings cannot be read"),
    "keys": ({3: torch.zeros(1)}, "keys that are no names"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_and_nothing_changes(name: str, strict: bool, block: Block) -> None:
    changes, said = NONSENSE[name]
    state = saved_by(block, score="movement")
    pruner = fresh(score="movement")
    weights = {key: value.clone() for key, value in pruner._model.state_dict().items()}
    kept = pruner.state_dict()
    with pytest.raises(StateError, match=said):
        pruner.load_state_dict({**state, **changes}, strict=strict)
    assert untouched(pruner)
    assert all(torch.equal(value, weights[key]) for key, value in pruner._model.state_dict().items())
    assert all(torch.equal(value, kept[key]) for key, value in pruner.state_dict().items())


def test_one_bit_of_a_mask_is_missed(block: Block) -> None:
    state = saved_by(block)
    state["mask.up.weight"] = state["mask.up.weight"].clone()
    state["mask.up.weight"][3, 1] ^= 4
    with pytest.raises(StateError, match="with a saved count of 1024. These contradict each other"):
        fresh().load_state_dict(state)


def test_what_is_no_state_is_refused() -> None:
    for wrong in (None, [1], 3):
        with pytest.raises(StateError, match=r"needs what a Pruner's state_dict\(\) returned; got a"):
            fresh().load_state_dict(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mask.up.weight", "steps", "asked", "settings"])
@pytest.mark.parametrize("strict", [True, False])
def test_tensors_without_values_are_refused(name: str, strict: bool, block: Block) -> None:
    state, pruner = saved_by(block), fresh()
    for empty in (state[name].to("meta"), state[name].to_sparse()):
        with pytest.raises(StateError, match=f"Saved '{name}' has no values to read"):
            pruner.load_state_dict({**state, name: empty}, strict=strict)
        assert untouched(pruner)


@pytest.mark.parametrize(
    ("scope", "pattern", "most"),
    [
        (None, None, 1024),  # a state that does not tell its scope: half of all
        ("model", None, 2),
        ("layer", None, 3),
        ("row", None, 64 + 16 + 1),
        ("model", "block:4x2", 8 + 1),
        ("layer", "block:4x2", 2 * 8 + 1),
        ("model", "2:4", 2048 / 4 + 1),
    ],
)
def test_how_far_masks_may_be_off_by_rounding(
    scope: str | None, pattern: str | None, most: float, block: Block
) -> None:
    prunables, _ = find_prunable(block)
    assert [tuple(prunable.parameter.shape) for prunable in prunables] == [(64, 16), (16, 64)]
    assert rounding(prunables, scope, parse_pattern(pattern)) == most


@pytest.mark.parametrize(
    "settings",
    [
        {"scope": "layer"},
        {"scope": "row"},
        {"pattern": "2:4"},
        {"pattern": "block:4x4"},
        {"pattern": "block:4x4", "scope": "layer"},
        {"allocation": "erk"},
        {"score": "magnitude", "allocation": "lamp"},
        {"score": "bitter4"},
        {"score": "magnitude", "regrow": "random", "until": 9},
    ],
    ids=str,
)
def test_every_setting_saves_counts_that_load(settings: dict[str, Any]) -> None:
    """At odd sparsities of a ramp, where pools and tiles are rounded."""
    for steps in (0, 1, 2, 3, 4, 5, 6):
        schedule = sc.linear(0.5, begin=0, end=6)
        state = saved_by(Block(width=12), steps=steps, **{**settings, "sparsity": schedule})
        block = Block(width=12)
        pruner = sc.Pruner(
            block, torch.optim.AdamW(block.parameters()), **{**settings, "sparsity": schedule, "every": 1}
        )
        pruner.load_state_dict(state)
        assert pruner.report().step == steps


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_settings_go_through_distributed_checkpoints(block: Block, tmp_path: Path) -> None:
    """Loading writes into tensors of the Pruner that is there; its settings are compared with what was saved."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    saved = saved_by(block, score="magnitude")
    dcp.save({"pruner": saved}, checkpoint_id=tmp_path / "new", no_dist=True)
    older = {name: value for name, value in saved.items() if name != "settings"}
    dcp.save({"pruner": older}, checkpoint_id=tmp_path / "old", no_dist=True)
    for score in ("magnitude", "variance"):
        pruner = fresh(score=score)
        state = {"pruner": pruner.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "new", no_dist=True)
        if score == "magnitude":
            pruner.load_state_dict(state["pruner"])
            assert pruner.sparsity == 0.5
        else:
            with pytest.raises(StateError, match=r"has score 'magnitude\(\)'; this one has score 'variance"):
                pruner.load_state_dict(state["pruner"])
            assert untouched(pruner)
    pruner = fresh()
    state = {"pruner": pruner.state_dict()}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path / "old", planner=planner, no_dist=True)
    pruner.load_state_dict(state["pruner"])
    assert pruner.sparsity == 0.5


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


def test_a_schedule_that_falls_after_resuming_is_refused(block: Block) -> None:
    def wave(step: int) -> float:
        return 0.5 if step <= 4 else 0.2

    state = None
    for steps in (4, 4):
        optimizer = torch.optim.AdamW(block.parameters())
        pruner = sc.Pruner(block, optimizer, score="magnitude", sparsity=wave, every=2)
        if state is not None:
            pruner.load_state_dict(state)
            with pytest.raises(ScheduleError, match="falls"):
                train(block, optimizer, steps, pruner.step)
        else:
            train(block, optimizer, steps, pruner.step)
            state = pruner.state_dict()
