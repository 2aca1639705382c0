"""`secateur prune` and `secateur probe`: load, calibrate, prune, judge on other text, report, save."""

from __future__ import annotations

import argparse
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.bench.measuring import positive
from secateur.errors import SaveError, SecateurError, TextError
from secateur.files import check_folder, check_room, claimed
from secateur.integrations import transformers
from secateur.integrations.text import SOURCES
from secateur.integrations.transformers import check_free, saved_bytes
from secateur.model.prunable import find_prunable
from secateur.oneshot.batches import check_ids, standard_loss
from secateur.oneshot.offload import offload_for
from secateur.oneshot.probe import ORDERS, probe
from secateur.oneshot.prune import NAMED, RECOMMENDED, prune, read_recipe
from secateur.progress import Stages
from secateur.report import Outcome, render
from secateur.schedules import check_sparsity
from secateur.scores import resolve
from secateur.selection.tiles import parse_pattern

# Context and windows that calibrate and evaluate, unless told: what takes minutes on such a device.
SIZES = {"cuda": (1024, 128, 256), "cpu": (256, 16, 16)}
BATCH = {"cuda": 8, "cpu": 1}  # a GPU waits for Python where batches are small
HARNESS = "lm-eval:"


def add_shared(parser: argparse.ArgumentParser) -> None:
    """What both commands take."""
    parser.add_argument("model", help="a folder, a name on the Hugging Face hub, or smollm2")
    parser.add_argument("--data", default="builtin", help=f"text that calibrates: {SOURCES} (builtin)")
    parser.add_argument("--eval-data", help="text that evaluates (what follows the calibration in --data)")
    parser.add_argument("--sparsity", type=float, help="share of the prunable weights that goes (0.5)")
    parser.add_argument("--context", type=positive, help="tokens in a window")
    parser.add_argument("--calibration", type=positive, metavar="N", help="windows that calibrate")
    parser.add_argument("--evaluation", type=positive, metavar="N", help="windows that evaluate")
    parser.add_argument("--batch", type=positive, help="windows at a time (8 on a GPU, 1 on a CPU)")
    parser.add_argument("--memory", help="limit of GPU memory, such as 24GB (what is free)")
    parser.add_argument("--skip", nargs="+", default=[], metavar="GLOB", help="parameters or modules to leave dense")
    parser.add_argument("--only", nargs="+", metavar="GLOB", help="prune these alone")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument(
        "--stream",
        action="store_true",
        help="leave the model in host memory, or in its file, and bring"
        " one block at a time to the device: for models larger than a GPU",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (as stored)")
    parser.add_argument("--eval", metavar="lm-eval:TASKS", help="tasks of EleutherAI's harness too, before and after")
    parser.add_argument("--out", type=Path, help="folder for the pruned model, its masks and report (pruned-MODEL)")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it is there")


def add_prune(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    parser.add_argument("--recipe", default=RECOMMENDED, help=f"{', '.join(NAMED)}, or a .toml file ({RECOMMENDED})")
    parser.add_argument("--pattern", help="2:4, 4:8, block:RxC: shape of the zeros")
    parser.set_defaults(run=run_prune)


def add_probe(parser: argparse.ArgumentParser) -> None:
    add_shared(parser)
    parser.add_argument("--score", default="wanda", help="that proposes candidates (wanda)")
    parser.add_argument("--order", choices=ORDERS, default="joint", help="all layers at once, or one after another")
    parser.add_argument("--group", default="1", help="layers probed together: a number, or block (1)")
    parser.add_argument("--tolerance", type=float, default=0.0, help="by how much a gradient may grow (0)")
    parser.add_argument("--shrink", type=float, default=0.1, help="what candidates are multiplied with (0.1)")
    parser.add_argument("--exact", action="store_true", help="meet the sparsity: rank candidates by gradient growth")
    parser.set_defaults(run=run_probe)


def run_prune(options: argparse.Namespace) -> int:
    """The command `secateur prune`."""
    recipe = asdict(read_recipe(options.recipe))
    told = {"pattern": options.pattern, "skip": options.skip, "only": options.only}
    recipe |= {key: value for key, value in told.items() if value}
    pattern = parse_pattern(recipe["pattern"])
    follows = pattern is not None and pattern.sparsity is not None
    sparsity = 0.5 if options.sparsity is None and not follows else options.sparsity

    def work(model: Any, batches: list[Any]) -> Outcome:
        return prune(
            model, batches, sparsity=sparsity, memory=options.memory, device=_device(options), progress=True, **recipe
        )

    return _run(options, work)


def run_probe(options: argparse.Namespace) -> int:
    """The command `secateur probe`."""
    if options.group != "block" and not options.group.isdigit():
        raise SecateurError(f"--group is a number of layers, or block; got {options.group!r}.")
    group = options.group if options.group == "block" else int(options.group)
    resolve(options.score)

    def work(model: Any, batches: list[Any]) -> Outcome:
        return probe(
            model, batches, score=options.score, sparsity=0.5 if options.sparsity is None else options.sparsity,
            order=options.order, group=group, tolerance=options.tolerance, shrink=options.shrink, exact=options.exact,
            skip=options.skip, only=options.only, memory=options.memory, device=_device(options), progress=True,
        )  # fmt: skip

    return _run(options, work)


def _run(options: argparse.Namespace, work: Callable[[Any, list[Any]], Outcome]) -> int:
    """Check and claim the folder, then do the work: nothing long is done for a folder that cannot be written."""
    folder = options.out or Path(f"pruned-{Path(options.model).name}")
    with claimed(folder):
        check_free(folder, options.overwrite)
        if folder.exists() and folder.resolve() == Path(options.model).resolve():
            raise SecateurError(f"--out {folder} would replace the model that is pruned. Name another folder.")
        check_folder(folder)
        return _run_in(folder, options, work)


def _run_in(folder: Path, options: argparse.Namespace, work: Callable[[Any, list[Any]], Outcome]) -> int:
    if options.sparsity is not None:
        check_sparsity(options.sparsity)
    if options.eval and not options.eval.startswith(HARNESS):
        raise SecateurError(f"--eval {options.eval} is not known. Write {HARNESS}TASK or {HARNESS}TASK,TASK.")
    tasks = options.eval.removeprefix(HARNESS).split(",") if options.eval else []
    device = _device(options)
    options.batch = options.batch or BATCH[torch.device(device).type]
    dtype = getattr(torch, options.dtype) if options.dtype else None
    stages = Stages(torch.device(device), show=True)
    with stages.stage("load"):
        model, tokenizer = transformers.load(options.model, dtype=dtype, device=None if options.stream else device)
    task = transformers.task_for(model, tokenizer)
    check_room(folder, saved_bytes(model))
    calibration, evaluation = _texts(options, tokenizer, torch.device(device).type)
    transformers.check_context(model, calibration.shape[1])
    check_ids(model, [calibration])
    found = []
    crossing = _crossing(model, task.batches(calibration[:1], 1)[0], device) if options.stream else nullcontext
    for when in ("before", "after"):
        if when == "after":
            outcome = work(model, task.batches(calibration, options.batch))
        with crossing(), transformers.reading(model), stages.stage(f"{task.measure} {when}", len(evaluation)) as tick:
            figure = task.judge(model, evaluation, batch=options.batch, progress=lambda *_: tick())
        found.append((f"{task.measure} {when}, context {calibration.shape[1]}, held-out text{task.how}", figure))
        if tasks:
            with crossing():
                answers = transformers.lm_eval(model, tokenizer, tasks)
            found += [(f"{name} {when}", value) for name, value in answers.items()]
    outcome = replace(outcome, found=(*found, *outcome.found), stages=(*stages.done, *outcome.stages))
    title = f"{options.model} pruned to {outcome.sparsity:.1%}"
    texts = {"report.md": f"# {title}\n\n{outcome.to_markdown()}\n", "report.json": outcome.to_json() + "\n"}
    texts |= {"report.html": render(title, outcome)}
    print(outcome)  # before it is saved: should that fail, the figures are told
    _save(model, tokenizer, folder, outcome, texts, options.overwrite)
    print(f"\nSaved in {folder}: the model, masks.safetensors, report.md, report.json, report.html")
    return 0


def _save(
    model: Any, tokenizer: Any, folder: Path, outcome: Outcome, texts: Mapping[str, str], overwrite: bool
) -> None:
    """Save the model; if the folder cannot be written after all, save it among temporary files, and say so."""
    try:
        transformers.save(model, tokenizer, folder, outcome.masks, texts, overwrite=overwrite)
        return
    except SaveError as error:
        failed = error
    other = Path(tempfile.gettempdir()) / f"secateur-{uuid.uuid4().hex[:8]}" / folder.name
    try:
        transformers.save(model, tokenizer, other, outcome.masks, texts)
    except SaveError as error:
        raise SaveError(f"{failed} Nothing is saved: {error} Free some space, and run it again.") from error
    raise SaveError(f"{failed} The pruned model is in {other} instead: move it from there.") from failed


def _device(options: argparse.Namespace) -> str:
    there = torch.cuda.is_available()
    if options.device == "cuda" and not there:
        raise SecateurError("--device cuda: there is no CUDA device here. Use --device cpu.")
    device = "cuda" if there and options.device != "cpu" else "cpu"
    return f"{device}:0" if options.stream else device  # named, so that it is another than where the model is


def _crossing(model: Any, batch: Any, device: str) -> Callable[[], AbstractContextManager[None]]:
    sites, _ = find_prunable(model)
    return offload_for(model, batch, standard_loss, sites, torch.device(device)).active


def _texts(options: argparse.Namespace, tokenizer: Any, device: str) -> tuple[Tensor, Tensor]:
    """Windows that calibrate and windows that evaluate; never the same text."""
    context, some, others = SIZES[device]
    told = options.context, options.calibration, options.evaluation
    if None in told:
        print(
            f"secateur: {device}, so by default windows of {context} tokens, {some} that calibrate and {others} that"
            " evaluate (--context, --calibration, --evaluation)",
            file=sys.stderr,
        )
    context, some, others = (mine or usual for mine, usual in zip(told, (context, some, others), strict=True))
    text = transformers.read_text(options.data)
    if options.eval_data is None:
        return transformers.split(transformers.windows(tokenizer, text, context, some + others), some, others)
    if options.eval_data == options.data:
        raise TextError("--eval-data is the text of --data. Leave it out: what follows the calibration evaluates.")
    calibration = transformers.windows(tokenizer, text, context, some)
    evaluation = transformers.windows(tokenizer, transformers.read_text(options.eval_data), context, others)
    transformers.check_apart(calibration, evaluation)
    return calibration, evaluation
