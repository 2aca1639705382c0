"""Many processes: the shard of a tensor that is here, where it begins, and sums over those who hold the rest.

The only module that knows torch.distributed. Alone, the shard is the tensor and the sum is the identity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.errors import ShardError


class Peers:
    """The processes that hold the shards of one model: my rank among them, how many there are, and their sum."""

    def __init__(self, group: Any = None, device: str = "cpu") -> None:
        self._group, self._device = group, device
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.bytes_sent = 0

    def sum(self, counts: Tensor) -> Tensor:
        """Elementwise sum of an integer tensor over all peers; what each process hands to the network is counted."""
        if self._group is None:
            return counts
        total = counts.to(self._device, copy=True)
        dist.all_reduce(total, group=self._group)
        self.bytes_sent += total.nbytes
        return total.to(counts.device)

    def totals(self, counts: Sequence[int]) -> list[int]:
        """The same for plain numbers."""
        if self._group is None:
            return list(counts)
        return self.sum(torch.tensor(counts, dtype=torch.int64, device="cpu")).tolist()


ALONE = Peers()


@dataclass(frozen=True)
class Placement:
    """Where a tensor's local part sits: `sizes` of every rank's part along dim 0, and this rank's place among them."""

    sizes: tuple[int, ...]
    rank: int

    @property
    def first_row(self) -> int:
        return sum(self.sizes[: self.rank])


def _dtensor_type() -> Any:
    # Importing DTensor takes a third of a second; if nobody has, no tensor can be one.
    module = sys.modules.get("torch.distributed.tensor")
    return module.DTensor if module is not None else ()


def is_sharded(tensor: Tensor) -> bool:
    """Whether this tensor is a DTensor with a part on each of several processes."""
    return isinstance(tensor, _dtensor_type()) and _shard_axis(tensor) is not None


def local(tensor: Tensor) -> Tensor:
    """The part of the tensor this process holds, sharing its memory; the tensor itself when it is not distributed."""
    return tensor.to_local() if isinstance(tensor, _dtensor_type()) else tensor


def _shard_axis(tensor: Any) -> int | None:
    """The mesh axis a DTensor is sharded over, or None when it is only replicated."""
    found = None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate() or tensor.device_mesh.size(axis) == 1:
            continue
        if not (type(placement).__name__ == "Shard" and placement.dim == 0) or found is not None:
            raise ShardError(
                f"A parameter of shape {tuple(tensor.shape)} is placed as {tensor.placements}. Selection serves"
                " tensors sharded along dim 0 over one mesh axis (what fully_shard does, with or without replicas)."
            )
        found = axis
    return found


def placement(tensor: Tensor) -> Placement:
    """How dim 0 is dealt out: DTensor gives each rank ceil(rows / ranks) of them until none are left."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not is_sharded(tensor):
        return Placement((rows,), 0)
    sharded: Any = tensor
    axis = _shard_axis(sharded)
    ranks = sharded.device_mesh.size(axis)
    each = -(-rows // ranks)
    sizes = tuple(max(0, min(each, rows - rank * each)) for rank in range(ranks))
    return Placement(sizes, sharded.device_mesh.get_local_rank(axis))


def peers_of(tensors: Iterable[Tensor]) -> Peers:
    """Those who hold the other shards. Replicas need no word: equal input gives them equal masks."""
    groups: dict[int, Any] = {}
    for tensor in tensors:
        if is_sharded(tensor):
            mesh, axis = tensor.device_mesh, _shard_axis(tensor)  # type: ignore[attr-defined]
            groups[id(mesh.get_group(axis))] = (mesh.get_group(axis), mesh.device_type)
    if not groups:
        return ALONE
    if len(groups) > 1:
        raise ShardError(
            f"The prunable tensors are sharded over {len(groups)} different process groups, so one selection cannot"
            " sum over them. Make one Pruner per group, with only=... naming its tensors."
        )
    return Peers(*next(iter(groups.values())))


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """A local part dressed as `tensor` is: a DTensor of the same mesh and placements, or just itself.

    The part may have other trailing dimensions; dim 0 is dealt out as the tensor's is.
    """
    if not isinstance(tensor, _dtensor_type()):
        return part
    shape = torch.Size((tensor.shape[0], *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return _dtensor_type().from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every process that holds a part of it: they must ask together."""
    return tensor.full_tensor() if isinstance(tensor, _dtensor_type()) else tensor


def part_of(saved: Tensor, tensor: Tensor) -> Tensor:
    """This process's rows of a saved tensor, which may be whole or sharded in its own way."""
    if isinstance(saved, _dtensor_type()):
        if saved.placements == getattr(tensor, "placements", None):
            return local(saved)
        saved = whole(saved)
    rows = placement(tensor)
    return saved[rows.first_row : rows.first_row + rows.sizes[rows.rank]]


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel and torch.compile, whose wrappers prefix every name."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ShardError(
            "FullyShardedDataParallel flattens weights away. Shard with torch's fully_shard (FSDP2) instead."
        )
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def check_tile(name: str, tensor: Tensor, height: int, meant: str) -> None:
    """Refuse tiles that a shard boundary cuts through. Every rank sees the same sizes, so all of them raise."""
    sizes = placement(tensor).sizes
    if len(sizes) > 1 and any(size % height for size in sizes):
        raise ShardError(
            f"{meant} compares weights of {name!r} that lie on different ranks (rows per rank: {sizes}, needed"
            f" together: {height}). Use another scope or pattern, another number of ranks, or skip={name!r}."
        )


def check_replicas(model: nn.Module, checksum: Callable[[], int]) -> None:
    """Under DistributedDataParallel, make sure that every rank came to the same masks: eight bytes from each."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return
    peers = Peers(model.process_group, next(model.parameters()).device.type)
    mine = checksum()
    if len(set(peers.totals([mine if rank == peers.rank else 0 for rank in range(peers.size)]))) > 1:
        raise ShardError(
            "Ranks of DistributedDataParallel came to different masks, so their weights or optimizer states differ."
            " Load the same checkpoint on every rank, and let only DDP change gradients."
        )
