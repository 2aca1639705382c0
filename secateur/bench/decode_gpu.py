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
from typing import Any, NamedTuple

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


class Between(NamedTuple):
    """What a decoder computes between its linear layers: fused by torch.compile on GPUs, as serving engines have it."""

    positions: Callable[..., tuple[Tensor, Tensor, Tensor]]
    added: Callable[..., tuple[Tensor, Tensor]]
    attended: Callable[..., Tensor]
    gated: Callable[..., Tensor]


def between(device: torch.device) -> Between:
    """These functions for a device."""
    plain = Between(positions, added, attended, gated)
    if device.type != "cuda":
        return plain
    fused: list[Any] = [torch.compile(function, fullgraph=True, dynamic=False) for function in plain]
    return Between(*fused)


def positions(place: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines and sines of rotary embedding at a position, fp32 [size], and which positions of the cache count."""
    steps = torch.arange(0, size, 2, device=place.device, dtype=torch.float32)
    angles = (place * 10000.0 ** (-steps / size)).repeat(2)
    return angles.cos(), angles.sin(), torch.arange(CONTEXT, device=place.device) <= place


def added(x: Tensor, change: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum, and its RMS norm times a weight."""
    x = x + change
    return x, functional.rms_norm(x, x.shape[-1:], weight)


def attended(
    query: Tensor, key: Tensor, value: Tensor, cache: Tensor, place: Tensor, at: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Attention of one token over a cache [2, groups, CONTEXT, size], to which its key and value are added."""
    groups, size = cache.shape[1], cache.shape[3]
    cosine, sine, seen = at
    query = rotated(query.view(groups, -1, size), cosine, sine)
    key = rotated(key.view(groups, 1, size), cosine, sine)
    cache.index_copy_(2, place, torch.stack((key, value.view(groups, 1, size))))
    keys, values = cache.unsqueeze(2)
    scores = (query.unsqueeze(2).float() * keys).sum(-1) * size**-0.5
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (shares.unsqueeze(-1) * values).sum(2).to(query.dtype).view(1, -1)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of one position."""
    left, right = x.chunk(2, -1)
    return (x * cosine + torch.cat((-right, left), -1) * sine).to(x.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate times the other half."""
    return functional.silu(gate) * up


class Block(nn.Module):
    """One layer of the decoder, with a cache of fixed size."""

    cache: Tensor

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        size = shape.width // shape.heads
        linear = partial(nn.Linear, bias=False, device=device, dtype=dtype)
        width, hidden, few = shape.width, shape.hidden, size * shape.groups
        self.queries, self.keys, self.values = linear(width, width), linear(width, few), linear(width, few)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)
        self.out = linear(width, width)
        self.norms = nn.ParameterList(torch.ones(width, device=device, dtype=dtype) for _ in range(2))
        cache = torch.zeros(2, shape.groups, CONTEXT, size, device=device, dtype=dtype)
        self.register_buffer("cache", cache, persistent=False)

    def forward(
        self, x: Tensor, change: Tensor, place: Tensor, at: tuple[Tensor, Tensor, Tensor], run: Between
    ) -> tuple[Tensor, Tensor]:
        """One token at a position: the residual stream, and what is to be added to it."""
        x, normed = run.added(x, change, self.norms[0])
        found = run.attended(self.queries(normed), self.keys(normed), self.values(normed), self.cache, place, at)
        x, normed = run.added(x, self.out(found), self.norms[1])
        return x, self.down(run.gated(self.gate(normed), self.up(normed)))


class Decoder(nn.Module):
    """A decoder with random weights that decodes one token at a time, for its speed alone."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.embedding = nn.Embedding(shape.words, shape.width, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(shape, device, dtype) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width, device=device, dtype=dtype))
        self.head = nn.Linear(shape.width, shape.words, bias=False, device=device, dtype=dtype)
        self.between = between(device)

    def forward(self, token: Tensor, place: Tensor) -> Tensor:
        """Logits of a token int64 [1] at a position int64 [1]."""
        x = self.embedding(token)
        at, change = self.between.positions(place, self.size), torch.zeros_like(x)
        for block in self.blocks:
            x, change = block(x, change, place, at, self.between)
        return self.head(self.between.added(x, change, self.norm)[1])


@torch.no_grad()
def make_zeros(model: nn.Module, case: Case) -> None:
    """Zeros at random places, or n:16, in every linear layer. For speed alone: quality does not matter here."""
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
        graph = graph_of([step], device)
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
