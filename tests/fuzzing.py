"""Random cases of what users may do: each target makes one case from a seed and checks what comes of it.

`fuzz(target, seed, count)` runs so many and counts the outcomes. A case that breaks a promise raises `Broken`, which
names target, seed and number: `python tools/soak.py --only TARGET --seed SEED --case NUMBER` repeats it alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import secateur as sc
from secateur import selection
from secateur.cli import main
from secateur.cli.prune import Recipe, read_recipe
from secateur.errors import ScoreError, SecateurError, StateError
from secateur.lab.config import OPTIMIZERS, PRECISIONS, SCHEDULES, Experiment, read_experiment
from secateur.lab.runs import read_runs
from secateur.lab.sweep import cells_of
from secateur.selection import SCOPES, allocation, exact, tiles
from secateur.selection import exact as pieces

Draw = random.Random


class Broken(AssertionError):  # noqa: N818 (it is what happened)
    """A promise that does not hold, with what repeats the case."""


@cache
def home() -> Path:
    """A folder for what cases share; it goes when the process ends."""
    import atexit

    folder = Path(tempfile.mkdtemp(prefix="fuzzing"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=home()) as folder:
        yield Path(folder)


def one(target: str, seed: int, number: int) -> str:
    """One case: what came of it, or `Broken`."""
    draw = Draw(f"{target} {seed} {number}")
    state = torch.random.get_rng_state()
    torch.random.default_generator.manual_seed(draw.getrandbits(31))  # torch.manual_seed also tells every GPU, slowly
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a case may well deserve a warning
            return TARGETS[target](draw)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        raise Broken(f"--only {target} --seed {seed} --case {number}: {text[:600]}") from error
    finally:
        torch.random.set_rng_state(state)


def fuzz(target: str, seed: int, count: int, seconds: float = math.inf) -> Counter[str]:
    """So many cases, or as many as the time allows."""
    found: Counter[str] = Counter()
    until = time.monotonic() + seconds
    for number in range(count):
        if time.monotonic() > until:
            break
        found[one(target, seed, number)] += 1
    return found


def check(holds: object, said: str) -> None:
    if not holds:
        raise AssertionError(said)


# Values

TEXTS = ("", " ", "variance", "magnitude", "2:4", "0:0", "block:4x4", "none", "nan", "../..", "/", "\x00", "é世🙂",
         "a" * 5000, "variance(q=0.3)", "variance(q=nan)", "variance(", "lenet5", "gpt-2x32", "gpt-0x0", "gpt-1x99999",
         "python", "digits", "%s{}", "\n",
         "-1", "gradient", "random", "cubic", "row", "layer", "adamw", "sgd", "bf16", "erk",
         "\u202e", "__class__", "model,layer", "*", "[", "**", "\\")  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 0.5, 0.9, 0.999999, 1.0, -0.0, 1e-45, 1e308, -1e308, math.inf, -math.inf, math.nan, 2**31,
           2**63, 2**63 - 1, -(2**63), 10**30, 1e-9, 100, 7.5)  # fmt: skip


def value(draw: Draw, depth: int = 0) -> Any:
    kind = draw.randrange(8 if depth < 2 else 5)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind < 4:
        return draw.choice(TEXTS)
    if kind == 4:
        return draw.choice((True, False))
    if kind == 5:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return {draw.choice(("a", "score", "x y")): value(draw, depth + 1) for _ in range(draw.randrange(3))}
    return draw.uniform(-2, 2) if draw.random() < 0.5 else draw.randrange(-5, 300)


def toml(found: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, float):
        return {"inf": "inf", "-inf": "-inf", "nan": "nan"}.get(str(found), repr(found))
    if isinstance(found, list):
        return "[" + ", ".join(map(toml, found)) + "]"
    if isinstance(found, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in found.items()) + "}"
    return json.dumps(found, ensure_ascii=True).replace("\\u007f", "\\u007F") if isinstance(found, str) else str(found)


SENSIBLE: dict[str, Sequence[Any]] = {
    "model": ("gpt-2x32", "lenet5", "resnet18", "gpt2"), "data": ("python", "digits"), "seed": (0, 3), "steps": (1, 20),
    "batch": (1, 8), "context": (16,), "optimizer": tuple(OPTIMIZERS), "lr": (1e-3, 0, 1), "warmup": (0, 4),
    "score": ("variance", "magnitude", "movement", "random"), "sparsity": (0.5, 0.9, 0.0), "schedule": SCHEDULES,
    "begin": (0.0, 0.1), "end": (0.5, 0.7, 1.0), "every": (1, 4), "scope": SCOPES, "pattern": ("2:4", "block:2x2"),
    "allocation": tuple(allocation.ALLOCATIONS), "regrow": ("gradient", "random"), "until": (0.75, 1.0),
    "skip": (["a*"], []),
    "precision": PRECISIONS, "spam": ("paper", "seeds"), "rounds": (1, 5), "reconstruct": (True, False, "every"),
    "method": ("sparsegpt",), "only": (["*"],), "budget": ("normal", "extended"),
}  # fmt: skip


def settings_of(draw: Draw, kind: type) -> dict[str, Any]:
    """Settings, mostly sensible ones, some of them not."""
    names = [field.name for field in fields(kind)]
    found: dict[str, Any] = {}
    for name in draw.sample(names, draw.randrange(min(7, len(names)))):
        found[name] = draw.choice(SENSIBLE.get(name, (0, 1, "x")))
    wild = draw.choice((0, 0, 1, 1, 2))
    for _ in range(wild):
        name = draw.choice(names) if draw.random() < 0.8 else draw.choice(("scor", "", "x.y", "é", "a" * 300))
        found[name] = value(draw)
    return found


def damaged_text(draw: Draw, text: str) -> bytes:
    """Mostly the text itself; sometimes with signs lost, doubled or changed."""
    data = bytearray(text.encode())
    for _ in range(draw.choice((0, 0, 0, 1, 3))):
        if not data:
            break
        place = draw.randrange(len(data))
        kind = draw.randrange(4)
        if kind == 0:
            del data[place : place + draw.randrange(1, 9)]
        elif kind == 1:
            data[place] = draw.randrange(256)
        elif kind == 2:
            data[place:place] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 5)))
        else:
            del data[place:]
    return bytes(data)


def recipes(draw: Draw) -> str:
    """A recipe, a grid or a pruning recipe: read and usable, or refused with a typed error."""
    kind = draw.choice(("experiment", "experiment", "recipe", "grid"))
    text = "".join(
        f"{json.dumps(key)} = {toml(found)}\n"
        for key, found in settings_of(draw, Recipe if kind == "recipe" else Experiment).items()
    )
    if kind == "grid":
        axes = settings_of(draw, Experiment)
        lists = {k: v if draw.random() < 0.1 else [v, *draw.sample(TEXTS, draw.randrange(2))] for k, v in axes.items()}
        few = dict(list(lists.items())[:4])
        text = "[base]\n" + text + "[axes]\n" + "".join(f"{json.dumps(k)} = {toml(v)}\n" for k, v in few.items())
    with workspace() as folder:
        path = folder / "recipe.toml"
        path.write_bytes(damaged_text(draw, text))
        try:
            if kind == "experiment":
                usable(read_experiment(path, {}))
            elif kind == "recipe":
                check(isinstance(read_recipe(str(path)), Recipe), "no recipe came back")
            else:
                for cell in cells_of(path)[1]:
                    usable(cell.experiment)
        except SecateurError as error:
            check(str(error).strip(), "an error without words")
            return "refused"
        return "accepted"


def usable(experiment: Experiment) -> None:
    """What a trainer asks an experiment first."""
    check(experiment.steps_taken >= 1, "no steps")
    for step in (1, max(1, experiment.steps_taken // 2), experiment.steps_taken):
        rate = experiment.rate(step)
        check(math.isfinite(rate) and rate >= 0, f"the rate of step {step} is {rate}")
    ramp = experiment.ramp()
    if callable(ramp):
        asked = [ramp(step) for step in (0, experiment.steps // 2, experiment.steps)]
        check(all(0 <= share < 1 for share in asked), f"the schedule asks for {asked}")


# Saved states of a Pruner

SETUPS: tuple[dict[str, Any], ...] = (
    {"score": "magnitude", "sparsity": 0.5},
    {"score": "movement", "sparsity": 0.7, "scope": "layer"},
    {"score": "variance", "pattern": "2:4", "sparsity": None},
    {"score": "displacement", "sparsity": 0.4, "scope": "row"},
    {"score": "variance", "sparsity": 0.6, "regrow": "random", "until": 50},
)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 8))


def trained(setup: dict[str, Any], steps: int) -> tuple[sc.Pruner, nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, optimizer, every=1, only="*", **setup)
    for _ in range(steps):
        train_step(model, optimizer)
        pruner.step()
    return pruner, model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(6, 12)).square().sum().backward()
    optimizer.step()


State = dict[str, Any]


def flipped_bit(draw: Draw, found: Tensor) -> Tensor:
    """A mask with one bit changed; anything else as it is."""
    if found.dtype == torch.uint8 and found.numel():
        found = found.clone()
        found.view(-1)[draw.randrange(found.numel())] ^= 1 << draw.randrange(8)
    return found


def odd_value(draw: Draw, found: Tensor) -> Tensor:
    """One number changed into an odd one."""
    if found.is_floating_point() and found.numel():
        found = found.clone()
        found.view(-1)[draw.randrange(found.numel())] = draw.choice((math.nan, math.inf, -1.0))
    return found


def other_shape(draw: Draw, found: Tensor) -> Tensor:
    return draw.choice((found[None], found.reshape(-1)[:-1], found.reshape(-1), torch.zeros(0)))


CHANGES: tuple[Callable[[Draw, Tensor], Any], ...] = (
    lambda draw, found: found.to(draw.choice((torch.float16, torch.int8, torch.float64, torch.bool))),
    other_shape,
    flipped_bit,
    odd_value,
    lambda draw, found: draw.choice((None, 3, "text", [1, 2], math.nan)),
    lambda draw, found: torch.empty_like(found, device="meta"),
    lambda draw, found: found.flip(0) if found.ndim > 1 else found,
    lambda draw, found: found.to_sparse() if found.ndim == 2 else found,
)


def renamed(draw: Draw, state: State) -> None:
    state[draw.choice(("", "mask.", "more", "mask.0.weight.x", "rows.é"))] = torch.zeros(2)


def swapped(draw: Draw, state: State) -> None:
    first, second = (draw.choice(sorted(state)) for _ in range(2))
    state[first], state[second] = state[second], state[first]


def other_state(draw: Draw, state: State) -> None:
    other = dict(draw.choice(saved_states()))
    state.clear()
    state.update(other)


def odd_steps(draw: Draw, state: State) -> None:
    state["steps"] = torch.tensor([int(draw.choice((-1, 0, 5, 2**40, -(2**62)))) for _ in range(3)])


def odd_asked(draw: Draw, state: State) -> None:
    state["asked"] = torch.tensor(draw.choice(NUMBERS), dtype=torch.float64)


def lost(draw: Draw, state: State) -> None:
    del state[draw.choice(sorted(state))]


WHOLE: tuple[Callable[[Draw, State], None], ...] = (renamed, swapped, other_state, odd_steps, odd_asked, lost)


def damaged_state(draw: Draw, state: State) -> State:
    """The state with one to three things wrong, now and then with none."""
    state = {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        if draw.random() < 0.4 and state:
            draw.choice(WHOLE)(draw, state)
        elif tensors := sorted(name for name, found in state.items() if isinstance(found, Tensor)):
            name = draw.choice(tensors)
            state[name] = draw.choice(CHANGES)(draw, state[name]) if not state[name].is_meta else None
    return state


@cache
def saved_states() -> tuple[dict[str, Tensor], ...]:
    torch.manual_seed(5)
    return tuple(trained(setup, 3)[0].state_dict() for setup in SETUPS)


def everything(pruner: sc.Pruner, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that loading may change, to be compared."""
    states = [t.clone() for state in optimizer.state.values() for t in state.values()]
    told = pruner.report()
    return [*(t.clone() for t in pruner.state_dict().values()), *(p.detach().clone() for p in model.parameters()),
            *states, *(m.clone() for m in pruner.masks.values()), told.step, told.asked, told.pruned]  # fmt: skip


def same(before: list[Any], after: list[Any]) -> bool:
    pairs = zip(before, after, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def states(draw: Draw) -> str:
    """A damaged state is refused and nothing changes, or what is loaded agrees with itself and goes on."""
    number = draw.randrange(len(SETUPS))
    pruner, model, optimizer = trained(SETUPS[number], draw.randrange(3))
    state = damaged_state(draw, saved_states()[number])
    before = everything(pruner, model, optimizer)
    try:
        pruner.load_state_dict(state)
    except StateError:
        check(same(before, everything(pruner, model, optimizer)), "a refused state has changed something")
        return "refused"
    consistent(pruner, model, SETUPS[number])
    try:
        train_step(model, optimizer)
        pruner.step()
    except ScoreError:  # facts that were damaged, and are said to be
        return "loaded, then NaN was named"
    consistent(pruner, model, SETUPS[number])
    return "loaded"


def consistent(pruner: sc.Pruner, model: nn.Module, setup: dict[str, Any]) -> None:
    """Masks, counts, what was asked and the weights agree."""
    told, masks = pruner.report(), pruner.masks
    gone = {name: int((~mask).sum()) for name, mask in masks.items()}
    check({row.name: row.pruned for row in told.tensors} == gone, "counts are not those of the masks")
    check(0 <= told.asked < 1, f"asked {told.asked}")
    check(0 <= told.step < 2**53, f"at step {told.step}")
    total = sum(mask.numel() for mask in masks.values())
    if setup.get("scope", "model") == "model" and "pattern" not in setup:
        check(
            sum(gone.values()) == round(told.asked * total), f"{sum(gone.values())} gone, asked {told.asked} of {total}"
        )
    for name, mask in masks.items():
        check(bool((model.get_parameter(name)[~mask] == 0).all()), f"{name} is not zero where its mask says so")


# Folders

TRAIN = ("train", "--cpu", "--tracker", "none", "--checkpoint-every", "4", "--set", "model=gpt-1x16", "--set",
         "steps=12", "--set", "batch=4", "--set", "context=8", "--set", "warmup=2", "--set", "every=2", "--set",
         "evaluate_every=4", "--set", "evaluation=2", "--set", "score=variance", "--set", "sparsity=0.5")  # fmt: skip


def command(*words: str) -> tuple[int, str, str]:
    """A command run here: its exit code, stdout and stderr. argparse leaves by SystemExit."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
    return code, out.getvalue(), err.getvalue()


def well_behaved(code: int, err: str) -> str:
    """A command ends with 0, or with 2 and a last line that says why."""
    check(code in (0, 2), f"exit code {code}: {err[-300:]}")
    check("Traceback" not in err, err[-600:])
    if code == 2:
        last = err.rstrip("\n").rpartition("\n")[2]
        check("secateur" in last and ": " in last, f"the last line does not say what was wrong: {err[-300:]!r}")
        # One that begins "secateur: " and goes on for lines is two things at once.
        check(err.count("\nsecateur: ") + err.startswith("secateur: ") <= 4, f"many words: {err[-300:]!r}")
    return "done" if code == 0 else "refused"


@cache
def run_folders() -> tuple[Path, Path]:
    """A finished run, and one that stopped at its second checkpoint."""
    whole, half = home() / "whole", home() / "half"
    code, _, err = command(*TRAIN, "--out", str(whole))
    check(code == 0, err)
    command(*TRAIN, "--out", str(half), "--max-time", "0.001")
    check((half / "checkpoint").is_dir() and not (half / "summary.json").exists(), "the short run has no checkpoint")
    return whole, half


@cache
def saved_model() -> Path:
    """A pruned model as `secateur.integrations.transformers.save` writes it."""
    from secateur.integrations import transformers
    from tests import tiny

    torch.manual_seed(1)
    model, tokenizer = tiny.llama(num_hidden_layers=1), tiny.tokenizer()
    names = [name for name, parameter in model.named_parameters() if parameter.ndim == 2 and "proj" in name]
    masks = {name: torch.rand_like(model.get_parameter(name)) > 0.5 for name in names}
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)
    return Path(transformers.save(model, tokenizer, home() / "saved", masks, {"report.json": "{}\n"}))


def damage(draw: Draw, folder: Path) -> bool:
    """Something happens to up to three files. False where bits were flipped: of a weight nobody can tell."""
    told = True
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if not files:
            break
        path = draw.choice(files)
        data = bytearray(path.read_bytes())
        kind = draw.randrange(7)
        if kind == 0 and data:
            for _ in range(draw.choice((1, 8))):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
            told = False
        elif kind == 1:
            path.write_bytes(data[: draw.randrange(len(data) + 1)])
        elif kind == 2:
            path.unlink()
        elif kind == 3:
            other = draw.choice(files)
            mine, theirs = path.read_bytes(), other.read_bytes()
            path.write_bytes(theirs)
            other.write_bytes(mine)
        elif kind == 4:
            path.write_bytes(draw.choice((b"", b"{}", b"[]", b"null", b"\xff\xfe\x00", b"{", b"1" * 5000, b"\n\n")))
        elif kind == 5:
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(bytes(draw.randrange(256) for _ in range(draw.choice((1, 100, 3000)))))
    return told


def folders(draw: Draw) -> str:
    """A damaged folder is refused with a typed error, or what is read is right."""
    kind = draw.choice(("compare", "compare", "masks", "masks", "model", "resume"))
    return {"compare": _compared, "masks": _masks, "model": _model, "resume": _resumed}[kind](draw)


def _compared(draw: Draw) -> str:
    with workspace() as folder:
        for place, source in enumerate(run_folders()):
            shutil.copytree(source, folder / f"run{place}", ignore=shutil.ignore_patterns("checkpoint", "best"))
        damage(draw, folder)
        try:
            finished, _ = read_runs([folder])
        except SecateurError:
            return "compare: refused"
        check(all(run.final.step >= 0 for run in finished), "a run of no steps")
        code, _, err = command("compare", str(folder))
        return f"compare: {well_behaved(code, err)}"


def _masks(draw: Draw) -> str:
    from secateur.integrations import transformers

    source = saved_model() / "masks.safetensors"
    with workspace() as folder:
        shutil.copy(source, folder)
        told = damage(draw, folder)
        try:
            found = transformers.load_masks(folder)
        except SecateurError:
            return "masks: refused"
        right = transformers.load_masks(saved_model())
        check(found.keys() == right.keys() or not told, "masks of other names")
        if told:
            check(all(torch.equal(found[name], right[name]) for name in right), "masks that were never saved")
        return "masks: read"


def _model(draw: Draw) -> str:
    from secateur.integrations import transformers

    with workspace() as folder:
        shutil.copytree(saved_model(), folder / "model")
        damage(draw, folder / "model")
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                model, _ = transformers.load(folder / "model")
        except SecateurError:
            return "model: refused"
        check(isinstance(model, nn.Module), "no model")
        return "model: read"


def _resumed(draw: Draw) -> str:
    whole, half = run_folders()
    with workspace() as folder:
        source = draw.choice((whole, half, half))
        shutil.copytree(source, folder / "run")
        told = damage(draw, folder / "run")
        whole_still = _bytes(folder / "run") == _bytes(source)
        code, _, err = command(*TRAIN, "--out", str(folder / "run"))
        said = well_behaved(code, err)
        check(code == 0 or not whole_still, f"refused though nothing was damaged: {err[-300:]}")
        if code == 0 and told:
            figures = [json.loads((p / "summary.json").read_text()) for p in (whole, folder / "run")]
            kept = [{k: f[k] for k in ("steps", "pruned", "held_out_loss", "quality")} for f in figures]
            check(kept[0] == kept[1], f"another result: {kept[1]}, not {kept[0]}")
        return f"resume: {said}"


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Command lines

VERBS: dict[str, tuple[str, ...]] = {
    "prune": ("--data", "--eval-data", "--sparsity", "--context", "--calibration", "--evaluation", "--batch",
              "--memory", "--skip", "--only", "--device", "--stream", "--dtype", "--eval", "--out", "--overwrite",
              "--recipe", "--pattern"),
    "probe": ("--data", "--sparsity", "--context", "--calibration", "--memory", "--skip", "--only", "--device",
              "--stream", "--score", "--order", "--group", "--tolerance", "--shrink", "--exact", "--out", "--until",
              "--start", "--step", "--end", "--max-drop", "--tune", "--refresh", "--scope", "--tolerances"),
    "finetune": ("--data", "--eval-data", "--sparsity", "--how", "--score", "--distill", "--no-distill", "--teacher",
                 "--lora", "--lr", "--batch", "--accumulate", "--context", "--calibration", "--evaluation", "--seed",
                 "--device", "--dtype", "--bf16", "--tracker", "--checkpoint-every", "--out", "--overwrite"),
    "train": ("--set", "--out", "--score", "--sparsity", "--steps", "--seed", "--device", "--optimizer", "--variant",
              "--pruning-method", "--target-sparsity", "--max-iters",
              "--budget", "--max-time", "--micro-batch", "--checkpoint-every", "--tracker", "--dry-run"),
    "sweep": ("--out", "--device", "--engine", "--cpus", "--part", "--checkpoint-every", "--numbers-only"),
    "compare": ("--by", "--json", "--html", "--out"),
    "data": ("--out",), "bench": (), "demo": ("--out",), "inspect": ("--out",), "export": ("--out",), "scores": (),
}  # fmt: skip
FLAGS = ("--stream", "--overwrite", "--exact", "--until", "--refresh", "--dry-run", "--numbers-only", "--distill",
         "--no-distill", "--lora", "--bf16")  # fmt: skip
WORDS = ("0.5", "0", "-1", "1.0", "nan", "inf", "1e400", "2", "7", "wanda", "magnitude", "sparsegpt", "2:4", "9:4",
         "block:2x2", "", " ", "é世", "*", "nothing*", "24GB", "1KB", "-5GB", "cpu", "cuda", "float32", "bfloat16",
         "lm-eval:", "x=y", "lr=", "=", "steps=1", "score=none", "sparsity=0.5", "adamw", "bitter3",
         "state", "none", "extended",
         "3/2", "1/2", "block", "joint", "reverse", "nowhere/at/all", "/dev/null", "/proc/nothing", "\x00", "--", "-h",
         "local", "a" * 300, "score", "oneshot", "hold", "1e-3")  # fmt: skip


@cache
def props() -> Path:
    """What commands may be pointed at: a model, texts, a grid, a recipe, runs."""
    folder = home() / "props"
    folder.mkdir()
    shutil.copytree(saved_model(), folder / "model")
    draw = Draw(0)
    for name in ("one", "two"):
        letters = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "seven", "wizards", "box"]
        (folder / f"{name}.txt").write_text(" ".join(draw.choice(letters) for _ in range(400)))
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    (folder / "empty.toml").write_text("")
    (folder / "grid.toml").write_text("[axes]\nseed = 3\n")
    (folder / "recipe.toml").write_text('score = "wanda"\n')
    shutil.copytree(run_folders()[0], folder / "runs" / "one", ignore=shutil.ignore_patterns("checkpoint", "best"))
    return folder


def commands(draw: Draw) -> str:
    """A command line ends with 0, or with 2 and one line that says why."""
    verb = draw.choice((*VERBS, "prune", "probe", "train"))
    base = props()
    texts = ("one.txt", "two.txt", "binary.txt", "empty.toml", "grid.toml", "recipe.toml")
    places = [str(base / name) for name in ("model", *texts, "runs", "absent")]
    with workspace() as folder:
        words: list[str] = []
        if verb in ("prune", "probe") and draw.random() < 0.8:
            words += [places[0], "--data", places[1], "--context", "8", "--calibration", "2", "--evaluation", "2"]
            words += ["--out", str(folder / "out")] if draw.random() < 0.9 else []
        elif verb == "finetune" and draw.random() < 0.8:
            words += [places[0], "--data", places[1], "--context", "8", "--evaluation", "2", "--batch", "1"]
            words += ["--out", str(folder / "out")] if draw.random() < 0.9 else []
        elif draw.random() < 0.7:
            words.append(draw.choice(places))
        for _ in range(draw.randrange(4)):
            option = draw.choice(VERBS[verb] or ("--out",))
            words.append(option if draw.random() < 0.95 else option + draw.choice(("x", "=", "=1")))
            if option not in FLAGS or draw.random() < 0.1:
                words.append(draw.choice(WORDS) if draw.random() < 0.8 else draw.choice(places))
        if verb == "train":  # small whatever else is asked
            words += ["--dry-run"] if draw.random() < 0.7 else [*TRAIN[1:], "--out", str(folder / "run")]
        if verb == "finetune":
            words += draw.choice((["--steps", "2"], ["--tokens", "20"]))
        if verb in ("bench", "demo"):  # never a whole one
            words += [draw.choice(("--no-such-option", "--steps=-1", "--help"))]
        if draw.random() < 0.03:
            verb = draw.choice(("", "prun", "é", "--version", "-"))
        with contextlib.chdir(folder):
            code, _, err = command(verb, *words)
        return f"{verb if verb in VERBS else 'other'}: {well_behaved(code, err)}"


# Selections


def numbers(draw: Draw, rng: np.random.Generator, size: int) -> np.ndarray:
    """Hard values: ties, signed zeros, infinities, subnormals, any bits at all."""
    kind = draw.randrange(6)
    if kind == 0:
        return rng.choice(np.array([-1.5, -0.0, 0.0, 0.0, 1.0, 2.0], dtype=np.float32), size)
    if kind == 1:
        return rng.choice(np.array([np.inf, -np.inf, 1e-45, -1e-45, 3.4e38, 0.0, -0.0, 1e-38], dtype=np.float32), size)
    if kind == 2:
        found = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
        return np.where(np.isnan(found), np.float32(0.5), found)
    if kind == 3:
        return np.full(size, draw.choice((0.0, -0.0, 1.0, -np.inf, np.inf)), dtype=np.float32)
    if kind == 4:
        return rng.integers(-3, 4, size).astype(np.float32)
    return rng.standard_normal(size).astype(np.float32)


def lowest_go(scores: np.ndarray, alive: np.ndarray, group: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """The plain rule by one stable sort: in every group the dead come first, then the lowest; so many of them go."""
    order = np.lexsort((scores + np.float32(0), alive, group))
    sizes = np.bincount(group, minlength=len(gone))
    first = np.cumsum(sizes) - sizes
    place = np.arange(len(order)) - first[group[order]]
    mask = np.empty(len(order), dtype=bool)
    mask[order] = place >= gone[group[order]]
    return mask & alive


@contextlib.contextmanager
def small_parts(chunk: int, room: int) -> Iterator[None]:
    """Chunks and the room for what is collected, as small as told."""
    before = pieces.CHUNK, exact.COLLECTED
    modules = (pieces, exact, tiles, selection)
    try:
        for module in modules:
            module.CHUNK = chunk  # type: ignore[attr-defined]
        exact.COLLECTED = room
        yield
    finally:
        for module in modules:
            module.CHUNK = before[0]  # type: ignore[attr-defined]
        exact.COLLECTED = before[1]


PATTERNED = ("1:2", "2:4", "3:5", "block:2x2", "block:1x4", "block:4x1")


def shape_for(draw: Draw, pattern: str | None) -> tuple[int, ...]:
    """A shape that the pattern fits; with none, anything, empty and long ones too."""
    if pattern is None:
        kind = draw.randrange(5)
        if kind == 0:
            return (draw.choice((0, 1, 7, 40)),)
        if kind == 1:
            return draw.randrange(1, 4), draw.randrange(1, 4), draw.randrange(1, 3), draw.randrange(1, 3)
        return draw.randrange(1, 8), draw.choice((1, 2, 5, 9, 33))
    rows, inputs = (1, int(pattern.partition(":")[2])) if "x" not in pattern else map(int, pattern[6:].split("x"))
    shape: tuple[int, ...] = (rows * draw.randrange(1, 4), inputs * draw.randrange(1, 4))
    return (*shape, draw.randrange(1, 3), draw.randrange(1, 3)) if draw.random() < 0.2 else shape


def selections(draw: Draw) -> str:
    """A selection equals a stable sort."""
    rng = np.random.default_rng(draw.getrandbits(32))
    pattern = draw.choice(PATTERNED) if draw.random() < 0.3 else None
    blocks = pattern is not None and "x" in pattern
    scope = draw.choice(SCOPES) if pattern is None else draw.choice(("model", "layer")) if blocks else "model"
    dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    scores, alive = {}, {}
    for name in "abc"[: draw.randrange(1, 4)]:
        shape = shape_for(draw, pattern)
        size = math.prod(shape)
        found = rng.integers(-3, 4, size).astype(np.float32) if blocks else numbers(draw, rng, size)
        if draw.random() < 0.03 and size:
            found[draw.randrange(size)] = math.nan
        scores[name] = torch.from_numpy(found).to(dtype).view(shape)
        if len(shape) == 2 and draw.random() < 0.2:  # the same laid out the other way
            scores[name] = scores[name].t().contiguous().t()
        if draw.random() < 0.5:
            alive[name] = torch.from_numpy(rng.random(size) > draw.choice((0.1, 0.5, 1.0))).view(shape)
    sparsity = None if pattern and not blocks else draw.choice((0.0, 0.25, 0.5, 0.9, 0.999, draw.random()))
    with small_parts(draw.choice((4, 16, 64, 1 << 19, 1 << 19, 1 << 19)), draw.choice((2, 8, 32, 1 << 20))):
        try:
            masks = sc.select(scores, sparsity, scope=scope, pattern=pattern, alive=alive or None)
        except ScoreError:
            spoiled = [bool((t.isnan() & alive.get(n, torch.tensor(True))).any()) for n, t in scores.items()]
            check(any(spoiled), "NaN was said to be there and is not")
            return "NaN was named"
    expected = expected_masks(scores, alive, sparsity, scope, pattern)
    for name, mask in masks.items():
        spoiled = bool((scores[name].isnan() & alive.get(name, torch.tensor(True))).any())
        check(not spoiled or bool((mask == alive.get(name, torch.tensor(True))).all()), "NaN was ranked")
    if any(bool(t.isnan().any()) for t in scores.values()):
        return "NaN out of competition"
    for name, mask in masks.items():
        check(np.array_equal(mask.numpy().reshape(-1), expected[name]), f"another mask for {name!r}")
    return f"{scope} {'n:m' if pattern and not blocks else 'blocks' if blocks else ''}".strip()


def expected_masks(
    scores: dict[str, Tensor], alive: dict[str, Tensor], sparsity: float | None, scope: str, pattern: str | None
) -> dict[str, np.ndarray]:
    """What the plain rule gives: groups are numbered, each has its count."""
    flat, living, groups, gone, names, first, widths = [], [], [], [], [], 0, {}
    for name, tensor in scores.items():
        values = tensor.float().contiguous().numpy()
        lives = alive[name].numpy() if name in alive else np.ones(values.shape, dtype=bool)
        if pattern is not None and "x" in pattern:
            members = group_of(values.shape, pattern)
            count = int(members.max()) + 1
            pooled = np.bincount(members, weights=np.where(lives, values, 0).reshape(-1), minlength=count)
            widths[name] = members
            values, lives = pooled.astype(np.float32), np.bincount(members, weights=lives.reshape(-1)) > 0
            own, rule = np.zeros(count, dtype=np.int64), None
        else:
            rule = pattern or ("row" if scope == "row" else None)
            own = group_of(values.shape, rule)
        number = int(own.max()) + 1 if own.size else 0
        if scope != "model" or rule is not None:
            own = own + first
            size = values.size // max(1, number)
            most = int(pattern.partition(":")[2]) - int(pattern.partition(":")[0]) if rule == pattern and pattern else 0
            each = most if rule == pattern and pattern else round(float(sparsity or 0) * size)
            gone += [each] * number
            first += number
        flat.append(values.reshape(-1))
        living.append(lives.reshape(-1))
        groups.append(own)
        names += [(name, values.size)]
    if scope == "model" and not gone:
        gone = [round(float(sparsity or 0) * sum(size for _, size in names))]
    mask = lowest_go(*(np.concatenate(parts) for parts in (flat, living, groups)), np.array(gone, dtype=np.int64))
    found = dict(zip(scores, np.split(mask, np.cumsum([size for _, size in names])[:-1]), strict=True))
    for name, members in widths.items():
        lives = alive[name].numpy().reshape(-1) if name in alive else np.ones(len(members), dtype=bool)
        found[name] = found[name][members] & lives
    return found


def group_of(shape: tuple[int, ...], rule: str | None) -> np.ndarray:
    """The number of each weight's group, flat: one for all, one a row, or one a tile of the pattern."""
    if rule is None or len(shape) < 2:
        return np.zeros(math.prod(shape), dtype=np.int64)
    place = np.indices(shape)
    if rule == "row":
        return place[0].reshape(-1)
    rows, inputs = (1, int(rule.partition(":")[2])) if "x" not in rule else map(int, rule[6:].split("x"))
    grid = (shape[0] // rows, shape[1] // inputs, *shape[2:])
    return np.ravel_multi_index((place[0] // rows, place[1] // inputs, *place[2:]), grid).reshape(-1)


TARGETS: dict[str, Callable[[Draw], str]] = {
    "selections": selections,
    "recipes": recipes,
    "states": states,
    "folders": folders,
    "commands": commands,
}
