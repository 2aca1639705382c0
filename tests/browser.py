"""How pages are looked at: what they would fetch, and what a browser says of them."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest


class Collector(HTMLParser):
    """Everything a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data") and value and not value.startswith(("#", "data:")):
                self.fetched.append(f"{tag} {value}")


def open_page(page: Path, folder: Path) -> tuple[int, list[str]]:
    """Open a page in Chromium: the bytes of its picture (an empty page has a few thousand), and what it complains of.
    Skips where there is no Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is installed, so nobody looked at the page (Debian: apt-get install chromium)")
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    quiet += " --disable-component-update --disable-sync --enable-logging=stderr --log-level=0 --window-size=1150,2400"
    picture = folder / "page.png"
    command = [chromium, *quiet.split(), f"--user-data-dir={folder / 'profile'}", f"--screenshot={picture}"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    size = picture.stat().st_size
    broken = folder / "broken.html"
    broken.write_text("<script>console.error('seen')</script>")
    again = subprocess.run([*command, broken.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    assert "CONSOLE" in again.stderr, "complaints would not be seen"
    return size, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
