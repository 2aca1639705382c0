"""Train a small GPT dense, pruned by magnitude and pruned by Adam's variance; print a table and write a page.

It reads the source of Python's standard library, so it needs no download. It takes two to three minutes on two CPU
cores. Needs pip install "secateur[demo]".
"""

from __future__ import annotations

import argparse
from pathlib import Path

from secateur.cli.options import add_out, demo_steps, import_torch
from secateur.files import check_file, claimed

SUMMARY = "train a small GPT dense and pruned, compare, write a page"
EXAMPLE = "secateur demo --steps 100 --out report.html"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_out(parser, "where the page goes (report.html)", default=Path("report.html"))
    parser.add_argument("--steps", type=demo_steps, help="training steps of each run (450)")


def run(options: argparse.Namespace) -> int:
    check_file(options.out)
    import_torch()
    from secateur.lab.demo import demo

    with claimed(options.out):
        demo(options.out, options.steps)
    return 0
