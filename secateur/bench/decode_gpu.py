"""The decoding benchmark on GPUs: layers of large models against cuBLAS, with the bars, and a whole decoder.

Every case compares a layer with its packed form: the same inputs, copies beyond the L2 cache, CUDA graphs, the outputs
checked before a ratio is given. Streams are timed with every launch setting first, and the record holds all times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.bench.measuring import ratio, synchronize
from secateur.inference import gpu
from secateur.inference.packed import PackedLinear, pack
from secateur.inference.timing import compare, graph_of, replayed

SHAPES = ("14336x4096", "4096x14336", "8192x8192")
PREFILL = 512
DIFFER = "outputs differ"


@dataclass(frozen=True)
class Case:
    """A kind of layer and the speedup to reach, of dense over packed time."""

    bar: float | None
    sparsity: float = 0.0
    kept: int = 0  # of each 16 columns; 0: zeros at random places
    int8: bool = False
    inputs: int = 1

    @property
    def zeros(self) -> str:
        """In words."""
        return f"{self.kept}:16" if self.kept else f"{self.sparsity:.0%}"


CASES = (
    Case(2.1, 0.8), Case(1.2, 0.5), Case(1.6, 0.7), Case(3.0, 0.9), Case(2.2, kept=4), Case(3.5, kept=2),
    Case(1.6, 0.5, int8=True), Case(2.6, 0.8, int8=True), Case(1.6, 0.8, inputs=4), Case(1.2, 0.8, inputs=16),
    Case(1 / 1.1, 0.8, inputs=PREFILL),
)  # fmt: skip


def layer_of(shape: tuple[int, int], case: Case, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    """A random layer with the zeros of this case."""
    generator = torch.Generator(device).manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], bias=False, device="meta").requires_grad_(False)
    drawn = torch.rand(shape[0], -(-shape[1] // 16) * 16, generator=generator, device=device)
    if case.kept:
        order = drawn.view(shape[0], -1, 16).argsort(2).flatten(1)
        gone = order >= case.kept
    else:
        gone = drawn < case.sparsity
    values = torch.randn(drawn.shape, generator=generator, device=device).masked_fill_(gone, 0)
    layer.weight = nn.Parameter(values[:, : shape[1]].to(dtype).contiguous(), requires_grad=False)
    return layer.eval()


@torch.no_grad()
def measure(shape: tuple[int, int], case: Case, dtype: torch.dtype, device: torch.device, calls: int) -> dict[str, Any]:
    """Dense and packed time of one case, with the time of every launch setting."""
    layer = layer_of(shape, case, dtype, device)
    packed = PackedLinear.from_linear(layer, int8=case.int8).eval()
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn((case.inputs, shape[1]), generator=generator, device=device).to(dtype)
    settings = {}
    if packed.streams is not None and case.inputs < PREFILL:
        packed.few = case.inputs  # so that streams are measured even where unpacking would win
        settings = gpu.timed_settings(packed.streams, packed.weight_scale, x)
        packed.streams = packed.streams.launched(*min(settings, key=settings.__getitem__))
    found = compare(layer, packed, x, exact=not case.int8, most=calls, seconds=20.0)
    weight, streams = layer.weight, packed.streams
    form = None if streams is None else vars(streams.form)
    return {
        "shape": "x".join(map(str, shape)), "dtype": str(dtype).removeprefix("torch."), "zeros": case.zeros,
        "values": "int8" if case.int8 else "as dense", "inputs": case.inputs, "bar": case.bar,
        "sparsity": round(1 - int(torch.count_nonzero(weight)) / weight.numel(), 4),
        "stream_bits": None if streams is None else 8 * streams.nbytes / weight.numel(),
        "packed_bits": 8 * packed.nbytes / weight.numel(), "form": form,
        "settings_us": {"-".join(map(str, setting)): taken for setting, taken in settings.items()},
        "dense_us": found.dense, "packed_us": found.packed, "difference": found.difference, "right": found.right,
    }  # fmt: skip


def table(cells: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows, with the bar of each."""
    header = ("layer", "dtype", "zeros", "values", "inputs", "bits a weight", "dense us", "packed us", "speedup",
              "bar")  # fmt: skip
    rows = []
    for cell in cells:
        dense, packed, bits = min(cell["dense_us"]), min(cell["packed_us"]), cell["stream_bits"]
        verdict = DIFFER if not cell["right"] else "met" if dense / packed >= cell["bar"] else "missed"
        if cell["inputs"] == 16 and dense < packed:
            verdict += ": sc.pack(inputs=16) leaves it dense"
        rows.append(
            (cell["shape"], cell["dtype"], cell["zeros"], cell["values"], str(cell["inputs"]),
             "-" if bits is None or cell["inputs"] == PREFILL else f"{bits:.1f}", f"{dense:.1f}", f"{packed:.1f}",
             ratio(dense / packed, cell["right"], DIFFER), f"{cell['bar']:.2f}x {verdict}")
        )  # fmt: skip
    return header, rows


# A whole decoder


@dataclass(frozen=True)
class Shape:
    """Of a decoder with grouped attention and gated MLP."""

    layers: int
    width: int
    hidden: int
    heads: int
    groups: int
    words: int


WHOLE = {"mistral-7b": Shape(32, 4096, 14336, 32, 8, 32000), "tiny": Shape(2, 64, 96, 4, 2, 50)}
# The bars are of tokens/s, packed over dense.
WHOLE_CASES = (Case(1.7, 0.8), Case(2.4, 0.9), Case(None, 0.5), Case(None, 0.7), Case(None, kept=4))
CONTEXT = 64  # positions of the cache; all are read in every step


class Block(nn.Module):
    """One layer of the decoder, with a cache of fixed size."""

    cache: Tensor

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.groups, self.size = shape.heads, shape.groups, shape.width // shape.heads
        linear = partial(nn.Linear, bias=False, device=device, dtype=dtype)
        width, hidden, few = shape.width, shape.hidden, self.size * shape.groups
        self.queries, self.keys, self.values = linear(width, width), linear(width, few), linear(width, few)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)
        self.out = linear(width, width)
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width, device=device, dtype=dtype) for _ in range(2))
        cache = torch.zeros(2, 1, shape.groups, CONTEXT, self.size, device=device, dtype=dtype)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor, place: Tensor, rotation: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """One token; `place` is its position, `seen` which positions of the cache count."""
        normed = self.norms[0](x)
        query = rotated(self.queries(normed).view(1, 1, self.heads, self.size).transpose(1, 2), rotation)
        key = rotated(self.keys(normed).view(1, 1, self.groups, self.size).transpose(1, 2), rotation)
        value = self.values(normed).view(1, 1, self.groups, self.size).transpose(1, 2)
        self.cache.index_copy_(3, place, torch.stack((key, value)))
        keys, values = self.cache
        found = functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).reshape(1, -1))
        normed = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of one position."""
    left, right = x.chunk(2, -1)
    return x * rotation[0] + torch.cat((-right, left), -1) * rotation[1]


class Decoder(nn.Module):
    """A decoder with random weights that decodes one token at a time, for its speed alone."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.embedding = nn.Embedding(shape.words, shape.width, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(shape, device, dtype) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, device=device, dtype=dtype)
        self.head = nn.Linear(shape.width, shape.words, bias=False, device=device, dtype=dtype)

    def forward(self, token: Tensor, place: Tensor) -> Tensor:
        """Logits of a token int64 [1] at a position int64 [1]."""
        x = self.embedding(token)
        steps = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32)
        angles = (place * 10000.0 ** (-steps / self.size)).repeat(2)
        rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        seen = (torch.arange(CONTEXT, device=x.device) <= place).view(1, 1, 1, -1)
        for block in self.blocks:
            x = block(x, place, rotation, seen)
        return self.head(self.norm(x))


@torch.no_grad()
def make_zeros(model: nn.Module, case: Case) -> None:
    """Zeros at random places, or n:16, in every linear layer; quality is not looked at."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            made = layer_of((layer.out_features, layer.in_features), case, layer.weight.dtype, layer.weight.device)
            layer.weight.copy_(made.weight * layer.in_features**-0.5)


@torch.no_grad()
def measure_whole(name: str, case: Case, dtype: torch.dtype, device: torch.device, tokens: int) -> dict[str, Any]:
    """Milliseconds of decoding steps, dense and packed, their memory, and whether the logits agree."""
    torch.manual_seed(0)
    model = Decoder(WHOLE[name], device, dtype).eval().requires_grad_(False)
    make_zeros(model, case)
    tried = torch.randint(WHOLE[name].words, (8,), generator=torch.Generator().manual_seed(1)).to(device)
    dense = _decoded(model, tried, device, tokens)
    report = pack(model, memory=device.type == "cpu")  # on a CPU nothing is measured, which would take long
    packed = _decoded(model, tried, device, tokens)
    apart = float((packed["logits"] - dense["logits"]).norm() / dense["logits"].norm())
    return {
        "model": f"{name} shape, random weights", "dtype": str(dtype).removeprefix("torch."), "zeros": case.zeros,
        "bar": case.bar, "packed_layers": len(report.packed), "layers": len(report.layers),
        "left_dense": sorted({row.reason for row in report.layers if row.reason}),
        "dense_ms": dense["ms"], "packed_ms": packed["ms"], "dense_bytes": dense["bytes"],
        "packed_bytes": packed["bytes"], "difference": apart, "right": apart < 0.05,
    }  # fmt: skip


def _decoded(model: Decoder, tokens: Tensor, device: torch.device, calls: int) -> dict[str, Any]:
    """Logits after some tokens, the time of a step (by CUDA graph where there is one), and the bytes of the weights."""
    for block in model.modules():
        if isinstance(block, Block):
            block.cache.zero_()
    for number, token in enumerate(tokens):
        logits = model(token[None], torch.tensor([number], device=device))
    token, place = tokens[:1].clone(), torch.full((1,), len(tokens), device=device)
    times = _times(lambda: model(token, place), device, calls)
    tensors = [one for one in (*model.parameters(), *model.buffers()) if one.device.type == device.type]
    used = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    for layer in model.modules():
        if isinstance(layer, PackedLinear) and layer.streams is not None:
            used |= {tensor.data_ptr(): tensor.nbytes for tensor in layer.streams.tensors}
    return {"logits": logits.float(), "ms": times, "bytes": sum(used.values())}


def _times(step: Callable[[], Any], device: torch.device, calls: int) -> list[float]:
    if device.type == "cuda":
        graph = graph_of([step])
        return [replayed(*graph) / 1e3 for _ in range(calls)]
    taken = []
    for _ in range(calls):
        synchronize(device)
        began = time.perf_counter()
        step()
        taken.append(round((time.perf_counter() - began) * 1e3, 3))
    return taken


def whole_lines(steps: Sequence[dict[str, Any]]) -> list[str]:
    """Tokens/s and memory of each case, in words."""
    lines = []
    for step in steps:
        dense, packed = median(step["dense_ms"]), median(step["packed_ms"])
        said = (
            f"{step['model']}, {step['dtype']}, {step['zeros']} zeros, {step['packed_layers']} of {step['layers']}"
            f" linear layers packed: {1e3 / dense:.1f} tokens/s dense with {step['dense_bytes'] / 2**30:.2f} GiB"
        )
        if not step["right"]:
            lines.append(f"{said}; {DIFFER} by {step['difference']:.1%}.")
            continue
        gained = dense / packed
        bar = "" if step["bar"] is None else f" (bar {step['bar']}x {'met' if gained >= step['bar'] else 'missed'})"
        lines.append(
            f"{said}, {1e3 / packed:.1f} packed with {step['packed_bytes'] / 2**30:.2f} GiB: {gained:.2f}x{bar}."
        )
    return lines
