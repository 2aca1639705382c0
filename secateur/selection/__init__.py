"""Selection: scores in, masks out. Decides which weights compete and what shape the zeros have; never sees a model.

In scopes "model" and "layer" weights compete across all tensors or inside each, by a streamed exact cut (`exact.py`).
Inside a row or an n:m group they are ranked directly. Blocks are pooled into one score each and then compete as weights
do. Sharded tensors are summed over `peers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secateur import kernels
from secateur.errors import PatternError
from secateur.schedules import check_sparsity
from secateur.selection.allocation import Layers, rule_named
from secateur.selection.exact import (
    ALONE,
    CHUNK,
    Cut,
    Peers,
    ScoredTensor,
    Where,
    flat_part,
    prune_exactly,
    refuse_nan,
    sampled_cut,
    without_lowest,
)
from secateur.selection.masks import to_bits
from secateur.selection.tiles import Layout, Pattern, Tiling, pairwise_sum, parse_pattern, tile_of

__all__ = ["sampled_cut", "select"]

SCOPES = ("model", "layer", "row")
SYNONYMS = {"global": "model"}  # as torch.nn.utils.prune and many papers call it


def select(
    scores: Mapping[str, Tensor],
    sparsity: float | None,
    *,
    scope: str = "model",
    pattern: str | None = None,
    alive: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Masks (True = kept) that remove exactly the asked share of the weights, those of lowest score.

    `scores` maps names to bf16, fp16 or fp32 tensors shaped [outputs, inputs, ...]; higher scores are kept. `scope` is
    which weights compete: "model" (or "global") removes round(sparsity * all) of them, "layer" as many of each tensor,
    "row" of each output row. `pattern` "n:m" keeps the n best of every m consecutive inputs, "block:RxC" removes whole
    blocks. Among equal scores the first in (tensor, flat index) order goes first. Weights False in `alive` are pruned
    already: they do not compete and stay pruned. Nothing is modified.
    """
    shape_of = parse_pattern(pattern)
    scope, wanted = as_scope(scope), check_choice(sparsity, scope, shape_of, None)
    if strangers := sorted((alive or {}).keys() - scores.keys()):
        raise PatternError(
            f"alive has {', '.join(map(repr, strangers[:3]))}, which scores does not. Use the same names."
        )
    targets = [_target_from(name, tensor, alive) for name, tensor in scores.items()]
    chosen = choose(targets, wanted, scope=scope, pattern=shape_of)
    return {name: mask.view(scores[name].shape) for name, mask in zip(scores, chosen.masks, strict=True)}


def _target_from(name: str, scores: Tensor, alive: Mapping[str, Tensor] | None) -> Target:
    if scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise PatternError(f"Scores must be fp32, bf16 or fp16; {name!r} is {scores.dtype}. Cast it with .float().")
    scores = scores.detach()
    living = None if alive is None or name not in alive else alive[name].to(torch.bool)
    if living is not None and living.shape != scores.shape:
        raise PatternError(f"alive[{name!r}] has shape {tuple(living.shape)}, its scores {tuple(scores.shape)}.")
    scored = ScoredTensor(
        name,
        scores.numel(),
        scores.numel(),
        lambda where: flat_part(scores, where).float(),
        scores.device,
        None if living is None else living.reshape(-1).contiguous(),
    )
    layout = Layout() if scores.ndim > 1 else Layout(rows=(), inputs=0)
    return Target(scored, tuple(scores.shape), tuple(scores.shape), layout)


@dataclass(frozen=True)
class Target:
    """A tensor to select in: its scores, its shape here (`shape`) and over all peers (`whole`), its rows and inputs."""

    scored: ScoredTensor
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    layout: Layout

    def tiling(self, pattern: Pattern | None) -> Tiling:
        return Tiling(self.shape, tile_of(self.scored.name, self.whole, self.layout, pattern, self.shape))

    @property
    def fan(self) -> int:
        """Outputs plus inputs plus kernel extents, summed over the matrices of a stack."""
        stacked = self.layout.rows[:-1]
        dims = [size for dim, size in enumerate(self.whole) if dim not in stacked]
        return sum(dims) * math.prod(self.whole[dim] for dim in stacked)


@dataclass(frozen=True)
class Selection:
    """Flat masks in the order of the targets, and the cut of each: one for all in scope "model", None for tiles."""

    masks: list[Tensor]
    cuts: list[Cut | None]
    kept: list[int] | None = None  # how many weights each mask keeps, where already counted


def as_scope(scope: str) -> str:
    """The scope of this name; "global" means "model"."""
    found = SYNONYMS.get(scope, scope) if isinstance(scope, str) else scope
    if found not in SCOPES:
        raise PatternError(f"No scope {scope!r}. Use one of {', '.join(map(repr, SCOPES))} ('global' is 'model').")
    return found


def check_choice(sparsity: float | None, scope: str, pattern: Pattern | None, allocation: str | None) -> float:
    """The sparsity these settings mean, or an error where they contradict each other."""
    as_scope(scope)
    if allocation is not None:
        rule_named(allocation)
    follows = None if pattern is None else pattern.sparsity
    if pattern is not None and follows is not None:
        if allocation is not None:
            raise PatternError(f"Pattern {pattern.text!r} fixes every layer's sparsity; allocation must be None.")
        if sparsity is not None and abs(sparsity - follows) > 1e-9:
            raise PatternError(
                f"Pattern {pattern.text!r} means sparsity {follows:g}, not {sparsity!r}. Pass sparsity=None."
            )
        return follows
    if sparsity is None:
        raise PatternError("Only an n:m pattern fixes the sparsity by itself. Pass sparsity=..., a number in [0, 1).")
    return check_sparsity(sparsity)


@dataclass(frozen=True)
class Select:
    """Selects at any sparsity, within one scope, pattern and allocation."""

    scope: str
    pattern: Pattern | None
    allocation: str | None

    def __call__(self, targets: list[Target], asked: float, packed: bool) -> Selection:
        return choose(targets, asked, scope=self.scope, pattern=self.pattern, allocation=self.allocation, packed=packed)

    @property
    def together(self) -> bool:
        """Whether weights of all layers compete with each other."""
        by_group = self.pattern is not None and self.pattern.kept is not None
        return self.scope == "model" and self.allocation is None and not by_group


def choose(
    targets: Sequence[Target],
    sparsity: float,
    *,
    scope: str = "model",
    pattern: Pattern | None = None,
    allocation: str | None = None,
    peers: Peers = ALONE,
    packed: bool = False,
) -> Selection:
    """Masks at exactly this sparsity. Weights that are not alive count as pruned and never return.

    Masks are flat: bool, or one bit a weight when `packed`.
    """
    if pattern is not None and pattern.kept is not None:
        most = min(pattern.inputs - pattern.kept, math.floor(sparsity * pattern.inputs + 1e-9))
        return rank(targets, [most] * len(targets), pattern, peers, packed)
    if pattern is not None:
        return _choose_blocks(targets, sparsity, scope, pattern, allocation, peers, packed)
    return fulfil(targets, quota_for(targets, sparsity, scope, allocation, peers), peers, packed)


@dataclass(frozen=True)
class Quota:
    """How many of the competing weights go: of all together, of each tensor, or of each row of each tensor."""

    scope: str
    sizes: list[int]  # how many compete with one another
    gone: list[int]  # how many of them are gone afterwards, including those that already are


def quota_for(
    targets: Sequence[Target], sparsity: float, scope: str, allocation: str | None, peers: Peers = ALONE
) -> Quota:
    """The counts this sparsity means in this scope, or under this allocation."""
    tensors = [target.scored for target in targets]
    totals = [scored.total for scored in tensors]
    counts = None
    if allocation is not None:
        fans = [target.fan for target in targets]
        counts = rule_named(allocation)(Layers(tensors, fans, _gone(tensors, peers), sparsity, peers))
    if scope == "row":
        sizes = [target.tiling(None).size for target in targets]
        shares = [sparsity] * len(sizes)
        if counts is not None:
            shares = [count / max(1, total) for count, total in zip(counts, totals, strict=True)]
        return Quota("row", sizes, [round(share * size) for share, size in zip(shares, sizes, strict=True)])
    if counts is not None:
        return Quota("layer", totals, counts)
    sizes = totals if scope == "layer" else [sum(totals)]
    return Quota(scope, sizes, [round(sparsity * size) for size in sizes])


def fulfil(targets: Sequence[Target], quota: Quota, peers: Peers = ALONE, packed: bool = False) -> Selection:
    """Prune the lowest scores among those that compete until the quota is met; dead weights count towards it."""
    if quota.scope == "row":
        return rank(targets, quota.gone, None, peers, packed)
    tensors = [target.scored for target in targets]
    groups, gone = [[scored] for scored in tensors], _gone(tensors, peers)
    if quota.scope == "model":
        groups, gone = [tensors], [sum(gone)]
    more = [wanted - already for wanted, already in zip(quota.gone, gone, strict=True)]
    cuts, masks, kept = kernels.prune_groups(groups, more, peers, packed)
    return Selection(masks, cuts * len(masks) if quota.scope == "model" else cuts, kept)


def _gone(tensors: Sequence[ScoredTensor], peers: Peers) -> list[int]:
    """How many weights of each tensor do not compete, over all peers."""
    return peers.totals([scored.numel - scored.living() if scored.counted(peers) else 0 for scored in tensors])


def rank(
    targets: Sequence[Target], gone: Sequence[int], pattern: Pattern | None, peers: Peers, packed: bool
) -> Selection:
    """Prune the lowest scores of every tile until `gone` of it are; dead weights count towards that."""
    tilings = [target.tiling(pattern) for target in targets]
    if all(tiling.solid for tiling in tilings):
        sizes = [tiling.size for tiling in tilings]
        if (ready := kernels.rank_tiles([target.scored for target in targets], sizes, gone, peers, packed)) is not None:
            return Selection(ready, [None] * len(ready))
    masks, spoiled = [], []
    for target, tiling, count in zip(targets, tilings, gone, strict=True):
        scored = target.scored.unpacked()
        mask = torch.empty(scored.numel, dtype=torch.bool, device=scored.device)
        nan = 0
        for slab in tiling.slabs() if scored.numel else ():
            if tiling.size > 2 * CHUNK:
                nan += _rank_long_tile(scored, tiling, slab, count, mask)
                continue
            where = tiling.members(slab)
            scores = scored.score(where)
            nan += scored.spoiled(where, scores)
            mask[where] = without_lowest(scored.keys(where, scores).view(-1, tiling.size), count).flatten()
        masks.append(to_bits(mask) if packed else mask)
        spoiled.append(nan)
    refuse_nan([target.scored.name for target in targets], peers.totals(spoiled))
    return Selection(masks, [None] * len(masks))


def _rank_long_tile(scored: ScoredTensor, tiling: Tiling, tile: Where, count: int, mask: Tensor) -> int:
    """Prune a tile too long to rank at once by an exact cut of its own. Returns how many of its scores are NaN."""

    def score(places: Where) -> Tensor:
        return scored.score(tiling.members(tile, places))

    alone = ScoredTensor(scored.name, tiling.size, tiling.size, score, scored.device)
    if scored.alive is not None:
        alive = torch.cat([scored.alive[tiling.members(tile, chunk)] for chunk in alone.chunks()])
        alone = replace(alone, alive=alive)
    nan = sum(alone.spoiled(chunk, score(chunk)) for chunk in alone.chunks())
    if nan == 0:  # otherwise all ranks raise together, once the counts are summed
        kept = prune_exactly([alone], count - (alone.numel - alone.living()))[1][0]
        for chunk in alone.chunks():
            mask[tiling.members(tile, chunk)] = kept[chunk]
    return nan


def _choose_blocks(
    targets: Sequence[Target],
    sparsity: float,
    scope: str,
    pattern: Pattern,
    allocation: str | None,
    peers: Peers,
    packed: bool,
) -> Selection:
    """Let blocks compete as weights do, each with the sum of its living scores; then expand the masks to weights."""
    tilings = [target.tiling(pattern) for target in targets]
    targets = [replace(target, scored=target.scored.unpacked()) for target in targets]
    pooled = []
    for target, tiling in zip(targets, tilings, strict=True):
        whole = Tiling(target.whole, tiling.tile).grid
        pooled.append(replace(target, scored=_pooled(target.scored, tiling), shape=tiling.grid, whole=whole))
    chosen = choose(pooled, sparsity, scope=scope, allocation=allocation, peers=peers)
    masks = []
    for target, tiling, small in zip(targets, tilings, chosen.masks, strict=True):
        mask = torch.empty(target.scored.numel, dtype=torch.bool, device=small.device)
        for slab in tiling.slabs():
            mask[tiling.members(slab)] = small[slab].repeat_interleave(tiling.size)
        if target.scored.alive is not None:
            mask.logical_and_(target.scored.alive)
        masks.append(to_bits(mask) if packed else mask)
    return Selection(masks, chosen.cuts)


def _pooled(scored: ScoredTensor, tiling: Tiling) -> ScoredTensor:
    """A tensor whose weights are the tiles: alive if any member is, scored by the sum of the living."""

    def over_slabs(tiles: Where | None, pool: Callable[[Where], Tensor]) -> Tensor:
        parts = [pool(tiling.members(slab)) for slab in tiling.slabs(tiles)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device=scored.device)

    def total(where: Where) -> Tensor:
        scores = scored.score(where)
        if scored.alive is not None:
            scores = scores.masked_fill(~scored.alive[where], 0)
        return pairwise_sum(scores.view(-1, tiling.size))

    alive = scored.alive
    if alive is not None:
        living = alive
        alive = over_slabs(None, lambda where: living[where].view(-1, tiling.size).any(1)).to(torch.bool)
    return replace(
        scored,
        numel=tiling.count,
        total=scored.total // tiling.size,
        score=lambda tiles: over_slabs(tiles, total),
        alive=alive,
        source=None,
        dead=None,
    )
