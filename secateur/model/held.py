"""Masks held beside the weights of a model: as bits where kernels read them, as bools elsewhere."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secateur import kernels
from secateur.errors import StateError
from secateur.model.distributed import like, local, part_of, placement
from secateur.model.facts import KEPT_FACTS, Facts
from secateur.model.prunable import Prunable
from secateur.schedules import Clock
from secateur.scores import mixed
from secateur.selection.exact import Peers
from secateur.selection.masks import as_bool, pack, to_bits, unpack
from secateur.selection.tiles import Pattern, tile_of


class Held:
    """The masks of some weights as this process holds them, and how many weights each removes here."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.shapes = [weight.shape for weight in weights]
        self.packed = kernels.serves(*weights)
        self.masks = [_all_kept(weight, self.packed) for weight in weights]
        self.dead = [0] * len(weights)

    @property
    def devices(self) -> list[torch.device]:
        return [mask.device for mask in self.masks]

    @property
    def nbytes(self) -> int:
        return sum(mask.nbytes for mask in self.masks)

    def bools(self, number: int) -> Tensor:
        """A mask as bools in its weight's shape: the one that is held, or made from its bits."""
        return as_bool(self.masks[number], self.shapes[number])

    def take(self, masks: Sequence[Tensor], kept: Sequence[int] | None = None) -> None:
        """Hold these flat masks from now on. Bools are written where the old ones are, so views of them stay good."""
        if self.packed:
            self.masks = list(masks)
        else:
            for mine, mask in zip(self.masks, masks, strict=True):
                mine.copy_(mask.view(mine.shape))
        counts = kernels.population(self.masks) if kept is None else kept
        self.dead = [shape.numel() - count for shape, count in zip(self.shapes, counts, strict=True)]

    def returning(self, masks: Sequence[Tensor]) -> list[int]:
        """How many weights that are gone would come back with each of these flat masks."""
        return kernels.population([mask & ~mine.view(-1) for mine, mask in zip(self.masks, masks, strict=True)])


def _all_kept(weight: Tensor, packed: bool) -> Tensor:
    whole = torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
    return to_bits(whole.view(-1)) if packed else whole


class Masks(Mapping[str, Tensor]):
    """Bool masks by name, each made from its bits when it is asked for."""

    def __init__(self, names: Sequence[str], held: Held) -> None:
        self._held = dict(zip(names, zip(held.masks, held.shapes, strict=True), strict=True))

    def __getitem__(self, name: str) -> Tensor:
        return as_bool(*self._held[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


ROWS = "rows."
SETTINGS = "settings"
SETTINGS_BYTES = 4096  # a fixed size, because torch.distributed.checkpoint loads into tensors of the saved shape
LONGEST = 500  # bytes of JSON one setting may take
COMPARED = ("score", "scope", "pattern", "allocation", "schedule", "regrow")
DEALT = ("scope", "pattern", "allocation")  # those that say how many weights of which tensor are gone


def state_of(
    settings: Mapping[str, Any], clock: Clock, asked: float, sites: Sequence[Prunable], held: Held, facts: Facts
) -> dict[str, Tensor]:
    """Settings, steps, masks packed to bits, and the facts no optimizer has; DTensors where parameters are."""
    state = {
        SETTINGS: encoded(settings),
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


def masks_in(state: Mapping[str, Tensor], sites: Sequence[Prunable], held: Held) -> list[Tensor]:
    """This process's part of the saved masks, flat and stored as those that are held."""
    masks = []
    for site, shape, device in zip(sites, held.shapes, held.devices, strict=True):
        mask = unpack(part_of(state[f"mask.{site.name}"], site.parameter).to(device), shape).view(-1)
        masks.append(to_bits(mask) if held.packed else mask)
    return masks


def restore_facts(state: Mapping[str, Tensor], sites: Sequence[Prunable], facts: Facts) -> None:
    """Copy the saved facts over those that are kept. One that was not saved stays as it is."""
    for fact, tensors in facts.kept.items():
        for site in sites:
            if (saved := state.get(f"{fact}.{site.name}")) is not None:
                tensors[site.name].copy_(part_of(saved, site.parameter))


def encoded(settings: Mapping[str, Any]) -> Tensor:
    """Settings as JSON in a uint8 tensor of fixed size, zeros behind it; a long one is cut and its hash put in."""
    short = {name: _shortened(value) for name, value in settings.items()}
    text = json.dumps(short, sort_keys=True).encode()
    return torch.tensor(list(text.ljust(SETTINGS_BYTES, b"\0")), dtype=torch.uint8, device="cpu")


def _shortened(value: Any) -> Any:
    if not isinstance(value, str) or len(json.dumps(value)) <= LONGEST:
        return value
    return f"{value[:50]!a}... (sha256 {hashlib.sha256(value.encode()).hexdigest()})"


def settings_in(state: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """The settings a saved state was made with; None for one from before they were saved."""
    if SETTINGS not in state:
        return None
    try:
        found = json.loads(bytes(local(state[SETTINGS]).tolist()).rstrip(b"\0"))
    except (AttributeError, TypeError, ValueError) as error:
        raise StateError(f"The saved settings cannot be read ({error}): the state is damaged.") from error
    if not isinstance(found, dict):
        raise StateError(f"The saved settings are {type(found).__name__}, not an object: the state is damaged.")
    return found


def differing(saved: Mapping[str, Any] | None, mine: Mapping[str, Any]) -> list[str]:
    """Names of the settings in which a saved Pruner differed."""
    wanted = {name: _shortened(mine[name]) for name in COMPARED}
    return [name for name in COMPARED if saved is not None and name in saved and saved[name] != wanted[name]]


def check_settings(saved: Mapping[str, Any] | None, mine: Mapping[str, Any]) -> None:
    """Refuse the state of a Pruner that was asked for something else, naming both."""
    if (names := differing(saved, mine)) and saved is not None:
        theirs, ours = (", ".join(f"{name} {one[name]!r}" for name in names) for one in (saved, mine))
        raise StateError(
            f"The saved Pruner has {theirs}; this one has {ours}. Build the Pruner as it was saved, or keep its masks"
            " and steps and go on with the new settings: load_state_dict(state, strict=False)."
        )


def check_progress(state: Mapping[str, Tensor]) -> tuple[list[int], float]:
    """The saved steps and asked sparsity, or an error if they are impossible."""
    steps, asked = local(state["steps"]).tolist(), float(local(state["asked"]))
    taken, seen, settled = steps
    if not 0 <= settled <= seen <= taken:
        raise StateError(
            f"The saved steps are {steps} (taken, acted on, without an update owed), which must not rise nor be below"
            " zero: the state is damaged."
        )
    if not 0 <= asked < 1 or (asked > 0 and taken == 0):
        raise StateError(
            f"The saved sparsity asked for is {asked} after {taken} steps. It must be in [0, 1), and 0 before the"
            " first: the state is damaged."
        )
    return steps, asked


def noted_in(saved: Mapping[str, Any] | None, steps: Sequence[int]) -> Any:
    """The number of pruned weights noted with the settings; None if they were not saved together with these steps, as
    when a checkpoint without settings was loaded around those that were there."""
    return saved.get("gone") if saved is not None and saved.get("taken") == steps[0] else None


def check_count(gone: int, total: int, asked: float, off: float, noted: Any) -> None:
    """Refuse masks that remove another number of weights than was noted, or than the asked sparsity can mean when
    rounding makes a difference of `off` at most."""
    if abs(gone - asked * total) > off or noted not in (None, gone):
        told = f"at an asked sparsity of {asked:g}" + (f", with {noted} noted" if noted is not None else "")
        raise StateError(
            f"The saved masks remove {gone} of {total} weights {told}, which is a contradiction: the state is damaged."
        )


def rounding(sites: Sequence[Prunable], scope: str | None, pattern: Pattern | None) -> float:
    """How many weights a selection may be off the asked sparsity by, because pools and tiles are rounded one by one.

    Without a scope, for a state that does not tell it, half of all: only what is grossly wrong is refused.
    """
    total = sum(site.parameter.numel() for site in sites)
    if scope is None:
        return total / 2
    if pattern is not None and pattern.kept is not None:
        return total / pattern.inputs + 1
    tiles = (tile_of(site.name, site.parameter.shape, site.layout, None) for site in sites)
    rows = sum(site.parameter.numel() // max(1, math.prod(tile)) for site, tile in zip(sites, tiles, strict=True))
    pools = {"model": 1, "layer": len(sites)}.get(scope, rows)
    return pools * (1 if pattern is None else pattern.rows * pattern.inputs) + 1


def check_saved(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Refuse a saved state that differs from the expected one in names, kinds or shapes. Of one from before rows were
    marked or settings saved, these are not expected. Unless `strict`, facts kept for another score may differ."""
    expected = dict(expected)
    for group in (ROWS, SETTINGS):
        if not any(name.startswith(group) for name in state):
            expected = {name: tensor for name, tensor in expected.items() if not name.startswith(group)}
    missing, extra = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if not strict:
        missing, extra = ([name for name in names if not _is_fact(name)] for names in (missing, extra))
    if missing or extra:
        raise StateError(
            f"The saved state is of another model or score: {len(missing)} entries missing ({', '.join(missing[:3])}),"
            f" {len(extra)} not expected ({', '.join(extra[:3])})."
        )
    for name, tensor in expected.items():
        if name in state:
            _check_entry(name, state[name], tensor)


def _is_fact(name: str) -> bool:
    return name.partition(".")[0] in KEPT_FACTS


def _check_entry(name: str, found: Any, tensor: Tensor) -> None:
    if not isinstance(found, Tensor) or (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
        what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise StateError(f"Saved {name!r} is {what}; this model needs {tensor.dtype} {tuple(tensor.shape)}.")
    if name.startswith("shape.") and not torch.equal(found.cpu(), tensor):
        raise StateError(f"Saved {name!r} is {found.tolist()}; in this model it is {tensor.tolist()}.")


def check_mapping(state: Any) -> None:
    """Refuse what is not a dict with names for keys."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        what = f"a {type(state).__name__}" + (" with keys that are no names" if isinstance(state, Mapping) else "")
        raise StateError(f"load_state_dict takes what a Pruner's state_dict() returned; got {what}.")
    for name, found in state.items():
        if isinstance(found, Tensor) and (found.is_meta or found.layout != torch.strided):
            raise StateError(f"Saved {name!r} has no values to read ({found.device}, {found.layout}). Load it anew.")
