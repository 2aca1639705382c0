"""The Pruner: masks that follow a schedule while a model trains. The only long-lived state in the library."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur import kernels
from secateur.errors import StateError
from secateur.model.distributed import check_replicas, check_tile, is_sharded, like, local, peers_of, unwrap
from secateur.model.facts import Facts
from secateur.model.held import (
    DEALT,
    Held,
    check_count,
    check_mapping,
    check_progress,
    check_rows,
    check_saved,
    check_settings,
    differing,
    masks_in,
    noted_in,
    restore_facts,
    rounding,
    settings_in,
    state_of,
)
from secateur.model.hooks import Listener, optimizers_in
from secateur.model.prunable import Globs, LeftOut, check_readable, find_prunable, nothing_to_prune, unfit_for
from secateur.optim import AdamW
from secateur.regrowth import check_gradients, exchange, regrowth_for
from secateur.report import Report, TensorRow, Update
from secateur.schedules import Clock, Schedule, as_schedule, check_rising, check_sparsity, described
from secateur.scores import Score, resolve
from secateur.selection import Selection, Target, check_choice, choose, quota_for
from secateur.selection.exact import ScoredTensor
from secateur.selection.masks import checksum, packed_bytes
from secateur.selection.tiles import parse_pattern, tile_of

logger = logging.getLogger("secateur")


class Pruner:
    """Prunes `model` while `optimizer` trains it.

    Call `step()` after every `optimizer.step()` (or `attach()` once instead). Every `every` optimizer steps, and where
    the schedule ends, masks are brought to the sparsity the schedule asks for, to the weight; after each step pruned
    weights and their optimizer state are zero. A step that a GradScaler skipped does not count. `optimizer` may be a
    wrapper such as Accelerate's, or a list of optimizers, which share one budget; then a step counts when each has
    stepped.

    `score` is a name, a name with options ("variance(q=0.375)") or a function registered with `@secateur.score`.
    `sparsity` is a number or a schedule; None lets an n:m `pattern` decide. `scope`, `pattern` and `allocation` are
    those of docs/selection.md. `skip` and `only` are globs of parameter or module names.

    `regrow` lets weights come back: "gradient" (RigL) those of largest gradient, "random" (SET) any. At every update up
    to step `until` (by default where the schedule ends) a share of the living gives way to as many of the gone. It
    begins as `drop` and falls to zero along half a cosine. With "gradient", call `step()` before clearing gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        score: str | Callable[..., Tensor] | Score = "variance",
        sparsity: float | Schedule | None = 0.5,
        every: int = 100,
        scope: str = "model",
        pattern: str | None = None,
        allocation: str | None = None,
        skip: Globs = (),
        only: Globs | None = None,
        regrow: str | None = None,
        drop: float = 0.3,
        until: int | None = None,
    ) -> None:
        self.score = resolve(score)
        self.every, self.scope, self._pattern = every, scope, parse_pattern(pattern)
        if allocation is None and self._pattern is None and scope == "model":
            allocation = self.score.allocation
        self.allocation = allocation
        final = getattr(sparsity, "target", None if self._pattern else 0.0) if callable(sparsity) else sparsity
        final = check_choice(final, scope, self._pattern, allocation)
        self.schedule = as_schedule(final if sparsity is None else sparsity)
        self.regrowth = regrowth_for(regrow, drop, until, self.schedule, self._pattern)
        self.updates: list[Update] = []
        self._model, self._optimizers = model, optimizers_in(optimizer)
        self._clock = Clock(every, getattr(self.schedule, "end", None), len(self._optimizers))
        self._reads_moments = any(need.startswith("exp_avg") for need in self.score.needs)
        self._asked = 0.0
        self._scheduled = 0.0  # what the schedule said last
        self._carried = self._unsettled = False  # masks of a Pruner with other settings; and not yet brought to these
        self._checked = False
        self._survey(skip, only)
        self._listener = Listener(self._optimizers, self._clock, self._facts, self._held)
        for ours in self._optimizers:
            if isinstance(ours, AdamW):
                self._prepare(ours)

    def _prepare(self, optimizer: AdamW) -> None:
        """Tell an optimizer of ours that weights may come back, and the user that the last update may be late."""
        if self.regrowth is not None:
            optimizer.set_masks({}, others=True, regrows=True)
        end = self._clock.end
        delay = optimizer.delay(end) if end and self._reads_moments else 0
        if delay:
            logger.warning(
                "The schedule ends at step %d, where SPAM has just reset the moments that score %r reads: the last"
                " update waits until step %d. Train beyond that step, or end the schedule before the reset.",
                end, self.score.name, (end or 0) + delay,
            )  # fmt: skip

    def _survey(self, skip: Globs, only: Globs | None) -> None:
        """Find the sites, refuse what cannot work, and make the masks and whatever else must be kept."""
        check_readable(unwrap(self._model))
        found, left_out = find_prunable(unwrap(self._model), skip, only, unfit_for(self._pattern))
        self._facts = Facts(self._optimizers, self.score, found)
        self._sites = self._facts.sites
        known = {site.name for site in self._sites}
        strangers = [site for site in found if site.name not in known]
        self._left_out = [*(LeftOut(s.name, s.parameter.numel(), "not in the optimizer") for s in strangers), *left_out]
        if not self._sites:
            raise nothing_to_prune(unwrap(self._model), self._left_out)
        self._peers = peers_of(site.parameter for site in self._sites)
        tiled = self.scope == "row" or self._pattern is not None
        for site in self._sites if tiled else ():
            height = tile_of(site.name, site.parameter.shape, site.layout, self._pattern)[0]
            meant = f"Pattern {self._pattern.text!r}" if self._pattern else "Scope 'row'"
            check_tile(site.name, site.parameter, height, meant)
        self._held = Held([local(site.parameter.detach()) for site in self._sites])
        self._gone = [0] * len(self._sites)
        self._churn = [0] * len(self._sites)
        self._cuts: list[float | None] = [None] * len(self._sites)

    def attach(self) -> Any:
        """Run `step()` by itself after every optimizer step. Returns a handle whose `remove()` ends that."""
        return Handles([one.register_step_post_hook(lambda *_: self.step()) for one in self._optimizers])

    def step(self) -> None:
        """Catch up with the optimizer: update the masks if an update is due, zero what they say is gone.

        Does nothing when no optimizer step has been completed since the last call. Of several optimizers a step is
        completed when each has stepped; until then the masks are applied and nothing is counted.
        """
        if not self._checked and self._clock.taken != self._clock.seen:
            self._facts.check()  # a score that cannot work here says so at the first step, not at the first update
            check_gradients(self.regrowth, self._sites, self._peers, zeros_count=True)
            self._checked = True
        behind = self._clock.behind()
        if not behind:
            self._listener.check_idle()
            if self._clock.midway and not self._is_held():
                self.apply()
            return
        self._listener.check_order()
        if behind > 1 and any(self._gone) and not self._is_held():
            self._listener.warn_late(behind)
        cold = self._reads_moments and any(getattr(optimizer, "cold", False) for optimizer in self._optimizers)
        changed = self._clock.due(held=cold) and self._update(self._clock.taken)
        if changed or not self._is_held():
            self.apply()  # unless an optimizer of ours has done so in its own step

    @torch.no_grad()
    def _update(self, step: int) -> bool:
        """Bring the masks to what the schedule asks, and say if they changed. Unless weights come back, no more asked
        is nothing to do."""
        scheduled = check_sparsity(self.schedule(step))
        check_rising(scheduled, self._scheduled, step)
        asked, self._scheduled = max(scheduled, self._asked), scheduled
        share = self.regrowth.share(step) if self.regrowth is not None and asked > 0 else 0.0
        if asked == self._asked and share == 0 and not self._unsettled:
            return False
        began, sent = time.perf_counter(), self._peers.bytes_sent
        if share > 0:
            self.apply()  # the optimizer has just moved what is gone; a weight comes back at zero, its moments too
        chosen = self._choose(step, asked)
        grown = self._over_all(self._held.returning(chosen.masks)) if share > 0 else [0] * len(self._sites)
        self._hold(chosen.masks, chosen.kept)
        before, self._gone = self._gone, self._over_all(self._held.dead)
        moved = zip(self._gone, before, grown, strict=True)
        self._churn = [now - then + 2 * back for now, then, back in moved]  # one more has gone for each that came back
        self._cuts = [None if cut is None else cut.value for cut in chosen.cuts]
        self._asked, self._unsettled = asked, False
        check_replicas(self._model, lambda: checksum([self._held.bools(number) for number in range(len(self._sites))]))
        seconds, sent = time.perf_counter() - began, self._peers.bytes_sent - sent
        self.updates.append(Update(step, asked, sum(self._gone), sum(self._churn), seconds, sent, sum(grown)))
        return True

    def _choose(self, step: int, asked: float) -> Selection:
        """Masks at the asked sparsity; while weights may come back, some have."""
        targets, peers, packed = self._targets(), self._peers, self._held.packed
        if self.regrowth is not None and self.regrowth.share(step) > 0:
            quota = quota_for(targets, asked, self.scope, self.allocation, peers)
            return exchange(self.regrowth, step, self._sites, targets, quota, peers, packed)
        return choose(
            targets, asked, scope=self.scope, pattern=self._pattern, allocation=self.allocation, peers=peers,
            packed=packed,
        )  # fmt: skip

    def _hold(self, masks: Sequence[Tensor], kept: Sequence[int] | None = None) -> None:
        """Take these masks, and give them to an optimizer that knows what to do with them."""
        self._held.take(masks, kept)
        for optimizer, held in self._by_optimizer():
            if isinstance(optimizer, AdamW):
                optimizer.set_masks(held, others=True, regrows=self.regrowth is not None)

    def _is_held(self) -> bool:
        """Whether every optimizer holds its weights to these masks in its own step."""
        return all(isinstance(optimizer, AdamW) and optimizer.holds(held) for optimizer, held in self._by_optimizer())

    def _by_optimizer(self) -> list[tuple[torch.optim.Optimizer, dict[Tensor, Tensor]]]:
        """Each optimizer that trains a site, with the masks of its parameters."""
        found: list[dict[Tensor, Tensor]] = [{} for _ in self._optimizers]
        for site, mask in zip(self._sites, self._held.masks, strict=True):
            found[self._facts.owner(site)][site.parameter] = mask
        return [(optimizer, masks) for optimizer, masks in zip(self._optimizers, found, strict=True) if masks]

    def _over_all(self, here: Sequence[int]) -> list[int]:
        """A count for each site, over all processes; a tensor every process holds counts once."""
        counted = [self._peers.rank == 0 or is_sharded(site.parameter) for site in self._sites]
        return self._peers.totals([count * mine for count, mine in zip(here, counted, strict=True)])

    def _targets(self) -> list[Target]:
        held = zip(self._sites, self._held.masks, self._held.dead, strict=True)
        return [self._facts.target(site, mask, dead, self._peers) for site, mask, dead in held]

    def pieces(self) -> list[ScoredTensor]:
        """Every prunable tensor with its scores as of now, to be evaluated in parts: `piece.score(slice(0, 1000))`."""
        return [target.piece for target in self._targets()]

    def apply(self) -> None:
        """Zero what the masks say is gone: weights, everything the optimizer keeps in their shape, and, since a weight
        that comes back starts anew, what is kept of it for the score."""
        tensors: list[Tensor] = []
        masks: list[Tensor] = []
        for number, (site, mask) in enumerate(zip(self._sites, self._held.masks, strict=True)):
            if not self._held.dead[number]:
                continue
            plain, coded = self._facts.members(site)
            members = [local(site.parameter.detach()), *plain.values()]
            members += [] if self.regrowth is None else self._facts.kept_of(site)
            tensors += members
            masks += [mask] * len(members)
            kept = self._held.bools(number) if coded else mask
            for state in coded.values():
                state.zero(kept)
        kernels.zero(tensors, masks)

    @property
    def masks(self) -> dict[str, Tensor]:
        """Bool masks by parameter name, True = kept; sharded as the parameters are. Where kernels serve, masks are held
        as bits, and these are made from them."""
        return {site.name: like(self._held.bools(n), site.parameter) for n, site in enumerate(self._sites)}

    @property
    def sparsity(self) -> float:
        """Fraction of the prunable weights that is gone, over all processes."""
        return sum(self._gone) / sum(site.parameter.numel() for site in self._sites)

    def __deepcopy__(self, memo: Any) -> Pruner:
        raise StateError(
            "A Pruner listens to its optimizer, so it cannot be copied. Build one and load_state_dict() it."
        )

    def report(self) -> Report:
        """What was asked and what was achieved, tensor by tensor, and what it cost."""
        rows = [
            TensorRow(s.name, tuple(s.parameter.shape), s.parameter.numel(), gone, churn, cut, s.tied, s.reason)
            for s, gone, churn, cut in zip(self._sites, self._gone, self._churn, self._cuts, strict=True)
        ]
        return Report(
            score=str(self.score),
            schedule=str(self.schedule),
            scope=self.scope,
            pattern=self._pattern.text if self._pattern else None,
            allocation=self.allocation,
            step=self._clock.seen,
            asked=self._asked,
            tensors=tuple(rows),
            left_out=tuple((item.name, item.numel, item.reason) for item in self._left_out),
            updates=tuple(self.updates),
            mask_bytes=self._held.nbytes,
            packed_mask_bytes=sum(packed_bytes(shape) for shape in self._held.shapes),
            fact_bytes=sum(tensor.nbytes for tensors in self._facts.kept.values() for tensor in tensors.values()),
            regrow=None if self.regrowth is None else str(self.regrowth),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """A flat dict of tensors and nothing else, for torch.save, safetensors or torch.distributed.checkpoint.

        Masks are packed to bits. For sharded parameters the entries are DTensors, sharded alike.
        """
        told = {"taken": self._clock.taken, "gone": sum(self._gone), "carried": self._carried}
        settings = {**self._settings(), **told}
        return state_of(settings, self._clock, self._asked, self._sites, self._held, self._facts)

    def _settings(self) -> dict[str, Any]:
        """What this Pruner was asked for, in words that are the same in every process."""
        options = {**self.score.defaults, **self.score.options}
        return {
            "score": f"{self.score.function.__name__}({', '.join(f'{k}={v!r}' for k, v in sorted(options.items()))})",
            "scope": self.scope,
            "pattern": self._pattern.text if self._pattern else None,
            "allocation": self.allocation,
            "schedule": described(self.schedule),
            "regrow": None if self.regrowth is None else str(self.regrowth),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Take up where a saved Pruner of this model stopped, at any world size. Nothing changes if it does not fit.

        A state of another score, scope, pattern, allocation, schedule or regrowth is refused. With `strict=False` masks
        and steps are taken and this Pruner's settings apply from the next update on; what was kept for another score is
        left out. `every` may differ in any case, and states that do not tell their settings are taken as they are.
        """
        check_mapping(state)
        saved, mine = settings_in(state), self._settings()
        if strict:
            check_settings(saved, mine)
        check_saved(self.state_dict(), state, strict)
        check_rows(state, self._peers)
        steps, asked = check_progress(state)
        masks, changed = masks_in(state, self._sites, self._held), differing(saved, mine)
        carried = bool(saved and saved.get("carried")) or any(name in DEALT for name in changed)
        self._check_count(masks, asked, noted_in(saved, steps), saved is not None, carried)
        restore_facts(state, self._sites, self._facts)
        self._hold(masks)
        self._clock.restore(steps)
        self._asked = asked
        self._scheduled = 0.0 if saved is None or changed else asked
        self._carried, self._unsettled = carried, any(name in DEALT for name in changed)
        self._gone = self._over_all(self._held.dead)
        self._churn, self._cuts, self.updates = [0] * len(self._sites), [None] * len(self._sites), []
        self._facts.stepped = self._clock.taken > 0
        self.apply()

    def _check_count(self, masks: Sequence[Tensor], asked: float, noted: Any, tells: bool, carried: bool) -> None:
        """Refuse saved masks whose number of pruned weights contradicts the rest of the state. One that does not tell
        its settings may have been of any scope; masks carried over from other settings follow no count."""
        kept = kernels.population(masks)
        gone = self._over_all([shape.numel() - count for shape, count in zip(self._held.shapes, kept, strict=True)])
        total = sum(site.parameter.numel() for site in self._sites)
        off = total if carried else rounding(self._sites, self.scope if tells else None, self._pattern)
        check_count(sum(gone), total, asked, off, noted)


class Handles:
    """What `attach()` returns: hooks on one optimizer or several, removed together."""

    def __init__(self, hooks: Sequence[Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Call `step()` no more."""
        for hook in self._hooks:
            hook.remove()
