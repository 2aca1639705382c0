"""A trained model on the table: what is observed of it, its masks, and what was done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur import kernels
from secateur.model.facts import least_spared, spared_share, target_of
from secateur.model.held import Held, Masks
from secateur.model.prunable import Site
from secateur.oneshot.batches import Batch
from secateur.oneshot.calibration import Facts, Observed
from secateur.registry import Score
from secateur.report import Outcome, TensorRow, Update
from secateur.selection.bits import as_bool, packed_bytes, to_bits
from secateur.selection.targets import Selection, Target
from secateur.selection.tiles import Pattern


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
    score: Score, scope: str | None, pattern: Pattern | None, allocation: str | None, sites: Sequence[Site]
) -> str:
    """The scope that is meant when none is given: that of the score's paper. Rows of WANDA are for linear layers; in
    convolutional networks, where they do worse than magnitude, all weights compete."""
    if scope is not None:
        return scope
    if pattern is not None or allocation is not None:
        return "model"
    kernels = [site for site in sites if site.parameter.ndim > 3]  # one of them may cut pictures for a transformer
    if score.scope == "row" and len(kernels) > 1:
        return "model"
    return score.scope or "model"
