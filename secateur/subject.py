"""A trained model on the table: its sites and masks, the batches of one call, and what was spent on what."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from secateur import kernels
from secateur.bits import as_bool, packed_bytes, to_bits
from secateur.blocks import find_blocks
from secateur.calibration import Batch, Loss, device_of, draw, in_bf16, quiet, standard_loss, to_device
from secateur.entries import Entries
from secateur.errors import FactError, ShardError, SiteError
from secateur.facts import target_of
from secateur.gradients import GRADIENT_FACTS, gather_gradients
from secateur.inputs import Inputs, check_seen, gather_inputs
from secateur.masks import Held, Masks
from secateur.progress import Stages
from secateur.registry import Score, resolve, scores
from secateur.report import Outcome, TensorRow, Update
from secateur.shards import is_sharded, unwrap
from secateur.sites import VECTOR, Globs, Site, find_sites
from secateur.targets import Selection, Target
from secateur.thrift import Thrift, as_bytes, made_again, plan

Facts = dict[str, dict[str, Any]]  # of every site, by name

# What calibration can tell a score besides gradients and inputs. There is no horizon to correct for.
ALWAYS = {"weight", "index", "step", "beta1", "beta2", "input_norm", *GRADIENT_FACTS}


class Subject:
    """Holds what `prune` and `probe` work with."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Batch] | Tensor,
        *,
        loss: Loss | None = None,
        skip: Globs = (),
        only: Globs | None = None,
        limit: int | None = None,
        memory: str | int | None = None,
        progress: bool = False,
        swift: bool = False,
    ) -> None:
        self.model, self.memory = unwrap(model), as_bytes(memory)
        self._thrift: dict[tuple[int, int, int], Thrift] = {}
        self.copies = 1  # of the statistics of a sweep that are to be there at once
        flags = [(p, p.requires_grad) for p in self.model.parameters()]
        try:
            for parameter in self.model.parameters():  # what was frozen for training may be pruned all the same
                parameter.requires_grad_(parameter.is_floating_point())
            self.sites, self._left_out = find_sites(self.model, skip, only)
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
        if not self.sites:
            telling = [f"{item.name}: {item.reason}" for item in self._left_out if item.reason != VECTOR]
            raise SiteError(f"Nothing to prune in {type(self.model).__name__}. {'; '.join(telling[:6])}")
        if sharded := [site.name for site in self.sites if is_sharded(site.parameter)]:
            raise ShardError(f"{sharded[0]!r} is sharded. Calibration works on whole models: gather it first.")
        self.batches, self.loss = draw(batches, limit), loss or standard_loss
        kinds = {(site.parameter.device.type, site.parameter.dtype) for site in self.sites}
        if swift and loss is None and kinds == {("cuda", torch.float32)} and torch.cuda.is_bf16_supported():
            self.loss = in_bf16(standard_loss)
        self.stages = Stages(device_of(self.model), progress)
        self.updates: list[Update] = []
        self.notes: dict[str, str] = {}  # by what they are about
        self._cuts: list[float | None] = [None] * len(self.sites)
        self._churn, self._before = [0] * len(self.sites), [0] * len(self.sites)
        self.held = Held([site.parameter.detach() for site in self.sites])
        self._already_gone()

    def _already_gone(self) -> None:
        """Weights that are zero are gone already: they do not compete and never return."""
        counts = [int(site.parameter.detach().count_nonzero()) for site in self.sites]
        self._before = [site.parameter.numel() - count for site, count in zip(self.sites, counts, strict=True)]
        if not sum(self._before):
            return
        masks = []
        for site in self.sites:  # one after another: all of them as bools would be large
            alive = (site.parameter.detach() != 0).reshape(-1)
            masks.append(to_bits(alive) if self.held.packed else alive)
        self.held.take(masks, counts)
        self.notes["sparse"] = f"{sum(self._before):,} weights were zero already and count as pruned."

    def facts(self, score: Score, more: Iterable[str] = ()) -> Facts:
        """Whatever the score reads, gathered from the batches on the model as it is now."""
        wanted = {*score.needs, *more}
        if unknown := sorted(wanted - ALWAYS):
            work = [name for name in scores() if set(resolve(name).needs) <= ALWAYS]
            raise FactError(
                f"{score.name} needs {', '.join(unknown)}, which only training can tell. Scores that work here:"
                f" {', '.join(work)}."
            )
        fixed = {"step": torch.tensor(float(len(self.batches))), "beta1": 0.0, "beta2": 0.0, "index": None}
        found: Facts = {
            site.name: {"weight": site.parameter.detach(), **{k: v for k, v in fixed.items() if k in wanted}}
            for site in self.sites
        }
        watch = Inputs(self.sites) if "input_norm" in wanted else None
        if gradients := wanted & GRADIENT_FACTS.keys():
            for name, facts in self.gradients(gradients, watch=watch).items():
                found[name] |= facts
        elif watch is not None:
            with self.stages.stage("inputs", len(self.batches)) as tick:
                gather_inputs(self.model, self.batches, watch, forward=self.loss, tick=tick)
        if watch is not None:
            check_seen(watch, self.sites)
            for site in self.sites:
                found[site.name] |= {"input_norm": watch.norms(site), "tokens": watch.seen(site)}
        return found

    def gradients(
        self, wanted: Collection[str], sites: Sequence[Site] | None = None, watch: Inputs | None = None
    ) -> Mapping[str, dict[str, Tensor]]:
        """Statistics of gradients, of all sites or of some; inputs may be watched in the same sweep."""
        sites = self.sites if sites is None else sites
        thrift = self.thrift(sites, len(wanted))
        again = made_again(self.blocks) if thrift.again else nullcontext()
        part = nullcontext() if len(sites) == len(self.sites) else self.entries.beginning(sites)
        with self.stages.stage("gradients", len(self.batches)) as tick, again, part:
            return gather_gradients(
                self.model, self.batches, sites, wanted, loss=self.loss, dtype=thrift.dtype, room=thrift.room,
                watch=watch, tick=tick,
            )  # fmt: skip

    def thrift(self, sites: Sequence[Site], statistics: int) -> Thrift:
        """How to gather so many statistics of these sites; worked out once for each case."""
        case = sum(site.parameter.numel() for site in sites), statistics, self.entries.first(sites)
        if case not in self._thrift:
            found = plan(
                self.model, self.batches[0], self.loss, sites, self.blocks, self.memory, statistics, self.copies,
                aside=2 * self.held.nbytes,  # new masks beside those that are held
            )  # fmt: skip
            if any(earlier.dtype != torch.float32 for earlier in self._thrift.values()):
                found = replace(found, dtype=torch.bfloat16)  # what is compared must have been rounded alike
            self._thrift[case] = found
            if found.reason:
                self.notes["memory"] = found.reason
        return self._thrift[case]

    @cached_property
    def entries(self) -> Entries:
        """States that enter blocks, for gradients of some sites only."""
        return Entries(self.blocks, len(self.batches), self._first_loss)

    def _first_loss(self) -> float:
        with quiet(self.model), torch.no_grad():
            return float(self.loss(self.model, to_device(self.batches[0], device_of(self.model))))

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """Parts of the model that follow one another, if any."""
        return find_blocks(self.model, self.batches[0], self.loss, self.sites)

    def targets(self, score: Score, facts: Facts, anew: bool = False) -> list[Target]:
        """Every site as a selection sees it, with its masks or `anew`. Weights nothing is known about come last, and
        are noted."""
        made, unknown = [], []
        gone = [0] * len(self.sites) if anew else self.held.dead
        for site, mask, dead in zip(self.sites, self.held.masks, gone, strict=True):
            mine = facts[site.name]
            known = evidence(mine)
            if known is not None:
                missing = known.to(mask.device) == 0
                if dead:
                    missing = missing & as_bool(mask, site.parameter.shape)
                count = int(missing.sum())
                unknown += [(site.name, count)] if count else []
                known = known if count else None
            needed = {name: mine[name] for name in score.needs}
            made.append(target_of(site, score, needed, mask, dead, known=known))
        if unknown:
            shown = ", ".join(f"{name} ({count:,})" for name, count in unknown[:4]) + (", ..." if unknown[4:] else "")
            self.notes["unknown"] = (
                f"{sum(count for _, count in unknown):,} weights without evidence (the batches never touched them) are"
                f" kept before all others: {shown}"
            )
        return made

    def take(self, chosen: Selection, asked: float, seconds: float) -> None:
        """Hold these masks and zero what they say is gone."""
        self.held.take(chosen.masks, chosen.kept)
        self._cuts = [None if cut is None else cut.value for cut in chosen.cuts]
        self.apply()
        self.record(asked, seconds)

    def record(self, asked: float, seconds: float) -> None:
        """Write down what has become of the masks."""
        self._churn = [now - then for now, then in zip(self.held.dead, self._before, strict=True)]
        self._before = list(self.held.dead)
        self.updates.append(Update(len(self.updates) + 1, asked, sum(self._before), sum(self._churn), seconds, 0))

    @torch.no_grad()
    def apply(self) -> None:
        """Zero what the masks say is gone."""
        kernels.zero([site.parameter.detach() for site in self.sites], self.held.masks)

    def masks(self) -> Masks:
        """Bool masks by name, True = kept."""
        return Masks([site.name for site in self.sites], self.held)

    @property
    def sparsity(self) -> float:
        """Fraction of the prunable weights that is gone."""
        return sum(self.held.dead) / sum(shape.numel() for shape in self.held.shapes)

    def outcome(self, **settings: Any) -> Outcome:
        """The report."""
        rows = [
            TensorRow(s.name, tuple(s.parameter.shape), s.parameter.numel(), gone, churn, cut, s.tied)
            for s, gone, churn, cut in zip(self.sites, self.held.dead, self._churn, self._cuts, strict=True)
        ]
        return Outcome(
            **{"pattern": None, "allocation": None, "step": len(self.updates), **settings},
            tensors=tuple(rows),
            left_out=tuple((item.name, item.numel, item.reason) for item in self._left_out),
            updates=tuple(self.updates),
            mask_bytes=self.held.nbytes,
            packed_mask_bytes=sum(packed_bytes(shape) for shape in self.held.shapes),
            fact_bytes=0,
            batches=len(self.batches),
            stages=self.stages.done,
            notes=tuple(self.notes.values()),
            masks=self.masks(),
        )


def evidence(facts: Mapping[str, Any]) -> Tensor | None:
    """A statistic that is zero exactly where the batches never touched a weight, if one was gathered."""
    for name in ("gradient_max", "gradient", "exp_avg_sq", "exp_avg", "tokens"):
        if isinstance(facts.get(name), Tensor):
            found: Tensor = facts[name]
            return found
    return None
