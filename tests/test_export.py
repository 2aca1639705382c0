"""`secateur export`: from form to form, with the sizes, and `secateur inspect` of what it writes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.cli import main
from secateur.cli.inspect import BUYS
from secateur.errors import ModelError
from secateur.inference import saving
from secateur.inference.packed import packed_layers
from tests import tiny
from tests.damage import refused
from tests.test_saving import logits, sparsify

pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense folder as `secateur prune` saves it, with a directory and reports in it."""
    torch.manual_seed(0)
    model = sparsify(tiny.llama(hidden_size=64, intermediate_size=128).to(torch.bfloat16))
    masks = {name: parameter != 0 for name, parameter in model.named_parameters() if parameter.ndim == 2}
    folder = tmp_path_factory.mktemp("models") / "dense"
    sc.save(model, folder, tokenizer=tiny.tokenizer(), packed=False, masks=masks)
    (folder / "extra").mkdir()
    (folder / "extra" / "notes.txt").write_text("mine")
    return folder


def export(*words: Any) -> int:
    return main(["export", *map(str, words)])


def test_there_and_back(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(dense, "--out", tmp_path / "packed") == 0
    said = capsys.readouterr().out
    assert "15 packed weights: " in said
    assert "packed (26." in said  # percent of dense bf16 at 80 %
    assert said.endswith(f"Saved in {tmp_path / 'packed'}\n")
    names = {path.name for path in dense.iterdir()}
    assert {path.name for path in (tmp_path / "packed").iterdir()} == names
    assert (tmp_path / "packed" / "extra" / "notes.txt").read_text() == "mine"
    assert "import secateur" in (tmp_path / "packed" / "README.md").read_text()
    packed = sc.load(tmp_path / "packed")
    assert len(packed_layers(packed)) == 15
    assert torch.equal(logits(packed), logits(sc.load(dense)))
    assert export(tmp_path / "packed", "--format", "dense", "--out", tmp_path / "back") == 0
    before, after = sc.load(dense).state_dict(), sc.load(tmp_path / "back").state_dict()
    assert all(torch.equal(after[name], one) for name, one in before.items())
    assert (tmp_path / "back" / "README.md").read_text() == (dense / "README.md").read_text().replace(
        '"dense"', '"back"'
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((dense / "config.json").read_text())


def test_inspecting_what_was_exported(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zstandard")
    assert main(["inspect", str(dense)]) == 0
    expected = capsys.readouterr().out.partition(BUYS)[0]
    for options in ((), ("--compress", "zstd")):
        assert export(dense, *options, "--overwrite", "--out", tmp_path / "a") == 0
        capsys.readouterr()
        assert main(["inspect", str(tmp_path / "a")]) == 0
        assert capsys.readouterr().out.partition(BUYS)[0] == expected


def test_a_folder_of_source_code_is_not_overwritten(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("package.json", "models.py"):
        (tmp_path / name).write_text("{}")
    for kind in ("packed", "24"):
        assert export(dense, "--format", kind, "--overwrite", "--out", tmp_path) == 2
        assert "holds something other than a model and is not overwritten" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models.py", "package.json"]


def test_int8_and_compression(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zstandard")
    assert export(dense, "--values", "int8", "--out", tmp_path / "a") == 0
    assert export(dense, "--compress", "zstd", "--values", "int8", "--out", tmp_path / "b") == 0
    assert "Compressed for transport: " in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "b").glob("model*")} == {"model.safetensors.zst"}
    assert export(tmp_path / "b", "--out", tmp_path / "c") == 0  # decompressed
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()
    assert torch.equal(logits(sc.load(tmp_path / "b")), logits(sc.load(tmp_path / "a")))


def test_a_model_without_zeros_stays_dense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.llama().save_pretrained(tmp_path / "a")
    assert export(tmp_path / "a", "--out", tmp_path / "b") == 0
    assert "No linear layer has enough zeros to be smaller packed: the weights are dense." in capsys.readouterr().out
    assert not packed_layers(sc.load(tmp_path / "b"))


def test_other_modules_are_exported_too(tmp_path: Path) -> None:
    model = sparsify(nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(8, 8)))
    sc.save(model, tmp_path / "a", packed=False)
    assert export(tmp_path / "a", "--out", tmp_path / "b") == 0
    assert (tmp_path / "b" / "model.safetensors").stat().st_size != (
        tmp_path / "a" / "model.safetensors"
    ).stat().st_size
    fresh = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(8, 8))
    sc.load(tmp_path / "b", into=fresh)
    assert torch.equal(fresh[0].weight, model[0].weight)


def test_shards_are_read_and_written(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sc.load(dense).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    assert export(tmp_path / "shards", "--out", tmp_path / "one") == 0
    assert torch.equal(logits(sc.load(tmp_path / "one")), logits(sc.load(dense)))
    write = saving.forms.write_weights
    monkeypatch.setattr(saving.forms, "write_weights", lambda *given: write(*given, shard=20_000))
    assert export(dense, "--out", tmp_path / "many") == 0
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(sc.load(tmp_path / "many")), logits(sc.load(dense)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--format", "dense", "--values", "int8"), "--values int8 needs --format packed"),
        (("--out", "HERE"), "would replace the model that is exported"),
    ],
)
def test_mistakes_are_answered_with_a_line(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    given = [str(dense) if word == "HERE" else word for word in words]
    before = (dense / "model.safetensors").read_bytes()
    assert message in refused(capsys, export(dense, "--out", tmp_path / "a", *given))
    assert (dense / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.iterdir())


def test_damaged_folders_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sc.save(sparsify(tiny.llama()), tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "is damaged" in refused(capsys, export(tmp_path / "a", "--format", "dense", "--out", tmp_path / "b"))
    assert "is damaged" in refused(capsys, main(["inspect", str(tmp_path / "a")]))
    (tmp_path / "a" / "config.json").write_text("{}")
    assert "cannot be loaded" in refused(capsys, export(tmp_path / "a", "--out", tmp_path / "b"))
    (tmp_path / "empty").mkdir()
    assert "holds no .safetensors" in refused(capsys, export(tmp_path / "empty", "--out", tmp_path / "b"))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("form", ["packed", "dense"])
def test_quantized_models_and_adapters_are_refused(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    shutil.copytree(dense, tmp_path / "awq")
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "awq" / "config.json").write_text(json.dumps(quantized))
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    shutil.copy(dense / "model.safetensors", tmp_path / "lora" / "adapter_model.safetensors")
    for name, message in (("awq", r"awq is quantized \(awq\)"), ("lora", "holds an adapter of PEFT")):
        said = refused(capsys, export(tmp_path / name, "--format", form, "--out", tmp_path / "a"))
        assert re.search(message, said)
    assert not (tmp_path / "a").exists()


def test_quantized_models_are_not_saved_packed(tmp_path: Path) -> None:
    model = sparsify(tiny.llama())
    model.config.quantization_config = {"quant_method": "awq", "bits": 4}
    with pytest.raises(ModelError, match=r"LlamaForCausalLM is quantized \(awq\)"):
        sc.save(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_what_a_folder_lacks_is_said_by_its_own_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pickles alone, and a config that is no JSON: neither is named by the temporary folder that it was copied to."""
    folder = tmp_path / "a"
    tiny.llama().save_pretrained(folder)
    (folder / "config.json").write_text("{")
    for kind in ("packed", "dense"):
        said = refused(capsys, main(["export", str(folder), "--format", kind, "--out", str(tmp_path / "b")]))
        assert f"{folder / 'config.json'} cannot be read as JSON" in said
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (folder / "config.json").unlink()
    for verb in (["inspect"], ["export", "--out", str(tmp_path / "b")]):
        said = refused(capsys, main([verb[0], str(folder), *verb[1:]]))
        assert said.endswith("are pickles, which are not read: load it with transformers, then call save_pretrained.")
    assert not (tmp_path / "b").exists()
