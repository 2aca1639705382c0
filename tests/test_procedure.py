"""The tool that runs GradProbe's procedure: its reader of llama2.c files, and its tables."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from secateur.errors import ModelError
from tools import procedure_tables

stories = pytest.importorskip("tools.stories")
SIZES = (8, 12, 2, 2, 2, 9, 4)  # width, hidden, layers, heads, heads of keys, vocabulary, context


def written(path: Path, pieces: list[tuple[bytes, float]]) -> torch.Tensor:
    """A checkpoint of random numbers with a tokenizer behind it; the numbers."""
    width, hidden, layers, heads, _, vocabulary, context = SIZES
    block = 2 * width + 4 * width * width + 3 * hidden * width
    flat = torch.randn(vocabulary * width + layers * block + width + context * (width // heads))
    data = struct.pack("<7i", *SIZES) + flat.numpy().tobytes() + struct.pack("<i", 8)
    data += b"".join(struct.pack("<fi", score, len(piece)) + piece for piece, score in pieces)
    path.write_bytes(data)
    return flat


PIECES = [(b"<unk>", 0.0), (b"<s>", 0.0), (b"</s>", 0.0), (b" ", -9.0), (b"a", -8.0), (b"b", -7.0), (b"ab", -2.0),
          (b" a", -1.0), (b" ab", -3.0)]  # fmt: skip


def test_a_checkpoint_of_llama2c_is_read(tmp_path: Path) -> None:
    flat = written(tmp_path / "model.bin", PIECES)
    model, vocabulary = stories.read(tmp_path / "model.bin")
    weights, width, layers = model.state_dict(), 8, 2
    assert torch.equal(weights["lm_head.weight"], flat[: 9 * width].view(9, width))
    at = 9 * width + layers * width  # behind the embedding and the first norms
    queries = flat[at : at + layers * width * width].view(layers, width, width)
    turned = [0, 2, 1, 3, 4, 6, 5, 7]  # pairs become halves of a head
    assert torch.equal(weights["model.layers.1.self_attn.q_proj.weight"], queries[1][turned])
    gates = flat[at + layers * (4 * width * width + width) :][: layers * 12 * width].view(layers, 12, width)
    assert torch.equal(weights["model.layers.1.mlp.gate_proj.weight"], gates[1])
    assert vocabulary.encode("ab a") == [1, 8, 7]  # " a" is merged before "ab", and no piece holds a later space
    (tmp_path / "model.bin").write_bytes((tmp_path / "model.bin").read_bytes()[:500])
    with pytest.raises(ModelError, match="its header promises"):
        stories.read(tmp_path / "model.bin")


def test_a_model_writes_and_loses_the_tokens_it_does_not_need(tmp_path: Path) -> None:
    written(tmp_path / "model.bin", PIECES)
    model, _ = stories.read(tmp_path / "model.bin")
    ids = stories.written(model, 3, 4, seed=0, batch=2)
    assert ids.shape == (3, 4)
    assert torch.equal(ids, stories.written(model, 3, 4, seed=0, batch=2))
    small, [again] = stories.restricted(model, [ids])
    used = ids.unique()
    with torch.no_grad():
        assert torch.allclose(small(again).logits, model(ids).logits[:, :, used], atol=1e-5)


def a_cell(name: str, group: int | str, calls: int, seconds: float) -> dict[str, Any]:
    names = ["dense", "level 0.1, tolerance 1, sparsity 0.0900", "level 0.2, tolerance 1, sparsity 0.1800",
             "back to sparsity 0.0900", "wanda alone at sparsity 0.0900"]  # fmt: skip
    costs = [0.0, seconds, 3 * seconds, 0.0, 9.0]
    return {
        "cell": name, "group": group, "draw": 0, "sparsity": 0.09, "perplexity": 3.5, "alone": 3.25, "calls": calls,
        "probe_peak_bytes": 2e9, "found": [[text, -1.0] for text in names],
        "levels": [{"seconds" if group == 1 else "cpu_seconds": cost, "calls": 1, "value": -4.0} for cost in costs],
    }  # fmt: skip


def test_searches_become_tables() -> None:
    record = {"model": "stories15M with some tokens", "text": "its own", "calibration": 4, "context": 128,
              "cells": [a_cell("raise, refreshed", 1, 85, 2.0), a_cell("raise", 1, 3, 1.0)]}  # fmt: skip
    lines = procedure_tables.searches([record]).splitlines()
    named = "no limit, candidates cached, layer by layer"
    assert lines[2] == f"| stories15M | {named} | 0 | 2 | 2.0 | 3 | 2,000 | 9.0% | 3.50 | 3.25 | - |"
    text = procedure_tables.levels([record])
    assert f"| stories15M | {named} | 0 | 0.2 | 0.1800 | 4.00 | 3.0 | 1 |" in text
    assert "3 calls of the score cached, 85 refreshed (28x); 4 and 8 s (50% less)" in text
    assert procedure_tables.searches([]) == procedure_tables.levels([]) == "not measured yet"


def test_strict_probes_become_a_table() -> None:
    judged = {"dense_calibrated": 3.0, "calibrated": 1.5}
    cells = [a_cell("strict", 1, 2, 1.0) | judged | {"recommended": 3.1}, a_cell("strict", "block", 2, 1.0) | judged]
    record = {"model": "stories15M", "text": "its own", "calibration": 4, "context": 128, "dense": 2.5, "cells": cells}
    lines = procedure_tables.strict([record]).splitlines()[2:]
    assert lines == [
        "| stories15M, its own | layer by layer | 4 x 128 | 0 | 9.0% | 2.50 | 3.50 | 3.25 | 3.10 | 3.00 | 1.50 |",
        "| stories15M, its own | block by block | 4 x 128 | 0 | 9.0% | 2.50 | 3.50 | 3.25 | - | 3.00 | 1.50 |",
    ]
