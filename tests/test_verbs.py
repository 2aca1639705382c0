"""The manners of the command line: help, version, errors in one line, Ctrl-C, and the verbs `scores` and `inspect`."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import secateur as sc
from secateur.cli import VERBS, build_parser, main, scores
from secateur.cli.options import pick_device, training_on_cpu
from secateur.cli.prune import Verdict
from secateur.errors import SecateurError
from secateur.files import write
from secateur.kernels import reason_against
from secateur.model.inspect import Inspected, inspect_tensor, inspect_tensors, patterns
from secateur.report import collapse
from tests.damage import refused

ROOT = Path(__file__).parent.parent
LIBRARIES = "torch", "numpy", "transformers", "matplotlib", "accelerate"


def shell(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """A command as a user gives it, in a process of its own, outside the clone."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings.pop("env", {})}
    command = [sys.executable, "-m", "secateur", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, **settings)


# Help


def test_alone_it_prints_help() -> None:
    alone, asked = shell(), shell("--help")
    assert alone.returncode == asked.returncode == 0
    assert alone.stdout == asked.stdout
    assert all(f"\n    {verb} " in alone.stdout for verb in VERBS)
    assert shell("--version").stdout == f"secateur {sc.__version__}\n"


@pytest.mark.parametrize("words", [(), ("--help",), ("--version",), ("prune", "--help"), ("bench", "step", "--help")])
def test_help_imports_no_heavy_library(words: tuple[str, ...]) -> None:
    code = f"import sys; from secateur.cli import main\ntry: main({list(words)!r})\nexcept SystemExit: pass\n"
    code += f"assert not set({LIBRARIES!r}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_help_takes_less_than_half_a_second() -> None:
    def seconds() -> float:
        began = time.perf_counter()
        assert shell("--help").returncode == 0
        return time.perf_counter() - began

    assert any(seconds() < 0.5 for _ in range(5))  # the best of five; the first is mostly enough


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_description_and_an_example_that_parses(verb: str) -> None:
    done = shell(verb, "--help")
    assert done.returncode == 0
    assert " ".join((VERBS[verb].__doc__ or "").split()) in " ".join(done.stdout.split())
    for command in VERBS[verb].EXAMPLE.split("&&"):
        program, *words = shlex.split(command)
        assert program == "secateur"
        build_parser().parse_args(words)
        assert all((ROOT / word).is_file() for word in words if word.startswith("recipes/"))
    assert VERBS[verb].EXAMPLE in done.stdout


def test_the_same_option_means_the_same_in_every_verb() -> None:
    """One type and one destination for each of these, wherever it is taken."""
    parser = build_parser()
    subparsers = next(action for action in parser._actions if action.dest == "verb").choices
    assert subparsers is not None
    found: dict[str, set[tuple[Any, ...]]] = {}
    taken: dict[str, set[str]] = {}
    for verb, one in dict(subparsers).items():  # type: ignore[call-overload]
        for action in one._actions:
            for name in action.option_strings:
                found.setdefault(name, set()).add((action.dest, action.type, type(action)))
                taken.setdefault(name, set()).add(verb)
    for name in ("--device", "--sparsity", "--seed", "--out", "--overwrite", "--steps"):
        assert len(found[name]) == 1 or name == "--steps", (name, found[name])
    assert taken["--device"] == {
        "prune",
        "probe",
        "finetune",
        "train",
        "sweep",
        "inspect",
    }  # bench: in each benchmark's own parser
    assert taken["--sparsity"] == {"prune", "probe", "finetune", "train"}
    assert taken["--out"] == set(VERBS) - {"scores", "bench"}


# Errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("prun", "there is no verb 'prun'. Did you mean 'prune'?"),
        ("data one.txt --out a\0b", "an argument holds a null character"),
        ("--nothing", "unrecognized arguments: --nothing"),
        (
            "prune m --sparcity 0.5",
            "unrecognized arguments: --sparcity 0.5. Did you mean '--sparsity'? See secateur prune --help.",
        ),
        ("inspect m --form=packed", "unrecognized arguments: --form=packed. See secateur inspect --help."),
        ("prune m --data missing.txt", "There is no file missing.txt."),
        ("probe m --eval-data missing.jsonl:body", "There is no file missing.jsonl."),
        ("prune", "the following arguments are required: model"),
        ("prune m --sparsity half", "--sparsity: must be a fraction such as 0.5, got 'half'"),
        ("prune m --sparsity 50", "percent write 0.5"),
        ("prune m --sparsity inf", "in [0, 1); got inf."),
        ("prune m --context 1", "--context: must be at least 2"),
        ("prune m --out /", "/ cannot be replaced. Name a file or folder inside it with --out."),
        ("inspect . --out " + 300 * "x", "x cannot be used: File name too long. Name another path."),
        ("prune m --sparsity 1", "in [0, 1); got 1.0"),
        ("prune m --device nowhere", "--device nowhere: there is no such device here"),
        ("prune m --device meta", "--device meta: there is no such device here"),
        ("prune m --batch 0", "--batch: must be a whole number of at least 1, got '0'"),
        ("prune m --recipe wandda", "Did you mean 'wanda'?"),
        ("prune m --pattern 5:4", "No pattern '5:4'"),
        ("prune ./missing", "There is no folder ./missing"),
        ("probe m --order sideways", "--order must be one of joint, reverse, forward, size; got 'sideways'"),
        ("probe m --score wandda", "Did you mean 'wanda'?"),
        (
            "probe m --score movement",
            "movement needs movement_sum, not available after training. Scores that work here: ",
        ),
        ("probe m --order reverse --group some", "--group must be a number of layers, or block; got 'some'"),
        ("probe m --group 1", "--group has no effect with --order joint"),
        ("probe m --until --group block", "--group has no effect with --order joint"),
        ("probe m --refresh", "--refresh has no effect with --order joint"),
        ("probe m --scope everywhere", "scope"),
        ("probe m --start 0.1", "--start is for levels that rise. Add --until, or leave --start out."),
        ("probe m --end 0.6", "--end is for levels that rise"),
        ("probe m --max-drop 0", "--max-drop is for levels that rise"),
        ("probe m --tune off", "--tune is for levels that rise"),
        ("probe m --until --sparsity 0.5", "--sparsity has no effect with --until: it raises the sparsity itself"),
        ("probe m --until --exact", "--exact has no effect with --until"),
        ("probe m --until --tolerances 1 2", "--tolerances has no effect with --until"),
        ("probe m --until --tune both", "--tune both tries smaller tolerances, and there is none below 0"),
        ("probe m --until --tune sometimes", "invalid choice: 'sometimes'"),
        ("probe m --until --max-drop -1", "--max-drop: must be a number of at least 0 or a percentage such as 5%"),
        ("probe m --until --step 0", "step must be above 0"),
        ("probe m --exact --tolerance 1", "--exact ranks candidates without a tolerance"),
        ("probe m --exact --tolerances 1", "leave out --tolerance and --tolerances"),
        ("probe m --exact --order size --scope model", "use --scope layer or row"),
        ("probe m --tolerances 1 --order size", "use --order joint"),
        ("probe m --until --start 0.9 --end 0.5", "start must be above 0 and at most end, 0.5; got 0.9"),
        ("probe m --tolerances -1", "tolerances must be at least 0, all of them; got -1.0"),
        ("probe m --tolerance -1", "tolerance must be at least 0"),
        ("probe m --shrink 1", "shrink must be in [0, 1)"),
        ("probe m --device cpu --memory 8GB", "--memory limits CUDA devices and has no effect on cpu"),
        ("prune m --device cpu --memory 8GB", "--memory limits CUDA devices and has no effect on cpu"),
        ("finetune m", "the following arguments are required: --data"),
        ("finetune m --data x --sparsity 80", "percent write 0.8"),
        (
            "finetune m --data builtin --score wanda",
            "wanda needs input_norm, not available while training (--how oneshot has it). Scores that work here: ",
        ),
        ("finetune m --data builtin --how oneshot --score movement", "movement_sum, not available after training."),
        ("finetune ./missing --data builtin", "There is no folder ./missing"),
        ("train", "train needs a recipe or settings: secateur train RECIPE.toml"),
        ("train --dry-run", "train needs a recipe or settings"),
        ("train missing.toml", "Cannot read missing.toml: No such file"),
        ("train --set sparsity=0.5", "sparsity does nothing without a score"),
        ("train --score variance --sparsity 70", "percent write 0.7"),
        ("train --score varianc --sparsity 0.7", "Did you mean 'variance'?"),
        ("train --score wanda --sparsity 0.7", "wanda needs input_norm, not available in training with adamw"),
        (
            "train --score variance --sparsity 0.7 --optimizer sgd",
            "variance needs exp_avg_sq, not available in training with sgd. Scores that work",
        ),
        ("train --score variance --variant bitter7", "name the score twice"),
        ("train --set steps=ten", "steps = 'ten'"),
        ("train --set steps=5 --device nowhere", "--device nowhere: there is no such device here"),
        ("train --set steps=5 --optimizer adan", "Did you mean 'adam'?"),
        ("sweep missing.toml", "Cannot read missing.toml: No such file"),
        ("compare missing", "missing"),
        ("data missing.txt --out tokens", "missing.txt"),
        ("data builtin", "the following arguments are required: --out"),
        ("inspect ./missing", "There is no folder ./missing"),
        ("inspect .", "holds no .safetensors files"),
        ("demo --steps 3", "at least 20 steps"),
        ("demo --out nowhere/report.html", "There is no folder"),
        ("bench", "the following arguments are required: NAME"),
        ("bench selec", "Did you mean 'select'?"),
        ("bench step --device meta", "--device meta: there is no such device here"),
        ("bench step --device gpu", "there is no such device here (devices are called cpu, cuda, cuda:1, mps"),
        ("bench quality --text builtin --methods wnda", "wnda"),
        ("bench probe --shape tinny", "tinny"),
        ("bench select --sparsity 0 --device cpu", "--sparsity 0: benchmarks prune a fraction between 0 and 1."),
        ("bench step --seed -1", "must be a whole number from 0 to"),
        ("bench probe --sequences 2 --batches 4 8 --device cpu", "--batches are all larger than --sequences 2"),
    ],
)
def test_a_mistake_is_one_line(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if words.startswith(("prune ./", "inspect ./", "finetune ./")):
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    try:
        code = main(words.split())
    except SystemExit as left:
        code = int(left.code or 0)
    assert message in refused(capsys, code)
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
@pytest.mark.parametrize(
    "words",
    ["prune m --out loop", "demo --out loop", "compare . --json loop", "export m --out loop", "bench step --out loop"],
)
def test_a_link_that_leads_to_itself_is_one_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert "loop is a link that leads to itself. Name another path." in refused(capsys, main(words.split()))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_path_that_is_no_text(tmp_path: Path) -> None:
    """Latin-1 in the name of a folder, on a system that reads names as UTF-8; and a terminal that knows ASCII alone."""
    (tmp_path / "a.txt").write_text("some text to keep\n" * 99)
    odd = os.fsdecode(b"caf\xe9")
    done = shell("data", "a.txt", "--out", odd, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"caf\udce9: " in done.stdout
    done = shell("data", "a.txt", "--out", "caf\u00e9", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    write(tmp_path / "page.html", f"<p>{odd}")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == r"<p>caf\udce9"


def test_a_value_of_the_wrong_type_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text('data = ["python"]\n')
    words = ["train", "recipe.toml", "--steps", "2"]
    assert "recipe.toml: data = ['python'] must be text." in refused(capsys, main(words))


def test_a_misspelt_variable_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SECATEUR_KERNELS", "bogus")
    assert "SECATEUR_KERNELS is 'bogus'. Set it to off for plain torch" in refused(capsys, main(["scores"]))
    with pytest.raises(SecateurError, match="SECATEUR_KERNELS is 'bogus'"):
        reason_against(torch.device("cpu"))


def test_warnings_of_the_library_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    main(["scores"])
    ours = warnings.formatwarning("said", UserWarning, str(ROOT / "secateur" / "report.py"), 3)
    assert ours == "secateur: warning: said\n"
    assert "other.py:3: UserWarning: said" in warnings.formatwarning("said", UserWarning, "/other.py", 3)


def test_a_name_the_hub_does_not_know_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = shell("prune", "nobody/nothing", cwd=tmp_path, env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")})
    assert done.returncode == 2
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("secateur: nobody/nothing cannot be loaded (")
    assert "Hugging Face hub" in said
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "pruned-nothing").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for words in (
        ["prune", "m", "--out", "/proc/1/out"],
        ["train", "--set", "steps=5", "--out", "/proc/1/out"],
        ["data", "builtin", "--out", "/proc/1/out"],
        ["inspect", "m", "--out", "/proc/1/page.html"],
        ["bench", "step", "--out", "/proc/1/out"],
        ["compare", str(tmp_path), "--out", str(tmp_path)],
        ["demo", "--out", str(tmp_path / "file" / "report.html")],
    ):
        said = refused(capsys, main(words))
        assert re.search("Nothing can be written|is no file|not a file|There is no folder", said), said


def test_output_that_nobody_reads_ends_quietly() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{shlex.quote(sys.executable)} -m secateur scores | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.startswith("score ")
    assert done.stderr == ""


def test_the_name_of_a_device() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert training_on_cpu("cpu")
    assert not training_on_cpu("auto")
    assert "ACCELERATE_TORCH_DEVICE" not in os.environ


# Ctrl-C


def interrupted(words: list[str], ready: Callable[[int], bool], cwd: Path) -> tuple[int, str]:
    """Exit code and stderr of a command that gets SIGINT once it is ready."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "secateur", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd) as process:
        until = time.monotonic() + 60
        while not ready(process.pid):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < until
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    return process.returncode, said


def mapped(library: str) -> Callable[[int], bool]:
    def ready(number: int) -> bool:
        return library in Path(f"/proc/{number}/maps").read_text(encoding="utf-8")

    return ready


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("library", ["libtorch_cpu", "libtorch_python"])
def test_ctrl_c_while_torch_is_imported(library: str, tmp_path: Path) -> None:
    assert interrupted(["scores"], mapped(library), tmp_path) == (130, "secateur: interrupted\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_at_work(tmp_path: Path) -> None:
    """The working folder is claimed when the work begins, and released by the interrupt."""
    lock = tmp_path / ".tokens.lock"
    words = ["data", "builtin", "--out", str(tmp_path / "tokens")]
    code, said = interrupted(words, lambda _: lock.exists(), tmp_path)
    assert (code, said.splitlines()[-1]) == (130, "secateur: interrupted")
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


# Verdicts


@pytest.mark.parametrize(
    ("before", "after", "sparsity", "line"),
    [
        (27.2, 34.7, 0.5, "Perplexity: dense 27.2 -> 34.7 at 50 %: +28 %"),
        (27.24, 27.9, 0.5, "Perplexity: dense 27.2 -> 27.9 at 50 %: +2.4 %"),
        (20.0, 19.0, 0.125, "Perplexity: dense 20.0 -> 19.0 at 12.5 %: -5.0 %"),
        (20.0, 54321.0, 0.9, "Perplexity: dense 20.0 -> 54,321 at 90 %: +271,505 %"),
        (20.0, math.inf, 0.9, "Perplexity: dense 20.0 -> inf at 90 %"),
    ],
)
def test_a_verdict_is_one_line(before: float, after: float, sparsity: float, line: str) -> None:
    assert str(Verdict("perplexity", before, after, sparsity, None)) == line


@pytest.mark.parametrize(
    ("measure", "before", "after", "vocabulary", "said"),
    [
        ("perplexity", 75.8, 921.0, 50257, "the perplexity is 12.2 times that of the dense model"),
        ("perplexity", 27.2, 34.7, 50257, None),
        ("perplexity", 27.2, 54.3, None, None),
        ("perplexity", 27.2, 54.5, None, "2.00 times that of the dense model"),
        ("perplexity", 60.0, 110.0, 97, "worse than guessing uniformly among 97 tokens"),
        ("perplexity", 100.0, 110.0, 97, None),  # it was no better before
        ("perplexity", 27.2, math.inf, 97, "the perplexity is inf"),
        ("perplexity", 27.2, math.nan, 97, "the perplexity is nan"),
        ("loss", 2.0, 2.5, 30522, None),
        ("loss", 2.0, 2.8, 30522, "2.23 times"),
        ("loss", 10.0, 10.4, 30522, "worse than guessing uniformly among 30,522 tokens"),
    ],
)
def test_a_collapse_is_called_one(
    measure: str, before: float, after: float, vocabulary: int | None, said: str | None
) -> None:
    found = Verdict(measure, before, after, 0.5, vocabulary).warnings
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_a_model_with_more_zeros_than_asked_for_is_said_to_have_them() -> None:
    found = Verdict("perplexity", 27.2, 27.2, 0.5, None, base="before", already=0.5, asked=0.3)
    assert str(found) == "Perplexity: before 27.2 -> 27.2 at 50 %: +0.0 %"
    assert found.warnings[0].startswith("50 % of the weights were zero already, more than the 30 % asked for")
    assert not replace(found, asked=0.6).warnings
    assert not replace(found, asked=None).warnings


# Rows that are alike


def test_rows_that_are_alike_are_collapsed() -> None:
    rows = [(f"model.layers.{n}.q.weight", "4x4", "50%") for n in range(24)]
    rows.insert(7, ("head.weight", "4x9", "50%"))
    assert collapse(rows) == [("24 layers alike: model.layers.*.q.weight", "4x4", "50%"), ("head.weight", "4x9", "50%")]
    odd = [(name, shape, "51%" if name == "model.layers.3.q.weight" else share) for name, shape, share in rows]
    assert [row[0] for row in collapse(odd)] == [
        "23 layers alike: model.layers.*.q.weight",
        "model.layers.3.q.weight",
        "head.weight",
    ]
    assert collapse(rows[:2]) == rows[:2]
    cuts = [(f"layers.{n}.w", "50%", cut) for n, cut in enumerate(("0.3", "1e-05", "-", "2"))]
    assert collapse(cuts) == cuts
    assert collapse(cuts, ranged=2) == [("4 layers alike: layers.*.w", "50%", "1e-05 to 2")]
    assert collapse([(name, share, "0.5") for name, share, _ in cuts], ranged=2)[0][2] == "0.5"
    assert collapse([(name, share, "-") for name, share, _ in cuts], ranged=2)[0][2] == "-"
    experts = [(f"layers.0.experts.{n}.w", "1") for n in range(3)] + [("layers.1.q", "1"), ("layers.2.q", "1")]
    assert collapse(experts) == [("3 layers alike: layers.0.experts.*.w", "1"), *experts[3:]]


def test_a_report_prints_alike_rows_once() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    pruner = sc.Pruner(model, optimizer, score="magnitude", sparsity=0.5, scope="row", every=1)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    pruner.step()
    assert "4 layers alike: *.weight    8x8  32 of 64    50.00%" in str(pruner.report())
    assert "2.weight" in pruner.report().to_markdown()


# secateur scores


def test_scores_lists_every_score(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scores"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == sc.scores()
    by_name = {row[0]: row for row in scores.rows()}
    assert by_name["variance"] == (
        "variance", "weight, exp_avg_sq", "q=0.25", "model", "-", "|w| v^q, q a multiple of 1/16",
    )  # fmt: skip
    assert by_name["wanda"][3] == "row"
    assert by_name["bitter4"][4] == "depth"


# secateur inspect


def test_patterns() -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=draw)
    assert patterns(weight != 0) == ()
    assert patterns(torch.zeros(8, 8, dtype=torch.bool)) == ("all zero",)
    assert patterns(torch.rand(64, 64, generator=draw) > 0.5) == ()
    assert patterns(torch.rand(64, 64, generator=draw) > 0.95) == ()
    for pattern in ("2:4", "4:8", "1:4", "block:8x8", "block:1x4", "block:16x2"):
        kept = sc.select({"w": weight.abs()}, None if ":" in pattern[:2] else 0.5, pattern=pattern)["w"]
        assert patterns(kept) == (pattern,), pattern
    assert patterns(sc.select({"w": weight.abs()}, None, pattern="2:4")["w"].T) == ("2:4 along dimension 0",)
    rows = torch.ones(64, 48, dtype=torch.bool)
    rows[5:20] = False
    assert patterns(rows) == ("rows",)
    assert patterns(rows.T) == ("columns",)
    kernels = torch.ones(8, 4, 3, 3, dtype=torch.bool)
    kernels[:, :2] = False
    assert patterns(kernels) == ("2:4", "columns")
    kernels[:] = True
    kernels[2] = False
    assert patterns(kernels) == ("rows",)


def test_a_few_chance_zeros_do_not_hide_a_pattern() -> None:
    weight = torch.ones(256, 256)
    weight[:128, :128] = 0
    weight[200, 200] = 0
    assert inspect_tensor("w", weight).patterns == ("block:128x128",)


def test_zeros_masks_and_bytes() -> None:
    weight = torch.ones(5, 16, dtype=torch.bfloat16)
    weight[0] = 0
    mask = torch.ones(5, 16, dtype=torch.bool)
    mask[:2] = False
    found = inspect_tensor("w", weight, mask)
    assert found == Inspected("w", (5, 16), 80, 16, ("rows",), 160, 10 + 64 * 2, 16, 0)
    assert found.sparsity == 0.2
    assert inspect_tensor("w", weight, ~mask).unmasked == 16
    assert inspect_tensor("w", weight).returned is None
    with pytest.raises(sc.SecateurError, match=r"The mask of w is \[5, 16\], its weight \[16, 5\]"):
        inspect_tensor("w", weight.T, mask)
    tensors = [("w", weight), ("bias", torch.zeros(5)), ("steps", torch.zeros(3, 3, dtype=torch.int64))]
    assert inspect_tensors(tensors) == ([inspect_tensor("w", weight)], 14, [])
    assert inspect_tensors(tensors, {"v": mask, "w": mask}) == ([found], 14, ["v"])
    assert inspect_tensors(tensors, {"w": mask.T, "v": mask}) == ([inspect_tensor("w", weight)], 14, ["v", "w"])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder as `secateur prune` saves it: four equal blocks, 2:4."""
    pytest.importorskip("transformers")
    from secateur.integrations import transformers as hf
    from tests import tiny

    model = tiny.llama(num_hidden_layers=4)
    masks = {}
    for name, weight in model.named_parameters():
        if "proj" in name:
            masks[name] = sc.select({name: weight.detach().abs()}, None, pattern="2:4")[name]
            weight.data[~masks[name]] = 0
    return hf.save(model, None, tmp_path / "model", masks, {})


def test_inspecting_a_folder(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved), "--out", str(tmp_path / "zeros.html")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"4 layers alike: model\.layers\.\*\.mlp\.up_proj\.weight +\S+ +\S+ +50\.00% +2:4 ", said)
    assert "Every weight that the 28 masks remove is zero." in said
    assert re.search(r"Dense [\d.]+ kB; packed [\d.]+ kB", said)
    page = (tmp_path / "zeros.html").read_text()
    assert page.count(' title="') >= 28
    assert "% of the weights are zero</h1>" in page
    assert "<td>4 layers alike: model.<wbr>layers.<wbr>*.<wbr>mlp.<wbr>up_proj.<wbr>weight</td>" in page
    assert page.index("Every tensor") < page.index(
        "<td>model.<wbr>layers.<wbr>3.<wbr>mlp.<wbr>up_proj.<wbr>weight</td>"
    )


def test_inspecting_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights of a run lie one folder deeper; layers are listed in order, not by the letters of their numbers."""
    files = pytest.importorskip("safetensors.torch")
    (tmp_path / "best").mkdir()
    weights = {f"layers.{number}.weight": torch.ones(2, number + 2) for number in (10, 2, 0)}
    files.save_file(weights, tmp_path / "best" / "model.safetensors")
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["layers.0.weight", "layers.2.weight", "layers.10.weight"]


def mixtral() -> Any:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=50, num_local_experts=3)
    return transformers.MixtralForCausalLM(config)


def vit() -> Any:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("make", "count", "name"),
    [(mixtral, 4 + 3 * 3, "model.layers.0.block_sparse_moe.experts.1.w3.weight"),
     (vit, 6, "vit.encoder.layer.0.attention.attention.key.weight")],
)  # fmt: skip
def test_inspecting_models_whose_tensors_have_other_names_in_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, count: int, name: str, packed: bool
) -> None:
    """Masks have the names of parameters. Files may have others, and hold experts one by one."""
    files = pytest.importorskip("safetensors.torch")
    model, folder = make(), tmp_path / "model"
    masks = {}
    for key, weight in model.named_parameters():
        if weight.ndim > 1 and re.search(r"layers\..*(proj|mlp\.fc)", key):
            masks[key] = torch.rand(weight.shape) < 0.3
            weight.data[~masks[key]] = 0
    sc.save(model, folder, masks=masks, packed=packed)
    assert main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"Every weight that the {count} masks remove is zero." in said
    assert "not compared" not in said
    if packed:
        return
    weights = files.load_file(folder / "model.safetensors")
    weights[name] += 1
    files.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["inspect", str(folder)]) == 0
    assert re.search(
        rf"WARNING: [\d,]+ weights that the masks remove are not zero, in {name}\.", capsys.readouterr().out
    )
    (folder / "config.json").unlink()  # without it nothing says what the names mean
    assert main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert (
        "masks were not compared with the zeros: the files have no weight of the same name and shape, such as" in said
    )
    assert "weights in" in said


def test_inspecting_weights_that_came_back(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = pytest.importorskip("safetensors.torch")
    weights = files.load_file(saved / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    weights[name] = torch.where(weights[name] == 0, torch.ones(()), weights[name])
    files.save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    assert main(["inspect", str(saved)]) == 0
    said = capsys.readouterr().out
    assert f"weights that the masks remove are not zero, in {name}." in said
    assert "WARNING: " in said
    (saved / "masks.safetensors").unlink()
    assert main(["inspect", str(saved)]) == 0
    assert "so zeros were not compared with masks" in capsys.readouterr().out
    (saved / "model.safetensors").write_bytes(b"nothing")
    assert "cannot be read" in refused(capsys, main(["inspect", str(saved)]))
