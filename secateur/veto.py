"""The veto: candidates of a score are shrunk, and those whose gradients grew are spared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secateur.bits import to_bits
from secateur.blocks import find_blocks
from secateur.errors import PatternError
from secateur.facts import UNKNOWN, target_of
from secateur.patterns import Selection, Target
from secateur.pieces import Where, flat_part
from secateur.registry import Score
from secateur.subject import Facts, Subject

STATISTIC = "gradient_max"

Select = Callable[[list[Target], float, bool], Selection]


def agrees(old: Tensor, new: Tensor, tolerance: float) -> Tensor:
    """The veto: True where a candidate may go, because its gradient grew by no more than the tolerance. A gradient
    that was zero throughout is no evidence."""
    return (new <= old * (1 + tolerance)) & (old > 0)


def growth(old: Tensor, new: Tensor) -> Tensor:
    """By what factor gradients grew; without evidence, more than any other."""
    return torch.where(old > 0, new / old, UNKNOWN)


@dataclass(frozen=True)
class Trial:
    """Candidates of one site (True = candidate), and its gradients before and after they were shrunk."""

    number: int
    candidates: Tensor
    old: Tensor
    new: Tensor


class Probe:
    """Probes of one subject: candidates by a score, and what the gradients say to them."""

    def __init__(
        self, subject: Subject, score: Score, select: Select, *, shrink: float, order: str, group: int | str
    ) -> None:
        self.subject, self.score, self._select = subject, score, select
        self.shrink, self.order, self.group = shrink, order, group
        self._facts: Facts | None = None

    def facts(self, refresh: bool = False) -> Facts:
        """What the score reads; gathered once, unless it is to be refreshed."""
        if self._facts is None or refresh:
            self._facts = self.subject.facts(self.score)
        return self._facts

    @torch.no_grad()
    def masks_at(self, sparsity: float, refresh: bool = False, anew: bool = False) -> list[Tensor]:
        """What the score alone would keep at this sparsity, as bools; what is gone already stays gone, unless it is to
        choose `anew`."""
        targets = self.subject.targets(self.score, self.facts(refresh), anew)
        chosen = self._select(targets, sparsity, False).masks
        return [m.view(site.parameter.shape) for m, site in zip(chosen, self.subject.sites, strict=True)]

    def candidates(self, sparsity: float, refresh: bool = False) -> list[Tensor]:
        """Living weights the score would remove."""
        held = self.subject.held
        return [held.bools(n) & ~mask for n, mask in enumerate(self.masks_at(sparsity, refresh))]

    def trials(self, numbers: Sequence[int], candidates: Sequence[Tensor]) -> list[Trial]:
        """Gradients of these sites as they are, and with their candidates shrunk. Weights are as before afterwards, to
        the bit: only the candidates' values were kept, in their own type."""
        sites = [self.subject.sites[n] for n in numbers]
        old = self.subject.gradients({STATISTIC}, sites)
        weights = [site.parameter.detach() for site in sites]
        values = [weight[candidates[n]] for weight, n in zip(weights, numbers, strict=True)]
        try:
            for weight, value, n in zip(weights, values, numbers, strict=True):
                weight[candidates[n]] = value * self.shrink
            new = self.subject.gradients({STATISTIC}, sites)
        finally:
            for weight, value, n in zip(weights, values, numbers, strict=True):
                weight[candidates[n]] = value
        found = zip(numbers, sites, strict=True)
        return [Trial(n, candidates[n], old[s.name][STATISTIC], new[s.name][STATISTIC]) for n, s in found]

    def groups(self) -> list[list[int]]:
        """Sites that are probed together, in the order they are."""
        sites = self.subject.sites
        if self.order == "joint":
            return [list(range(len(sites)))]
        groups = self._blocks() if self.group == "block" else None
        if groups is None:
            size = self.group if isinstance(self.group, int) else 1
            order = list(range(len(sites)))
            if self.order == "size":
                order.sort(key=lambda n: -sites[n].parameter.numel())
            groups = [order[start : start + size] for start in range(0, len(order), size)]
        elif self.order == "size":
            groups.sort(key=lambda group: -sum(sites[n].parameter.numel() for n in group))
        return groups[::-1] if self.order == "reverse" else groups

    def _blocks(self) -> list[list[int]]:
        """The sites of every block of the model; those outside of all are the last group."""
        subject = self.subject
        blocks = find_blocks(subject.model, subject.batches[0], subject.loss, subject.sites)
        if not blocks:
            raise PatternError("No blocks follow one another in this model. Use group=1, or another number of layers.")
        inside = [{id(parameter) for parameter in block.parameters()} for block in blocks]
        numbers = range(len(subject.sites))
        groups = [[n for n in numbers if id(subject.sites[n].parameter) in block] for block in inside]
        rest = sorted(set(numbers) - {n for group in groups for n in group})
        return [group for group in [*groups, rest] if group]

    def hold(self, gone: dict[int, Tensor]) -> None:
        """Take out these weights of these sites."""
        held = self.subject.held
        self.wear([held.bools(n) & ~gone[n] if n in gone else held.bools(n) for n in range(len(self.subject.sites))])

    def wear(self, masks: Sequence[Tensor]) -> None:
        """Hold these masks, whatever was held before, and zero what they say is gone."""
        flat = [mask.reshape(-1) for mask in masks]
        self.subject.held.take([to_bits(mask) for mask in flat] if self.subject.held.packed else flat)
        self.subject.apply()

    def level(
        self, sparsity: float, tolerance: float, refresh: bool = False, exactly: float | None = None
    ) -> list[Trial]:
        """One pass over all groups: whatever the veto lets go is gone; or, with `exactly`, as many as that asks for.
        Returns the trials of a joint probe."""
        trials: list[Trial] = []
        candidates = self.candidates(sparsity, refresh)
        empty = 0
        for number, group in enumerate(self.groups()):
            if refresh and number:
                candidates = self.candidates(sparsity, refresh)
            trials = self.trials(group, candidates)
            if exactly is None:
                self.hold({t.number: t.candidates & agrees(t.old, t.new, tolerance) for t in trials})
            else:
                self.rank(trials, exactly)
            empty += sum(int((t.candidates & (t.old == 0)).sum()) for t in trials)
        if empty:
            self.subject.notes["empty"] = f"{empty:,} candidates had no gradient at all, which is no evidence: kept."
        return trials if self.order == "joint" else []

    def rank(self, trials: Sequence[Trial], sparsity: float) -> None:
        """Exactly this sparsity: candidates go in the order in which their gradients grew least."""
        targets: list[Target] = []
        for trial in trials:
            site = self.subject.sites[trial.number]
            mask, dead = self.subject.held.masks[trial.number], self.subject.held.dead[trial.number]
            target = target_of(site, self.score, self.facts()[site.name], mask, dead)
            targets.append(_ranked(target, trial))
        picked: Selection = self._select(targets, sparsity, False)
        flat = zip((trial.number for trial in trials), picked.masks, strict=True)
        shapes = self.subject.held.shapes
        self.hold({n: ~mask.view(shapes[n]) for n, mask in flat})


def _ranked(target: Target, trial: Trial) -> Target:
    """The site with growth for a score; what is not a candidate comes last."""

    def score(where: Where) -> Tensor:
        grown = growth(flat_part(trial.old, where), flat_part(trial.new, where)).clamp(max=UNKNOWN)
        return torch.where(flat_part(trial.candidates, where), grown, 2 * UNKNOWN)

    return replace(target, piece=replace(target.piece, score=score, source=None))
