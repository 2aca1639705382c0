"""Measure which pattern of zeros decodes fast and at what quality: perplexity beside tokens/s on this device.

The model is pruned by the recommended recipe (five rounds, weights reconstructed after each) to every --patterns and,
without a pattern, to every --sparsity. The first third of the text calibrates, the rest evaluates, in fp32. Pruned
models are saved packed, in bf16, to --models and used again, so an interrupted run continues and a second one measures
speed alone. Decoding steps at batch 1 go round all models, so that other work on the machine slows all of them. No
speed is given where packed and dense outputs differ.

Example: secateur bench patterns --text wiki.valid.raw --models scratch/patterns --device cpu --threads 2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from secateur.bench import quality
from secateur.bench.decode import (
    BESIDES,
    DIFFER,
    FURTHER,
    PROMPT,
    check_decodes,
    kernel,
    relative_error,
    sequences,
    steps_in_turns,
)
from secateur.bench.measuring import ratio
from secateur.errors import SecateurError
from secateur.files import read_json, write
from secateur.inference.packed import packed_layers, unpack
from secateur.inference.saving import load, save
from secateur.integrations import text
from secateur.integrations.evaluation import perplexity
from secateur.integrations.folder import load as load_with_tokenizer
from secateur.lab import record
from secateur.lab.compare_page import COLOURS
from secateur.lab.figures import figure
from secateur.report import text_table
from secateur.selection.tiles import parse_pattern

CELL = "cell.json"  # beside a pruned model: what it was made with, and its quality
DENSE = "dense"
SAVED = torch.bfloat16
AGAIN = "Delete the folder to prune it again, or name another with --models."
LEVEL = 0.01  # sparsities closer than this count as the same


def run(options: argparse.Namespace) -> int:
    """Prune what has not been pruned, measure speed, print, save."""
    if options.threads:
        torch.set_num_threads(options.threads)
    made = {
        "model": options.model,
        "text": Path(options.text).name,
        "context": options.context,
        "windows": options.windows,
    }
    wanted: list[dict[str, Any]] = [{"pattern": None, "asked": None}]
    wanted += [{"pattern": pattern, "asked": None} for pattern in options.patterns]
    wanted += [{"pattern": None, "asked": sparsity} for sparsity in options.sparsity]
    for pattern in options.patterns:
        parse_pattern(pattern)  # before anything is pruned
    data: dict[str, Any] = {**made, "seed": 0, "kernel": kernel(options.device), "cells": []}
    pruning = _Pruning(options)
    for one in wanted:
        folder = options.models / name_of(one)
        if not (folder / CELL).is_file():
            pruning(one, folder, made)
        cell = read_json(folder / CELL, dict, SecateurError, AGAIN)
        if other := [
            f"{key} {cell.get(key)!r}, not {value!r}" for key, value in made.items() if cell.get(key) != value
        ]:
            raise SecateurError(f"{folder} was made with other settings: {'; '.join(other)}. {AGAIN}")
        data["cells"].append(cell)
        print(f"{name_of(one)}: perplexity {cell['perplexity']:.3f}", flush=True)
    measure_speed(data["cells"], options)
    print(text_table(*table(data["cells"])))
    print(conclusion(data["cells"]))
    print(record.save("patterns", data, options, options.device))
    return 0


def name_of(cell: dict[str, Any]) -> str:
    """ "8:16", "0.5", or "dense"; as a folder and in the table."""
    return str(cell["pattern"] or cell["asked"] or DENSE).replace(":", "-")


def numbers(windows: int) -> tuple[int, int]:
    """How many windows calibrate and how many evaluate."""
    first = max(1, windows // 3)
    return first, windows - first


class _Pruning:
    """Prunes one model after the other from the same dense weights, which are loaded when they are first needed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model: Any = None

    def _begin(self) -> None:
        options = self.options
        self.model, self.tokenizer = load_with_tokenizer(options.model, dtype=torch.float32, device=options.device)
        check_decodes(self.model, options.tokens)
        read = text.windows(self.tokenizer, text.read_text(options.text), options.context, options.windows)
        self.calibration, self.evaluation = text.split(read, *numbers(options.windows))
        self.weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def __call__(self, wanted: dict[str, Any], folder: Path, made: dict[str, Any]) -> None:
        """Prune, evaluate, and save the model with its figures."""
        if self.model is None:
            self._begin()
        self.model.load_state_dict(self.weights)
        batch = self.options.batch
        found = {"sparsity": 0.0, "exact": True, "seconds": 0.0}
        if wanted["pattern"] or wanted["asked"]:
            method = quality.methods_for([])["recommended"]
            some = self.calibration, self.evaluation
            found = quality.measure(self.model, method, wanted["asked"], wanted["pattern"], *some, batch)
        else:
            found["perplexity"] = perplexity(self.model, self.evaluation, batch=batch)
        cell = {**made, **wanted, **found}
        self.model.to(SAVED)
        save(self.model, folder, tokenizer=self.tokenizer, overwrite=True)
        self.model.to(torch.float32)
        write(folder / CELL, json.dumps(cell, indent=1) + "\n")


@torch.no_grad()
def measure_speed(cells: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Add the milliseconds of decoding steps to the cells, all models in turns on the same tokens."""
    models = [load(options.models / name_of(cell), device=options.device) for cell in cells]
    check_decodes(models[0], options.tokens)
    timed, others = sequences(models[0], options.tokens)
    times, logits = steps_in_turns(models, timed)
    _, more = steps_in_turns(models, others)
    for cell, model, taken, *found in zip(cells, models, times, logits, more, strict=True):
        layers = [layer for _, layer in packed_layers(model)]
        numel = sum(layer.in_features * layer.out_features for layer in layers)
        packed = sum(layer.packed.nbytes for layer in layers)
        cell |= {"packed_layers": len(layers), "bytes": packed / (numel * SAVED.itemsize) if numel else 1.0}
        unpack(model)
        dense = [model(ids).logits[:, PROMPT:].float() for ids in (timed, others)]
        model.float()
        exact = [model(ids).logits[:, PROMPT:] for ids in (timed, others)]
        cell |= {"ms": taken, "error": relative_error(found, exact), "dense_error": relative_error(dense, exact)}
        cell["right"] = cell["exact"] and cell["error"] <= FURTHER * cell["dense_error"] + BESIDES


def table(cells: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows: quality beside speed, one row for each pattern and sparsity."""
    header = ("zeros", "sparsity", "perplexity", "bytes", "ms a token", "tokens/s", "to dense", "of the fastest steps")
    (dense,) = [cell for cell in cells if name_of(cell) == DENSE]
    rows = []
    for cell in cells:
        ms, base, right = cell["ms"], dense["ms"], cell["right"]
        rows.append(
            (label(cell), f"{cell['sparsity']:.1%}", f"{cell['perplexity']:.1f}", f"{cell['bytes']:.0%}",
             f"{median(ms):.1f}", f"{1e3 / median(ms):.1f}" if right else DIFFER,
             ratio(median(base) / median(ms), right, DIFFER), ratio(min(base) / min(ms), right, DIFFER))
        )  # fmt: skip
    return header, rows


def label(cell: dict[str, Any]) -> str:
    """What a cell is called in tables and pictures."""
    return cell["pattern"] or ("dense" if cell["asked"] is None else f"unstructured {cell['asked']:.0%}")


def conclusion(cells: Sequence[dict[str, Any]]) -> str:
    """Whether patterns decode faster than unstructured zeros at the same sparsity, in a sentence for each sparsity."""
    lines = []
    for free in (cell for cell in cells if cell["asked"] is not None and cell["right"]):
        alike = [c for c in cells if c["pattern"] and c["right"] and abs(c["sparsity"] - free["asked"]) < LEVEL]
        speeds = ", ".join(f"{c['pattern']} {min(free['ms']) / min(c['ms']):.2f}x" for c in alike)
        if speeds:
            lines.append(f"Fastest steps to those of unstructured zeros at {free['asked']:.0%}: {speeds}.")
    return " ".join(lines)


def picture(cells: Sequence[dict[str, Any]]) -> str:
    """Perplexity against tokens/s: an SVG."""

    def draw(axes: Any) -> None:
        for cell in cells:
            if cell["right"]:
                place = 1e3 / median(cell["ms"]), cell["perplexity"]
                level = round(cell["sparsity"], 2)
                colour = COLOURS[0] if not level else COLOURS[1] if level < 2 / 3 else COLOURS[2]
                axes.plot(*place, "s" if cell["pattern"] else "o", color=colour, markersize=6)
                axes.annotate(f" {label(cell)}", place, color=colour, fontsize="small", va="bottom")
        axes.set(xlabel="tokens/s at batch 1", ylabel="perplexity (log scale)", yscale="log")
        axes.margins(x=0.2, y=0.15)

    return figure(draw, width=6.4, height=3.6)
