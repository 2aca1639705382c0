"""Measure what zeros buy in inference on this device: dense and packed time of one input, by layer shape and in all.

Without a model, layers are made up; on a GPU those are layers of large models, each with its bar, and --whole decodes
with a model of the shape of Mistral-7B and random weights. With a model, its own zeros are measured (or those that
--sparsity makes by magnitude), then whole decoding steps at batch 1. Dense and packed calls alternate, on copies that
together exceed the caches. Times are the smallest of all calls, since other work on the machine can only make a call
longer; the ratio of the medians stands beside. No ratio is given where the outputs differ.

Example: secateur bench decode smollm2 --device cpu --threads 2 --sparsity 0.8 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import copy
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from secateur.bench import decode_gpu
from secateur.bench.measuring import ratio, synchronize
from secateur.errors import SecateurError
from secateur.files import megabytes
from secateur.inference import cpu
from secateur.inference.format import smaller
from secateur.inference.packed import PackedLinear, linear_layers, pack
from secateur.inference.timing import compare
from secateur.integrations.evaluation import check_context
from secateur.integrations.folder import load
from secateur.kernels import decode_cuda, reason_against
from secateur.lab import record
from secateur.report import text_table
from secateur.selection.masks import packed_bytes
from secateur.settings import kernels_off

SHAPES = ("4096x4096", "8192x8192")
SPARSITIES = (0.5, 0.8, 0.9)
BARS = {("8192x8192", "bfloat16", 0.5): 1.4, ("8192x8192", "bfloat16", 0.8): 2.0}  # speedups to reach on a CPU
SECONDS = 20.0  # for one layer
NOTHING = "Nothing is gained here."
DIFFER = "outputs differ"
PROMPT = 16  # tokens before those that are timed
# Rounding grows through the layers, so packed logits may be this much further from those of the fp32 model than dense
# logits are (norm of the difference, relative). One sequence is one sample of rounding: others are compared with it.
FURTHER, BESIDES = 1.25, 1e-4
OTHERS, OTHER_TOKENS = 8, 8
LEAST_GAIN = 1.02  # a smaller one is noise


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.whole or (options.device.type == "cuda" and not options.model):
        return _on_gpu(options)
    data = _of_model(options) if options.model else _of_shapes(options)
    print(text_table(*table(data["cells"])))
    for line in summary(data):
        print(line)
    print(record.save("decode-model" if options.model else "decode", data, options, options.device))
    return 0


def _on_gpu(options: argparse.Namespace) -> int:
    """Large layers against cuBLAS, or a whole decoder; the record is written again after each case."""
    if options.model or options.int8 or options.sparsity:
        raise SecateurError("--whole and GPUs have their own cases: leave out MODEL, --int8 and --sparsity.")
    if options.whole and options.shapes:
        raise SecateurError("--whole decodes with a whole model: leave out --shapes, which are of single layers.")
    data: dict[str, Any] = {"kernel": kernel(options.device), "cells": [], "whole": []}
    theme = "decode-whole" if options.whole else "decode"
    dtypes = [getattr(torch, dtype) for dtype in options.dtype or ["bfloat16"]]
    if options.whole:
        for dtype, case in product(dtypes, decode_gpu.WHOLE_CASES):
            step = decode_gpu.measure_whole(options.whole, case, dtype, options.device, options.tokens)
            data["whole"].append(step)
            print(*decode_gpu.whole_lines([step]), flush=True)
            path = record.save(theme, data, options, options.device)
    else:
        shapes = [_shape(text) for text in options.shapes or decode_gpu.SHAPES]
        for shape, dtype, case in product(shapes, dtypes, decode_gpu.CASES):
            data["cells"].append(decode_gpu.measure(shape, case, dtype, options.device, options.calls))
            path = record.save(theme, data, options, options.device)
        print(text_table(*decode_gpu.table(data["cells"])))
    print(path)
    return 0


def kernel(device: torch.device) -> str:
    """What computes packed layers on this device."""
    if device.type != "cpu":
        reason, slower = reason_against(device), decode_cuda.reason_against(device)
        if reason is not None:
            return f"plain torch: {reason}"
        return "a CUDA kernel, compiled by NVRTC" if slower is None else f"Triton kernels ({slower})"
    found = cpu.library()
    if kernels_off():
        return "plain torch (SECATEUR_KERNELS=off)"
    return f"plain torch: {found}" if isinstance(found, str) else cpu.LEVELS[found.level]


def _of_shapes(options: argparse.Namespace) -> dict[str, Any]:
    """Made-up layers of every shape, dtype and sparsity."""
    cells = []
    for shape in [_shape(text) for text in options.shapes or SHAPES]:
        for dtype in options.dtype or ["bfloat16"]:
            for sparsity in options.sparsity or SPARSITIES:
                layer = made_up(shape, getattr(torch, dtype), sparsity, options.device)
                for int8 in (False, True) if options.int8 else (False,):
                    cells.append(measure(layer, options.calls, int8=int8))
    return {"kernel": kernel(options.device), "calls": options.calls, "cells": cells}


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise SecateurError(f"--shapes {text}: a shape is written ROWSxCOLUMNS, such as 4096x4096.")
    return int(found[1]), int(found[2])


def made_up(shape: tuple[int, int], dtype: torch.dtype, sparsity: float, device: torch.device) -> nn.Linear:
    """A random layer with this share of zeros at random places."""
    generator = torch.Generator(device).manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], bias=False, device=device, dtype=dtype).requires_grad_(False)
    drawn = torch.rand(shape, generator=generator, device=device)
    layer.weight.data = torch.where(drawn < sparsity, 0.0, drawn - (1 + sparsity) / 2).to(dtype)
    return layer.eval()


def measure(layer: nn.Linear, calls: int, *, int8: bool = False) -> dict[str, Any]:
    """Dense and packed time of one layer, with what was measured."""
    weight = layer.weight.detach()
    packed = PackedLinear.from_linear(layer, int8=int8).eval()
    generator = torch.Generator(weight.device).manual_seed(1)
    x = torch.randn((1, packed.in_features), generator=generator, device=weight.device).to(weight.dtype)
    found = compare(layer, packed, x, exact=not int8, most=calls, seconds=SECONDS)
    return {
        "shape": "x".join(map(str, weight.shape)),
        "layers": 1,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "values": "int8" if int8 else "as dense",
        "sparsity": round(1 - int(torch.count_nonzero(weight)) / weight.numel(), 4),
        "bytes": packed.packed.nbytes / weight.nbytes,
        "dense_us": found.dense,
        "packed_us": found.packed,
        "difference": found.difference,
        "right": found.right,
    }


def _of_model(options: argparse.Namespace) -> dict[str, Any]:
    """Every layer shape of a model, then whole decoding steps."""
    if options.shapes or options.int8:
        raise SecateurError("--shapes and --int8 are for made-up layers; leave out the model or the options.")
    cells, steps = [], []
    for dtype in options.dtype or [None]:
        for sparsity in options.sparsity or [None]:
            wanted = None if dtype is None else getattr(torch, dtype)
            model, _ = load(options.model, dtype=wanted, device=options.device, packed=False)
            check_decodes(model, options.tokens)
            model.requires_grad_(False)
            if sparsity is not None:
                prune_by_magnitude(model, sparsity)
            cells += measure_layers(model, options.calls)
            steps.append(measure_steps(model, options.tokens))
    return {"kernel": kernel(options.device), "model": options.model, "cells": cells, "steps": steps}


def check_decodes(model: Any, tokens: int) -> None:
    """Refuse models that do not write token after token, or not as many, before anything is measured."""
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise SecateurError(
            f"{type(model).__name__} does not decode token after token, so its steps cannot be timed. Use"
            " `secateur inspect`, which times its layers."
        )
    try:
        check_context(model, PROMPT + tokens)
    except SecateurError as error:
        raise SecateurError(f"The context is a prompt of {PROMPT} and --tokens {tokens}: {error}") from error


@torch.no_grad()
def prune_by_magnitude(model: nn.Module, sparsity: float) -> None:
    """Zero the smallest weights of every layer that can be packed. For speed alone: quality does not matter here."""
    for _, layer, reason in linear_layers(model):
        if not reason:
            sizes = layer.weight.float().abs()
            cut = sizes.flatten().kthvalue(max(1, round(sparsity * sizes.numel()))).values
            layer.weight.masked_fill_(sizes <= cut, 0)


def measure_layers(model: nn.Module, calls: int) -> list[dict[str, Any]]:
    """A measurement for every shape among the layers that can be packed, with the number of such layers."""
    groups: dict[tuple[int, ...], list[nn.Linear]] = {}
    for _, layer, reason in linear_layers(model):
        if not reason:
            groups.setdefault(tuple(layer.weight.shape), []).append(layer)
    return [{**measure(layers[0], calls), "layers": len(layers)} for layers in groups.values()]


@torch.no_grad()
def measure_steps(model: Any, tokens: int) -> dict[str, Any]:
    """Milliseconds of decoding steps, dense and packed in turns on the same tokens, and how far from fp32 both are."""
    other = copy.deepcopy(model)
    report = pack(other)
    timed, others = sequences(model, tokens)
    times, logits = steps_in_turns((model, other), timed)
    _, more = steps_in_turns((model, other), others)
    precise = copy.deepcopy(model).float()
    exact = [precise(ids).logits[:, PROMPT:] for ids in (timed, others)]
    dense, packed = (relative_error(found, exact) for found in zip(logits, more, strict=True))
    packable = {name for name, _, reason in linear_layers(model) if not reason}
    rows = [row for row in report.layers if row.name in packable]
    weights = sum(row.shape[0] * row.shape[1] for row in rows)
    return {
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "sparsity": round(sum(row.zeros for row in rows) / max(1, weights), 4),  # of layers that can be packed
        "packed_layers": len(report.packed),
        "layers": len(report.layers),
        "dense_ms": times[0],
        "packed_ms": times[1],
        "dense_error": dense,
        "packed_error": packed,
        "right": packed <= FURTHER * dense + BESIDES,
    }


def sequences(model: Any, tokens: int) -> tuple[Tensor, Tensor]:
    """Random tokens to decode: one sequence to time, and some more, decoded together, to compare outputs on."""
    size, generator = model.get_input_embeddings().num_embeddings, torch.Generator().manual_seed(0)
    shapes = (1, PROMPT + tokens), (OTHERS, PROMPT + OTHER_TOKENS)
    device = next(model.parameters()).device
    timed, others = (torch.randint(size, shape, generator=generator).to(device) for shape in shapes)
    return timed, others


def steps_in_turns(models: Sequence[Any], ids: Tensor) -> tuple[list[list[float]], list[Tensor]]:
    """Milliseconds of every decoding step of each model, all models in turns on the same tokens, and their logits."""
    caches = [one(ids[:, :PROMPT], use_cache=True).past_key_values for one in models]
    times: list[list[float]] = [[] for _ in models]
    logits: list[list[Tensor]] = [[] for _ in models]
    for place in range(PROMPT, ids.shape[1]):
        for one, cache, taken, found in zip(models, caches, times, logits, strict=True):
            synchronize(ids.device)
            began = time.perf_counter()
            found.append(one(ids[:, place : place + 1], past_key_values=cache, use_cache=True).logits.float())
            synchronize(ids.device)
            taken.append(round((time.perf_counter() - began) * 1e3, 3))
    return times, [torch.cat(found, 1) for found in logits]


def relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Norm of the difference over all of these tensors, relative."""
    far = sum(float((one - other).square().sum()) for one, other in zip(found, exact, strict=True))
    return (far / sum(float(other.square().sum()) for other in exact)) ** 0.5


def table(cells: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows: one for each shape, dtype and sparsity."""
    header = ("layer", "layers", "dtype", "values", "zeros", "bytes", "dense us", "packed us", "speedup", "of medians")
    rows = []
    for cell in cells:
        dense, packed, right = cell["dense_us"], cell["packed_us"], cell["right"]
        bar = BARS.get((cell["shape"], cell["dtype"], round(cell["sparsity"], 2)))
        speedup = min(dense) / min(packed)
        shown = ratio(speedup, right, DIFFER)
        if bar and right and cell["values"] != "int8":
            shown += f" (bar {bar}x {'met' if speedup >= bar else 'missed'})"
        rows.append(
            (cell["shape"], str(cell["layers"]), cell["dtype"], cell["values"], f"{cell['sparsity']:.0%}",
             f"{cell['bytes']:.0%}", f"{min(dense):.0f}", f"{min(packed):.0f}", shown,
             ratio(median(dense) / median(packed), right, DIFFER))
        )  # fmt: skip
    return header, rows


def summary(data: dict[str, Any]) -> list[str]:
    """The plain sentences: all layers together, whole decoding steps, and whether anything is gained."""
    lines = [f"Packed layers are computed by: {data['kernel']}."]
    best: list[float] = []
    if "steps" not in data:
        best = [min(cell["dense_us"]) / min(cell["packed_us"]) for cell in data["cells"] if cell["right"]]
    for step in data.get("steps", []):
        dense, packed = step["dense_ms"], step["packed_ms"]
        what = f"{data['model']}, {step['dtype']}, {step['packed_layers']} of {step['layers']} linear layers packed"
        said = f"{what} ({step['sparsity']:.0%} zeros): {1e3 / median(dense):.1f} tokens/s dense"
        if not step["packed_layers"]:
            lines.append(f"{said}. No layer is smaller and faster packed, so all of them stay dense.")
            continue
        if not step["right"]:
            errors = f"{step['packed_error']:.1%} from the logits in fp32, dense {step['dense_error']:.1%}"
            lines.append(f"{said}; {DIFFER}: {errors}.")
            continue
        best.append(median(dense) / median(packed))
        lines.append(
            f"{said}, {1e3 / median(packed):.1f} packed ({best[-1]:.2f}x; of the fastest steps"
            f" {min(dense) / min(packed):.2f}x)."
        )
    return lines if best and max(best) >= LEAST_GAIN else [*lines, NOTHING]


@dataclass
class Group:
    """Layers alike, with the measurement of the first."""

    cell: dict[str, Any]
    layers: int = 0
    weights: int = 0
    zeros: int = 0
    dense_bytes: int = 0
    packed_bytes: int = 0

    @property
    def us(self) -> tuple[float, float]:
        """Microseconds of one layer, dense and packed, the fastest of all calls."""
        return min(self.cell["dense_us"]), min(self.cell["packed_us"])


class Gains:
    """What the zeros of a model's linear layers buy on this device, in bytes and time, as `secateur inspect` shows it.

    Weights come one at a time; of layers alike (shape, dtype, and sparsity to a twentieth) the first is timed. Layers
    that packing does not make smaller are only counted.
    """

    HEADER = ("linear layers", "number", "dtype", "zeros", "dense", "packed", "dense us", "packed us", "speedup")
    CALLS = 20  # of each form of a layer

    def __init__(
        self, device: torch.device, only: Collection[str] | None = None, transposed: Collection[str] = ()
    ) -> None:
        self.device, self.only, self.transposed = device, only, transposed
        self.groups: dict[Any, Group] = {}
        self.left = 0

    def watched(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights; each is counted, and perhaps timed, as it passes."""
        for name, weight in tensors:
            if name in self.only if self.only is not None else weight.ndim == 2 and name.endswith("weight"):
                self.add(weight.detach().T.contiguous() if name in self.transposed else weight.detach())
            yield name, weight

    def add(self, weight: Tensor) -> None:
        """Count a linear layer's weight [outputs, inputs]; time it if none alike was timed."""
        if not smaller(weight):
            self.left += 1
            return
        zeros = weight.numel() - int(torch.count_nonzero(weight))
        key = tuple(weight.shape), weight.dtype, round(20 * zeros / weight.numel())
        if key not in self.groups:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            layer.weight = nn.Parameter(weight.to(self.device), requires_grad=False)
            self.groups[key] = Group(measure(layer.eval(), self.CALLS))
        group = self.groups[key]
        group.layers += 1
        group.weights += weight.numel()
        group.zeros += zeros
        group.dense_bytes += weight.nbytes
        group.packed_bytes += packed_bytes(weight.shape) + (weight.numel() - zeros) * weight.element_size()

    def rows(self) -> list[Sequence[str]]:
        """A row under HEADER for each group."""
        found: list[Sequence[str]] = []
        for group in self.groups.values():
            cell, (dense, packed) = group.cell, group.us
            found.append(
                (cell["shape"], str(group.layers), cell["dtype"], f"{group.zeros / group.weights:.1%}",
                 megabytes(group.dense_bytes), megabytes(group.packed_bytes), f"{dense:.0f}",
                 f"{packed:.0f}", ratio(dense / packed, cell["right"], DIFFER))
            )  # fmt: skip
        return found

    def lines(self) -> list[str]:
        """All layers together, in plain sentences."""
        groups = list(self.groups.values())
        if not groups:
            return [f"{NOTHING} No linear layer has enough zeros to be smaller packed."]
        layers = "1 linear layer has" if self.left == 1 else f"{self.left} linear layers have"
        left = f" {layers} too few zeros to be packed." if self.left else ""
        dense, packed = sum(group.dense_bytes for group in groups), sum(group.packed_bytes for group in groups)
        said = [
            f"Packed, {sum(group.layers for group in groups)} linear layers take {megabytes(packed)} instead of"
            f" {megabytes(dense)} ({packed / dense:.0%}).{left}",
            f"Packed layers are computed by: {kernel(self.device)}; threads: {torch.get_num_threads()}.",
        ]
        if not all(group.cell["right"] for group in groups):
            return [*said, f"In time: {DIFFER}, so nothing is claimed."]
        before = sum(group.layers * group.us[0] for group in groups) / 1e3
        after = sum(group.layers * min(group.us) for group in groups) / 1e3  # as `sc.pack` leaves slower layers dense
        if before / after < LEAST_GAIN:
            return [*said, f"In time: {NOTHING.lower()} One input takes {before:.2f} ms through them, packed or dense."]
        return [
            *said,
            f"One input takes {after:.2f} ms through them instead of {before:.2f} ({before / after:.2f}x), where slower"
            " layers stay dense; `secateur bench decode` measures whole decoding steps.",
        ]
