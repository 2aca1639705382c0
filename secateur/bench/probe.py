"""Measure calibration on a large model: passes, the joint probe and five rounds of pruning, with time and memory.

The model has the shape asked for and random weights in bf16. First come forward and backward passes that fold every
gradient into a running maximum, for several batch sizes, with and without activation checkpointing; the fastest is
recommended for this device. Then come the jobs themselves, once with all memory and, on a GPU, once within --memory.

Example: secateur bench probe --shape tiny --sequences 4 --length 32 --batches 1 2 --device cpu
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.bench.measuring import synchronize
from secateur.errors import HF_EXTRA, FactError, SecateurError, library
from secateur.lab import record
from secateur.lab.monitor import Monitor
from secateur.model.prunable import find_prunable
from secateur.oneshot.batches import device_of as device_of_model
from secateur.oneshot.batches import standard_loss
from secateur.oneshot.blocks import find_blocks
from secateur.oneshot.gradients import GradientPass, gather_gradients
from secateur.oneshot.offload import MemoryPlan, activation_bytes, activation_checkpointing, as_bytes
from secateur.oneshot.probe import probe
from secateur.oneshot.prune import prune
from secateur.report import Outcome, text_table
from secateur.scores import resolve

MISTRAL_7B = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
}  # fmt: skip
TINY = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SHAPES = {"mistral-7b": MISTRAL_7B, "tiny": TINY}
DEVIATION = 0.02  # standard deviation of the weights, as in the config of the model
ROUNDS = 5


@dataclass(frozen=True)
class Job:
    """A function to time and its settings."""

    work: Callable[..., Outcome]
    settings: dict[str, Any]


def jobs_for(scores: Sequence[str], sparsity: float) -> dict[str, Job]:
    """The joint probe, and five rounds of pruning by each score."""
    rounds = {f"five rounds of {score}": Job(prune, {"rounds": ROUNDS, "score": score}) for score in scores}
    found = {"joint probe": Job(probe, {}), **rounds}
    return {name: Job(job.work, {**job.settings, "sparsity": sparsity}) for name, job in found.items()}


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device: torch.device = options.device
    todo = {} if options.quick else jobs_for([str(resolve(score)) for score in options.scores], options.sparsity)
    fitting = [batch for batch in options.batches if batch <= options.sequences]
    if not fitting:
        raise SecateurError(f"--batches are all larger than --sequences {options.sequences}. Pass a smaller batch.")
    model = build(SHAPES[options.shape], device, options.seed)
    draw = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(0, SHAPES[options.shape]["vocab_size"], (options.sequences, options.length), generator=draw)
    prunables, _ = find_prunable(model)
    passes = [time_passes(model, ids, batch, again) for batch in fitting for again in (False, True)]
    print(text_table(*passes_table(passes)), end="\n\n")
    timed = [one for one in passes if one["seconds"] is not None]
    if not timed:
        raise SecateurError(
            "No batch size fits into the memory of this device, even with activation checkpointing. Pass a smaller"
            " --length or --shape."
        )
    best = min(timed, key=lambda one: one["seconds_per_sequence"])
    print(f"Fastest here: batches of {best['batch']}, {_checkpointing(best)}.\n", flush=True)
    jobs: list[dict[str, Any]] = []
    data = {
        "seed": options.seed, "shape": options.shape, "sequences": options.sequences, "length": options.length,
        "sparsity": options.sparsity, "scores": options.scores,
        "prunable": sum(prunable.parameter.numel() for prunable in prunables),
        "passes": passes, "recommended": best, "jobs": jobs,
    }  # fmt: skip
    saved = record.save("probe", data, options, device)
    for job in todo.values():  # compile the kernels before anything is timed
        job.work(model, ids[:1, : min(64, options.length)], **job.settings)
    for memory in (None, options.memory) if device.type == "cuda" else (None,):
        for name, job in todo.items():
            jobs.append({"job": name, **measure_fitting(model, job, ids, best["batch"], memory, options.seed)})
            print(text_table(*jobs_table(jobs[-1:])), end="\n\n", flush=True)
            saved = record.save("probe", data, options, device)  # save after each, since the next may take long
    print(saved)
    return 0


def build(shape: dict[str, int], device: torch.device, seed: int = 0) -> nn.Module:
    """A model of this shape with random weights in bf16, made on the device."""
    transformers = library("transformers", "secateur bench probe", HF_EXTRA)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.manual_seed(seed)
        with device:
            model: nn.Module = transformers.MistralForCausalLM(transformers.MistralConfig(**shape))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


@torch.no_grad()
def make_dense(model: nn.Module, seed: int = 0) -> None:
    """Draw all prunable weights again, always the same ones."""
    prunables, _ = find_prunable(model)
    draw = torch.Generator(prunables[0].parameter.device).manual_seed(seed)
    for prunable in prunables:
        prunable.parameter.normal_(0, DEVIATION, generator=draw)


def time_passes(model: nn.Module, ids: Tensor, batch: int, again: bool) -> dict[str, Any]:
    """Time a few sequences forward and backward with gradients folded into a maximum; None where they do not fit.
    `again`: with activation checkpointing, which computes activations again."""
    prunables, _ = find_prunable(model)
    blocks = find_blocks(model, ids[:1], standard_loss, prunables) if again else []
    some = list(ids[: 2 * batch].split(batch))
    how = GradientPass(plan=MemoryPlan(torch.bfloat16))
    device = device_of_model(model)
    cuda = device.type == "cuda"
    found: dict[str, Any] = {"batch": batch, "again": again, "seconds": None, "seconds_per_sequence": None}
    try:
        with activation_checkpointing(blocks):
            gather_gradients(model, some[:1], prunables, {"gradient_max"}, how)  # warm
            synchronize(device)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            gather_gradients(model, some, prunables, {"gradient_max"}, how)
            synchronize(device)
            taken = time.perf_counter() - began
    except torch.OutOfMemoryError:
        gc.collect()
        return found | {"tokens_per_second": None, "peak_bytes": None, "activation_bytes": None}
    count = sum(len(part) for part in some)
    return found | {
        "seconds": taken,
        "seconds_per_sequence": taken / count,
        "tokens_per_second": count * ids.shape[1] / taken,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "activation_bytes": activation_bytes(model, some[0], standard_loss, prunables, blocks) if cuda else None,
    }


def measure_fitting(
    model: nn.Module, job: Job, ids: Tensor, batch: int, memory: str | None, seed: int
) -> dict[str, Any]:
    """Time a job with the largest batch size, up to this one, that fits."""
    while True:
        try:
            return measure(model, job, ids, batch, memory, seed)
        except (FactError, torch.OutOfMemoryError) as error:
            if batch == 1:
                raise
            print(f"batches of {batch} do not fit: {error}", flush=True)
        batch //= 2
        gc.collect()


def measure(model: nn.Module, job: Job, ids: Tensor, batch: int, memory: str | None, seed: int) -> dict[str, Any]:
    """Time a job from dense weights."""
    make_dense(model, seed)
    limit, cuda = as_bytes(memory), device_of_model(model).type == "cuda"
    if cuda and limit is not None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
    began = time.perf_counter()
    try:
        with Monitor(device_of_model(model), every=0.1) as monitor:
            outcome = job.work(model, list(ids.split(batch)), memory=memory, **job.settings)
    finally:
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.set_per_process_memory_fraction(1.0)
    seconds = time.perf_counter() - began
    return {
        "memory": memory,
        "batch": batch,
        "seconds": seconds,
        "tokens_per_second": ids.numel() / seconds,
        "utilisation": monitor.means().get("busy"),
        "peak_bytes": max((stage.peak_bytes for stage in outcome.stages if stage.peak_bytes), default=None),
        "stages": {stage.name: stage.seconds for stage in outcome.stages},
        "pruned": outcome.pruned,
        "prunable": outcome.prunable,
        "notes": list(outcome.notes),
        "selections": [update.seconds for update in outcome.updates],
    }


def _checkpointing(one: dict[str, Any]) -> str:
    return "checkpointed" if one["again"] else "kept"


def passes_table(passes: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of the passes."""
    header = ("batch, activations", "s per sequence", "tokens/s", "peak GB")
    rows = []
    for one in passes:
        name = f"{one['batch']}, {_checkpointing(one)}"
        if one["seconds"] is None:
            rows.append((name, "does not fit", "-", "-"))
            continue
        figures = f"{one['seconds_per_sequence']:.3f}", f"{one['tokens_per_second']:,.0f}"
        rows.append((name, *figures, "-" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 1e9:.1f}"))
    return header, rows


def jobs_table(jobs: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of the jobs."""
    header = ("job", "memory", "seconds", "tokens/s", "GPU busy", "peak GB", "sparsity", "where")
    rows = []
    for one in jobs:
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in one["stages"].items())
        peak = "-" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 1e9:.1f}"
        busy = "-" if one["utilisation"] is None else f"{one['utilisation']:.0f} %"
        figures = f"{one['seconds']:.1f}", f"{one['tokens_per_second']:,.0f}", busy, peak
        rows.append((one["job"], one["memory"] or "all", *figures, f"{one['pruned'] / one['prunable']:.4f}", spent))
    return header, rows
