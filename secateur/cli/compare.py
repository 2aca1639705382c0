"""Compare finished runs: tables with confidence intervals over seeds, and a page with curves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from secateur.cli.options import add_out, import_torch
from secateur.errors import LAB_EXTRA, library
from secateur.files import check_file, write

SUMMARY = "tables and a page of finished runs, with confidence intervals over seeds"
EXAMPLE = "secateur compare sweeps/digits --by score,sparsity --out compare.html"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, folders that hold runs, or --json files")
    parser.add_argument(
        "--baseline", metavar="NAME", help="row to compare the others with, such as score=magnitude (the first row)"
    )
    parser.add_argument("--by", help="settings in which rows may differ, such as score,sparsity (one setting)")
    add_out(parser, "write a page with curves, pictures and tables, such as compare.html")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers, those of every seed included")


def run(options: argparse.Namespace) -> int:
    for path in filter(None, (options.out, options.json)):
        check_file(path)
    import_torch()
    import torch

    from secateur.lab import record
    from secateur.lab.compare import compare
    from secateur.lab.runs import kept_choices, read_runs

    runs, unfinished = read_runs(options.runs)
    for folder in unfinished:
        print(f"secateur: {folder} is not finished (no summary.json) and is left out", file=sys.stderr)
    by = None if options.by is None else [name.strip() for name in options.by.split(",") if name.strip()]
    kept_by, kept_baseline = kept_choices(options.runs)
    found = compare(runs, kept_by if by is None else by, options.baseline or kept_baseline)
    print(found)
    if options.json:
        write(options.json, found.to_json(record.about("compare", options, torch.device("cpu"))))
    if options.out:
        library("matplotlib", "The page", LAB_EXTRA)
        from secateur.lab.compare_page import render

        write(options.out, render(found))
        print(f"\nPage: {options.out.resolve()}")
    return 0
