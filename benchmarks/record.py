"""What a number needs to live with: commit, command, versions, hardware, seed and every raw sample."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import secateur

RESULTS = Path(__file__).parent / "results"


def hardware() -> str:
    """The processor this runs on, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} threads"


def commit() -> str:
    """The commit measured; "+changes" when the tree differs from it in more than results."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    changed = ["git", "status", "--porcelain", "--", "../secateur", "*.py"]
    dirty = subprocess.run(changed, cwd=here, capture_output=True, text=True, check=False).stdout.strip()
    return (done.stdout.strip() or "unknown") + ("+changes" if dirty else "")


def save(theme: str, data: dict[str, Any]) -> Path:
    """Write results/<theme>_<hardware>_<date>.json, whole or not at all."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    record = {
        "theme": theme,
        "date": today,
        "command": "python -m " + " ".join([f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": commit(),
        "hardware": hardware(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "secateur": secateur.__version__},
        **data,
    }
    slug = re.sub(r"[^a-z0-9]+", "-", hardware().lower()).strip("-")
    path = RESULTS / f"{theme}_{slug}_{today}.json"
    RESULTS.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def milliseconds(function: Callable[[], Any]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    function()
    return round((time.perf_counter() - began) * 1e3, 3)
