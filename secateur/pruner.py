"""The Pruner: masks that follow a schedule while a model trains. The only long-lived state in the library."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur import kernels
from secateur.errors import PatternError, RegrowthError, StateError
from secateur.model.distributed import check_replicas, is_sharded, like, local, peers_of, unwrap
from secateur.model.facts import Facts, zero_gradients
from secateur.model.hooks import Handles, Listener, optimizers_in
from secateur.model.masks import ZEROS, Given, Held, apply_masks, given_masks, with_given
from secateur.model.prunable import (
    ABSENT,
    Globs,
    LeftOut,
    check_current,
    check_readable,
    check_tiles,
    find_prunable,
    nothing_to_prune,
    unfit_for,
    untrained,
)
from secateur.model.state import (
    SavedState,
    WholeState,
    check_count,
    masks_in,
    read_saved,
    restore_facts,
    rounding,
    state_of,
)
from secateur.optim import MaskedOptimizer
from secateur.regrowth import DROP, check_gradients, exchange, regrowth_for
from secateur.report import Report, TensorRow, Update
from secateur.schedules import Clock, Hold, Schedule, as_schedule, check_rising, check_sparsity, described
from secateur.scores import Score, resolve
from secateur.selection import Selection, Target, as_scope, check_choice, choose, quota_for
from secateur.selection.exact import ScoredTensor
from secateur.selection.masks import checksum, packed_bytes, to_bits
from secateur.selection.tiles import Pattern, parse_pattern

logger = logging.getLogger("secateur")


class Pruner:
    """Prunes `model` while `optimizer` trains it.

    Call `step()` after every `optimizer.step()`, or `attach()` once instead. Every `every` optimizer steps, and where
    the schedule ends, the masks are updated to exactly the sparsity the schedule asks for. After each step pruned
    weights and their optimizer state are zero. Steps that a GradScaler skips do not count. `optimizer` may be a wrapper
    such as Accelerate's, or a list of optimizers that share one budget; then a step counts once each has stepped.

    `score` is a name, a name with options ("variance(q=0.375)") or a function registered with `@secateur.score`.
    `sparsity` is a number or a schedule; None takes that of an n:m `pattern`. docs/selection.md explains `scope`
    ("model" or "global", "layer", "row"), `pattern` and `allocation`. `skip` and `only` are globs of parameter or
    module names.

    `regrow` lets pruned weights come back: "gradient" (RigL) those of largest gradient, "random" (SET) any. At every
    update up to step `until` (by default where the schedule ends) a share of the kept weights is exchanged for as many
    pruned ones. That share begins at `drop` and falls to zero along half a cosine. With "gradient", call `step()`
    before clearing gradients.

    `masks` says which weights are pruned from the start and stay so (docs/keep-zeros.md): "zeros" those that are
    exactly zero, or bool masks by parameter name (True is kept) in a mapping, in a folder that Secateur saved, or in
    the report of `sc.prune`. With `sparsity=None` these zeros are held and nothing else is pruned, with any optimizer;
    otherwise pruning goes on from there, and they count towards the sparsity.
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
        drop: float = DROP,
        until: int | None = None,
        masks: Given | None = None,
    ) -> None:
        self.score = resolve(score)
        self.every, self.scope, self._pattern = every, as_scope(scope), parse_pattern(pattern)
        self._holds = masks is not None and sparsity is None  # the zeros given, and no others
        if self._holds:
            self.score = resolve("magnitude")  # it reads no optimizer state, and no update will ask it
        elif allocation is None and self._pattern is None and self.scope == "model":
            allocation = self.score.allocation
        self.allocation = allocation
        self.schedule = schedule_for(sparsity, self.scope, self._pattern, allocation, self._holds)
        self.regrowth = regrowth_for(regrow, drop, until, self.schedule, self._pattern, masks is not None)
        self.updates: list[Update] = []
        self._model = model
        self._optimizers, self._wrappers = optimizers_in(optimizer)
        self._masked = [one if isinstance(one, MaskedOptimizer) else None for one in self._optimizers]
        self._clock = Clock(every, getattr(self.schedule, "end", None), len(self._optimizers))
        self._reads_moments = any(need.startswith("exp_avg") for need in self.score.needs)
        self._asked = 0.0  # the sparsity the masks were last brought to
        self._scheduled = 0.0  # what the schedule last returned
        self._carried = self._unsettled = False  # masks given or from other settings; and not updated since
        self._given: list[Tensor] | None = None  # masks given by name, as bits
        self._checked = self._told = False  # whether the first step was checked; a schedule below the masks, logged
        self._survey(skip, only)
        if masks is not None:
            self._take_given(masks)
        waiting = untrained(unwrap(model), self._left_out)
        self._listener = Listener(self._optimizers, self._clock, self._facts, self._held, waiting)
        for masked in filter(None, self._masked):
            self._prepare(masked)

    def _prepare(self, optimizer: MaskedOptimizer) -> None:
        """Announce regrowth to an optimizer that applies masks itself, and warn if it will delay the last update."""
        if self.regrowth is not None:
            optimizer.set_masks({}, others=True, regrows=True)
        end = self._clock.end
        delay = optimizer.delay(end) if end and self._reads_moments else 0
        if delay:
            logger.warning(
                "The schedule ends at step %d, where the optimizer has just reset the moments that score %r reads: the"
                " last update waits until step %d. Train beyond that step, or end the schedule before the reset.",
                end, self.score.name, (end or 0) + delay,
            )  # fmt: skip

    def _survey(self, skip: Globs, only: Globs | None) -> None:
        """Find the prunable weights, refuse what cannot work, and allocate masks and facts."""
        check_readable(unwrap(self._model))
        # Zeros are held in layers that are frozen now: the optimizer has them, so they may train later.
        groups = [group for one in self._optimizers for group in one.param_groups] if self._holds else []
        frozen = {id(parameter) for group in groups for parameter in group["params"]}
        found, left_out = find_prunable(unwrap(self._model), skip, only, unfit_for(self._pattern), frozen)
        self._facts = Facts(self._optimizers, self.score, found, self._wrappers)
        self._prunables = self._facts.prunables
        trained = {prunable.name for prunable in self._prunables}
        absent = [LeftOut(w.name, w.parameter.numel(), ABSENT) for w in found if w.name not in trained]
        self._left_out = [*absent, *left_out]
        if not self._prunables:
            raise nothing_to_prune(unwrap(self._model), self._left_out)
        if absent:
            names = ", ".join(repr(item.name) for item in absent[:3])
            logger.warning("%d prunable tensors are not in the optimizer and stay dense: %s.", len(absent), names)
        self._peers = peers_of(prunable.parameter for prunable in self._prunables)
        check_tiles(self._prunables, self.scope, self._pattern)
        weights = [local(prunable.parameter.detach()) for prunable in self._prunables]
        self._held = Held(weights, self._prunables, self._peers.totals)
        self._gone = [0] * len(self._prunables)
        self._churn = [0] * len(self._prunables)
        self._cuts: list[float | None] = [None] * len(self._prunables)

    @torch.no_grad()
    def _take_given(self, given: Given) -> None:
        """Start with these masks, so that what they remove is zero from now on."""
        masks = given_masks(given, self._prunables, self._left_out, self._held, self._over_all)
        kept = kernels.population(masks)
        gone = self._over_all([shape.numel() - count for shape, count in zip(self._held.shapes, kept, strict=True)])
        if sum(gone) == self._numel:
            raise StateError("The masks remove every prunable weight, so nothing would train. True must mean kept.")
        if given != ZEROS:
            self._given = [mask if self._held.packed else to_bits(mask) for mask in masks]
        self._hold(masks, kept)
        self._gone, self._carried = gone, True
        if self.scope == "model" and self._pattern is None:  # elsewhere each tensor, row or tile counts its own zeros
            self._asked = self.sparsity
        self._check_replicas()
        self.apply()
        logger.info("Holding %d of %d weights at zero (sparsity %.4f); schedule: %s.",
                    sum(gone), self._numel, self.sparsity, described(self.schedule))  # fmt: skip

    def attach(self) -> Any:
        """Call `step()` after every optimizer step by itself. Returns a handle with `remove()`."""
        # As the hooks of the Listener, these are kept out of a compiled step.
        hooks = [torch.compiler.disable(partial(self._after, number)) for number in range(len(self._optimizers))]
        return Handles([one.register_step_post_hook(after) for one, after in zip(self._optimizers, hooks, strict=True)])

    def _after(self, number: int, *_: Any) -> None:
        """`step()`, called by a step of this optimizer. While others have yet to step, it writes to weights of this one
        alone: if optimizers step during the backward pass, that may still read the others."""
        if self._clock.midway and self._clock.taken == self._clock.seen:
            if not self._is_held():
                self._zero([n for n, one in enumerate(self._prunables) if self._facts.owner(one) == number])
                self._listener.note_weights()
        else:
            self.step()

    def step(self) -> None:
        """Update the masks if an update is due, then zero pruned weights and their optimizer state.

        No update is due if no optimizer step was completed since the last call. With several optimizers a step is
        complete once each has stepped; until then the masks are applied and nothing is counted.
        """
        if not self._checked and self._clock.taken != self._clock.seen:
            self._check_start()
        behind = self._clock.behind()
        if not behind:
            if self._listener.check_idle() or (self._clock.midway and not self._is_held()):
                self.apply()
                self._listener.note_weights()
            return
        self._listener.check_order()
        if behind > 1 and any(self._gone) and not self._is_held():
            self._listener.warn_late(behind)
        cold = self._reads_moments and any(optimizer.cold for optimizer in filter(None, self._masked))
        changed = self._clock.due(held=cold) and self._update(self._clock.taken)
        if changed or not self._is_held() or self._listener.moved():
            self.apply()
        self._listener.note_weights()

    def _check_start(self) -> None:
        """Raise at the first step, not at the first update, if something cannot work here."""
        self._check_current()
        self._facts.check()
        check_gradients(self.regrowth, self._prunables, self._peers, zeros_count=True)
        if self._holds and not any(self._gone):
            raise StateError(
                "There is nothing to hold: no prunable weight was zero when this Pruner was made with masks=... and"
                " sparsity=None. Load the sparse weights first, pass their masks, or pass sparsity=... to prune."
            )
        self._checked = True

    def _check_current(self) -> None:
        """Raise if the model or an optimizer has other parameters than those found: masks would reach nothing."""
        check_current(unwrap(self._model), self._prunables)
        self._facts.check_owned()

    @torch.no_grad()
    def _update(self, step: int) -> bool:
        """Bring the masks to the sparsity the schedule asks for. Returns False if there was nothing to do."""
        scheduled = check_sparsity(self.schedule(step))
        check_rising(scheduled, self._scheduled, step)
        asked, self._scheduled = max(scheduled, self._asked), scheduled
        if scheduled < self.sparsity and self._carried and not (self._holds or self._told):
            logger.info("Step %d: the schedule asks for sparsity %.4f and the masks held have %.4f, which stays.",
                        step, scheduled, self.sparsity)  # fmt: skip
            self._told = True
        share = self.regrowth.share(step) if self.regrowth is not None and asked > 0 else 0.0
        if asked == self._asked and share == 0 and not self._unsettled:
            return False
        self._check_current()
        began, sent = time.perf_counter(), self._peers.bytes_sent
        if share > 0:
            self.apply()  # the optimizer has just moved pruned weights; those that come back start at zero
        chosen = self._choose(step, asked)
        grown = self._over_all(self._held.returning(chosen.masks)) if share > 0 else [0] * len(self._prunables)
        self._hold(chosen.masks, chosen.kept)
        before, self._gone = self._gone, self._over_all(self._held.dead)
        moved = zip(self._gone, before, grown, strict=True)
        self._churn = [now - then + 2 * back for now, then, back in moved]  # each that came back replaced one more
        self._cuts = [None if cut is None else cut.value for cut in chosen.cuts]
        self._asked, self._unsettled = asked, False
        self._warn_of_emptied(before, step)
        self._check_replicas()
        seconds, sent = time.perf_counter() - began, self._peers.bytes_sent - sent
        update = Update(step, asked, sum(self._gone), sum(self._churn), seconds, sent, sum(grown))
        self.updates.append(update)
        logger.info(
            "Step %d: sparsity %.4f, %d of %d weights pruned, %d mask entries changed, %.3f s.",
            step, self.sparsity, update.pruned, self._numel, update.churn, seconds,
        )  # fmt: skip
        return True

    def _warn_of_emptied(self, before: Sequence[int], step: int) -> None:
        """Log which tensors have just lost their last weight."""
        counts = zip(self._prunables, before, self._gone, strict=True)
        names = [repr(one.name) for one, then, now in counts if then < now == one.parameter.numel()]
        if names:
            logger.warning(
                "Step %d: nothing is left of %d tensors: %s. scope='layer' or allocation='erk' keeps some weights of"
                " each, and skip=... leaves them dense.", step, len(names), ", ".join(names[:3]),
            )  # fmt: skip

    def _choose(self, step: int, asked: float) -> Selection:
        """Masks at the asked sparsity, after an exchange of weights if regrowth is due."""
        targets, peers, packed = self._targets(), self._peers, self._held.packed
        if self.regrowth is not None and self.regrowth.share(step) > 0:
            quota = quota_for(targets, asked, self.scope, self.allocation, peers)
            return exchange(self.regrowth, step, self._prunables, targets, quota, peers, packed)
        return choose(
            targets, asked, scope=self.scope, pattern=self._pattern, allocation=self.allocation, peers=peers,
            packed=packed,
        )  # fmt: skip

    def _hold(self, masks: Sequence[Tensor], kept: Sequence[int] | None = None) -> None:
        """Store these masks, and pass them to optimizers that apply masks themselves."""
        self._held.take(masks, kept)
        for optimizer, held in self._by_optimizer():
            if optimizer is not None:
                optimizer.set_masks(held, others=True, regrows=self.regrowth is not None)

    def _check_replicas(self) -> None:
        check_replicas(self._model, lambda: checksum([self._held.bools(n) for n in range(len(self._prunables))]))

    def _is_held(self) -> bool:
        """Whether every optimizer applies these masks in its own step."""
        return all(optimizer is not None and optimizer.holds(held) for optimizer, held in self._by_optimizer())

    def _by_optimizer(self) -> list[tuple[MaskedOptimizer | None, dict[Tensor, Tensor]]]:
        """The masks of each optimizer's parameters, and the optimizer if it applies masks itself."""
        found: list[dict[Tensor, Tensor]] = [{} for _ in self._optimizers]
        for prunable, mask in zip(self._prunables, self._held.masks, strict=True):
            found[self._facts.owner(prunable)][prunable.parameter] = mask
        return [(optimizer, masks) for optimizer, masks in zip(self._masked, found, strict=True) if masks]

    def _over_all(self, here: Sequence[int]) -> list[int]:
        """A count for each tensor summed over all processes; a replicated tensor counts once."""
        counted = [self._peers.rank == 0 or is_sharded(prunable.parameter) for prunable in self._prunables]
        return self._peers.totals([count * mine for count, mine in zip(here, counted, strict=True)])

    def _targets(self) -> list[Target]:
        held = zip(self._prunables, self._held.masks, self._held.dead, strict=True)
        return [self._facts.target(prunable, mask, dead, self._peers) for prunable, mask, dead in held]

    def pieces(self) -> list[ScoredTensor]:
        """Every prunable tensor with its current scores, evaluated on demand: `piece.score(slice(0, 1000))`."""
        return [target.scored for target in self._targets()]

    def apply(self) -> None:
        """Zero pruned weights and all optimizer state in their shape; with regrowth, also the facts kept for the score,
        because a weight that comes back starts from nothing."""
        self._zero(range(len(self._prunables)))

    def _zero(self, numbers: Iterable[int]) -> None:
        """What `apply` does, for the tensors with these numbers alone."""
        tensors: list[Tensor] = []
        masks: list[Tensor] = []
        for number in numbers:
            prunable, mask = self._prunables[number], self._held.masks[number]
            if not self._held.dead[number]:
                continue
            plain, coded = self._facts.members(prunable)
            members = [local(prunable.parameter.detach()), *plain.values()]
            members += [] if self.regrowth is None else self._facts.kept_of(prunable)
            tensors += members
            masks += [mask] * len(members)
            kept = self._held.bools(number) if coded else mask
            for state in coded.values():
                state.zero(kept)
        kernels.zero(tensors, masks)

    def mask_gradients(self) -> None:
        """Zero the gradients of pruned weights. Optional: call it before clipping, and the norm is that of the kept
        weights alone; or before an optimizer whose steps depend on whole tensors, such as StableAdamW, LAMB and SOAP.
        Otherwise it changes nothing: `step()` zeroes pruned weights and their state anyway."""
        if self.regrowth is not None and self.regrowth.by_gradient:
            raise RegrowthError(
                "regrow='gradient' ranks pruned weights by the gradients that mask_gradients() removes. Leave out the"
                " call, or use regrow='random'."
            )
        held = zip(self._prunables, self._held.masks, self._held.dead, strict=True)
        found = [(one.parameter, mask) for one, mask, dead in held if dead]
        zero_gradients([parameter for parameter, _ in found], [mask for _, mask in found])

    def apply_to(self, module: nn.Module) -> None:
        """Zero the pruned weights in a copy of the model too: an EMA or SWA copy (also in `AveragedModel`), a deepcopy,
        compiled or in DistributedDataParallel. Call it on all ranks, before the copy is evaluated or saved."""
        apply_masks(module, self.masks, {prunable.name: prunable.tied for prunable in self._prunables})

    @property
    def model(self) -> nn.Module:
        """The model that is pruned, without wrappers such as DDP."""
        return unwrap(self._model)

    @property
    def masks(self) -> dict[str, Tensor]:
        """Bool masks by parameter name, True is kept; sharded as the parameters are. Where kernels run they are copies,
        made from packed bits."""
        return {one.name: like(self._held.bools(number), one.parameter) for number, one in enumerate(self._prunables)}

    @property
    def sparsity(self) -> float:
        """Fraction of the prunable weights that is pruned, over all processes."""
        return sum(self._gone) / self._numel

    @property
    def _numel(self) -> int:
        return sum(prunable.parameter.numel() for prunable in self._prunables)

    @property
    def _score_text(self) -> str:
        return "none" if self._holds else str(self.score)

    def __repr__(self) -> str:
        return (
            f"Pruner(score={self._score_text!r}, sparsity={self.sparsity:.4f} -> {described(self.schedule)},"
            f" step={self._clock.taken}, tensors={len(self._prunables)}, weights={self._numel:,})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "A Pruner has hooks on its optimizer, so it cannot be copied or pickled: the copy would count no steps."
            " Build a new one and load this one's state_dict() into it."
        )

    def report(self) -> Report:
        """Asked and achieved sparsity, tensor by tensor, and the cost in time and memory."""
        rows = [
            TensorRow(s.name, tuple(s.parameter.shape), s.parameter.numel(), gone, churn, cut, s.tied, s.reason)
            for s, gone, churn, cut in zip(self._prunables, self._gone, self._churn, self._cuts, strict=True)
        ]
        return Report(
            score=self._score_text,
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
        """A flat dict of tensors alone, for torch.save, safetensors or torch.distributed.checkpoint.

        Masks are packed to bits. For sharded parameters the entries are DTensors with the same placements.
        """
        progress = {"taken": self._clock.taken, "gone": sum(self._gone), "carried": self._carried}
        settings = {**self._settings(), **progress, "scheduled": self._scheduled}
        return state_of(settings, self._clock.saved(), self._asked, self._prunables, self._held, self._facts)

    def for_checkpointing(self) -> WholeState:
        """An object with `state_dict()` and `load_state_dict()` in whole tensors on the CPU, the same on every rank:
        for `accelerator.register_for_checkpointing`, Lightning, or a plain torch.save on one rank."""
        return WholeState(self)

    def _settings(self) -> dict[str, Any]:
        """The settings that saved states are compared by, the same text in every process."""
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
        """Resume a saved Pruner of this model, at any world size. If the state does not fit, nothing changes.

        A state with another score, scope, pattern, allocation, schedule or regrowth is refused. With `strict=False` its
        masks and steps are loaded, this Pruner's settings apply from the next update on, and facts kept for another
        score are ignored. `every` may always differ. States saved without settings are not compared.

        Masks given to this Pruner by name stay: a state that keeps a weight which they remove is refused, and with
        `strict=False` both are held. Zeros found by masks="zeros" are replaced by the saved masks.
        """
        self._check_current()
        saved = read_saved(state, self.state_dict(), self._settings(), self._peers, strict)
        masks = masks_in(state, self._prunables, self._held)
        self._check_count(masks, saved)
        if self._given is not None:
            masks = with_given(masks, self._given, self._over_all, strict)
        if saved.changed:
            logger.warning("Loaded masks of a Pruner with another %s; they change from the next update on.",
                           ", ".join(saved.changed))  # fmt: skip
        restore_facts(state, self._prunables, self._facts)
        self._hold(masks)
        self._clock.restore(saved.steps)
        self._asked = saved.asked
        self._scheduled = saved.scheduled
        self._carried = saved.carried or self._given is not None
        self._unsettled = saved.spread_changed and not self._holds
        self._gone = self._over_all(self._held.dead)
        self._churn, self._cuts, self.updates = [0] * len(self._prunables), [None] * len(self._prunables), []
        self._facts.stepped = self._clock.taken > 0
        self.apply()

    def _check_count(self, masks: Sequence[Tensor], saved: SavedState) -> None:
        """Refuse saved masks whose number of pruned weights contradicts the rest of the state. A state without settings
        may be of any scope; masks carried over from other settings follow no count."""
        kept = kernels.population(masks)
        gone = self._over_all([shape.numel() - count for shape, count in zip(self._held.shapes, kept, strict=True)])
        known = None if saved.settings is None else self.scope
        off = self._numel if saved.carried else rounding(self._prunables, known, self._pattern)
        check_count(sum(gone), self._numel, saved.asked, off, saved.noted)


def schedule_for(
    sparsity: float | Schedule | None, scope: str, pattern: Pattern | None, allocation: str | None, holds: bool
) -> Schedule:
    """The schedule these settings mean, or an error where they contradict each other."""
    if holds:
        settings = {"scope": None if scope == "model" else scope, "pattern": pattern, "allocation": allocation}
        unused = [name for name, value in settings.items() if value is not None]
        if unused:
            raise PatternError(
                f"masks=... with sparsity=None holds zeros and prunes nothing else, but {' and '.join(unused)} says how"
                " to prune on. Leave it out, or pass sparsity=..., a number or schedule."
            )
        return Hold()
    final = getattr(sparsity, "target", None if pattern else 0.0) if callable(sparsity) else sparsity
    final = check_choice(final, scope, pattern, allocation)
    return as_schedule(final if sparsity is None else sparsity)
