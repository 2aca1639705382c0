"""Prune a trained language model, evaluate it on other text before and after, and save it with masks and a report."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.cli.options import (
    MODELS,
    TEXTS,
    add_device,
    add_out,
    add_sparsity,
    check_other,
    context_length,
    import_torch,
    pick_device,
    positive,
)
from secateur.errors import SaveError, SecateurError, TextError, library, nearest
from secateur.files import check_folder, check_room, claimed
from secateur.schedules import check_sparsity
from secateur.settings import from_mapping, read_toml

if TYPE_CHECKING:
    from torch import Tensor

    from secateur.report import Outcome

SUMMARY = "prune a trained model, evaluate it on other text, save it"
EXAMPLE = "secateur prune smollm2 --sparsity 0.5 --out smollm2-50"
# Default context, calibration windows, evaluation windows and batch: what takes minutes on such a device.
CPU, GPU = (256, 16, 16, 1), (1024, 128, 256, 8)
HARNESS = "lm-eval:"
COLLAPSED = 2.0  # how many times the dense perplexity is called a collapse


@dataclass(frozen=True)
class Recipe:
    """The settings of `prune` without data and sparsity."""

    score: str = "variance"
    scope: str | None = None
    pattern: str | None = None
    allocation: str | None = None
    rounds: int = 1
    reconstruct: bool | str = False
    method: str | None = None
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None


RECOMMENDED = "recommended"
NAMED = {
    RECOMMENDED: Recipe(rounds=5, reconstruct="every"),
    "repaired": Recipe(rounds=5, reconstruct=True),
    "rounds": Recipe(rounds=5),
    "variance": Recipe(),
    "fisher": Recipe(score="fisher"),
    "gradient": Recipe(score="gradient"),
    "wanda": Recipe(score="wanda"),
    "magnitude": Recipe(score="magnitude"),
    "sparsegpt": Recipe(method="sparsegpt"),
}


def read_recipe(wanted: str | os.PathLike[str]) -> Recipe:
    """A recipe by its name, or from a TOML file whose keys are the fields of `Recipe`."""
    name = os.fspath(wanted)
    if name in NAMED:
        return NAMED[name]
    if Path(name).suffix != ".toml":
        raise SecateurError(
            f"No recipe {name!r}.{nearest(name, NAMED)} Use one of {', '.join(NAMED)}, or a .toml file."
        )
    return from_mapping(Recipe, read_toml(Path(name)), name)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    parser.add_argument("--recipe", default=RECOMMENDED, help=f"{', '.join(NAMED)}, or a .toml file ({RECOMMENDED})")
    parser.add_argument("--pattern", help="shape of the zeros: 2:4, 4:8, block:RxC (none)")


def run(options: argparse.Namespace) -> int:
    recipe = asdict(read_recipe(options.recipe))
    given = {"pattern": options.pattern, "skip": options.skip, "only": options.only}
    recipe |= {key: value for key, value in given.items() if value}
    import_torch()
    from secateur.oneshot.calibration import check_calibrated
    from secateur.oneshot.prune import prune
    from secateur.scores import resolve
    from secateur.selection.tiles import parse_pattern

    check_calibrated(resolve(recipe["score"]))
    pattern = parse_pattern(recipe["pattern"])
    fixed = None if pattern is None else pattern.sparsity  # 2:4 is 50 %
    if fixed is not None and options.sparsity not in (None, fixed):
        raise SecateurError(f"--pattern {recipe['pattern']} means a sparsity of {fixed:g}. Leave out --sparsity.")
    sparsity = 0.5 if options.sparsity is None and fixed is None else options.sparsity

    def work(model: Any, batches: list[Any], _: Gauge) -> Outcome:
        where = {"memory": options.memory, "device": device_for(options), "progress": True}
        return prune(model, batches, sparsity=sparsity, **where, **recipe)

    return run_job(options, work)


# What `secateur probe` shares: load, calibrate, prune, evaluate on other text, report, save.


def add_shared(parser: argparse.ArgumentParser) -> None:
    """The options of `secateur prune` and `secateur probe`."""
    context, calibration, evaluation, batch = (
        f"({gpu} on a GPU, {cpu} on a CPU)" for gpu, cpu in zip(GPU, CPU, strict=True)
    )
    parser.add_argument("model", help=MODELS)
    add_sparsity(parser, "0.5")
    parser.add_argument("--data", default="builtin", help=f"text to calibrate on: {TEXTS} (builtin)")
    parser.add_argument("--eval-data", help="text to evaluate on (what follows the calibration text in --data)")
    parser.add_argument("--context", type=context_length, help=f"tokens in a window {context}")
    parser.add_argument("--calibration", type=positive, metavar="N", help=f"windows to calibrate on {calibration}")
    parser.add_argument("--evaluation", type=positive, metavar="N", help=f"windows to evaluate on {evaluation}")
    parser.add_argument("--batch", type=positive, help=f"windows at a time {batch}")
    parser.add_argument("--memory", help="limit of GPU memory, such as 24GB (all that is free)")
    parser.add_argument("--skip", nargs="+", default=[], metavar="GLOB", help="parameters or modules to leave dense")
    parser.add_argument("--only", nargs="+", metavar="GLOB", help="prune only these")
    add_device(parser)
    parser.add_argument(
        "--stream",
        action="store_true",
        help="for models larger than the GPU: keep the model in host memory and move one block at a time to the GPU",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (as stored)")
    parser.add_argument("--eval", metavar="lm-eval:TASKS", help="also run tasks of lm-eval, before and after")
    add_out(parser, "folder for the pruned model, its masks and report (pruned-MODEL)")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")


def device_for(options: argparse.Namespace) -> str:
    """The device by name. With --stream it has an index, which tells it from the device the model stays on."""
    device = pick_device(options.device)
    return f"{device.type}:{device.index or 0}" if options.stream else str(device)


def run_job(options: argparse.Namespace, work: Work, decides: bool = False) -> int:
    """Check and claim the folder, then do the work: nothing long is done for a folder that cannot be written.

    The work gets the model, calibration batches and a `Gauge`. If it `decides` by the gauge, that one measures windows
    of their own, so that the verdict is given on text that decided nothing.
    """
    import_torch()
    from secateur.integrations.folder import check_free
    from secateur.integrations.text import check_source

    folder = options.out or Path(f"pruned-{Path(options.model).name}")
    with claimed(folder):
        check_free(folder, options.overwrite)
        check_other(folder, options.model, "pruned")
        check_folder(folder)
        if options.sparsity is not None:
            check_sparsity(options.sparsity)
        if options.eval:
            if not options.eval.startswith(HARNESS) or options.eval == HARNESS:
                raise SecateurError(f"--eval {options.eval} is not known. Write {HARNESS}TASK or {HARNESS}TASK,TASK.")
            library("lm_eval", "--eval", "lm_eval")
        if options.memory and (device := pick_device(options.device)).type != "cuda":
            raise SecateurError(f"--memory limits CUDA devices and has no effect on {device}. Leave it out.")
        for source in filter(None, (options.data, options.eval_data)):
            check_source(source)
        return _run_in(folder, options, work, decides)


def _run_in(folder: Path, options: argparse.Namespace, work: Work, decides: bool) -> int:
    import torch

    from secateur.integrations.evaluation import check_context, task_for
    from secateur.integrations.folder import load, saved_bytes
    from secateur.model.masks import share_of_zeros
    from secateur.oneshot.batches import check_ids
    from secateur.progress import Stages

    device = device_for(options)
    stages = Stages(torch.device(device), show=True)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    with stages.stage("load"):
        model, tokenizer = load(options.model, dtype=dtype, device=None if options.stream else device, packed=False)
    task = task_for(model, tokenizer)
    check_room(folder, saved_bytes(model))
    calibration, decisions, evaluation = _texts(options, tokenizer, torch.device(device).type, decides)
    check_context(model, calibration.shape[1])
    check_ids(model, [calibration])
    moved = _crossing(model, task.batches(calibration[:1], 1)[0], device) if options.stream else nullcontext
    judge = Judge(model, tokenizer, task, evaluation, options, stages, moved)
    zeros, sparse = share_of_zeros(model)
    before = judge("before")
    gauge = Gauge(judge, decisions, "the text that decides")
    if not decides:
        gauge = Gauge(judge, evaluation, "held-out text", before=before[0][1])
    outcome = work(model, task.batches(calibration, options.batch), gauge)
    after = judge("after", gauge.after)
    found = Verdict(
        task.measure, before[0][1], after[0][1], outcome.sparsity, vocabulary_of(model),
        base="before" if sparse else "dense", already=zeros if sparse else 0.0, asked=options.sparsity,
    )  # fmt: skip
    if decides:
        found = replace(found, advice="Allow less (--max-drop), or decide on more text (--evaluation).")
    outcome = replace(
        outcome, found=(*before, *after, *outcome.found), stages=(*stages.done, *outcome.stages),
        notes=(*found.warnings, *outcome.notes),
    )  # fmt: skip
    _finish(folder, options, model, tokenizer, outcome, found)
    return 0


def _finish(
    folder: Path, options: argparse.Namespace, model: Any, tokenizer: Any, outcome: Outcome, found: Verdict
) -> None:
    """Print the report, save the model with it, and end with the verdict."""
    from secateur.inference.card import CARD, model_card
    from secateur.report import render

    title = f"{options.model} pruned to {outcome.sparsity:.1%}"
    texts = {"report.md": f"# {title}\n\n{found}\n\n{outcome.to_markdown()}\n", "report.json": outcome.to_json() + "\n"}
    card = model_card(folder.name, model, report=outcome, command=options.invocation)
    texts |= {"report.html": render(title, outcome, str(found), found.warnings), CARD: card}
    print(outcome)  # before it is saved: should that fail, the figures are not lost
    _save(model, tokenizer, folder, outcome, texts, options.overwrite)
    print(f"\nSaved in {folder}: the model, masks.safetensors, report.md, report.json, report.html, README.md")
    for warning in found.warnings:
        print(f"secateur: warning: {warning}", file=sys.stderr)
    print(found)


@dataclass(frozen=True)
class Judge:
    """Evaluates the model on the held-out windows, and on lm-eval's tasks if asked."""

    model: Any
    tokenizer: Any
    task: Any
    evaluation: Tensor
    options: argparse.Namespace
    stages: Any
    moved: Callable[[], AbstractContextManager[None]]  # brings a streamed model to the device

    def __call__(self, when: str, figure: float | None = None) -> list[tuple[str, float]]:
        """Named figures, the perplexity or loss first; that is measured unless it is known, as `figure`."""
        from secateur.integrations.evaluation import lm_eval

        task, windows = self.task, self.evaluation
        figure = self.measured(windows, f"{task.measure} {when}") if figure is None else figure
        found = [(f"{task.measure} {when}, context {windows.shape[1]}, held-out text{task.how}", figure)]
        if self.options.eval:
            with self.moved():
                tasks = self.options.eval.removeprefix(HARNESS).split(",")
                answers = lm_eval(self.model, self.tokenizer, tasks)
            found += [(f"{name} {when}", value) for name, value in answers.items()]
        return found

    def measured(self, windows: Tensor, stage: str) -> float:
        """The perplexity or loss of the model as it is, on these windows."""
        from secateur.integrations.evaluation import reading

        with self.moved(), reading(self.model), self.stages.stage(stage, len(windows)) as tick:
            return float(self.task.judge(self.model, windows, batch=self.options.batch, progress=lambda *_: tick()))


@dataclass
class Gauge:
    """The perplexity or loss of the model on windows that do not calibrate; lower is better.

    The first call takes place before the model changes, and returns `before` if that is known. A work that has measured
    the model as it leaves it on the held-out text sets `after`.
    """

    judge: Judge
    windows: Tensor
    text: str  # what the windows are, in words
    before: float | None = None
    after: float | None = None

    def __call__(self) -> float:
        known, self.before = self.before, None
        return self.judge.measured(self.windows, str(self)) if known is None else known

    def __str__(self) -> str:
        return f"{self.judge.task.measure} on {self.text}"


Work = Callable[[Any, list[Any], Gauge], "Outcome"]


@dataclass(frozen=True)
class Verdict:
    """What pruning cost, in one line: "Perplexity: dense 27.2 -> 34.7 at 50 %: +27 %"."""

    measure: str  # "perplexity" or "loss"
    before: float
    after: float
    sparsity: float
    vocabulary: int | None  # number of tokens; None where unknown
    base: str = "dense"  # what `before` is the figure of
    advice: str = "Prune less (--sparsity), or try the recipe recommended and more calibration text."
    already: float = 0.0  # share of zeros before, and the sparsity asked for
    asked: float | None = None

    def __str__(self) -> str:
        arrow = f"{self.base} {_short(self.before)} -> {_short(self.after)} at {100 * self.sparsity:.3g} %"
        change = 100 * (self.after / self.before - 1) if self.before else math.nan
        digits = ".1f" if abs(change) < 9.95 else ",.0f"
        more = f": {change:+{digits}} %" if math.isfinite(change) else ""
        return f"{self.measure.capitalize()}: {arrow}{more}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the figures alone do not tell, in sentences."""
        if self.asked is None or self.already <= self.asked:
            return self._collapse()
        return (
            f"{100 * self.already:.3g} % of the weights were zero already, more than the {100 * self.asked:.3g} % asked"
            " for: zeros are kept, and little or nothing was left to prune.",
            *self._collapse(),
        )

    def _collapse(self) -> tuple[str, ...]:
        """A sentence if quality collapsed: perplexity more than doubled, or worse than guessing."""
        grown, limit = self._perplexity(self.after) / self._perplexity(self.before), self.vocabulary or math.inf
        advice = self.advice
        if not math.isfinite(self.after):
            return (f"Quality collapsed: the {self.measure} is {self.after}. {advice}",)
        if self._perplexity(self.after) > limit >= self._perplexity(self.before):
            return (f"Quality collapsed: worse than guessing uniformly among {limit:,} tokens. {advice}",)
        if grown > COLLAPSED:
            whose = "of the dense model" if self.base == "dense" else self.base
            return (f"Quality collapsed: the perplexity is {_short(grown)} times that {whose}. {advice}",)
        return ()

    def _perplexity(self, figure: float) -> float:
        return figure if self.measure == "perplexity" else math.exp(min(figure, 700.0))


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:#.3g}".rstrip(".")


def vocabulary_of(model: Any) -> int | None:
    """The number of tokens that a model knows; None where its config does not say."""
    found = getattr(getattr(model, "config", None), "vocab_size", None)
    return found if isinstance(found, int) else None


def _save(
    model: Any, tokenizer: Any, folder: Path, outcome: Outcome, texts: Mapping[str, str], overwrite: bool
) -> None:
    """Save the model; if the folder cannot be written after all, save it among temporary files and say so."""
    from secateur.integrations.folder import save

    try:
        save(model, tokenizer, folder, outcome.masks, texts, overwrite=overwrite)
        return
    except SaveError as error:
        failed = error
    other = Path(tempfile.gettempdir()) / f"secateur-{uuid.uuid4().hex[:8]}" / folder.name
    try:
        save(model, tokenizer, other, outcome.masks, texts)
    except SaveError as error:
        raise SaveError(f"{failed} Nothing is saved: {error} Free some space, and run it again.") from error
    raise SaveError(f"{failed} The pruned model is in {other} instead: move it from there.") from failed


def _crossing(model: Any, batch: Any, device: str) -> Callable[[], AbstractContextManager[None]]:
    import torch

    from secateur.model.prunable import find_prunable
    from secateur.oneshot.batches import standard_loss
    from secateur.oneshot.offload import offload_for

    prunables, _ = find_prunable(model)
    return offload_for(model, batch, standard_loss, prunables, torch.device(device)).active


def _texts(options: argparse.Namespace, tokenizer: Any, kind: str, decides: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Windows for calibration, for decisions (none unless it `decides`) and for evaluation, never the same text.

    Decisions are made on what follows the calibration, on as many windows as evaluate. Fills in the default batch.
    """
    from secateur.integrations.text import check_apart, read_text, split, windows

    context, some, others, batch = CPU if kind == "cpu" else GPU
    options.batch = options.batch or batch
    given = options.context, options.calibration, options.evaluation
    if None in given:
        print(
            f"secateur: on {kind} the defaults are windows of {context} tokens, {some} to calibrate on and {others} to"
            " evaluate on (--context, --calibration, --evaluation)",
            file=sys.stderr,
        )
    context, some, others = (own or usual for own, usual in zip(given, (context, some, others), strict=True))
    seen = some + others if decides else some  # what evaluates must not be among them
    text = read_text(options.data)
    if options.eval_data is None:
        first, evaluation = split(windows(tokenizer, text, context, seen + others), seen, others)
        return first[:some], first[some:], evaluation
    if options.eval_data == options.data:
        raise TextError("--eval-data is the text of --data. Leave it out: what follows the calibration evaluates.")
    first = windows(tokenizer, text, context, seen)
    evaluation = windows(tokenizer, read_text(options.eval_data), context, others)
    check_apart(first, evaluation)
    return first[:some], first[some:], evaluation
