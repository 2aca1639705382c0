"""Saving a pruned model to a folder and loading it again, also when writing fails or is interrupted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from secateur import files as files_module
from secateur.errors import ModelError, SaveError, SecateurError, StateError
from secateur.integrations import transformers
from tests import tiny
from tests.damage import damage, damages, small_disk

files = pytest.importorskip("safetensors.torch", reason="folders need safetensors, which is not installed")


def masks_of(model: Any) -> dict[str, Tensor]:
    return {name: torch.rand(p.shape) < 0.5 for name, p in model.named_parameters() if p.ndim == 2}


def test_round_trip(tmp_path: Path) -> None:
    model, folder = tiny.llama(tie_word_embeddings=True), tmp_path / "new" / "model"
    masks = masks_of(model)
    saved = transformers.save(model, tiny.tokenizer(), folder, masks, {"report.md": "# Grüße\n", "report.json": "{}"})
    assert saved == folder
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert (folder / "report.md").read_text(encoding="utf-8") == "# Grüße\n"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    found = transformers.load_masks(folder)
    assert found.keys() == masks.keys()
    assert all(found[name].dtype == torch.bool and torch.equal(found[name], masks[name]) for name in masks)
    again, tokenizer = transformers.load(folder)
    tokens = torch.tensor([tokenizer("trees are cut").input_ids])
    assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)


def test_masks_take_a_bit_a_weight(tmp_path: Path) -> None:
    model = tiny.llama()
    transformers.save(model, None, tmp_path / "a", {"lm_head.weight": torch.ones(97, 16, dtype=torch.bool)}, {})
    with files.safe_open(tmp_path / "a" / "masks.safetensors", framework="pt") as opened:
        assert opened.get_tensor("lm_head.weight").shape == (97, 2)
        assert json.loads(opened.metadata()["shapes"]) == {"lm_head.weight": [97, 16]}


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    model, folder = tiny.llama(), tmp_path / "model"
    folder.mkdir()
    transformers.save(model, None, folder, {}, {"old.md": "old"})  # empty folders are free
    with pytest.raises(ModelError, match="model is not empty. Name another folder, or pass overwrite=True."):
        transformers.save(model, None, folder, {}, {})
    transformers.save(model, None, folder, {}, {"new.md": "new"}, overwrite=True)
    assert not (folder / "old.md").exists()
    assert (folder / "new.md").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelError, match="file is a file; a model is saved as a folder."):
        transformers.save(model, None, tmp_path / "file", {}, {}, overwrite=True)
    with pytest.raises(ModelError, match="holds something other than a model and is not overwritten."):
        transformers.save(model, None, tmp_path, {}, {}, overwrite=True)


def test_what_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = tiny.llama(), tmp_path / "model"
    for name in ("config.json", "../outside", "a/b"):
        with pytest.raises(ModelError, match=f"A report cannot be saved as '{name}'"):
            transformers.save(model, None, folder, {}, {name: "text"})
    assert not list(tmp_path.iterdir())
    transformers.save(model, None, folder, {}, {"old.md": "old"})
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target == folder and not path.name.endswith(".old"):
            raise OSError("disk is full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(SaveError, match="disk is full. and is as it was"):
        transformers.save(model, None, folder, {}, {}, overwrite=True)
    assert (folder / "old.md").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_masks_of_another_model_are_refused(tmp_path: Path) -> None:
    model = tiny.llama()
    with pytest.raises(StateError, match="There is a mask for 'x', which is not a parameter of LlamaForCausalLM."):
        transformers.save(model, None, tmp_path / "a", {"x": torch.ones(1, 1, dtype=torch.bool)}, {})
    for mask, found in ((torch.ones(97, 16), "torch.float32 .97, 16."), (torch.ones(16, 97).bool(), "bool .16, 97.")):
        with pytest.raises(StateError, match=f"'lm_head.weight' is .*{found}; it must be torch.bool .97, 16."):
            transformers.save(model, None, tmp_path / "a", {"lm_head.weight": mask}, {})
    assert not list(tmp_path.iterdir())


def test_masks_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="There is no masks.safetensors in .*: it was not saved by Secateur"):
        transformers.load_masks(tmp_path)
    path = tmp_path / "masks.safetensors"
    path.write_bytes(b"not at all")
    with pytest.raises(StateError, match="does not hold masks: .*Save the model again."):
        transformers.load_masks(tmp_path)
    packed = {"a": torch.zeros(4, 2, dtype=torch.uint8)}
    files.save_file(packed, path)
    with pytest.raises(StateError, match="does not hold masks: KeyError.'shapes'."):
        transformers.load_masks(tmp_path)
    for shapes in ({"a": [4, 17]}, {"b": [4, 16]}, {"a": [4, 16], "b": [1, 1]}):
        files.save_file(packed, path, metadata={"shapes": json.dumps(shapes)})
        with pytest.raises(StateError, match="does not fit the shapes it names, at [ab]"):
            transformers.load_masks(tmp_path)
    for shapes in ([1], None, {"a": "4, 16"}, {"a": [4, "16"]}, {"a": [-4, -16]}, {"a": []}, {"a": [[4], 16]}):
        files.save_file(packed, path, metadata={"shapes": json.dumps(shapes)})
        with pytest.raises(StateError, match="its shapes are not lists of sizes"):
            transformers.load_masks(tmp_path)
    files.save_file({"a": torch.zeros(4, 2)}, path, metadata={"shapes": '{"a": [4, 16]}'})
    with pytest.raises(StateError, match="does not fit the shapes it names"):
        transformers.load_masks(tmp_path)


def test_damaged_masks_are_refused(tmp_path: Path) -> None:
    transformers.save(tiny.llama(), None, tmp_path / "whole", masks_of(tiny.llama()), {})
    for how, content in damages(tmp_path / "whole" / "masks.safetensors").items():
        shutil.copytree(tmp_path / "whole", tmp_path / how)
        damage(tmp_path / how / "masks.safetensors", how, content)
        with pytest.raises(StateError, match="masks"):
            transformers.load_masks(tmp_path / how)


def test_a_full_disk_leaves_the_old_folder_and_the_model(tmp_path: Path) -> None:
    model = tiny.llama()
    masks = masks_of(model)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with small_disk(tmp_path / "disk", (size // 4096 + 8) * 4096) as disk:
        transformers.save(model, None, disk / "model", {}, {"old.md": "old"})
        before = {path.name: path.read_bytes() for path in (disk / "model").iterdir()}
        with pytest.raises(SaveError, match="model could not be written .*No space left.* and is as it was."):
            transformers.save(model, None, disk / "model", masks, {}, overwrite=True)
        assert {path.name: path.read_bytes() for path in (disk / "model").iterdir()} == before
        assert [path.name for path in disk.iterdir()] == ["model"]
    transformers.save(model, None, tmp_path / "elsewhere", masks, {})  # nothing was lost
    assert all(torch.equal(mask, masks[name]) for name, mask in transformers.load_masks(tmp_path / "elsewhere").items())


def test_a_file_that_grows_too_large_is_never_seen(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="this system limits no file sizes")
    files_module.write(tmp_path / "a.json", "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(SaveError, match="a.json cannot be written .*What was there before is untouched."):
            files_module.write(tmp_path / "a.json", "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


HOLDS = """
import sys, time
from pathlib import Path
from secateur.files import appearing
with appearing(Path(sys.argv[1])) as partial:
    (partial / "half").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_nothing_for_long_and_a_living_one_is_left_alone(tmp_path: Path) -> None:
    model, folder = tiny.llama(), tmp_path / "model"
    for name in (".model.notes", ".models.0123abcd", ".model.0123abcg"):  # not ours
        (tmp_path / name).mkdir()
    theirs = {path.name for path in tmp_path.iterdir()}
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        with pytest.raises(SecateurError, match="Another process is writing .*model. Wait for it"):
            transformers.save(model, None, folder, {}, {})
        (partial,) = [path for path in tmp_path.iterdir() if (path / "half").exists()]
        process.kill()
    assert partial.exists()
    transformers.save(model, None, folder, {}, {})
    assert {path.name for path in tmp_path.iterdir()} == theirs | {"model"}


def test_what_was_moved_aside_is_put_back(tmp_path: Path) -> None:
    """Killed between the two renames of an overwrite: the old folder is there again, and is not overwritten unasked."""
    model, folder = tiny.llama(), tmp_path / "model"
    transformers.save(model, None, folder, {}, {"old.md": "old"})
    folder.rename(tmp_path / ".model.0123abcd.old")
    (tmp_path / ".model.0123abcd").mkdir()
    with files_module.claimed(folder):
        assert (folder / "old.md").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_stale_text_files_are_swept_and_fresh_ones_left(tmp_path: Path) -> None:
    stale, fresh = tmp_path / ".a.json.0123abcd.tmp", tmp_path / ".a.json.4567abcd.tmp"
    for path in (stale, fresh):
        path.write_text("half")
    os.utime(stale, (0, 0))
    files_module.write(tmp_path / "a.json", "new")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", fresh.name}


def test_a_link_keeps_its_place(tmp_path: Path) -> None:
    model = tiny.llama()
    transformers.save(model, None, tmp_path / "real", {}, {"old.md": "old"})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    transformers.save(model, None, tmp_path / "link", {}, {"new.md": "new"}, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "new.md").exists()
    assert not (tmp_path / "real" / "old.md").exists()


def test_the_folder_of_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(ModelError, match="holds something other than a model"):
        transformers.save(tiny.llama(), None, tmp_path / "run", {}, {}, overwrite=True)
