"""The demo's own table, recorded: what README shows is what somebody saw."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from secateur.errors import SecateurError
from secateur.lab import record


def load_demo() -> ModuleType:
    """The demo, or an error that says what it lacks."""
    try:
        from secateur.lab import demo
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        raise SecateurError(f"The demo needs {package}: pip install 'secateur[demo]'.") from missing
    return demo


def run(options: argparse.Namespace) -> int:
    """Run, print, save."""
    demo = load_demo()
    with tempfile.TemporaryDirectory() as folder:
        runs = demo.demo(Path(folder) / "report.html", options.steps)
    data = {
        "seed": 0,
        "header": demo.HEADER,
        "rows": [demo.row(run) for run in runs],
        "held_out_loss": {run.name: run.held_out for run in runs},
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # as the demo itself chooses
    print(record.save("demo", data, options, device))
    return 0
