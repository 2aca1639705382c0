"""What pruning after training costs in quality: perplexity of a language model by every method, in one run.

One text: the first third calibrates, the rest evaluates. Every method starts from the same dense weights and sees the
same windows. Ratios are to SparseGPT at the same sparsity and of the same pattern in the same run: of perplexity, and
of seconds. The probe achieves what it achieves; beside it stands its score alone at that sparsity.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from secateur.bench.measuring import device_of, times
from secateur.errors import SecateurError
from secateur.integrations import transformers
from secateur.lab import record
from secateur.oneshot.probe import probe
from secateur.oneshot.prune import prune
from secateur.report import Outcome, text_table

RIVAL = "sparsegpt"


@dataclass(frozen=True)
class Method:
    """A way to prune: the function and its settings."""

    work: Callable[..., Outcome] = prune
    settings: dict[str, Any] = field(default_factory=dict)


METHODS: dict[str, Method] = {
    "magnitude": Method(settings={"score": "magnitude"}),
    "wanda": Method(settings={"score": "wanda"}),
    RIVAL: Method(settings={"method": "sparsegpt"}),
    "variance": Method(),
    "variance, 5 rounds": Method(settings={"rounds": 5}),
    "variance, 5 rounds, repaired": Method(settings={"rounds": 5, "reconstruct": True}),
    "recommended": Method(settings={"rounds": 5, "reconstruct": "every"}),
    "probe, joint": Method(probe),
    "probe, block by block": Method(probe, {"order": "reverse", "group": "block"}),
}
PATTERNED = ("wanda", RIVAL, "variance, 5 rounds, repaired", "recommended")


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device = device_of(options)
    torch.set_float32_matmul_precision("high")  # GPUs multiply in TF32, whatever the method and in every evaluation
    model, tokenizer = transformers.load(options.model, dtype=torch.float32, device=device)
    windows = transformers.windows(tokenizer, transformers.read_text(options.text), options.context, options.windows)
    calibration, evaluation = transformers.split(windows)
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data: dict[str, Any] = {
        "seed": 0,
        "model": options.model,
        "context": options.context,
        "windows": [len(calibration), len(evaluation)],
        "dense": transformers.perplexity(model, evaluation, batch=options.batch),
        "cells": [],
    }
    print(f"dense: {data['dense']:.3f}", flush=True)
    wanted = [(sparsity, None, name) for sparsity in options.sparsities for name in options.methods]
    wanted += [(None, p, name) for p in options.patterns for name in options.methods if name in PATTERNED]
    for sparsity, pattern, name in wanted:
        model.load_state_dict(dense)
        cell = measure(model, name, sparsity, pattern, calibration, evaluation, options.batch)
        data["cells"].append(cell)
        print(f"{name}, {pattern or sparsity}: {cell['perplexity']:.3f}, {cell['seconds']:.1f} s", flush=True)
        saved = record.save("quality", data, options, device)  # each time: the next may take long
    print(text_table(*table(data)), end="\n\n")
    print(saved)
    return 0


def measure(
    model: Any, name: str, sparsity: float | None, pattern: str | None, some: Tensor, others: Tensor, batch: int
) -> dict[str, Any]:
    """One method at one sparsity."""
    method = METHODS[name]
    settings = dict(method.settings) | ({"pattern": pattern} if pattern else {})
    if method.work is probe:
        settings["evaluate"] = lambda model: transformers.perplexity(model, others, batch=batch)
    if not bool(torch.isfinite(next(model.parameters())).all()):
        raise SecateurError("The dense weights are not finite.")
    began = time.perf_counter()
    outcome = method.work(model, list(some.split(batch)), sparsity=sparsity, **settings)
    seconds = time.perf_counter() - began
    return {
        "method": name,
        "asked": sparsity,
        "pattern": pattern,
        "sparsity": outcome.sparsity,
        "exact": all(not bool(model.get_parameter(k)[~mask].any()) for k, mask in outcome.masks.items()),
        "perplexity": transformers.perplexity(model, others, batch=batch),
        "seconds": seconds,
        "stages": {stage.name: stage.seconds for stage in outcome.stages},
        "peak_bytes": max((s.peak_bytes for s in outcome.stages if s.peak_bytes), default=None),
        "found": dict(outcome.found),
        "notes": list(outcome.notes),
    }


def table(data: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows; no ratio where zeros were not what the masks say."""
    header = ("method", "asked", "achieved", "perplexity", "to SparseGPT", "seconds", "to SparseGPT's")
    rows = [("dense", "-", "0.0000", f"{data['dense']:.2f}", "-", "-", "-")]
    for cell in data["cells"]:
        key = cell["asked"], cell["pattern"]
        rival = next((c for c in data["cells"] if (c["asked"], c["pattern"]) == key and c["method"] == RIVAL), None)
        ratios = ["-", "-"]
        if rival is not None:
            right = cell["exact"] and rival["exact"] and abs(cell["sparsity"] - rival["sparsity"]) < 2e-3
            ratios = [times(cell[what] / rival[what], right, "-", digits=3) for what in ("perplexity", "seconds")]
        asked = cell["pattern"] or f"{cell['asked']:g}"
        figures = f"{cell['perplexity']:.2f}", ratios[0], f"{cell['seconds']:.1f}", ratios[1]
        rows.append((cell["method"], asked, f"{cell['sparsity']:.4f}", *figures))
        for name, value in cell["found"].items():
            if " alone at " in name:
                score, _, sparsity = name.partition(" alone at sparsity ")
                rows.append((f"{score} at that sparsity", asked, sparsity, f"{value:.2f}", "-", "-", "-"))
    return header, rows


def windows(data: dict[str, Any]) -> str:
    """What calibrated and what evaluated, in a line."""
    calibrated, evaluated = data["windows"]
    return f"{calibrated} windows of {data['context']:,} tokens calibrate, {evaluated} others evaluate."


def summary(data: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of the perplexities alone: the methods that were asked for everything, dense weights first."""
    asked = list(dict.fromkeys((cell["asked"], cell["pattern"]) for cell in data["cells"]))
    found = {(cell["method"], cell["asked"], cell["pattern"]): cell["perplexity"] for cell in data["cells"]}
    methods = dict.fromkeys(cell["method"] for cell in data["cells"])
    whole = [name for name in methods if all((name, *key) in found for key in asked)]
    header = ("method", *(pattern or f"{sparsity:.0%}" for sparsity, pattern in asked))
    rows = [("dense", *[f"{data['dense']:.1f}"] * len(asked))]
    return header, rows + [(name, *(f"{found[name, *key]:.1f}" for key in asked)) for name in whole]
