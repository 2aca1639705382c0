"""Many processes: the same masks and the same weights at every world size, and little said over the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import secateur as sc
from tests.distributed_worker import SETTINGS, network
from tests.processes import run_ranks

Results = dict[str, Any]
HELD = ("whole", "fsdp", "ddp")


def launch(out: Path, ranks: int, *jobs: str, worker: str = "tests.distributed_worker") -> Results:
    """The jobs run one after another in `ranks` processes, on gloo."""
    done = run_ranks(ranks, worker, str(out), *jobs, log=out.with_suffix(".log"))
    assert done.well, f"exit codes {done.codes}: {done.said[-8000:]}"
    results: Results = torch.load(out, weights_only=True)
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("alone") / "out.pt"
    return launch(out, 1, "single")


def agree(found: Results, alone: Results, job: str) -> None:
    tensors, _ = found[job]
    expected, _ = alone[f"single {job.split()[1]}"]
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), f"{job}: {name}"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_masks_and_weights_do_not_depend_on_the_world_size(ranks: int, alone: Results, tmp_path: Path) -> None:
    jobs = [f"fsdp {setting}" for setting in SETTINGS] + ["ddp model", "ddp bf16", "mixed model"]
    jobs += ["hsdp model", "hsdp bf16"] if ranks == 4 else []
    found = launch(tmp_path / "out.pt", ranks, *jobs)
    for job in jobs:
        agree(found, alone, job)
    check_bytes(found, ranks)


def check_bytes(found: Results, ranks: int) -> None:
    """Histograms of 2^11 int64 counts and a few tables cross the network, whatever the size of the model.

    A small model needs three (32 bits of key, 11 at a time), a large one three more for each end of the bracket.
    """
    histogram = 8 * 2**11
    small, large = found["fsdp model"][1], found["fsdp large"][1]
    if ranks == 1:
        assert small == large == 0
        return
    assert histogram < small < 3 * histogram + 512
    assert large < 10 * histogram  # 1 million weights; gathered scores would be 4 MB
    assert found["ddp model"][1] == 0  # equal input gives equal masks: only eight bytes a rank, to be sure


def test_saved_at_one_world_size_loaded_at_another(alone: Results, tmp_path: Path) -> None:
    saves = [f"fsdp {setting} save={tmp_path / setting}" for setting in ("model", "movement")]
    found = {4: launch(tmp_path / "4.pt", 4, *saves)}
    for ranks in (2, 3):
        found[ranks] = launch(tmp_path / f"{ranks}.pt", ranks, *(job.replace(" save=", " load=") for job in saves))
    for ranks, done in (4, "save"), (2, "load"), (3, "load"):
        assert len(found[ranks]) == 2
        for setting in ("model", "movement"):
            agree(found[ranks], alone, f"fsdp {setting} {done}")


def test_what_cannot_be_served_is_refused_on_every_rank(tmp_path: Path) -> None:
    said = launch(tmp_path / "out.pt", 2, "refusals")["refusals"]
    assert said["row"].startswith("ShardError: Scope 'row' compares weights of '0.weight' that lie on different ranks")
    assert said["8:12"].startswith("ShardError: Pattern '8:12' compares weights of '0.weight'")
    assert said["nan"].startswith("ScoreError: NaN scores in '0.weight'")
    assert said["replicas"].startswith("ShardError: Ranks of DistributedDataParallel have different masks")


def test_masks_of_another_rank_are_refused_and_whole_ones_taken(tmp_path: Path) -> None:
    """torch.save on one rank, as Accelerate does with what it is given to keep, saves the shards of that rank."""
    for found in launch(tmp_path / "out.pt", 4, "saved-by-one")["saved-by-one"]:
        assert found["shards"].startswith("StateError: The saved masks are of rows that other processes hold")
        assert "full_tensor" in found["shards"]
        assert found["untouched"]
        assert found["whole"] is True
        assert found["plain"] is True
        assert found["checkpointing"] is True


def test_a_state_for_checkpointing_of_many_ranks_loads_into_one_process(tmp_path: Path) -> None:
    for found in launch(tmp_path / "out.pt", 2, "saved-by-one")["saved-by-one"][:2]:
        model = network("even" if len(found["masks"]) == 2 else "model")
        pruner = sc.Pruner(model, torch.optim.AdamW(model.parameters()), every=1, sparsity=0.7)
        pruner.for_checkpointing().load_state_dict(found["state"])
        assert all(torch.equal(mask, found["masks"][name]) for name, mask in pruner.masks.items())


def test_copies_get_the_zeros_and_replaced_parameters_are_noticed(tmp_path: Path) -> None:
    found = launch(tmp_path / "out.pt", 2, "copies", "too-early", "gathered")
    assert found["copies"] == {f"{how} {way}": True for how in ("fsdp", "ddp") for way in (*HELD, "averaged")}
    assert found["too-early"].startswith("StateError: The model's '0.weight' is not the parameter it was when")
    assert found["gathered"] == round(0.5 * 822) / 822


def test_a_process_has_the_environment_of_the_test_that_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the test which happened to start the first: test_kernels.py turns kernels on for its own."""
    for told in ("off", "other", None):
        monkeypatch.setenv("SECATEUR_KERNELS", told) if told else monkeypatch.delenv("SECATEUR_KERNELS")
        script = "print('[', os.environ.get('SECATEUR_KERNELS'), ']')"
        done = run_ranks(1, "timeit", "-n1", "-r1", "-simport os", script, log=tmp_path / f"{told}.log")
        assert done.well
        assert f"[ {told} ]" in done.said
