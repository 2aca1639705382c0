"""Masks of n:m patterns in fewer bits than one a weight, exact to the bit.

A row of a mask is cut into groups of m bits. If no group keeps more than n, a group is one of
C(m, 0) + ... + C(m, n) numbers, and its rank among these in ascending order takes fewer bits than m: 12 instead of 16
for 4:16, 8 for 2:16, 5 for 1:16. Groups may keep fewer than n, so nothing is padded. At 2:4 and 8:16 the rank is as
long as the group, and the mask stays as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from secateur.selection import masks

SIZES = (4, 8, 16)  # of the groups that are tried
Groups = tuple[int, int]  # n, m
PART = 1 << 22  # weights at a time, since ranks take many bytes a weight before they are packed


def bits(groups: Groups) -> int:
    """Bits of the rank of a group of m that keeps at most n."""
    n, m = groups
    return (sum(math.comb(m, kept) for kept in range(n + 1)) - 1).bit_length()


def valid(groups: object) -> bool:
    """Whether this is n and m of groups that can be stored."""
    if not isinstance(groups, list | tuple) or len(groups) != 2 or not all(type(one) is int for one in groups):
        return False
    n, m = groups
    return m in SIZES and 0 <= n < m


def stored_shape(rows: int, columns: int, groups: Groups) -> tuple[int, int]:
    """The shape of the ranks of a weight, as bytes."""
    return rows, -(-(-(-columns // groups[1]) * bits(groups)) // 8)


def shortest(mask: Tensor, columns: int) -> Groups | None:
    """The groups whose ranks take the fewest bytes, or None if the mask itself does. `mask` is what `masks.pack`
    made of rows of `columns` weights. A size of groups is dropped at the first rows whose ranks would not be
    shorter."""
    most = dict.fromkeys(SIZES, 0)  # ones in a group, by size
    for part in mask.split(_rows(columns)):
        for m in list(most):
            found = _grouped(part, columns, m)
            most[m] = max(most[m], int(_ones(m).to(mask.device)[found].max()) if found.numel() else 0)
            if most[m] == m or _bytes(mask, columns, (most[m], m)) >= mask.nbytes:
                del most[m]
        if not most:
            return None
    return min(((n, m) for m, n in most.items()), key=functools.partial(_bytes, mask, columns), default=None)


def _bytes(mask: Tensor, columns: int, groups: Groups) -> int:
    """Bytes that the ranks of a mask take."""
    return math.prod(stored_shape(mask.shape[0], columns, groups))


def encode(mask: Tensor, columns: int, groups: Groups) -> Tensor:
    """The ranks of all groups, bit by bit, row by row: uint8 of `stored_shape`."""
    return torch.cat([_encode(part, columns, groups) for part in mask.split(_rows(columns))])


def _encode(mask: Tensor, columns: int, groups: Groups) -> Tensor:
    ranks = torch.searchsorted(_table(groups).to(mask.device), _grouped(mask, columns, groups[1]).contiguous())
    places = torch.arange(bits(groups), device=mask.device)
    return masks.pack(((ranks.unsqueeze(-1) >> places) & 1).flatten(1).bool())


def decode(stored: Tensor, columns: int, groups: Groups) -> Tensor | None:
    """The mask that `encode` was given; None if a rank is too large, as in a damaged file."""
    parts = [_decode(part, columns, groups) for part in stored.split(_rows(columns))]
    whole = [part for part in parts if part is not None]
    return torch.cat(whole) if len(whole) == len(parts) else None


def _decode(stored: Tensor, columns: int, groups: Groups) -> Tensor | None:
    count, width, table = -(-columns // groups[1]), bits(groups), _table(groups).to(stored.device)
    found = masks.unpack(stored, (stored.shape[0], count * width)).view(stored.shape[0], count, width)
    ranks = (found << torch.arange(width, device=stored.device)).sum(-1)
    if ranks.numel() and int(ranks.max()) >= table.numel():
        return None
    return _ungrouped(table[ranks], columns, groups[1])


def mask_of(stored: Tensor, shape: Sequence[int], groups: Groups) -> tuple[Tensor, str]:
    """The mask of a weight from the groups in a file, and what is wrong with them, in words; empty if nothing is."""
    rows, columns = shape[0], math.prod(shape[1:])
    if stored.dtype != torch.uint8 or stored.shape != stored_shape(rows, columns, groups):
        return stored, f"its groups are {stored.dtype} {list(stored.shape)}, which does not fit {list(shape)}"
    found = decode(stored, columns, groups)
    return (stored, f"its groups are not of {groups[0]}:{groups[1]}") if found is None else (found, "")


def _rows(columns: int) -> int:
    """Rows at a time."""
    return max(1, PART // max(1, columns))


def _grouped(mask: Tensor, columns: int, m: int) -> Tensor:
    """The groups of a mask as numbers, int64 [rows, ceil(columns / m)]; the last group of a row may be shorter."""
    numbers = mask.long()
    if m == 16:
        padded = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
        return padded[:, ::2] | padded[:, 1::2] << 8
    if m == 4:
        return torch.stack([numbers & 15, numbers >> 4], -1).flatten(1)[:, : -(-columns // 4)]
    return numbers


def _ungrouped(numbers: Tensor, columns: int, m: int) -> Tensor:
    """The mask whose groups are these numbers."""
    width = -(-columns // 8)
    if m == 16:
        numbers = torch.stack([numbers & 255, numbers >> 8], -1).flatten(1)[:, :width]
    if m == 4:
        padded = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
        numbers = padded[:, ::2] | padded[:, 1::2] << 4
    return numbers.to(torch.uint8)


@functools.cache
def _ones(m: int) -> Tensor:
    """The number of ones in every number of m bits. On the CPU: transformers loads models with meta as the default."""
    numbers, places = torch.arange(1 << m, device="cpu"), torch.arange(m, device="cpu")
    return ((numbers.unsqueeze(1) >> places) & 1).sum(1)


@functools.cache
def _table(groups: Groups) -> Tensor:
    """All numbers of m bits with at most n ones, in ascending order."""
    n, m = groups
    return torch.nonzero(_ones(m) <= n).flatten()
