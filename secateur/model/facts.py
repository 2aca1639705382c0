"""Facts: what a score may read about a weight, from the optimizer's state or kept on purpose, and its evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from secateur.errors import FactError
from secateur.model.distributed import is_sharded, local, placement
from secateur.model.prunable import Prunable
from secateur.scores import SCALAR_FACTS, Score, resolve, scores
from secateur.selection import Target
from secateur.selection.exact import ALONE, Peers, ScoredTensor, Where, flat_part, sent

UNREACHED = 2.0**126  # at least this is the score of a weight that no inputs reached
SAMPLE = 1 << 20  # weights of a matrix that are sorted to find how small the smallest are
KEPT_FACTS = ("initial_weight", "movement_sum")  # those no optimizer has; kept only for a score that reads them


# bitsandbytes numbers its states. What they are, by the `optimizer_name` of its optimizers.
NUMBERED = {
    "adam": {"state1": "exp_avg", "state2": "exp_avg_sq"},
    "lamb": {"state1": "exp_avg", "state2": "exp_avg_sq"},
    "ademamix": {"state2": "exp_avg_sq"},  # its state1 is two averages, stacked
    "lion": {"state1": "exp_avg"},
    "momentum": {"state1": "momentum_buffer"},
    "rmsprop": {"state1": "square_avg"},
}
BLOCK = 256  # values of bitsandbytes that share a scale


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler told a fused optimizer, which checks for itself, to leave everything as it is."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


@dataclass(frozen=True)
class Coded:
    """Optimizer state stored as codes of 4 or 8 bits: how to read it, and how to zero what a bool mask removes."""

    read: Callable[[], Tensor]
    zero: Callable[[Tensor], None]


def zero_codes(codes: Tensor, table: Tensor | None, kept: Tensor) -> None:
    """Write the code of zero where `kept` is False: the entry of the table nearest to it, without a table zero bits."""
    if table is None:
        codes.view(torch.uint8).masked_fill_(~kept, 0)
    else:
        codes.copy_(torch.where(kept, codes, table.abs().argmin().to(codes.dtype)))


def _zero_stacked(values: Tensor, kept: Tensor) -> None:
    values.masked_fill_(~kept, 0)


def decode(codes: Tensor, table: Tensor, largest: Tensor, size: int) -> Tensor:
    """fp32 values of bitsandbytes' codes: entries of the table, times the largest value of a block of weights."""
    values = table.index_select(0, codes.flatten().int()).view(-1, size)
    scales = largest.view(values.shape[0], -1).repeat_interleave(BLOCK, dim=1)[:, :size]
    return values.mul_(scales).view(codes.shape)


def _subclassed(value: Any) -> Coded:
    """State in a tensor subclass, as torchao has it. Codes in the weight's shape are written directly, which leaves all
    others as they are. Else (4 bits) the tensor is decoded, zeroed in part and encoded again."""

    def zero(kept: Tensor) -> None:
        codes = getattr(value, "codes", None)
        if isinstance(codes, Tensor) and codes.shape == value.shape:
            zero_codes(codes, getattr(value, "qmap", None), kept)
        else:
            value.copy_(value.dequantize().masked_fill_(~kept, 0))

    return Coded(value.dequantize, zero)


def _numbered(state: Mapping[str, Any], shape: torch.Size, number: int) -> Coded | None:
    """State 1 or 2 of bitsandbytes: codes with a table and scales, or stacked float tensors; None for others."""
    codes, table, largest = (state.get(f"{name}{number}") for name in ("state", "qmap", "absmax"))
    if not isinstance(codes, Tensor) or codes.shape[-len(shape) :] != shape:
        return None
    if isinstance(table, Tensor) and isinstance(largest, Tensor):
        return Coded(partial(decode, codes, table, largest, shape.numel()), partial(zero_codes, codes, table))
    if codes.is_floating_point() and codes.shape != shape:
        return Coded(lambda: codes, partial(_zero_stacked, codes))
    return None


def _encodes(value: Tensor) -> bool:
    """Whether this tensor subclass has a decoding of its own, such as torchao's OptimState8bit."""
    return type(value).dequantize is not Tensor.dequantize


class Facts:
    """Everything known about the sites of some optimizers: weights, state and betas, and the kept facts.

    Each site is read from the optimizer that trains it.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], score: Score, sites: Sequence[Prunable]) -> None:
        self._optimizers, self._score = optimizers, score
        self._groups: list[dict[int, dict[str, Any]]] = [_groups_of(optimizer) for optimizer in optimizers]
        self._owners = {key: number for number, groups in enumerate(self._groups) for key in groups}
        self.sites = [site for site in sites if id(site.parameter) in self._owners]
        self.stepped = False  # whether an optimizer has taken a step
        self._pending: dict[str, Tensor] = {}  # the movement of a closure's last evaluation
        self.kept: dict[str, dict[str, Tensor]] = {fact: {} for fact in KEPT_FACTS if fact in score.needs}
        for fact, tensors in self.kept.items():
            for site in self.sites:
                weight = local(site.parameter.detach())
                zeros = torch.zeros_like(weight, dtype=torch.float32)
                tensors[site.name] = weight.clone() if fact == "initial_weight" else zeros

    def owner(self, site: Prunable) -> int:
        """The number of the optimizer that trains this site."""
        return self._owners[id(site.parameter)]

    def _own(self, site: Prunable) -> tuple[Any, Mapping[str, Any], Mapping[str, str]]:
        """The optimizer that trains this site, its state for it, and what some keys of that state mean."""
        optimizer = self._optimizers[self.owner(site)]
        meant = NUMBERED.get(getattr(optimizer, "optimizer_name", ""), {})
        return optimizer, optimizer.state.get(site.parameter, {}), meant

    def members(self, site: Prunable) -> tuple[dict[str, Tensor], dict[str, Coded]]:
        """The optimizer's state in the weight's shape, this process's part of it, under the names scores know: float
        tensors, and what is kept as codes of a few bits (torchao, bitsandbytes)."""
        _, state, meant = self._own(site)
        plain: dict[str, Tensor] = {}
        coded: dict[str, Coded] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == site.parameter.shape and value.is_floating_point():
                part = local(value)
                if _encodes(part):
                    coded[key] = _subclassed(part)
                else:
                    plain[meant.get(key, key)] = part
        for number in (1, 2) if "state1" in state else ():
            if (one := _numbered(state, local(site.parameter.detach()).shape, number)) is not None:
                coded[meant.get(f"state{number}", f"state{number}")] = one
        return plain, coded

    def kept_of(self, site: Prunable) -> list[Tensor]:
        """The facts kept on purpose about this site."""
        return [tensors[site.name] for tensors in self.kept.values()]

    def has_state(self, site: Prunable) -> bool:
        """Whether the optimizer keeps anything for this site; it does once the site has had a gradient."""
        return bool(self._own(site)[1])

    def check(self) -> None:
        """Raise if the score cannot work with these optimizers, and say which state cannot be zeroed. Sites that wait
        for a first gradient are given time."""
        none_yet = not any(map(self.has_state, self.sites))
        for site in self.sites:
            if none_yet or self.has_state(site):
                self.of(site)
        self._check_zeroed()

    def _check_zeroed(self) -> None:
        """Refuse state of a kind that cannot be written, warn about codes of unknown meaning."""
        for site in self.sites:
            optimizer, state, _ = self._own(site)
            shaped = {k: t for k, t in state.items() if isinstance(t, Tensor) and t.shape == site.parameter.shape}
            plain, coded = self.members(site)
            opaque = [k for k, t in plain.items() if hasattr(t, "__tensor_flatten__")]
            if opaque:
                raise FactError(
                    f"{type(optimizer).__name__} keeps {opaque[0]!r} of {site.name!r} as a"
                    f" {type(local(shaped[opaque[0]])).__name__}, which can neither be read nor zeroed where a weight"
                    " is pruned: it has no dequantize(). Use an optimizer that keeps its state as plain tensors."
                )
            unknown = [
                key for key, t in shaped.items() if not t.is_floating_point() and self._means(site, key) not in coded
            ]
            if unknown:
                kind = f"{type(optimizer).__name__} keeps {', '.join(map(repr, unknown))} as {shaped[unknown[0]].dtype}"
                warnings.warn(
                    f"{kind} codes of a kind Secateur does not know (first seen for {site.name!r}). Pruned weights stay"
                    " zero, but this state of theirs is left as it is. Scores that need no state: magnitude, movement,"
                    " displacement.",
                    stacklevel=4,
                )
                return

    def _means(self, site: Prunable, key: str) -> str:
        return self._own(site)[2].get(key, key)

    def of(self, site: Prunable) -> dict[str, Any]:
        """The facts the score reads about this site, or the error that says what is missing and what would work."""
        found = self._available(site)
        missing = [name for name in self._score.needs if name not in found]
        if missing:
            raise FactError(self._explain(site, missing))
        facts = {name: found[name] for name in self._score.needs}
        return {name: fact.read() if isinstance(fact, Coded) else fact for name, fact in facts.items()}

    def _available(self, site: Prunable) -> dict[str, Any]:
        """All there is to be read about this site; codes not yet decoded."""
        state = self._own(site)[1]
        facts: dict[str, Any] = {"weight": local(site.parameter.detach()), "index": None}
        for members in self.members(site):
            facts |= members
        if "step" in state:
            facts["step"] = torch.as_tensor(state["step"]).double()
        facts |= self._betas(site)
        return facts | {fact: tensors[site.name] for fact, tensors in self.kept.items()}

    def _group(self, site: Prunable) -> dict[str, Any]:
        """The site's parameter group as it is now: loading an optimizer's state makes new ones."""
        number, key = self.owner(site), id(site.parameter)
        if not any(self._groups[number].get(key) is group for group in self._optimizers[number].param_groups):
            self._groups[number] = _groups_of(self._optimizers[number])
        return self._groups[number][key]

    def _betas(self, site: Prunable) -> dict[str, float]:
        return dict(zip(("beta1", "beta2"), self._group(site).get("betas", ()), strict=False))

    def _explain(self, site: Prunable, missing: Sequence[str]) -> str:
        optimizer = self._own(site)[0]
        plain, coded = self.members(site)
        kind, keeps = type(optimizer).__name__, ", ".join(sorted([*plain, *coded]))
        if not self.stepped and not any(map(self.has_state, self.sites)):
            found = f"{kind} has no state yet: it appears with the first optimizer.step()"
        elif not self.has_state(site) and any(map(self.has_state, self.sites)):
            found = f"{kind} has no state for {site.name!r}, which has had no gradient yet: leave it out with skip=..."
        else:
            found = f"{kind} keeps {keeps or 'nothing shaped like the weights'}"
            found += f" for {self._listed(missing)}" if len(self._optimizers) > 1 else ""
        # What all sites have, whichever optimizer trains them.
        known = [one for one in self.sites if self.has_state(one)] or [site]
        here = set.intersection(*({*self._available(one)} for one in known)) | set(KEPT_FACTS)
        work = [name for name in scores() if set(resolve(name).needs) <= here]
        return f"{self._score.name} needs {', '.join(missing)}; {found}. Scores that work here: {', '.join(work)}."

    def _listed(self, missing: Sequence[str]) -> str:
        """The sites that lack one of these facts, by name."""
        names = [repr(site.name) for site in self.sites if not {*missing} <= self._available(site).keys()]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _moves(self, number: int) -> Iterator[tuple[str, Tensor, Tensor, int]]:
        """Name, weight, gradient and sign of every site that this optimizer is about to move."""
        scale = getattr(self._optimizers[number], "grad_scale", None)  # a fused optimizer is handed scaled gradients
        for site in self.sites:
            if self.owner(site) == number and site.parameter.grad is not None:
                gradient = local(site.parameter.grad).float()
                gradient = gradient if scale is None else gradient / scale
                weight = local(site.parameter.detach()).float()
                yield site.name, weight, gradient, 1 if self._group(site).get("maximize") else -1

    @torch.no_grad()
    def accumulate_movement(self, number: int) -> None:
        """Add -w g of the step this optimizer is about to take to the movement sums."""
        for name, weight, gradient, sign in self._moves(number):
            self.kept["movement_sum"][name].addcmul_(weight, gradient, value=sign)

    @torch.no_grad()
    def note_movement(self, number: int) -> None:
        """Note -w g as a closure has just left it, in place of what it left before: only its last evaluation counts."""
        for name, weight, gradient, sign in self._moves(number):
            self._pending[name] = torch.mul(weight, gradient).mul_(sign)

    def settle_movement(self, number: int, taken: bool) -> None:
        """Add what a closure left at last to the movement sums, if the step was taken."""
        for site in self.sites if self._pending else ():
            moved = self._pending.pop(site.name, None) if self.owner(site) == number else None
            if moved is not None and taken:
                self.kept["movement_sum"][site.name].add_(moved)

    def target(self, site: Prunable, alive: Tensor, dead: int, peers: Peers) -> Target:
        """The site as a selection sees it: scores evaluated on demand from the facts of this process's part."""
        return target_of(site, self._score, self.of(site), alive, dead, peers)


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def target_of(
    site: Prunable,
    score: Score,
    facts: Mapping[str, Any],
    alive: Tensor,
    dead: int,
    peers: Peers = ALONE,
    spared: Tensor | None = None,
) -> Target:
    """A site as a selection sees it. `spared` is about matrices that no inputs reached: see `kept_last`."""
    part, whole = local(site.parameter.detach()), site.parameter.shape
    first = site.start + placement(site.parameter).first_row * whole[1:].numel()
    evaluate = evaluator(score, facts, first, part.device)
    evaluate = one_a_row(evaluate, part) if site.fragile else evaluate
    tensors = [fact for name, fact in facts.items() if isinstance(fact, Tensor) and name not in SCALAR_FACTS]
    here = all(fact.device == part.device for fact in tensors)  # or else on the host, for want of room
    piece = ScoredTensor(
        site.name,
        part.numel(),
        whole.numel(),
        evaluate if spared is None else kept_last(evaluate, spared, part),
        part.device,
        alive.view(-1) if dead else None,
        replicated=peers.size > 1 and not is_sharded(site.parameter),
        source=(score, facts) if spared is None and here and not site.fragile else None,
        dead=dead,
    )
    return Target(piece, tuple(part.shape), tuple(whole), site.layout)


def one_a_row(evaluate: Callable[[Where], Tensor], weight: Tensor) -> Callable[[Where], Tensor]:
    """Scores in which the largest weight along every dimension ranks above all others, so that no row goes whole."""
    sizes = weight.abs()
    largest = torch.zeros_like(weight, dtype=torch.bool)
    for dim in range(weight.ndim):
        rows = sizes.movedim(dim, 0)
        best = rows.flatten(1).argmax(1, keepdim=True)
        chosen = torch.zeros(len(rows), rows[0].numel(), dtype=torch.bool, device=weight.device).scatter_(1, best, True)
        largest |= chosen.view(rows.shape).movedim(0, dim)
    flat = largest.reshape(-1)
    return lambda where: evaluate(where).masked_fill(flat_part(flat, where), UNREACHED)


def spared_share(asked: float, unreached: int, total: int) -> float:
    """The share of unreached weights that is kept before all others: all of them, unless those that inputs did reach
    would then keep less than half of what they keep at the asked sparsity."""
    reached = total - unreached
    excess = asked * total - reached * (1 + asked) / 2
    return 1 - max(0.0, excess) / unreached


def least_spared(matrices: Tensor, reached: Tensor, share: float) -> Tensor:
    """The magnitude from which on weights of each unreached matrix are spared, so that about `share` of them are; NaN
    for matrices that were reached. `matrices` is `[matrices, weights]`."""
    floors = torch.full((len(matrices),), torch.nan, dtype=torch.float32, device="cpu")
    for number in (~reached).nonzero().flatten().tolist():
        sample = matrices[number][:: max(1, matrices.shape[1] // SAMPLE)].float().abs()
        rank = round((1 - share) * sample.numel())
        floors[number] = float(sample.kthvalue(rank).values) if rank else 0.0
    return floors


def kept_last(evaluate: Callable[[Where], Tensor], floors: Tensor, weight: Tensor) -> Callable[[Where], Tensor]:
    """Scores in which unreached matrices rank above all others from their floor on, and below all others under it, by
    magnitude. Matrices whose floor is NaN keep their scores."""
    spread = floors.to(weight.device).view(-1, *[1] * (weight.ndim - 1)).expand(weight.shape)

    def score(where: Where) -> Tensor:
        found, size, floor = evaluate(where), flat_part(weight, where).float().abs(), flat_part(spread, where)
        ranked = torch.where(size >= floor, UNREACHED * (1 + size / (1 + size)), size / UNREACHED)
        return torch.where(floor.isnan(), found, ranked)

    return score


def evaluator(score: Score, facts: Mapping[str, Any], first: int, device: torch.device) -> Callable[[Where], Tensor]:
    """A function from places to fp32 scores. `first` is the model-wide index of the first place."""

    def evaluate(where: Where) -> Tensor:
        values: dict[str, Any] = {}
        for name, fact in facts.items():
            if name in SCALAR_FACTS:
                values[name] = fact
            elif name == "index":
                numbers = torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where
                values[name] = numbers.to(device) + first
            else:
                values[name] = sent(flat_part(fact, where), device).float()
        return score(**values).float()

    return evaluate
