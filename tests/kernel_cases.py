"""Cases for the kernels, run by the interpreter on the CPU (test_kernels.py) and by a GPU (test_gpu.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import secateur as sc
from secateur.kernels import reference, select
from secateur.kernels.reference import AdamWTensors, Hyper
from secateur.scores import resolve
from secateur.selection.exact import ALONE, ScoredTensor, evaluator, prune_exactly
from secateur.selection.masks import as_bool, to_bits

FUSED = ("magnitude", "bitter0", "bitter3", "bitter6", "bitter7", "bitter8", "variance(q=3/8)", "fisher", "wanda")
SIZES = (4096 * 2 + 33, 1, 16 * 130, 5000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Change = Callable[[dict[str, Tensor]], None]


def pieces_for(
    score: str,
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    weight: torch.dtype = torch.float32,
    state: torch.dtype = torch.float32,
    alive: str | None = None,
    change: Change | None = None,
) -> list[ScoredTensor]:
    """Made-up tensors as a selection sees them; `alive` is None, "bool" or "bits"."""
    entry = resolve(score)
    made = []
    for number, size in enumerate(sizes):
        values = {
            "weight": torch.randn(size) * 0.02,
            "exp_avg": torch.randn(size) * 1e-4,
            "exp_avg_sq": (torch.randn(size) * 3e-5).square(),
            "input_norm": torch.rand(size) + 0.5,
        }
        if change is not None:
            change(values)
        facts: dict[str, Any] = {k: v.to(weight if k == "weight" else state).to(device) for k, v in values.items()}
        facts |= {"step": torch.tensor(7.0, dtype=torch.float64), "beta1": 0.9}
        facts = {name: facts[name] for name in entry.needs}
        mask = None
        if alive is not None:
            mask = (torch.rand(size) < 0.7).to(device)
            mask = to_bits(mask) if alive == "bits" else mask
        made.append(
            ScoredTensor(
                str(number), size, size, evaluator(entry, facts, 0, device), device, mask, source=(entry, facts)
            )
        )
    return made


def check_selection(ops: Any, pieces: Sequence[ScoredTensor], share: float, packed: bool, layers: bool = False) -> None:
    """Masks, cuts and counts equal those of the plain selection, to the weight."""
    groups = [[piece] for piece in pieces] if layers else [list(pieces)]
    plain = [[piece.unpacked() for piece in group] for group in groups]
    counts = [int(share * sum(piece.living() for piece in group)) for group in plain]
    cuts, masks, kept = select.prune_groups(ops, groups, counts, ALONE, packed)
    expected = [prune_exactly(group, count) for group, count in zip(plain, counts, strict=True)]
    assert cuts == [cut for cut, _ in expected]
    wanted = [mask for _, found in expected for mask in found]
    for piece, mask, right in zip(pieces, masks, wanted, strict=True):
        assert torch.equal(as_bool(mask, (piece.numel,)), right), piece.name
    assert kept == ([int(right.sum()) for right in wanted] if packed else None)


def ties(values: dict[str, Tensor]) -> None:
    values["weight"].copy_(torch.randint(-2, 3, values["weight"].shape) / 8)
    values["exp_avg_sq"].fill_(0.25)
    values["exp_avg"].fill_(-0.5)


def extremes(values: dict[str, Tensor]) -> None:
    places = torch.randint(0, values["weight"].numel(), (8,))
    values["weight"][places] = torch.tensor([0.0, -0.0, 1e-38, -1e-40, 3e38, torch.inf, -torch.inf, 1e-45])
    values["exp_avg_sq"][places.flip(0)] = torch.tensor([0.0, 1e-38, 1e-42, 3e38, 0.0, 0.0, 1e-12, 1.0])
    values["exp_avg_sq"][values["weight"].isinf()] = 0.5  # infinity times zero would not be a number


def subnormals(values: dict[str, Tensor]) -> None:
    """Every third second moment below 1e-38, with weights so large that some of them must stay."""
    few = values["exp_avg_sq"][::3]
    few.copy_(torch.logspace(-45, -38.5, few.numel(), dtype=torch.float64).float())
    values["weight"][::3] *= 1e7


class Lockstep:
    """Runs every kernel and its twin on copies of the same state, and compares all that either has written."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.called: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "population":
            return self._population
        return lambda *given, **named: self._both(name, given, named)

    def _population(self, masks: Sequence[Tensor]) -> Tensor:
        self.called["population"] = self.called.get("population", 0) + 1
        found: Tensor = self.kernels.population(masks)
        assert found.tolist() == reference.population(masks).tolist()
        return found

    def _both(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.called[name] = self.called.get(name, 0) + 1
        objects = [value for value in given if hasattr(value, "launches") or hasattr(value, "ranges")]
        twins = {id(value): _copied(value) for value in objects}
        getattr(self.kernels, name)(*given, **named)
        getattr(reference, name)(*(twins.get(id(value), value) for value in given), **named)
        for value in objects:
            _compare(name, value, twins[id(value)])


def _copied(value: Any) -> Any:
    twin = copy.copy(value)
    for key, held in vars(value).items():
        if isinstance(held, Tensor):
            setattr(twin, key, held.clone())
    if hasattr(value, "masks"):
        twin.masks = [mask.clone() for mask in value.masks]
    if getattr(value, "totals", None) is getattr(value, "counters", 0):
        twin.totals = twin.counters
    return twin


def _compare(name: str, value: Any, twin: Any) -> None:
    if hasattr(value, "masks"):
        for tensor, a, b in zip(value.tensors, value.masks, twin.masks, strict=True):
            assert torch.equal(as_bool(a, (tensor.numel,)), as_bool(b, (tensor.numel,))), f"{name}: masks"
        return
    for key in ("ranges", "histogram", "counters", "failed", "nan_counts", "tie_counts"):
        assert torch.equal(getattr(value, key), getattr(twin, key)), f"{name}: {key}"
    if value.inside.dtype == torch.int32:  # a careful sweep has counted there
        assert torch.equal(value.inside, twin.inside), f"{name}: inside"
    for group in range(value.groups):
        for column, memory in ((reference.WORDS, ("words",)), (reference.LISTED, ("positions", "keys"))):
            place = reference._collected(value, group, column)
            mine, theirs = ([getattr(state, part)[place].long() for part in memory] for state in (value, twin))
            order, others = mine[0].argsort(), theirs[0].argsort()  # programs finish in any order
            assert all(torch.equal(a[order], b[others]) for a, b in zip(mine, theirs, strict=True)), f"{name}: {memory}"


def parts_for(
    device: torch.device, parameter: torch.dtype, state: torch.dtype, mask: str | None, hyper: Hyper
) -> Iterator[AdamWTensors]:
    """Parameters of several sizes part way through training."""
    for size in (2048 * 2, 77, 16):
        values = torch.randn(4, size)
        kept = (torch.rand(size) < 0.5).to(device)
        largest = values[3].square().mul(2e-6).to(device, state) if hyper.amsgrad else None
        yield AdamWTensors(
            values[0].mul(0.02).to(device, parameter),
            values[1].mul(1e-3).to(device, parameter),
            values[2].mul(1e-4).to(device, state),
            values[3].square().mul(1e-6).mul(torch.arange(size) % 5 > 0).to(device, state),
            largest,
            torch.tensor(9.0),
            None if mask is None else to_bits(kept) if mask == "bits" else kept,
        )


GROUP = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}


def check_adamw(kernels: Any, device: torch.device, case: dict[str, Any]) -> None:
    """The kernel's step against torch's own.

    Against the fused one (on GPUs), 4 units in the last place, at the size of each number or
    at the root mean square of its tensor, whichever is larger (a small moment is the difference of larger numbers).
    Against foreach, which rounds 1 - beta2 = 0.001 otherwise, 3e-5 of that.
    """
    hyper = Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1, case["maximize"], case["amsgrad"], case["theta"], case["unseen"])
    soft = torch.tensor([0.5, 0.9], device=device) if case["soft"] else None
    fused = device.type == "cuda"
    torch.manual_seed(3)
    mine = list(parts_for(device, case["parameter"], case["state"], case["mask"], hyper))
    torch.manual_seed(3)
    theirs = list(parts_for(device, case["parameter"], case["state"], case["mask"], hyper))
    theirs = [replace(part, step=part.step.to(device)) for part in theirs] if fused else theirs
    gradients = [part.gradient.clone() for part in mine]
    kernels.adamw(mine, hyper, soft)
    reference.adamw(theirs, hyper, {**GROUP, "fused": fused}, soft)
    for a, b, gradient in zip(mine, theirs, gradients, strict=True):
        assert float(a.step) == float(b.step) == 10
        assert torch.equal(a.gradient, gradient), "the user's gradient was written to"
        kept = torch.ones_like(gradient, dtype=torch.bool) if a.mask is None else as_bool(a.mask, gradient.shape)
        for x, y in zip(a.tensors, b.tensors, strict=True):
            unit = 4 * torch.finfo(x.dtype).eps if fused else max(3e-5, 4 * torch.finfo(x.dtype).eps)
            size = y.float().abs().clamp(min=float(y.float().square().mean().sqrt()))
            off = float(((x.float() - y.float()).abs() / size).max()) / unit
            assert off <= 1, (case, x.dtype, off)
            assert bool((x[~kept] == 0).all())
            assert bool((x[kept] != 0).any())


def check_zero(kernels: Any, device: torch.device) -> None:
    """Zeroing leaves everything else as it is, and turns infinity and NaN to zero like anything."""
    for dtype in DTYPES:
        for size in (5000, 4096, 1):
            kept = (torch.rand(size) < 0.5).to(device)
            for mask in (kept, to_bits(kept)):
                tensor = torch.randn(size).to(device, dtype)
                tensor[::7] = torch.inf
                tensor[::11] = torch.nan
                wanted = torch.where(kept, tensor, torch.zeros_like(tensor))
                kernels.zero([tensor], [mask])
                assert torch.equal(tensor.nan_to_num(7), wanted.nan_to_num(7))


def masks_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, **settings: Any) -> sc.Pruner:
    """A Pruner that has followed some steps of training on made-up data."""
    pruner = sc.Pruner(model, optimizer, **settings)
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        inputs = torch.randn(16, first.shape[1], generator=generator).to(first)
        model(inputs).square().mean().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    return pruner
