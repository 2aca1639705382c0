"""Which settings differ among runs, and whether a table of them compares like with like."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from secateur.errors import ComparisonError
from secateur.settings import nearest

Settings = Mapping[str, Any]
SEED = "seed"
# A seed is what a row is averaged over, and where a run was written says nothing about it.
NEVER_COMPARED = (SEED, "out")
NOT_SET = "not set"


def shown(value: Any) -> str:
    """A setting as text. Equal texts are equal settings: 0 and 0.0, or null and "none"."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"{value:.12g}" if abs(value) < 1e300 else str(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def texts(settings: Settings) -> dict[str, str]:
    """Everything two runs can differ in, as text."""
    return {name: shown(value) for name, value in settings.items() if name not in NEVER_COMPARED}


def differing(configs: Sequence[Settings]) -> dict[str, list[str]]:
    """Each setting that is not the same everywhere, with its values in the order they are met."""
    found = [texts(config) for config in configs]
    names = dict.fromkeys(name for one in found for name in one)
    values = {name: list(dict.fromkeys(one.get(name, NOT_SET) for one in found)) for name in names}
    return {name: several for name, several in values.items() if len(several) > 1}


def check_fair(configs: Sequence[Settings], axes: Sequence[str]) -> None:
    """Refuse a comparison along `axes` if anything but these and the seed differs."""
    _check_axes(configs, axes)
    unfair = {name: values for name, values in differing(configs).items() if name not in axes}
    if unfair:
        listed = "; ".join(f"{name} ({', '.join(values)})" for name, values in unfair.items())
        raise ComparisonError(
            f"These runs differ in more than {', '.join(axes) or 'the seed'}: {listed}. What is meant to differ is"
            f" named so: --by {','.join([*axes, *unfair])}. Otherwise leave out the runs that do not belong."
        )


def _check_axes(configs: Sequence[Settings], axes: Sequence[str]) -> None:
    known = list(dict.fromkeys(name for config in configs for name in texts(config)))
    for axis in axes:
        if axis == SEED:
            raise ComparisonError("Rows cannot differ by seed: seeds are what a row is averaged over. Leave it out.")
        if axis not in known:
            hint = nearest(axis, known)
            raise ComparisonError(f"No run has a setting {axis!r}.{hint} Known: {', '.join(known)}.")
