"""`secateur prune` and `secateur probe` from beginning to end, on a model made here."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import secateur as sc
from secateur.cli import main
from secateur.cli.prune import NAMED, Recipe, read_recipe

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from secateur.integrations import evaluation
from secateur.integrations import folder as models
from secateur.integrations import text as texts
from secateur.integrations import transformers as hf
from tests import tiny
from tests.damage import damage, damages, hostile_pickle, refused, small_disk


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


def run(folder: Path, *words: str, model: str = "model") -> int:
    sizes = ["--context", "16", "--calibration", "6", "--evaluation", "5", "--device", "cpu"]
    return main([words[0], str(folder / model), "--data", str(folder / "one.txt"), *sizes, *words[1:]])


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
        ("probe", "--order", "reverse", "--group", "block", "--refresh"),
        ("probe", "--scope", "layer", "--tolerances", "0", "1"),
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
    card = (out / "README.md").read_text()
    assert f"| {record['found'][0][0]} |" in card
    assert f"```bash\nsecateur {words[0]} " in card
    page = (out / "report.html").read_text()
    assert page.count(' title="') == len(record["tensors"])  # a cell of the heat map for each
    assert f"<h1>{html.escape(said.out.splitlines()[-1])}</h1>" in page  # the verdict
    model, tokenizer = hf.load(out)
    masks = hf.load_masks(out)
    zeros = sum(int((model.get_parameter(name) == 0).sum()) for name in masks)
    assert zeros == record["pruned"] == sum(int((~mask).sum()) for mask in masks.values())
    windows = texts.windows(tokenizer, (folder / "one.txt").read_text(), 16, 11)
    assert hf.perplexity(model, windows[6:]) == pytest.approx(record["found"][1][1], rel=1e-5)


def levels_of(out: Path) -> list[str]:
    """The levels that a report lists, without the text they were measured on."""
    found = json.loads((out / "report.json").read_text())["found"]
    mark = "perplexity on the text that decides, "
    return [name.removeprefix(mark) for name, value in found if name.startswith(mark) and value > 0]


@pytest.mark.parametrize(
    "words",
    [
        ("--order", "reverse", "--group", "block", "--tolerance", "1", "--tune", "both"),
        ("--tolerance", "1", "--refresh", "--stream"),
    ],
)
def test_levels_rise_until_held_out_text_is_worse(
    folder: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out"
    levels = ("--until", "--start", "0.2", "--step", "0.3", "--end", "0.8", "--max-drop", "100%")
    assert run(folder, "probe", *levels, *words, "--out", str(out)) == 0
    said = capsys.readouterr().out
    tried = levels_of(out)
    assert [name.split(",")[0] for name in tried] == ["dense", "level 0.2", "level 0.5", "level 0.8", tried[-1]]
    assert tried[-1].startswith("wanda alone at sparsity")
    assert all(name in said for name in tried)
    assert said.splitlines()[-1].startswith("Perplexity: dense")
    found = dict(json.loads((out / "report.json").read_text())["found"])
    model, tokenizer = hf.load(out)
    windows = texts.windows(tokenizer, (folder / "one.txt").read_text(), 16, 16)
    last = next(value for name, value in found.items() if "level 0.8" in name)
    assert hf.perplexity(model, windows[6:11]) == pytest.approx(last, rel=1e-5)  # decides
    after = next(value for name, value in found.items() if name.startswith("perplexity after"))
    assert hf.perplexity(model, windows[11:]) == pytest.approx(after, rel=1e-5)  # is not the text that decides


def test_a_first_level_that_fails_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out"
    other = ("--eval-data", str(folder / "two.txt"))
    words = ("--until", "--start", "0.9", "--tolerance", "1e9", "--max-drop", "0", "--tune", "off")
    assert run(folder, "probe", *words, *other, "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "No level stayed within --max-drop 0: the model is dense" in said
    assert said.splitlines()[-1].endswith("at 0 %: +0.0 %")
    assert [name.split(",")[0] for name in levels_of(out)] == [
        "dense", "level 0.9", "back to sparsity 0.0000", "wanda alone at sparsity 0.0000",
    ]  # fmt: skip


@pytest.mark.parametrize("verb", ["prune", "probe"])
def test_packed_models_are_unpacked(folder: Path, verb: str) -> None:
    assert run(folder, "prune", "--recipe", "wanda", "--out", str(folder / "half")) == 0
    assert main(["export", str(folder / "half"), "--out", str(folder / "packed")]) == 0
    for model in ("half", "packed"):
        words = ("--sparsity", "0.7", "--score", "variance") if verb == "probe" else ("--sparsity", "0.7")
        assert run(folder, verb, *words, "--out", str(folder / f"{model}-70"), model=model) == 0
    ours, theirs = (hf.load(folder / f"{model}-70")[0].state_dict() for model in ("packed", "half"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_sparse_model_is_not_called_dense(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "prune", "--recipe", "wanda", "--out", str(folder / "half")) == 0
    assert "perplexity: dense " in capsys.readouterr().out.lower()
    assert run(folder, "prune", "--sparsity", "0.3", "--out", str(folder / "again"), model="half") == 0
    said = "".join(capsys.readouterr())
    assert "perplexity: before " in said.lower()
    assert "50 % of the weights were zero already, more than the 30 % asked for" in said


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
        (("--eval", "lm-eval:"), "Write lm-eval:TASK"),
        (("--pattern", "2:4", "--sparsity", "0.6"), "--pattern 2:4 means a sparsity of 0.5. Leave out --sparsity."),
        (("--out", "."), "is not empty"),
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


def encoder_decoder(kind: str) -> Any:
    sizes: dict[str, Any] = {"d_model": 16, "vocab_size": tiny.VOCABULARY + 1, "decoder_start_token_id": 0}
    if kind == "T5":
        sizes |= {"d_ff": 24, "num_layers": 2, "num_heads": 2, "d_kv": 8}
    else:
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
        sizes |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, **heads}
    return getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**sizes))


def saved(folder: Path, model: Any, tokenizer: Any = None) -> None:
    model.save_pretrained(folder / "model")
    tokenizer = tokenizer or tiny.tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(folder / "model")


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (lambda: encoder_decoder("T5"), "second half of each window from the first"),
        (lambda: encoder_decoder("Bart"), "second half of each window from the first"),
        (lambda: tiny.bert(num_hidden_layers=2), "15% of tokens masked"),
    ],
    ids=["T5", "Bart", "Bert"],
)
@pytest.mark.parametrize(
    "words", [("prune",), ("probe", "--tolerance", "1"), ("prune", "--stream", "--recipe", "wanda")]
)
def test_models_that_are_judged_by_their_own_loss(
    folder: Path, make: Any, how: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder / "model")
    saved(folder, make())
    out = folder / "out"
    assert run(folder, *words, "--out", str(out)) == 0
    assert f"loss after, context 16, held-out text, {how}" in capsys.readouterr().out
    record = json.loads((out / "report.json").read_text())
    (before, first), (_, after) = record["found"][:2]
    assert before == f"loss before, context 16, held-out text, {how}"
    model, tokenizer = hf.load(out)
    masks = hf.load_masks(out)
    assert sum(int((model.get_parameter(name) == 0).sum()) for name in masks) == record["pruned"] > 0
    windows = texts.windows(tokenizer, (folder / "one.txt").read_text(), 16, 11)
    task = evaluation.task_for(model, tokenizer)
    assert task.judge(model, windows[6:], batch=2) == pytest.approx(after, rel=1e-5)
    dense, _ = hf.load(folder / "model")
    assert task.judge(dense, windows[6:]) == pytest.approx(first, rel=1e-5)
    assert after != first


def test_what_a_masked_model_is_asked() -> None:
    """Every window has as many masked tokens, always the same, and only those have labels."""
    tokenizer, model = tiny.tokenizer(), tiny.bert().eval()
    with pytest.raises(sc.SecateurError, match="its tokenizer has no mask token"):
        evaluation.task_for(model, tokenizer)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    windows = torch.randint(1, 90, (4, 20), generator=torch.Generator().manual_seed(0))
    task = evaluation.task_for(model, tokenizer)
    batches = task.batches(windows, 3)
    ids, labels = (torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels"))
    hidden = ids == tokenizer.mask_token_id
    assert hidden.sum(1).tolist() == [3] * 4
    assert torch.equal(torch.where(hidden, labels, ids), windows)
    assert bool((labels[~hidden] == -100).all())
    assert all(
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, task.batches(windows, 3), strict=True)
    )
    expected = torch.nn.functional.cross_entropy(model(ids).logits[hidden], windows[hidden]).item()
    assert task.judge(model, windows, batch=3) == pytest.approx(expected, rel=1e-5)


def test_an_encoder_decoder_writes_the_second_half() -> None:
    model = encoder_decoder("T5").eval()
    windows = torch.randint(1, 90, (3, 9), generator=torch.Generator().manual_seed(0))
    task = evaluation.task_for(model, tiny.tokenizer())
    expected = model(input_ids=windows[:, :5], labels=windows[:, 5:].contiguous()).loss.item()
    assert task.judge(model, windows, batch=2) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(sc.SecateurError, match="perplexity needs a causal model"):
        hf.perplexity(encoder_decoder("Bart"), windows)


def vision() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (vision, "ViTForImageClassification needs labelled examples"),
        (lambda: tiny.bert("BertForSequenceClassification"), "[{'input_ids': ..., 'labels': ...}, ...]"),
        (lambda: tiny.bert("BertForTokenClassification"), "needs labelled examples"),
        (lambda: tiny.bert("BertModel"), "needs labelled examples"),
        (lambda: tiny.llama(vocab_size=40), "the embedding of LlamaForCausalLM has 40 rows"),
        (lambda: tiny.bert(vocab_size=40), "the embedding of BertForMaskedLM has 40 rows"),
    ],
)
def test_models_that_text_cannot_judge_are_refused_in_one_line(
    folder: Path, make: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder / "model")
    model = make()
    if model.main_input_name == "pixel_values":
        model.save_pretrained(folder / "model")
    else:
        saved(folder, model)
    assert run(folder, "prune") == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("secateur: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (folder / "pruned-model").exists()


def test_whatever_goes_wrong_in_a_model_is_said_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("bbox is missing\n\nand needed")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", broken)
    assert run(folder, "prune") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("secateur: LlamaForCausalLM cannot read windows of text: ")
    assert "bbox is missing" in last


def never_loaded(*_: Any, **__: Any) -> Any:
    raise AssertionError("the model was loaded for a folder that cannot be written")


@pytest.mark.parametrize("verb", ["prune", "probe"])
def test_a_folder_that_cannot_be_is_refused_before_the_work(
    verb: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", never_loaded)
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("years of work")
    for out, more, said in (
        ("one.txt/out", [], "Nothing can be written in"),
        ("one.txt", ["--overwrite"], "is a file; a model is saved as a folder"),
        ("mine", ["--overwrite"], "holds something other than a model and is not overwritten"),
        ("/proc/1/out", [], "Nothing can be written in /proc/1"),
    ):
        assert said in refused(capsys, run(folder, verb, "--out", out, *more))
    assert (folder / "mine" / "thesis.txt").read_text() == "years of work"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_too_little_room_is_said_before_the_work(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1_000_000))
    monkeypatch.setattr("secateur.cli.prune._texts", never_loaded)
    said = refused(capsys, run(folder, "prune", "--out", "new/out"))
    assert "out needs about 17 MB, and the disk has 1 MB left." in said
    assert not (folder / "new").exists()


def test_a_second_job_for_a_folder_is_refused_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holds = "import sys, time; from pathlib import Path; from secateur.files import claimed\n"
    holds += "with claimed(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holds, str(folder / "out")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with monkeypatch.context() as patched:
            patched.setattr(models, "load", never_loaded)
            said = refused(capsys, run(folder, "prune", "--out", str(folder / "out")))
        assert "Another process is writing" in said
        for verb in (["data", str(folder / "one.txt"), "--out"], ["demo", "--out"]):
            assert "Another process is writing" in refused(capsys, main([*verb, str(folder / "out")]))
        process.kill()
    assert run(folder, "prune", "--recipe", "wanda", "--out", str(folder / "out")) == 0


def test_a_full_disk_costs_a_folder_and_not_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = folder / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr("secateur.cli.prune.check_room", lambda *_: None)  # which would refuse so small a disk before
    with small_disk(folder / "disk", 16 << 10) as disk:
        assert run(folder, "prune", "--recipe", "wanda", "--out", str(disk / "out")) == 2
        shown = capsys.readouterr()
        assert "perplexity after" in shown.out
        said = shown.err.splitlines()[-1]
        assert said.startswith(f"secateur: {disk}/out could not be written (")
        assert "No space left" in said
        (saved,) = temporary.glob("secateur-*/out")
        assert said.endswith(f"and was not made. The pruned model is in {saved} instead: move it from there.")
        model, _ = hf.load(saved)
        assert sum(int((~mask).sum()) for mask in hf.load_masks(saved).values()) > 0
        assert bool((model.get_parameter(next(iter(hf.load_masks(saved)))) == 0).any())
        assert list(disk.iterdir()) == []
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        assert run(folder, "prune", "--recipe", "wanda", "--out", str(disk / "out")) == 2
        shown = capsys.readouterr()
        assert "perplexity after" in shown.out  # the figures are not lost
        assert "Nothing is saved: " in shown.err.splitlines()[-1]
        assert list(disk.iterdir()) == []


def test_a_damaged_model_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is done to its files: one line, or, where a file says nothing that counts, a model that can be read."""
    shutil.copytree(folder / "model", folder / "whole")
    counted = 0
    for path in sorted((folder / "whole").iterdir()):
        for how, content in damages(path).items():
            shutil.rmtree(folder / "model")
            shutil.copytree(folder / "whole", folder / "model")
            damage(folder / "model" / path.name, how, content)
            code = run(folder, "prune", "--recipe", "wanda", "--out", "out", "--overwrite")
            counted += code == 2
            if code == 2 or path.name in ("config.json", "model.safetensors"):
                refused(capsys, code)
            else:
                capsys.readouterr()
                hf.load_masks(folder / "out")
    assert counted > 30


def test_a_models_pickle_is_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model" / "model.safetensors").unlink()
    (folder / "model" / "pytorch_model.bin").write_bytes(hostile_pickle(folder / "harm"))
    assert "cannot be loaded" in refused(capsys, run(folder, "prune", "--out", "out"))
    assert not (folder / "harm").exists()


def test_a_model_is_not_overwritten_by_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "model" / "model.safetensors").read_bytes()
    assert run(folder, "prune", "--overwrite", "--out", str(folder / "model")) == 2
    assert "would replace the model that is pruned" in capsys.readouterr().err
    assert run(folder, "prune", "--overwrite", "--out", str(folder)) == 2
    assert "holds something other than a model" in capsys.readouterr().err
    assert (folder / "model" / "model.safetensors").read_bytes() == before


def test_a_job_ends_with_a_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "prune", "--recipe", "wanda", "--sparsity", "0.25", "--out", "out") == 0
    shown = capsys.readouterr()
    record = json.loads((folder / "out" / "report.json").read_text())
    (_, before), (_, after) = record["found"][:2]
    last = shown.out.splitlines()[-1]
    change = 100 * (after / before - 1)
    assert last == f"Perplexity: dense {before:.3g} -> {after:.3g} at 25 %: {change:+.1f} %"
    assert last in (folder / "out" / "report.md").read_text()
    assert "collapsed" not in shown.err


@pytest.mark.parametrize("drop", ["100%", "100"])
def test_a_figure_that_is_known_is_not_measured_again(drop: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter((75.0, 100.0, 101.0, 102.0, 76.0))  # before; dense, the level, the score alone; after
    monkeypatch.setattr(evaluation, "perplexity", lambda *_, **__: next(figures))
    levels = ("--until", "--start", "0.1", "--end", "0.1", "--max-drop", drop)
    assert run(folder, "probe", *levels, "--out", "out") == 0
    assert not list(figures)
    found = dict(json.loads((folder / "out" / "report.json").read_text())["found"])
    assert list(found.values()) == [75.0, 76.0, 100.0, 101.0, 102.0]


@pytest.mark.parametrize("verb", ["prune", "probe", "probe --until --start 0.1 --end 0.1"])
def test_a_collapse_is_not_passed_over(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = (100.0,) if verb == "probe" else ()  # the score; before and after are known
    tried = (100.0,) * 3 if "--until" in verb else ()  # on the text that decides: dense, the level, the score alone
    figures = iter((75.8, *tried, 921.0, *alone))
    monkeypatch.setattr(evaluation, "perplexity", lambda *_, **__: next(figures))
    assert run(folder, *verb.split(), "--out", "out") == 0
    shown = capsys.readouterr()
    assert ("(--max-drop)" if "--until" in verb else "(--sparsity)") in shown.err  # an option that the verb takes
    assert re.fullmatch(r"Perplexity: dense 75.8 -> 921 at [\d.]+ %: \+1,115 %", shown.out.splitlines()[-1])
    said = "Quality collapsed: worse than guessing uniformly among 97 tokens."
    assert f"secateur: warning: {said}" in shown.err
    for report in ("report.md", "report.json", "report.html"):
        assert said in (folder / "out" / report).read_text(), report
    assert not list(figures)
