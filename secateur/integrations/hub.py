"""Whether the Hugging Face hub can be reached: its libraries would try again for half a minute before they say so."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

from secateur.errors import HF_EXTRA, library

PATIENCE = 5.0  # seconds to wait for the hub's answer


def unreachable() -> str | None:
    """Why the hub cannot be reached; None if it can, if the user asked for offline mode, and if there is a proxy, which
    is not checked."""
    constants = library("huggingface_hub.constants", "The Hugging Face hub", HF_EXTRA)
    if getproxies() or constants.HF_HUB_OFFLINE:
        return None
    where = urlsplit(constants.ENDPOINT)
    try:
        port = where.port or (80 if where.scheme == "http" else 443)
        socket.create_connection((where.hostname or "", port), PATIENCE).close()
    except OSError as error:
        return f"{where.hostname} cannot be reached ({error})"
    return None


@contextmanager
def offline_if_unreachable() -> Iterator[str | None]:
    """Yields what `unreachable` says. If it is something, the hub's libraries are in offline mode for so long: they
    look in their caches and give up at once."""
    constants = library("huggingface_hub.constants", "The Hugging Face hub", HF_EXTRA)
    why, before = unreachable(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or why is not None
    try:
        yield why
    finally:
        constants.HF_HUB_OFFLINE = before
