"""A trained model under observation: its sites, the batches of one call, and what they tell of each."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from secateur import kernels
from secateur.errors import FactError, ModelError
from secateur.model.distributed import Gathered, fingerprint, ranks_of, reshard, unwrap
from secateur.model.facts import least_spared, spared_share, target_of
from secateur.model.held import Held, Masks
from secateur.model.prunable import (
    Globs,
    LeftOut,
    Prunable,
    Unfit,
    check_readable,
    find_prunable,
    fits_all,
    nothing_to_prune,
)
from secateur.oneshot.activations import Inputs, Reach, check_seen, gather_inputs
from secateur.oneshot.batches import (
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
    tensors_in,
    to_device,
)
from secateur.oneshot.blocks import Entries, find_blocks
from secateur.oneshot.gradients import GRADIENT_FACTS, gather_gradients
from secateur.oneshot.offload import Ferry, Thrift, as_bytes, ferry_for, made_again, plan
from secateur.progress import Stages
from secateur.report import Outcome, TensorRow, Update
from secateur.scores import Score, resolve, scores
from secateur.selection import Selection, Target, as_scope
from secateur.selection.masks import as_bool, packed_bytes, to_bits
from secateur.selection.tiles import Pattern

Facts = dict[str, dict[str, Any]]  # of every site, by name

# What calibration can tell a score besides gradients and inputs. There is no horizon to correct for.
ALWAYS = {"weight", "index", "step", "beta1", "beta2", "input_norm", *GRADIENT_FACTS}


class Observed:
    """Asks a model what its batches tell, on its own device or on one that it is streamed to.

    Several ranks share the batches: each asks about its own, statistics are exchanged, and all ranks come to the same
    figures as one process. Use it in a `with`: it tells the other ranks if this one fails, checks that all have the
    same weights in the end, and shards again what FSDP2 had sharded.
    """

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
        distributed: bool | None = None,
    ) -> None:
        self.model = unwrap(model)
        check_readable(self.model)
        reshard(self.model)
        self.ranks = ranks_of(model, distributed)
        self._shards = Gathered(model)
        self._buffers: list[tuple[Tensor, Tensor]] = []  # and what they were, where those of the first rank are used
        try:
            self.memory = as_bytes(memory)
            self._settle(skip, only, unfit)
            self._draw(batches, limit)
            self._place(device, progress)
            self._choose(loss, swift)
        except BaseException as error:
            self._give_up(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._give_up(error)
            return
        try:
            if self.ranks.size > 1:
                weights = fingerprint(site.parameter for site in self.sites)
                self.ranks.same("The pruned weights", [weights], "All ranks need the same hardware and settings.")
            self._leave(keep=True)
        except BaseException as late:
            self._give_up(late)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Tell the other ranks, and leave sharded weights as they were."""
        with suppress(Exception):  # where the others cannot be reached, the error itself matters more
            self.ranks.fail(error)
        self._leave(keep=False)

    def _leave(self, keep: bool) -> None:
        self._shards.leave(keep)
        for buffer, own in self._buffers:
            buffer.copy_(own)
        self._buffers = []

    def _settle(self, skip: Globs, only: Globs | None, unfit: Unfit) -> None:
        self._thrift: dict[tuple[int, int, int], Thrift] = {}
        self.copies = 1  # of the statistics of a sweep that are to be there at once
        self.sites, self.left_out = _every_site(self.model, skip, only, unfit)
        if not self.sites:
            raise nothing_to_prune(self.model, self.left_out)
        self.notes: dict[str, str] = {}  # by what they are about
        self.reserved = 0  # bytes on the device that are for other things
        self._reached: dict[str, Tensor] = {}
        self._reach: Inputs | None = None  # inputs counted once, if gradients alone could not tell

    def _draw(self, batches: Iterable[Batch] | Tensor, limit: int | None) -> None:
        """Take the batches."""
        self.batches = draw(batches, limit)
        check_ids(self.model, self.batches)
        self.own = [self.batches[number] for number in self.ranks.mine(len(self.batches))]
        self.turns = self.ranks.turns(len(self.batches))
        if self.ranks.size > 1:
            self._compare()

    def _compare(self) -> None:
        """Make sure that all ranks have the same batches and the same model. Running averages in buffers differ after
        training; meanwhile all use the first rank's, as DistributedDataParallel does."""
        drawn = fingerprint(tensor for batch in self.batches for tensor in tensors_in(batch))
        self.ranks.same(
            "The batches",
            [len(self.batches), drawn],
            "Give every rank the same batches in the same order: each then works on its own share of them. (A loader"
            " with a DistributedSampler, or one that shuffles by another seed, gives each rank others.)",
        )
        names = [zlib.crc32(site.name.encode()) for site in self.sites]
        weights = fingerprint(self.model.parameters())
        self.ranks.same("The weights", [*names, weights], "Load the same model on every rank.")
        buffers = list(self.model.buffers())
        told = self.ranks.tell("buffers", [fingerprint(buffers)])
        if told.count(told[0]) == len(told):
            return
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        firsts = list(enumerate(buffers)) if self.ranks.rank == 0 else []

        def take(number: int, value: Tensor) -> None:
            buffers[number].copy_(value)

        self.ranks.share("buffers", firsts, take, device_of(self.model))

    def _place(self, device: torch.device | str | None, progress: bool) -> None:
        home = device_of(self.model)
        self.device = home if device is None else _usable(device)
        named = self.device.index is not None  # "cuda" is whichever GPU the model is on
        self._streams = self.device.type != home.type or (named and self.device.index != home.index)
        if self._streams and self.memory is not None:
            raise FactError("memory limits a model that is on the device; a streamed one needs little. Leave one out.")
        self.stages = Stages(self.device, progress and self.ranks.rank == 0)

    def _choose(self, loss: Loss | None, swift: bool) -> None:
        self.loss = loss or standard_loss
        self.forward = loss or run_model  # where no gradient is needed, labels are not either
        whole = {site.parameter.dtype for site in self.sites} == {torch.float32}
        self.swift = swift and whole and loss is None and self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        if self.swift:
            self.loss, self.forward = in_bf16(standard_loss), in_bf16(run_model)

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
            self._gather_inputs(watch)
        if watch is not None:
            check_seen(watch, self.sites)
            for site in self.sites:
                found[site.name] |= {"input_norm": watch.norms(site), "reached": watch.reached(site)}
        return found

    def reached(self, site: Prunable, facts: Mapping[str, Any]) -> Tensor:
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
            self._gather_inputs(self._reach)
        return self._reach

    def _gather_inputs(self, watch: Inputs) -> None:
        with self.crossing(), self.stages.stage("inputs", self.turns) as tick:
            gather_inputs(
                self.model, self.batches, watch, forward=self.forward, device=self.device, tick=tick, ranks=self.ranks
            )

    def gradients(
        self, wanted: Collection[str], sites: Sequence[Prunable] | None = None, watch: Inputs | None = None
    ) -> Mapping[str, dict[str, Tensor]]:
        """Statistics of gradients, of all sites or of some; inputs may be watched in the same sweep."""
        sites = self.sites if sites is None else sites
        thrift = self.thrift(sites, len(wanted))
        again = made_again(self.blocks) if thrift.again else nullcontext()
        # Inputs are known by the memory of the weight they meet, so that must stay where it is while they are watched.
        rounded = self.swift and watch is None and self.ferry is None
        part = nullcontext() if len(sites) == len(self.sites) else self.entries.beginning(sites)
        with self.stages.stage("gradients", self.turns) as tick, self.crossing(), again, part:
            return gather_gradients(
                self.model, self.batches, sites, wanted, loss=self.loss, dtype=thrift.dtype, room=thrift.room,
                ferry=self.ferry, rounded=rounded, every=len(sites) == len(self.sites), watch=watch, tick=tick,
                ranks=self.ranks,
            )  # fmt: skip

    def thrift(self, sites: Sequence[Prunable], statistics: int) -> Thrift:
        """How to gather so many statistics of these sites; worked out once for each case."""
        case = sum(site.parameter.numel() for site in sites), statistics, self.entries.first(sites)
        if self._streams:
            wide = any(site.parameter.dtype == torch.float32 for site in sites)
            self.notes["memory"] = f"Blocks are streamed to {self.device} one after another; statistics on the host."
            return Thrift(torch.float32 if wide else torch.bfloat16, room=0, again=True)
        if case not in self._thrift:
            several = self.ranks.size > 1  # gradients of a batch then wait for those of other ranks
            waiting = sum(site.parameter.nbytes for site in sites) if several else 0
            found = plan(
                self.model, self.batches[0], self.loss, sites, self.blocks, self.memory, statistics, self.copies,
                aside=self.reserved + waiting,
            )  # fmt: skip
            found = self._agreed(found) if several else found
            if any(earlier.dtype != torch.float32 for earlier in self._thrift.values()):
                said = found.reason.replace("fp32 statistics", "bf16 statistics")
                found = replace(found, dtype=torch.bfloat16, reason=said)  # what is compared must be rounded alike
            self._thrift[case] = found
            if found.reason:
                self.notes["memory"] = found.reason
        return self._thrift[case]

    def _agreed(self, found: Thrift) -> Thrift:
        """What fits on the rank with least room, for all of them."""
        mine = [found.dtype != torch.float32, -1 if found.room is None else found.room, found.again]
        told = self.ranks.tell("memory", mine)
        rooms = [room for _, room, _ in told if room >= 0]
        dtype = torch.bfloat16 if any(short for short, _, _ in told) else torch.float32
        room, again = min(rooms) if rooms else None, any(again for _, _, again in told)
        return replace(found, dtype=dtype, room=room, again=again)

    @cached_property
    def entries(self) -> Entries:
        """States that enter blocks, for gradients of some sites only."""
        first = partial(losses, self.model, self.own[:1], self.loss, self.ferry)  # without a way back to self
        return Entries(self.blocks, len(self.own), lambda: first()[0], self.ranks)

    def losses(self, most: int) -> list[float]:
        """Losses of the first batches: as many as it takes to have this many numbers in them."""
        sizes = (1 if (read := first_in(batch)) is None else read.numel() for batch in self.batches)
        counts = itertools.accumulate(sizes)
        enough = next((n for n, count in enumerate(counts, 1) if count >= most), len(self.batches))
        mine = [self.batches[number] for number in self.ranks.mine(enough)]
        told = self.ranks.floats("losses", losses(self.model, mine, self.loss, self.ferry))
        return [told[number % self.ranks.size][number // self.ranks.size] for number in range(enough)]

    def judge(self, metric: Callable[[nn.Module], float]) -> float:
        """What the metric says of the model as it is. Every rank asks it; what it says on the first one counts."""
        return self.ranks.first(float(metric(self.model)))

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


def _usable(device: torch.device | str) -> torch.device:
    """The device meant, or an error where there is none."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises the latter
        raise ModelError(f"Device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return found


def has_gradients(site: Prunable, statistic: Tensor) -> Tensor:
    """Of each matrix of a site, whether a statistic of its gradients is not zero throughout."""
    matrices = site.parameter.shape[0] if len(site.layout.rows) > 1 else 1
    near = statistic.to(site.parameter.device)
    return torch.linalg.vector_norm(near.reshape(matrices, -1), float("inf"), dim=1) != 0


def _every_site(
    model: nn.Module, skip: Globs, only: Globs | None, unfit: Unfit
) -> tuple[list[Prunable], list[LeftOut]]:
    """Sites of a model, those that were frozen for training among them."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(parameter.is_floating_point())
        return find_prunable(model, skip, only, unfit)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def losses(model: nn.Module, batches: Sequence[Batch], loss: Loss, ferry: Ferry | None) -> list[float]:
    """The loss of every batch."""
    with nullcontext() if ferry is None else ferry.crossing(), quiet(model), torch.no_grad():
        device = device_of(model) if ferry is None else ferry.device
        return [float(loss(model, to_device(batch, device))) for batch in batches]


@contextmanager
def undone_on_error() -> Iterator[list[Callable[[], None]]]:
    """Any exception inside, Ctrl-C among them, is followed by whatever was put on the list."""
    undo: list[Callable[[], None]] = []
    try:
        yield undo
    except BaseException:
        for step in reversed(undo):
            step()
        raise


class Subject(Observed):
    """Holds what `prune` and `probe` work with."""

    def __init__(self, model: nn.Module, batches: Iterable[Batch] | Tensor, **settings: Any) -> None:
        super().__init__(model, batches, **settings)
        self.updates: list[Update] = []
        self._sent = 0  # bytes, until the last update
        self._cuts: list[float | None] = [None] * len(self.sites)
        self._churn = [0] * len(self.sites)
        self._gone: list[tuple[Tensor, Tensor, Tensor]] | None = None  # weights, where they were pruned, what was there
        try:
            self.held = Held([site.parameter.detach() for site in self.sites])
            self.reserved = 2 * self.held.nbytes  # new masks beside those that are held
            self._already_gone()
        except BaseException as error:
            self._give_up(error)
            raise

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

    def targets(self, score: Score, facts: Facts, asked: float, together: bool, anew: bool = False) -> list[Target]:
        """Every site as a selection at this sparsity sees it, with its masks or `anew`. Matrices that no inputs reached
        are spared; `together` says that all sites compete with each other."""
        made, gone = [], [0] * len(self.sites) if anew else self.held.dead
        spared = self._spared({site.name: self.reached(site, facts[site.name]) for site in self.sites}, asked, together)
        for site, mask, dead in zip(self.sites, self.held.masks, gone, strict=True):
            needed = {name: facts[site.name][name] for name in score.needs}
            made.append(target_of(site, score, needed, mask, dead, spared=spared.get(site.name)))
        return made

    def _spared(self, reached: Mapping[str, Tensor], asked: float, together: bool) -> dict[str, Tensor]:
        """From what magnitude on unreached matrices are spared, for the sites that have any; noted."""
        sizes = {site.name: site.parameter.numel() for site in self.sites}
        counts = {name: int((~found).sum()) * sizes[name] // len(found) for name, found in reached.items()}
        counts = {name: count for name, count in counts.items() if count}
        if not counts:
            return {}
        share = spared_share(asked, sum(counts.values()), sum(sizes.values()))
        floors = {}
        for site in self.sites:
            if site.name in counts:
                mine = share if together else spared_share(asked, counts[site.name], sizes[site.name])
                matrices = site.parameter.detach().reshape(len(reached[site.name]), -1)
                floors[site.name] = least_spared(matrices, reached[site.name], mine)
        named = [f"{name} ({count:,})" for name, count in counts.items()]
        self.notes["unreached"] = (
            f"No inputs reached {sum(counts.values()):,} weights in any batch (experts without tokens, layers that were"
            f" not called). They are ranked by magnitude, and {share:.0%} of them are kept before all others:"
            f" {', '.join(named[:4])}{', ...' if named[4:] else ''}"
        )
        return floors

    def undoing(self, dense: Mapping[str, Tensor] | None = None) -> Callable[[], None]:
        """What makes the weights what they are now, to the bit, whatever is pruned from here on.

        From the `dense` weights by name, where surviving weights change too. Otherwise the host keeps the values that
        are pruned: as many bytes as the share of the weights that goes, and a bit for each weight and round.
        """
        self._gone = [] if dense is None else None
        return partial(self._restore, dense or {})

    @torch.no_grad()
    def _restore(self, dense: Mapping[str, Tensor]) -> None:
        for site in self.sites if dense else ():
            site.parameter.detach().copy_(dense[site.name])
        for weight, bits, values in self._gone or ():
            weight[as_bool(bits.to(weight.device), weight.shape)] = values.to(weight.device)

    @torch.no_grad()
    def _keep(self, kept: list[tuple[Tensor, Tensor, Tensor]], masks: Sequence[Tensor]) -> None:
        """Keep the values that go with these flat masks, site by site: all of them as bools would be large."""
        for site, mask in zip(self.sites, masks, strict=True):
            weight = site.parameter.detach()
            going = ~as_bool(mask, weight.shape) & ((weight != 0) | weight.signbit())  # -0.0 becomes 0.0 too
            kept.append((weight, to_bits(going.reshape(-1)).cpu(), weight[going].cpu()))

    def take(self, chosen: Selection, asked: float, seconds: float) -> None:
        """Hold these masks and zero what they say is gone."""
        if self._gone is not None:
            self._keep(self._gone, chosen.masks)
        self.held.take(chosen.masks, chosen.kept)
        self._cuts = [None if cut is None else cut.value for cut in chosen.cuts]
        self.apply()
        self.record(asked, seconds)

    def record(self, asked: float, seconds: float) -> None:
        """Write down what has become of the masks."""
        self._churn = [now - then for now, then in zip(self.held.dead, self._before, strict=True)]
        self._before = list(self.held.dead)
        sent, self._sent = self.ranks.bytes_sent - self._sent, self.ranks.bytes_sent
        self.updates.append(Update(len(self.updates) + 1, asked, sum(self._before), sum(self._churn), seconds, sent))

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
            TensorRow(s.name, tuple(s.parameter.shape), s.parameter.numel(), gone, churn, cut, s.tied, s.reason)
            for s, gone, churn, cut in zip(self.sites, self.held.dead, self._churn, self._cuts, strict=True)
        ]
        return Outcome(
            **{"pattern": None, "allocation": None, "step": len(self.updates), **settings},
            tensors=tuple(rows),
            left_out=tuple((item.name, item.numel, item.reason) for item in self.left_out),
            updates=tuple(self.updates),
            mask_bytes=self.held.nbytes,
            packed_mask_bytes=sum(packed_bytes(shape) for shape in self.held.shapes),
            fact_bytes=0,
            batches=len(self.batches),
            stages=self.stages.done,
            notes=tuple(self.notes.values()),
            masks=self.masks(),
        )


def scope_for(
    score: Score, scope: str | None, pattern: Pattern | None, allocation: str | None, sites: Sequence[Prunable]
) -> str:
    """The scope that is meant when none is given: that of the score's paper. Rows of WANDA are for linear layers; in
    convolutional networks, where they do worse than magnitude, all weights compete."""
    if scope is not None:
        return as_scope(scope)
    if pattern is not None or allocation is not None:
        return "model"
    kernels = [site for site in sites if site.parameter.ndim > 3]  # one of them may cut pictures for a transformer
    if score.scope == "row" and len(kernels) > 1:
        return "model"
    return score.scope or "model"
