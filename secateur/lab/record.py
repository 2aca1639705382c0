"""Records of measurements: every raw sample in one JSON file, with commit, command, versions and hardware."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import secateur
from secateur.files import write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
UNKNOWN = "unknown"
# Read before anything is measured. Other processes on the same cores distort times: a thread that waits for its core
# holds up all others at the next barrier, so a short call can take a whole time slice of the scheduler.
LOAD_AT_START = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
BUSY = (os.cpu_count() or 1) / 4 < LOAD_AT_START


def results_folder() -> Path:
    """Inside this clone its benchmarks/results, from which its docs are made; elsewhere the current folder."""
    ours = ROOT / "benchmarks" / "results"
    return ours if ours.is_dir() and Path.cwd().is_relative_to(ROOT) else Path()


def hardware(device: torch.device) -> str:
    """The name of the device: a GPU by its product name, a CPU with its number of threads."""
    if device.type != "cpu":
        named = getattr(torch.get_device_module(device), "get_device_name", None)
        return str(named(device)) if named else device.type.upper()
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} threads"


def memory() -> str:
    """The main memory of this machine; "unknown" if the system does not report it."""
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf, and macOS lacks some names
        return UNKNOWN


def commit() -> str:
    """The commit of this package, with "+changes" if files differ from it; "unknown" if it is in no branch or tag.

    SECATEUR_COMMIT overrides it, for a copy without history. Git must track this very file: a package inside another
    project's checkout, such as in a virtual environment, must not record the commit of that project.
    """
    if stated := os.environ.get("SECATEUR_COMMIT"):
        return stated
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        if not _git("for-each-ref", "--count=1", "--contains", "HEAD"):
            return UNKNOWN  # a detached commit, which no clone of the repository will have
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python, torch, secateur and, if installed, triton."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "secateur": secateur.__version__}
    with contextlib.suppress(ImportError):
        found["triton"] = importlib.import_module("triton").__version__
    return found


def command_of(options: argparse.Namespace) -> str:
    """The command as given, without --out."""
    given = options.invocation
    return given.replace(f" --out {shlex.quote(str(options.out))}", "") if options.out else given


def about(theme: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The fields of every record: command, date, commit, hardware, versions."""
    return {
        "theme": theme,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command_of(options),
        "commit": commit(),
        "hardware": hardware(device),
        "memory": memory(),
        "load_at_start": round(LOAD_AT_START, 2),
        "versions": versions(),
    }


def save(theme: str, data: dict[str, Any], options: argparse.Namespace, device: torch.device) -> Path:
    """Write THEME_HARDWARE_DATE.json atomically and return its path."""
    record = about(theme, options, device) | data
    folder = options.out or results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", record["hardware"].lower()).strip("-")
    path: Path = folder / f"{theme}_{slug}_{record['date']}.json"
    if BUSY and not path.exists():
        print(f"secateur: the machine was busy (load {LOAD_AT_START:.1f}), so times are unreliable", file=sys.stderr)
    write(path, json.dumps(record, indent=1) + "\n")
    return path
