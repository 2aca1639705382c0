"""What a number needs to live with: commit, command, versions, hardware, seed and every raw sample."""

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
# Before anything is measured. Other processes on the same cores do not slow all forms alike: a thread that waits for a
# core holds up the others at the next barrier, so small calls of any form take one slice of the scheduler's time.
LOAD_AT_START = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
BUSY = (os.cpu_count() or 1) / 4 < LOAD_AT_START


def results_folder() -> Path:
    """benchmarks/results of the clone this package lies in; installed elsewhere, of the current folder."""
    base = ROOT if (ROOT / "benchmarks" / "results").is_dir() else Path.cwd()
    return base / "benchmarks" / "results"


def hardware(device: torch.device) -> str:
    """The device measured, in words: a GPU by its name, a CPU with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} threads"


def memory() -> str:
    """Memory of the machine; Windows does not tell it without a further library."""
    if not hasattr(os, "sysconf"):
        return "unknown"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def commit() -> str:
    """The commit measured; "+changes" when the package differs from it.

    SECATEUR_COMMIT tells it to a copy without history. A package that lies inside another project's checkout (a virtual
    environment, say) must not pass that project's commit off as its own, so git is asked about this very file.
    """
    if told := os.environ.get("SECATEUR_COMMIT"):
        return told
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


def versions() -> dict[str, str]:
    """Of everything that can change a number; triton only where it is installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "secateur": secateur.__version__}
    with contextlib.suppress(ImportError):
        found["triton"] = importlib.import_module("triton").__version__
    return found


def measured_by(options: argparse.Namespace) -> str:
    """The command as it was given, but for the folder: where a number was written says nothing about it."""
    given = options.invocation
    return given.replace(f" --out {shlex.quote(str(options.out))}", "") if options.out else given


def about(theme: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What every record begins with: which command made it, when, with what and on what."""
    return {
        "theme": theme,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": measured_by(options),
        "commit": commit(),
        "hardware": hardware(device),
        "memory": memory(),
        "load_at_start": round(LOAD_AT_START, 2),
        "versions": versions(),
    }


def save(theme: str, data: dict[str, Any], options: argparse.Namespace, device: torch.device) -> Path:
    """Write <theme>_<hardware>_<date>.json, whole or not at all."""
    record = about(theme, options, device) | data
    folder = options.out or results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", record["hardware"].lower()).strip("-")
    path: Path = folder / f"{theme}_{slug}_{record['date']}.json"
    if BUSY and not path.exists():
        print(f"secateur: other work was running (load {LOAD_AT_START:.1f}): do not trust the times", file=sys.stderr)
    write(path, json.dumps(record, indent=1) + "\n")
    return path
