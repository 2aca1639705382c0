"""Measure one mask update: exact selection beside AdamWPrune's forms, topk and torch's global pruning.

Every form prunes the same made-up weights by the same score to the same sparsity; there is one table for each size and
score. Ratios are shown only if the masks of secateur equal those of a stable sort, bool and packed. On a GPU, "floor"
is the time to read the weights and moments and write the masks once at the measured copy bandwidth, and the bar is 1.5
ms at 402,653,184 fp32 weights. On a CPU, "cold" calls start after the allocator has returned its memory.

Example: secateur bench select --device cpu --dims 512 --scores variance
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from secateur.bench.measuring import (
    WARM_UP,
    against,
    bandwidth,
    floor_ms,
    kind,
    milliseconds,
    ratio,
    samples,
    scratch_mib,
)
from secateur.errors import SecateurError
from secateur.kernels import prune_groups
from secateur.lab import record
from secateur.report import text_table
from secateur.scores import Score, resolve, scores
from secateur.selection.exact import ScoredTensor, evaluator
from secateur.selection.masks import from_bits

Layers = list[tuple[Tensor, Tensor]]  # weight and second moment
FACTS = ("weight", "exp_avg_sq")
ADAMWPRUNE = "bitter7"  # the score that AdamWPrune wrote as |w| (|v| + 1e-8)^0.25


@dataclass(frozen=True)
class Case:
    """Layers to prune, with score and sparsity."""

    layers: Layers
    score: Score
    sparsity: float = 0.5

    @property
    def weights(self) -> int:
        return sum(weight.numel() for weight, _ in self.layers)

    @property
    def count(self) -> int:
        """How many weights exact pruning removes."""
        return round(self.sparsity * self.weights)

    def facts(self, weight: Tensor, moment: Tensor) -> dict[str, Any]:
        return {name: value for name, value in zip(FACTS, (weight, moment), strict=True) if name in self.score.needs}

    def scores(self, weight: Tensor, moment: Tensor) -> Tensor:
        """Scores as the other forms compute them; bitter7 as AdamWPrune wrote it."""
        if self.score.name == ADAMWPRUNE:
            return torch.abs(weight) * (torch.abs(moment) + 1e-8) ** 0.25
        return self.score(**self.facts(weight, moment))


Form = Callable[[Case], list[Tensor]]


def check_score(name: str) -> Score:
    """The score of this name, if it can be computed from the weights and second moments that benchmarks make up."""
    found = resolve(name)
    if missing := set(found.needs) - set(FACTS):
        usable = [one for one in scores() if set(resolve(one).needs) <= set(FACTS)]
        raise SecateurError(
            f"--scores {name}: this benchmark makes up weights and second moments, but {name} also reads"
            f" {', '.join(sorted(missing))}. Use {', '.join(usable)}."
        )
    return found


def make(
    shapes: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Layers:
    """Random weights and second moments of a realistic size (v near 1e-9), made on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, int], scale: float) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator).mul_(scale)

    return [(normal(shape, 0.02), normal(shape, 3e-5).square_()) for shape in shapes]


def share_of(scores: Tensor, share: float) -> int:
    """So many of the scores as AdamWPrune's forms round it, but at least one."""
    return max(1, int(scores.numel() * share))


def kthvalue(case: Case) -> list[Tensor]:
    """AdamWPrune's first form: concatenate every score, take the exact k-th, score again for the masks."""
    scores = torch.cat([case.scores(w, v).flatten() for w, v in case.layers])
    cut = torch.kthvalue(scores, share_of(scores, case.sparsity)).values
    return [case.scores(w, v) > cut for w, v in case.layers]


def topk(case: Case) -> list[Tensor]:
    """The same with torch.topk, unsorted, which is its fastest mode."""
    scores = torch.cat([case.scores(w, v).flatten() for w, v in case.layers])
    cut = torch.topk(scores, share_of(scores, case.sparsity), largest=False, sorted=False).values.amax()
    return [case.scores(w, v) > cut for w, v in case.layers]


def sampled(case: Case) -> list[Tensor]:
    """AdamWPrune's second form: concatenate, k-th of a 2 % sample, score again."""
    scores = torch.cat([case.scores(w, v).flatten() for w, v in case.layers])
    places = torch.randint(0, scores.numel(), (share_of(scores, 0.02),), device=scores.device)
    drawn = scores[places]
    cut = torch.kthvalue(drawn, share_of(drawn, case.sparsity)).values
    return [case.scores(w, v) > cut for w, v in case.layers]


def single_pass(case: Case) -> list[Tensor]:
    """AdamWPrune's third form: score once and keep all scores, k-th of 1 % samples of each tensor."""
    kept, drawn = [], []
    for w, v in case.layers:
        scores = case.scores(w, v)
        kept.append(scores)
        places = torch.randint(0, scores.numel(), (share_of(scores, 0.01),), device=scores.device)
        drawn.append(scores.view(-1)[places])
    sample = torch.cat(drawn)
    cut = torch.kthvalue(sample, share_of(sample, case.sparsity)).values
    return [scores > cut for scores in kept]


def global_unstructured(case: Case) -> list[Tensor]:
    """torch.nn.utils.prune with the same scores."""
    modules = []
    for w, _ in case.layers:
        module = nn.Module()
        module.weight = nn.Parameter(w, requires_grad=False)
        modules.append(module)
    scores = {(module, "weight"): case.scores(w, v) for module, (w, v) in zip(modules, case.layers, strict=True)}
    named = [(module, "weight") for module in modules]
    prune.global_unstructured(named, prune.L1Unstructured, importance_scores=scores, amount=case.sparsity)
    return [module.get_buffer("weight_mask").bool() for module in modules]


def scored_tensors(case: Case) -> list[ScoredTensor]:
    """The layers as input of a selection."""
    found = []
    for number, (w, v) in enumerate(case.layers):
        facts = case.facts(w, v)
        evaluate = evaluator(case.score, facts, 0, w.device)
        found.append(ScoredTensor(str(number), w.numel(), w.numel(), evaluate, w.device, source=(case.score, facts)))
    return found


def ours(case: Case, packed: bool = False) -> Callable[[], list[Tensor]]:
    """Secateur's exact update, with a byte or a bit per weight, ready to be called repeatedly as a Pruner does."""
    tensors, count = scored_tensors(case), case.count
    return lambda: prune_groups([tensors], [count], packed=packed).masks


def unpacked(masks: Sequence[Tensor], case: Case) -> list[Tensor]:
    """The masks as flat bool tensors."""
    return [
        mask.view(-1) if mask.dtype == torch.bool else from_bits(mask, weight.numel())
        for mask, (weight, _) in zip(masks, case.layers, strict=True)
    ]


def pruned(masks: Sequence[Tensor], case: Case) -> int:
    """How many weights the masks remove."""
    return sum(mask.numel() - int(mask.count_nonzero()) for mask in unpacked(masks, case))


def sorted_masks(case: Case) -> list[Tensor]:
    """The right masks: a stable sort of all scores, each computed whole by the registered formula."""
    found = [case.score(**case.facts(w.float(), v.float())).flatten() for w, v in case.layers]
    scores = torch.cat(found)
    del found
    kept = torch.ones_like(scores, dtype=torch.bool)
    kept[torch.argsort(scores, stable=True)[: case.count]] = False
    return list(kept.split([w.numel() for w, _ in case.layers]))


def equal(masks: Sequence[Tensor], expected: Sequence[Tensor], case: Case) -> bool:
    """Whether the masks agree, weight by weight."""
    return all(torch.equal(a, b) for a, b in zip(unpacked(masks, case), expected, strict=True))


OURS, PACKED = EXACT = "secateur, bool masks", "secateur, packed masks"
SAMPLED: dict[str, Form] = {"single pass, 1 % sample": single_pass, "2 % sample": sampled}
RIVALS: dict[str, dict[str, Form]] = {
    "gpu": {**SAMPLED, "topk": topk, "kthvalue": kthvalue},
    "cpu": {**SAMPLED, "kthvalue": kthvalue, "global_unstructured": global_unstructured},
}
SLOW = {"gpu": ("kthvalue",), "cpu": ("kthvalue", "global_unstructured")}  # seconds per call, so only a few are timed
SLOW_CALLS = 3  # on a GPU
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dims": [1024, 2048], "layers": 12, "calls": 5, "rounds": 4},
    "gpu": {"dims": [4096], "layers": 24, "calls": 30, "rounds": 1},
}
BAR_MS, BAR_WEIGHTS = 1.5, 402_653_184  # on a GPU, fp32


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    device: torch.device = options.device
    scores = [check_score(name) for name in options.scores]
    dims, layers, calls, rounds = (getattr(options, name) or value for name, value in DEFAULTS[kind(device)].items())
    data: dict[str, Any] = {
        "seed": options.seed, "sparsity": options.sparsity, "dtype": options.dtype, "scores": options.scores,
        "sizes": [],
    }  # fmt: skip
    speed = bandwidth(device) if kind(device) == "gpu" else 0.0
    if speed:
        data["bandwidth"] = speed
    for dim in dims:
        made = make([(dim, dim)] * layers, device, getattr(torch, options.dtype), options.seed)
        for score in scores:
            case = Case(made, score, options.sparsity)
            measured = measure_gpu(case, device, speed, calls, rounds) if speed else measure_cpu(case, calls, rounds)
            size = {"dim": dim, "layers": layers, "dtype": options.dtype, "score": str(score), **measured}
            data["sizes"].append(size)
            path = record.save("select", data, options, device)
            print(text_table(*table(size)), end="\n\n", flush=True)
    print(path)
    return 0


def _calls(case: Case, where: str) -> dict[str, Callable[[], list[Tensor]]]:
    """Every form, ready to be called. Ours prepares its tensors once, as a Pruner does."""
    own = {OURS: ours(case), PACKED: ours(case, packed=True)}
    return own | {name: partial(form, case) for name, form in RIVALS[where].items()}


def _checked(case: Case, calls: Mapping[str, Callable[[], list[Tensor]]], device: torch.device) -> dict[str, Any]:
    """Whether our masks are right, what every form prunes, and its scratch memory."""
    expected = sorted_masks(case)
    agrees = {name: equal(calls[name](), expected, case) for name in EXACT}
    del expected
    return {
        "weights": case.weights,
        "asked": case.count,
        "right": all(agrees.values()),
        "agrees": agrees,
        "pruned": {name: pruned(call(), case) for name, call in calls.items()},
        "scratch_mib": {name: scratch_mib(call, device) for name, call in calls.items()},
    }


def measure_gpu(case: Case, device: torch.device, speed: float, calls: int, rounds: int) -> dict[str, Any]:
    """Samples of every form at one size, with the floor of the memory bandwidth."""
    by_name = _calls(case, "gpu")
    taken: dict[str, list[float]] = {name: [] for name in by_name}
    for _ in range(rounds):
        for name, call in by_name.items():
            count, warm_up = (min(calls, SLOW_CALLS), 1) if name in SLOW["gpu"] else (calls, WARM_UP)
            taken[name] += samples(call, device, count, warm_up)
    read = sum(weight.nbytes + moment.nbytes for weight, moment in case.layers)
    floors = {name: floor_ms(read + case.weights / (8 if name == PACKED else 1), speed) for name in taken}
    return {**_checked(case, by_name, device), "milliseconds": taken, "floor_ms": floors}


def measure_cpu(case: Case, calls: int, rounds: int) -> dict[str, Any]:
    """Samples of every form at one size, warm and cold."""
    cpu = torch.device("cpu")
    by_name = _calls(case, "cpu")
    warm: dict[str, list[float]] = {name: [] for name in by_name}
    cold: dict[str, list[float]] = {name: [] for name in by_name}
    for _ in range(rounds):
        for name, call in by_name.items():
            slow = name in SLOW["cpu"]
            if not slow:
                warm[name] += samples(call, cpu, calls, warm_up=1)
            for _ in range(1 if slow else calls):
                return_memory()
                cold[name].append(milliseconds(call, cpu))
    return {**_checked(case, by_name, cpu), "in_a_row": warm, "now_and_then": cold}


def return_memory() -> None:
    """Ask glibc to return freed memory to the system; other C libraries have no such call."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # Windows does not take None
        ctypes.CDLL(None).malloc_trim(0)


def table(size: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows for one size and score; ratios only if our masks were right."""
    return gpu_table(size) if "floor_ms" in size else cpu_table(size)


def _title(size: dict[str, Any]) -> str:
    """Records without a score are of bitter7."""
    return f"{size['weights'] / 1e6:.2f} M weights, {size.get('score', ADAMWPRUNE)}"


def _error(size: dict[str, Any], name: str) -> str:
    """How many weights too many or too few a form pruned; records without the count asked for half."""
    off = size["pruned"][name] - size.get("asked", round(0.5 * size["weights"]))
    return f"{off:+,}" if off else "0"


def _bar(size: dict[str, Any], name: str, median: float) -> str:
    stated = size["weights"] == BAR_WEIGHTS and size.get("dtype", "float32") == "float32"
    return against(median, BAR_MS, size["right"]) if stated and name in EXACT else "-"


def gpu_table(size: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of a size measured on a GPU."""
    columns = ("ms", f"bar {BAR_MS} ms", "to ours", "floor ms", "to floor", "scratch MiB", "count error")
    ours = statistics.median(size["milliseconds"][OURS])
    rows = []
    for name, taken in size["milliseconds"].items():
        median, floor = statistics.median(taken), size["floor_ms"][name]
        to_ours, to_floor = ratio(median / ours, size["right"]), ratio(median / floor, size["right"])
        figures = f"{median:.2f}", _bar(size, name, median), to_ours, f"{floor:.2f}", to_floor
        rows.append((name, *figures, f"{size['scratch_mib'][name]:.0f}", _error(size, name)))
    return (_title(size), *columns), rows


def cpu_table(size: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of a size measured on a CPU."""
    columns = ("ms (cold)", "to ours", "ms (warm)", "to ours", "scratch MiB", "count error")
    own = OURS if OURS in size["pruned"] else "secateur"  # as older records name it
    rows = []
    for name in size["pruned"]:
        cells = [name]
        for which in ("now_and_then", "in_a_row"):
            if not size[which][name]:
                cells += ["-", "-"]
                continue
            median, ours = (statistics.median(size[which][one]) for one in (name, own))
            cells += [f"{median:.0f}", ratio(median / ours, size["right"])]
        rows.append((*cells, f"{size['scratch_mib'][name]:.0f}", _error(size, name)))
    return (_title(size), *columns), rows
