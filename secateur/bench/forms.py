"""One mask update in every form that is compared: ours, AdamWPrune's three, topk, and torch's own global pruning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from secateur.errors import SecateurError
from secateur.kernels import prune_groups
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


def kthvalue(case: Case) -> list[Tensor]:
    """AdamWPrune's first form: concatenate every score, take the exact k-th, score again for the masks."""
    scores = torch.cat([case.scores(w, v).flatten() for w, v in case.layers])
    cut = torch.kthvalue(scores, int(scores.numel() * case.sparsity)).values
    return [case.scores(w, v) > cut for w, v in case.layers]


def topk(case: Case) -> list[Tensor]:
    """The same with torch.topk, unsorted, which is its fastest mode."""
    scores = torch.cat([case.scores(w, v).flatten() for w, v in case.layers])
    cut = torch.topk(scores, int(scores.numel() * case.sparsity), largest=False, sorted=False).values.amax()
    return [case.scores(w, v) > cut for w, v in case.layers]


def sampled(case: Case) -> list[Tensor]:
    """AdamWPrune's second form: concatenate, k-th of a 2 % sample, score again."""
    scores = torch.cat([case.scores(w, v).flatten() for w, v in case.layers])
    places = torch.randint(0, scores.numel(), (int(scores.numel() * 0.02),), device=scores.device)
    drawn = scores[places]
    cut = torch.kthvalue(drawn, int(drawn.numel() * case.sparsity)).values
    return [case.scores(w, v) > cut for w, v in case.layers]


def single_pass(case: Case) -> list[Tensor]:
    """AdamWPrune's third form: score once and keep all scores, k-th of 1 % samples of each tensor."""
    kept, drawn = [], []
    for w, v in case.layers:
        scores = case.scores(w, v)
        kept.append(scores)
        places = torch.randint(0, scores.numel(), (int(scores.numel() * 0.01),), device=scores.device)
        drawn.append(scores.view(-1)[places])
    sample = torch.cat(drawn)
    cut = torch.kthvalue(sample, int(sample.numel() * case.sparsity)).values
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


def secateur(case: Case) -> list[Tensor]:
    """Secateur's update with bool masks."""
    return ours(case)()


def secateur_packed(case: Case) -> list[Tensor]:
    """Secateur's update with one bit per weight."""
    return ours(case, packed=True)()


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
