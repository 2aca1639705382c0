"""Pieces: a tensor as a selection sees it, flat and in chunks, with scores ordered through their float bits."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from secateur.selection.bits import from_bits

Where = slice | Tensor  # a flat range, or flat indices


class Peers:
    """The processes that hold the shards of one model. This class is a single process; `model.distributed` has the one
    for several."""

    rank, size = 0, 1
    bytes_sent = 0  # what this process has handed to the network

    def sum(self, counts: Tensor) -> Tensor:
        """Elementwise sum of an integer tensor over all peers."""
        return counts

    def totals(self, counts: Sequence[int]) -> list[int]:
        """The same for plain numbers."""
        return list(counts)


ALONE = Peers()

CHUNK = 1 << 19  # scores evaluated at a time: 2 MiB of fp32, small enough to stay in cache between operations

LOWEST_KEY, HIGHEST_KEY = -0x7F800001, 0x7F800000  # of -inf and +inf; NaN lies outside
DEAD_KEY = LOWEST_KEY - 1  # of a weight that does not compete: below all that do, outside every bracket


def sent(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """The tensor on a device, without waiting for it: a device does one thing after another. The host does not, and is
    waited for, or it would read what lay in that memory before."""
    return tensor.to(device, copy=copy, non_blocking=device.type != "cpu")


def flat_part(tensor: Tensor, where: Where) -> Tensor:
    """Some places of a tensor in flat order. Only a part is copied when the tensor is strided or expanded."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat[where] if isinstance(where, slice) else flat.index_select(0, where.to(tensor.device))
    if isinstance(where, Tensor):
        return tensor[torch.unravel_index(where, tensor.shape)]
    width = tensor[0].numel()
    first = where.start // width
    rows = tensor[first : -(-where.stop // width)].reshape(-1)
    return rows[where.start - first * width : where.stop - first * width]


def keys_of(scores: Tensor) -> Tensor:
    """int32 keys in the order of the fp32 scores; -0.0 equals 0.0."""
    bits = (scores + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def at_least(scores: Tensor, bound: float, out: Tensor, buffer: Tensor) -> Tensor:
    """`scores >= bound` into a bool tensor, by way of a float buffer: on CPUs torch compares into floats three times
    as fast as into bools, and copying floats to bools is quick."""
    return out.copy_(torch.ge(scores, bound, out=buffer))


def at_most(scores: Tensor, bound: float, out: Tensor, buffer: Tensor) -> Tensor:
    """`scores <= bound`, likewise."""
    return out.copy_(torch.le(scores, bound, out=buffer))


def _words(flags: Tensor) -> Tensor:
    """A flat bool tensor, eight to an int64."""
    if not flags.numel():  # one of NumPy's has a stride of 0, which cannot be viewed
        return torch.empty(0, dtype=torch.int64, device=flags.device)
    if flags.numel() % 8 or flags.storage_offset() % 8:
        flags = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).clone()
    return flags.view(torch.int64)


def count_of(flags: Tensor) -> int:
    """How many are True. One product adds the eight bytes of a word into its top byte; `count_nonzero` takes thrice as
    long."""
    parts = flags.split(CHUNK)
    return sum(int((_words(part) * 0x0101010101010101).bitwise_right_shift_(56).sum()) for part in parts)


def places_of(sparse: Tensor) -> Tensor:
    """Where a flat bool tensor that is mostly False is True: `nonzero` over words of eight, then inside those."""
    words = _words(sparse)
    found = words.nonzero().flatten()
    inside = words.index_select(0, found).view(torch.bool).nonzero().flatten()
    return found.index_select(0, inside >> 3).mul_(8).add_(inside & 7)


def values_of(keys: Tensor) -> Tensor:
    """The fp32 scores that keys stand for."""
    bits = keys.to(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def value_of(key: int) -> float:
    """The fp32 score one key stands for."""
    bits = key & 0xFFFFFFFF
    value: float = struct.unpack("f", struct.pack("I", bits ^ 0x7FFFFFFF if bits >> 31 else bits))[0]
    return value


def without_lowest(keys: Tensor, count: int) -> Tensor:
    """True for all but the `count` lowest keys of each row, ties by position; dead weights are never True."""
    alive = keys != DEAD_KEY
    if count == 0:
        return alive
    cut = keys.kthvalue(count, dim=1, keepdim=True).values
    equal = keys == cut
    wanted = count - (keys < cut).sum(1, keepdim=True)
    return ((keys > cut) | (equal & (equal.cumsum(1) > wanted))) & alive


@dataclass(frozen=True)
class Piece:
    """One tensor's part in a selection, as this process sees it."""

    name: str
    numel: int  # here
    total: int  # over all peers
    score: Callable[[Where], Tensor]
    device: torch.device
    alive: Tensor | None = None  # flat mask, bool or packed to bits; weights that do not compete are False
    replicated: bool = False  # every peer holds all of it; only the first counts it
    source: tuple[Any, Mapping[str, Any]] | None = None  # the Score and its facts, for kernels that know the formula
    dead: int | None = None  # how many here do not compete, if that is known already

    def counted(self, peers: Peers) -> bool:
        return not self.replicated or peers.rank == 0

    def unpacked(self) -> Piece:
        """The same with its mask as bools, which is what torch can index."""
        if self.alive is None or self.alive.dtype == torch.bool:
            return self
        return replace(self, alive=from_bits(self.alive, self.numel))

    def chunks(self) -> Iterable[slice]:
        return (slice(start, min(start + CHUNK, self.numel)) for start in range(0, self.numel, CHUNK))

    def living(self, where: Where | None = None) -> int:
        """How many weights compete, here or in one part of here."""
        if where is None and self.dead is not None:
            return self.numel - self.dead
        if self.alive is not None:
            return count_of(self.alive if where is None else self.alive[where])
        return self.numel if where is None else where.stop - where.start if isinstance(where, slice) else where.numel()

    def keys(self, where: Where, scores: Tensor | None = None) -> Tensor:
        """Keys in the order of the scores (evaluated unless given), dead weights below all others."""
        keys = keys_of(self.score(where) if scores is None else scores)
        return keys if self.alive is None else keys.masked_fill_(~self.alive[where], DEAD_KEY)

    def spoiled(self, where: Where, scores: Tensor) -> int:
        """How many of these scores are NaN and belong to a living weight."""
        if not scores.numel() or not scores.amax().isnan():
            return 0
        nan = scores.isnan()
        return int((nan if self.alive is None else nan & self.alive[where]).count_nonzero())
