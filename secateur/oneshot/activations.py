"""Input activations of weights: norms of input features (WANDA) and the products X^T X (reconstruction).

Intercepts matmuls instead of hooking module types, so linear layers, convolutions, transformers' Conv1D, fused
projections and stacked experts all work without a list of classes. Padded positions are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import gcd, lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.errors import FactError
from secateur.model.distributed import SOLO, Ranks
from secateur.model.prunable import Prunable
from secateur.oneshot.batches import DECODER, INPUT, Batch, Padding, device_of, eval_mode, padding_masks, to_device

# Positions of an operation's two factors. `linear` contracts the last dimension of both, all others the last of the
# left factor with the last but one of the right factor.
PRODUCTS: dict[Any, tuple[int, int]] = {
    torch.nn.functional.linear: (0, 1),
    torch.addmm: (1, 2),
    torch.Tensor.addmm: (1, 2),
    torch.matmul: (0, 1),
    torch.Tensor.matmul: (0, 1),
    torch.Tensor.__matmul__: (0, 1),
    torch.mm: (0, 1),
    torch.Tensor.mm: (0, 1),
    torch.bmm: (0, 1),
    torch.Tensor.bmm: (0, 1),
    torch.baddbmm: (1, 2),
}
LINEAR = (torch.nn.functional.linear, torch.ops.aten.linear.default)
# Their matmuls can only be seen below autograd, at the dispatch level.
ATTENTION = nn.functional.multi_head_attention_forward
COMPOSED = (ATTENTION, torch.einsum)
DISPATCH_PRODUCTS: dict[Any, tuple[int, int]] = {
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.linear.default: (0, 1),
}
CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
CONVOLUTION_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
NAMES = ("input", "weight", "mat1", "mat2", "batch1", "batch2", "other")
INDEXING = (torch.Tensor.__getitem__, torch.index_select, torch.Tensor.index_select)  # how tokens go to an expert
# Functions that read a tensor's metadata and do not compute with its values.
METADATA = {"__get__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride"}
# Names of weights that read what the decoder of an encoder-decoder reads; but keys and values of its cross-attention,
# one weight in GPT-2, read what the encoder made.
DECODER_WEIGHT = re.compile(r"decoder|lm_head|proj_out")
FUSED_CROSS_ATTENTION = re.compile(r"decoder.*multihead_attn\.in_proj_weight")  # of torch's decoder layers
CROSS_ATTENTION = re.compile(
    r"(cross_?att|encoder_?att|EncDecAtt|multihead_att)\w*\.(\w+\.)*((k|v|kv|key|value)(_proj|_lin)?(\.|_weight)|c_attn)"
)
MOST_RANGES = 64  # parts of one weight for which X^T X is kept


class Place(NamedTuple):
    """The matrices of a weight that inputs belong to: from `first` up to `end`, out of `matrices`.

    A stacked weight has a matrix for each expert, a convolution one for each group. A weight that is called by ranges
    of its rows, as cross-attention calls the in_proj_weight of nn.MultiheadAttention, has matrices of equal size whose
    borders are those of all ranges; any other weight is one matrix.
    """

    first: int
    end: int
    matrices: int


Calls = dict[str, list[tuple[Place, Tensor]]]  # the inputs of every weight, one tensor per call


class InputStatistics(TorchFunctionMode):
    """Inside a `with`, sums statistics of the inputs that the prunable weights are multiplied with.

    By weight name: `squares` are sums of squares of every input feature, `[matrices, features]` (see `Place`), `tokens`
    the number of inputs of each matrix, and, with `products`, `products` are X^T X, `[matrices, features, features]`.
    `touched` names the weights that took part in any computation. Each batch is summed separately and added to the
    totals by `finish_batch`, so that ranks add theirs in batch order.
    """

    def __init__(self, prunables: Sequence[Prunable], products: bool = False) -> None:
        super().__init__()
        self.watch(prunables)
        self._products = products
        self._padding: Padding = {}
        self._indexed: Padding = {}  # of the rows that were last indexed, which are not padding
        self.touched: set[str] = set()
        self.squares: dict[str, Tensor] = {}
        self.tokens: dict[str, Tensor] = {}
        self.products: dict[str, Tensor] = {}
        self._totals = {"squares": self.squares, "tokens": self.tokens, "products": self.products}
        self._sums: dict[tuple[str, str], Tensor] = {}  # of the current batch, by kind and weight

    def watch(self, prunables: Sequence[Prunable]) -> None:
        """Record the inputs of these weights from now on."""
        self._watched = list(prunables)
        self._index()

    def start_batch(self, padding: Padding) -> None:
        """Start a batch with these masks; none if nothing is padded."""
        self._padding, self._indexed = dict(padding), {}

    def finish_batch(self, ranks: Ranks, device: torch.device) -> None:
        """Add the sums of this batch to the totals, and those of the other ranks' batches."""
        keys = [(kind, prunable.name) for kind in self._totals for prunable in self._watched]
        sums = [(number, self._sums[key]) for number, key in enumerate(keys) if key in self._sums]
        self._sums = {}

        def add(number: int, value: Tensor) -> None:
            kind, name = keys[number]
            total = self._totals[kind].get(name)
            value = value.clone() if total is None and ranks.size > 1 else value  # not a view of the message
            self._totals[kind][name] = _added(total, value)

        ranks.share("inputs", sums, add, device)

    def sync(self, ranks: Ranks) -> None:
        """Make `touched` the same on every rank."""
        self.touched |= self._on_any_rank(ranks, self.touched)

    def _on_any_rank(self, ranks: Ranks, names: Collection[str]) -> set[str]:
        """Weights that are among these names on any rank."""
        found = ranks.tell("names", [number for number, one in enumerate(self._watched) if one.name in names])
        return {self._watched[number].name for row in found for number in row}

    def _index(self) -> None:
        """Index weights by the address of their storage, which several may share."""
        self._prunables: dict[int, list[Prunable]] = {}
        for prunable in self._watched:
            self._prunables.setdefault(prunable.parameter.untyped_storage().data_ptr(), []).append(prunable)

    def __enter__(self) -> Any:
        self._index()  # weights may have moved since
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS:
            tensors = [*args, *(kwargs[name] for name in NAMES if name in kwargs)]
            self.add_product(func, *(tensors[place] for place in PRODUCTS[func]))
        elif func in CONVOLUTIONS:
            named = dict(zip(CONVOLUTION_NAMES, args, strict=False)) | kwargs
            if (prunable := self._prunable(named["weight"])) is not None:
                patches = _patches(named)
                self.add(prunable, Place(0, len(patches), len(patches)), patches)
        elif func in INDEXING and self._padding:
            self._follow_indexing(*args, **kwargs)
        if len(self.touched) < len(self._watched) and getattr(func, "__name__", "") not in METADATA:
            self._touch((*args, *kwargs.values()))
        with self._dispatch_level(func) if func in COMPOSED else nullcontext():
            return func(*args, **kwargs)

    @contextmanager
    def _dispatch_level(self, func: Any) -> Iterator[None]:
        """Intercept below autograd, where torch's attention computes on [positions, batch, features]."""
        padding = self._padding
        try:
            self._padding = {name: mask.t() for name, mask in padding.items()} if func is ATTENTION else padding
            with _DispatchProducts(self):
                yield
        finally:
            self._padding = padding

    def _touch(self, arguments: Sequence[Any]) -> None:
        flat = [t for value in arguments for t in (value if isinstance(value, tuple | list) else [value])]
        self.touched |= {prunable.name for tensor in flat if (prunable := self._prunable(tensor)) is not None}

    def _prunable(self, weight: Any) -> Prunable | None:
        if not isinstance(weight, Tensor):
            return None
        weight = getattr(weight, "offloaded_from", weight)  # set on copies that block offload makes
        candidates = self._prunables.get(_storage(weight), ())
        offsets = ((prunable, weight.storage_offset() - prunable.parameter.storage_offset()) for prunable in candidates)
        return next((prunable for prunable, offset in offsets if 0 <= offset < prunable.parameter.numel()), None)

    def add_product(self, func: Any, left: Tensor, right: Tensor) -> None:
        """Record a matmul if a prunable weight, or some of its experts, is one of its factors."""
        if (prunable := self._prunable(right)) is not None and right.ndim > 1:
            self._add_inputs(prunable, left, right, -1 if func in LINEAR else -2)
        elif (prunable := self._prunable(left)) is not None and left.ndim > 1 and func not in LINEAR:
            self._add_inputs(prunable, right.mT if right.ndim > 1 else right, left, -1)

    def _add_inputs(self, prunable: Prunable, inputs: Tensor, weight: Tensor, contracted: int) -> None:
        """Record inputs whose last dimension is contracted with this dimension of the weight."""
        stacked, width = len(prunable.layout.rows) > 1, prunable.parameter.shape[prunable.layout.inputs]
        square = width == prunable.parameter.shape[prunable.layout.rows[-1]] > 1
        transposed = square and weight.stride(contracted) != prunable.parameter.stride(prunable.layout.inputs)
        if inputs.shape[-1] != width or transposed:
            raise FactError(
                f"{prunable.name!r} is multiplied with {inputs.shape[-1]} features along its output dimension, not with"
                f" its {width} inputs. Leave it out with skip=..., or use a score that reads gradients."
            )
        place = _place_of(prunable, weight, contracted)
        inputs = self._without_padding(prunable, inputs.detach(), place)
        self.add(prunable, place, inputs.reshape(len(weight) if stacked and weight.ndim == 3 else 1, -1, width))

    def _follow_indexing(self, source: Any, *args: Any, **kwargs: Any) -> None:
        """Remember which of the rows that an expert gets from `[batch x positions, features]` are not padding."""
        values = [v for value in (*args, *kwargs.values()) for v in (value if isinstance(value, tuple) else [value])]
        rows = [value for value in values if isinstance(value, Tensor) and value.ndim == 1]
        masks = {name: mask for name, mask in self._padding.items() if mask.numel() == source.shape[0]}
        if masks and len(rows) == 1 and source.ndim == 2:
            self._indexed = {name: mask.flatten()[rows[0]] for name, mask in masks.items()}

    def _without_padding(self, prunable: Prunable, inputs: Tensor, place: Place) -> Tensor:
        """The inputs without padded positions; all of them if they are not laid out like the batch."""
        # The second one only if it alone fits.
        order = (INPUT, DECODER) if reads_input(prunable.name, place) else (DECODER, INPUT)
        for mask in (self._padding[name] for name in order if name in self._padding):
            if inputs.ndim > 2 and inputs.shape[:2] == mask.shape:
                return inputs[mask]
            if inputs.ndim > 1 and inputs.shape[-2] == mask.numel():
                return inputs[..., mask.flatten(), :]
        for rows in (self._indexed[name] for name in order if name in self._indexed):
            if inputs.ndim == 2 and len(inputs) == len(rows):
                return inputs[rows]
        return inputs

    def add(self, prunable: Prunable, place: Place, inputs: Tensor) -> None:
        """Add inputs in the dtype of the product (autocast rounds them first), with sums in fp32."""
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            self._add(prunable, place, inputs)

    def _add(self, prunable: Prunable, place: Place, inputs: Tensor) -> None:
        """Add inputs `[matrices, tokens, features]` to the matrices of a weight; those of one to all in its place."""
        self._count(prunable, place, inputs)
        self._sum("squares", prunable, place, inputs.float().square().sum(1))
        if self._products:
            _check_ranges(prunable, place)
            self._sum("products", prunable, place, product_of(inputs, inputs))

    def _count(self, prunable: Prunable, place: Place, inputs: Tensor) -> None:
        tokens = torch.full((len(inputs),), inputs.shape[1], dtype=torch.int64, device=inputs.device)
        self._sum("tokens", prunable, place, tokens)

    def _sum(self, kind: str, prunable: Prunable, place: Place, value: Tensor) -> None:
        """Add to this batch's sum for the matrices in this place."""
        key = kind, prunable.name
        total = self._sums.get(key)
        if total is not None and len(total) == place.matrices:
            total[place.first : place.end] += value
            return
        if len(value) < place.matrices:
            part, shape = value, (place.matrices, *value.shape[1:])
            value = torch.zeros(shape, dtype=part.dtype, device=part.device)
            value[place.first : place.end] += part
        self._sums[key] = _added(total, value)

    def reached(self, prunable: Prunable) -> Tensor:
        """For each expert of a stacked weight, or once for any other weight, whether there were inputs; True if it
        computed in a way that hides them."""
        stacked = len(prunable.layout.rows) > 1
        if prunable.name not in self.tokens:
            matrices = prunable.parameter.shape[0] if stacked else 1
            return torch.full((matrices,), prunable.name in self.touched, device=prunable.parameter.device)
        found = self.tokens[prunable.name] > 0
        return found if stacked else found.any(0, keepdim=True)

    def norms(self, prunable: Prunable) -> Tensor:
        """Norms of input features, expanded to the shape of the weight; zero if there were no inputs."""
        shape = prunable.parameter.shape
        if prunable.name not in self.squares:
            return torch.zeros((), dtype=torch.float32, device=prunable.parameter.device).expand(shape)
        root = self.squares[prunable.name].sqrt()
        if len(prunable.layout.rows) > 1:
            return root.unsqueeze(1 if prunable.layout.inputs == 2 else 2).expand(shape)
        if prunable.layout.inputs == 0:
            return root.t().repeat_interleave(shape[1] // len(root), 1) if len(root) > 1 else root.t().expand(shape)
        grouped = root.view(len(root), 1, *shape[1:]).expand(len(root), shape[0] // len(root), *shape[1:])
        return grouped.reshape(shape) if len(root) > 1 else grouped[0].expand(shape)


class InputCounts(InputStatistics):
    """Counts the inputs of each matrix, and nothing else."""

    def _add(self, prunable: Prunable, place: Place, inputs: Tensor) -> None:
        self._count(prunable, place, inputs)


class ForwardDone(Exception):  # noqa: N818 - control flow, not an error
    """Ends a forward pass whose remaining part is not needed."""


class InputRecorder(InputStatistics):
    """Keeps the inputs themselves, in the order of the calls."""

    def __init__(self, prunables: Sequence[Prunable]) -> None:
        super().__init__(prunables)
        self.calls: Calls = {}

    def _add(self, prunable: Prunable, place: Place, inputs: Tensor) -> None:
        self.calls.setdefault(prunable.name, []).append((place, inputs.clone()))


class PairedInputs(InputStatistics):
    """X^T X of some weights, and Z^T X with the inputs Z that the dense model has in the same calls."""

    def __init__(self, prunables: Sequence[Prunable]) -> None:
        super().__init__(prunables, products=True)
        self.crosses: dict[str, Tensor] = {}
        self._totals["crosses"] = self.crosses
        self.unpaired: set[str] = set()  # called in another way than in the dense model, as experts are
        self._batch_unpaired = False  # whether any was in the current batch
        self._expected: Calls = {}
        self._left = 0

    def expect(self, dense: Calls) -> None:
        """Set the dense model's inputs for the next batch; once all are paired the forward pass may end."""
        self._expected = {prunable.name: list(dense.get(prunable.name, ())) for prunable in self._watched}
        self._left, self._batch_unpaired = sum(map(len, self._expected.values())), False

    def _add(self, prunable: Prunable, place: Place, inputs: Tensor) -> None:
        super()._add(prunable, place, inputs)
        waiting = self._expected.get(prunable.name)
        there, other = waiting.pop(0) if waiting else (None, inputs)
        if there != place or other.shape != inputs.shape or len(prunable.layout.rows) > 1:
            self.unpaired.add(prunable.name)
            self._batch_unpaired = True
        else:
            self._sum("crosses", prunable, place, product_of(other, inputs))
        self._left -= 1
        if self._left == 0 and not self._batch_unpaired:  # decided per batch: ranks do not see each other's
            raise ForwardDone

    def sync(self, ranks: Ranks) -> None:
        """Make `unpaired` the same on every rank."""
        self.unpaired |= self._on_any_rank(ranks, self.unpaired)


def reads_input(name: str, place: Place) -> bool:
    """Whether a weight of an encoder-decoder, or this part of it, reads the encoder's positions, by its name."""
    if FUSED_CROSS_ATTENTION.search(name):
        return place.first > 0  # after the queries
    return not DECODER_WEIGHT.search(name) or bool(CROSS_ATTENTION.search(name))


def _place_of(prunable: Prunable, weight: Tensor, contracted: int) -> Place:
    """Which matrices of a weight this view of it is; `contracted` is the view's dimension of inputs."""
    parameter, outputs = prunable.parameter, prunable.layout.rows[-1]
    offset = weight.storage_offset() - parameter.storage_offset()
    if len(prunable.layout.rows) > 1:
        first = 0 if weight.ndim == 3 else offset // parameter.stride(0)
        return Place(first, first + (len(weight) if weight.ndim == 3 else 1), len(parameter))
    free = -3 - contracted  # the other one of the last two dimensions
    rows, count = parameter.shape[outputs], weight.shape[free]
    batched = any(n > 1 and step for n, step in zip(weight.shape[:-2], weight.stride()[:-2], strict=True))
    if count == rows or batched or parameter.ndim != 2 or weight.stride(free) != parameter.stride(outputs):
        return Place(0, 1, 1)
    first = offset // parameter.stride(outputs)
    size = gcd(first, count, rows)
    return Place(first // size, (first + count) // size, rows // size)


def _check_ranges(prunable: Prunable, place: Place) -> None:
    """Refuse ranges of rows whose common size is so small that X^T X of each would not fit in memory."""
    if place.matrices > MOST_RANGES and place.end - place.first < place.matrices and len(prunable.layout.rows) == 1:
        raise FactError(
            f"{prunable.name!r} is multiplied by ranges of its rows, which make {place.matrices:,} parts of equal size:"
            f" X^T X is kept for {MOST_RANGES} at most. Leave it out with skip=..., or prune without reconstruction."
        )


def _added(total: Tensor | None, value: Tensor) -> Tensor:
    """The sum of two statistics, in place where they have the same matrices; if not, the larger ones are divided."""
    if total is None:
        return value
    matrices = lcm(len(total), len(value))
    total, value = (t.repeat_interleave(matrices // len(t), 0) if len(t) < matrices else t for t in (total, value))
    return total.add_(value)


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's storage; -1 for tensors without one, such as sparse tensors."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else -1


def product_of(left: Tensor, right: Tensor) -> Tensor:
    """L^T R of `[matrices, tokens, features]` in fp32; CUDA multiplies 16-bit factors without a conversion."""
    if left.is_cuda and left.dtype == right.dtype != torch.float32:
        return torch.bmm(left.mT, right, out_dtype=torch.float32)
    return torch.bmm(left.float().mT, right.float())


class _DispatchProducts(TorchDispatchMode):
    """Passes matmuls at the dispatch level on to an `InputStatistics`."""

    def __init__(self, statistics: InputStatistics) -> None:
        super().__init__()
        self._statistics = statistics

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DISPATCH_PRODUCTS:
            self._statistics.add_product(func, *(args[place] for place in DISPATCH_PRODUCTS[func]))
        return func(*args, **(kwargs or {}))


def _patches(named: Mapping[str, Any]) -> Tensor:
    """The input patches of a convolution's kernels: `[groups, positions, channels x kernel size]`."""
    inputs, weight = named["input"].detach(), named["weight"].shape
    dims = len(weight) - 2
    stride, dilation = (_each(named.get(name, 1), dims) for name in ("stride", "dilation"))
    groups, padding = named.get("groups", 1), named.get("padding", 0)
    reach = [d * (k - 1) for d, k in zip(dilation, weight[2:], strict=True)]
    if isinstance(padding, str):
        sides = [(r // 2, r - r // 2) if padding == "same" else (0, 0) for r in reach]
    else:
        sides = [(p, p) for p in _each(padding, dims)]
    inputs = inputs if inputs.ndim == dims + 2 else inputs[None]
    windows = nn.functional.pad(inputs, [amount for side in reversed(sides) for amount in side])
    for dim in range(dims):
        windows = windows.unfold(2 + dim, reach[dim] + 1, stride[dim])
        windows = windows[..., :: dilation[dim]]
    # [batch, channels, *positions, *kernel] to [groups, batch x positions, channels of a group x kernel]
    order = [1, 0, *range(2, 2 + dims), *range(2 + dims, 2 + 2 * dims)]
    windows = windows.permute(order).unflatten(0, (groups, -1)).movedim(1, 2 + dims)
    return windows.reshape(groups, -1, windows.shape[2 + dims :].numel())


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else [*value] * (dims if len(value) == 1 else 1)


def gather_inputs(
    model: nn.Module,
    batches: Sequence[Batch],
    statistics: InputStatistics,
    forward: Callable[[nn.Module, Batch], Any],
    device: torch.device | None = None,
    tick: Callable[[], None] = lambda: None,
    ranks: Ranks = SOLO,
) -> None:
    """Record the inputs of one forward pass per batch; ranks share the batches."""
    device = device or device_of(model)
    with eval_mode(model), torch.no_grad():
        for turn in range(ranks.turns(len(batches))):
            for number in ranks.mine(len(batches))[turn : turn + 1]:
                batch = to_device(batches[number], device)
                statistics.start_batch(padding_masks(model, batch))
                with statistics:
                    forward(model, batch)
            statistics.finish_batch(ranks, device)
            tick()
    statistics.sync(ranks)


def check_seen(statistics: InputStatistics, prunables: Collection[Prunable]) -> None:
    """Refuse weights that took part in a computation without a matmul or convolution that shows their inputs, and
    inputs that are not all finite."""
    squares, touched = statistics.squares, statistics.touched
    hidden = [prunable.name for prunable in prunables if prunable.name not in squares and prunable.name in touched]
    if hidden:
        raise FactError(
            f"The inputs of {', '.join(map(repr, hidden[:3]))} cannot be seen: they are used, but in no matmul or"
            " convolution that can be intercepted. Leave them out with skip=..., or use a score that reads gradients."
        )
    for name, sums in squares.items():
        if not bool(sums.isfinite().all()):
            raise FactError(f"The inputs of {name!r} are not all finite: look for infinities or NaN in the batches.")
