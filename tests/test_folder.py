"""A pruned model goes into a folder and comes back; nothing is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from secateur import hf
from secateur.errors import ModelError, StateError
from tests import tiny

files = pytest.importorskip("safetensors.torch", reason="folders need safetensors, which is not installed")


def masks_of(model: Any) -> dict[str, Tensor]:
    return {name: torch.rand(p.shape) < 0.5 for name, p in model.named_parameters() if p.ndim == 2}


def test_round_trip(tmp_path: Path) -> None:
    model, folder = tiny.llama(tie_word_embeddings=True), tmp_path / "new" / "model"
    masks = masks_of(model)
    saved = hf.save(model, tiny.tokenizer(), folder, masks, {"report.md": "# Grüße\n", "report.json": "{}"})
    assert saved == folder
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert (folder / "report.md").read_text(encoding="utf-8") == "# Grüße\n"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    found = hf.load_masks(folder)
    assert found.keys() == masks.keys()
    assert all(found[name].dtype == torch.bool and torch.equal(found[name], masks[name]) for name in masks)
    again, tokenizer = hf.load(folder)
    tokens = torch.tensor([tokenizer("trees are cut").input_ids])
    assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)


def test_masks_take_a_bit_a_weight(tmp_path: Path) -> None:
    model = tiny.llama()
    hf.save(model, None, tmp_path / "a", {"lm_head.weight": torch.ones(97, 16, dtype=torch.bool)}, {})
    with files.safe_open(tmp_path / "a" / "masks.safetensors", framework="pt") as opened:
        assert opened.get_tensor("lm_head.weight").shape == (97, 2)
        assert json.loads(opened.metadata()["shapes"]) == {"lm_head.weight": [97, 16]}


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    model, folder = tiny.llama(), tmp_path / "model"
    folder.mkdir()
    hf.save(model, None, folder, {}, {"old.md": "old"})  # empty folders are free
    with pytest.raises(ModelError, match="model is not empty. Name another folder, or say overwrite=True."):
        hf.save(model, None, folder, {}, {})
    hf.save(model, None, folder, {}, {"new.md": "new"}, overwrite=True)
    assert not (folder / "old.md").exists()
    assert (folder / "new.md").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelError, match="file is a file; a model is saved as a folder."):
        hf.save(model, None, tmp_path / "file", {}, {}, overwrite=True)
    with pytest.raises(ModelError, match="holds something other than a model and is not overwritten."):
        hf.save(model, None, tmp_path, {}, {}, overwrite=True)


def test_what_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = tiny.llama(), tmp_path / "model"
    for name in ("config.json", "../outside", "a/b"):
        with pytest.raises(ModelError, match=f"A report cannot be saved as '{name}'"):
            hf.save(model, None, folder, {}, {name: "text"})
    assert not list(tmp_path.iterdir())
    hf.save(model, None, folder, {}, {"old.md": "old"})
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target == folder and not path.name.endswith(".old"):
            raise OSError("disk is full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="disk is full"):
        hf.save(model, None, folder, {}, {}, overwrite=True)
    assert (folder / "old.md").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_masks_of_another_model_are_refused(tmp_path: Path) -> None:
    model = tiny.llama()
    with pytest.raises(StateError, match="There is a mask for 'x', which is no parameter of LlamaForCausalLM."):
        hf.save(model, None, tmp_path / "a", {"x": torch.ones(1, 1, dtype=torch.bool)}, {})
    for mask, found in ((torch.ones(97, 16), "torch.float32 .97, 16."), (torch.ones(16, 97).bool(), "bool .16, 97.")):
        with pytest.raises(StateError, match=f"'lm_head.weight' is .*{found}; it must be torch.bool .97, 16."):
            hf.save(model, None, tmp_path / "a", {"lm_head.weight": mask}, {})
    assert not list(tmp_path.iterdir())


def test_masks_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="There is no masks.safetensors in .*: it was not saved by Secateur"):
        hf.load_masks(tmp_path)
    path = tmp_path / "masks.safetensors"
    path.write_bytes(b"not at all")
    with pytest.raises(StateError, match="does not hold masks: .*Save the model again."):
        hf.load_masks(tmp_path)
    packed = {"a": torch.zeros(4, 2, dtype=torch.uint8)}
    files.save_file(packed, path)
    with pytest.raises(StateError, match="does not hold masks: KeyError.'shapes'."):
        hf.load_masks(tmp_path)
    for shapes in ({"a": [4, 17]}, {"b": [4, 16]}, {"a": [4, 16], "b": [1, 1]}):
        files.save_file(packed, path, metadata={"shapes": json.dumps(shapes)})
        with pytest.raises(StateError, match="does not fit the shapes it names, at [ab]"):
            hf.load_masks(tmp_path)
