"""`secateur prune` and `secateur probe` from beginning to end, on a model made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from secateur.cli import main
from secateur.recipe import NAMED, Recipe, read_recipe

pytest.importorskip("transformers", reason="transformers is not installed")

from secateur import hf
from tests import tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "box"]
    draw = torch.Generator().manual_seed(0)
    for name in ("one", "two"):
        text = " ".join(words[n] for n in torch.randint(0, len(words), (4000,), generator=draw).tolist())
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, *words: str) -> int:
    sizes = ["--context", "16", "--calibration", "6", "--evaluation", "5", "--device", "cpu"]
    return main([words[0], str(folder / "model"), "--data", str(folder / "one.txt"), *sizes, *words[1:]])


@pytest.mark.parametrize(
    "words",
    [
        ("prune", "--sparsity", "0.5"),
        ("prune", "--recipe", "wanda", "--sparsity", "0.3"),
        ("prune", "--stream"),
        ("probe", "--stream", "--tolerance", "0.5"),
        ("prune", "--recipe", "sparsegpt", "--pattern", "2:4"),
        ("probe", "--tolerance", "0.5"),
        ("probe", "--exact", "--sparsity", "0.25", "--score", "variance"),
        ("probe", "--order", "reverse", "--group", "block"),
    ],
)
def test_a_model_goes_in_and_a_folder_comes_out(
    folder: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out"
    assert run(folder, *words, "--out", str(out)) == 0
    said = capsys.readouterr()
    assert "perplexity after, context 16, held-out text" in said.out
    assert "perplexity before" in said.err
    record = json.loads((out / "report.json").read_text())
    assert record["found"][0][0].startswith("perplexity before")
    assert (out / "report.md").read_text().startswith("# ")
    page = (out / "report.html").read_text()
    assert page.count("<rect") == 2 * len(record["tensors"])
    model, tokenizer = hf.load(out)
    masks = hf.load_masks(out)
    zeros = sum(int((model.get_parameter(name) == 0).sum()) for name in masks)
    assert zeros == record["pruned"] == sum(int((~mask).sum()) for mask in masks.values())
    windows = hf.windows(tokenizer, (folder / "one.txt").read_text(), 16, 11)
    assert hf.perplexity(model, windows[6:]) == pytest.approx(record["found"][1][1], rel=1e-5)


def test_two_texts_must_share_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(folder / "out")
    assert run(folder, "prune", "--eval-data", str(folder / "two.txt"), "--out", out) == 0
    (folder / "copy.txt").write_text((folder / "one.txt").read_text())
    assert run(folder, "prune", "--eval-data", str(folder / "copy.txt"), "--out", out, "--overwrite") == 2
    assert "in the other text too" in capsys.readouterr().err
    assert run(folder, "prune", "--eval-data", str(folder / "one.txt"), "--out", out, "--overwrite") == 2
    assert "Leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sparsity", "50"), "percent write 0.5"),
        (("--recipe", "wandda"), "Did you mean 'wanda'?"),
        (("--recipe", "nowhere.toml"), "Cannot read nowhere.toml: No such file"),
        (("--eval", "mmlu"), "Write lm-eval:TASK"),
        (("--out", "."), "is there already"),
        (("--context", "4000"), "are needed. Give a longer text"),
    ],
)
def test_what_is_said(
    folder: Path,
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert run(folder, "prune", *words) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "pruned-model").exists()


def test_recipes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('score = "fisher"\nrounds = 3\nskip = ["*.0.*"]\nreconstruct = "every"\n')
    assert read_recipe(str(path)) == Recipe(score="fisher", rounds=3, skip=("*.0.*",), reconstruct="every")
    assert read_recipe("rounds") is NAMED["rounds"]
    with pytest.raises(ValueError, match="No recipe 'round'. Did you mean 'rounds'"):
        read_recipe("round")
