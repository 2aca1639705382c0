"""What weights are multiplied with: norms of input features (WANDA), and the products X^T X of reconstruction.

Whoever multiplies by a weight is seen doing it, by the operation rather than by the kind of module. So linear layers,
convolutions, transformers' Conv1D, fused projections and stacked experts need no names and no classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.calibration import Batch, device_of, quiet, to_device
from secateur.errors import FactError
from secateur.sites import Site

# Where an operation takes its inputs and its weight; inputs lie along the last dimension of the first.
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
# What a function written in Python does inside is only seen lower down.
COMPOSED = (nn.functional.multi_head_attention_forward,)
LOWER_PRODUCTS: dict[Any, tuple[int, int]] = {
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.linear.default: (0, 1),
}
CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
CONVOLUTION_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
NAMES = ("input", "weight", "mat1", "mat2", "batch1", "batch2", "other")


class Inputs(TorchFunctionMode):
    """Inside a `with`, adds up what the weights of these sites are multiplied with.

    `squares[site]` is the sum of squares of every input feature, `[matrices, features]` (a matrix for each expert or
    group of a convolution), and `tokens[site]` how many inputs each matrix has had. With `products`, `products[site]`
    is X^T X, `[matrices, features, features]`.
    """

    def __init__(self, sites: Sequence[Site], products: bool = False) -> None:
        super().__init__()
        self.watch(sites)
        self._products = products
        self.squares: dict[str, Tensor] = {}
        self.tokens: dict[str, Tensor] = {}
        self.products: dict[str, Tensor] = {}

    def watch(self, sites: Sequence[Site]) -> None:
        """Watch these from now on."""
        self._watched = list(sites)
        self._find()

    def _find(self) -> None:
        """Weights are known by where they lie in memory; several may share a storage."""
        self._sites: dict[int, list[Site]] = {}
        for site in self._watched:
            self._sites.setdefault(site.parameter.untyped_storage().data_ptr(), []).append(site)

    def __enter__(self) -> Any:
        self._find()  # they may have moved since
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS:
            given = [*args, *(kwargs[name] for name in NAMES if name in kwargs)]
            self.see(*(given[place] for place in PRODUCTS[func]))
        elif func in COMPOSED:
            with _Lower(self):
                return func(*args, **kwargs)
        elif func in CONVOLUTIONS:
            named = dict(zip(CONVOLUTION_NAMES, args, strict=False)) | kwargs
            if (site := self._site(named["weight"])) is not None:
                self.add(site, 0, _patches(named))
        return func(*args, **kwargs)

    def _site(self, weight: Any) -> Site | None:
        if not isinstance(weight, Tensor):
            return None
        weight = getattr(weight, "stands_for", weight)  # a copy that a ferry has made
        candidates = self._sites.get(weight.untyped_storage().data_ptr(), ())
        begins = ((site, weight.storage_offset() - site.parameter.storage_offset()) for site in candidates)
        return next((site for site, begin in begins if 0 <= begin < site.parameter.numel()), None)

    def see(self, inputs: Tensor, weight: Any) -> None:
        """A product, perhaps with a site's weight, or with one or several of its experts."""
        if (site := self._site(weight)) is None:
            return
        inputs = inputs.detach()
        stacked, width = len(site.layout.rows) > 1, site.parameter.shape[site.layout.inputs]
        if inputs.shape[-1] != width:
            raise FactError(f"{site.name!r} is multiplied with {inputs.shape[-1]} inputs where it has {width}.")
        if stacked and weight.ndim == 3:
            self.add(site, 0, inputs.reshape(len(weight), -1, width))
            return
        before = weight.storage_offset() - site.parameter.storage_offset()
        self.add(site, before // site.parameter.stride(0) if stacked else 0, inputs.reshape(1, -1, width))

    def add(self, site: Site, first: int, inputs: Tensor) -> None:
        """Add inputs as the product gets them (autocast rounds them first), with sums in fp32."""
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            self._add(site, first, inputs)

    def _add(self, site: Site, first: int, inputs: Tensor) -> None:
        """Add inputs, `[matrices, tokens, features]`, to those matrices of a site that begin at `first`."""
        matrices = site.parameter.shape[0] if len(site.layout.rows) > 1 else len(inputs)
        width = inputs.shape[-1]
        if site.name not in self.squares:
            self.squares[site.name] = torch.zeros(matrices, width, device=inputs.device)
            self.tokens[site.name] = torch.zeros(matrices, dtype=torch.int64, device=inputs.device)
        where = slice(first, first + len(inputs))
        self.squares[site.name][where] += inputs.float().square().sum(1)
        self.tokens[site.name][where] += inputs.shape[1]
        if self._products:
            if site.name not in self.products:
                self.products[site.name] = torch.zeros(matrices, width, width, device=inputs.device)
            self.products[site.name][where] += product_of(inputs, inputs)

    def seen(self, site: Site) -> Tensor:
        """How many inputs each weight of a site has had."""
        return self._expanded(site, self.tokens[site.name][:, None].expand_as(self.squares[site.name]))

    def norms(self, site: Site) -> Tensor:
        """Norms of input features, expanded to the shape of the site's weight."""
        return self._expanded(site, self.squares[site.name].sqrt())

    def _expanded(self, site: Site, root: Tensor) -> Tensor:
        shape = site.parameter.shape
        if len(site.layout.rows) > 1:
            return root.unsqueeze(1 if site.layout.inputs == 2 else 2).expand(shape)
        if site.layout.inputs == 0:
            return root[0][:, None].expand(shape)
        grouped = root.view(len(root), 1, *shape[1:]).expand(len(root), shape[0] // len(root), *shape[1:])
        return grouped.reshape(shape) if len(root) > 1 else grouped[0].expand(shape)


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
            self._above.see(*(args[place] for place in LOWER_PRODUCTS[func]))
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
) -> None:
    """One forward pass for every batch, watched."""
    device = device or device_of(model)
    with quiet(model), torch.no_grad(), watch:
        for batch in batches:
            forward(model, to_device(batch, device))
            tick()


def check_seen(watch: Inputs, sites: Collection[Site]) -> None:
    """Refuse when a site took no part."""
    if missing := unseen(watch, sites):
        raise FactError(
            f"Nothing was multiplied with {', '.join(map(repr, missing[:3]))} while the batches ran through the model,"
            " so nothing is known of its inputs. Leave it out with skip=..., or use a score that reads gradients."
        )


def unseen(watch: Inputs, sites: Collection[Site]) -> list[str]:
    """Sites that took no part."""
    return [site.name for site in sites if site.name not in watch.squares]
