"""Reconstruction and SparseGPT: change surviving weights so that layer outputs stay close to the dense model's.

First pure functions on matrices `[outputs, inputs]` and X^T X of their inputs: `sweep` goes over the columns once and
compensates each pruned weight in the columns to its right (optimal brain surgeon in the form of SparseGPT, Frantar and
Alistarh 2023); `solve` finds the best surviving weights for a mask by conjugate gradients. Then the layerwise pass that
gathers those products block by block, and the two methods that use it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import FactError, PatternError
from secateur.model.distributed import Ranks
from secateur.model.prunable import Prunable, Unfit, unfit_for
from secateur.oneshot.activations import Calls, ForwardDone, InputRecorder, PairedInputs, Place
from secateur.oneshot.batches import Batch, Padding, eval_mode, padding_masks, to_device
from secateur.oneshot.blocks import Chain, capture_chain
from secateur.oneshot.calibration import CalibratedModel
from secateur.oneshot.offload import moved
from secateur.selection.exact import DEAD_KEY, keys_of, without_lowest
from secateur.selection.tiles import Layout, Pattern, tile_of

COLUMNS = 128  # that a sweep finishes before it updates all columns to their right
DAMPING = 0.01  # added to the diagonal, as a fraction of its mean
ATTEMPTS = 6  # each with ten times the damping of the one before
STEPS = 10  # of conjugate gradients; 6 and 30 steps give the same perplexity
TOWARD_DENSE = 0.5  # weight of the dense model's output in the target; the rest is dense weights on current inputs
MERGE_BYTES = 256 << 20  # of hidden states run through a block at once on an accelerator
CPU_MERGE_BYTES = 0  # larger batches are not faster on CPUs

# From columns, the factor's diagonal there, their unpruned weights (None: all) and which columns have zero inputs, to a
# mask.
Choice = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
# A weight, X^T X of its matrices, Z^T X with the dense model's inputs Z if they correspond, and the numbers of inputs.
LayerUpdate = Callable[[Prunable, Tensor, Tensor | None, Tensor], None]


def damped(product: Tensor, damping: float = DAMPING) -> Tensor:
    """X^T X with a fraction of its mean diagonal added to the diagonal. An input that is always zero gets the mean, so
    that its weights do not change, and does not count in the mean."""
    diagonal = product.diagonal()
    silent = diagonal == 0
    mean = (diagonal.sum() / (~silent).sum().clamp(min=1)).clamp(min=1e-30)
    return product + torch.diag(torch.where(silent, mean, damping * mean))


def inverse_factor(product: Tensor, damping: float = DAMPING) -> tuple[Tensor, float]:
    """The upper factor U of the inverse, U^T U, and the damping that made the matrix positive definite."""
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
    """The weight after pruning and compensation, and the mask.

    The mask is chosen for `span` columns at a time (a divisor of `COLUMNS`), after those to their left are done.
    Weights that are not `alive` stay pruned. `silent` columns have inputs that are always zero, so their weights cost
    nothing.
    """
    weight, width = weight.clone(), weight.shape[1]
    silent = torch.zeros(width, dtype=torch.bool, device=weight.device) if silent is None else silent
    kept = torch.ones_like(weight, dtype=torch.bool)
    for begin in range(0, width, COLUMNS):
        end = min(begin + COLUMNS, width)
        columns, local = weight[:, begin:end], factor[begin:end, begin:end]
        errors = torch.zeros_like(columns)
        for column in range(end - begin):
            if column % span == 0:
                chosen = slice(column, column + span)
                living = None if alive is None else alive[:, begin:end][:, chosen]
                idle = silent[begin:end][chosen]
                kept[:, begin:end][:, chosen] = choose(columns[:, chosen], local.diagonal()[chosen], living, idle)
            pruned = columns[:, column].masked_fill(kept[:, begin + column], 0)
            errors[:, column] = pruned / local[column, column]
            columns[:, column:] -= errors[:, column, None] * local[column, None, column:]
        weight[:, end:] -= errors @ factor[begin:end, end:]
    return weight.masked_fill_(~kept, 0), kept


def cheapest(sparsity: float, total: int) -> Choice:
    """A choice that prunes exactly this fraction of `total` weights, the cheapest first. Weights that cost nothing are
    pruned at once, up to the whole fraction, and then fewer later."""
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
    """A choice that keeps the `kept` most expensive of every `of` neighbours (a span of `of` columns)."""

    def choose(part: Tensor, diagonal: Tensor, alive: Tensor | None, silent: Tensor) -> Tensor:
        return without_lowest(_costs(part, diagonal, alive, silent).view(-1, of), of - kept).view_as(part)

    return choose


def _costs(part: Tensor, diagonal: Tensor, alive: Tensor | None, silent: Tensor) -> Tensor:
    """The cost of pruning each weight, as sortable keys. Pruned weights come first, then those of silent inputs,
    smallest first."""
    costs = torch.where(silent, -1 / (1 + part.abs()), (part / diagonal).square())
    keys = keys_of(costs.contiguous())
    return keys if alive is None else keys.masked_fill_(~alive, DEAD_KEY)


def solve(aim: Tensor, start: Tensor, mask: Tensor, product: Tensor, steps: int) -> Tensor:
    """Weights inside the mask that minimize |W' X - Y|^2, where `aim` is Y X^T and `product` is X X^T.

    Conjugate gradients with a diagonal preconditioner from `start`, for all rows at once: `steps` matmuls with
    `product`, no inverse.
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
        scaled = residual * scale
        before, power = power, (residual * scaled).sum(1, keepdim=True)
        direction = scaled + (power / before.clamp(min=1e-30)) * direction
    return found


@dataclass
class Segment:
    """A block, or everything outside of the blocks: its weights, and how to run its batches through it.

    Outside of blocks, layers are updated one by one, because each may read the output of another one.
    """

    prunables: list[Prunable]
    batches: int  # of this rank
    turns: int  # batches of the rank that has most
    padding: Callable[[int], Padding]  # masks of a batch
    run: Callable[[int], Any]
    run_dense: Callable[[int, InputRecorder], Any] | None = None
    advance: Callable[[], None] = lambda: None
    one_by_one: bool = False


def segments(calibrated: CalibratedModel, dense: Mapping[str, Tensor] | None) -> Generator[Segment]:
    """The blocks in order, then the layers outside of them; with `dense` weights, each also runs its dense copy."""
    model, prunables, batches, ranks = calibrated.model, calibrated.prunables, calibrated.own_batches, calibrated.ranks
    chain = _first_states(calibrated)
    done: set[str] = set()
    if chain is not None:
        states = list(chain.states) if dense is not None else []
        for number, block in enumerate(chain.blocks):
            names = {id(parameter): name for name, parameter in block.named_parameters()}
            own = [prunable for prunable in prunables if id(prunable.parameter) in names]
            done |= {prunable.name for prunable in own}
            # Several ranks merge no batches, so each has as many turns as the rank with most batches.
            turns = len(chain.states) if ranks.size == 1 else calibrated.turns
            with _block_on_device(block, calibrated):
                run = partial(chain.run, number)
                segment = Segment(own, len(chain.states), turns, chain.padding.__getitem__, run)
                segment.advance = partial(chain.advance, number)
                yield segment if dense is None else _with_dense_copy(segment, chain, number, states, dense)
    if rest := [prunable for prunable in prunables if prunable.name not in done]:

        def batch_at(number: int) -> Batch:
            return to_device(batches[number], calibrated.device)

        with calibrated.on_device():
            yield Segment(
                rest,
                len(batches),
                calibrated.turns,
                lambda number: padding_masks(model, batch_at(number)),
                lambda number: calibrated.forward(model, batch_at(number)),
                one_by_one=True,
            )


def _first_states(calibrated: CalibratedModel) -> Chain | None:
    """The chain of blocks before the first one, with batches merged; None if the model has no chain on every rank."""
    chain, blocks = None, calibrated.blocks
    if blocks:
        with calibrated.on_device():
            chain = capture_chain(
                calibrated.model, blocks, calibrated.own_batches, calibrated.forward, calibrated.device
            )
    if not calibrated.ranks.every("blocks", chain is not None) or chain is None:
        return None
    limit = CPU_MERGE_BYTES if calibrated.device.type == "cpu" else MERGE_BYTES
    with _block_on_device(chain.blocks[0], calibrated):  # merging tries the first block
        return chain.merged(limit if calibrated.ranks.size == 1 else 0)  # ranks exchange sums batch by batch


def _block_on_device(block: nn.Module, calibrated: CalibratedModel) -> AbstractContextManager[None]:
    """Inside, a block of a streamed model is on the device."""
    if not calibrated.streams:
        return nullcontext()
    return moved([*block.parameters(), *block.buffers()], calibrated.device)


def _with_dense_copy(
    segment: Segment, chain: Chain, number: int, states: list[Tensor], dense: Mapping[str, Tensor]
) -> Segment:
    """The segment of a block that also runs a copy of it with dense weights on the dense model's hidden states."""
    block = chain.blocks[number]
    names = {id(parameter): name for name, parameter in block.named_parameters()}
    copied = copy.deepcopy(block)
    parameters = dict(copied.named_parameters())
    for prunable in segment.prunables:
        parameters[names[id(prunable.parameter)]].detach().copy_(dense[prunable.name])
    twins = [replace(prunable, parameter=parameters[names[id(prunable.parameter)]]) for prunable in segment.prunables]
    outputs: dict[int, Tensor] = {}

    def run_dense(batch: int, recorder: InputRecorder) -> None:
        recorder.watch(twins)
        with recorder:
            outputs[batch] = chain.run(number, batch, copied, states[batch])

    def advance() -> None:
        chain.advance(number)
        for batch in range(len(states)):
            states[batch] = outputs[batch]

    return replace(segment, run_dense=run_dense, advance=advance)


def update_layers(
    calibrated: CalibratedModel, name: str, update: LayerUpdate, dense: Mapping[str, Tensor] | None = None
) -> list[Prunable]:
    """Update every layer from the products of its inputs, and return the weights that had no inputs.

    With `dense` weights layer by layer, each with the dense model's inputs too; without them block by block, which
    takes fewer passes.
    """
    unused: list[Prunable] = []
    ranks = calibrated.ranks
    stage = calibrated.stages.stage(name, max(1, len(calibrated.blocks)))
    in_order = closing(segments(calibrated, dense))  # closed also on errors, so that streamed blocks return
    with stage as tick, torch.no_grad(), eval_mode(calibrated.model), in_order as found:
        for segment in found:
            recordings = _record(segment, ranks)
            groups = _groups(recordings, segment.prunables, ranks)
            called = {name for group in groups for name in group}
            groups += [[one.name] for one in segment.prunables if one.name not in called]  # perhaps by later batches
            alone = dense is not None or segment.one_by_one
            for some in [[group] for group in groups] if alone else [groups]:
                unused += _update_groups(segment, some, recordings, update, calibrated)
            segment.advance()
            tick()
    return unused


def _record(segment: Segment, ranks: Ranks) -> list[Calls]:
    """The inputs of every call: of the dense model in every batch, or, without one, of the first batch only, which the
    first rank has."""
    found = []
    for batch in range(segment.batches if segment.run_dense is not None else int(ranks.rank == 0)):
        recorder = InputRecorder(segment.prunables)
        recorder.start_batch(segment.padding(batch))
        if segment.run_dense is not None:
            segment.run_dense(batch, recorder)
        else:
            with recorder:
                segment.run(batch)
        found.append(recorder.calls)
    return found


def _groups(recordings: Sequence[Calls], prunables: Sequence[Prunable], ranks: Ranks) -> list[list[str]]:
    """Weights in calling order, grouped if they are called once with the same inputs in every batch of every rank: a
    group shares one product."""
    groups: list[list[str]] = []
    stacked = {prunable.name: len(prunable.layout.rows) > 1 and prunable.parameter.shape[0] for prunable in prunables}
    for name in _calling_order(recordings, prunables, ranks):
        alike = bool(groups) and stacked[name] == stacked[groups[-1][0]]  # the same number of matrices
        alike = alike and all(_alike(calls.get(name, []), calls.get(groups[-1][0], [])) for calls in recordings)
        if ranks.every("equal inputs", alike):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _calling_order(recordings: Sequence[Calls], prunables: Sequence[Prunable], ranks: Ranks) -> list[str]:
    """Names of the weights that were called, in the order of all batches of all ranks."""
    numbers = {prunable.name: number for number, prunable in enumerate(prunables)}
    rows = ranks.tell("calls", [n for calls in recordings for n in (*(numbers[name] for name in calls), -1)])
    by_rank: list[list[list[int]]] = []  # of every rank, of every batch
    for row in rows:
        ends = [place for place, number in enumerate(row) if number < 0]
        by_rank.append([row[begin:end] for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)])
    turns = zip_longest(*by_rank, fillvalue=[])
    return list(dict.fromkeys(prunables[number].name for turn in turns for batch in turn for number in batch))


def _alike(one: Sequence[tuple[Place, Tensor]], other: Sequence[tuple[Place, Tensor]]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) <= 1 and all(p == q and torch.equal(x, y) for (p, x), (q, y) in pairs)


def _update_groups(
    segment: Segment,
    groups: list[list[str]],
    recordings: list[Calls],
    update: LayerUpdate,
    calibrated: CalibratedModel,
) -> list[Prunable]:
    """Gather the products of some groups in one pass over the batches, then update all of their layers; returns the
    weights that had no inputs."""
    prunables = {prunable.name: prunable for prunable in segment.prunables}
    inputs = PairedInputs([prunables[group[0]] for group in groups])
    for turn in range(segment.turns):
        for batch in range(segment.batches)[turn : turn + 1]:
            inputs.start_batch(segment.padding(batch))
            inputs.expect(recordings[batch] if segment.run_dense is not None else {})
            with inputs, suppress(ForwardDone):
                segment.run(batch)
        inputs.finish_batch(calibrated.ranks, calibrated.device)
    inputs.sync(calibrated.ranks)
    unused = [prunables[name] for group in groups if group[0] not in inputs.products for name in group]
    for leader, *others in (group for group in groups if group[0] in inputs.products):
        product, cross = inputs.products[leader], None if leader in inputs.unpaired else inputs.crosses.get(leader)
        if not bool(product.isfinite().all()):
            raise FactError(f"The inputs of {leader!r} are not all finite: look for infinities or NaN in the batches.")
        for member in (leader, *others):
            update(prunables[member], product, cross, inputs.tokens[leader])
    return unused


def as_matrices(tensor: Tensor, layout: Layout, count: int) -> list[Tensor]:
    """The matrices `[outputs, inputs]` of a contiguous weight, as views: `count`, or one for each expert."""
    if len(layout.rows) > 1:
        return [part if layout.inputs == 2 else part.t() for part in tensor]
    return list((tensor.t() if layout.inputs == 0 else tensor.view(tensor.shape[0], -1)).chunk(count))


def reconstruct_weights(calibrated: CalibratedModel, dense: Mapping[str, Tensor]) -> None:
    """Change the surviving weights of every layer to bring its outputs close to those of the dense model."""
    masks = calibrated.masks()
    short: set[str] = set()

    def update(prunable: Prunable, products: Tensor, crosses: Tensor | None, tokens: Tensor) -> None:
        weight = prunable.parameter.detach()
        updated, count = weight.contiguous(), len(products)
        before = as_matrices(dense[prunable.name].to(weight.device).contiguous(), prunable.layout, count)
        kept = as_matrices(masks[prunable.name].to(weight.device).contiguous(), prunable.layout, count)
        for number, mine in enumerate(as_matrices(updated, prunable.layout, count)):
            product, seen = products[number], int(tokens[number])
            if seen == 0 or bool(kept[number].all()):
                continue
            scarce = product.shape[0] / seen  # above 1 the products are singular, and damping decides
            short.update([prunable.name] if scarce > 1 else [])
            regular = damped(product, DAMPING * max(1.0, scarce))
            aim = product if crosses is None else torch.lerp(product, crosses[number], TOWARD_DENSE)
            found = solve(
                before[number].float() @ (aim + regular - product), mine.float(), kept[number], regular, STEPS
            )
            if not bool(found.to(mine.dtype).isfinite().all()):
                raise FactError(
                    f"{prunable.name!r} cannot be reconstructed: the solution is not finite in {mine.dtype}."
                )
            mine.copy_(found)
        weight.copy_(updated)

    _note_unused(calibrated, update_layers(calibrated, "reconstruction", update, dense), "were not reconstructed")
    if short:
        calibrated.notes["short"] = f"{len(short)} layers have more inputs than the batches have tokens: damped more."
    calibrated.apply_masks()


def sparsegpt_unfit(pattern: Pattern | None) -> Unfit:
    """A function that says why SparseGPT cannot prune a weight to this pattern, or None. The columns of a convolution
    are not its inputs, so it gets no pattern."""

    def unfit(prunable: Prunable) -> str | None:
        if prunable.fragile:
            return "'sparsegpt' could prune a whole row, and weight_norm would divide by zero"
        if pattern is not None and _is_convolution(prunable):
            return "'sparsegpt' supports no pattern in convolutions; sparsity counts the other layers"
        return unfit_for(pattern)(prunable)

    return unfit


def _is_convolution(prunable: Prunable) -> bool:
    return prunable.parameter.ndim > 2 and len(prunable.layout.rows) == 1


def _check_sparsegpt(prunables: Sequence[Prunable], pattern: Pattern | None) -> None:
    for prunable in prunables:
        tile_of(prunable.name, prunable.parameter.shape, prunable.layout, pattern)
        if pattern is not None and (_is_convolution(prunable) or COLUMNS % pattern.inputs):
            raise PatternError(f"'sparsegpt' cannot give {prunable.name!r} the pattern {pattern.text!r}. Skip it.")
        if _is_convolution(prunable) and prunable.layout.inputs != 1:
            raise PatternError(
                f"'sparsegpt' cannot prune {prunable.name!r} ({prunable.reason}). Use a score, or skip it."
            )


def sparsegpt(calibrated: CalibratedModel, sparsity: float, pattern: Pattern | None) -> list[Tensor]:
    """Prune by SparseGPT (Frantar and Alistarh 2023): masks and weights together, column by column. Returns the flat
    masks."""
    _check_sparsegpt(calibrated.prunables, pattern)
    masks = {name: mask.clone() for name, mask in calibrated.masks().items()}
    dampings: list[float] = []

    def update(prunable: Prunable, products: Tensor, crosses: Tensor | None, tokens: Tensor) -> None:
        updated, kept = prunable.parameter.detach().contiguous(), masks[prunable.name].contiguous()
        total, span = updated.numel(), COLUMNS if pattern is None else pattern.inputs
        choose = cheapest(sparsity, total) if pattern is None else groups_of(pattern.kept or 0, pattern.inputs)
        views = zip(
            as_matrices(updated, prunable.layout, len(products)),
            as_matrices(kept, prunable.layout, len(products)),
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
        prunable.parameter.detach().copy_(updated)
        masks[prunable.name] = kept

    unused = update_layers(calibrated, "sparsegpt", update)
    _note_unused(calibrated, unused, "were pruned by magnitude")
    for prunable in unused:
        width = as_matrices(prunable.parameter.detach().contiguous(), prunable.layout, 1)[0].shape[1]
        count = prunable.parameter.shape[0] if len(prunable.layout.rows) > 1 else 1
        zeros = torch.zeros(width, width, dtype=torch.float32, device=prunable.parameter.device)
        update(prunable, zeros.expand(count, width, width), None, torch.zeros(count, dtype=torch.int64, device="cpu"))
    if singular := sum(damping > DAMPING for damping in dampings):
        calibrated.notes["damping"] = (
            f"{singular} of {len(dampings)} matrices X^T X were not positive definite: damped more."
        )
    return [mask.reshape(-1) for mask in masks.values()]


def _note_unused(calibrated: CalibratedModel, unused: list[Prunable], what: str) -> None:
    if unused:
        shown = ", ".join(prunable.name for prunable in unused[:3]) + (", ..." if unused[3:] else "")
        calibrated.notes["unused"] = (
            f"{len(unused)} layers whose inputs no batch showed (never called, or in an operation that hides them, such"
            f" as a recurrent one) {what}: {shown}"
        )
