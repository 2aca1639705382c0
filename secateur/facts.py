"""Facts: what a score may read about a weight, from the optimizer's state or kept on purpose, and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.errors import FactError
from secateur.pieces import Piece, Where, flat_part, sent
from secateur.registry import SCALAR_FACTS, Score, resolve, scores
from secateur.shards import ALONE, Peers, is_sharded, local, placement
from secateur.sites import Site
from secateur.targets import Target

UNREACHED = 2.0**126  # at least this is the score of a weight that no inputs reached
SAMPLE = 1 << 20  # weights of a matrix that are sorted to find how small the smallest are
KEPT_FACTS = ("initial_weight", "movement_sum")  # those no optimizer has; kept only for a score that reads them


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler told a fused optimizer, which checks for itself, to leave everything as it is."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


class Facts:
    """Everything known about the sites of one optimizer: weights, its state and betas, and the kept facts."""

    def __init__(self, optimizer: torch.optim.Optimizer, score: Score, sites: Sequence[Site]) -> None:
        self._optimizer, self._score = optimizer, score
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self.sites = [site for site in sites if id(site.parameter) in self._groups]
        self.stepped = False  # whether the optimizer has taken a step
        self.kept: dict[str, dict[str, Tensor]] = {fact: {} for fact in KEPT_FACTS if fact in score.needs}
        for fact, tensors in self.kept.items():
            for site in self.sites:
                weight = local(site.parameter.detach())
                zeros = torch.zeros_like(weight, dtype=torch.float32)
                tensors[site.name] = weight.clone() if fact == "initial_weight" else zeros

    def state(self, site: Site) -> dict[str, Tensor]:
        """The optimizer's float tensors that are shaped like the weight: this process's part of each."""
        state = self._optimizer.state.get(site.parameter, {})
        shape = site.parameter.shape
        return {
            key: local(t)
            for key, t in state.items()
            if isinstance(t, Tensor) and t.ndim and t.shape == shape and t.is_floating_point()
        }

    def kept_of(self, site: Site) -> list[Tensor]:
        """The facts kept on purpose about this site."""
        return [tensors[site.name] for tensors in self.kept.values()]

    def has_state(self, site: Site) -> bool:
        """Whether the optimizer keeps anything for this site; it does once the site has had a gradient."""
        return bool(self._optimizer.state.get(site.parameter))

    def check(self) -> None:
        """Raise if the score cannot work with this optimizer. Sites that wait for a first gradient are given time."""
        none_yet = not any(map(self.has_state, self.sites))
        for site in self.sites:
            if none_yet or self.has_state(site):
                self.of(site)

    def of(self, site: Site) -> dict[str, Any]:
        """The facts the score reads about this site, or the error that says what is missing and what would work."""
        state = self._optimizer.state.get(site.parameter, {})
        facts: dict[str, Any] = {"weight": local(site.parameter.detach()), "index": None, **self.state(site)}
        if "step" in state:
            facts["step"] = torch.as_tensor(state["step"]).double()
        if {"beta1", "beta2"} & set(self._score.needs):
            facts |= self._betas(site)
        facts |= {fact: tensors[site.name] for fact, tensors in self.kept.items()}
        missing = [name for name in self._score.needs if name not in facts]
        if missing:
            raise FactError(self._explain(site, missing, facts))
        return {name: facts[name] for name in self._score.needs}

    def _group(self, site: Site) -> dict[str, Any]:
        """The site's parameter group as it is now: loading an optimizer's state makes new ones."""
        group = self._groups.get(id(site.parameter))
        if not any(group is current for current in self._optimizer.param_groups):
            self._groups = {id(p): current for current in self._optimizer.param_groups for p in current["params"]}
        return self._groups[id(site.parameter)]

    def _betas(self, site: Site) -> dict[str, float]:
        return dict(zip(("beta1", "beta2"), self._group(site).get("betas", ()), strict=False))

    def _explain(self, site: Site, missing: Sequence[str], facts: Mapping[str, Any]) -> str:
        kind, keeps = type(self._optimizer).__name__, ", ".join(sorted(self.state(site)))
        if not self.stepped and not any(self._optimizer.state.values()):
            found = f"{kind} has no state yet: it appears with the first optimizer.step()"
        elif not self.has_state(site) and any(map(self.has_state, self.sites)):
            found = f"{kind} has no state for {site.name!r}, which has had no gradient yet: leave it out with skip=..."
        else:
            found = f"{kind} keeps {keeps or 'nothing shaped like the weights'}"
        here = facts.keys() | set(KEPT_FACTS) | self._betas(site).keys()
        work = [name for name in scores() if set(resolve(name).needs) <= here]
        return f"{self._score.name} needs {', '.join(missing)}; {found}. Scores that work here: {', '.join(work)}."

    @torch.no_grad()
    def accumulate_movement(self, closure: Any) -> None:
        """Add -w g of the step about to be taken to the movement sums."""
        if closure is not None:
            raise FactError(
                f"{self._score.name} reads gradients before optimizer.step(), but a closure makes them inside it."
                " Compute the loss and call backward() first, or use another score."
            )
        scale = getattr(self._optimizer, "grad_scale", None)  # a fused optimizer is handed scaled gradients
        for site in self.sites:
            if site.parameter.grad is not None:
                gradient = local(site.parameter.grad).float()
                gradient = gradient if scale is None else gradient / scale
                weight = local(site.parameter.detach()).float()
                sign = 1 if self._group(site).get("maximize") else -1
                self.kept["movement_sum"][site.name].addcmul_(weight, gradient, value=sign)

    def target(self, site: Site, alive: Tensor, dead: int, peers: Peers) -> Target:
        """The site as a selection sees it: scores evaluated on demand from the facts of this process's part."""
        return target_of(site, self._score, self.of(site), alive, dead, peers)


def target_of(
    site: Site,
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
    tensors = [fact for name, fact in facts.items() if isinstance(fact, Tensor) and name not in SCALAR_FACTS]
    here = all(fact.device == part.device for fact in tensors)  # or else on the host, for want of room
    piece = Piece(
        site.name,
        part.numel(),
        whole.numel(),
        evaluate if spared is None else kept_last(evaluate, spared, part),
        part.device,
        alive.view(-1) if dead else None,
        replicated=peers.size > 1 and not is_sharded(site.parameter),
        source=(score, facts) if spared is None and here else None,
        dead=dead,
    )
    return Target(piece, tuple(part.shape), tuple(whole), site.layout)


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
