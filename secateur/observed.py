"""A trained model under observation: its sites, the batches of one call, and what they tell of each."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blocks import find_blocks
from secateur.calibration import (
    Batch,
    Loss,
    check_ids,
    device_of,
    draw,
    first_in,
    in_bf16,
    quiet,
    run_model,
    standard_loss,
    to_device,
)
from secateur.entries import Entries
from secateur.errors import FactError, ShardError
from secateur.ferry import Ferry, ferry_for
from secateur.gradients import GRADIENT_FACTS, gather_gradients
from secateur.inputs import Inputs, Reach, check_seen, gather_inputs
from secateur.progress import Stages
from secateur.registry import Score, resolve, scores
from secateur.shards import is_sharded, unwrap
from secateur.sites import Globs, LeftOut, Site, Unfit, check_readable, find_sites, fits_all, nothing_to_prune
from secateur.thrift import Thrift, as_bytes, made_again, plan

Facts = dict[str, dict[str, Any]]  # of every site, by name

# What calibration can tell a score besides gradients and inputs. There is no horizon to correct for.
ALWAYS = {"weight", "index", "step", "beta1", "beta2", "input_norm", *GRADIENT_FACTS}


class Observed:
    """Asks a model what its batches tell, on its own device or on one that it is streamed to."""

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
        device: torch.device | str | None = None,
        swift: bool = False,
        unfit: Unfit = fits_all,
    ) -> None:
        self.model, self.memory = unwrap(model), as_bytes(memory)
        check_readable(self.model)
        self._thrift: dict[tuple[int, int, int], Thrift] = {}
        self.copies = 1  # of the statistics of a sweep that are to be there at once
        self.sites, self.left_out = _every_site(self.model, skip, only, unfit)
        if not self.sites:
            raise nothing_to_prune(self.model, self.left_out)
        if sharded := [site.name for site in self.sites if is_sharded(site.parameter)]:
            raise ShardError(f"{sharded[0]!r} is sharded. Calibration works on whole models: gather it first.")
        self.batches, self.loss = draw(batches, limit), loss or standard_loss
        self.forward = loss or run_model  # where no gradient is needed, labels are not either
        check_ids(self.model, self.batches)
        home = device_of(self.model)
        self.device = home if device is None else torch.device(device)
        named = self.device.index is not None  # "cuda" is whichever GPU the model is on
        self._streams = self.device.type != home.type or (named and self.device.index != home.index)
        if self._streams and memory is not None:
            raise FactError("memory limits a model that is on the device; a streamed one needs little. Leave one out.")
        self.stages = Stages(self.device, progress)
        whole = {site.parameter.dtype for site in self.sites} == {torch.float32}
        self.swift = swift and whole and loss is None and self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        if self.swift:
            self.loss, self.forward = in_bf16(standard_loss), in_bf16(run_model)
        self.notes: dict[str, str] = {}  # by what they are about
        self.reserved = 0  # bytes on the device that are for other things
        self._reached: dict[str, Tensor] = {}
        self._reach: Inputs | None = None  # inputs counted once, if gradients alone could not tell

    def facts(self, score: Score, more: Iterable[str] = ()) -> Facts:
        """Whatever the score reads, gathered from the batches on the model as it is now."""
        wanted = {*score.needs, *more}
        if unknown := sorted(wanted - ALWAYS):
            work = [name for name in scores() if set(resolve(name).needs) <= ALWAYS]
            raise FactError(
                f"{score.name} needs {', '.join(unknown)}, which only training can tell. Scores that work here:"
                f" {', '.join(work)}."
            )
        step = torch.tensor(float(len(self.batches)), dtype=torch.float64)
        fixed = {"step": step, "beta1": 0.0, "beta2": 0.0, "index": None}
        found: Facts = {
            site.name: {"weight": site.parameter.detach(), **{k: v for k, v in fixed.items() if k in wanted}}
            for site in self.sites
        }
        watch = Inputs(self.sites) if "input_norm" in wanted else None
        if gradients := wanted & GRADIENT_FACTS.keys():
            for name, facts in self.gradients(gradients, watch=watch).items():
                found[name] |= facts
        elif watch is not None:
            with self.crossing(), self.stages.stage("inputs", len(self.batches)) as tick:
                gather_inputs(self.model, self.batches, watch, forward=self.forward, device=self.device, tick=tick)
        if watch is not None:
            check_seen(watch, self.sites)
            for site in self.sites:
                found[site.name] |= {"input_norm": watch.norms(site), "reached": watch.reached(site)}
        return found

    def reached(self, site: Site, facts: Mapping[str, Any]) -> Tensor:
        """Of each matrix of a site (every expert is one), whether inputs reached it in any batch.

        A gradient that is not zero throughout shows it. Where it is, as in dead units or after pruning cut a layer off,
        the inputs themselves are counted, once. What was reached stays so, whatever is pruned later. A score that reads
        nothing of the batches does not ask.
        """
        statistic = next((facts[name] for name in GRADIENT_FACTS if name in facts), None)
        if "reached" not in facts and statistic is None:
            return torch.ones(1, dtype=torch.bool, device="cpu")
        found = facts["reached"] if statistic is None else has_gradients(site, statistic)
        found = found.cpu() | self._reached.get(site.name, torch.tensor(False, device="cpu"))
        if not bool(found.all()) and "reached" not in facts:
            found |= self._counted().reached(site).cpu()
        self._reached[site.name] = found
        return found

    def _counted(self) -> Inputs:
        """The inputs of every matrix, counted in one pass over the batches."""
        if self._reach is None:
            self._reach = Reach(self.sites)
            with self.crossing(), self.stages.stage("inputs", len(self.batches)) as tick:
                gather_inputs(
                    self.model, self.batches, self._reach, forward=self.forward, device=self.device, tick=tick
                )
        return self._reach

    def gradients(
        self, wanted: Collection[str], sites: Sequence[Site] | None = None, watch: Inputs | None = None
    ) -> Mapping[str, dict[str, Tensor]]:
        """Statistics of gradients, of all sites or of some; inputs may be watched in the same sweep."""
        sites = self.sites if sites is None else sites
        thrift = self.thrift(sites, len(wanted))
        again = made_again(self.blocks) if thrift.again else nullcontext()
        # Inputs are known by the memory of the weight they meet, so that must stay where it is while they are watched.
        rounded = self.swift and watch is None and self.ferry is None
        part = nullcontext() if len(sites) == len(self.sites) else self.entries.beginning(sites)
        with self.stages.stage("gradients", len(self.batches)) as tick, self.crossing(), again, part:
            return gather_gradients(
                self.model, self.batches, sites, wanted, loss=self.loss, dtype=thrift.dtype, room=thrift.room,
                ferry=self.ferry, rounded=rounded, every=len(sites) == len(self.sites), watch=watch, tick=tick,
            )  # fmt: skip

    def thrift(self, sites: Sequence[Site], statistics: int) -> Thrift:
        """How to gather so many statistics of these sites; worked out once for each case."""
        case = sum(site.parameter.numel() for site in sites), statistics, self.entries.first(sites)
        if self._streams:
            wide = any(site.parameter.dtype == torch.float32 for site in sites)
            self.notes["memory"] = f"Blocks are streamed to {self.device} one after another; statistics on the host."
            return Thrift(torch.float32 if wide else torch.bfloat16, room=0, again=True)
        if case not in self._thrift:
            found = plan(
                self.model, self.batches[0], self.loss, sites, self.blocks, self.memory, statistics, self.copies,
                aside=self.reserved,
            )  # fmt: skip
            if any(earlier.dtype != torch.float32 for earlier in self._thrift.values()):
                said = found.reason.replace("fp32 statistics", "bf16 statistics")
                found = replace(found, dtype=torch.bfloat16, reason=said)  # what is compared must be rounded alike
            self._thrift[case] = found
            if found.reason:
                self.notes["memory"] = found.reason
        return self._thrift[case]

    @cached_property
    def entries(self) -> Entries:
        """States that enter blocks, for gradients of some sites only."""
        first = partial(losses, self.model, self.batches[:1], self.loss, self.ferry)  # without a way back to self
        return Entries(self.blocks, len(self.batches), lambda: first()[0])

    def losses(self, most: int) -> list[float]:
        """Losses of the first batches: as many as it takes to have this many numbers in them."""
        sizes = (1 if (read := first_in(batch)) is None else read.numel() for batch in self.batches)
        counts = itertools.accumulate(sizes)
        enough = next((n for n, count in enumerate(counts, 1) if count >= most), len(self.batches))
        return losses(self.model, self.batches[:enough], self.loss, self.ferry)

    @cached_property
    def ferry(self) -> Ferry | None:
        """What carries blocks to the device, if the model is not there."""
        if not self._streams:
            return None
        return ferry_for(self.model, self.batches[0], self.forward, self.sites, self.device)

    def crossing(self) -> AbstractContextManager[None]:
        """Inside, the model computes on the subject's device, wherever it lives."""
        return nullcontext() if self.ferry is None else self.ferry.crossing()

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """Parts of the model that follow one another, if any."""
        if self.ferry is not None:
            return list(self.ferry.blocks)
        return find_blocks(self.model, self.batches[0], self.forward, self.sites)


def has_gradients(site: Site, statistic: Tensor) -> Tensor:
    """Of each matrix of a site, whether a statistic of its gradients is not zero throughout."""
    matrices = site.parameter.shape[0] if len(site.layout.rows) > 1 else 1
    near = statistic.to(site.parameter.device)
    return torch.linalg.vector_norm(near.reshape(matrices, -1), float("inf"), dim=1) != 0


def _every_site(model: nn.Module, skip: Globs, only: Globs | None, unfit: Unfit) -> tuple[list[Site], list[LeftOut]]:
    """Sites of a model, those that were frozen for training among them."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(parameter.is_floating_point())
        return find_sites(model, skip, only, unfit)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def losses(model: nn.Module, batches: Sequence[Batch], loss: Loss, ferry: Ferry | None) -> list[float]:
    """The loss of every batch."""
    with nullcontext() if ferry is None else ferry.crossing(), quiet(model), torch.no_grad():
        device = device_of(model) if ferry is None else ferry.device
        return [float(loss(model, to_device(batch, device))) for batch in batches]
