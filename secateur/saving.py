"""Saving: what a Pruner must remember, as a flat dict of tensors, and what of it fits another Pruner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from secateur.bits import pack, to_bits, unpack
from secateur.clock import Clock
from secateur.errors import StateError
from secateur.facts import Facts
from secateur.masks import Held
from secateur.pieces import mixed
from secateur.shards import Peers, like, local, part_of, placement
from secateur.sites import Site

ROWS = "rows."


def state_of(clock: Clock, asked: float, sites: Sequence[Site], held: Held, facts: Facts) -> dict[str, Tensor]:
    """Steps, masks packed to bits, and the facts no optimizer has; DTensors where parameters are."""
    state = {
        "steps": torch.tensor(clock.saved(), device="cpu"),
        "asked": torch.tensor(asked, dtype=torch.float64, device="cpu"),
    }
    for number, site in enumerate(sites):
        state[f"mask.{site.name}"] = like(pack(held.bools(number)), site.parameter)
        state[f"{ROWS}{site.name}"] = like(_marks(site.parameter), site.parameter)
        state[f"shape.{site.name}"] = torch.tensor(site.parameter.shape, device="cpu")
        for fact, tensors in facts.kept.items():
            own = tensors[site.name].clone(memory_format=torch.contiguous_format)
            state[f"{fact}.{site.name}"] = like(own, site.parameter)
    return state


def _marks(tensor: Tensor) -> Tensor:
    """A byte for every row of the tensor that is here, by its place in the whole: so rows of another process show."""
    rows = placement(tensor)
    here = torch.arange(rows.sizes[rows.rank], device=local(tensor).device) + rows.first_row
    return (mixed(here) & 0xFF).to(torch.uint8)


def check_rows(state: Mapping[str, Tensor], peers: Peers) -> None:
    """Refuse shards that are not this process's, on all processes: a pickled DTensor is that of whoever saved it."""
    strange = [name for name, saved in state.items() if name.startswith(ROWS) and not _is_here(saved)]
    if any(peers.totals([len(strange)])):
        where = f" (here among others {strange[0].removeprefix(ROWS)!r})" if strange else ""
        raise StateError(
            f"The saved masks are of rows that other processes hold{where}: they were saved on one process, with its"
            " shards alone. Save with torch.distributed.checkpoint, or full_tensor() of every entry"
            " (docs/distributed.md)."
        )


def _is_here(saved: Tensor) -> bool:
    """Whether marks lie where they say. Nobody else is asked, who might not have been reached."""
    try:
        return torch.equal(local(saved).cpu(), _marks(saved).cpu())
    except RuntimeError:  # sharded over processes that are not here
        return False


def masks_in(state: Mapping[str, Tensor], sites: Sequence[Site], held: Held) -> list[Tensor]:
    """This process's part of the saved masks, flat and stored as those that are held."""
    masks = []
    for site, shape, device in zip(sites, held.shapes, held.devices, strict=True):
        mask = unpack(part_of(state[f"mask.{site.name}"], site.parameter).to(device), shape).view(-1)
        masks.append(to_bits(mask) if held.packed else mask)
    return masks


def restore_facts(state: Mapping[str, Tensor], sites: Sequence[Site], facts: Facts) -> None:
    """Copy the saved facts over those that are kept."""
    for fact, tensors in facts.kept.items():
        for site in sites:
            tensors[site.name].copy_(part_of(state[f"{fact}.{site.name}"], site.parameter))


def check_saved(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Refuse a saved state that differs from the expected one in names, kinds or shapes. Of one from before rows were
    marked, marks are not expected."""
    if not any(name.startswith(ROWS) for name in state):
        expected = {name: tensor for name, tensor in expected.items() if not name.startswith(ROWS)}
    missing, extra = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or extra:
        raise StateError(
            f"The saved state is of another model or score: {len(missing)} entries missing ({', '.join(missing[:3])}),"
            f" {len(extra)} not expected ({', '.join(extra[:3])})."
        )
    for name, tensor in expected.items():
        found = state[name]
        if not isinstance(found, Tensor) or (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise StateError(f"Saved {name!r} is {what}; this model needs {tensor.dtype} {tuple(tensor.shape)}.")
        if name.startswith("shape.") and not torch.equal(found.cpu(), tensor):
            raise StateError(f"Saved {name!r} is {found.tolist()}; in this model it is {tensor.tolist()}.")
