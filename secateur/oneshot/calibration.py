"""A model under calibration: its prunable weights, the batches of one call, the facts they give, and its masks."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from secateur import kernels
from secateur.errors import FactError, ScheduleError
from secateur.model.distributed import Gathered, fingerprint, ranks_of, reshard, unwrap
from secateur.model.facts import check_needs, least_spared, target_of
from secateur.model.masks import Held, Masks
from secateur.model.prunable import (
    Globs,
    Prunable,
    Unfit,
    check_readable,
    find_also_frozen,
    fits_all,
    nothing_to_prune,
)
from secateur.oneshot.activations import InputCounts, InputStatistics, check_seen, gather_inputs
from secateur.oneshot.batches import (
    SOFTER,
    Batch,
    Loss,
    check_ids,
    computes_bf16,
    device_of,
    eval_mode,
    first_tensor_in,
    has_classes,
    in_bf16,
    run_model,
    standard_loss,
    take_batches,
    tensors_in,
    to_device,
    usable_device,
)
from secateur.oneshot.blocks import HiddenStates, find_blocks
from secateur.oneshot.gradients import (
    GRADIENT_FACTS,
    GradientPass,
    gather_gradients,
    has_gradients,
    share_of_largest,
)
from secateur.oneshot.offload import (
    BlockOffload,
    MemoryNeed,
    MemoryPlan,
    activation_checkpointing,
    as_bytes,
    offload_for,
    plan_memory,
    smallest_plan,
)
from secateur.progress import Stages
from secateur.report import Outcome, TensorRow, Update
from secateur.scores import Score
from secateur.selection import Selection, Target, as_scope
from secateur.selection.masks import as_bool, packed_bytes, to_bits
from secateur.selection.tiles import Pattern

FactTable = dict[str, dict[str, Any]]  # facts by the name of the weight
DOMINANT = 0.75  # share of one batch in the squared losses of at least FEW_BATCHES that is said
FEW_BATCHES = 4
FITTED = 0.02  # mean cross entropy under which a model fits its batches: 98 % for the right class
AVAILABLE_FACTS = {"weight", "index", "step", "beta1", "beta2", "input_norm", *GRADIENT_FACTS}


def check_calibrated(score: Score) -> None:
    """Raise if the score reads facts that batches cannot give."""
    check_needs(score, AVAILABLE_FACTS, "after training")


@dataclass(frozen=True)
class CalibrationSettings:
    """Which weights are calibrated and how; the arguments that `prune`, `probe` and `probe_until` share.

    `unfit` says why a weight cannot be pruned, if it cannot. `autocast` measures fp32 models in bf16 where the device
    supports it and the loss is the default one.
    """

    loss: Loss | None = None
    skip: Globs = ()
    only: Globs | None = None
    limit: int | None = None
    memory: str | int | None = None
    device: torch.device | str | None = None
    progress: bool = False
    distributed: bool | None = None
    unfit: Unfit = fits_all
    autocast: bool = False


class CalibratedModel:
    """A model with its calibration batches: gathers facts, holds masks, and writes the report.

    The model computes on its own device, or block by block on another one. Ranks share the batches: each runs its own,
    they exchange statistics, and all get the numbers that one process would. Use it in a `with`: on an error it tells
    the other ranks, at the end it checks that all have the same weights, and it restores the sharding of FSDP2.
    """

    def __init__(
        self, model: nn.Module, batches: Iterable[Batch] | Tensor, settings: CalibrationSettings | None = None
    ) -> None:
        settings = settings or CalibrationSettings()
        self.model = unwrap(model)
        check_readable(self.model)
        reshard(self.model)
        self.ranks = ranks_of(model, settings.distributed)
        self._shards = Gathered(model)
        self._own_buffers: list[tuple[Tensor, Tensor]] = []  # buffers and their values, while the first rank's are used
        try:
            self.memory = None if settings.memory is None else as_bytes(settings.memory)
            self.prunables, self.left_out = find_also_frozen(self.model, settings.skip, settings.only, settings.unfit)
            if not self.prunables:
                raise nothing_to_prune(self.model, self.left_out)
            self.notes: dict[str, str] = {}  # by topic, for the report
            self._take_batches(batches, settings.limit)
            self._choose_device(settings)
            self._choose_loss(settings)
            self._start_masks()
        except BaseException as error:
            self._abort(error)
            raise

    def _take_batches(self, batches: Iterable[Batch] | Tensor, limit: int | None) -> None:
        self.batches = take_batches(batches, limit)
        check_ids(self.model, self.batches)
        self.own_batches = [self.batches[number] for number in self.ranks.mine(len(self.batches))]
        self.turns = self.ranks.turns(len(self.batches))
        if self.ranks.size > 1:
            self._check_ranks_agree()

    def _check_ranks_agree(self) -> None:
        """Check that all ranks have the same batches and weights. Buffers such as running averages may differ after
        training; all ranks then use the first one's, as DistributedDataParallel does."""
        batches = fingerprint(tensor for batch in self.batches for tensor in tensors_in(batch))
        self.ranks.same(
            "The batches",
            [len(self.batches), batches],
            "Give every rank the same batches in the same order: each then works on its own share of them. (A loader"
            " with a DistributedSampler, or one that shuffles by another seed, gives each rank others.)",
        )
        names = [zlib.crc32(prunable.name.encode()) for prunable in self.prunables]
        weights = fingerprint(self.model.parameters())
        self.ranks.same("The weights", [*names, weights], "Load the same model on every rank.")
        buffers = list(self.model.buffers())
        fingerprints = self.ranks.tell("buffers", [fingerprint(buffers)])
        if fingerprints.count(fingerprints[0]) == len(fingerprints):
            return
        self._own_buffers = [(buffer, buffer.clone()) for buffer in buffers]
        firsts = list(enumerate(buffers)) if self.ranks.rank == 0 else []

        def receive(number: int, value: Tensor) -> None:
            buffers[number].copy_(value)

        self.ranks.share("buffers", firsts, receive, device_of(self.model))

    def _choose_device(self, settings: CalibrationSettings) -> None:
        home = device_of(self.model)
        self.device = home if settings.device is None else usable_device(settings.device)
        named = self.device.index is not None  # "cuda" alone means the GPU that the model is on
        self.streams = self.device.type != home.type or (named and self.device.index != home.index)
        if self.streams and self.memory is not None:
            raise FactError("memory limits a model that is on the device; a streamed one needs little. Leave one out.")
        if self.memory is not None and self.device.type != "cuda":
            raise FactError(f"memory limits CUDA devices and has no effect on {self.device}. Leave it out.")
        self.stages = Stages(self.device, settings.progress and self.ranks.rank == 0)

    def _choose_loss(self, settings: CalibrationSettings) -> None:
        if settings.loss is not None and not callable(settings.loss):
            raise FactError(f"loss must be a function of model and batch; got {settings.loss!r}.")
        self.loss = settings.loss or standard_loss
        self.forward = settings.loss or run_model  # without gradients, labels are not needed either
        fp32 = {prunable.parameter.dtype for prunable in self.prunables} == {torch.float32}
        wanted = settings.autocast and settings.loss is None and fp32
        self.autocast = wanted and computes_bf16(self.device)
        if self.autocast:
            self.loss, self.forward = in_bf16(standard_loss), in_bf16(run_model)
        self._losses: list[float] = []  # of this rank's batches, in the last gradient pass
        self._may_soften = settings.loss is None

    def _start_masks(self) -> None:
        """Start with masks that keep every weight but those that are zero, which never compete and never return."""
        self.updates: list[Update] = []
        self.copies = 1  # of the statistics of one gradient pass that exist at the same time
        self._plans: dict[tuple[int, int, int], MemoryPlan] = {}
        self._bytes_sent = 0  # up to the last update
        self._cuts: list[float | None] = [None] * len(self.prunables)
        self._churn = [0] * len(self.prunables)
        self._removed: list[tuple[Tensor, Tensor, Tensor]] | None = None  # weights, which were pruned, their values
        self._reached: dict[str, Tensor] = {}
        self._idle: dict[str, int] = {}  # weights with inputs but without gradients, by name
        self.held = Held([prunable.parameter.detach() for prunable in self.prunables], self.prunables)
        counts = [int(prunable.parameter.detach().count_nonzero()) for prunable in self.prunables]
        self._pruned_before = [one.parameter.numel() - n for one, n in zip(self.prunables, counts, strict=True)]
        if not sum(self._pruned_before):
            return
        masks = []
        for prunable in self.prunables:  # one by one: bool masks of all weights would take too much memory
            alive = (prunable.parameter.detach() != 0).reshape(-1)
            masks.append(to_bits(alive) if self.held.packed else alive)
        self.held.take(masks, counts)
        zeros = f"{sum(self._pruned_before):,} weights ({self.sparsity:.1%})"
        self.notes["sparse"] = f"{zeros} were zero already and count as pruned."

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._abort(error)
            return
        try:
            if self.ranks.size > 1:
                weights = fingerprint(prunable.parameter for prunable in self.prunables)
                self.ranks.same("The pruned weights", [weights], "All ranks need the same hardware and settings.")
            self._close(keep=True)
        except BaseException as late:
            self._abort(late)
            raise

    def _abort(self, error: BaseException) -> None:
        """Tell the other ranks, and leave sharded weights as they were."""
        with suppress(Exception):  # if the others cannot be reached, the error itself matters more
            self.ranks.fail(error)
        self._close(keep=False)

    def _close(self, keep: bool) -> None:
        self._shards.leave(keep)
        for buffer, own in self._own_buffers:
            buffer.copy_(own)
        self._own_buffers = []

    # Facts

    def facts(self, score: Score, more: Iterable[str] = (), soften: bool = False) -> FactTable:
        """The facts that the score reads, gathered from the batches with the current weights; `soften` allows another
        loss for a model that fits its batches."""
        wanted = {*score.needs, *more}
        check_calibrated(score)
        step = torch.tensor(float(len(self.batches)), dtype=torch.float64)
        fixed = {"step": step, "beta1": 0.0, "beta2": 0.0, "index": None}  # without a horizon to correct for
        found: FactTable = {
            prunable.name: {"weight": prunable.parameter.detach(), **{k: v for k, v in fixed.items() if k in wanted}}
            for prunable in self.prunables
        }
        inputs = InputStatistics(self.prunables) if "input_norm" in wanted else None
        if gradients := wanted & GRADIENT_FACTS.keys():
            measured = self.gradients(gradients, inputs=inputs)
            if soften and self._soften():
                measured = self.gradients(gradients)
            for name, facts in measured.items():
                found[name] |= facts
        elif inputs is not None:
            self._gather_inputs(inputs)
        if inputs is not None:
            check_seen(inputs, self.prunables)
            for prunable in self.prunables:
                found[prunable.name] |= {"input_norm": inputs.norms(prunable), "reached": inputs.reached(prunable)}
        return found

    def gradients(
        self,
        wanted: Collection[str],
        prunables: Sequence[Prunable] | None = None,
        inputs: InputStatistics | None = None,
    ) -> Mapping[str, dict[str, Tensor]]:
        """Gradient statistics of all weights or of some; can record inputs in the same pass."""
        prunables = self.prunables if prunables is None else prunables
        every, plan = len(prunables) == len(self.prunables), self.memory_plan(prunables, len(wanted))
        checkpointing = activation_checkpointing(self.blocks) if plan.checkpointing else nullcontext()
        # Inputs are matched to weights by address, so weights must not move while inputs are recorded.
        bf16 = self.autocast and inputs is None and self.offload is None
        cached = nullcontext() if every else self.hidden_states.from_cache(prunables)
        with self.stages.stage("gradients", self.turns) as tick, self.on_device(), checkpointing, cached:
            how = GradientPass(
                loss=self.loss, plan=plan, offload=self.offload, bf16=bf16, inputs=inputs, check_loss=every, tick=tick,
                ranks=self.ranks,
            )  # fmt: skip
            found = gather_gradients(self.model, self.batches, prunables, wanted, how)
        self._losses = [float(loss) for loss in how.losses]
        self._note_few()
        return found

    def _soften(self) -> bool:
        """Soften the loss from now on if the model fits its batches: its gradients come from the few examples that it
        misses, and scores that read them would rank weights by those. Returns whether the loss has changed."""
        if not self._may_soften:
            return False
        self._may_soften = False  # decided once, by the model as it was given
        if not all(map(has_classes, self.batches)):
            return False
        found = [loss for rank in self.ranks.floats("losses", self._losses) for loss in rank]
        mean = sum(found) / len(found)
        if not mean < FITTED or not self.ranks.every("cross entropy", self._is_cross_entropy()):
            return False
        self.loss = self._by_logits(SOFTER)
        self.notes.pop("few", None)
        self.notes["softer"] = (
            f"The model fits its batches (mean loss {mean:.1g}), so gradients of this loss would come from the few"
            f" examples it misses. The loss that ranks weights has logits divided by {SOFTER:g}; loss=... sets another."
        )
        return True

    def _by_logits(self, temperature: float) -> Loss:
        loss = partial(standard_loss, temperature=temperature)
        return in_bf16(loss) if self.autocast else loss

    def _is_cross_entropy(self) -> bool:
        """Whether the loss of this rank's first batch is that of its logits. A Hugging Face model may have another."""
        first = self.own_batches[:1]
        try:
            pair = [losses(self.model, first, loss, self.offload) for loss in (self.loss, self._by_logits(1.0))]
        except FactError:  # it returns no logits, or not those of classes
            return False
        return all(math.isclose(one, other, rel_tol=0.01) for one, other in zip(*pair, strict=True))

    def _note_few(self) -> None:
        """Say that gradients come from few examples, because the model fits all others."""
        losses = self._losses
        share = share_of_largest(losses) if len(losses) >= FEW_BATCHES else 0.0
        if share > DOMINANT:
            self.notes["few"] = (
                f"One of {len(losses)} batches has {share:.0%} of the squared losses, so gradients and scores that read"
                " them come from few examples: the model fits all others. Use harder batches or a softer loss, such as"
                " loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]) / 10, batch[1])."
            )

    def _gather_inputs(self, statistics: InputStatistics) -> None:
        with self.on_device(), self.stages.stage("inputs", self.turns) as tick:
            gather_inputs(self.model, self.batches, statistics, self.forward, self.device, tick, self.ranks)

    def reached(self, prunable: Prunable, facts: Mapping[str, Any]) -> Tensor:
        """For each matrix of a weight (every expert is one), whether inputs reached it in any batch.

        A nonzero gradient shows it. If all are zero, as in dead units or after pruning cut a layer off, the inputs are
        counted, once. A matrix that was reached stays so in later rounds. Scores without facts from batches skip this.
        """
        statistic = next((facts[name] for name in GRADIENT_FACTS if name in facts), None)
        if "reached" not in facts and statistic is None:
            return torch.ones(1, dtype=torch.bool, device="cpu")
        found = facts["reached"] if statistic is None else has_gradients(prunable, statistic)
        found = found.cpu() | self._reached.get(prunable.name, torch.tensor(False, device="cpu"))
        if not bool(found.all()) and "reached" not in facts:
            idle = ~found & self._input_counts.reached(prunable).cpu()
            self._note_idle(prunable, int(idle.sum()) * prunable.parameter.numel() // len(idle))
            found |= idle
        self._reached[prunable.name] = found
        return found

    def _note_idle(self, prunable: Prunable, count: int) -> None:
        """Say which weights are used and have no gradient: nothing tells dead units from a backward pass cut short."""
        self._idle |= {prunable.name: count} if count else {}
        if self._idle:
            named = [f"{name} ({count:,})" for name, count in self._idle.items()]
            self.notes["idle"] = (
                f"{sum(self._idle.values()):,} weights have inputs, but their gradients are all zero, so they go first."
                " That is wrong where no_grad, detach or checkpointing with use_reentrant=True stops the backward pass:"
                f" {', '.join(named[:4])}{', ...' if named[4:] else ''}"
            )

    @cached_property
    def _input_counts(self) -> InputCounts:
        counts = InputCounts(self.prunables)
        self._gather_inputs(counts)
        return counts

    def memory_plan(self, prunables: Sequence[Prunable], statistics: int) -> MemoryPlan:
        """How to store this number of gradient statistics for each of these weights; cached."""
        if self.streams:
            wide = any(prunable.parameter.dtype == torch.float32 for prunable in prunables)
            self.notes["memory"] = f"Blocks are streamed to {self.device} one at a time; statistics are on the host."
            return MemoryPlan(torch.float32 if wide else torch.bfloat16, on_device=0, checkpointing=True)
        if self.device.type != "cuda" and self.ranks.size == 1:
            return MemoryPlan()
        weights = sum(prunable.parameter.numel() for prunable in prunables)
        case = weights, statistics, self.hidden_states.first_block(prunables)
        if case not in self._plans:
            several = self.ranks.size > 1  # gradients of a batch then wait for those of other ranks
            pending = sum(prunable.parameter.nbytes for prunable in prunables) if several else 0
            reserved = 2 * self.held.nbytes + pending  # new masks beside the current ones
            need = MemoryNeed(statistics, self.copies, reserved)
            plan = plan_memory(self.model, self.batches[0], self.loss, prunables, self.blocks, self.memory, need)
            plan = smallest_plan(plan, self.ranks) if several else plan
            if any(earlier.dtype != torch.float32 for earlier in self._plans.values()):
                # Statistics that are compared with each other must be rounded alike.
                reason = plan.reason.replace("fp32 statistics", "bf16 statistics")
                plan = replace(plan, dtype=torch.bfloat16, reason=reason)
            self._plans[case] = plan
            if plan.reason:
                self.notes["memory"] = plan.reason
        return self._plans[case]

    # Running the model

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """The modules that run one after another, if the model has such."""
        if self.offload is not None:
            return list(self.offload.blocks)
        return find_blocks(self.model, self.batches[0], self.forward, self.prunables)

    @cached_property
    def offload(self) -> BlockOffload | None:
        """Copies blocks to the device, if the model is on another one."""
        if not self.streams:
            return None
        return offload_for(self.model, self.batches[0], self.forward, self.prunables, self.device)

    def on_device(self) -> AbstractContextManager[None]:
        """Inside, the model computes on the calibration device."""
        return nullcontext() if self.offload is None else self.offload.active()

    @cached_property
    def hidden_states(self) -> HiddenStates:
        """A cache of hidden states for gradients of some blocks only."""
        # A partial without self: a cycle would keep the cached states alive.
        first = partial(losses, self.model, self.own_batches[:1], self.loss, self.offload)
        return HiddenStates(self.blocks, len(self.own_batches), lambda: first()[0], self.ranks)

    def losses(self, count: int) -> list[float]:
        """Losses of the first batches that together have at least `count` input elements."""
        sizes = (1 if (tensor := first_tensor_in(batch)) is None else tensor.numel() for batch in self.batches)
        totals = itertools.accumulate(sizes)
        enough = next((n for n, total in enumerate(totals, 1) if total >= count), len(self.batches))
        mine = [self.batches[number] for number in self.ranks.mine(enough)]
        found = self.ranks.floats("losses", losses(self.model, mine, self.loss, self.offload))
        return [found[number % self.ranks.size][number // self.ranks.size] for number in range(enough)]

    def evaluate(self, metric: Callable[[nn.Module], float]) -> float:
        """The metric of the model as it is, in evaluation mode, where nothing changes it and dropout is off.

        Every rank computes it; the first rank's value counts.
        """
        with eval_mode(self.model, [one for one in self.model.parameters() if one.requires_grad]):
            found = metric(self.model)
        try:
            value = float(found)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ScheduleError(
                f"evaluate(model) must return a number; it returned a {type(found).__name__}."
            ) from error
        return self.ranks.first(value)

    # Masks

    def targets(self, score: Score, facts: FactTable, asked: float, anew: bool = False) -> list[Target]:
        """Every weight as input of a selection at this sparsity; `anew` ignores the current masks.

        Matrices without inputs lose this share of their own weights, so that the others lose it too.
        """
        targets, dead_counts = [], [0] * len(self.prunables) if anew else self.held.dead
        reached = {prunable.name: self.reached(prunable, facts[prunable.name]) for prunable in self.prunables}
        spared = self._spared(reached, asked)
        for prunable, mask, dead in zip(self.prunables, self.held.masks, dead_counts, strict=True):
            needed = {name: facts[prunable.name][name] for name in score.needs}
            targets.append(target_of(prunable, score, needed, mask, dead, spared=spared.get(prunable.name)))
        return targets

    def _spared(self, reached: Mapping[str, Tensor], asked: float) -> dict[str, Tensor]:
        """The magnitude from which weights of matrices without inputs are spared, by name; adds a note."""
        sizes = {prunable.name: prunable.parameter.numel() for prunable in self.prunables}
        counts = {name: int((~found).sum()) * sizes[name] // len(found) for name, found in reached.items()}
        counts = {name: count for name, count in counts.items() if count}
        if not counts:
            return {}
        floors = {}
        for prunable in self.prunables:
            if prunable.name in counts:
                matrices = prunable.parameter.detach().reshape(len(reached[prunable.name]), -1)
                floors[prunable.name] = least_spared(matrices, reached[prunable.name], asked)
        named = [f"{name} ({count:,})" for name, count in counts.items()]
        self.notes["unreached"] = (
            f"No inputs reached {sum(counts.values()):,} weights in any batch (experts without tokens, layers that were"
            f" not called). Each such matrix loses the asked share of its own weights, the smallest:"
            f" {', '.join(named[:4])}{', ...' if named[4:] else ''}"
        )
        return floors

    def set_masks(self, chosen: Selection, asked: float, seconds: float) -> None:
        """Hold these masks, zero the weights they remove, and record the update."""
        if self._removed is not None:
            self._keep_removed(self._removed, chosen.masks)
        self.held.take(chosen.masks, chosen.kept)
        self._cuts = [None if cut is None else cut.value for cut in chosen.cuts]
        self.apply_masks()
        self.record_update(asked, seconds)

    @torch.no_grad()
    def apply_masks(self) -> None:
        """Zero the weights that the masks remove."""
        kernels.zero([prunable.parameter.detach() for prunable in self.prunables], self.held.masks)

    def record_update(self, asked: float, seconds: float) -> None:
        """Add the change of the masks since the last update to the report."""
        self._churn = [now - before for now, before in zip(self.held.dead, self._pruned_before, strict=True)]
        self._pruned_before = list(self.held.dead)
        sent, self._bytes_sent = self.ranks.bytes_sent - self._bytes_sent, self.ranks.bytes_sent
        pruned, churn = sum(self._pruned_before), sum(self._churn)
        self.updates.append(Update(len(self.updates) + 1, asked, pruned, churn, seconds, sent))

    def undo(self, dense: Mapping[str, Tensor] | None = None) -> Callable[[], None]:
        """A function that restores the current weights to the bit after any pruning that follows.

        Pass copies of the `dense` weights by name if surviving weights change too. Otherwise the host keeps the pruned
        values, and a bit per weight and round.
        """
        self._removed = [] if dense is None else None
        return partial(self._restore, dense or {})

    @torch.no_grad()
    def _restore(self, dense: Mapping[str, Tensor]) -> None:
        for prunable in self.prunables if dense else ():
            prunable.parameter.detach().copy_(dense[prunable.name])
        for weight, bits, values in self._removed or ():
            weight[as_bool(bits.to(weight.device), weight.shape)] = values.to(weight.device)

    @torch.no_grad()
    def _keep_removed(self, removed: list[tuple[Tensor, Tensor, Tensor]], masks: Sequence[Tensor]) -> None:
        for prunable, mask in zip(self.prunables, masks, strict=True):  # one by one, as in _start_masks
            weight = prunable.parameter.detach()
            going = ~as_bool(mask, weight.shape) & ((weight != 0) | weight.signbit())  # -0.0 becomes 0.0 too
            removed.append((weight, to_bits(going.reshape(-1)).cpu(), weight[going].cpu()))

    def masks(self) -> Masks:
        """Bool masks by name, True = kept."""
        return Masks([prunable.name for prunable in self.prunables], self.held)

    @property
    def sparsity(self) -> float:
        """Fraction of the prunable weights that is pruned."""
        return sum(self.held.dead) / sum(shape.numel() for shape in self.held.shapes)

    def outcome(self, **settings: Any) -> Outcome:
        """The report, with these settings of the call."""
        rows = [
            TensorRow(s.name, tuple(s.parameter.shape), s.parameter.numel(), gone, churn, cut, s.tied, s.reason)
            for s, gone, churn, cut in zip(self.prunables, self.held.dead, self._churn, self._cuts, strict=True)
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


def losses(model: nn.Module, batches: Sequence[Batch], loss: Loss, offload: BlockOffload | None) -> list[float]:
    """The loss of every batch."""
    with nullcontext() if offload is None else offload.active(), eval_mode(model), torch.no_grad():
        device = device_of(model) if offload is None else offload.device
        return [float(loss(model, to_device(batch, device))) for batch in batches]


def scope_for(
    score: Score, scope: str | None, pattern: Pattern | None, allocation: str | None, prunables: Sequence[Prunable]
) -> str:
    """The scope, or the default one of the score's paper. WANDA's rows are for linear layers: in convolutional
    networks, where they do worse than magnitude, the default is the whole model."""
    if scope is not None:
        return as_scope(scope)
    if pattern is not None or allocation is not None:
        return "model"
    convolutions = [one for one in prunables if one.parameter.ndim > 3]  # a transformer may have one for its patches
    if score.scope == "row" and len(convolutions) > 1:
        return "model"
    return score.scope or "model"
