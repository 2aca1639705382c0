"""Reconstruction: surviving weights changed so that a layer's outputs stay what they were, given X^T X of its inputs.

Pure functions on matrices `[outputs, inputs]`. `sweep` goes over the columns once and makes up for each weight that is
dropped in those to its right (optimal brain surgeon in the form of SparseGPT, Frantar and Alistarh 2023). `solve` finds
the best surviving weights for a mask, by conjugate gradients over all rows at once.
"""

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

from secateur.errors import FactError, PatternError
from secateur.model.distributed import Ranks
from secateur.model.prunable import Prunable, Unfit, unfit_for
from secateur.oneshot.activations import Inputs, product_of
from secateur.oneshot.batches import Batch, quiet, real_positions, to_device
from secateur.oneshot.blocks import Chain, enter
from secateur.oneshot.calibration import Subject
from secateur.oneshot.offload import landed
from secateur.selection.exact import DEAD_KEY, keys_of, without_lowest
from secateur.selection.tiles import Layout, Pattern, tile_of

COLUMNS = 128  # that a sweep finishes before it brings all to their right up to date
DAMPING = 0.01  # of the mean of the diagonal, added to it
ATTEMPTS = 6  # each with ten times the damping of the one before

# Columns, the diagonal of the factor there, which of their weights are alive (None: all), and which columns have
# inputs that are always zero, to a mask.
Choice = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


def damped(product: Tensor, damping: float = DAMPING) -> Tensor:
    """X^T X with a share of its mean diagonal added to the diagonal. An input that was always zero gets the mean, so
    that its weights do not move, and counts for no mean."""
    diagonal = product.diagonal()
    silent = diagonal == 0
    mean = (diagonal.sum() / (~silent).sum().clamp(min=1)).clamp(min=1e-30)
    return product + torch.diag(torch.where(silent, mean, damping * mean))


def inverse_factor(product: Tensor, damping: float = DAMPING) -> tuple[Tensor, float]:
    """The upper factor U of the inverse, U^T U, and the damping it took to make the matrix positive definite."""
    for _ in range(ATTEMPTS):
        lower, failed = torch.linalg.cholesky_ex(damped(product, damping))
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(factor.isfinite().all()):
                return factor, damping
        damping *= 10
    raise FactError(
        "X^T X of a layer's inputs is not positive definite even when damped by ten times its mean: look for infinities"
        " or NaN among the activations."
    )


def sweep(
    weight: Tensor,
    factor: Tensor,
    choose: Choice,
    span: int = COLUMNS,
    alive: Tensor | None = None,
    silent: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weight with some dropped and the others to their right made up for it; and the mask, which is chosen for
    every `span` columns (a divisor of `COLUMNS`) once those to their left are done. What is not `alive` stays gone.
    `silent` columns have inputs that are always zero: nothing is lost with their weights."""
    weight, width = weight.clone(), weight.shape[1]
    silent = torch.zeros(width, dtype=torch.bool, device=weight.device) if silent is None else silent
    kept = torch.ones_like(weight, dtype=torch.bool)
    for begin in range(0, width, COLUMNS):
        end = min(begin + COLUMNS, width)
        part, mine = weight[:, begin:end], factor[begin:end, begin:end]
        errors = torch.zeros_like(part)
        for column in range(end - begin):
            if column % span == 0:
                chosen = slice(column, column + span)
                living = None if alive is None else alive[:, begin:end][:, chosen]
                idle = silent[begin:end][chosen]
                kept[:, begin:end][:, chosen] = choose(part[:, chosen], mine.diagonal()[chosen], living, idle)
            dropped = part[:, column].masked_fill(kept[:, begin + column], 0)
            errors[:, column] = dropped / mine[column, column]
            part[:, column:] -= errors[:, column, None] * mine[column, None, column:]
        weight[:, end:] -= errors @ factor[begin:end, end:]
    return weight.masked_fill_(~kept, 0), kept


def cheapest(sparsity: float, total: int) -> Choice:
    """A choice that drops this share of `total` weights exactly, those whose loss costs least. Weights that cost
    nothing go at once, up to the whole share; then fewer go later."""
    seen = gone = 0

    def choose(part: Tensor, diagonal: Tensor, alive: Tensor | None, silent: Tensor) -> Tensor:
        nonlocal seen, gone
        seen += part.numel()
        free = silent.expand_as(part) if alive is None else silent | ~alive
        count = max(0, round(sparsity * seen) - gone, min(int(free.sum()), round(sparsity * total) - gone))
        mask = without_lowest(_costs(part, diagonal, alive, silent).view(1, -1), count).view_as(part)
        gone += count if alive is None else part.numel() - int(mask.sum())
        return mask

    return choose


def groups_of(kept: int, of: int) -> Choice:
    """A choice that keeps the `kept` dearest of every `of` neighbours (a span of so many columns)."""

    def choose(part: Tensor, diagonal: Tensor, alive: Tensor | None, silent: Tensor) -> Tensor:
        return without_lowest(_costs(part, diagonal, alive, silent).view(-1, of), of - kept).view_as(part)

    return choose


def _costs(part: Tensor, diagonal: Tensor, alive: Tensor | None, silent: Tensor) -> Tensor:
    """What it costs to lose each weight, as keys. Weights that are gone already come first, then those of silent
    inputs, smallest first."""
    costs = torch.where(silent, -1 / (1 + part.abs()), (part / diagonal).square())
    keys = keys_of(costs.contiguous())
    return keys if alive is None else keys.masked_fill_(~alive, DEAD_KEY)


def solve(aim: Tensor, start: Tensor, mask: Tensor, product: Tensor, steps: int) -> Tensor:
    """Weights inside the mask that minimise |W' X - Y|^2, where `aim` is Y X^T and `product` is X X^T.

    Conjugate gradients with a diagonal preconditioner, every row for itself, all rows at once: `steps` products of the
    size of the weight with `product`, no inverse. `start` is where it begins.
    """
    scale = product.diagonal().reciprocal()
    found = start * mask
    residual = (aim - found @ product) * mask
    direction = residual * scale
    power = (residual * direction).sum(1, keepdim=True)
    for _ in range(steps):
        moved = (direction @ product) * mask
        step = power / (direction * moved).sum(1, keepdim=True).clamp(min=1e-30)
        found += step * direction
        residual -= step * moved
        turned = residual * scale
        before, power = power, (residual * turned).sum(1, keepdim=True)
        direction = turned + (power / before.clamp(min=1e-30)) * direction
    return found


Calls = dict[str, list[Tensor]]  # inputs of every site, one tensor for each time it was called
# A site, X^T X of its matrices, Z^T X with the dense model's inputs Z if they correspond, and the number of inputs.
Work = Callable[[Prunable, Tensor, Tensor | None, Tensor], None]


MERGED = {"cuda": 256 << 20}  # bytes of state run through a block at once; on CPUs larger batches gain nothing


class Enough(Exception):  # noqa: N818 - no error: everything that was to be seen was seen
    """Raised inside a forward pass that need not go on."""


class Recorder(Inputs):
    """Keeps the inputs themselves, in the order in which sites are called."""

    def __init__(self, sites: Sequence[Prunable]) -> None:
        super().__init__(sites)
        self.calls: Calls = {}

    def _add(self, site: Prunable, first: int, inputs: Tensor) -> None:
        self.calls.setdefault(site.name, []).append(inputs.clone())


class Paired(Inputs):
    """X^T X of some sites, and X^T Z with the inputs Z that the dense model has in the same places."""

    def __init__(self, sites: Sequence[Prunable]) -> None:
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

    def _add(self, site: Prunable, first: int, inputs: Tensor) -> None:
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

    sites: list[Prunable]
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
    sites: list[Prunable],
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


def in_order(subject: Subject, name: str, work: Work, dense: Mapping[str, Tensor] | None = None) -> list[Prunable]:
    """Do this work on every site. With `dense`, layer after layer, each with what the dense model has in its place;
    without, block after block, which takes fewer passes. Returns the sites nothing was multiplied with."""
    idle: list[Prunable] = []
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


def _together(recordings: Sequence[Calls], sites: Sequence[Prunable], ranks: Ranks) -> list[list[str]]:
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


def _called(recordings: Sequence[Calls], sites: Sequence[Prunable], ranks: Ranks) -> list[str]:
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


def _visit(
    part: Part, groups: list[list[str]], recordings: list[Calls], work: Work, subject: Subject
) -> list[Prunable]:
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


STEPS = 10  # of conjugate gradients; 30 leave perplexity where 6 do
TOWARD_DENSE = 0.5  # how much of the aim is the dense model's output, the rest that of dense weights on today's inputs


def as_matrices(tensor: Tensor, layout: Layout, count: int) -> list[Tensor]:
    """The matrices `[outputs, inputs]` of a contiguous weight, as views; a convolution has one for each group."""
    if len(layout.rows) > 1:
        return [part if layout.inputs == 2 else part.t() for part in tensor]
    return [tensor.t()] if layout.inputs == 0 else list(tensor.view(tensor.shape[0], -1).chunk(count))


def repair(subject: Subject, dense: Mapping[str, Tensor]) -> None:
    """Change what survives so that every layer gives what it gave in the dense model, as nearly as it can."""
    masks = subject.masks()
    short: set[str] = set()

    def work(site: Prunable, products: Tensor, crosses: Tensor | None, tokens: Tensor) -> None:
        weight = site.parameter.detach()
        mended, count = weight.contiguous(), len(products)
        before = as_matrices(dense[site.name].to(weight.device).contiguous(), site.layout, count)
        kept = as_matrices(masks[site.name].to(weight.device).contiguous(), site.layout, count)
        for number, mine in enumerate(as_matrices(mended, site.layout, count)):
            product, seen = products[number], int(tokens[number])
            if seen == 0 or bool(kept[number].all()):
                continue
            scarce = product.shape[0] / seen  # more features than inputs: what they leave open is settled by damping
            short.update([site.name] if scarce > 1 else [])
            whole = damped(product, DAMPING * max(1.0, scarce))
            aim = product if crosses is None else torch.lerp(product, crosses[number], TOWARD_DENSE)
            found = solve(before[number].float() @ (aim + whole - product), mine.float(), kept[number], whole, STEPS)
            if not bool(found.to(mine.dtype).isfinite().all()):
                raise FactError(f"{site.name!r} cannot be repaired: the solution is not finite in {mine.dtype}.")
            mine.copy_(found)
        weight.copy_(mended)

    _note_idle(subject, in_order(subject, "repair", work, dense), "were not repaired")
    if short:
        subject.notes["short"] = f"{len(short)} layers have more inputs than the batches have tokens: damped more."
    subject.apply()


def sparsegpt_unfit(pattern: Pattern | None) -> Unfit:
    """Says of a site whether SparseGPT cannot give it this pattern: its columns are not the inputs of a convolution."""

    def unfit(site: Prunable) -> str | None:
        if site.fragile:
            return "'sparsegpt' might prune a row whole, which weight_norm divides by"
        if pattern is not None and _is_convolution(site):
            return "'sparsegpt' gives convolutions no pattern; sparsity counts the others alone"
        return unfit_for(pattern)(site)

    return unfit


def _is_convolution(site: Prunable) -> bool:
    return site.parameter.ndim > 2 and len(site.layout.rows) == 1


def sparsegpt(subject: Subject, sparsity: float, pattern: Pattern | None) -> list[Tensor]:
    """SparseGPT (Frantar and Alistarh 2023): masks and weights together, column by column. The masks, flat."""
    for site in subject.sites:
        tile_of(site.name, site.parameter.shape, site.layout, pattern)
        if pattern is not None and (_is_convolution(site) or COLUMNS % pattern.inputs):
            raise PatternError(f"'sparsegpt' cannot give {site.name!r} the pattern {pattern.text!r}. Skip it.")
        if _is_convolution(site) and site.layout.inputs != 1:
            raise PatternError(f"'sparsegpt' cannot prune {site.name!r} ({site.reason}). Use a score, or skip it.")
    masks = {name: mask.clone() for name, mask in subject.masks().items()}
    dampings: list[float] = []

    def work(site: Prunable, products: Tensor, crosses: Tensor | None, tokens: Tensor) -> None:
        mended, kept = site.parameter.detach().contiguous(), masks[site.name].contiguous()
        total, span = mended.numel(), COLUMNS if pattern is None else pattern.inputs
        choose = cheapest(sparsity, total) if pattern is None else groups_of(pattern.kept or 0, pattern.inputs)
        views = zip(
            as_matrices(mended, site.layout, len(products)),
            as_matrices(kept, site.layout, len(products)),
            products,
            tokens.tolist(),
            strict=True,
        )
        for mine, mask, product, seen in views:
            product = product if seen else torch.eye(len(product), dtype=product.dtype, device=product.device)
            factor, damping = inverse_factor(product)
            dampings.append(damping)
            alive = None if bool(mask.all()) else mask.to(mine.device)
            found, chosen = sweep(mine.float(), factor, choose, span, alive, product.diagonal() == 0)
            mine.copy_(found)
            mask.copy_(chosen)
        site.parameter.detach().copy_(mended)
        masks[site.name] = kept

    idle = in_order(subject, "sparsegpt", work)
    _note_idle(subject, idle, "were pruned by magnitude")
    for site in idle:
        width = as_matrices(site.parameter.detach().contiguous(), site.layout, 1)[0].shape[1]
        count = site.parameter.shape[0] if len(site.layout.rows) > 1 else 1
        same = torch.zeros(width, width, dtype=torch.float32, device=site.parameter.device)
        work(site, same.expand(count, width, width), None, torch.zeros(count, dtype=torch.int64, device="cpu"))
    if again := sum(damping > DAMPING for damping in dampings):
        subject.notes["damping"] = f"{again} of {len(dampings)} matrices X^T X were not positive definite: damped more."
    return [mask.reshape(-1) for mask in masks.values()]


def _note_idle(subject: Subject, idle: list[Prunable], what: str) -> None:
    if idle:
        shown = ", ".join(site.name for site in idle[:3]) + (", ..." if idle[3:] else "")
        subject.notes["idle"] = f"{len(idle)} layers that the batches never used {what}: {shown}"
