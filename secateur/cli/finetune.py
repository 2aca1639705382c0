"""Fine-tune a language model on a text while it becomes sparse, evaluate it on other text, and save it.

--how gradual prunes while it trains, oneshot prunes first and trains what is left, hold keeps the zeros of a model that
is sparse already. With --distill the loss is the distance to the dense model's predictions. The same command continues
a run that was interrupted. With several GPUs: accelerate launch -m secateur finetune ...
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.cli.options import (
    MODELS,
    TEXTS,
    add_device,
    add_out,
    add_seed,
    add_sparsity,
    add_tracker,
    check_other,
    check_tracker,
    context_length,
    import_torch,
    number,
    positive,
    training_on_cpu,
)
from secateur.cli.prune import RECOMMENDED, Verdict, read_recipe, vocabulary_of
from secateur.errors import HF_EXTRA, ModelError, SecateurError, library
from secateur.files import check_folder, claimed
from secateur.schedules import check_sparsity

if TYPE_CHECKING:
    from secateur.integrations.finetune import Adapters, Plan, Result

SUMMARY = "fine-tune a model on a text while it becomes sparse"
EXAMPLE = "secateur finetune smollm2 --data builtin --sparsity 0.8 --steps 300 --out smollm2-80"
HOW = ("gradual", "oneshot", "hold")
KINDS = ("gradient", "random")  # of regrowth; not imported, because that would import torch
# Default context, evaluation windows, calibration windows and batch.
CPU, GPU = (256, 16, 16, 4), (1024, 256, 128, 16)
STEPS, SPARSITY, RATE, LORA_RATE, RANK = 300, 0.8, 1e-3, 2e-4, 16
ADVICE = "Prune less (--sparsity), train for more steps (--steps), or try another --lr."
ALPHA = 0.9  # with 1 the gradient is noise until something is pruned, and Adam's state with it


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODELS)
    parser.add_argument("--data", required=True, help=f"text to train on: {TEXTS}; a dataset is streamed")
    parser.add_argument("--eval-data", help="text to evaluate on (the first windows of --data, which never train)")
    add_sparsity(parser, f"{SPARSITY}; none with --how hold")
    parser.add_argument("--how", choices=HOW, default=HOW[0], help="when to prune (gradual: while training)")
    parser.add_argument("--score", help="the score to prune by; see secateur scores (variance)")
    parser.add_argument(
        "--regrow",
        choices=KINDS,
        help="while it is pruned, let pruned weights come back: by gradient (RigL), or random",
    )
    parser.add_argument(
        "--distill",
        action=argparse.BooleanOptionalAction,
        help="learn the dense model's predictions instead of the text alone (yes, unless zeros are held)",
    )
    parser.add_argument(
        "--alpha",
        type=_share,
        help=f"share of the dense model's predictions in the loss, the rest is the text ({ALPHA})",
    )
    parser.add_argument("--teacher", metavar="MODEL", help="the model to distill from (MODEL as it is before)")
    _add_training(parser)
    add_out(parser, "folder for the model, its masks and reports (finetuned-MODEL)")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")


def _add_training(parser: argparse.ArgumentParser) -> None:
    """The options that say how long and on what it trains."""
    context, evaluation, calibration, batch = (
        f"{gpu} on a GPU, {cpu} on a CPU" for gpu, cpu in zip(GPU, CPU, strict=True)
    )
    parser.add_argument(
        "--lora", action="store_true", help=f"train LoRA adapters of rank {RANK} that keep the zeros, then merge them"
    )
    parser.add_argument("--steps", type=positive, help=f"optimizer steps ({STEPS})")
    parser.add_argument("--tokens", type=positive, metavar="N", help="train on so many tokens, instead of --steps")
    parser.add_argument("--lr", type=_rate, help=f"highest learning rate ({RATE}; {LORA_RATE} with --lora)")
    parser.add_argument("--batch", type=positive, help=f"windows at a time, in each process ({batch})")
    parser.add_argument("--accumulate", type=positive, default=1, metavar="N", help="batches in an optimizer step (1)")
    parser.add_argument("--context", type=context_length, help=f"tokens in a window ({context})")
    parser.add_argument(
        "--calibration", type=positive, metavar="N", help=f"windows to prune on, with --how oneshot ({calibration})"
    )
    parser.add_argument("--evaluation", type=positive, metavar="N", help=f"windows to evaluate on ({evaluation})")
    add_seed(parser)
    add_device(parser)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights while they train (float32)"
    )
    parser.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, help="mixed precision (where a GPU supports it)"
    )
    add_tracker(parser, "none")
    parser.add_argument(
        "--checkpoint-every", type=positive, default=100, metavar="STEPS", help="steps between checkpoints (100)"
    )


def _rate(text: str) -> float:
    return number(text, lambda rate: 0 < rate < 10, "a positive number such as 1e-3")


def _share(text: str) -> float:
    return number(text, lambda share: 0 < share <= 1, "a number above 0 and up to 1")


def run(options: argparse.Namespace) -> int:
    _check(options)
    import_torch()
    from secateur.integrations.text import check_source

    for text in filter(None, (options.data, options.eval_data)):
        check_source(text)
    for name in ("transformers", "accelerate"):
        library(name, "Fine-tuning", HF_EXTRA)
    if options.lora:
        library("peft", "--lora", '"secateur[peft]"')
    from secateur.integrations.folder import check_free, check_model

    _check_score(options)
    for model in filter(None, (options.model, options.teacher)):
        check_model(model)

    folder = options.out or Path(f"finetuned-{Path(options.model).name}")
    # torchrun and accelerate start this command in every process; the first one owns the folder.
    with claimed(folder) if os.environ.get("RANK", "0") == "0" else nullcontext():
        check_free(folder, options.overwrite)
        check_other(folder, options.model, "fine-tuned")
        check_folder(folder)
        return _run_in(folder, options)


def _check(options: argparse.Namespace) -> None:
    """Refuse what contradicts itself or would do nothing."""
    if options.sparsity is not None:
        check_sparsity(options.sparsity)
    if options.steps is not None and options.tokens is not None:
        raise SecateurError("--steps and --tokens both say how long to train. Give one of them.")
    for name in ("teacher", "alpha"):
        if getattr(options, name) is not None and options.distill is False:
            raise SecateurError(f"--{name} is for distillation, and --no-distill turns it off. Leave one of them out.")
    if options.how == "hold":
        _check_hold(options)
    if options.how == "gradual" and options.calibration is not None:
        raise SecateurError("--calibration is for --how oneshot; gradual pruning reads the optimizer's state.")
    if options.how != "gradual" and options.regrow is not None:
        raise SecateurError(f"--regrow is for --how gradual: with {options.how} the zeros stay where they are.")
    if options.how == "gradual" and options.lora:
        raise SecateurError("--lora trains adapters on a pruned model. Use --how oneshot, or hold for a sparse model.")
    check_tracker(options.tracker)


def _check_score(options: argparse.Namespace) -> None:
    """Refuse a score that is not known, or that reads what there is not at the time of pruning."""
    from secateur.model.facts import ADAM_FACTS, check_needs
    from secateur.oneshot.calibration import check_calibrated
    from secateur.scores import resolve

    score = resolve(options.score or "variance")
    if options.how == "gradual":
        check_needs(score, ADAM_FACTS, "while training (--how oneshot has it)")
    else:
        check_calibrated(score)


def _check_hold(options: argparse.Namespace) -> None:
    given = [name for name in ("sparsity", "score", "calibration") if getattr(options, name) is not None]
    if given:
        raise SecateurError(f"--how hold keeps the zeros that the model has: --{given[0]} would do nothing.")
    if (options.distill or options.alpha is not None) and options.teacher is None:
        raise SecateurError("--how hold has no dense model to distill from. Name one with --teacher.")


def _plan(options: argparse.Namespace, kind: str, processes: int) -> Plan:
    """The options with all defaults filled in."""
    import torch

    from secateur.integrations.finetune import Plan

    context, evaluation, calibration, batch = CPU if kind == "cpu" else GPU
    context, batch = options.context or context, options.batch or batch
    hold = options.how == "hold"
    steps = options.steps or STEPS
    if options.tokens is not None:
        steps = -(-options.tokens // (context * batch * options.accumulate * processes))
    sparsity = SPARSITY if options.sparsity is None else options.sparsity
    score = options.score or "variance"
    return Plan(
        model=options.model, data=options.data, eval_data=options.eval_data, how=options.how,
        sparsity=None if hold else sparsity, score=score,
        recipe=asdict(read_recipe(RECOMMENDED)) | {"score": score} if options.how == "oneshot" else {},
        distill=options.distill if options.distill is not None else options.teacher is not None or not hold,
        alpha=options.alpha or ALPHA, teacher=options.teacher, lora=options.lora, steps=steps, batch=batch,
        accumulate=options.accumulate, context=context, calibration=options.calibration or calibration,
        evaluation=options.evaluation or evaluation,
        lr=options.lr or (LORA_RATE if options.lora else RATE), seed=options.seed or 0,
        dtype=options.dtype or "float32",
        bf16=options.bf16 if options.bf16 is not None else kind == "cuda" and torch.cuda.is_bf16_supported(),
        pruning={"regrow": options.regrow} if options.regrow else {},
    )  # fmt: skip


def _notice(options: argparse.Namespace, kind: str) -> str | None:
    """The sizes that depend on the device, where one of them was not given."""
    if None not in (options.context, options.evaluation, options.batch):
        return None
    context, evaluation, _, batch = CPU if kind == "cpu" else GPU
    return (
        f"secateur: on {kind} the defaults are windows of {context} tokens, {batch} at a time, {evaluation} to evaluate"
        " on (--context, --batch, --evaluation)"
    )


def _run_in(folder: Path, options: argparse.Namespace) -> int:
    import torch

    from secateur.integrations.finetune import Execution, finetune, world_size
    from secateur.integrations.finetune_checkpoints import remove_checkpoints

    on_cpu = training_on_cpu(options.device)
    kind = "cpu" if on_cpu or not torch.accelerator.is_available() else str(torch.accelerator.current_accelerator())
    plan = _plan(options, kind, world_size(on_cpu))
    execution = Execution(
        folder=folder.with_name(f"{folder.name}.checkpoints"), on_cpu=kind == "cpu",
        checkpoint_every=options.checkpoint_every, tracker=None if options.tracker == "none" else options.tracker,
        adapters=_adapters if options.lora else None, notice=_notice(options, kind),
    )  # fmt: skip
    if execution.tracker == "tensorboard":  # Trainer would write into the folder of checkpoints, which goes
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder.with_name(f"{folder.name}.tensorboard")))
    result = finetune(plan, execution)
    if result is None:  # not the main process
        return 0
    _save(folder, plan, result, options)
    remove_checkpoints(execution.folder)
    return 0


def _adapters(model: Any) -> Adapters:
    """LoRA on every linear layer but the output, masked by the zeros of the weights. Layers that cannot be masked, such
    as stacked experts, get none."""
    import peft

    from secateur.integrations.finetune import Adapters
    from secateur.integrations.peft import keep_zeros, maskable_layers

    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    try:
        config.target_modules = maskable_layers(model, config)
    except ValueError as error:  # PEFT knows models that it cannot adapt
        raise _not_adapted(model, str(error)) from error
    if not config.target_modules:
        raise _not_adapted(model, "none of its layers can have an adapter that keeps zeros.")
    return Adapters(lambda pruned: keep_zeros(peft.get_peft_model(pruned, config)), _left_out(model, config))


def _not_adapted(model: Any, why: str) -> ModelError:
    return ModelError(f"{type(model).__name__} cannot be trained with --lora: {why} Leave out --lora.")


def _left_out(model: Any, config: Any) -> str | None:
    """The prunable weights without an adapter, in a sentence."""
    from secateur.model.prunable import find_prunable
    from secateur.report import collapse

    found = find_prunable(model)[0]
    without = [one for one in found if one.name.removesuffix(".weight") not in config.target_modules]
    if not without:
        return None
    share = sum(one.parameter.numel() for one in without) / sum(one.parameter.numel() for one in found)
    names = ", ".join(row[0] for row in collapse([(one.name,) for one in without], least=2))
    return f"LoRA adapters cannot be masked on {share:.0%} of the prunable weights, so those do not train: {names}."


def _save(folder: Path, plan: Plan, result: Result, options: argparse.Namespace) -> None:
    from secateur.inference.card import CARD, model_card
    from secateur.integrations.finetune_page import figures, to_html, to_json, to_markdown
    from secateur.integrations.folder import save
    from secateur.report import text_table

    vocabulary = vocabulary_of(result.model)
    found = Verdict(
        result.measure, result.before, result.after, result.report.sparsity, vocabulary, result.base, ADVICE
    )
    title = f"{options.model} fine-tuned at {result.report.sparsity:.1%} sparsity"
    lines = (str(found), *found.warnings)
    texts = {
        "report.md": to_markdown(title, lines, plan, result, options.invocation),
        "report.json": to_json(lines, plan, result, options.invocation),
        "report.html": to_html(title, lines, plan, result, options.invocation),
    }
    measures = [
        (f"held-out {result.measure}, {result.base}", result.before),
        (f"{result.measure}, fine-tuned", result.after),
    ]
    texts[CARD] = model_card(
        folder.name, result.model, report=result.report, measures=measures, command=options.invocation
    )
    # Before it is saved: should that fail, the figures are not lost.
    print(text_table(("", "value"), figures(plan, result)))
    for note in result.notes:
        print(note)
    save(result.model, result.tokenizer, folder, result.masks, texts, overwrite=options.overwrite)
    print(f"\nSaved in {folder}: the model, masks.safetensors, report.md, report.json, report.html, README.md")
    for warning in found.warnings:
        print(f"secateur: warning: {warning}", file=sys.stderr)
    print(found)
