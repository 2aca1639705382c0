"""Turn text into a folder of tokens that `secateur train --set data=tokens:FOLDER` reads, with a held-out part.

A dataset (dataset:NAME) is streamed, tokenized by several processes and written in shards, in little memory. The same
command continues after an interruption, to the same files.
"""

from __future__ import annotations

import argparse

from secateur.cli.options import TEXTS, add_out, import_torch, positive

SUMMARY = "turn text into a folder of tokens to train on"
EXAMPLE = "secateur data builtin --out data/python && secateur train --set data=tokens:data/python --dry-run"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", help=TEXTS)
    add_out(parser, "folder for the tokens", required=True)
    parser.add_argument("--tokenizer", default="byte", help="byte, a tokenizer.json, or gpt2:FOLDER (byte)")
    parser.add_argument(
        "--held-out", type=float, default=0.1, metavar="SHARE", help="fraction of the text to hold out (0.1)"
    )
    parser.add_argument(
        "--tokens", type=positive, metavar="N", help="of a dataset: stop at N tokens, training and held-out (all)"
    )
    parser.add_argument("--column", metavar="NAME", help="of a dataset: the column with the text (text)")
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="of a dataset: processes that tokenize (one for each CPU)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")


def run(options: argparse.Namespace) -> int:
    import_torch()
    from secateur.lab.data import prepare

    meta = prepare(
        options.text, options.out, options.tokenizer, options.held_out, overwrite=options.overwrite,
        tokens=options.tokens, column=options.column, workers=options.workers,
    )  # fmt: skip
    counts = f"{meta['tokens']['train']:,} training and {meta['tokens']['val']:,} held-out tokens"
    files = f" in {sum(map(len, meta['shards'].values()))} shards" if "shards" in meta else ""
    kinds = f"{meta['vocabulary']:,} kinds, {meta['dtype']}{files}"
    print(f"{options.out}: {counts} of {kinds}. Train on tokens:{options.out}")
    return 0
