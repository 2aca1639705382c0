"""The veto of GradProbe: shrink the candidates of a score, and keep those whose gradients grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secateur.errors import PatternError
from secateur.model.facts import UNREACHED, kept_last, target_of
from secateur.model.prunable import Prunable
from secateur.oneshot.calibration import CalibratedModel, FactTable
from secateur.scores import Score
from secateur.selection import Select, Selection, Target
from secateur.selection.exact import Where, flat_part
from secateur.selection.masks import as_bool, to_bits

STATISTIC = "gradient_max"
MOST_GROWTH = 1e6


def agrees(old: Tensor, new: Tensor, tolerance: float) -> Tensor:
    """True where a candidate may be pruned, because its gradient grew by no more than the tolerance. A gradient that
    was zero and stayed zero has not grown."""
    return new <= old * (1 + tolerance)


def growth(old: Tensor, new: Tensor) -> Tensor:
    """The factor by which gradients grew, at most `MOST_GROWTH`; zero for those that stayed zero."""
    return torch.where(new == 0, 0.0, new / old).clamp(max=MOST_GROWTH)


def tempered(scores: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Scores times the root of growth: a weight whose gradient grows matters more than its score says. (Growth alone
    ranks far worse, by either measure of docs/after-training.md.)"""
    factor = growth(old, new).sqrt()
    return torch.where(scores >= 0, scores * factor, scores / factor)


@dataclass(frozen=True)
class Trial:
    """Candidates of one weight (True = candidate, bools or bits), its gradients before and after they were shrunk, and
    which of its matrices had inputs."""

    number: int
    shape: torch.Size
    candidates: Tensor
    old: Tensor
    new: Tensor
    reached: Tensor

    def bools(self) -> Tensor:
        """The candidates as bools in the weight's shape."""
        return as_bool(self.candidates, self.shape)

    def agreed(self, tolerance: float) -> Tensor:
        """Candidates that pass the veto; none in matrices without inputs, where nothing was tested."""
        device = self.candidates.device
        passed = agrees(self.old.to(device).float(), self.new.to(device).float(), tolerance)
        return self.bools() & passed & self._tested()

    def spared(self) -> int:
        """The number of candidates in matrices without inputs."""
        return 0 if bool(self.reached.all()) else int((self.bools() & ~self._tested()).sum())

    def _tested(self) -> Tensor:
        return self.reached.to(self.candidates.device).view(-1, *[1] * (len(self.shape) - 1))


class Probe:
    """Probes of one model: candidates by a score, and the veto of their gradients."""

    def __init__(
        self, calibrated: CalibratedModel, score: Score, select: Select, *, shrink: float, order: str, group: int | str
    ) -> None:
        self.calibrated, self.score, self._select = calibrated, score, select
        self.shrink, self.order, self.group = shrink, order, group
        self._facts: FactTable | None = None
        calibrated.copies = 3 if order == "joint" else 1  # gradients before and after, and the candidates' values
        self._before: list[Tensor] = []  # masks before a joint level
        self._old: dict[str, Tensor] = {}  # gradients from the same pass as the facts, until they are used

    def facts(self, refresh: bool = False) -> FactTable:
        """The facts that the score reads; gathered once unless `refresh`. A joint probe needs all gradients of the same
        weights too, so they come from the same pass."""
        if self._facts is None or refresh:
            more = {STATISTIC} if self.order == "joint" else set()
            self._facts = self.calibrated.facts(self.score, more)
            self._old = {name: facts.pop(STATISTIC) for name, facts in self._facts.items() if more}
        return self._facts

    @torch.no_grad()
    def kept_at(self, sparsity: float, refresh: bool, anew: bool = False) -> list[Tensor]:
        """Flat masks of the weights that the score alone would keep at this sparsity. Pruned weights stay pruned unless
        `anew`."""
        facts = self.facts(refresh)
        if anew:
            self._old = {}  # gradients of other weights than those that will be probed
        with self.calibrated.stages.stage("selection"):
            targets = self.calibrated.targets(self.score, facts, sparsity, self._select.together, anew)
            return self._select(targets, sparsity, self.calibrated.held.packed).masks

    def candidates(self, sparsity: float, refresh: bool) -> list[Tensor]:
        """Flat masks of the unpruned weights that the score would prune."""
        held, found = self.calibrated.held, []
        for number, mask in enumerate(self.kept_at(sparsity, refresh)):
            found.append(self._flat(held.bools(number) & ~as_bool(mask, held.shapes[number])))
        return found

    def _flat(self, mask: Tensor) -> Tensor:
        return to_bits(mask.reshape(-1)) if self.calibrated.held.packed else mask.reshape(-1)

    def trials(self, numbers: Sequence[int], candidates: Sequence[Tensor]) -> list[Trial]:
        """Measure gradients of these weights with and without their candidates shrunk. Weights are restored to the bit
        from the kept values of the candidates."""
        calibrated, prunables = self.calibrated, [self.calibrated.prunables[n] for n in numbers]
        old = self._old or {n: facts[STATISTIC] for n, facts in calibrated.gradients({STATISTIC}, prunables).items()}
        self._old = {}
        devices = {statistic.device for statistic in old.values()}  # one with room for all of them has room for values
        spare = devices.pop() if len(devices) == 1 else torch.device("cpu")
        values: list[Tensor] = []
        try:
            for prunable, n in zip(prunables, numbers, strict=True):
                weight, chosen = prunable.parameter.detach(), as_bool(candidates[n], prunable.parameter.shape)
                values.append(weight[chosen].to(spare))
                weight[chosen] *= self.shrink
            new = calibrated.gradients({STATISTIC}, prunables)
        finally:
            for prunable, value, n in zip(prunables, values, numbers, strict=False):
                weight = prunable.parameter.detach()
                weight[as_bool(candidates[n], weight.shape)] = value.to(weight.device)
        return [
            Trial(
                n,
                prunable.parameter.shape,
                candidates[n],
                old[prunable.name],
                new[prunable.name][STATISTIC],
                calibrated.reached(prunable, {STATISTIC: old[prunable.name]}),
            )
            for n, prunable in zip(numbers, prunables, strict=True)
        ]

    def groups(self) -> list[list[int]]:
        """Numbers of the weights that are probed together, in order."""
        prunables = self.calibrated.prunables
        if self.order == "joint":
            return [list(range(len(prunables)))]
        groups = self._blocks() if self.group == "block" else None
        if groups is None:
            size = self.group if isinstance(self.group, int) else 1
            order = list(range(len(prunables)))
            if self.order == "size":
                order.sort(key=lambda n: -prunables[n].parameter.numel())
            groups = [order[start : start + size] for start in range(0, len(order), size)]
        elif self.order == "size":
            groups.sort(key=lambda group: -sum(prunables[n].parameter.numel() for n in group))
        return groups[::-1] if self.order == "reverse" else groups

    def _blocks(self) -> list[list[int]]:
        """Numbers of the weights of every block; those outside of all blocks are the last group."""
        prunables, blocks = self.calibrated.prunables, self.calibrated.blocks
        if not blocks:
            raise PatternError("This model has no blocks that run in order. Use group=1, or another number of layers.")
        inside = [{id(parameter) for parameter in block.parameters()} for block in blocks]
        numbers = range(len(prunables))
        groups = [[n for n in numbers if id(prunables[n].parameter) in block] for block in inside]
        rest = sorted(set(numbers) - {n for group in groups for n in group})
        return [group for group in [*groups, rest] if group]

    def remove(self, removed: Iterable[tuple[int, Tensor]]) -> None:
        """Prune these elements of the weights with these numbers. An iterable, because bool masks of all weights at
        once would take too much memory."""
        calibrated = self.calibrated
        masks, numbers = list(calibrated.held.masks), []
        for number, elements in removed:
            masks[number] = self._flat(calibrated.held.bools(number) & ~elements)
            numbers.append(number)
        self._hold(masks, [calibrated.prunables[number] for number in numbers])

    def mask_at(self, trial: Trial, tolerance: float) -> Tensor:
        """The flat mask that a trial would have given at this tolerance."""
        before = as_bool(self._before[trial.number], trial.shape)
        return self._flat(before & ~trial.agreed(tolerance))

    def set_masks(self, masks: Sequence[Tensor]) -> None:
        """Replace all masks by these flat ones."""
        self._hold(masks, self.calibrated.prunables)

    def _hold(self, masks: Sequence[Tensor], changed: Sequence[Prunable]) -> None:
        self.calibrated.hidden_states.invalidate(changed)
        self.calibrated.held.take(masks)
        self.calibrated.apply_masks()

    def level(
        self, sparsity: float, tolerance: float, refresh: bool = False, exactly: float | None = None
    ) -> list[Trial]:
        """Probe all groups once: prune the candidates that pass the veto, or as many as the sparsity `exactly` asks
        for. Returns the trials of a joint probe."""
        trials: list[Trial] = []
        self._before = [mask.clone() for mask in self.calibrated.held.masks] if self.order == "joint" else []
        candidates = self.candidates(sparsity, refresh)
        spared = 0
        for number, group in enumerate(self.groups()):
            if refresh and number:
                candidates = self.candidates(sparsity, refresh)
            trials = self.trials(group, candidates)
            if exactly is None:
                self.remove((trial.number, trial.agreed(tolerance)) for trial in trials)
            else:
                self.rank(trials, exactly)
            spared += sum(trial.spared() for trial in trials)
        if spared and exactly is None:
            self.calibrated.notes["spared"] = f"{spared:,} candidates are kept because no inputs reached them."
        return trials if self.order == "joint" else []

    def rank(self, trials: Sequence[Trial], sparsity: float) -> None:
        """Prune to exactly this sparsity, candidates with the lowest tempered score first."""
        targets: list[Target] = []
        for trial in trials:
            prunable, held = self.calibrated.prunables[trial.number], self.calibrated.held
            mask, dead = held.masks[trial.number], held.dead[trial.number]
            facts = self.facts()[prunable.name]
            target = target_of(prunable, self.score, {name: facts[name] for name in self.score.needs}, mask, dead)
            targets.append(_ranked(target, trial, prunable.parameter.detach()))
        chosen: Selection = self._select(targets, sparsity, self.calibrated.held.packed)
        found = zip(trials, chosen.masks, strict=True)
        self.remove((trial.number, ~as_bool(mask, trial.shape)) for trial, mask in found)


def _ranked(target: Target, trial: Trial, weight: Tensor) -> Target:
    """The target with tempered scores; weights of matrices without inputs are pruned later, other weights last."""
    candidates, device, plain = trial.bools(), target.scored.device, target.scored.score

    def grown(where: Where) -> Tensor:
        old, new = (flat_part(found, where).to(device).float() for found in (trial.old, trial.new))
        return tempered(plain(where), old, new)

    floors = torch.where(trial.reached, torch.nan, 0.0)  # candidates without inputs rank by magnitude
    among = kept_last(grown, floors, weight)

    def score(where: Where) -> Tensor:
        return torch.where(flat_part(candidates, where), among(where), 2 * UNREACHED)

    return replace(target, scored=replace(target.scored, score=score, source=None))
