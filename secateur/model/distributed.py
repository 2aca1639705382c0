"""Several processes: local shards of tensors, sums over ranks, batches shared between ranks, models made whole.

The only module that imports torch.distributed. With one process a shard is the whole tensor and a sum changes nothing.
"""

from __future__ import annotations

import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.errors import ModelError, ShardError
from secateur.selection.exact import ALONE, Peers
from secateur.selection.masks import INTEGERS

BUCKET = 25 << 20  # bytes of small tensors that are sent together
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
Announced = tuple[int, torch.dtype, tuple[int, ...]]  # the number, type and shape of a tensor that will be sent


@dataclass(frozen=True)
class Placement:
    """How dim 0 of a tensor is split: rows of every rank (`sizes`), and this rank."""

    sizes: tuple[int, ...]
    rank: int

    @property
    def first_row(self) -> int:
        return sum(self.sizes[: self.rank])


def is_dtensor(tensor: Any) -> bool:
    """Whether this is a DTensor, sharded or replicated."""
    return isinstance(tensor, _dtensor_type())


def is_sharded(tensor: Tensor) -> bool:
    """Whether this tensor is a DTensor sharded over several processes."""
    return is_dtensor(tensor) and _shard_axis(tensor) is not None


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, sharing its memory; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, _dtensor_type()) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on every process that holds a shard; all of them must call it."""
    return tensor.full_tensor() if isinstance(tensor, _dtensor_type()) else tensor


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """A local part as a DTensor with the mesh and placements of `tensor`, or unchanged if that is no DTensor.

    The part may have other trailing dimensions; dim 0 is split as the tensor's is.
    """
    if not isinstance(tensor, _dtensor_type()):
        return part
    shape = torch.Size((tensor.shape[0], *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    spread = tensor.device_mesh, tensor.placements
    return _dtensor_type().from_local(part, *spread, run_check=False, shape=shape, stride=stride)


def part_of(saved: Tensor, tensor: Tensor) -> Tensor:
    """This process's rows of a saved tensor, which may be whole or sharded differently."""
    if isinstance(saved, _dtensor_type()):
        if saved.placements == getattr(tensor, "placements", None):
            return local(saved)
        saved = whole(saved)
    rows = placement(tensor)
    return saved[rows.first_row : rows.first_row + rows.sizes[rows.rank]]


def placement(tensor: Tensor) -> Placement:
    """How dim 0 is split: DTensor gives each rank ceil(rows / ranks) rows until none are left."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not is_sharded(tensor):
        return Placement((rows,), 0)
    sharded: Any = tensor
    axis = _shard_axis(sharded)
    ranks = sharded.device_mesh.size(axis)
    each = -(-rows // ranks)
    sizes = tuple(max(0, min(each, rows - rank * each)) for rank in range(ranks))
    return Placement(sizes, sharded.device_mesh.get_local_rank(axis))


def _shard_axis(tensor: Any) -> int | None:
    """The mesh axis a DTensor is sharded over, or None when it is only replicated."""
    found = None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate() or tensor.device_mesh.size(axis) == 1:
            continue
        if not (type(placement).__name__ == "Shard" and placement.dim == 0) or found is not None:
            raise ShardError(
                f"A parameter of shape {tuple(tensor.shape)} is placed as {tensor.placements}. Selection supports"
                " tensors sharded along dim 0 over one mesh axis, as fully_shard does, with or without replicas."
            )
        found = axis
    return found


def _dtensor_type() -> Any:
    # Importing DTensor takes a third of a second. If no module has imported it, no tensor can be one.
    module = sys.modules.get("torch.distributed.tensor")
    return module.DTensor if module is not None else ()


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel and torch.compile, which prefix every name."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"A torch.nn.Module is needed, not a {type(model).__name__}.")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ShardError(
            "FullyShardedDataParallel flattens weights into vectors. Shard with torch's fully_shard (FSDP2) instead."
        )
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


class ShardGroup(Peers):
    """Peers that sum over a process group; without a group, a single process."""

    def __init__(self, group: Any = None, device: str = "cpu") -> None:
        self._group, self._device = group, device
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.bytes_sent = 0

    def sum(self, counts: Tensor) -> Tensor:
        """Elementwise sum of an integer tensor over all peers; the bytes this process sends are counted."""
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


def peers_of(tensors: Iterable[Tensor]) -> Peers:
    """The processes that hold the other shards. Replicas are not included: equal inputs give them equal masks."""
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
    return ShardGroup(*next(iter(groups.values())))


def check_tile(name: str, tensor: Tensor, height: int, meant: str) -> None:
    """Refuse tiles that cross a shard boundary. Every rank sees the same sizes, so all of them raise."""
    sizes = placement(tensor).sizes
    if len(sizes) > 1 and any(size % height for size in sizes):
        raise ShardError(
            f"{meant} compares weights of {name!r} that lie on different ranks (rows per rank: {sizes}, needed"
            f" together: {height}). Use another scope or pattern, another number of ranks, or skip={name!r}."
        )


def check_replicas(model: nn.Module, checksum: Callable[[], int]) -> None:
    """Under DistributedDataParallel, raise unless every rank has the same masks; each sends eight bytes."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return
    peers = ShardGroup(model.process_group, next(model.parameters()).device.type)
    mine = checksum()
    if len(set(peers.totals([mine if rank == peers.rank else 0 for rank in range(peers.size)]))) > 1:
        raise ShardError(
            "Ranks of DistributedDataParallel have different masks, so their weights or optimizer states differ. Load"
            " the same checkpoint on every rank, and let only DDP change gradients."
        )


class Ranks(ShardGroup):
    """The processes that share the batches of one call. Rank r of W takes batches r, r + W, r + 2 W and so on, so that
    turn t has batches t W to t W + W - 1 in the order of ranks.

    Every exchange begins with a status of each rank. A rank that fails sends that status instead, so that all ranks
    raise and none waits forever.
    """

    def __init__(self, group: Any = None) -> None:
        config = "cpu" if group is None else str(dist.get_backend_config(group))
        self._kinds = [part.partition(":")[0] for part in config.split(",")]
        super().__init__(group, "cpu" if "cpu" in self._kinds else self._kinds[0])
        self._done = self._inside = False  # a failure is known to all ranks; a collective is running

    def mine(self, count: int) -> range:
        """The numbers of this rank's batches, out of `count`."""
        return range(self.rank, count, self.size)

    def turns(self, count: int) -> int:
        """How many batches the first rank has, which is the most of any."""
        return len(range(0, count, self.size))

    def tell(self, what: str, values: Sequence[int] = ()) -> list[list[int]]:
        """Gather integers from every rank, in the order of ranks; `what` must be the same on all of them."""
        if self.size == 1:
            return [list(values)]
        heads = self._gather([0, zlib.crc32(what.encode()), len(values)])
        self._check(heads, what)
        most = max(length for _, _, length in heads)
        rows = self._gather([*values, *[0] * (most - len(values))]) if most else heads
        return [row[:length] for row, (_, _, length) in zip(rows, heads, strict=True)]

    def floats(self, what: str, values: Sequence[float]) -> list[list[float]]:
        """The same for floating-point numbers, exact to the bit."""
        bits = torch.tensor(values, dtype=torch.float64, device="cpu").view(torch.int64).tolist()
        rows = self.tell(what, bits)
        return [torch.tensor(row, dtype=torch.int64, device="cpu").view(torch.float64).tolist() for row in rows]

    def first(self, value: float) -> float:
        """The first rank's number, on every rank."""
        return self.floats("value", [value])[0][0]

    def every(self, what: str, value: bool) -> bool:
        """Whether the value is True on every rank."""
        return all(row[0] for row in self.tell(what, [value]))

    def same(self, what: str, values: Sequence[int], advice: str) -> None:
        """Raise on every rank if these numbers differ between ranks."""
        rows = self.tell(what, values)
        others = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if others:
            self._done = True
            raise ShardError(f"{what} of rank {others[0]} are not those of rank 0. {advice}")

    def share(
        self, what: str, mine: Sequence[tuple[int, Tensor]], take: Callable[[int, Tensor], None], device: torch.device
    ) -> None:
        """Broadcast every rank's numbered tensors and pass each to `take(number, tensor)` on every rank, in the order
        of ranks. They keep their dtype; small ones are sent together."""
        if self.size == 1:
            for number, tensor in mine:
                take(number, tensor)
            return
        shapes = [(number, DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape) for number, tensor in mine]
        told = self.tell(what, [value for shape in shapes for value in shape])
        problem: Exception | None = None
        for rank, row in enumerate(told):
            own = iter(mine if rank == self.rank else ())
            for bundle in _bundles(row):
                sent = [next(own)[1] for _ in bundle] if rank == self.rank else []
                parts = self._broadcast(rank, bundle, sent, device)
                for (number, _, _), part in zip(bundle, parts, strict=True):
                    try:
                        if problem is None:
                            take(number, part.to(device))
                    except Exception as error:  # reported with the next status; until then the collectives must go on
                        problem = error
        if problem is not None:
            raise problem

    def _broadcast(
        self, rank: int, bundle: Sequence[Announced], mine: Sequence[Tensor], device: torch.device
    ) -> Iterator[Tensor]:
        dtype, sizes = bundle[0][1], [prod(shape) for _, _, shape in bundle]
        place = device if device.type in self._kinds else torch.device(self._device)
        if mine:
            near = [tensor.to(place) for tensor in mine]
            flat = near[0].reshape(-1).contiguous() if len(near) == 1 else torch.cat([t.reshape(-1) for t in near])
            self.bytes_sent += flat.nbytes
        else:
            flat = torch.empty(sum(sizes), dtype=dtype, device=place)
        with self._collective():
            dist.broadcast(flat.view(torch.uint8), dist.get_global_rank(self._group, rank), group=self._group)
        return (part.view(shape) for part, (_, _, shape) in zip(flat.split(sizes), bundle, strict=True))

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that this one has failed, unless they know or a collective itself failed."""
        if self.size == 1 or self._done or self._inside:
            return
        self._done = True
        text = list(f"{type(error).__name__}: {error}".encode()[:400])
        self._texts(self._gather([1, 0, len(text)]), text)

    def _check(self, heads: list[list[int]], what: str) -> None:
        failed = [rank for rank, (status, _, _) in enumerate(heads) if status]
        if failed:
            self._done = True
            said = bytes(self._texts(heads, [])[failed[0]]).decode(errors="replace")
            raise ShardError(f"Rank {failed[0]} failed, so every rank stops: {said}")
        if len({label for _, label, _ in heads}) > 1:
            self._done = True
            raise ShardError(f"Ranks do different things: this one is at {what!r}, others are not. Use equal settings.")

    def _texts(self, heads: list[list[int]], mine: list[int]) -> list[list[int]]:
        """The error messages of the ranks that failed."""
        most = max(length for status, _, length in heads if status)
        rows = self._gather([*mine, *[0] * (most - len(mine))])
        return [row[: length if status else 0] for row, (status, _, length) in zip(rows, heads, strict=True)]

    def _gather(self, values: Sequence[int]) -> list[list[int]]:
        """Gather the same count of integers from every rank."""
        sent = torch.tensor(values, dtype=torch.int64, device=self._device)
        rows = [torch.empty_like(sent) for _ in range(self.size)]
        with self._collective():
            dist.all_gather(rows, sent, group=self._group)
        self.bytes_sent += sent.nbytes
        return torch.stack(rows).tolist()

    @contextmanager
    def _collective(self) -> Iterator[None]:
        self._inside = True  # stays True if the collective raises: then no rank can be reached
        yield
        self._inside = False


SOLO = Ranks()  # a single process, which has all batches


def ranks_of(model: nn.Module, distributed: bool | None) -> Ranks:
    """The ranks that share the batches of a call: those of DistributedDataParallel or fully_shard; with
    `distributed=True` those of the default group; otherwise this process alone."""
    meshes = {id(p.device_mesh): p for p in unwrap(model).parameters() if isinstance(p, _dtensor_type())}
    if distributed is False:
        if any(map(is_sharded, meshes.values())):
            raise ShardError(
                "distributed=False is for whole models; this one is sharded. Leave it out, or gather the weights."
            )
        return SOLO
    if meshes:
        groups = {id(group): group for group in map(_group_of, meshes.values())}
        if len(groups) > 1:
            raise ShardError(f"The model is sharded over {len(groups)} process groups. Use one mesh for all of it.")
        return Ranks(next(iter(groups.values())))
    if (replicas := _replicas(model)) is not None:
        return Ranks(replicas.process_group)
    if not distributed:
        return SOLO
    if not (dist.is_available() and dist.is_initialized()):
        raise ShardError("distributed=True needs process groups: call torch.distributed.init_process_group first.")
    return Ranks(dist.group.WORLD)


@contextmanager
def told_to_all(model: nn.Module, distributed: bool | None) -> Iterator[None]:
    """Report an error inside to the ranks that share the batches, which would otherwise wait for this one."""
    try:
        yield
    except BaseException as error:
        with suppress(Exception):  # if they cannot be found or reached, the original error matters more
            ranks_of(model, distributed).fail(error)
        raise


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A number that almost surely differs when tensors do: a hash of shapes and sums of bits."""
    total = 0
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(INTEGERS.get(tensor.element_size(), torch.uint8))
        total = hash((total, int(bits.sum(dtype=torch.int64)), *tensor.shape))
    return total


def _bundles(row: Sequence[int]) -> Iterator[list[Announced]]:
    """A rank's announced tensors, with neighbours of the same dtype grouped up to the size of a bucket."""
    bundle: list[Announced] = []
    size = begin = 0
    while begin < len(row):
        number, kind, ndim = row[begin : begin + 3]
        shape = tuple(row[begin + 3 : begin + 3 + ndim])
        dtype, begin = DTYPES[kind], begin + 3 + ndim
        if bundle and (bundle[0][1] != dtype or size + prod(shape) * dtype.itemsize > BUCKET):
            yield bundle
            bundle, size = [], 0
        bundle.append((number, dtype, shape))
        size += prod(shape) * dtype.itemsize
    if bundle:
        yield bundle


def _replicas(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel around the model, compiled or not, or None."""
    while isinstance(getattr(model, "_orig_mod", None), nn.Module):
        model = model._orig_mod  # type: ignore[assignment]
    return model if isinstance(model, nn.parallel.DistributedDataParallel) else None


def _group_of(parameter: Any) -> Any:
    """All processes if the parameter's mesh spans them, otherwise those that hold its shards."""
    mesh, axis = parameter.device_mesh, _shard_axis(parameter)
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return mesh.get_group(axis or 0)


class Gathered:
    """The unwrapped model, whole on every rank, until `leave` undoes it.

    Under fully_shard: full plain parameters, original module classes, no FSDP hooks. Under DistributedDataParallel: new
    parameters in the same memory, so that DDP does not wait for their gradients. Other models are not changed."""

    def __init__(self, wrapped: nn.Module) -> None:
        model, self._replicas = unwrap(wrapped), _replicas(wrapped) is not None
        self._homes: list[tuple[nn.Module, str, Tensor]] = []
        self._modules: list[tuple[nn.Module, type, dict[str, Any]]] = []
        units = [module for module in model.modules() if isinstance(module, _fsdp_type())]
        managed = {id(inner) for unit in units for inner in unit.modules()}
        try:
            self._enter(model, managed)
        except BaseException:
            self.leave(keep=False)
            raise

    def _enter(self, model: nn.Module, managed: set[int]) -> None:
        wholes: dict[int, nn.Parameter] = {}
        for module in list(model.modules()):
            if isinstance(module, _fsdp_type()):
                self._strip(module)
            for name, parameter in list(module._parameters.items()):
                sharded = isinstance(parameter, _dtensor_type())
                if parameter is None or not (sharded or self._replicas):
                    continue
                if sharded and id(module) not in managed:
                    raise ShardError(
                        f"A parameter {name!r} of shape {tuple(parameter.shape)} is distributed, but not by fully_shard"
                        " (FSDP2). Pruning after training works on whole models, DistributedDataParallel and FSDP2."
                    )
                if id(parameter) not in wholes:
                    data = _gathered(parameter) if sharded else parameter.detach()
                    wholes[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
                self._homes.append((module, name, parameter))
                setattr(module, name, wholes[id(parameter)])

    def _strip(self, module: nn.Module) -> None:
        """Remove what fully_shard added to a module: its class, forward hooks and state."""
        own = vars(module)
        aside = {name: own.pop(name) for name in list(own) if name.startswith("__composable_api")}
        hooks = {name: own[name] for name in ("_forward_pre_hooks", "_forward_hooks")}
        self._modules.append((module, type(module), aside | hooks))
        own.update({name: _without_fsdp(found) for name, found in hooks.items()})
        kinds = type(module).__mro__
        module.__class__ = kinds[kinds.index(_fsdp_type()) + 1]

    def leave(self, keep: bool) -> None:
        """Undo it. With `keep`, copy changes of sharded weights back to their shards."""
        for module, name, home in self._homes:
            if keep and isinstance(home, _dtensor_type()):
                local(home.detach()).copy_(part_of(getattr(module, name).detach(), home))
            setattr(module, name, home)
        for module, kind, aside in self._modules:
            module.__class__ = kind
            vars(module).update(aside)
        self._homes, self._modules = [], []


def reshard(model: nn.Module) -> None:
    """Reshard FSDP2 modules that still hold full parameters after a forward pass."""
    for module in model.modules():
        if isinstance(module, _fsdp_type()):
            module.reshard()


def _gathered(parameter: Any) -> Tensor:
    """The full parameter on its mesh's device, also if its shards are offloaded to the host."""
    _shard_axis(parameter)  # raises for placements that cannot be written back
    near = local(parameter.detach()).to(parameter.device_mesh.device_type)
    return whole(like(near, parameter.detach())).clone()


def _without_fsdp(hooks: Any) -> Any:
    own = "torch.distributed.fsdp"
    return OrderedDict((k, hook) for k, hook in hooks.items() if not getattr(hook, "__module__", "").startswith(own))


def _fsdp_type() -> Any:
    # As with DTensor: if no module has imported it, no module can be one.
    module = sys.modules.get("torch.distributed.fsdp")
    return getattr(module, "FSDPModule", ()) if module is not None else ()
