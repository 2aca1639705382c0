"""A ferry: blocks that live on the host come to a device one after another, each for as long as it computes.

For models that are larger than the device. Weights may lie in memory that a file is mapped into, as transformers loads
them on a CPU: then they come from the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import ModelError
from secateur.model.prunable import Site
from secateur.oneshot.batches import Batch, Loss, to_device
from secateur.oneshot.blocks import find_blocks, standing_in
from secateur.selection.pieces import sent

Deliver = Callable[[Tensor, Tensor], None]  # a parameter and its gradient on the device


class _Carried(torch.autograd.Function):
    """A copy of a parameter on the device. Its gradient is delivered there and never makes the way back."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, device: torch.device, deliver: Deliver | None) -> Tensor:
        ctx.parameter, ctx.deliver = parameter, deliver
        return sent(parameter.detach(), device, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.deliver(ctx.parameter, gradient)
        return None, None, None


class _Shell(nn.Module):
    """A block's own forward and weights without its hooks, which have run already."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self._own = block, block.forward

    def forward(self, *given: Any, **named: Any) -> Any:
        return self._own(*given, **named)


class Ferry:
    """Carries the blocks of a model that is on the host to a device."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device, self.blocks = device, blocks
        inside = [{id(t) for t in (*block.parameters(), *block.buffers())} for block in blocks]
        if sum(map(len, inside)) > len(set().union(*inside)):
            raise ModelError("Blocks of this model share parameters, so they cannot be streamed one after another.")
        if any(id(t) in block for t in _parameters_outside(model, blocks) for block in inside):
            raise ModelError("A block shares a parameter with what lies outside of it, so it cannot be streamed.")
        whole = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._outside = [t for key, t in whole.items() if not any(key in block for block in inside)]
        self._deliver: Deliver | None = None

    @contextmanager
    def crossing(self) -> Iterator[None]:
        """Inside, the model takes its inputs on the device and computes there; what lies outside of the blocks stays
        there all the while."""
        with landed(self._outside, self.device), standing_in(self.blocks, list(map(self._carried, self.blocks))):
            yield

    @contextmanager
    def delivering(self, deliver: Deliver) -> Iterator[None]:
        """Inside, gradients of the blocks' parameters go there."""
        try:
            self._deliver = deliver
            yield
        finally:
            self._deliver = None

    def _carried(self, block: nn.Module) -> Callable[..., Any]:
        shell = _Shell(block)

        def forward(*given: Any, **named: Any) -> Any:
            here: dict[str, Tensor] = {}
            for name, parameter in shell.named_parameters():
                here[name] = _Carried.apply(parameter, self.device, self._deliver)
                here[name].stands_for = parameter  # type: ignore[attr-defined]
            here |= {name: buffer.to(self.device) for name, buffer in shell.named_buffers()}
            given, named = to_device(given, self.device), to_device(named, self.device)
            return torch.func.functional_call(shell, here, given, named)

        return forward


def _parameters_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Parameters that are met without going through a block."""
    inner, waiting = {id(block) for block in blocks}, [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in inner:
            yield from module.parameters(recurse=False)
            waiting += module.children()


@contextmanager
def landed(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Inside, these are on the device; afterwards where they were, with what has become of them."""
    homes = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        yield
    finally:
        for tensor, home in zip(tensors, homes, strict=True):
            if tensor.data.data_ptr() != home.data_ptr() and not torch.equal(home, tensor.data.to(home.device)):
                home.copy_(tensor.data)  # only if it changed: what a file is mapped into stays the file's
            tensor.data = home


def ferry_for(model: nn.Module, batch: Batch, loss: Loss, sites: Sequence[Site], device: torch.device) -> Ferry:
    """A ferry for the blocks of this model, which are found by letting a batch cross."""

    def around(blocks: Sequence[nn.Module]) -> AbstractContextManager[None]:
        return Ferry(model, blocks, device).crossing()

    blocks = find_blocks(model, batch, loss, sites, around, device)
    if not blocks:
        raise ModelError("No blocks follow one another in this model, so it cannot be streamed: move it to the device.")
    return Ferry(model, blocks, device)
