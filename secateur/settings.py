"""Settings of a job: a frozen dataclass filled from TOML or the command line, with every key and value checked. And the
one environment variable that every part reads."""

from __future__ import annotations

import os
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from secateur.errors import SecateurError, nearest

Kind = TypeVar("Kind")


def kernels_off() -> bool:
    """Whether the variable SECATEUR_KERNELS asks for plain torch; a word other than "on" and "off" raises."""
    asked = os.environ.get("SECATEUR_KERNELS") or "on"
    if asked not in ("on", "off"):
        raise SecateurError(f"SECATEUR_KERNELS is {asked!r}. Set it to off for plain torch, or unset it.")
    return asked == "off"


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML file, or an error that says why it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SecateurError(f"Cannot read {path}: {reason}.") from error
    except tomllib.TOMLDecodeError as error:
        raise SecateurError(f"{path} is not TOML: {error}.") from error


def checked(kind: type, found: Mapping[str, Any], source: str) -> dict[str, Any]:
    """These values in the types of the dataclass, or an error that names the key and the closest known one."""
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    values = {}
    for key, given in found.items():
        if key not in known:
            raise SecateurError(f"{source} has no setting {key!r}.{nearest(key, known)} Known: {', '.join(known)}.")
        value: Any = tuple(given) if isinstance(given, list) else given
        if not _fits(value, hints[key]):
            raise SecateurError(f"{source}: {key} = {given!r} must be {_words(hints[key])}.")
        values[key] = float(value) if hints[key] is float else value
    return values


def from_mapping(kind: type[Kind], found: Mapping[str, Any], source: str) -> Kind:
    """An instance with these values, which are checked."""
    return kind(**checked(kind, found, source))


def parse(assignments: Iterable[str]) -> dict[str, Any]:
    """Values of "key=value" words: numbers, booleans and lists as in TOML, "none" as None, anything else as text."""
    found: dict[str, Any] = {}
    for word in assignments:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise SecateurError(f"--set needs key=value, such as lr=3e-4; got {word!r}.")
        try:
            found[key] = None if text == "none" else tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = text
    return found


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _words(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "none"}
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_words, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a list, each {_words(get_args(hint)[0])}"
    return names[hint]
