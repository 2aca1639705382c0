"""Run `secateur demo` and record its table.

Example: secateur bench demo --steps 100
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from secateur.lab import record
from secateur.lab.demo import HEADER, demo, table


def run(options: argparse.Namespace) -> int:
    """Run, print, save."""
    with tempfile.TemporaryDirectory() as folder:
        runs = demo(Path(folder) / "report.html", options.steps)
    data = {
        "seed": 0,
        "header": HEADER,
        "rows": table(runs),
        "held_out_loss": {run.name: run.held_out for run in runs},
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # as the demo chooses
    print(record.save("demo", data, options, device))
    return 0
