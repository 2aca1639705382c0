"""Turn text into a folder of tokens that `secateur train --set data=tokens:FOLDER` reads, with a held-out part."""

from __future__ import annotations

import argparse

from secateur.cli.options import TEXTS, add_out, import_torch

SUMMARY = "turn text into a folder of tokens to train on"
EXAMPLE = "secateur data builtin --out data/python && secateur train --set data=tokens:data/python --dry-run"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", help=TEXTS)
    add_out(parser, "folder for the tokens", required=True)
    parser.add_argument("--tokenizer", default="byte", help="byte, a tokenizer.json, or gpt2:FOLDER (byte)")
    parser.add_argument(
        "--held-out", type=float, default=0.1, metavar="SHARE", help="fraction of the text to hold out (0.1)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")


def run(options: argparse.Namespace) -> int:
    import_torch()
    from secateur.lab.data import prepare

    meta = prepare(options.text, options.out, options.tokenizer, options.held_out, overwrite=options.overwrite)
    counts = f"{meta['tokens']['train']:,} training and {meta['tokens']['val']:,} held-out tokens"
    print(f"{options.out}: {counts} of {meta['vocabulary']:,} kinds, {meta['dtype']}. Train on tokens:{options.out}")
    return 0
