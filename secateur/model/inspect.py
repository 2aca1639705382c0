"""What the zeros of saved or loaded weights look like: how many, in which patterns, and what they could save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.errors import StateError
from secateur.selection.masks import packed_bytes

GROUPS = (4, 8, 16)  # sizes of n:m groups looked for
LARGEST_BLOCK = 128
NEARLY_ALL = 0.999  # share of the zeros that must fit a pattern; a few weights are zero by chance


@dataclass(frozen=True)
class Inspected:
    """One weight tensor: its zeros, their patterns, and how they agree with a mask."""

    name: str
    shape: tuple[int, ...]
    numel: int
    zeros: int
    patterns: tuple[str, ...]
    dense_bytes: int
    packed_bytes: int  # a bit mask and the values that are not zero
    returned: int | None  # weights the mask says are gone that are not zero; None without a mask
    unmasked: int | None  # zeros the mask says are kept

    @property
    def sparsity(self) -> float:
        return self.zeros / self.numel if self.numel else 0.0


def inspect_tensors(
    tensors: Iterable[tuple[str, Tensor]], masks: Mapping[str, Tensor] | None = None
) -> tuple[list[Inspected], int, list[str]]:
    """Inspect every floating-point tensor of two or more dimensions; also gives the number of weights left out, and the
    names of masks that no tensor of the same name and shape was compared with.

    Tensors may come one at a time, so that a model larger than memory can be read from its files.
    """
    masks = {} if masks is None else masks
    found, left_out, compared = [], 0, set()
    for name, weight in tensors:
        if weight.ndim < 2 or not weight.is_floating_point() or not weight.numel():
            left_out += weight.numel()
            continue
        mask = masks.get(name)
        fits = mask is not None and mask.shape == weight.shape
        compared |= {name} if fits else set()
        found.append(inspect_tensor(name, weight, mask if fits else None))
    return found, left_out, sorted(masks.keys() - compared)


@torch.no_grad()
def inspect_tensor(name: str, weight: Tensor, mask: Tensor | None = None) -> Inspected:
    """Zeros, patterns and sizes of one weight; `mask` is True where a weight is kept."""
    if mask is not None and mask.shape != weight.shape:
        raise StateError(f"The mask of {name} is {list(mask.shape)}, its weight {list(weight.shape)}.")
    kept = weight != 0
    zeros = weight.numel() - int(kept.sum())
    return Inspected(
        name, tuple(weight.shape), weight.numel(), zeros, patterns(kept), weight.nbytes,
        packed_bytes(weight.shape) + (weight.numel() - zeros) * weight.element_size(),
        None if mask is None else int((kept & ~mask).sum()),
        None if mask is None else int((~kept & mask).sum()),
    )  # fmt: skip


def patterns(kept: Tensor) -> tuple[str, ...]:
    """The patterns that nearly all zeros fit, such as "2:4", "rows" or "block:16x16"; `kept` is True off the zeros.

    Rows are along dimension 0 and inputs along dimension 1, as in nn.Linear and convolutions. n:m groups are also
    looked for along dimension 0, where GPT-2's Conv1D has its inputs.
    """
    zeros = kept.numel() - int(kept.sum())
    if not zeros:
        return ()
    if zeros == kept.numel():
        return ("all zero",)
    found = [groups_of(kept.movedim(1, -1))]
    if kept.ndim == 2 and not found[0]:
        turned = groups_of(kept.T)
        found.append(f"{turned} along dimension 0" if turned else "")
    whole_rows = int((~kept.flatten(1).any(1)).sum()) * kept[0].numel()
    whole_columns = int((~kept.transpose(0, 1).flatten(1).any(1)).sum()) * (kept.numel() // kept.shape[1])
    if whole_rows >= NEARLY_ALL * zeros:
        found.append("rows")
    elif whole_columns >= NEARLY_ALL * zeros:
        found.append("columns")
    elif kept.ndim == 2:
        found.append(largest_block(kept, zeros))
    return tuple(filter(None, found))


def groups_of(kept: Tensor) -> str:
    """ "n:m" if nearly every group of m along the last dimension keeps exactly n and none keeps more, else ""."""
    for size in GROUPS:
        if kept.shape[-1] % size:
            continue
        counts = kept.unflatten(-1, (-1, size)).sum(-1)
        most = int(counts.max())
        if 0 < most < size and float((counts == most).float().mean()) >= NEARLY_ALL:
            return f"{most}:{size}"
    return ""


def largest_block(kept: Tensor, zeros: int) -> str:
    """ "block:RxC", the largest block of powers of two such that nearly all zeros lie in blocks that are all zero."""
    best, area = "", 1
    rows, tall = 1, kept
    while True:
        columns, wide = 1, tall
        while True:
            inside = int((~wide).sum()) * rows * columns
            if rows * columns > area and inside >= NEARLY_ALL * zeros:
                best, area = f"block:{rows}x{columns}", rows * columns
            if columns >= LARGEST_BLOCK or wide.shape[1] % 2:
                break
            columns, wide = columns * 2, wide.unflatten(1, (-1, 2)).any(2)
        if rows >= LARGEST_BLOCK or tall.shape[0] % 2:
            return best
        rows, tall = rows * 2, tall.unflatten(0, (-1, 2)).any(1)
