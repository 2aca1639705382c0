"""Peak memory of `secateur data dataset:FOLDER` on a dataset made on the spot, with a kill in the middle.

    python -m tools.data_memory --folder scratch/data --gigabytes 1 --workers 2

makes a folder of parquet files with so much text (Python's standard library, every document another cut of it), trains
a BPE tokenizer on some of it, tokenizes the folder in other processes while the memory of all of them is sampled, kills
them half-way with SIGKILL, continues, and writes benchmarks/results/data-stream_*.json.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from secateur.files import read_json
from secateur.integrations.text import read_text
from secateur.lab import record
from secateur.lab.shards import PROGRESS, checksum

ROOT = Path(__file__).resolve().parent.parent
FILE_BYTES = 64_000_000  # of text in a parquet file
LONGEST = 8000  # characters of a document
VOCABULARY = 8192
EVERY = 0.2  # seconds between two samples of memory
Sample = tuple[float, float]


def make_dataset(folder: Path, size: int) -> None:
    """Parquet files with `size` bytes of text in all."""
    import datasets

    folder.mkdir(parents=True)
    text, rng = read_text("builtin"), random.Random(0)
    count = written = number = 0
    while written < size:
        rows, here = [], 0
        while here < min(FILE_BYTES, size - written):
            start, length = rng.randrange(len(text) - LONGEST), rng.randint(200, LONGEST)
            rows.append(f"{count} {text[start : start + length]}")
            here += len(rows[-1].encode())
            count += 1
        datasets.Dataset.from_dict({"text": rows}).to_parquet(folder / f"part-{number:03}.parquet", batch_size=1000)
        number, written = number + 1, written + here


def make_tokenizer(path: Path) -> None:
    """A byte-level BPE tokenizer of VOCABULARY entries, trained on 4 MB of the standard library."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([read_text("builtin")[:4_000_000]], trainer)
    made.save(str(path))


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        try:
            found += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except OSError:
            continue
    return found


def memory_of(pid: int) -> float:
    """MiB that a process and its children hold: proportional set sizes, so that shared pages count once."""
    total = 0
    for one in family(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return round(total / 1024, 1)


def watched(command: list[str], kill_at: Path | None = None, half: int = 0) -> tuple[int, float, list[Sample]]:
    """Run a command; returns its exit code, its seconds and samples of (seconds, MiB). With `kill_at`, SIGKILL once the
    token files in that folder have more than `half` bytes."""
    began = time.monotonic()
    job = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})
    samples: list[Sample] = []
    while job.poll() is None:
        samples.append((round(time.monotonic() - began, 1), memory_of(job.pid)))
        if kill_at is not None and sum(path.stat().st_size for path in kill_at.glob("*.bin")) > half:
            job.send_signal(signal.SIGKILL)
        time.sleep(EVERY)
    return job.returncode, round(time.monotonic() - began, 1), samples


def checksums(folder: Path) -> dict[str, int]:
    return {path.name: checksum(path, path.stat().st_size) for path in sorted(folder.iterdir())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the dataset and its tokens are made")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--byte", action="store_true", help="bytes instead of a tokenizer, in a tenth of the time")
    parser.add_argument("--out", type=Path, help="folder for the record (benchmarks/results)")
    options = parser.parse_args()
    options.invocation = shlex.join(["python", "-m", "tools.data_memory", *sys.argv[1:]])
    data, tokens, again = (options.folder / name for name in ("texts", "tokens", "again"))
    size = round(options.gigabytes * 1e9)
    if not data.exists():
        make_dataset(data, size)
    tokenizer = options.folder / "tokenizer.json"
    if not options.byte and not tokenizer.exists():
        make_tokenizer(tokenizer)
    chosen = "byte" if options.byte else str(tokenizer)
    command = [sys.executable, "-m", "secateur", "data", f"dataset:{data}", "--tokenizer", chosen]
    command += ["--workers", str(options.workers)]
    found: dict[str, Any] = {"bytes": size, "workers": options.workers, "tokenizer": "byte" if options.byte else "BPE"}
    shutil.rmtree(tokens, ignore_errors=True)
    code, seconds, samples = watched([*command, "--out", str(tokens)])
    if code:
        return code
    meta = read_json(tokens / "meta.json", dict)
    found |= {"tokens": meta["tokens"], "rows": meta["rows"], "shards": {k: len(v) for k, v in meta["shards"].items()}}
    found |= {"seconds": seconds, "samples": samples, "peak_mib": max(mib for _, mib in samples)}
    written = sum(path.stat().st_size for path in tokens.glob("*.bin"))
    shutil.rmtree(again, ignore_errors=True)
    unfinished = again.with_name(".again.unfinished")
    code, _, _ = watched([*command, "--out", str(again)], unfinished, written // 2)
    kept = read_json(unfinished / PROGRESS, dict)["files"]
    committed = sum(entry["tokens"] for part in kept.values() for entry in part)
    assert code == -signal.SIGKILL, code
    assert not again.exists()
    code, seconds, samples = watched([*command, "--out", str(again)])
    equal = code == 0 and checksums(again) == checksums(tokens)
    found |= {"killed_after_tokens": committed, "continued_seconds": seconds, "continued_samples": samples}
    found |= {"equal_after_kill": equal}
    path = record.save("data-stream-byte" if options.byte else "data-stream", found, options, torch.device("cpu"))
    print(f"{path}: peak {found['peak_mib']:,.0f} MiB, equal after a kill: {equal}")
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
