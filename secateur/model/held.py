"""Masks held beside the weights of a model: as bits where kernels read them, as bools elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from secateur import kernels
from secateur.selection.bits import as_bool, to_bits


class Held:
    """The masks of some weights as this process holds them, and how many weights each removes here."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
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
        """A mask as bools in its weight's shape: the one that is held, or made from its bits."""
        return as_bool(self.masks[number], self.shapes[number])

    def take(self, masks: Sequence[Tensor], kept: Sequence[int] | None = None) -> None:
        """Hold these flat masks from now on. Bools are written where the old ones are, so views of them stay good."""
        if self.packed:
            self.masks = list(masks)
        else:
            for mine, mask in zip(self.masks, masks, strict=True):
                mine.copy_(mask.view(mine.shape))
        counts = kernels.population(self.masks) if kept is None else kept
        self.dead = [shape.numel() - count for shape, count in zip(self.shapes, counts, strict=True)]

    def returning(self, masks: Sequence[Tensor]) -> list[int]:
        """How many weights that are gone would come back with each of these flat masks."""
        return kernels.population([mask & ~mine.view(-1) for mine, mask in zip(self.masks, masks, strict=True)])


def _all_kept(weight: Tensor, packed: bool) -> Tensor:
    whole = torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
    return to_bits(whole.view(-1)) if packed else whole


class Masks(Mapping[str, Tensor]):
    """Bool masks by name, each made from its bits when it is asked for."""

    def __init__(self, names: Sequence[str], held: Held) -> None:
        self._held = dict(zip(names, zip(held.masks, held.shapes, strict=True), strict=True))

    def __getitem__(self, name: str) -> Tensor:
        return as_bool(*self._held[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)
