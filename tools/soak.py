"""The long version of tests/test_fuzz.py, and kills: `make soak`, or

    python tools/soak.py [--only selections,kill-train] [--scale 0.1] [--seconds 300] [--seed 0] [--jobs 2]
    python tools/soak.py --only states --seed 0 --case 17      # repeats one case
    python tools/soak.py --tables                              # rewrites the tables of docs/reliability.md

Every target stops at its count or when its seconds are over, whichever comes first. Failures are collected, printed
with what repeats them, and recorded; the exit code says whether there were any.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
os.environ |= {"TRITON_INTERPRET": "1", "SECATEUR_KERNELS": "off", "HF_HUB_OFFLINE": "1"}  # plain torch, no network

import torch

torch.set_num_threads(1)

import killing

from secateur.lab import record
from secateur.report import markdown_table
from tests import fuzzing
from tools.cells import dated

COUNTS = {"selections": 1_000_000, "recipes": 1000, "states": 1000, "folders": 500, "commands": 500,
          **dict.fromkeys(killing.KILLS, 50)}  # fmt: skip
WORDS = {
    "selections": "random selections against a stable sort",
    "recipes": "random recipes, grids and pruning recipes",
    "states": "damaged states of a Pruner",
    "folders": "damaged run folders and saved models",
    "commands": "random command lines",
    "kill-train": "SIGKILL of `train`, then resumed",
    "kill-sweep": "SIGKILL of `sweep`, then resumed",
    "kill-prune": "SIGKILL of `prune --overwrite`, then run again",
}
SHARES = 200  # parts a target is cut into, so that processes share it evenly


def share(task: tuple[str, int, int, int, float]) -> tuple[Counter[str], list[str]]:
    """Cases first to last of one target."""
    torch.set_num_threads(1)
    target, seed, first, last, until = task
    found: Counter[str] = Counter()
    wrong = []
    for number in range(first, last):
        if time.time() > until:
            break
        try:
            found[fuzzing.one(target, seed, number)] += 1
        except fuzzing.Broken as error:
            wrong.append(str(error))
    return found, wrong


def soak(target: str, options: argparse.Namespace, pool: Any) -> dict[str, Any]:
    """One target: how many cases, what came of them, what went wrong."""
    count = max(1, round(COUNTS[target] * options.scale))
    began = time.time()
    found: Counter[str] = Counter()
    wrong: list[str] = []
    if target in killing.KILLS:
        wrong = killing.KILLS[target](options.seed, count, time.monotonic() + options.seconds, found)
        cases = found["killed"] + found["ended first"]
    else:
        step = -(-count // SHARES)
        until = began + options.seconds
        tasks = [(target, options.seed, n, min(n + step, count), until) for n in range(0, count, step)]
        for outcomes, failures in pool.imap_unordered(share, tasks):
            found += outcomes
            wrong += failures
        cases = found.total() + len(wrong)
    spent = time.time() - began
    print(f"{target}: {cases:,} cases in {spent:.0f} s, {len(wrong)} wrong; {dict(found.most_common())}", flush=True)
    for line in wrong[:10]:
        print("  " + line, flush=True)
    return {"target": target, "asked": count, "cases": cases, "seconds": round(spent, 1), "outcomes": dict(found),
            "wrong": len(wrong), "failures": wrong[:20]}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(COUNTS), help="targets, separated by commas (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the counts (1)")
    parser.add_argument("--seconds", type=float, default=600, help="for each target at most (600)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--case", type=int, help="repeat one case of one target")
    parser.add_argument("--tables", action="store_true", help="rewrite the tables of docs/reliability.md alone")
    parser.add_argument("--out", type=Path, help="folder of the record (benchmarks/results)")
    options = parser.parse_args()
    options.invocation = shlex.join(["python", "tools/soak.py", *sys.argv[1:]])
    if options.tables:
        return write_tables()
    if options.case is not None:
        print(fuzzing.one(options.only, options.seed, options.case))
        return 0
    results = []
    with get_context("fork").Pool(options.jobs) as pool:
        for target in options.only.split(","):
            results.append(soak(target, options, pool))
    data = {"seed": options.seed, "jobs": options.jobs, "targets": results}
    print(record.save("soak", data, options, torch.device("cpu")))
    return int(any(result["wrong"] for result in results))


def soak_table(found: list[dict[str, Any]]) -> str:
    rows = [
        (WORDS[one["target"]], f"{one['cases']:,}", f"{one['wrong']:,}", f"{one['seconds']:.0f} s") for one in found
    ]
    return markdown_table(("tried", "cases", "promises broken", "time"), rows)


def mutants_table(found: list[dict[str, Any]]) -> str:
    names = ("mutants", "noticed", "equivalent", "survived")
    rows = [(f"`{one['module']}`", *(f"{one[name]:,}" for name in names)) for one in found]
    rows.append(("all", *(f"{sum(one[name] for one in found):,}" for name in names)))
    return markdown_table(("module", *names), rows)


def newest(theme: str, rows: str, name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Of every row, by its name, that of the newest record that has it; and where the rows come from."""
    found: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}
    for path in dated(theme):
        one = json.loads(path.read_text(encoding="utf-8"))
        for row in one[rows]:
            found[row[name]] = row
            sources[row[name]] = (
                f"{one['hardware']}; torch {one['versions']['torch']}, Python {one['versions']['python']};"
                f" commit {one['commit']}, {one['date']}: `{one['command']}`"
            )
    return list(found.values()), list(dict.fromkeys(sources.values()))


def write_tables() -> int:
    """The newest figures of each kind into docs/reliability.md."""
    path = ROOT / "docs" / "reliability.md"
    text = path.read_text(encoding="utf-8")
    kinds = (("soak", "targets", "target", soak_table), ("mutants", "modules", "module", mutants_table))
    for theme, rows, name, table in kinds:
        found, sources = newest(theme, rows, name)
        if found:
            before, _, rest = text.partition(f"<!-- begin {theme} -->")
            after = rest.partition(f"<!-- end {theme} -->")[2]
            shown = "\n\n".join([table(found), *sources])
            text = f"{before}<!-- begin {theme} -->\n{shown}\n<!-- end {theme} -->{after}"
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
