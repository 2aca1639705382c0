"""The masks of a model: held beside its weights, given to a Pruner, applied to copies, and in a file of their own.

They are held as bits where kernels read them and as bools elsewhere. A file has one bit a weight in safetensors, which
is imported when a file is read or written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from secateur import kernels
from secateur.errors import HF_EXTRA, SiteError, StateError, library, nearest
from secateur.model.distributed import is_sharded, local, part_of, unwrap
from secateur.model.prunable import LeftOut, Prunable, find_prunable, parameters_in, plain_name
from secateur.selection.masks import as_bool, can_unpack, pack, to_bits, unpack

logger = logging.getLogger("secateur")

ZEROS = "zeros"
MASKS = "masks.safetensors"
SPARSE = 0.1  # share of exact zeros from which a model counts as pruned
# What happens to tensors that are entirely zero.
HELD = "The other tensors are sparse, so these count as pruned too and stay zero. To train them, name them in skip=..."
TRAINED = (
    "The other tensors are dense, so these count as initialized to zero, not as pruned, and will train. To hold them"
    " too, pass masks by name."
)


class Held:
    """The masks of this process's weights, and how many weights each removes (`dead`)."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        prunables: Sequence[Prunable] = (),
        totals: Callable[[Sequence[int]], Sequence[int]] = list,
    ) -> None:
        """`prunables` are those of the weights, and `totals` sums counts over all processes."""
        self._fragile = [(number, one) for number, one in enumerate(prunables) if one.fragile]
        self._totals = totals
        self.shapes = [weight.shape for weight in weights]
        self.packed = kernels.serves(*weights)
        self.masks = [_all_kept(weight, self.packed) for weight in weights]
        self.dead = [0] * len(weights)

    @property
    def devices(self) -> list[torch.device]:
        return [mask.device for mask in self.masks]

    @property
    def nbytes(self) -> int:
        return sum(mask.nbytes for mask in self.masks)

    def bools(self, number: int) -> Tensor:
        """A mask as bools in its weight's shape: the stored one, or a copy made from bits."""
        return as_bool(self.masks[number], self.shapes[number])

    def stored(self, mask: Tensor) -> Tensor:
        """A bool mask flat and in the form of those held: bits or bools."""
        flat = mask.reshape(-1)
        return to_bits(flat) if self.packed else flat

    def take(self, masks: Sequence[Tensor], kept: Sequence[int] | None = None) -> None:
        """Store these flat masks. Bools are copied into the old ones, so references to them stay valid."""
        self._check_slices(masks)
        if self.packed:
            self.masks = list(masks)
        else:
            for mine, mask in zip(self.masks, masks, strict=True):
                mine.copy_(mask.view(mine.shape))
        counts = kernels.population(self.masks) if kept is None else kept
        self.dead = [shape.numel() - count for shape, count in zip(self.shapes, counts, strict=True)]

    def _check_slices(self, masks: Sequence[Tensor]) -> None:
        """Refuse masks that leave nothing of a slice that is divided by its norm: the outputs would be NaN."""
        empty = []
        for number, prunable in self._fragile:
            mask = as_bool(masks[number], self.shapes[number])
            dims = [dim for dim in prunable.fragile if dim == 0 or not is_sharded(prunable.parameter)]
            empty.append(sum(int((~mask.movedim(dim, 0).flatten(1).any(1)).sum()) for dim in dims))
        for (_, prunable), count in zip(self._fragile, self._totals(empty), strict=True):
            if count:
                whole = prunable.parameter.shape
                most = whole.numel() - max(whole[dim] for dim in prunable.fragile)
                raise SiteError(
                    f"{prunable.name!r} cannot be pruned like this: nothing would be left of some of its rows, and"
                    " weight_norm divides each by its norm, which gives NaN. At least one weight of each must stay: at"
                    f" most {most:,} of its {whole.numel():,} weights can go (sparsity {most / whole.numel():.4f}). Ask"
                    " for less, leave it out with skip=..., or remove weight_norm first. No mask was changed."
                )

    def returning(self, masks: Sequence[Tensor]) -> list[int]:
        """How many pruned weights each of these flat masks would bring back."""
        return kernels.population([mask & ~mine.view(-1) for mine, mask in zip(self.masks, masks, strict=True)])


def _all_kept(weight: Tensor, packed: bool) -> Tensor:
    whole = torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
    return to_bits(whole.view(-1)) if packed else whole


class Masks(Mapping[str, Tensor]):
    """Bool masks by name, each made from its bits on access."""

    def __init__(self, names: Sequence[str], held: Held) -> None:
        self._held = dict(zip(names, zip(held.masks, held.shapes, strict=True), strict=True))

    def __getitem__(self, name: str) -> Tensor:
        return as_bool(*self._held[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


# Given to a Pruner


class HasMasks(Protocol):
    """Anything with masks by parameter name: the report of `sc.prune`, another Pruner."""

    @property
    def masks(self) -> Mapping[str, Tensor]: ...


Given = str | os.PathLike[str] | Mapping[str, Tensor] | HasMasks


def given_masks(
    given: Given,
    prunables: Sequence[Prunable],
    left_out: Sequence[LeftOut],
    held: Held,
    over_all: Callable[[Sequence[int]], list[int]],
) -> list[Tensor]:
    """The masks a Pruner is given, for the weights of this process, flat and stored like those it holds.

    `over_all` sums a count for each tensor over all processes.
    """
    if isinstance(given, str) and given == ZEROS:
        return _masks_of_zeros(prunables, held, over_all)
    masks = _masks_in(given)
    names = _names_of(masks, prunables, left_out)
    found = []
    for number, prunable in enumerate(prunables):  # one by one: bools of all weights take much memory
        if prunable.name in names:
            part = part_of(masks[names[prunable.name]], prunable.parameter)
            found.append(held.stored(part.to(held.devices[number])))
        else:
            found.append(held.masks[number].view(-1))  # all kept
    return found


@torch.no_grad()
def _masks_of_zeros(
    prunables: Sequence[Prunable], held: Held, over_all: Callable[[Sequence[int]], list[int]]
) -> list[Tensor]:
    """Masks that remove the weights that are exactly zero.

    A tensor that is entirely zero was pruned so if others are sparse. In a dense model it was initialized so (LoRA's B,
    the last layer of a residual branch) and is kept whole: nothing in it would ever train.
    """
    weights = [local(prunable.parameter.detach()) for prunable in prunables]
    living = over_all([int(weight.count_nonzero()) for weight in weights])
    counts = [(count, prunable.parameter.numel()) for prunable, count in zip(prunables, living, strict=True)]
    others = [(count, size) for count, size in counts if count]
    pruned = sum(count for count, _ in others) < (1 - SPARSE) * sum(size for _, size in others)
    blank = [prunable.name for prunable, count in zip(prunables, living, strict=True) if count == 0]
    if blank:
        logger.warning("%d tensors are entirely zero: %s. %s", len(blank), ", ".join(map(repr, blank[:3])),
                       HELD if pruned else TRAINED)  # fmt: skip
    found = []
    for number, (weight, count) in enumerate(zip(weights, living, strict=True)):
        found.append(held.stored(weight != 0) if count or pruned else held.masks[number].view(-1))
    return found


def _masks_in(given: Any) -> Mapping[str, Tensor]:
    """The bool masks by name in a mapping, in a folder, or in the `masks` of a report or Pruner."""
    if isinstance(given, str | os.PathLike):
        if isinstance(given, str) and not Path(given).is_dir():
            raise StateError(
                f"masks={given!r} is neither 'zeros' nor a folder with saved masks.{nearest(given, [ZEROS])}"
            )
        return load_masks(given)
    found = given if isinstance(given, Mapping) else getattr(given, "masks", None)
    if not isinstance(found, Mapping):
        raise StateError(
            "masks must be 'zeros', a mapping from parameter names to bool tensors, a folder with saved masks, or the"
            f" report of sc.prune; got a {type(given).__name__}. (A Pruner's report has no masks: pass pruner.masks.)"
        )
    if not found:
        raise StateError("masks is an empty mapping, so there is nothing to hold. Pass masks=None.")
    return found


def _names_of(
    masks: Mapping[str, Tensor], prunables: Sequence[Prunable], left_out: Sequence[LeftOut]
) -> dict[str, str]:
    """The name of the mask of each prunable tensor that has one, or an error if a mask fits no tensor."""
    known = {name: prunable for prunable in prunables for name in (prunable.name, *prunable.tied)}
    reasons = {item.name: item.reason for item in left_out}
    found: dict[str, str] = {}
    for given in masks:
        name = plain_name(given)
        prunable = known.get(name) or known.get(name.removeprefix("module."))
        if prunable is None:
            why = f"which is not pruned here: {reasons[name]}" if name in reasons else "which the model does not have"
            hint = "" if name in reasons else nearest(name, known)
            raise StateError(f"There is a mask for {given!r}, {why}.{hint} Leave it out, or pass masks='zeros'.")
        mask = masks[given]
        if not isinstance(mask, Tensor) or (mask.dtype, mask.shape) != (torch.bool, prunable.parameter.shape):
            what = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise StateError(
                f"The mask of {given!r} is {what}; it must be torch.bool {list(prunable.parameter.shape)}, True where a"
                " weight is kept."
            )
        first = found.setdefault(prunable.name, given)
        if first is not given and not torch.equal(masks[first].cpu(), mask.cpu()):
            raise StateError(
                f"{first!r} and {given!r} are one tied weight, and their masks differ. Pass one mask for it, such as"
                " both combined with &."
            )
    return found


def with_given(
    masks: Sequence[Tensor], given: Sequence[Tensor], over_all: Callable[[Sequence[int]], list[int]], strict: bool
) -> list[Tensor]:
    """Loaded flat masks that also remove what the masks given to the Pruner (as bits) do. If `strict`, refuse masks
    that keep a weight which those remove."""
    mine = [
        as_bool(bits, mask.shape) if mask.dtype == torch.bool else bits for bits, mask in zip(given, masks, strict=True)
    ]
    lost = sum(over_all(kernels.population([mask & ~own for mask, own in zip(masks, mine, strict=True)])))
    if strict and lost:
        raise StateError(
            f"The saved masks keep {lost} weights that masks=... of this Pruner removes, so the state is of a run"
            " with other masks. Build the Pruner without masks=... to continue that run, or hold both:"
            " load_state_dict(state, strict=False)."
        )
    return [mask & own for mask, own in zip(masks, mine, strict=True)]


# Applied to copies of the model


@torch.no_grad()
def apply_masks(
    module: nn.Module, masks: Mapping[str, Tensor], tied: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Zero in a copy of the model the weights that these masks remove. If one does not fit, nothing changes.

    `tied` are other names of a weight in the pruned model; a copy that untied them has a tensor under each.
    """
    parameters = parameters_in(_copy_in(module, masks))
    for name, mask in _by_every_name(masks, tied or {}, parameters).items():
        if name not in parameters:
            raise StateError(
                f"{type(module).__name__} has no parameter {name!r}, which is pruned.{nearest(name, parameters)}"
                " apply_to takes a copy of the pruned model: an EMA or SWA model, a deepcopy."
            )
        if parameters[name].shape != mask.shape:
            raise StateError(
                f"{name!r} is {list(parameters[name].shape)} in {type(module).__name__} and {list(mask.shape)} in the"
                " pruned model. apply_to takes a copy of the pruned model."
            )
    for name, mask in _by_every_name(masks, tied or {}, parameters).items():
        weight = local(parameters[name].detach())
        weight.masked_fill_(~part_of(mask, parameters[name]).to(weight.device), 0)


def _by_every_name(
    masks: Mapping[str, Tensor], tied: Mapping[str, Sequence[str]], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The masks also under those tied names that are tensors of their own in the copy."""
    own = {
        other: mask
        for name, mask in masks.items()
        for other in tied.get(name, ())
        if other in parameters and parameters[other] is not parameters.get(name)
    }
    return {**masks, **own}


def _copy_in(module: nn.Module, names: Mapping[str, Any]) -> nn.Module:
    """The copy inside wrappers that have it in `.module`, such as AveragedModel, DDP and the EMA classes of timm."""
    if not isinstance(module, nn.Module):
        raise StateError(f"apply_to takes a module with the pruned model's parameters; got a {type(module).__name__}.")
    module = unwrap(module)
    while not names.keys() <= parameters_in(module).keys() and isinstance(getattr(module, "module", None), nn.Module):
        module = unwrap(module.module)  # type: ignore[arg-type]
    return module


# Files


def save_masks(folder: str | os.PathLike[str], masks: Mapping[str, Tensor]) -> None:
    """Write bool masks by parameter name into a folder."""
    files = library("safetensors.torch", "Saving masks", HF_EXTRA)
    packed = {name: pack(mask).cpu().contiguous() for name, mask in masks.items()}
    shapes = json.dumps({name: list(mask.shape) for name, mask in masks.items()})
    files.save_file(packed, Path(folder) / MASKS, metadata={"format": "pt", "shapes": shapes})


def load_masks(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The bool masks that `save_masks` wrote into a folder; True is kept."""
    files = library("safetensors", "Reading masks", HF_EXTRA)
    path = Path(folder) / MASKS
    if not path.is_file():
        raise StateError(
            f"There is no {MASKS} in {folder}: it was not saved by Secateur, or without its masks. To hold the zeros of"
            " its weights, load them and give the Pruner masks='zeros'."
        )
    try:
        with files.safe_open(path, framework="pt") as opened:
            shapes = json.loads((opened.metadata() or {})["shapes"])
            packed = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except (files.SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise StateError(f"{path} does not hold masks: {error!r}. Save the model again.") from error
    if not isinstance(shapes, dict) or not all(map(_is_shape, shapes.values())):
        raise StateError(f"{path} does not hold masks: its shapes are not lists of sizes. Save the model again.")
    wrong = [name for name in packed if name not in shapes or not can_unpack(packed[name], shapes[name])]
    if wrong or shapes.keys() != packed.keys():
        odd = sorted({*wrong, *(shapes.keys() ^ packed.keys())})
        raise StateError(f"{path} does not fit the shapes it names, at {', '.join(odd[:3])}. Save the model again.")
    return {name: unpack(packed[name], shape) for name, shape in shapes.items()}


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and bool(shape) and all(type(size) is int and size >= 0 for size in shape)


def check_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Refuse masks of parameters that the model does not have, or of other shapes."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, mask in masks.items():
        if name not in shapes:
            raise StateError(f"There is a mask for {name!r}, which is not a parameter of {type(model).__name__}.")
        if mask.dtype != torch.bool or mask.shape != shapes[name]:
            raise StateError(
                f"The mask of {name!r} is {mask.dtype} {list(mask.shape)}; it must be torch.bool {list(shapes[name])}."
            )


def share_of_zeros(model: nn.Module) -> tuple[float, bool]:
    """The share of zeros in the prunable weights, and whether it makes the model sparse. Tensors that are entirely zero
    do not: they may have been initialized so."""
    weights = [one.parameter.detach() for one in find_prunable(model)[0]]
    counts = [(weight.numel() - int(weight.count_nonzero()), weight.numel()) for weight in weights]
    partly = [(zeros, size) for zeros, size in counts if zeros < size]
    sparse = sum(zeros for zeros, _ in partly) > SPARSE * sum(size for _, size in partly)
    return sum(zeros for zeros, _ in counts) / max(1, sum(size for _, size in counts)), sparse
