"""One mask update in every form that is compared: ours, AdamWPrune's three, topk, and torch's own global pruning.

All score |w| (v + 1e-8)^(1/4) and remove half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from secateur.kernels import prune_groups
from secateur.model.facts import evaluator
from secateur.scores import resolve
from secateur.selection.exact import ScoredTensor
from secateur.selection.masks import from_bits

Layers = list[tuple[Tensor, Tensor]]  # weight and second moment
Form = Callable[[Layers], list[Tensor]]
SPARSITY = 0.5


def make(shapes: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype = torch.float32) -> Layers:
    """Weights and second moments of the sizes training has (v near 1e-9), made on the device from a fixed seed."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(shape: tuple[int, int], scale: float) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator).mul_(scale)

    return [(normal(shape, 0.02), normal(shape, 3e-5).square_()) for shape in shapes]


def weights_of(layers: Layers) -> int:
    return sum(weight.numel() for weight, _ in layers)


def score(weight: Tensor, moment: Tensor) -> Tensor:
    """The score as AdamWPrune wrote it."""
    return torch.abs(weight) * (torch.abs(moment) + 1e-8) ** 0.25


def kthvalue(layers: Layers) -> list[Tensor]:
    """AdamWPrune's first form: concatenate every score, take the exact k-th, score again for the masks."""
    scores = torch.cat([score(w, v).flatten() for w, v in layers])
    cut = torch.kthvalue(scores, int(scores.numel() * SPARSITY)).values
    return [score(w, v) > cut for w, v in layers]


def topk(layers: Layers) -> list[Tensor]:
    """The k-th by way of torch.topk, unsorted, which is its quickest; otherwise the same."""
    scores = torch.cat([score(w, v).flatten() for w, v in layers])
    cut = torch.topk(scores, int(scores.numel() * SPARSITY), largest=False, sorted=False).values.amax()
    return [score(w, v) > cut for w, v in layers]


def sampled(layers: Layers) -> list[Tensor]:
    """AdamWPrune's second: concatenate, k-th of a 2 % sample, score again."""
    scores = torch.cat([score(w, v).flatten() for w, v in layers])
    places = torch.randint(0, scores.numel(), (int(scores.numel() * 0.02),), device=scores.device)
    drawn = scores[places]
    cut = torch.kthvalue(drawn, int(drawn.numel() * SPARSITY)).values
    return [score(w, v) > cut for w, v in layers]


def single_pass(layers: Layers) -> list[Tensor]:
    """Its third: score once and keep all scores, k-th of 1 % samples of each tensor."""
    kept, drawn = [], []
    for w, v in layers:
        scores = score(w, v)
        kept.append(scores)
        places = torch.randint(0, scores.numel(), (int(scores.numel() * 0.01),), device=scores.device)
        drawn.append(scores.view(-1)[places])
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


def pieces_of(layers: Layers) -> list[ScoredTensor]:
    """The layers as a selection takes them."""
    bitter7 = resolve("bitter7")
    pieces = []
    for number, (w, v) in enumerate(layers):
        facts = {"weight": w, "exp_avg_sq": v}
        evaluate = evaluator(bitter7, facts, 0, w.device)
        pieces.append(ScoredTensor(str(number), w.numel(), w.numel(), evaluate, w.device, source=(bitter7, facts)))
    return pieces


def ours(layers: Layers, packed: bool = False) -> Callable[[], list[Tensor]]:
    """Ours, exact, a byte or a bit a weight: an update ready to be called again and again, as a Pruner does."""
    pieces, count = pieces_of(layers), round(SPARSITY * weights_of(layers))
    return lambda: prune_groups([pieces], [count], packed=packed).masks


def secateur(layers: Layers) -> list[Tensor]:
    """Ours, all of it in one call."""
    return ours(layers)()


def secateur_packed(layers: Layers) -> list[Tensor]:
    """The same with a bit a weight."""
    return ours(layers, packed=True)()


def unpacked(masks: Sequence[Tensor], layers: Layers) -> list[Tensor]:
    """Flat bool masks, whichever way they were made."""
    return [
        mask.view(-1) if mask.dtype == torch.bool else from_bits(mask, weight.numel())
        for mask, (weight, _) in zip(masks, layers, strict=True)
    ]


def pruned(masks: Sequence[Tensor], layers: Layers) -> int:
    """How many weights masks remove."""
    return sum(mask.numel() - int(mask.count_nonzero()) for mask in unpacked(masks, layers))


def sorted_masks(layers: Layers) -> list[Tensor]:
    """What a stable sort of all scores gives, each score computed whole by the registered formula: the truth."""
    bitter7 = resolve("bitter7")
    scores = torch.cat([bitter7(weight=w.float(), exp_avg_sq=v.float()).flatten() for w, v in layers])
    kept = torch.ones_like(scores, dtype=torch.bool)
    kept[torch.argsort(scores, stable=True)[: round(SPARSITY * scores.numel())]] = False
    return list(kept.split([w.numel() for w, _ in layers]))


def equal(masks: Sequence[Tensor], expected: Sequence[Tensor], layers: Layers) -> bool:
    """Whether masks agree, weight by weight."""
    return all(torch.equal(a, b) for a, b in zip(unpacked(masks, layers), expected, strict=True))
