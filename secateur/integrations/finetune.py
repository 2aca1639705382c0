"""Fine-tune a language model while it becomes, or stays, sparse: the work of `secateur finetune`.

Trainer does the training, so several processes, mixed precision, accumulation and trackers are its own. Checkpoints go
to a folder beside the one that the model is saved to; the same plan continues from the last complete one.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed
from transformers.trainer_callback import PrinterCallback

from secateur.errors import ModelError
from secateur.files import check_room, write
from secateur.integrations.distillation import DistillationTrainer, check_teacher
from secateur.integrations.evaluation import Task, check_context, is_causal, reading, task_for
from secateur.integrations.finetune_checkpoints import (
    BEFORE,
    CHECKPOINT,
    COMPLETE,
    PRUNED,
    Before,
    checksum_of_text,
    checksum_of_weights,
    claim_plan,
    has_work,
    read_before,
    remove_checkpoints,
    saying_if_full,
    step_of,
)
from secateur.integrations.finetune_data import Texts, Windows, read_texts
from secateur.integrations.folder import load, save, saved_bytes
from secateur.integrations.transformers import PrunerCallback
from secateur.model.masks import load_masks, share_of_zeros
from secateur.model.prunable import find_prunable
from secateur.oneshot.batches import check_ids
from secateur.oneshot.prune import prune
from secateur.progress import Stage, Stages
from secateur.pruner import Pruner
from secateur.report import Report

KEPT = 2  # checkpoints
EVALUATIONS = 5  # of the held-out windows while training
POINTS = 200  # of the loss in the history
PROMPT, ANSWER = 32, 48  # tokens of the texts that are generated before and after
TEXTS = 2  # such texts
ROUNDING = 1e-3  # by which the sparsity of a model may exceed the one it was pruned to


@dataclass(frozen=True)
class Plan:
    """What decides the result of a run; only the same plan can be continued."""

    model: str
    data: str
    eval_data: str | None
    how: str
    sparsity: float | None  # None: hold the zeros the model has
    score: str
    recipe: Mapping[str, Any]  # of secateur.prune, for "oneshot"
    distill: bool
    alpha: float  # share of the distance to the teacher in the loss; the rest is cross entropy
    teacher: str | None  # None: the model itself, as it is loaded
    lora: bool
    steps: int
    batch: int
    accumulate: int
    context: int
    calibration: int
    evaluation: int
    lr: float
    seed: int
    dtype: str  # of the weights while they train
    bf16: bool  # mixed precision
    pruning: Mapping[str, Any] = field(default_factory=dict)  # further settings of PrunerCallback, for "gradual"


@dataclass(frozen=True)
class Adapters:
    """What adds adapters that keep zeros to a pruned model, and a note on what they leave out."""

    add: Callable[[Any], Any]
    note: str | None = None


@dataclass(frozen=True)
class Execution:
    """Where and how a plan runs; it may differ when a run is continued."""

    folder: Path  # of the checkpoints
    on_cpu: bool
    checkpoint_every: int
    tracker: str | None
    adapters: Callable[[Any], Adapters] | None = None  # those for a model, asked before it is pruned
    notice: str | None = None  # to show once the model and the texts are there


@dataclass(frozen=True)
class Result:
    """What a run leads to. `before` is the figure of the model given, which `base` calls "dense", or "before" if it was
    sparse already."""

    model: Any
    tokenizer: Any
    report: Report
    masks: Mapping[str, Tensor]
    measure: str
    before: float
    after: float
    evaluated: int  # windows held out
    history: Sequence[Mapping[str, Any]]  # Trainer's log
    texts: Sequence[tuple[str, str, str]]  # prompt, what the model wrote before, and after
    stages: tuple[Stage, ...]
    notes: tuple[str, ...]
    base: str


def world_size(on_cpu: bool) -> int:
    """The number of processes that torchrun or accelerate started; connects them."""
    return TrainingArguments("unused", use_cpu=on_cpu, report_to="none").world_size


def finetune(plan: Plan, execution: Execution) -> Result | None:
    """Run a plan, or continue it; the result in the main process, None in the others."""
    args = _arguments(plan, execution)
    resumed = claim_plan(asdict(plan), execution.folder, args.process_index == 0)
    try:
        return _run(plan, execution, args, resumed)
    except Exception:
        if not has_work(execution.folder):  # a mistake, such as a text that is not there
            remove_checkpoints(execution.folder)
        raise


def _run(plan: Plan, execution: Execution, args: TrainingArguments, resumed: Path | None) -> Result | None:
    stages = Stages(args.device, show=args.process_index == 0)
    with stages.stage("load"):
        model, tokenizer = load(plan.model, packed=False)
    stored = model.dtype
    model = model.to(device=args.device, dtype=getattr(torch, plan.dtype))
    task = _checked_task(plan, model, tokenizer)
    check_room(execution.folder, _needed_bytes(plan, execution, model))
    texts = _texts(plan, tokenizer, args.world_size)
    check_context(model, plan.context)
    check_ids(model, [texts.calibration, texts.evaluation])
    sparse, notes = _checked_zeros(plan, model)
    adapters = None if execution.adapters is None else execution.adapters(model)
    if adapters is not None and adapters.note:
        notes = (*notes, adapters.note)
    if args.process_index == 0:
        for line in filter(None, (execution.notice, *notes)):
            print(line, file=sys.stderr)
    texts = replace(texts, notes=texts.notes + notes)
    job = _Job(plan, execution, args, stages, task, texts, tokenizer, sparse)
    teacher = job.teacher(model)
    before = job.before(model, teacher)
    callback = job.sparsify(model)
    if adapters is not None:
        set_seed(plan.seed)  # adapters begin at random
        model = adapters.add(model)
    trainer = job.trainer(model, teacher, callback)
    if resumed:
        _restore(model, resumed)
    with saying_if_full(execution.folder), stages.stage("fine-tune", plan.steps) as tick:
        trainer.add_callback(_Steps(tick))
        trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    return job.finish(trainer, callback, before, stored, resumed)


def _arguments(plan: Plan, execution: Execution) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(execution.folder),
        use_cpu=execution.on_cpu,
        max_steps=plan.steps,
        per_device_train_batch_size=plan.batch,
        per_device_eval_batch_size=plan.batch,
        gradient_accumulation_steps=plan.accumulate,
        learning_rate=plan.lr,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(plan.steps / 15)),
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=plan.bf16,
        seed=plan.seed,
        eval_strategy="steps",
        eval_steps=-(-plan.steps // EVALUATIONS),
        prediction_loss_only=True,
        logging_steps=-(-plan.steps // POINTS),
        save_strategy="steps",
        save_steps=execution.checkpoint_every,
        save_total_limit=KEPT,
        report_to=execution.tracker or "none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=not execution.on_cpu,
    )


def _checked_task(plan: Plan, model: Any, tokenizer: Any) -> Task:
    if not is_causal(model):
        raise ModelError(
            f"{type(model).__name__} is no causal language model, and the command line fine-tunes those alone. From"
            " Python: transformers.Trainer or DistillationTrainer with callbacks=[PrunerCallback(sparsity=...)]."
        )
    return task_for(model, tokenizer)


def _checked_zeros(plan: Plan, model: Any) -> tuple[bool, tuple[str, ...]]:
    """Whether the model is sparse already, and a note on what becomes of its zeros. Refuses what does not fit it."""
    share, sparse = share_of_zeros(model)
    if plan.how == "hold" and not share:
        raise ModelError(
            f"{plan.model} has no zeros to hold. Prune it first (secateur prune), or use --how gradual or oneshot."
        )
    if plan.how == "hold" or not sparse:
        return plan.how == "hold", ()
    already = f"{plan.model} is {share:.0%} sparse already"
    if plan.sparsity is not None and share > plan.sparsity + ROUNDING:
        raise ModelError(
            f"{already}, and --sparsity {plan.sparsity:g} asks for less. Ask for more, or keep its zeros: --how hold."
        )
    if plan.pruning.get("regrow"):
        raise ModelError(
            f"{already}, and --regrow would give up all of its zeros at the first step. Leave out --regrow, which keeps"
            " them, or fine-tune the dense model."
        )
    teacher = " It is also the teacher; name a dense one with --teacher." if plan.distill and not plan.teacher else ""
    return True, (f"{already}: its zeros stay, and pruning goes on from there.{teacher}",)


def _needed_bytes(plan: Plan, execution: Execution, model: Any) -> int:
    """The model, and its checkpoints: weights and two moments each, one more than are kept while one is written."""
    checkpoints = min(KEPT + 1, -(-plan.steps // execution.checkpoint_every))
    weights = saved_bytes(model)
    return weights * (1 + (plan.how == "oneshot") + (1 if plan.lora else 3 * checkpoints))


def _texts(plan: Plan, tokenizer: Any, processes: int) -> Texts:
    needed = plan.steps * plan.batch * plan.accumulate * processes
    return read_texts(
        tokenizer, plan.data, plan.eval_data, context=plan.context, needed=needed, calibration=plan.calibration,
        evaluation=plan.evaluation,
    )  # fmt: skip


@dataclass(frozen=True)
class _Job:
    """The stages of one run."""

    plan: Plan
    execution: Execution
    args: TrainingArguments
    stages: Stages
    task: Task
    texts: Texts
    tokenizer: Any
    sparse: bool  # the model was when it was loaded

    @property
    def main(self) -> bool:
        return bool(self.args.process_index == 0)

    def before(self, model: Any, teacher: Any) -> Before:
        """Evaluate the model as it was loaded, or read what an interrupted run found."""
        given = self._contents(model, teacher)
        found = read_before(self.execution.folder, given)
        if found is None:
            found = Before(self._judge(model, "before"), *self._write(model), given)
            if self.main:
                write(self.execution.folder / BEFORE, json.dumps(asdict(found)) + "\n")
        return found

    def _contents(self, model: Any, teacher: Any) -> dict[str, str]:
        """Checksums of what the run is given: what has the same name may have been replaced since it began."""
        plan, texts = self.plan, self.texts
        first = texts.calibration
        if isinstance(texts.train, Windows):  # as many as one process needs: there may be another number of them
            first = texts.train.rows[: plan.steps * plan.batch * plan.accumulate]
        held_out, trained = map(checksum_of_text, (texts.evaluation, first))
        found = {"text held out": held_out, "text to train on": trained, "model": checksum_of_weights(model)}
        return found | ({"teacher": checksum_of_weights(teacher)} if plan.teacher and teacher is not None else {})

    def teacher(self, model: Any) -> Any:
        """A frozen copy of the model as it was loaded, or the teacher that was named."""
        if not self.plan.distill:
            return None
        if self.plan.teacher:
            teacher, tokenizer = load(self.plan.teacher, packed=False)
            check_teacher(model, teacher, self.tokenizer, tokenizer)
            check_context(teacher, self.plan.context)
        else:
            teacher = copy.deepcopy(model)
        return teacher.to(torch.bfloat16) if self.plan.bf16 else teacher

    def sparsify(self, model: Any) -> PrunerCallback | None:
        """Prune once if asked; the callback that prunes or holds zeros from there on (adapters need none)."""
        plan = self.plan
        # Masks by name and not "zeros", which takes a tensor of zeros alone for one that is not pruned.
        if plan.how == "gradual":
            masks = _nonzero(model) if self.sparse else None
            return PrunerCallback(score=plan.score, sparsity=plan.sparsity, masks=masks, **plan.pruning)
        masks = self._prune_once(model) if plan.how == "oneshot" else _nonzero(model)
        return None if plan.lora else PrunerCallback(sparsity=None, masks=masks)

    def _prune_once(self, model: Any) -> dict[str, Tensor]:
        """Prune after training, or load what an interrupted run had pruned."""
        folder = self.execution.folder / PRUNED
        if folder.is_dir():
            model.load_state_dict(load(folder, dtype=model.dtype)[0].state_dict())
            return load_masks(folder)
        plan, several = self.plan, self.args.world_size > 1
        batches = self.task.batches(self.texts.calibration, plan.batch)
        outcome = prune(
            model, batches, sparsity=plan.sparsity, progress=self.main, distributed=True if several else None,
            **plan.recipe,
        )  # fmt: skip
        if self.main:
            save(model, self.tokenizer, folder, outcome.masks, {})
        return dict(outcome.masks)

    def trainer(self, model: Any, teacher: Any, callback: PrunerCallback | None) -> Trainer:
        options: dict[str, Any] = {
            "train_dataset": self.texts.train,
            "eval_dataset": Windows(self.texts.evaluation),
            "data_collator": default_data_collator,
            "callbacks": [] if callback is None else [callback],
        }
        model.config.use_cache = False
        if teacher is None:
            trainer = Trainer(model, self.args, **options)
        else:
            trainer = DistillationTrainer(model, self.args, teacher=teacher, alpha=self.plan.alpha, **options)
        if self.plan.lora and trainer.is_fsdp_enabled:
            raise ModelError("--lora does not work with FSDP. Use DDP: adapters need little memory.")
        trainer.remove_callback(PrinterCallback)  # it prints to stdout, where results go
        return trainer

    def finish(
        self, trainer: Trainer, callback: PrunerCallback | None, before: Before, stored: torch.dtype, resumed: Any
    ) -> Result | None:
        """Evaluate what was trained, in the dtype it is saved in."""
        model = self._trained(trainer)
        masks = self._masks(model, callback)
        if not self.main:
            return None
        model = model.to(stored).eval()
        model.config.use_cache = True
        after = self._judge(model, "after")
        written = self._write(model)[1]
        if callback is None:
            optimizer = torch.optim.SGD(model.parameters())
            report = Pruner(model, optimizer, masks=masks, sparsity=None).report()
        else:
            report = callback.report()
        notes = self.texts.notes
        if resumed:
            notes = (*notes, f"Continued from step {step_of(resumed)}.")
        return Result(
            model=model, tokenizer=self.tokenizer, report=report, masks=masks, measure=self.task.measure,
            before=before.figure, after=after, evaluated=len(self.texts.evaluation), history=trainer.state.log_history,
            texts=list(zip(before.prompts, before.written, written, strict=True)), stages=tuple(self.stages.done),
            notes=notes, base="before" if self.sparse else "dense",
        )  # fmt: skip

    def _trained(self, trainer: Trainer) -> Any:
        """The model alone and whole, with adapters merged."""
        if trainer.is_fsdp_enabled:
            state = trainer.accelerator.get_state_dict(trainer.model)  # whole in the main process, empty in others
            if self.main:
                whole = load(self.plan.model, packed=False)[0].to(getattr(torch, self.plan.dtype))
                whole.load_state_dict(state)
                return whole.to(self.args.device)
            return None
        model = trainer.accelerator.unwrap_model(trainer.model)
        return model.merge_and_unload().requires_grad_(True) if self.plan.lora else model

    def _masks(self, model: Any, callback: PrunerCallback | None) -> dict[str, Tensor]:
        """Whole masks; every process must ask, because shards are gathered."""
        if callback is None:
            return _nonzero(model)
        masks = callback.pruner.masks
        return {name: mask.full_tensor() if hasattr(mask, "full_tensor") else mask for name, mask in masks.items()}

    def _judge(self, model: Any, when: str) -> float:
        windows = self.texts.evaluation
        batches = -(-len(windows) // self.plan.batch)
        with reading(model), self.stages.stage(f"{self.task.measure} {when}", batches) as tick:
            return self.task.judge(model, windows, batch=self.plan.batch, progress=lambda *_: tick())

    @torch.no_grad()
    def _write(self, model: Any) -> tuple[list[str], list[str]]:
        """The beginnings of some held-out windows, and how the model continues them (greedy)."""
        if not model.can_generate():
            return [], []
        size = min(PROMPT, max(1, self.plan.context // 2))
        prompts = self.texts.evaluation[:: max(1, len(self.texts.evaluation) // TEXTS)][:TEXTS, :size].to(model.device)
        end = self.tokenizer.eos_token_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        with self.stages.stage("generate"):
            found = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False, pad_token_id=end or 0,
                max_new_tokens=min(ANSWER, max(1, self.plan.context - size)), max_length=None,
                temperature=None, top_p=None, top_k=None,
            )  # fmt: skip
        decode = self.tokenizer.batch_decode
        return decode(prompts, skip_special_tokens=True), decode(found[:, size:], skip_special_tokens=True)


def _restore(model: Any, checkpoint: Path) -> None:
    """Load the weights of a checkpoint. The Trainer does so by name, and leaves out without a word what transformers
    saves under other names, such as stacked experts. Adapters and shards of FSDP it loads itself."""
    if any(checkpoint.glob("model*.safetensors")):
        model.load_state_dict(type(model).from_pretrained(checkpoint, dtype=model.dtype).state_dict())


def _nonzero(model: Any) -> dict[str, Tensor]:
    return {one.name: one.parameter.detach() != 0 for one in find_prunable(model)[0]}


class _Steps(TrainerCallback):
    """Shows progress, and marks checkpoints that are written to their end."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        for _ in range(state.global_step):
            self._tick()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._tick()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if args.should_save:
            write(Path(args.output_dir) / f"{CHECKPOINT}{state.global_step}" / COMPLETE, "")
