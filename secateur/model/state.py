"""A Pruner's saved state: made, checked against the Pruner that loads it, restored, and in a file of its own.

It is a flat dict of tensors: steps, asked sparsity, settings as JSON, and for each weight its mask packed row by row,
its shape, a mark for every row, and the facts no optimizer keeps. A file holds whole tensors as safetensors, so nothing
in it can run when it is read, and it can be loaded at any world size.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from secateur.errors import HF_EXTRA, StateError, library
from secateur.files import replacing
from secateur.model.distributed import like, local, part_of, placement, unwrap, whole
from secateur.model.facts import KEPT_FACTS, Facts
from secateur.model.masks import Held
from secateur.model.prunable import Prunable, plain_name
from secateur.scores import mixed
from secateur.selection import SYNONYMS
from secateur.selection.exact import Peers
from secateur.selection.masks import can_unpack, pack, unpack
from secateur.selection.tiles import Pattern, tile_of

PRUNER = "pruner.safetensors"
KIND = {"format": "pt", "secateur": "pruner"}
ROWS = "rows."
SETTINGS = "settings"
SETTINGS_BYTES = 4096  # a fixed size, because torch.distributed.checkpoint loads into tensors of the saved shape
LONGEST = 500  # bytes of JSON that one setting may take
COMPARED = ("score", "scope", "pattern", "allocation", "schedule", "regrow")
SPREAD = ("scope", "pattern", "allocation")  # settings that decide how many weights each tensor loses


def state_of(
    settings: Mapping[str, Any], steps: list[int], asked: float, prunables: Sequence[Prunable], held: Held, facts: Facts
) -> dict[str, Tensor]:
    """The saved state of a Pruner. Entries of sharded parameters are DTensors with the same placements."""
    state = {
        SETTINGS: encoded(settings),
        "steps": torch.tensor(steps, device="cpu"),
        "asked": torch.tensor(asked, dtype=torch.float64, device="cpu"),
    }
    for number, prunable in enumerate(prunables):
        state[f"mask.{prunable.name}"] = like(pack(held.bools(number)), prunable.parameter)
        state[f"{ROWS}{prunable.name}"] = like(_marks(prunable.parameter), prunable.parameter)
        state[f"shape.{prunable.name}"] = torch.tensor(prunable.parameter.shape, device="cpu")
        for fact, tensors in facts.kept.items():
            own = tensors[prunable.name].clone(memory_format=torch.contiguous_format)
            state[f"{fact}.{prunable.name}"] = like(own, prunable.parameter)
    return state


def _marks(tensor: Tensor) -> Tensor:
    """A byte for every local row, hashed from its index in the whole tensor: rows of another process are detected."""
    rows = placement(tensor)
    here = torch.arange(rows.sizes[rows.rank], device=local(tensor).device) + rows.first_row
    return (mixed(here) & 0xFF).to(torch.uint8)


@dataclass(frozen=True)
class SavedState:
    """Progress and settings of a saved Pruner, checked against this one."""

    steps: list[int]
    asked: float
    settings: dict[str, Any] | None  # None for states from before settings were saved
    changed: list[str]  # names of the settings in which the two differ

    @property
    def spread_changed(self) -> bool:
        """Whether this Pruner's settings spread the zeros over tensors in another way than the saved masks."""
        return any(name in SPREAD for name in self.changed)

    @property
    def carried(self) -> bool:
        """Whether the masks come, directly or by an earlier load, from settings that spread zeros in another way."""
        return self.spread_changed or bool(self.settings and self.settings.get("carried"))

    @property
    def scheduled(self) -> float:
        """What the schedule had asked for; it may be less than the masks have if these were given."""
        if self.settings is None or self.changed:
            return 0.0
        found = self.settings.get("scheduled", self.asked)
        return float(found) if isinstance(found, int | float) else self.asked

    @property
    def noted(self) -> Any:
        """The saved number of pruned weights; None if it was not saved at the same step as the masks."""
        same_step = self.settings is not None and self.settings.get("taken") == self.steps[0]
        return self.settings.get("gone") if self.settings is not None and same_step else None


def read_saved(
    state: Any, expected: Mapping[str, Tensor], mine: Mapping[str, Any], peers: Peers, strict: bool
) -> SavedState:
    """The progress and settings in a saved state, or an error if it does not fit what is `expected` here. Unless
    `strict`, settings may differ from `mine`."""
    check_mapping(state)
    settings = settings_in(state)
    if strict:
        check_settings(settings, mine)
    check_saved(expected, state, strict)
    check_rows(state, peers)
    steps, asked = check_progress(state, bool(settings and settings.get("carried")))
    return SavedState(steps, asked, settings, differing(settings, mine))


def check_rows(state: Mapping[str, Tensor], peers: Peers) -> None:
    """Refuse, on all processes, shards of other processes: a pickled DTensor holds its saver's shard."""
    strange = [name for name, saved in state.items() if name.startswith(ROWS) and not _is_here(saved)]
    if any(peers.totals([len(strange)])):
        where = f" (here among others {strange[0].removeprefix(ROWS)!r})" if strange else ""
        raise StateError(
            f"The saved masks are of rows that other processes hold{where}: one process saved its own shards alone."
            " Save with torch.distributed.checkpoint, or full_tensor() of every entry (docs/distributed.md)."
        )


def _is_here(saved: Tensor) -> bool:
    """Whether the marks match this process's rows. No collective: other ranks may have failed before."""
    try:
        return torch.equal(local(saved).cpu(), _marks(saved).cpu())
    except RuntimeError:  # torch refuses a DTensor whose mesh lacks this process
        return False


def masks_in(state: Mapping[str, Tensor], prunables: Sequence[Prunable], held: Held) -> list[Tensor]:
    """The local shards of the saved masks, flat, as bits or bools like the masks held."""
    masks = []
    for prunable, shape, device in zip(prunables, held.shapes, held.devices, strict=True):
        masks.append(held.stored(unpack(part_of(state[f"mask.{prunable.name}"], prunable.parameter).to(device), shape)))
    return masks


def restore_facts(state: Mapping[str, Tensor], prunables: Sequence[Prunable], facts: Facts) -> None:
    """Copy the saved facts into those kept. Facts that were not saved keep their values."""
    for fact, tensors in facts.kept.items():
        for prunable in prunables:
            if (saved := state.get(f"{fact}.{prunable.name}")) is not None:
                tensors[prunable.name].copy_(part_of(saved, prunable.parameter))


def compact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These tensors, copied if they are part of a larger storage, which would be saved with them."""
    return {k: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for k, t in tensors.items()}


def encoded(settings: Mapping[str, Any]) -> Tensor:
    """Settings as JSON in a zero-padded uint8 tensor; long values are replaced by their beginning and a hash."""
    short = {name: _shortened(value) for name, value in settings.items()}
    text = json.dumps(short, sort_keys=True).encode()
    return torch.tensor(list(text.ljust(SETTINGS_BYTES, b"\0")), dtype=torch.uint8, device="cpu")


def _shortened(value: Any) -> Any:
    if not isinstance(value, str) or len(json.dumps(value)) <= LONGEST:
        return value
    return f"{value[:50]!a}... (sha256 {hashlib.sha256(value.encode()).hexdigest()})"


def settings_in(state: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """The settings of a saved state; None for states from before settings were saved."""
    if SETTINGS not in state:
        return None
    try:
        found = json.loads(bytes(local(state[SETTINGS]).tolist()).rstrip(b"\0"))
    except (AttributeError, TypeError, ValueError) as error:
        raise StateError(f"The saved settings cannot be read ({error}): the state is damaged.") from error
    if not isinstance(found, dict):
        raise StateError(f"The saved settings are {type(found).__name__}, not an object: the state is damaged.")
    if isinstance(scope := found.get("scope"), str):
        found["scope"] = SYNONYMS.get(scope, scope)
    return found


def differing(saved: Mapping[str, Any] | None, mine: Mapping[str, Any]) -> list[str]:
    """Names of the settings in which a saved Pruner differs."""
    wanted = {name: _shortened(mine[name]) for name in COMPARED}
    return [name for name in COMPARED if saved is not None and name in saved and saved[name] != wanted[name]]


def check_settings(saved: Mapping[str, Any] | None, mine: Mapping[str, Any]) -> None:
    """Refuse the state of a Pruner with other settings, and name both values."""
    if (names := differing(saved, mine)) and saved is not None:
        theirs, ours = (", ".join(f"{name} {one[name]!r}" for name in names) for one in (saved, mine))
        raise StateError(
            f"The saved Pruner has {theirs}; this one has {ours}. Build the Pruner with the saved settings, or load its"
            " masks and steps and continue with the new settings: load_state_dict(state, strict=False). A callback"
            " takes the masks from the weights: PrunerCallback(resume=False, masks='zeros', ...)."
        )


def check_progress(state: Mapping[str, Tensor], carried: bool) -> tuple[list[int], float]:
    """The saved steps and asked sparsity, or an error if these are impossible. Masks that were `carried` over may have
    pruned before the first step."""
    steps, asked = local(state["steps"]).tolist(), float(local(state["asked"]))
    taken, seen, settled = steps
    if not 0 <= settled <= seen <= taken:
        raise StateError(
            f"The saved steps are {steps} (taken, acted on, last with current masks), which must not rise nor be"
            " negative: the state is damaged."
        )
    if not 0 <= asked < 1 or (asked > 0 and taken == 0 and not carried):
        raise StateError(
            f"The saved sparsity is {asked} after {taken} steps. It must be in [0, 1), and 0 before the first step: the"
            " state is damaged."
        )
    return steps, asked


def check_count(gone: int, total: int, asked: float, off: float, noted: Any) -> None:
    """Refuse masks whose number of pruned weights is not the saved one (`noted`), or is further than `off`, the largest
    rounding error, from the asked sparsity."""
    if abs(gone - asked * total) > off or noted not in (None, gone):
        told = f"at an asked sparsity of {asked:g}" + (f", with a saved count of {noted}" if noted is not None else "")
        raise StateError(
            f"The saved masks remove {gone} of {total} weights {told}. These contradict each other: the state is"
            " damaged."
        )


def rounding(prunables: Sequence[Prunable], scope: str | None, pattern: Pattern | None) -> float:
    """How many weights a selection may be off the asked sparsity, because counts of each pool or tile are rounded.

    For a state that does not say its scope (None): half of all weights, so that only gross errors are refused.
    """
    total = sum(prunable.parameter.numel() for prunable in prunables)
    if scope is None:
        return total / 2
    if pattern is not None and pattern.kept is not None:
        return total / pattern.inputs + 1
    rows = 0
    for prunable in prunables:
        tile = tile_of(prunable.name, prunable.parameter.shape, prunable.layout, None)
        rows += prunable.parameter.numel() // max(1, math.prod(tile))
    pools = {"model": 1, "layer": len(prunables)}.get(scope, rows)
    return pools * (1 if pattern is None else pattern.rows * pattern.inputs) + 1


def check_saved(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Refuse a saved state that differs from the expected one in names, types or shapes. Older states have no row marks
    or settings, which is accepted. Unless `strict`, facts kept for another score may differ."""
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
            f" {len(extra)} not expected ({', '.join(extra[:3])}). Build the same model and Pruner that were saved."
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
    """Refuse anything but a dict with names for keys."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        what = f"a {type(state).__name__}" + (" with keys that are no names" if isinstance(state, Mapping) else "")
        raise StateError(f"load_state_dict needs what a Pruner's state_dict() returned; got {what}.")
    for name, found in state.items():
        if isinstance(found, Tensor) and (found.is_meta or found.layout != torch.strided):
            raise StateError(
                f"Saved {name!r} has no values to read ({found.device}, {found.layout}). Load the file again."
            )


class HasState(Protocol):
    """A Pruner, as far as `WholeState` needs it."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None: ...


class WholeState:
    """A Pruner's state as whole tensors on the CPU, for libraries that save on one rank what every rank returns."""

    def __init__(self, pruner: HasState) -> None:
        self._pruner = pruner

    def state_dict(self) -> dict[str, Tensor]:
        """The Pruner's state, the same plain CPU tensors on every rank; all ranks must call it."""
        state = self._pruner.state_dict()
        return compact({name: whole(tensor).cpu().contiguous() for name, tensor in state.items()})

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load such a state at any world size; see `Pruner.load_state_dict`."""
        self._pruner.load_state_dict(state, strict)


# Files


def write_pruner(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a state of whole tensors (`pruner.for_checkpointing().state_dict()`): the whole file or none."""
    files = library("safetensors.torch", "Saving a Pruner", HF_EXTRA)
    with replacing(path) as temporary:
        files.save_file(dict(state), temporary, metadata=KIND)


def read_pruner(path: Path) -> dict[str, Tensor]:
    """The state in a file that `write_pruner` wrote, or an error that names the file."""
    files = library("safetensors", "Reading a saved Pruner", HF_EXTRA)
    try:
        with files.safe_open(path, framework="pt") as opened:
            kind = (opened.metadata() or {}).get("secateur")
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, files.SafetensorError) as error:
        raise StateError(
            f"{path} cannot be read ({error}): it is missing or damaged. Resume from another checkpoint, or put back a"
            " copy of this file."
        ) from error
    if kind != KIND["secateur"]:
        raise StateError(f"{path} is not the state of a Pruner but some other safetensors file.")
    return found


def restore(pruner: HasState, state: Mapping[str, Tensor], path: Path, strict: bool = True) -> None:
    """Load a state that was read from this file, and name the file if it does not fit."""
    try:
        pruner.load_state_dict(state, strict=strict)
    except StateError as error:
        raise StateError(f"{path}: {error}") from error


def check_zeros(model: nn.Module, state: Mapping[str, Tensor], path: Path, advice: str = "") -> None:
    """Refuse masks of another checkpoint: weights that a mask prunes must be zero in the model.

    Names and shapes are left to `Pruner.load_state_dict`.
    """
    check_mapping(state)
    for name, parameter in unwrap(model).named_parameters():
        packed, weight = state.get(f"mask.{plain_name(name)}"), local(parameter.detach())
        if packed is None or not can_unpack(packed, parameter.shape):
            continue
        mask = unpack(part_of(packed, parameter).to(weight.device), weight.shape)
        wrong = int(weight.masked_fill(mask, 0).count_nonzero())
        if wrong:
            raise StateError(
                f"{path} is of another checkpoint than the model: it prunes {wrong:,} weights of {plain_name(name)!r}"
                f" that are not zero. Name the checkpoint the model was loaded from.{advice}"
            )
