"""Facts: what a score reads about each weight, from the optimizer's state or kept for the score, and its evaluation.

`Facts` finds them, also in state stored as 4 or 8 bit codes by torchao and bitsandbytes. `target_of` turns a weight and
its facts into a tensor whose scores a selection evaluates in chunks.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from secateur import kernels
from secateur.errors import FactError, OptimizerError
from secateur.model.distributed import is_sharded, local, placement
from secateur.model.prunable import Prunable
from secateur.scores import SCALAR_FACTS, Score, resolve, scores
from secateur.selection import Target
from secateur.selection.exact import ALONE, Peers, ScoredTensor, Where, evaluator, flat_part
from secateur.selection.masks import as_bool

UNREACHED = 2.0**126  # a score above all others, for weights to keep that no inputs reached
SAMPLE = 1 << 20  # weights of a matrix that are sorted to find a quantile of their magnitudes
KEPT_FACTS = ("initial_weight", "movement_sum")  # no optimizer has these; kept only for a score that reads them
ADAM_FACTS = {"weight", "index", "step", "beta1", "beta2", "exp_avg", "exp_avg_sq", *KEPT_FACTS}  # when Adam trains

# bitsandbytes numbers its states; their meaning, by the `optimizer_name` of its optimizers.
NUMBERED = {
    "adam": {"state1": "exp_avg", "state2": "exp_avg_sq"},
    "lamb": {"state1": "exp_avg", "state2": "exp_avg_sq"},
    "ademamix": {"state2": "exp_avg_sq"},  # its state1 is two averages, stacked
    "lion": {"state1": "exp_avg"},
    "momentum": {"state1": "momentum_buffer"},
    "rmsprop": {"state1": "square_avg"},
}
BLOCK = 256  # values of bitsandbytes that share a scale

# State of optimizers that turn or project gradients (SOAP, Kron; GaLore, APOLLO, Conda). Beside it, a number of a
# moment is of no single weight, even if the shape is the same. Shampoo has factors of that shape if it is square.
BASES = ("projector", "GG", "Q")
FACTORS = ("precond", "pre_cond", "inv_precond", "inv_pre_cond")
# What the names end in that heavyball gives the numbers in the dicts inside a parameter's state.
NESTED = {"step": r"\.step$", "exp_avg": r"_exp_avg_\d+$", "exp_avg_sq": r"_exp_avg_sq_\d+$"}


def check_needs(score: Score, available: Set[str], where: str) -> None:
    """Raise if the score reads other facts than these; `where` says where they are missing."""
    if unknown := sorted({*score.needs} - available):
        work = [name for name in scores() if set(resolve(name).needs) <= available]
        raise FactError(
            f"{score.name} needs {', '.join(unknown)}, not available {where}. Scores that work here: {', '.join(work)}."
        )


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler made a fused optimizer skip this step."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


def dense(gradient: Tensor) -> Tensor:
    """A gradient as a plain tensor: that of `Embedding(sparse=True)` has the rows that were used alone."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def zero_gradients(parameters: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zero the gradients of these parameters where their masks, bools or bits, remove a weight."""
    plain = []
    for parameter, mask in zip(parameters, masks, strict=True):
        if parameter.grad is None:
            continue
        gradient = local(parameter.grad)
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            gradient.values().mul_(as_bool(mask, gradient.shape)[tuple(gradient.indices())])
            parameter.grad = gradient
        else:
            plain.append((gradient, mask))
    kernels.zero([gradient for gradient, _ in plain], [mask for _, mask in plain])


@dataclass(frozen=True)
class Coded:
    """Optimizer state stored as codes of 4 or 8 bits: how to read it, and how to zero it where a bool mask is False."""

    read: Callable[[], Tensor]
    zero: Callable[[Tensor], None]


def zero_codes(codes: Tensor, table: Tensor | None, kept: Tensor) -> None:
    """Write the code of zero where `kept` is False: the table's entry nearest to zero, or without a table zero bits."""
    if table is None:
        codes.view(torch.uint8).masked_fill_(~kept, 0)
    else:
        codes.copy_(torch.where(kept, codes, table.abs().argmin().to(codes.dtype)))


def _zero_stacked(values: Tensor, kept: Tensor) -> None:
    values.masked_fill_(~kept, 0)


def decode(codes: Tensor, table: Tensor, largest: Tensor, size: int) -> Tensor:
    """fp32 values of bitsandbytes' codes: table entries times the largest value of each block of weights."""
    values = table.index_select(0, codes.flatten().int()).view(-1, size)
    scales = largest.view(values.shape[0], -1).repeat_interleave(BLOCK, dim=1)[:, :size]
    return values.mul_(scales).view(codes.shape)


def _subclassed(value: Any) -> Coded:
    """State in a tensor subclass, as in torchao. Codes are written in place, which leaves all other values unchanged:
    encoded again, a block whose largest value is negative would shrink, because the table of 4 bits ends at -0.8875.
    Where the codes are not known, the tensor is decoded, zeroed and encoded again."""

    def zero(kept: Tensor) -> None:
        codes, table = getattr(value, "codes", None), getattr(value, "qmap", None)
        if isinstance(codes, Tensor) and codes.shape == value.shape:
            zero_codes(codes, table, kept)
        elif isinstance(codes, Tensor) and isinstance(table, Tensor) and 2 * codes.numel() == value.numel():
            pairs = torch.stack([codes >> 4, codes & 15], dim=-1)  # torchao's order of the two in a byte
            zero_codes(pairs, table, kept.reshape(pairs.shape))
            codes.copy_(pairs[..., 0] << 4 | pairs[..., 1])
        else:
            value.copy_(value.dequantize().masked_fill_(~kept, 0))

    return Coded(value.dequantize, zero)


def _numbered(state: Mapping[str, Any], shape: torch.Size, number: int) -> Coded | None:
    """State 1 or 2 of bitsandbytes: codes with a table and scales, or stacked float tensors; None for anything else."""
    codes, table, largest = (state.get(f"{name}{number}") for name in ("state", "qmap", "absmax"))
    if not isinstance(codes, Tensor) or codes.shape[-len(shape) :] != shape:
        return None
    if isinstance(table, Tensor) and isinstance(largest, Tensor):
        return Coded(partial(decode, codes, table, largest, shape.numel()), partial(zero_codes, codes, table))
    if codes.is_floating_point() and codes.shape != shape:
        return Coded(lambda: codes, partial(_zero_stacked, codes))
    return None


def _encodes(value: Tensor) -> bool:
    """Whether this tensor subclass defines its own `dequantize`, such as torchao's OptimState8bit."""
    return type(value).dequantize is not Tensor.dequantize


def basis_in(state: Mapping[str, Any]) -> str:
    """The names in an optimizer's state that say its moments are in a basis of their own; empty if they are not."""
    inside = {word for name in state if "." in str(name) for word in re.split(r"[._]", name)}  # heavyball's are longer
    return ", ".join(repr(name) for name in BASES if name in state or name in inside)


def flattened(state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A parameter's state with the entries of dicts inside it as entries of its own, their names joined by dots."""
    if not any(isinstance(value, Mapping) for value in state.values()):
        return state
    found: dict[str, Any] = {}
    for key, value in state.items():
        inner = flattened(value) if isinstance(value, Mapping) else None
        found |= {str(key): value} if inner is None else {f"{key}.{name}": one for name, one in inner.items()}
    return found


def _meaning(state: Mapping[Any, Any]) -> dict[str, str]:
    """The names that scores use for flattened entries, where these are unambiguous."""
    nested = [name for name in state if "." in str(name)]
    found = {fact: [name for name in nested if re.search(pattern, name)] for fact, pattern in NESTED.items()}
    return {names[0]: fact for fact, names in found.items() if len(names) == 1 and fact not in state}


class Facts:
    """The facts about the prunable tensors that these optimizers train: weights, state, betas, and kept facts.

    Each tensor's facts come from the optimizer that trains it. Its `wrappers` may keep state of their own, such as slow
    weights, which is only zeroed.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        score: Score,
        prunables: Sequence[Prunable],
        wrappers: Sequence[Sequence[Any]] = (),
    ) -> None:
        self._optimizers, self._score, self._wrappers = optimizers, score, wrappers
        self._groups: list[dict[int, dict[str, Any]]] = [_groups_of(optimizer) for optimizer in optimizers]
        self._owners = {key: number for number, groups in enumerate(self._groups) for key in groups}
        self.prunables = [prunable for prunable in prunables if id(prunable.parameter) in self._owners]
        self.stepped = False  # whether an optimizer has taken a step
        self._pending: dict[str, Tensor] = {}  # movement of the last evaluation of a closure
        self.kept: dict[str, dict[str, Tensor]] = {fact: {} for fact in KEPT_FACTS if fact in score.needs}
        for fact, tensors in self.kept.items():
            for prunable in self.prunables:
                weight = local(prunable.parameter.detach())
                zeros = torch.zeros_like(weight, dtype=torch.float32)
                tensors[prunable.name] = weight.clone() if fact == "initial_weight" else zeros

    def owner(self, prunable: Prunable) -> int:
        """The number of the optimizer that trains this tensor."""
        return self._owners[id(prunable.parameter)]

    def check_owned(self) -> None:
        """Raise if an optimizer no longer has a parameter it had: then it trains others, and nothing is pruned."""
        for number, optimizer in enumerate(self._optimizers):
            has = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            lost = [one.name for one in self.prunables if self.owner(one) == number and id(one.parameter) not in has]
            if lost:
                raise OptimizerError(
                    f"{type(optimizer).__name__} no longer has {lost[0]!r} and {len(lost) - 1} more tensors that it had"
                    " when this Pruner was made. Build the Pruner after what replaces parameters (fully_shard,"
                    " accelerator.prepare), with the optimizer that trains the new ones."
                )

    def _own(self, prunable: Prunable) -> tuple[Any, Mapping[str, Any], Mapping[str, str]]:
        """The optimizer that trains this tensor, its state for it, and the meaning of numbered keys of that state."""
        optimizer = self._optimizers[self.owner(prunable)]
        meant = NUMBERED.get(getattr(optimizer, "optimizer_name", ""), {})
        state = flattened(raw := optimizer.state.get(prunable.parameter, {}))
        return optimizer, state, meant if state is raw else {**meant, **_meaning(state)}

    def members(self, prunable: Prunable) -> tuple[dict[str, Tensor], dict[str, Coded]]:
        """The local shard of all optimizer state in the weight's shape, by the names scores use: float tensors, and
        codes of a few bits (torchao, bitsandbytes)."""
        _, state, meant = self._own(prunable)
        plain: dict[str, Tensor] = {}
        coded: dict[str, Coded] = {}
        for key, value in state.items() if not basis_in(state) else ():
            if str(key).startswith(FACTORS):
                continue
            if isinstance(value, Tensor) and value.shape == prunable.parameter.shape and value.is_floating_point():
                part = local(value)
                if _encodes(part):
                    coded[key] = _subclassed(part)
                else:
                    plain[meant.get(key, key)] = part
        for number in (1, 2) if "state1" in state else ():
            if (one := _numbered(state, local(prunable.parameter.detach()).shape, number)) is not None:
                coded[meant.get(f"state{number}", f"state{number}")] = one
        return plain | self._kept_around(prunable), coded

    def _kept_around(self, prunable: Prunable) -> dict[str, Tensor]:
        """State in the weight's shape that wrappers of its optimizer keep: slow weights, Schedule-Free's z."""
        found = {}
        for wrapper in self._wrappers[self.owner(prunable)] if self._wrappers else ():
            state = getattr(wrapper, "state", None)
            own = state.get(prunable.parameter) if isinstance(state, Mapping) else None
            other = isinstance(own, Mapping) and own is not self._own(prunable)[1]  # Accelerate's shows the optimizer's
            for key, value in own.items() if own is not None and other else ():
                if isinstance(value, Tensor) and value.shape == prunable.parameter.shape and value.is_floating_point():
                    found[f"{type(wrapper).__name__}.{key}"] = local(value)
        return found

    def kept_of(self, prunable: Prunable) -> list[Tensor]:
        """The facts kept about this tensor for the score."""
        return [tensors[prunable.name] for tensors in self.kept.values()]

    def has_state(self, prunable: Prunable) -> bool:
        """Whether the optimizer has state for this tensor: it does after the first step with a gradient."""
        return bool(self._own(prunable)[1])

    def check(self) -> None:
        """Raise if the score cannot work with these optimizers or state cannot be zeroed. Tensors that have had no
        gradient yet are checked later."""
        none_yet = not any(map(self.has_state, self.prunables))
        for prunable in self.prunables:
            if none_yet or self.has_state(prunable):
                self.of(prunable)
        self._check_zeroed()

    def _check_zeroed(self) -> None:
        """Refuse state that cannot be written, and warn about codes of unknown meaning."""
        for prunable in self.prunables:
            optimizer, state, meant = self._own(prunable)
            shaped = {k: t for k, t in state.items() if isinstance(t, Tensor) and t.shape == prunable.parameter.shape}
            plain, coded = self.members(prunable)
            opaque = [k for k, t in plain.items() if hasattr(t, "__tensor_flatten__")]
            if opaque:
                raise FactError(
                    f"{type(optimizer).__name__} keeps {opaque[0]!r} of {prunable.name!r} as a"
                    f" {type(local(shaped[opaque[0]])).__name__}, which has no dequantize(), so it can neither be read"
                    " nor zeroed for pruned weights. Use an optimizer that keeps its state as plain tensors."
                )
            unknown = [k for k, t in shaped.items() if not t.is_floating_point() and meant.get(k, k) not in coded]
            if unknown:
                kind = f"{type(optimizer).__name__} keeps {', '.join(map(repr, unknown))} as {shaped[unknown[0]].dtype}"
                warnings.warn(
                    f"{kind} codes in a format Secateur does not know (first seen for {prunable.name!r}). Pruned"
                    " weights stay zero, but this state of theirs is not zeroed. Scores that need no state: magnitude,"
                    " movement, displacement.",
                    stacklevel=4,
                )
                return

    def of(self, prunable: Prunable) -> dict[str, Any]:
        """The facts the score reads about this tensor, or an error with what is missing and which scores would work."""
        found = self._available(prunable)
        missing = [name for name in self._score.needs if name not in found]
        if missing:
            raise FactError(self._explain(prunable, missing))
        facts = {name: found[name] for name in self._score.needs}
        return {name: fact.read() if isinstance(fact, Coded) else fact for name, fact in facts.items()}

    def _available(self, prunable: Prunable) -> dict[str, Any]:
        """All facts about this tensor; codes not yet decoded."""
        _, state, meant = self._own(prunable)
        facts: dict[str, Any] = {"weight": local(prunable.parameter.detach()), "index": None}
        for members in self.members(prunable):
            facts |= members
        steps = [state[name] for name in state if meant.get(name, name) == "step"]
        if steps:
            facts["step"] = torch.as_tensor(steps[0]).double()
        facts |= self._betas(prunable)
        return facts | {fact: tensors[prunable.name] for fact, tensors in self.kept.items()}

    def _group(self, prunable: Prunable) -> dict[str, Any]:
        """The tensor's current parameter group: loading an optimizer's state replaces groups."""
        number, key = self.owner(prunable), id(prunable.parameter)
        if not any(self._groups[number].get(key) is group for group in self._optimizers[number].param_groups):
            self._groups[number] = _groups_of(self._optimizers[number])
        return self._groups[number][key]

    def _betas(self, prunable: Prunable) -> dict[str, float]:
        return dict(zip(("beta1", "beta2"), self._group(prunable).get("betas", ()), strict=False))

    def _explain(self, prunable: Prunable, missing: Sequence[str]) -> str:
        optimizer = self._own(prunable)[0]
        plain, coded = self.members(prunable)
        kind, keeps = type(optimizer).__name__, ", ".join(sorted([*plain, *coded]))
        keeping = {self.owner(one) for one in self.prunables if self.has_state(one)}
        if not self.stepped and not keeping:
            found = f"{kind} has no state yet: it appears with the first optimizer.step()"
        elif not self.has_state(prunable) and self.owner(prunable) in keeping:
            found = (
                f"{kind} has no state for {prunable.name!r}, which has had no gradient yet: leave it out with skip=..."
            )
        else:
            basis = basis_in(self._own(prunable)[1])
            other = f"its moments in another basis than the weights (by {basis}), where no number is of one weight"
            found = f"{kind} keeps {other if basis else keeps or 'nothing shaped like the weights'}"
            found += f" for {self._listed(missing)}" if len(self._optimizers) > 1 else ""
        # A score works here if every tensor has its facts, whichever optimizer trains it.
        known = [one for one in self.prunables if self.has_state(one) or self.owner(one) not in keeping]
        here = set.intersection(*({*self._available(one)} for one in known)) | set(KEPT_FACTS)
        work = [name for name in scores() if set(resolve(name).needs) <= here]
        return f"{self._score.name} needs {', '.join(missing)}; {found}. Scores that work here: {', '.join(work)}."

    def _listed(self, missing: Sequence[str]) -> str:
        """Names of the tensors that lack one of these facts."""
        names = [repr(one.name) for one in self.prunables if not {*missing} <= self._available(one).keys()]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _moves(self, number: int) -> Iterator[tuple[str, Tensor, Tensor, int]]:
        """Name, weight, gradient and sign of every tensor that this optimizer is about to step."""
        scale = getattr(self._optimizers[number], "grad_scale", None)  # fused optimizers get scaled gradients
        for prunable in self.prunables if "movement_sum" in self.kept else ():
            if self.owner(prunable) == number and prunable.parameter.grad is not None:
                gradient = dense(local(prunable.parameter.grad)).float()
                gradient = gradient if scale is None else gradient / scale
                weight = local(prunable.parameter.detach()).float()
                yield prunable.name, weight, gradient, 1 if self._group(prunable).get("maximize") else -1

    @torch.no_grad()
    def accumulate_movement(self, number: int) -> None:
        """Add -w g of the step this optimizer is about to take to the movement sums."""
        for name, weight, gradient, sign in self._moves(number):
            self.kept["movement_sum"][name].addcmul_(weight, gradient, value=sign)

    @torch.no_grad()
    def note_movement(self, number: int) -> None:
        """Store -w g after a closure, replacing that of its earlier evaluations: only the last one counts."""
        for name, weight, gradient, sign in self._moves(number):
            self._pending[name] = torch.mul(weight, gradient).mul_(sign)

    def settle_movement(self, number: int, taken: bool) -> None:
        """Add the movement of a closure's last evaluation to the sums, if the step was taken."""
        for prunable in self.prunables if self._pending else ():
            moved = self._pending.pop(prunable.name, None) if self.owner(prunable) == number else None
            if moved is not None and taken:
                self.kept["movement_sum"][prunable.name].add_(moved)

    def target(self, prunable: Prunable, alive: Tensor, dead: int, peers: Peers) -> Target:
        """This tensor for a selection, its scores evaluated on demand from the facts of the local shard."""
        return target_of(prunable, self._score, self.of(prunable), alive, dead, peers)


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def target_of(
    prunable: Prunable,
    score: Score,
    facts: Mapping[str, Any],
    alive: Tensor,
    dead: int,
    peers: Peers = ALONE,
    spared: Tensor | None = None,
) -> Target:
    """A prunable tensor for a selection. `spared` is for matrices that no inputs reached: see `kept_last`."""
    part, whole = local(prunable.parameter.detach()), prunable.parameter.shape
    first = prunable.start + placement(prunable.parameter).first_row * whole[1:].numel()
    evaluate = evaluator(score, facts, first, part.device)
    evaluate = one_a_slice(evaluate, part, prunable.fragile) if prunable.fragile else evaluate
    tensors = [fact for name, fact in facts.items() if isinstance(fact, Tensor) and name not in SCALAR_FACTS]
    here = all(fact.device == part.device for fact in tensors)  # offloaded facts are on the host
    scored = ScoredTensor(
        prunable.name,
        part.numel(),
        whole.numel(),
        evaluate if spared is None else kept_last(evaluate, spared, part),
        part.device,
        alive.view(-1) if dead else None,
        replicated=peers.size > 1 and not is_sharded(prunable.parameter),
        source=(score, facts) if spared is None and here and not prunable.fragile else None,
        dead=dead,
    )
    return Target(scored, tuple(part.shape), tuple(whole), prunable.layout)


def one_a_slice(evaluate: Callable[[Where], Tensor], weight: Tensor, dims: Sequence[int]) -> Callable[[Where], Tensor]:
    """Scores in which the largest weight of every slice of these dimensions ranks first. Where fewer weights are kept
    than there are slices, `Held` refuses the masks."""
    sizes = weight.abs()
    largest = torch.zeros_like(weight, dtype=torch.bool)
    for dim in dims:
        rows = sizes.movedim(dim, 0)
        best = rows.flatten(1).argmax(1, keepdim=True)
        chosen = torch.zeros(len(rows), rows[0].numel(), dtype=torch.bool, device=weight.device).scatter_(1, best, True)
        largest |= chosen.view(rows.shape).movedim(0, dim)
    flat = largest.reshape(-1)
    return lambda where: evaluate(where).masked_fill(flat_part(flat, where), UNREACHED)


def least_spared(matrices: Tensor, reached: Tensor, asked: float) -> Tensor:
    """The magnitude from which weights of each unreached matrix are kept, so that the share `asked` of them goes; NaN
    for reached matrices. `matrices` has shape [matrices, weights].

    Nothing is known of these weights, so they lose what an average matrix loses. Kept whole, they cost the others more
    than they are worth, even where they are used after all (docs/LOG.md).
    """
    floors = torch.full((len(matrices),), torch.nan, dtype=torch.float32, device="cpu")
    for number in (~reached).nonzero().flatten().tolist():
        sample = matrices[number][:: max(1, matrices.shape[1] // SAMPLE)].float().abs()
        gone = min(round(asked * sample.numel()), sample.numel() - 1)
        floors[number] = float(sample.kthvalue(gone + 1).values)
    return floors


def kept_last(evaluate: Callable[[Where], Tensor], floors: Tensor, weight: Tensor) -> Callable[[Where], Tensor]:
    """Scores in which weights of unreached matrices rank above all others if they reach their floor, below all
    others if not, by magnitude. Matrices whose floor is NaN keep their scores."""
    spread = floors.to(weight.device).view(-1, *[1] * (weight.ndim - 1)).expand(weight.shape)

    def score(where: Where) -> Tensor:
        found, size, floor = evaluate(where), flat_part(weight, where).float().abs(), flat_part(spread, where)
        ranked = torch.where(size >= floor, UNREACHED * (1 + size / (1 + size)), size / UNREACHED)
        return torch.where(floor.isnan(), found, ranked)

    return score
