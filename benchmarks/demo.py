"""The demo's own table, recorded.

    python -m benchmarks.demo

Runs `secateur demo` and saves its rows, so that the README shows what somebody saw.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.record import save
from secateur.lab.demo import HEADER, demo, row


def main() -> None:
    """Run, print, save."""
    with tempfile.TemporaryDirectory() as folder:
        runs = demo(Path(folder) / "report.html")
    held_out = {run.name: run.held_out for run in runs}
    print(save("demo", {"seed": 0, "header": HEADER, "rows": [row(run) for run in runs], "held_out_loss": held_out}))


if __name__ == "__main__":
    main()
