"""`secateur finetune` from beginning to end, on a model made here."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from secateur.cli import main
from secateur.errors import TextError
from secateur.integrations import finetune as work
from secateur.integrations import finetune_checkpoints as checkpoints
from secateur.integrations import folder as models
from secateur.integrations import transformers as hf
from secateur.integrations.finetune_data import read_texts
from tests import tiny
from tests.damage import refused, small_disk

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "box"]


def text(seed: int, words: int = 4000) -> str:
    draw = torch.Generator().manual_seed(seed)
    return " ".join(
        f"{WORDS[n]}{n * seed % 7}" for n in torch.randint(0, len(WORDS), (words,), generator=draw).tolist()
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tiny.llama(initializer_range=0.2).save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    for seed, name in enumerate(("one", "two")):
        Path(f"{name}.txt").write_text(text(seed), encoding="utf-8")
    return tmp_path


def run(*words: str, model: str = "model", steps: str | None = "12", out: str = "out") -> int:
    sizes = ["--context", "16", "--evaluation", "5", "--batch", "2", "--device", "cpu", "--out", out]
    sizes += [] if steps is None else ["--steps", steps]
    return main(["finetune", model, "--data", "one.txt", *sizes, *words])


def record_of(out: str = "out") -> Any:
    return json.loads((Path(out) / "report.json").read_text())


def zeros(out: str = "out") -> tuple[int, int]:
    """How many weights the masks say are gone, and how many of those are zero."""
    model, masks = hf.load(out)[0], hf.load_masks(out)
    gone = sum(int((~mask).sum()) for mask in masks.values())
    return gone, sum(int((model.get_parameter(name)[~mask] == 0).sum()) for name, mask in masks.items())


@pytest.mark.parametrize(
    "words",
    [
        ("--sparsity", "0.5"),
        ("--sparsity", "0.8", "--no-distill", "--score", "magnitude"),
        ("--how", "oneshot", "--sparsity", "0.5", "--calibration", "4"),
        ("--how", "oneshot", "--sparsity", "0.5", "--lora", "--accumulate", "2"),
        ("--eval-data", "two.txt", "--sparsity", "0.25", "--seed", "3"),
        ("--sparsity", "0.5", "--regrow", "gradient"),
    ],
    ids=" ".join,
)
def test_a_model_goes_in_and_a_sparse_one_comes_out(
    folder: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 0
    said, record = capsys.readouterr(), record_of()
    asked = float(words[words.index("--sparsity") + 1])
    gone, still = zeros()
    assert gone == still == record["pruned"] == round(asked * record["prunable"])
    last = said.out.splitlines()[-1]
    assert last == record["verdict"]
    before, after = (f"{record[name]:#.3g}".rstrip(".") for name in ("before", "after"))
    assert last.startswith(f"Perplexity: dense {before} -> {after} at {100 * asked:.3g} %")
    model, tokenizer = hf.load("out")
    source = "two.txt" if "--eval-data" in words else "one.txt"
    texts = read_texts(tokenizer, source, None, context=16, needed=1, calibration=1, evaluation=5)
    assert hf.perplexity(model, texts.evaluation, batch=2) == pytest.approx(record["after"], rel=1e-5)
    assert hf.perplexity(hf.load("model")[0], texts.evaluation) == pytest.approx(record["before"], rel=1e-5)
    steps = [entry["step"] for entry in record["history"] if "eval_loss" in entry]
    assert steps[-1] == 12
    page = Path("out", "report.html").read_text()
    assert page.count("<svg") == 3 - ("--lora" in words)  # adapters do not change the sparsity
    assert all(word in page for word in ("Text before and after", last.replace(">", "&gt;"), "secateur finetune"))
    assert last in Path("out", "report.md").read_text()
    card = Path("out", "README.md").read_text()
    assert f"{record['before']:.6g}" in card
    assert f"{record['after']:.6g}" in card
    assert "secateur finetune model" in card
    assert "held-out perplexity, fine-tuned" in said.out
    assert ("regrowth by gradient" in said.out) == ("--regrow" in words)
    assert sorted(path.name for path in folder.iterdir()) == ["model", "one.txt", "out", "two.txt"]


def test_training_helps(folder: Path) -> None:
    """Cross entropy on text of thirteen words, pruned to a quarter: better than the untrained dense model."""
    assert run("--no-distill", "--sparsity", "0.25", "--lr", "1e-2", steps="60") == 0
    record = record_of()
    assert record["after"] < 0.7 * record["before"]
    sparsity = [entry["sparsity"] for entry in record["history"] if "sparsity" in entry]
    assert sparsity == sorted(sparsity)
    assert sparsity[0] < sparsity[-1] == pytest.approx(0.25, abs=1e-3)


def test_text_that_is_held_out_never_trains(folder: Path) -> None:
    tokenizer = tiny.tokenizer()
    sizes: Any = {"context": 16, "needed": 40, "calibration": 3, "evaluation": 5}
    found = read_texts(tokenizer, "one.txt", None, **sizes)
    longer = read_texts(tokenizer, "one.txt", None, **{**sizes, "needed": 80})
    assert torch.equal(found.evaluation, longer.evaluation)  # whatever the length of the run
    assert torch.equal(found.calibration, found.train.rows[:3])  # type: ignore[attr-defined]
    whole = Path("one.txt").read_text()
    Path("again.txt").write_text(whole[:400] + tokenizer.decode(found.evaluation[1]) + whole[400:])
    again = read_texts(tokenizer, "again.txt", None, **sizes)
    assert "occur in both texts" in again.notes[0]
    rows = {tuple(item["input_ids"].tolist()) for item in again.train}  # type: ignore[attr-defined]
    assert not rows & set(map(tuple, again.evaluation.tolist()))
    Path("copy.txt").write_text(Path("one.txt").read_text())
    with pytest.raises(TextError, match="All 5 windows held out occur in the text to train on, so no text is left"):
        read_texts(tokenizer, "one.txt", "copy.txt", **sizes)
    with pytest.raises(TextError, match="--eval-data is the text of --data"):
        read_texts(tokenizer, "one.txt", "one.txt", **sizes)
    Path("short.txt").write_text("a few words only, and no more than that, so few")
    with pytest.raises(TextError, match="short.txt has 0 windows of 16 tokens to train on beside 5 held out, and 1"):
        read_texts(tokenizer, "short.txt", None, **sizes)
    with pytest.raises(TextError, match="short.txt has 2 windows of 16 tokens to evaluate on, and 5 are needed"):
        read_texts(tokenizer, "one.txt", "short.txt", **sizes)
    few = read_texts(tokenizer, "one.txt", None, **{**sizes, "needed": 10**6})
    assert "windows to train on, each seen" in few.notes[-1]


def test_a_dataset_is_streamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.disable_progress_bars()
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    Path("rows").mkdir()
    lines = [json.dumps({"text": text(seed, 60)}) for seed in range(40)]
    Path("rows", "train.jsonl").write_text("\n".join(lines))
    sizes: Any = {"context": 16, "needed": 30, "calibration": 3, "evaluation": 5}
    found = read_texts(tiny.tokenizer(), "dataset:rows", None, **sizes)
    first, second = (torch.stack([item["labels"] for item in found.train]) for _ in range(2))  # type: ignore[attr-defined]
    assert torch.equal(first, second)
    assert torch.equal(first[:3], found.calibration)
    held_out = set(map(tuple, found.evaluation.tolist()))
    assert held_out
    assert not held_out & set(map(tuple, first.tolist()))
    assert run("--data", "dataset:rows", "--tokens", "200", "--sparsity", "0.5", steps=None) == 0
    assert record_of()["plan"]["steps"] == 7  # of 2 windows of 16 tokens, rounded up


def test_zeros_are_held(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--how", "hold") == 2
    assert "model has no zeros to hold. Prune it first" in refused(capsys, 2)
    sizes = ["--context", "16", "--calibration", "4", "--evaluation", "4", "--device", "cpu"]
    assert main(["prune", "model", "--data", "one.txt", *sizes, "--recipe", "magnitude", "--out", "sparse"]) == 0
    for words in ([], ["--lora", "--teacher", "model"]):
        assert run("--how", "hold", *words, "--overwrite", model="sparse", steps="4") == 0
        before, after = hf.load_masks("sparse"), hf.load_masks("out")
        assert all(torch.equal(before[name], mask) for name, mask in after.items())
        assert before.keys() == after.keys()
        assert zeros()[0] == zeros()[1] > 0
        record = record_of()
        assert record["verdict"].startswith(f"Perplexity: before {record['before']:.3g} -> ")
        assert record["after"] != record["before"]
        assert record["plan"]["distill"] is bool(words)
        assert Path("out", "report.md").read_text()


def test_a_tensor_that_is_pruned_entirely_is_held_too(folder: Path) -> None:
    model = hf.load("model")[0]
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.layers[1].mlp.up_proj.weight[:12] = 0
    model.save_pretrained("sparse")
    tiny.tokenizer().save_pretrained("sparse")
    assert run("--how", "hold", model="sparse", steps="3") == 0
    held = {name: int((~mask).sum()) for name, mask in hf.load_masks("out").items() if not mask.all()}
    assert held == {"model.layers.0.mlp.down_proj.weight": 16 * 24, "model.layers.1.mlp.up_proj.weight": 12 * 16}
    assert zeros()[0] == zeros()[1]


@pytest.mark.parametrize("how", ["gradual", "oneshot"])
def test_pruning_goes_on_from_the_zeros_of_a_sparse_model(
    how: str, folder: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    sizes = ["--context", "16", "--calibration", "4", "--evaluation", "4", "--device", "cpu"]
    assert main(["prune", "model", "--data", "one.txt", *sizes, "--recipe", "magnitude", "--out", "sparse"]) == 0
    capsys.readouterr()
    assert run("--how", how, "--sparsity", "0.6", "--lr", "0.01", model="sparse") == 0
    before, after = hf.load_masks("sparse"), hf.load_masks("out")
    assert all(not (mask & ~before[name]).any() for name, mask in after.items())
    assert zeros()[0] == zeros()[1] == record_of()["pruned"] == round(0.6 * record_of()["prunable"])
    assert record_of()["verdict"].startswith(f"Perplexity: before {record_of()['before']:.3g} -> ")
    note = "sparse is 50% sparse already: its zeros stay, and pruning goes on from there. It is also the teacher;"
    said = capsys.readouterr()
    assert note in said.err
    assert note in said.out
    assert note in Path("out", "report.html").read_text()
    assert "held-out perplexity, before" in said.out
    assert not [one for one in recwarn if "grow back" in str(one.message)]
    assert "Progress" in Path("out", "report.html").read_text()
    refusals = {
        "--sparsity 0.4": "sparse is 50% sparse already, and --sparsity 0.4 asks for less. Ask for more, or keep its",
        "--regrow random": "sparse is 50% sparse already, and --regrow would give up all of its zeros at the first",
    }
    for words, message in refusals.items():
        assert message in refused(capsys, run(*words.split(), model="sparse", out="other"))


def test_a_packed_folder_is_fine_tuned_as_the_dense_one(folder: Path) -> None:
    sizes = ["--context", "16", "--calibration", "4", "--evaluation", "4", "--device", "cpu"]
    assert main(["prune", "model", "--data", "one.txt", *sizes, "--recipe", "magnitude", "--out", "sparse"]) == 0
    assert main(["export", "sparse", "--format", "packed", "--out", "packed"]) == 0
    for model in ("sparse", "packed"):
        assert run("--how", "hold", model=model, steps="3", out=f"from-{model}") == 0
    dense, packed = hf.load("from-sparse")[0].state_dict(), hf.load("from-packed")[0].state_dict()
    assert dense.keys() == packed.keys()
    assert all(torch.equal(dense[name], packed[name]) for name in dense)
    assert zeros("from-packed") == zeros("from-sparse")


class Killed(BaseException):
    """The process ends here."""


def killed_at(number: int, monkeypatch: pytest.MonkeyPatch, *words: str, **options: Any) -> None:
    """Run a command that ends at this step as a killed process does."""
    step = work._Steps.on_step_end

    def killed(self: Any, args: Any, state: Any, control: Any, **others: Any) -> None:
        step(self, args, state, control, **others)
        if state.global_step == number:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(work._Steps, "on_step_end", killed)
        with pytest.raises(Killed):
            run(*words, **options)


@pytest.mark.parametrize("how", ["gradual", "sparse", "regrow", "oneshot", "lora", "experts"])
def test_the_same_command_continues_a_killed_run(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once_pruned = ["--how", "oneshot"]
    words = {"oneshot": once_pruned, "lora": [*once_pruned, "--lora"], "regrow": ["--regrow", "gradient"]}.get(how, [])
    words = [*words, "--sparsity", "0.5", "--checkpoint-every", "3"]
    if how == "sparse":
        model = hf.load("model")[0]
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.up_proj.weight[:, ::2] = 0
                layer.self_attn.q_proj.weight.zero_()  # pruned as a whole
        model.save_pretrained("model")
    elif how == "experts":  # saved under other names, which the Trainer does not load
        save_model("Mixtral", "model", intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
    assert run(*words, out="whole") == 0
    killed_at(8, monkeypatch, *words)
    assert not Path("out").exists()
    left = Path("out.checkpoints")
    assert checkpoints.last_complete(left) == left / "checkpoint-6"
    shutil.copytree(left / "checkpoint-6", left / "checkpoint-7")  # killed while it was written
    (left / "checkpoint-7" / checkpoints.COMPLETE).unlink()
    (left / "checkpoint-7" / "trainer_state.json").unlink()
    capsys.readouterr()
    assert run(*words, "--lr", "0.5") == 2
    said = refused(capsys, 2)
    assert "out.checkpoints holds a run that began with other settings: lr " in said
    assert "(now 0.5)" in said
    monkeypatch.setattr(work._Job, "_judge", once(work._Job._judge))  # the figure before is not measured again
    assert run(*words) == 0
    assert not left.exists()
    whole, again = (hf.load(name)[0].state_dict() for name in ("whole", "out"))
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())
    assert "Continued from step 6." in record_of()["notes"]
    assert "Continued from step 6." in capsys.readouterr().out
    curves = [[(e["step"], e["loss"]) for e in record_of(out)["history"] if "loss" in e] for out in ("whole", "out")]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("left", [8, 48])  # KB: too few for the weights (safetensors), too few for the moments (torch)
def test_a_disk_that_fills_up_is_said(
    left: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work, "check_room", lambda *_: None)  # which would refuse so small a disk before
    step = work._Steps.on_step_end

    def filled(self: Any, args: Any, state: Any, control: Any, **others: Any) -> None:
        step(self, args, state, control, **others)
        if state.global_step == 4:
            Path("disk/filler").write_bytes(bytes(shutil.disk_usage("disk").free - (left << 10)))

    words = ["--sparsity", "0.5", "--checkpoint-every", "3"]
    with small_disk(folder / "disk", 4 << 20):
        with monkeypatch.context() as patch:
            patch.setattr(work._Steps, "on_step_end", filled)
            said = refused(capsys, run(*words, out="disk/out"))
        assert "disk/out.checkpoints could not be written: its disk is full (" in said
        assert said.endswith(" MB left). Free some space, and run the same command again: it continues from step 3.")
        Path("disk/filler").unlink()
        assert run(*words, out="disk/out") == 0
        assert "Continued from step 3." in record_of("disk/out")["notes"]


def edited(name: str, place: int) -> None:
    """Another text under the same name, from this place on."""
    path = Path(name)
    whole = path.read_text()
    path.write_text(whole[:place] + text(5)[: len(whole) - place])


def perturbed(name: str) -> None:
    model = hf.load(name)[0]
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 0.1
    model.save_pretrained(name)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("text held out", lambda: edited("one.txt", 0)),
        ("text to train on", lambda: edited("one.txt", 200)),
        ("model", lambda: perturbed("model")),
        ("teacher", lambda: perturbed("teacher")),
    ],
)
def test_a_run_is_not_continued_with_other_contents_under_the_same_names(
    what: str, change: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("model", "teacher")
    words = ["--sparsity", "0.5", "--checkpoint-every", "3", "--teacher", "teacher"]
    killed_at(5, monkeypatch, *words)
    shutil.copytree(folder, folder / "before", ignore=lambda *_: ["before"])
    capsys.readouterr()
    change()
    said = refused(capsys, run(*words))
    assert "out.checkpoints holds a run that began with other contents under the same names: the " in said
    assert f"the {what}" in said
    assert "remove that folder, or name another --out" in said
    for name in ("one.txt", "model", "teacher"):
        if Path(name).is_dir():
            shutil.rmtree(name)
            shutil.copytree(f"before/{name}", name)
        else:
            shutil.copy(f"before/{name}", name)
    assert run(*words) == 0
    assert "Continued from step 3." in record_of()["notes"]


def test_contents_may_change_before_the_first_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was trained yet that could be continued: the figure before is that of the new text."""
    words = ["--sparsity", "0.5", "--checkpoint-every", "3"]
    killed_at(2, monkeypatch, *words)
    edited("one.txt", 0)
    assert run(*words) == 0
    assert run(*words, out="anew") == 0
    assert record_of()["before"] == record_of("anew")["before"]


def test_a_run_begun_by_an_earlier_version_is_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It recorded names alone."""
    words = ["--sparsity", "0.5", "--checkpoint-every", "3"]
    killed_at(5, monkeypatch, *words)
    path = Path("out.checkpoints", "before.json")
    record = json.loads(path.read_text())
    del record["contents"]
    path.write_text(json.dumps(record))
    assert run(*words) == 0


def once(function: Any) -> Any:
    calls: list[int] = []

    def checked(*given: Any) -> Any:
        calls.append(1)
        assert len(calls) == 1
        return function(*given)

    return checked


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sparsity 80", "percent write 0.8"),
        ("--sparsity 1", "in [0, 1); got 1.0"),
        ("--tokens 100", "--steps and --tokens both say how long to train"),
        ("--score varance", "Did you mean 'variance'?"),
        ("--how hold --sparsity 0.5", "--how hold keeps the zeros that the model has: --sparsity would do nothing"),
        ("--how hold --distill", "--how hold has no dense model to distill from. Name one with --teacher"),
        ("--how sideways", "invalid choice: 'sideways'"),
        ("--lora", "--lora trains adapters on a pruned model. Use --how oneshot"),
        ("--calibration 3", "--calibration is for --how oneshot"),
        ("--how oneshot --regrow random", "--regrow is for --how gradual: with oneshot the zeros stay where they are"),
        ("--regrow sideways", "invalid choice: 'sideways'"),
        ("--teacher model --no-distill", "--teacher is for distillation, and --no-distill turns it off"),
        ("--alpha 0.5 --no-distill", "--alpha is for distillation, and --no-distill turns it off"),
        ("--alpha 0", "must be a number above 0 and up to 1, got '0'"),
        ("--alpha all", "must be a number above 0 and up to 1, got 'all'"),
        ("--how hold --alpha 0.5", "--how hold has no dense model to distill from"),
        ("--lr 0", "must be a positive number such as 1e-3, got '0'"),
        ("--lr fast", "must be a positive number such as 1e-3, got 'fast'"),
        ("--data missing.txt", "There is no file missing.txt"),
        ("--data model", "model is a folder. Give one text file"),
        ("--eval-data one.txt", "--eval-data is the text of --data"),
        ("--evaluation 100000", "windows of 16 tokens to train on beside 100000 held out"),
        ("--out model", "model is not empty"),
        ("--out model --overwrite", "would replace the model that is fine-tuned"),
        ("--out one.txt", "one.txt is a file"),
        ("--out one.txt/out", "Nothing can be written in"),
        ("--device nowhere", "--device nowhere: there is no such device here"),
        ("--tracker trackio", "--tracker trackio: it is not installed"),
        ("--steps none", "must be a whole number of at least 1, got 'none'"),
        ("--teacher ./gone", "There is no folder ./gone"),
        ("--context 1", "--context: must be at least 2"),
        ("--seed -1", "must be a whole number from 0 to 4294967295, got '-1'"),
        ("--seed 4294967296", "must be a whole number from 0 to 4294967295, got '4294967296'"),
        ("--seed one", "must be a whole number from 0 to 4294967295, got 'one'"),
    ],
)
def test_what_is_said(folder: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = run(*words.split())
    except SystemExit as left:
        code = int(left.code or 0)
    assert message in refused(capsys, code)
    names = {path.name for path in folder.iterdir()}
    assert names == {"model", "one.txt", "two.txt"}


def test_texts_and_names_are_checked_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*given: Any, **options: Any) -> Any:
        raise AssertionError("loaded all the same")

    def refuse(*given: Any, **options: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setattr(work, "load", never)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(models, "getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for words in (["--data", "nosuch.txt"], ["--eval-data", "nosuch.txt"]):
        assert "There is no file nosuch.txt" in refused(capsys, run(*words))
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    assert "has no text under 'body'; it has 'text'" in refused(capsys, run("--data", "rows.jsonl:body"))
    Path("rows.jsonl").unlink()
    said = refused(capsys, run("--data", "dataset:no/where"))
    assert (
        "dataset:no/where cannot be read: it is no folder and not in the cache of the hub, and huggingface.co" in said
    )
    assert "cannot be reached (Name or service not known)" in said
    assert "Did you mean 'smollm2'?" in refused(capsys, run(model="smollm"))
    for code in (run(model="nosuch"), run("--teacher", "nosuch")):
        assert code == 2
    assert capsys.readouterr().err.count("There is no folder nosuch, no model of that name in the cache") == 2
    assert sorted(path.name for path in folder.iterdir()) == ["model", "one.txt", "two.txt"]


def test_models_that_are_not_causal_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tiny.bert().save_pretrained("masked")
    tokenizer.save_pretrained("masked")
    for _ in range(2):
        assert "BertForMaskedLM is no causal language model" in refused(capsys, run(model="masked"))
        tiny.tokenizer().save_pretrained("masked")  # without a mask token, which it would not need either
    assert "There is no folder ./nowhere" in refused(capsys, run(model="./nowhere"))


def test_a_teacher_that_cannot_teach_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that sees the tokens to predict, that has other tokens, or whose positions end before the windows."""
    tiny.bert().save_pretrained("masked")
    tiny.gpt2(n_positions=8).save_pretrained("short")
    tiny.llama().save_pretrained("other")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = transformers.ViTConfig(**sizes, num_hidden_layers=1)
    transformers.ViTForImageClassification(config).save_pretrained("pictures")
    for name in ("masked", "short", "other", "pictures"):
        tiny.tokenizer().save_pretrained(name)
    words = json.loads(Path("other/tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    Path("other/tokenizer.json").write_text(json.dumps(words))
    for name, said in (
        ("masked", "The teacher is a BertForMaskedLM, which sees the tokens"),
        (
            "pictures",
            "ViTForImageClassification predicts no tokens to distill. Use a language model.",
        ),
        ("short", "GPT2LMHeadModel has 8 learned positions, and a context of 16"),
        ("other", "tokenizers of student and teacher differ in 2 tokens, such as 'a'"),
    ):
        assert said in refused(capsys, run("--teacher", name))


def save_model(kind: str, folder: str, **changes: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")
    model(model.config_class(vocab_size=97, hidden_size=16, num_hidden_layers=2, **changes)).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)


def test_adapters_leave_out_what_cannot_be_masked_and_say_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stacked experts: PEFT adapts them as well, by arithmetic that cannot be masked."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    save_model("Mixtral", "mixture", intermediate_size=24, num_local_experts=2, **heads)
    words = ["--how", "oneshot", "--sparsity", "0.5", "--lora", "--checkpoint-every", "3"]
    killed_at(8, monkeypatch, *words, model="mixture")
    pruned = hf.load("out.checkpoints/pruned")[0].state_dict()
    assert run(*words, model="mixture") == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("LoRA adapters")]
    assert note.startswith("LoRA adapters cannot be masked on 69% of the prunable weights, so those do not train: ")
    assert all(f"2 layers alike: model.layers.*.mlp.experts.{one}" in note for one in ("gate_up_proj", "down_proj"))
    assert note in record_of()["notes"]
    assert zeros()[0] == zeros()[1] > 0
    trained = hf.load("out")[0].state_dict()
    same = {name for name, weight in trained.items() if torch.equal(weight, pruned[name])}
    assert {name for name in trained if "experts" in name} <= same
    assert not {name for name in same if "self_attn" in name}


def test_a_model_whose_layers_cannot_be_adapted_is_refused_before_it_is_pruned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*given: Any, **options: Any) -> Any:
        raise AssertionError("pruned all the same")

    monkeypatch.setattr(work, "prune", never)
    save_model("Mamba", "mamba", state_size=4)
    said = refused(capsys, run("--how", "oneshot", "--lora", model="mamba"))
    assert "MambaForCausalLM cannot be trained with --lora: " in said
    assert said.endswith(" Leave out --lora.")
    assert not Path("out.checkpoints").exists()
