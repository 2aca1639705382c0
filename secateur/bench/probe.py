"""What calibration costs on a large model: passes, the joint probe, and five rounds, with time and memory of each.

The model has the shape that is asked for and random weights in bf16. First, forward and backward passes with every
gradient folded into a running maximum, for several batch sizes, activations kept and made again: the quickest is
recommended for this card. Then the jobs themselves, once with all the memory there is and once within `--memory`.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.bench.measuring import add_device, device_of, positive
from secateur.errors import FactError, SecateurError, library
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
from secateur.report import text_table

MISTRAL_7B = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
}  # fmt: skip
TINY = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SHAPES = {"mistral-7b": MISTRAL_7B, "tiny": TINY}
DEVIATION = 0.02  # of the weights, as the model's own config has it
JOBS = {"joint probe": (probe, {}), "five rounds of variance": (prune, {"rounds": 5})}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--shape", choices=SHAPES, default="mistral-7b", help="(mistral-7b)")
    parser.add_argument("--sequences", type=positive, default=128, help="that calibrate (128)")
    parser.add_argument("--length", type=positive, default=2048, help="tokens in each (2048)")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 2, 4], help="batch sizes to try (1 2 4)")
    parser.add_argument("--memory", default="24GB", help="limit of the second turn (24GB)")
    parser.add_argument("--quick", action="store_true", help="the passes only, no jobs")
    record.add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device = device_of(options)
    model = build(SHAPES[options.shape], device)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SHAPES[options.shape]["vocab_size"], (options.sequences, options.length), generator=draw)
    sites, _ = find_prunable(model)
    passes = [
        passing(model, ids, batch, again) for batch in options.batches if batch <= len(ids) for again in (False, True)
    ]
    print(text_table(*passes_table(passes)), end="\n\n")
    fitting = [one for one in passes if one["seconds"] is not None]
    if not fitting:
        raise SecateurError("No batch fits into the memory of this device, not even with activations made again.")
    best = min(fitting, key=lambda one: one["seconds_per_sequence"])
    kept = "made again" if best["again"] else "kept"
    print(f"Recommended here: batches of {best['batch']}, activations {kept}.\n", flush=True)
    jobs: list[dict[str, Any]] = []
    data = {
        "seed": 0, "shape": options.shape, "sequences": options.sequences, "length": options.length,
        "prunable": sum(site.parameter.numel() for site in sites), "passes": passes, "recommended": best, "jobs": jobs,
    }  # fmt: skip
    saved = record.save("probe", data, options, device)
    if not options.quick:
        for work, settings in JOBS.values():  # kernels are compiled before a clock runs
            work(model, ids[:1, : min(64, options.length)], **settings)  # type: ignore[operator]
    for memory in () if options.quick else (None, options.memory):
        for name in JOBS:
            jobs.append(fitting_job(model, name, ids, best["batch"], memory))
            print(text_table(*jobs_table(jobs[-1:])), end="\n\n", flush=True)
            saved = record.save("probe", data, options, device)  # each time: the next may take long
    print(saved)
    return 0


def build(shape: dict[str, int], device: torch.device) -> nn.Module:
    """A model of this shape with random weights in bf16, made where it is to be."""
    transformers = library("transformers", "secateur bench probe", '"secateur[hf]"')
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.manual_seed(0)
        with device:
            model: nn.Module = transformers.MistralForCausalLM(transformers.MistralConfig(**shape))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


@torch.no_grad()
def make_dense(model: nn.Module) -> None:
    """Draw all weights that can be pruned anew, always the same."""
    sites, _ = find_prunable(model)
    draw = torch.Generator(sites[0].parameter.device).manual_seed(0)
    for site in sites:
        site.parameter.normal_(0, DEVIATION, generator=draw)


def passing(model: nn.Module, ids: Tensor, batch: int, again: bool) -> dict[str, Any]:
    """A few sequences forward and backward with the maximum folded in; None for the times where it does not fit."""
    sites, _ = find_prunable(model)
    blocks = find_blocks(model, ids[:1], standard_loss, sites) if again else []
    some = list(ids[: 2 * batch].split(batch))
    how = GradientPass(plan=MemoryPlan(torch.bfloat16))
    cuda = device_of_model(model).type == "cuda"
    found: dict[str, Any] = {"batch": batch, "again": again, "seconds": None, "seconds_per_sequence": None}
    try:
        with activation_checkpointing(blocks):
            gather_gradients(model, some[:1], sites, {"gradient_max"}, how)  # warm
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            gather_gradients(model, some, sites, {"gradient_max"}, how)
            if cuda:
                torch.cuda.synchronize()
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
        "activation_bytes": activation_bytes(model, some[0], standard_loss, sites, blocks) if cuda else None,
    }


def fitting_job(model: nn.Module, name: str, ids: Tensor, batch: int, memory: str | None) -> dict[str, Any]:
    """One job, with the largest batches up to this size that fit."""
    while True:
        try:
            return job(model, name, ids, batch, memory)
        except (FactError, torch.OutOfMemoryError) as error:
            if batch == 1:
                raise
            print(f"batches of {batch} do not fit: {error}", flush=True)
        batch //= 2
        gc.collect()


def job(model: nn.Module, name: str, ids: Tensor, batch: int, memory: str | None) -> dict[str, Any]:
    """One job from dense weights."""
    work, settings = JOBS[name]
    make_dense(model)
    limit, cuda = as_bytes(memory), device_of_model(model).type == "cuda"
    if cuda and limit is not None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
    began = time.perf_counter()
    try:
        with Monitor(device_of_model(model), every=0.1) as monitor:
            outcome = work(model, list(ids.split(batch)), memory=memory, **settings)  # type: ignore[operator]
    finally:
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.set_per_process_memory_fraction(1.0)
    seconds = time.perf_counter() - began
    return {
        "job": name,
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


def passes_table(passes: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of the passes."""
    header = ("batch, activations", "s a sequence", "tokens/s", "peak GB")
    rows = []
    for one in passes:
        name = f"{one['batch']}, {'made again' if one['again'] else 'kept'}"
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
