"""The veto: candidates of a score are shrunk, and those whose gradients grew are spared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secateur.errors import PatternError
from secateur.model.facts import UNREACHED, kept_last, target_of
from secateur.oneshot.calibration import Facts, Subject
from secateur.scores import Score
from secateur.selection import Select, Selection, Target
from secateur.selection.exact import Where, flat_part
from secateur.selection.masks import as_bool, to_bits

STATISTIC = "gradient_max"
MOST_GROWTH = 1e6


def agrees(old: Tensor, new: Tensor, tolerance: float) -> Tensor:
    """The veto: True where a candidate may go, because its gradient grew by no more than the tolerance. One that was
    zero and stayed zero has not grown."""
    return new <= old * (1 + tolerance)


def growth(old: Tensor, new: Tensor) -> Tensor:
    """By what factor gradients grew, at most `MOST_GROWTH`: zero for those that were zero and stayed zero."""
    return torch.where(new == 0, 0.0, new / old).clamp(max=MOST_GROWTH)


def tempered(scores: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Scores times the root of growth: a weight whose gradient grew is worth more than its score says. (Growth alone
    ranks far worse, by either measure of docs/after-training.md.)"""
    factor = growth(old, new).sqrt()
    return torch.where(scores >= 0, scores * factor, scores / factor)


@dataclass(frozen=True)
class Trial:
    """Candidates of one site (True = candidate, bools or bits), its gradients before and after they shrank, and which
    of its matrices inputs reached."""

    number: int
    shape: torch.Size
    candidates: Tensor
    old: Tensor
    new: Tensor
    reached: Tensor

    def bools(self) -> Tensor:
        """The candidates in the weight's shape."""
        return as_bool(self.candidates, self.shape)

    def going(self, tolerance: float) -> Tensor:
        """Candidates that the veto lets go; none where no inputs came, since nothing was tried there."""
        device = self.candidates.device
        agreed = agrees(self.old.to(device).float(), self.new.to(device).float(), tolerance)
        return self.bools() & agreed & self._tried()

    def spared(self) -> int:
        """How many candidates no inputs reached."""
        return 0 if bool(self.reached.all()) else int((self.bools() & ~self._tried()).sum())

    def _tried(self) -> Tensor:
        return self.reached.to(self.candidates.device).view(-1, *[1] * (len(self.shape) - 1))


class Probe:
    """Probes of one subject: candidates by a score, and what the gradients say to them."""

    def __init__(
        self, subject: Subject, score: Score, select: Select, *, shrink: float, order: str, group: int | str
    ) -> None:
        self.subject, self.score, self._select = subject, score, select
        self.shrink, self.order, self.group = shrink, order, group
        self._facts: Facts | None = None
        subject.copies = 3 if order == "joint" else 1  # gradients before and after, and the candidates' values
        self._before: list[Tensor] = []  # masks before a joint level
        self._old: dict[str, Tensor] = {}  # gradients that came with the facts, until they are used

    def facts(self, refresh: bool = False) -> Facts:
        """What the score reads; gathered once, unless it is to be refreshed. A joint probe wants all gradients of the
        same model anyway: they come from the same sweep."""
        if self._facts is None or refresh:
            more = {STATISTIC} if self.order == "joint" else set()
            self._facts = self.subject.facts(self.score, more)
            self._old = {name: facts.pop(STATISTIC) for name, facts in self._facts.items() if more}
        return self._facts

    @torch.no_grad()
    def kept_at(self, sparsity: float, refresh: bool = False, anew: bool = False) -> list[Tensor]:
        """Flat masks of what the score alone would keep at this sparsity; what is gone already stays gone, unless it is
        to choose `anew`."""
        facts = self.facts(refresh)
        if anew:
            self._old = {}  # of other weights than those that will be probed
        with self.subject.stages.stage("selection"):
            targets = self.subject.targets(self.score, facts, sparsity, self._select.together, anew)
            return self._select(targets, sparsity, self.subject.held.packed).masks

    def candidates(self, sparsity: float, refresh: bool = False) -> list[Tensor]:
        """Living weights the score would remove, as flat masks."""
        held, found = self.subject.held, []
        for number, mask in enumerate(self.kept_at(sparsity, refresh)):
            going = held.bools(number) & ~as_bool(mask, held.shapes[number])
            found.append(self._flat(going))
        return found

    def _flat(self, mask: Tensor) -> Tensor:
        return to_bits(mask.reshape(-1)) if self.subject.held.packed else mask.reshape(-1)

    def trials(self, numbers: Sequence[int], candidates: Sequence[Tensor]) -> list[Trial]:
        """Gradients of these sites as they are, and with their candidates shrunk. Weights are as before afterwards, to
        the bit: only the candidates' values were kept, in their own type."""
        subject, sites = self.subject, [self.subject.sites[n] for n in numbers]
        old = self._old or {n: facts[STATISTIC] for n, facts in subject.gradients({STATISTIC}, sites).items()}
        self._old = {}
        places = {statistic.device for statistic in old.values()}  # where there is room for all, there is for values
        aside = places.pop() if len(places) == 1 else torch.device("cpu")
        values: list[Tensor] = []
        try:
            for site, n in zip(sites, numbers, strict=True):
                weight, chosen = site.parameter.detach(), as_bool(candidates[n], site.parameter.shape)
                values.append(weight[chosen].to(aside))
                weight[chosen] *= self.shrink
            new = subject.gradients({STATISTIC}, sites)
        finally:
            for site, value, n in zip(sites, values, numbers, strict=False):
                weight = site.parameter.detach()
                weight[as_bool(candidates[n], weight.shape)] = value.to(weight.device)
        return [
            Trial(
                n,
                site.parameter.shape,
                candidates[n],
                old[site.name],
                new[site.name][STATISTIC],
                subject.reached(site, {STATISTIC: old[site.name]}),
            )
            for n, site in zip(numbers, sites, strict=True)
        ]

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
        blocks = subject.blocks
        if not blocks:
            raise PatternError("No blocks follow one another in this model. Use group=1, or another number of layers.")
        inside = [{id(parameter) for parameter in block.parameters()} for block in blocks]
        numbers = range(len(subject.sites))
        groups = [[n for n in numbers if id(subject.sites[n].parameter) in block] for block in inside]
        rest = sorted(set(numbers) - {n for group in groups for n in group})
        return [group for group in [*groups, rest] if group]

    def hold(self, gone: Iterable[tuple[int, Tensor]]) -> None:
        """Take out these weights of these sites, one after another: all of them as bools would be large."""
        subject = self.subject
        masks, numbers = list(subject.held.masks), []
        for number, going in gone:
            masks[number] = self._flat(subject.held.bools(number) & ~going)
            numbers.append(number)
        subject.entries.changed([subject.sites[number] for number in numbers])
        subject.held.take(masks)
        subject.apply()

    def without(self, trial: Trial, tolerance: float) -> Tensor:
        """The flat mask of a trial's site if this had been the tolerance."""
        before = as_bool(self._before[trial.number], trial.shape)
        return self._flat(before & ~trial.going(tolerance))

    def wear(self, masks: Sequence[Tensor]) -> None:
        """Hold these masks (flat, as held), whatever was held before; weights of every site may have changed."""
        self.subject.entries.changed(self.subject.sites)
        self.subject.held.take(masks)
        self.subject.apply()

    def level(
        self, sparsity: float, tolerance: float, refresh: bool = False, exactly: float | None = None
    ) -> list[Trial]:
        """One pass over all groups: whatever the veto lets go is gone; or, with `exactly`, as many as that asks for.
        Returns the trials of a joint probe."""
        trials: list[Trial] = []
        self._before = [mask.clone() for mask in self.subject.held.masks] if self.order == "joint" else []
        candidates = self.candidates(sparsity, refresh)
        spared = 0
        for number, group in enumerate(self.groups()):
            if refresh and number:
                candidates = self.candidates(sparsity, refresh)
            trials = self.trials(group, candidates)
            if exactly is None:
                self.hold((trial.number, trial.going(tolerance)) for trial in trials)
            else:
                self.rank(trials, exactly)
            spared += sum(trial.spared() for trial in trials)
        if spared and exactly is None:
            self.subject.notes["spared"] = f"{spared:,} candidates are kept because no inputs reached them."
        return trials if self.order == "joint" else []

    def rank(self, trials: Sequence[Trial], sparsity: float) -> None:
        """Exactly this sparsity: candidates go in the order of their score, tempered by how their gradients grew."""
        targets: list[Target] = []
        for trial in trials:
            site = self.subject.sites[trial.number]
            mask, dead = self.subject.held.masks[trial.number], self.subject.held.dead[trial.number]
            facts = self.facts()[site.name]
            target = target_of(site, self.score, {name: facts[name] for name in self.score.needs}, mask, dead)
            targets.append(_ranked(target, trial, site.parameter.detach()))
        picked: Selection = self._select(targets, sparsity, self.subject.held.packed)
        found = zip(trials, picked.masks, strict=True)
        self.hold((trial.number, ~as_bool(mask, trial.shape)) for trial, mask in found)


def _ranked(target: Target, trial: Trial, weight: Tensor) -> Target:
    """The site with scores tempered by growth. What no inputs reached comes after, and what is no candidate last."""
    candidates, device, plain = trial.bools(), target.piece.device, target.piece.score

    def grown(where: Where) -> Tensor:
        old, new = (flat_part(found, where).to(device).float() for found in (trial.old, trial.new))
        return tempered(plain(where), old, new)

    floors = torch.where(trial.reached, torch.nan, 0.0)  # whatever came so far as to be a candidate ranks by magnitude
    among = kept_last(grown, floors, weight)

    def score(where: Where) -> Tensor:
        return torch.where(flat_part(candidates, where), among(where), 2 * UNREACHED)

    return replace(target, piece=replace(target.piece, score=score, source=None))
