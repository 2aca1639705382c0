"""What weights are multiplied with: norms of input features (WANDA), and the products X^T X of reconstruction.

Intercepts matmuls instead of hooking module types. So linear layers, convolutions, transformers' Conv1D, fused
projections and stacked experts need no names and no classes. Positions that the batch marks as padding are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.errors import FactError
from secateur.model.distributed import SOLO, Ranks
from secateur.model.prunable import Prunable
from secateur.oneshot.batches import Batch, device_of, quiet, real_positions, to_device

# Where an operation takes its two factors. `linear` contracts the last dimension of both, all others the last of the
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
# What these do inside is only seen below autograd.
ATTENTION = nn.functional.multi_head_attention_forward
COMPOSED = (ATTENTION, torch.einsum)
LOWER_PRODUCTS: dict[Any, tuple[int, int]] = {
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.linear.default: (0, 1),
}
CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
CONVOLUTION_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
NAMES = ("input", "weight", "mat1", "mat2", "batch1", "batch2", "other")
SELECTIONS = (torch.Tensor.__getitem__, torch.index_select, torch.Tensor.index_select)  # how tokens go to an expert
# Functions that ask a tensor about itself and do not compute with its values.
QUESTIONS = {"__get__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride"}


class Inputs(TorchFunctionMode):
    """Inside a `with`, adds up what the weights of these sites are multiplied with.

    `squares[site]` is the sum of squares of every input feature, `[matrices, features]` (a matrix for each expert or
    group of a convolution), and `tokens[site]` how many inputs each matrix has had. With `products`, `products[site]`
    is X^T X, `[matrices, features, features]`. `touched` names the sites that took part in any computation at all.
    Each batch is summed by itself and added to the totals by `finish`, so that several ranks can add theirs in order.
    """

    def __init__(self, sites: Sequence[Prunable], products: bool = False) -> None:
        super().__init__()
        self.watch(sites)
        self._products = products
        self._real: list[Tensor] = []
        self._selected: Tensor | None = None  # of the rows that were last picked by index, which are no padding
        self.touched: set[str] = set()
        self.squares: dict[str, Tensor] = {}
        self.tokens: dict[str, Tensor] = {}
        self.products: dict[str, Tensor] = {}
        self._totals = {"squares": self.squares, "tokens": self.tokens, "products": self.products}
        self._sums: dict[tuple[str, str], Tensor] = {}  # of the batch that is watched, by kind and site

    def watch(self, sites: Sequence[Prunable]) -> None:
        """Watch these from now on."""
        self._watched = list(sites)
        self._find()

    def batch(self, real: Sequence[Tensor]) -> None:
        """Announce a batch: masks `[batch, positions]` that are False at padding, none where nothing is padded."""
        self._real, self._selected = list(real), None

    def finish(self, ranks: Ranks, device: torch.device) -> None:
        """Add the sums of the batch that was watched to the totals; with several ranks, those of every rank's batch."""
        keys = [(kind, site.name) for kind in self._totals for site in self._watched]
        found = [(number, self._sums[key]) for number, key in enumerate(keys) if key in self._sums]
        self._sums = {}

        def take(number: int, value: Tensor) -> None:
            kind, name = keys[number]
            if name in self._totals[kind]:
                self._totals[kind][name] += value
            else:
                self._totals[kind][name] = value if ranks.size == 1 else value.clone()  # not a part of what was sent

        ranks.share("inputs", found, take, device)

    def agree(self, ranks: Ranks) -> None:
        """Have the same sites touched on every rank."""
        self.touched |= self._anywhere(ranks, self.touched)

    def _anywhere(self, ranks: Ranks, names: Collection[str]) -> set[str]:
        """Sites that are among these names on any rank."""
        told = ranks.tell("sites", [number for number, site in enumerate(self._watched) if site.name in names])
        return {self._watched[number].name for row in told for number in row}

    def _find(self) -> None:
        """Weights are known by where they lie in memory; several may share a storage."""
        self._sites: dict[int, list[Prunable]] = {}
        for site in self._watched:
            self._sites.setdefault(site.parameter.untyped_storage().data_ptr(), []).append(site)

    def __enter__(self) -> Any:
        self._find()  # they may have moved since
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS:
            given = [*args, *(kwargs[name] for name in NAMES if name in kwargs)]
            self.see(func, *(given[place] for place in PRODUCTS[func]))
        elif func in CONVOLUTIONS:
            named = dict(zip(CONVOLUTION_NAMES, args, strict=False)) | kwargs
            if (site := self._site(named["weight"])) is not None:
                self.add(site, 0, _patches(named))
        elif func in SELECTIONS and self._real:
            self._select(*args, **kwargs)
        if len(self.touched) < len(self._watched) and getattr(func, "__name__", "") not in QUESTIONS:
            self._touch((*args, *kwargs.values()))
        with self._below(func) if func in COMPOSED else nullcontext():
            return func(*args, **kwargs)

    @contextmanager
    def _below(self, func: Any) -> Iterator[None]:
        """Watch below autograd. Attention of torch computes on [positions, batch, features] there."""
        real = self._real
        try:
            self._real = [mask.t() for mask in real] if func is ATTENTION else real
            with _Lower(self):
                yield
        finally:
            self._real = real

    def _touch(self, given: Sequence[Any]) -> None:
        flat = [t for value in given for t in (value if isinstance(value, tuple | list) else [value])]
        self.touched |= {site.name for tensor in flat if (site := self._site(tensor)) is not None}

    def _site(self, weight: Any) -> Prunable | None:
        if not isinstance(weight, Tensor):
            return None
        weight = getattr(weight, "stands_for", weight)  # a copy that a ferry has made
        candidates = self._sites.get(_storage(weight), ())
        begins = ((site, weight.storage_offset() - site.parameter.storage_offset()) for site in candidates)
        return next((site for site, begin in begins if 0 <= begin < site.parameter.numel()), None)

    def see(self, func: Any, left: Tensor, right: Tensor) -> None:
        """A product, perhaps with the weight of a site, or of one or several of its experts, on either side."""
        if (site := self._site(right)) is not None and right.ndim > 1:
            self._meet(site, left, right, -1 if func in LINEAR else -2)
        elif (site := self._site(left)) is not None and left.ndim > 1 and func not in LINEAR:
            self._meet(site, right.mT if right.ndim > 1 else right, left, -1)

    def _meet(self, site: Prunable, inputs: Tensor, weight: Tensor, contracted: int) -> None:
        """Inputs of a weight, along their last dimension; `contracted` is the dimension of the weight they meet."""
        stacked, width = len(site.layout.rows) > 1, site.parameter.shape[site.layout.inputs]
        square = width == site.parameter.shape[site.layout.rows[-1]] > 1
        turned = square and weight.stride(contracted) != site.parameter.stride(site.layout.inputs)
        if inputs.shape[-1] != width or turned:
            raise FactError(
                f"{site.name!r} is multiplied with {inputs.shape[-1]} features along its outputs, not with the"
                f" {width} inputs it is laid out for. Leave it out with skip=..., or use a score that reads gradients."
            )
        inputs = self._without_padding(site, inputs.detach())
        if stacked and weight.ndim == 3:
            self.add(site, 0, inputs.reshape(len(weight), -1, width))
            return
        before = weight.storage_offset() - site.parameter.storage_offset()
        self.add(site, before // site.parameter.stride(0) if stacked else 0, inputs.reshape(1, -1, width))

    def _select(self, source: Any, *where: Any, **named: Any) -> None:
        """Remember which rows an expert is given: some of `[batch x positions, features]`, picked by index."""
        given = (*where, *named.values())
        parts = [part for value in given for part in (value if isinstance(value, tuple) else [value])]
        rows = [part for part in parts if isinstance(part, Tensor) and part.ndim == 1]
        real = next((mask for mask in self._real if mask.numel() == source.shape[0]), None)
        if real is not None and len(rows) == 1 and source.ndim == 2:
            self._selected = real.flatten()[rows[0]]

    def _without_padding(self, site: Prunable, inputs: Tensor) -> Tensor:
        """The inputs at real positions alone; all of them where they do not lie as the batch does."""
        masks = self._real if "decoder" not in site.name else self._real[::-1]
        for real in masks:
            if inputs.ndim > 2 and inputs.shape[:2] == real.shape:
                return inputs[real]
            if inputs.ndim > 1 and inputs.shape[-2] == real.numel():
                return inputs[..., real.flatten(), :]
        if masks and self._selected is not None and inputs.ndim == 2 and len(inputs) == len(self._selected):
            return inputs[self._selected]
        return inputs

    def add(self, site: Prunable, first: int, inputs: Tensor) -> None:
        """Add inputs as the product gets them (autocast rounds them first), with sums in fp32."""
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            self._add(site, first, inputs)

    def _add(self, site: Prunable, first: int, inputs: Tensor) -> None:
        """Add inputs, `[matrices, tokens, features]`, to those matrices of a site that begin at `first`."""
        matrices = site.parameter.shape[0] if len(site.layout.rows) > 1 else len(inputs)
        tokens = torch.full((len(inputs),), inputs.shape[1], dtype=torch.int64, device=inputs.device)
        self._sum("tokens", site, first, matrices, tokens)
        self._sum("squares", site, first, matrices, inputs.float().square().sum(1))
        if self._products:
            self._sum("products", site, first, matrices, product_of(inputs, inputs))

    def _sum(self, kind: str, site: Prunable, first: int, matrices: int, value: Tensor) -> None:
        """Add to what this batch has for the matrices of a site that begin at `first`, of so many."""
        key = kind, site.name
        if key not in self._sums and len(value) == matrices:
            self._sums[key] = value
            return
        if key not in self._sums:
            self._sums[key] = torch.zeros(matrices, *value.shape[1:], dtype=value.dtype, device=value.device)
        self._sums[key][first : first + len(value)] += value

    def reached(self, site: Prunable) -> Tensor:
        """Of each matrix of a site, whether it had inputs. Of one that computed unseen, all count as reached."""
        matrices = site.parameter.shape[0] if len(site.layout.rows) > 1 else 1
        if site.name not in self.tokens:
            return torch.full((matrices,), site.name in self.touched, device=site.parameter.device)
        return (self.tokens[site.name] > 0)[:matrices]

    def norms(self, site: Prunable) -> Tensor:
        """Norms of input features, expanded to the shape of the site's weight; zero if there were no inputs."""
        shape = site.parameter.shape
        if site.name not in self.squares:
            return torch.zeros((), dtype=torch.float32, device=site.parameter.device).expand(shape)
        root = self.squares[site.name].sqrt()
        if len(site.layout.rows) > 1:
            return root.unsqueeze(1 if site.layout.inputs == 2 else 2).expand(shape)
        if site.layout.inputs == 0:
            return root[0][:, None].expand(shape)
        grouped = root.view(len(root), 1, *shape[1:]).expand(len(root), shape[0] // len(root), *shape[1:])
        return grouped.reshape(shape) if len(root) > 1 else grouped[0].expand(shape)


class Reach(Inputs):
    """Only counts the inputs of each matrix."""

    def _add(self, site: Prunable, first: int, inputs: Tensor) -> None:
        matrices = site.parameter.shape[0] if len(site.layout.rows) > 1 else len(inputs)
        tokens = torch.full((len(inputs),), inputs.shape[1], dtype=torch.int64, device=inputs.device)
        self._sum("tokens", site, first, matrices, tokens)


def _storage(tensor: Tensor) -> int:
    """Where a tensor's memory begins; -1 for tensors without any of their own, such as sparse ones."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else -1


def product_of(left: Tensor, right: Tensor) -> Tensor:
    """L^T R of `[matrices, tokens, features]`, summed in fp32; a GPU multiplies 16-bit numbers as they are."""
    if left.is_cuda and left.dtype == right.dtype != torch.float32:
        return torch.bmm(left.mT, right, out_dtype=torch.float32)
    return torch.bmm(left.float().mT, right.float())


class _Lower(TorchDispatchMode):
    """Watches products for an `Inputs` below the level at which it stands itself."""

    def __init__(self, above: Inputs) -> None:
        super().__init__()
        self._above = above

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOWER_PRODUCTS:
            self._above.see(func, *(args[place] for place in LOWER_PRODUCTS[func]))
        return func(*args, **(kwargs or {}))


def _patches(named: Mapping[str, Any]) -> Tensor:
    """What a convolution multiplies its kernels with: `[groups, positions, channels x extents]`."""
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
    # [batch, channels, *positions, *extents] to [groups, batch x positions, channels of a group x extents]
    order = [1, 0, *range(2, 2 + dims), *range(2 + dims, 2 + 2 * dims)]
    windows = windows.permute(order).unflatten(0, (groups, -1)).movedim(1, 2 + dims)
    return windows.reshape(groups, -1, windows.shape[2 + dims :].numel())


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else [*value] * (dims if len(value) == 1 else 1)


def gather_inputs(
    model: nn.Module,
    batches: Sequence[Batch],
    watch: Inputs,
    *,
    forward: Callable[[nn.Module, Batch], Any],
    device: torch.device | None = None,
    tick: Callable[[], None] = lambda: None,
    ranks: Ranks = SOLO,
) -> None:
    """One forward pass for every batch, watched. Each of the `ranks` takes its share of the batches."""
    device = device or device_of(model)
    with quiet(model), torch.no_grad():
        for turn in range(ranks.turns(len(batches))):
            for number in ranks.mine(len(batches))[turn : turn + 1]:
                batch = to_device(batches[number], device)
                watch.batch(real_positions(model, batch))
                with watch:
                    forward(model, batch)
            watch.finish(ranks, device)
            tick()
    watch.agree(ranks)


def check_seen(watch: Inputs, sites: Collection[Prunable]) -> None:
    """Refuse sites that compute in a way whose inputs cannot be seen. Those that did not compute at all may pass."""
    hidden = [site.name for site in sites if site.name not in watch.squares and site.name in watch.touched]
    if hidden:
        raise FactError(
            f"The inputs of {', '.join(map(repr, hidden[:3]))} cannot be seen: they compute, but by no matmul or"
            " convolution that can be followed. Leave them out with skip=..., or use a score that reads gradients."
        )
