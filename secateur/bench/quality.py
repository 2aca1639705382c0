"""Measure the perplexity of a language model pruned after training by every method, in one run.

The first third of the text calibrates, the rest evaluates. Every method starts from the same dense weights and sees the
same windows. Ratios of perplexity and of time are to SparseGPT at the same sparsity or pattern in the same run. The
sparsity that a probe reaches depends on the gradients; its score alone at that sparsity stands beside it.

Example: secateur bench quality --model smollm2 --text wiki.valid.raw --windows 30 --sparsity 0.5 --patterns
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from secateur.bench.measuring import ratio
from secateur.errors import SecateurError, nearest
from secateur.integrations import text
from secateur.integrations.evaluation import perplexity
from secateur.integrations.folder import load
from secateur.lab import record
from secateur.oneshot.probe import probe
from secateur.oneshot.prune import prune
from secateur.report import Outcome, text_table
from secateur.scores import resolve

RIVAL = "sparsegpt"


@dataclass(frozen=True)
class Method:
    """A way to prune: the function and its settings."""

    work: Callable[..., Outcome] = prune
    settings: dict[str, Any] = field(default_factory=dict)


PATTERNED = ("wanda", RIVAL, "repaired", "recommended")  # ends of the names of methods that also take a pattern


def methods_for(scores: Sequence[str]) -> dict[str, Method]:
    """Every method by name: those of each score, and those that have a score of their own."""
    found = {"magnitude": Method(settings={"score": "magnitude"}), "wanda": Method(settings={"score": "wanda"})}
    found[RIVAL] = Method(settings={"method": "sparsegpt"})
    for score in scores:
        found[score] = Method(settings={"score": score})
        found[f"{score}, 5 rounds"] = Method(settings={"score": score, "rounds": 5})
        found[f"{score}, 5 rounds, repaired"] = Method(settings={"score": score, "rounds": 5, "reconstruct": True})
    found["recommended"] = Method(settings={"rounds": 5, "reconstruct": "every"})
    found["probe, joint"] = Method(probe)
    found["probe, block by block"] = Method(probe, {"order": "reverse", "group": "block"})
    return found


def chosen_methods(options: argparse.Namespace) -> dict[str, Method]:
    """The methods asked for, by default all of them."""
    known = methods_for([str(resolve(score)) for score in options.scores])
    for name in options.methods or ():
        if name not in known:
            raise SecateurError(f"--methods {name} is not known.{nearest(name, known)} Known: {', '.join(known)}.")
    return {name: known[name] for name in options.methods or known}


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device: torch.device = options.device
    methods = chosen_methods(options)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, for every method and evaluation
    model, tokenizer = load(options.model, dtype=torch.float32, device=device, packed=False)
    read = text.windows(tokenizer, text.read_text(options.text), options.context, options.windows)
    calibration, evaluation = text.split(read)
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data: dict[str, Any] = {
        "seed": 0,
        "model": options.model,
        "scores": options.scores,
        "context": options.context,
        "windows": [len(calibration), len(evaluation)],
        "dense": perplexity(model, evaluation, batch=options.batch),
        "cells": [],
    }
    print(f"dense: {data['dense']:.3f}", flush=True)
    wanted = [(sparsity, None, name) for sparsity in options.sparsity for name in methods]
    wanted += [(None, p, name) for p in options.patterns for name in methods if name.endswith(PATTERNED)]
    for sparsity, pattern, name in wanted:
        model.load_state_dict(dense)
        found = measure(model, methods[name], sparsity, pattern, calibration, evaluation, options.batch)
        cell = {"method": name, **found}
        data["cells"].append(cell)
        print(f"{name}, {pattern or sparsity}: {cell['perplexity']:.3f}, {cell['seconds']:.1f} s", flush=True)
        saved = record.save("quality", data, options, device)  # save after each, since the next may take long
    print(text_table(*table(data)), end="\n\n")
    print(saved)
    return 0


def measure(
    model: Any, method: Method, sparsity: float | None, pattern: str | None, some: Tensor, others: Tensor, batch: int
) -> dict[str, Any]:
    """Prune by one method to one sparsity or pattern: calibrate on `some` windows, evaluate on `others`."""
    settings = dict(method.settings) | ({"pattern": pattern} if pattern else {})
    if method.work is probe:
        settings["evaluate"] = lambda model: perplexity(model, others, batch=batch)
    if not bool(torch.isfinite(next(model.parameters())).all()):
        raise SecateurError("The weights are not finite before anything is pruned. Use another copy of the model.")
    began = time.perf_counter()
    outcome = method.work(model, list(some.split(batch)), sparsity=sparsity, **settings)
    seconds = time.perf_counter() - began
    return {
        "asked": sparsity,
        "pattern": pattern,
        "sparsity": outcome.sparsity,
        "exact": all(not bool(model.get_parameter(k)[~mask].any()) for k, mask in outcome.masks.items()),
        "perplexity": perplexity(model, others, batch=batch),
        "seconds": seconds,
        "stages": {stage.name: stage.seconds for stage in outcome.stages},
        "peak_bytes": max((s.peak_bytes for s in outcome.stages if s.peak_bytes), default=None),
        "found": dict(outcome.found),
        "notes": list(outcome.notes),
    }


def table(data: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows; no ratio where a pruned weight is not zero."""
    header = ("method", "asked", "achieved", "perplexity", "to SparseGPT", "seconds", "to SparseGPT's")
    rows = [("dense", "-", "0.0000", f"{data['dense']:.2f}", "-", "-", "-")]
    for cell in data["cells"]:
        key = cell["asked"], cell["pattern"]
        rival = next((c for c in data["cells"] if (c["asked"], c["pattern"]) == key and c["method"] == RIVAL), None)
        ratios = ["-", "-"]
        if rival is not None:
            right = cell["exact"] and rival["exact"] and abs(cell["sparsity"] - rival["sparsity"]) < 2e-3
            ratios = [ratio(cell[what] / rival[what], right, "-", digits=3) for what in ("perplexity", "seconds")]
        asked = cell["pattern"] or f"{cell['asked']:g}"
        figures = f"{cell['perplexity']:.2f}", ratios[0], f"{cell['seconds']:.1f}", ratios[1]
        rows.append((cell["method"], asked, f"{cell['sparsity']:.4f}", *figures))
        for name, value in cell["found"].items():
            if " alone at " in name:
                score, _, sparsity = name.partition(" alone at sparsity ")
                rows.append((f"{score} at that sparsity", asked, sparsity, f"{value:.2f}", "-", "-", "-"))
    return header, rows


def windows(data: dict[str, Any]) -> str:
    """The windows of calibration and evaluation, in a line."""
    calibrated, evaluated = data["windows"]
    return f"{calibrated} windows of {data['context']:,} tokens calibrate, {evaluated} others evaluate."


def summary(data: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of the perplexities only: dense, then the methods that ran at every sparsity and pattern."""
    asked = list(dict.fromkeys((cell["asked"], cell["pattern"]) for cell in data["cells"]))
    found = {(cell["method"], cell["asked"], cell["pattern"]): cell["perplexity"] for cell in data["cells"]}
    methods = dict.fromkeys(cell["method"] for cell in data["cells"])
    whole = [name for name in methods if all((name, *key) in found for key in asked)]
    header = ("method", *(pattern or f"{sparsity:.0%}" for sparsity, pattern in asked))
    rows = [("dense", *[f"{data['dense']:.1f}"] * len(asked))]
    return header, rows + [(name, *(f"{found[name, *key]:.1f}" for key in asked)) for name in whole]
