"""Working through a model in the order data passes it, each layer with the inputs it has once those before are done."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import FactError
from secateur.model.distributed import Ranks
from secateur.model.prunable import Site
from secateur.oneshot.activations import Inputs, product_of
from secateur.oneshot.batches import Batch, quiet, real_positions, to_device
from secateur.oneshot.blocks import Chain, enter
from secateur.oneshot.offload import landed
from secateur.oneshot.subject import Subject

Calls = dict[str, list[Tensor]]  # inputs of every site, one tensor for each time it was called
# A site, X^T X of its matrices, Z^T X with the dense model's inputs Z if they correspond, and the number of inputs.
Work = Callable[[Site, Tensor, Tensor | None, Tensor], None]


MERGED = {"cuda": 256 << 20}  # bytes of state run through a block at once; on CPUs larger batches gain nothing


class Enough(Exception):  # noqa: N818 - no error: everything that was to be seen was seen
    """Raised inside a forward pass that need not go on."""


class Recorder(Inputs):
    """Keeps the inputs themselves, in the order in which sites are called."""

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites)
        self.calls: Calls = {}

    def _add(self, site: Site, first: int, inputs: Tensor) -> None:
        self.calls.setdefault(site.name, []).append(inputs.clone())


class Paired(Inputs):
    """X^T X of some sites, and X^T Z with the inputs Z that the dense model has in the same places."""

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites, products=True)
        self.crosses: dict[str, Tensor] = {}
        self._totals["crosses"] = self.crosses
        self.apart: set[str] = set()  # called otherwise than in the dense model, as experts are
        self._strayed = False  # whether any was in the batch that is watched
        self._expected: Calls = {}
        self._left = 0

    def expect(self, dense: Mapping[str, Sequence[Tensor]]) -> None:
        """What the dense model had in the batch that comes now; once all of it was seen the pass may end."""
        self._expected = {site.name: list(dense.get(site.name, ())) for site in self._watched}
        self._left, self._strayed = sum(map(len, self._expected.values())), False

    def _add(self, site: Site, first: int, inputs: Tensor) -> None:
        super()._add(site, first, inputs)
        waiting = self._expected.get(site.name)
        other = waiting.pop(0) if waiting else None
        if other is None or other.shape != inputs.shape or len(site.layout.rows) > 1:
            self.apart.add(site.name)
            self._strayed = True
        else:
            self._sum("crosses", site, 0, len(inputs), product_of(other, inputs))
        self._left -= 1
        if self._left == 0 and not self._strayed:  # of this batch alone, since ranks do not see each other's
            raise Enough

    def agree(self, ranks: Ranks) -> None:
        """Have the same sites apart on every rank."""
        self.apart |= self._anywhere(ranks, self.apart)


@dataclass
class Part:
    """A stretch of the model: its sites, and how each of its batches is run through it, as it is and with dense
    weights. Outside of blocks, layers are worked on one by one, since each may read what another has changed."""

    sites: list[Site]
    batches: int  # of this rank
    turns: int  # the batches of the rank that has most
    real: Callable[[int], list[Tensor]]  # masks of what is not padding
    run: Callable[[int], Any]
    run_dense: Callable[[int, Recorder], Any] | None
    done: Callable[[], None]
    one_by_one: bool = False


def parts(subject: Subject, dense: Mapping[str, Tensor] | None) -> Generator[Part]:
    """The blocks one after another, then whatever lies outside of them; with `dense`, each beside its dense twin. Each
    rank carries its own batches along."""
    model, sites, batches, ranks = subject.model, subject.sites, subject.own, subject.ranks
    with subject.crossing():
        chain = enter(model, subject.blocks, batches, subject.forward, subject.device) if subject.blocks else None
    if not ranks.every("blocks", chain is not None):
        chain = None
    done: set[str] = set()
    if chain is not None:
        most = MERGED.get(subject.device.type, 0) if ranks.size == 1 else 0  # each batch has sums of its own
        with _here(chain.blocks[0], subject):  # it tries whether batches may be merged
            chain = chain.merged(most)
        states = list(chain.states) if dense is not None else []
        for number, block in enumerate(chain.blocks):
            inside = {id(parameter): name for name, parameter in block.named_parameters()}
            mine = [site for site in sites if id(site.parameter) in inside]
            done |= {site.name for site in mine}
            with _here(block, subject):
                yield _block(chain, number, mine, inside, states, dense, subject)
    if rest := [site for site in sites if site.name not in done]:
        with subject.crossing():
            near = partial(_on_device, subject)
            yield Part(
                rest, len(batches), subject.turns, lambda b: real_positions(model, near(b)),
                lambda b: subject.forward(model, near(b)), None, lambda: None, one_by_one=True,
            )  # fmt: skip


def _on_device(subject: Subject, batch: int) -> Batch:
    return to_device(subject.own[batch], subject.device)


def _here(block: nn.Module, subject: Subject) -> AbstractContextManager[None]:
    """Inside, a block that is streamed is on the device."""
    return landed([*block.parameters(), *block.buffers()], subject.device)


def _block(
    chain: Chain,
    number: int,
    sites: list[Site],
    inside: Mapping[int, str],
    states: list[Tensor],
    dense: Any,
    subject: Subject,
) -> Part:
    count = len(chain.states)
    turns = count if subject.ranks.size == 1 else subject.turns  # several ranks merge nothing
    if dense is None:
        return Part(
            sites, count, turns, chain.real.__getitem__, lambda b: chain.run(number, b), None,
            lambda: chain.advance(number),
        )  # fmt: skip
    twin = copy.deepcopy(chain.blocks[number])
    its = dict(twin.named_parameters())
    for site in sites:
        its[inside[id(site.parameter)]].detach().copy_(dense[site.name])
    twins = [replace(site, parameter=its[inside[id(site.parameter)]]) for site in sites]
    ahead: dict[int, Tensor] = {}

    def run_dense(batch: int, recorder: Recorder) -> None:
        recorder.watch(twins)
        with recorder:
            ahead[batch] = chain.run(number, batch, twin, states[batch])

    def done() -> None:
        chain.advance(number)
        for batch in range(len(states)):
            states[batch] = ahead[batch]

    return Part(sites, count, turns, chain.real.__getitem__, lambda b: chain.run(number, b), run_dense, done)


def in_order(subject: Subject, name: str, work: Work, dense: Mapping[str, Tensor] | None = None) -> list[Site]:
    """Do this work on every site. With `dense`, layer after layer, each with what the dense model has in its place;
    without, block after block, which takes fewer passes. Returns the sites nothing was multiplied with."""
    idle: list[Site] = []
    ranks = subject.ranks
    stage = subject.stages.stage(name, max(1, len(subject.blocks)))
    work_through = closing(parts(subject, dense))  # so that blocks go home whatever happens
    with stage as tick, torch.no_grad(), quiet(subject.model), work_through as stretches:
        for part in stretches:
            recordings = _record(part, ranks)
            together = _together(recordings, part.sites, ranks)
            seen = {name for group in together for name in group}
            together += [[site.name] for site in part.sites if site.name not in seen]  # by later batches, perhaps
            alone = dense is not None or part.one_by_one
            for groups in [[group] for group in together] if alone else [together]:
                idle += _visit(part, groups, recordings, work, subject)
            part.done()
            tick()
    return idle


def _record(part: Part, ranks: Ranks) -> list[Calls]:
    """What sites are called with: in the dense model for every batch, or, without one, in the first batch as it is,
    which the first rank has."""
    found = []
    for batch in range(part.batches if part.run_dense is not None else int(ranks.rank == 0)):
        recorder = Recorder(part.sites)
        recorder.batch(part.real(batch))
        if part.run_dense is not None:
            part.run_dense(batch, recorder)
        else:
            with recorder:
                part.run(batch)
        found.append(recorder.calls)
    return found


def _together(recordings: Sequence[Calls], sites: Sequence[Site], ranks: Ranks) -> list[list[str]]:
    """Sites in the order in which they are called; those called once with the same inputs in every batch of every rank
    share one product."""
    groups: list[list[str]] = []
    stacked = {site.name: len(site.layout.rows) > 1 and site.parameter.shape[0] for site in sites}
    for name in _called(recordings, sites, ranks):
        alike = bool(groups) and stacked[name] == stacked[groups[-1][0]]  # as many matrices
        alike = alike and all(_alike(calls.get(name, []), calls.get(groups[-1][0], [])) for calls in recordings)
        if ranks.every("equal inputs", alike):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _called(recordings: Sequence[Calls], sites: Sequence[Site], ranks: Ranks) -> list[str]:
    """Names of the sites that were called, in the order of all batches of all ranks."""
    numbers = {site.name: number for number, site in enumerate(sites)}
    told = ranks.tell("calls", [n for calls in recordings for n in (*(numbers[name] for name in calls), -1)])
    seen: list[list[list[int]]] = []  # of every rank, of every batch
    for row in told:
        ends = [place for place, number in enumerate(row) if number < 0]
        seen.append([row[begin:end] for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)])
    turns = zip_longest(*seen, fillvalue=[])
    return list(dict.fromkeys(sites[number].name for turn in turns for batch in turn for number in batch))


def _alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) <= 1 and all(map(torch.equal, one, other))


def _visit(part: Part, groups: list[list[str]], recordings: list[Calls], work: Work, subject: Subject) -> list[Site]:
    """Gather the products of some groups in one pass over the batches, then do the work on all of their sites. Returns
    those that nothing was multiplied with."""
    sites = {site.name: site for site in part.sites}
    watch = Paired([sites[group[0]] for group in groups])
    for turn in range(part.turns):
        for batch in range(part.batches)[turn : turn + 1]:
            watch.batch(part.real(batch))
            watch.expect(recordings[batch] if part.run_dense is not None else {})
            with watch, suppress(Enough):
                part.run(batch)
        watch.finish(subject.ranks, subject.device)
    watch.agree(subject.ranks)
    idle = [sites[name] for group in groups if group[0] not in watch.products for name in group]
    for leader, *others in (group for group in groups if group[0] in watch.products):
        product, cross = watch.products[leader], None if leader in watch.apart else watch.crosses.get(leader)
        if not bool(product.isfinite().all()):
            raise FactError(f"The inputs of {leader!r} are not all finite: look for infinities or NaN in the batches.")
        for member in (leader, *others):
            work(sites[member], product, cross, watch.tokens[leader])
    return idle
