"""After training on many processes: the masks and weights of one process, to the bit, at every number of ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import secateur as sc
from secateur.errors import ShardError
from tests.many_worker import METHODS, batches, network, outcome
from tests.test_distributed import launch

pytest.importorskip("transformers", reason="one of the models is a Llama of transformers, which is not installed")

LLAMA = ("variance", "recommended", "sparsegpt", "blocks")
CASES = [
    *(f"ddp mlp {method}" for method in METHODS if method != "blocks"),
    *(f"ddp moe {method}" for method in ("variance", "wanda", "recommended", "sparsegpt", "exact")),
    *(f"ddp recurrent {method}" for method in ("wanda", "recommended", "sparsegpt")),
    *(f"ddp llama {method}" for method in LLAMA),
    *(f"ddp choice {method}" for method in ("wanda", "recommended", "sparsegpt")),
    "ddp dead variance",
    "ddp fitted variance",
    "ddp mlp recommended 2",  # fewer batches than ranks
    "ddp llama blocks 2",
    "plain mlp variance",
    *(f"fsdp mlp {method}" for method in ("variance", "wanda", "recommended", "probe")),
    "fsdp moe variance",
    "fsdp llama recommended",
    "fsdp llama sparsegpt",
    "mixed mlp variance",
]


@cache
def alone(name: str, method: str, count: int) -> dict[str, Any]:
    return outcome("alone", name, method, count)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_masks_and_weights_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    jobs = [*CASES, "hsdp mlp variance"] if ranks == 4 else CASES
    found = launch(tmp_path / "out.pt", ranks, *jobs, worker="tests.many_worker")
    for job in jobs:
        _, name, method, *count = job.split()
        expected = alone(name, method, int(count[0]) if count else 5)
        assert len(found[job]) == ranks
        for rank, mine in enumerate(found[job]):
            for kind in ("masks", "weights"):
                assert mine[kind].keys() == expected[kind].keys()
                for key, tensor in expected[kind].items():
                    assert torch.equal(mine[kind][key], tensor), f"{job}, rank {rank}: {kind} of {key}"
            for about in ("found", "notes", "batches"):
                assert mine[about] == expected[about], f"{job}, rank {rank}"
            assert (mine["sent"] > 0) == (ranks > 1)
    means = [mine["buffers"]["norm.running_mean"].mean() for mine in found["ddp recurrent wanda"]]
    assert means == list(range(ranks))  # rank 0's were used, and each has its own again


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = launch(tmp_path / "out.pt", 2, "refusals", worker="tests.many_worker")["refusals"]
    assert second["nan"].startswith("FactError: The loss of a batch is NaN")
    assert first["nan"] == "ShardError: Rank 1 failed, so every rank stops: " + second["nan"]
    for found in first, second:
        assert found["batches"].startswith("ShardError: The batches of rank 1 are not those of rank 0. Give every rank")
        assert found["counts"].startswith("ShardError: The batches of rank 1 are not those of rank 0.")
        assert found["weights"].startswith("ShardError: The weights of rank 1 are not those of rank 0.")
        assert found["settings"].startswith("ShardError: ")
        assert "No score is named 'nope'" in found["score"]
        assert "No order 'nope'" in found["order"]
        assert found["sharded"].startswith("ShardError: distributed=False is for whole models")
        assert found["parallel"].startswith("ShardError: A parameter 'weight' of shape (37, 12) is distributed, but")
        assert found["restored"] is True
        assert found["type"] == "FSDPSequential"
    assert first["none"].startswith("ShardError: Rank 1 failed, so every rank stops: FactError: There are no batches")
    assert second["none"].startswith("FactError: There are no batches")
    assert first["evaluate"] == "ShardError: Rank 1 failed, so every rank stops: RuntimeError: the disk is full"
    assert second["evaluate"] == "RuntimeError: the disk is full"
    assert first["sharded nan"].startswith("ShardError: Rank 1 failed")
    assert first["by itself"] == ""


def test_batches_are_split_and_only_statistics_are_sent(tmp_path: Path) -> None:
    found = launch(tmp_path / "out.pt", 3, "split", "trained on", "rounded", worker="tests.many_worker")
    model = network("mlp")
    gradient = 4 * sum(layer.weight.numel() for layer in model if hasattr(layer, "weight") and layer is not model[-1])
    for rank, mine in enumerate(found["split"]):
        assert mine["numbers"] == list(range(rank, 5, 3))
        small, large = mine["sent"]
        assert small == large  # batches of 2 or of 200: neither data nor activations are sent
        assert 0 < small - gradient * len(mine["numbers"]) < 4000
    assert found["rounded"] == [True] * 3
    for mine in found["trained on"]:
        assert mine == {"sparsity": pytest.approx(0.7, abs=1e-3), "finite": True}


def test_a_group_must_exist_to_be_shared() -> None:
    with pytest.raises(ShardError, match="init_process_group"):
        sc.prune(network("mlp"), batches("mlp"), distributed=True)
