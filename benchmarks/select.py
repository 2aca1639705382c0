"""One mask update: the exact streamed selection beside AdamWPrune's three forms and torch's own global pruning.

    python -m benchmarks.select [--dims 1024 2048] [--layers 12] [--calls 5] [--rounds 4]

All score |w| (v + 1e-8)^(1/4) at 50 %, and the forms take turns for several rounds. In a round a form is called
"in a row", which lets the allocator keep the pages of one call for the next, and then "now and then": before each call
the allocator gives free pages back, as it has in a training loop that updates masks every hundred steps. No ratio is
printed unless the masks are right.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import milliseconds, save
from secateur.facts import evaluator
from secateur.pieces import Piece
from secateur.registry import resolve
from secateur.report import text_table
from secateur.selection import prune_exactly

Layers = list[tuple[Tensor, Tensor]]  # weight and second moment
SPARSITY = 0.5


def score(weight: Tensor, moment: Tensor) -> Tensor:
    """The score as AdamWPrune wrote it."""
    return torch.abs(weight) * (torch.abs(moment) + 1e-8) ** 0.25


def kthvalue(layers: Layers) -> list[Tensor]:
    """AdamWPrune's first form: concatenate every score, take the exact k-th, score again for the masks."""
    scores = torch.cat([score(w, v).flatten() for w, v in layers])
    cut = torch.kthvalue(scores, int(scores.numel() * SPARSITY)).values
    return [score(w, v) > cut for w, v in layers]


def sampled(layers: Layers) -> list[Tensor]:
    """Its second: concatenate, k-th of a 2 % sample, score again."""
    scores = torch.cat([score(w, v).flatten() for w, v in layers])
    drawn = scores[torch.randint(0, scores.numel(), (int(scores.numel() * 0.02),))]
    cut = torch.kthvalue(drawn, int(drawn.numel() * SPARSITY)).values
    return [score(w, v) > cut for w, v in layers]


def single_pass(layers: Layers) -> list[Tensor]:
    """Its third: score once and keep all scores, k-th of 1 % samples of each tensor."""
    kept, drawn = [], []
    for w, v in layers:
        scores = score(w, v)
        kept.append(scores)
        drawn.append(scores.view(-1)[torch.randint(0, scores.numel(), (int(scores.numel() * 0.01),))])
    sample = torch.cat(drawn)
    cut = torch.kthvalue(sample, int(sample.numel() * SPARSITY)).values
    return [scores > cut for scores in kept]


def global_unstructured(layers: Layers) -> list[Tensor]:
    """torch.nn.utils.prune, handed the same scores."""
    modules = []
    for w, _ in layers:
        module = nn.Module()
        module.weight = nn.Parameter(w, requires_grad=False)
        modules.append(module)
    scores = {(module, "weight"): score(w, v) for module, (w, v) in zip(modules, layers, strict=True)}
    named = [(module, "weight") for module in modules]
    prune.global_unstructured(named, prune.L1Unstructured, importance_scores=scores, amount=SPARSITY)
    return [module.get_buffer("weight_mask").bool() for module in modules]


def secateur(layers: Layers) -> list[Tensor]:
    """Ours: exact, streamed."""
    bitter7 = resolve("bitter7")
    pieces = []
    for number, (w, v) in enumerate(layers):
        evaluate = evaluator(bitter7, {"weight": w, "exp_avg_sq": v}, 0, w.device)
        pieces.append(Piece(str(number), w.numel(), w.numel(), evaluate, w.device))
    return prune_exactly(pieces, round(SPARSITY * sum(piece.total for piece in pieces)))[1]


FORMS: dict[str, Callable[[Layers], list[Tensor]]] = {
    "secateur": secateur,
    "single pass, 1 % sample": single_pass,
    "2 % sample": sampled,
    "kthvalue": kthvalue,
    "global_unstructured": global_unstructured,
}


def make(dim: int, layers: int) -> Layers:
    """Weights and second moments of the sizes training has: v near 1e-9."""
    torch.manual_seed(0)
    return [(torch.randn(dim, dim) * 0.02, (torch.randn(dim, dim) * 3e-5).square()) for _ in range(layers)]


def right(layers: Layers) -> bool:
    """Our masks against a stable sort of all scores, each computed whole by the registered formula."""
    bitter7 = resolve("bitter7")
    scores = torch.cat([bitter7(weight=w, exp_avg_sq=v).flatten() for w, v in layers])
    expected = torch.ones_like(scores, dtype=torch.bool)
    expected[torch.argsort(scores, stable=True)[: round(SPARSITY * scores.numel())]] = False
    return torch.equal(torch.cat(secateur(layers)), expected)


def scratch(form: Callable[[Layers], list[Tensor]], layers: Layers) -> float:
    """MiB allocated at the highest, less one byte a weight for the masks, by torch's own memory profile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        form(layers)
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return round((peak - sum(w.numel() for w, _ in layers)) / 2**20, 1)


def give_pages_back() -> None:
    """Ask glibc for what `free` left in its hands; elsewhere there is nothing to ask."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def measure(dim: int, count: int, calls: int, rounds: int) -> dict[str, Any]:
    """Samples of every form at one size."""
    layers = make(dim, count)
    in_a_row: dict[str, list[float]] = {name: [] for name in FORMS}
    now_and_then: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(rounds):
        for name, form in FORMS.items():
            slow = name in ("kthvalue", "global_unstructured")  # seconds a call: one a round is enough
            if not slow:
                form(layers)
                in_a_row[name] += [milliseconds(partial(form, layers)) for _ in range(calls)]
            for _ in range(1 if slow else calls):
                give_pages_back()
                now_and_then[name].append(milliseconds(partial(form, layers)))
    gone = {name: sum(int((~mask).sum()) for mask in form(layers)) for name, form in FORMS.items()}
    return {
        "dim": dim,
        "layers": count,
        "weights": dim * dim * count,
        "right": right(layers),
        "in_a_row": in_a_row,
        "now_and_then": now_and_then,
        "pruned": gone,
        "scratch_mib": {name: scratch(form, layers) for name, form in FORMS.items()},
    }


def table(size: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows for one size; ratios only if the masks were right."""
    sizes = f"{size['weights'] / 1e6:.2f} M weights"
    header = (sizes, "ms now and then", "to ours", "ms in a row", "to ours", "scratch MiB", "pruned, off by")
    wanted = round(SPARSITY * size["weights"])
    rows = []
    for name in size["pruned"]:
        cells = [name]
        for kind in ("now_and_then", "in_a_row"):
            if not size[kind][name]:
                cells += ["-", "-"]
                continue
            median, ours = (statistics.median(size[kind][which]) for which in (name, "secateur"))
            cells += [f"{median:.0f}", f"{median / ours:.2f}x" if size["right"] else "masks differ"]
        off = size["pruned"][name] - wanted
        rows.append((*cells, f"{size['scratch_mib'][name]:.0f}", f"{off:+,}" if off else "0"))
    return header, rows


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    sizes = [measure(dim, options.layers, options.calls, options.rounds) for dim in options.dims]
    for size in sizes:
        print(text_table(*table(size)), end="\n\n")
    print(save("select", {"seed": 0, "sparsity": SPARSITY, "sizes": sizes}))


if __name__ == "__main__":
    main()
