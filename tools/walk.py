"""Trace a job and print the files of the package it enters, in order, with the returns.

    python tools/walk.py [step] [prune] [sweep]             # print the walk of these jobs (all three)
    python tools/walk.py --write docs/architecture.md       # rewrite the generated parts of that page
    PYTHONPATH=OTHER_TREE python tools/walk.py --counts     # only the counts, of another checkout

Only public names and the command line's `main` are used, so the tool runs on older trees too. Code that runs while a
module is imported does not count, nor do other threads.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] or str(Path(__file__).parent.parent))

import torch
from torch import Tensor, nn

import secateur as sc
from secateur.cli import main as command_line

PACKAGE = Path(sc.__file__).parent
IMPORTS = "<frozen importlib"  # the file of Python's import system, which runs modules and finders of ours
# The same jobs before the modules were moved into packages (commit ad79e27), by this tool: files entered, changes.
BEFORE = {"step": (15, 660), "prune": (30, 15_770), "sweep": (60, 5_618)}


class Walk:
    """Follows calls and returns between the package's files while it is active."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}  # file -> depth at which it was first entered, in order
        self.calls: Counter[tuple[str, str]] = Counter()  # (from, to), in order of the first call
        self._stack: list[tuple[int, str]] = []
        self._importing = 0

    @property
    def changes(self) -> int:
        """How often execution moved to another file: every call into one, and every return from it."""
        return 2 * sum(self.calls.values())

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        if frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(IMPORTS):
            self._importing += 1 if event == "call" else -1
        elif self._importing == 0 and frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            if event == "call":
                self._enter(id(frame), Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix())
            elif any(entered == id(frame) for entered, _ in self._stack):
                while self._stack.pop()[0] != id(frame):  # a generator that was closed returns without a call
                    pass

    def _enter(self, frame: int, file: str) -> None:
        came_from = self._stack[-1][1] if self._stack else None
        if came_from != file:
            depth = len([1 for (_, one), (_, other) in zip(self._stack, self._stack[1:], strict=False) if one != other])
            self.first.setdefault(file, depth + 1 if self._stack else 0)
            if came_from is not None:
                self.calls[came_from, file] += 1
        self._stack.append((frame, file))

    def folders(self) -> str:
        """How many files of each folder were entered."""
        found = Counter(file.rpartition("/")[0] or "secateur" for file in self.first)
        return ", ".join(f"{folder} {count}" for folder, count in found.items())

    def text(self) -> str:
        """The files in the order they are first entered, then every pair of caller and callee with its count."""
        lines = [f"{'  ' * depth}{file}" for file, depth in self.first.items()]
        width = max((len(caller) for caller, _ in self.calls), default=0)
        pairs = [f"{caller:<{width}} -> {callee} ({n}x, and back)" for (caller, callee), n in self.calls.items()]
        return "\n".join([*lines, "", *pairs])


class Block(nn.Module):
    """A transformer block: attention, then an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """A small transformer that classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(32, heads=4) for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randint(0, 64, (4, 16)), torch.randint(0, 8, (4,))) for _ in range(count)]


def step(walk: Walk) -> None:
    """One `Pruner.step()` that updates the masks."""
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pruner = sc.Pruner(model, optimizer, score="variance", sparsity=sc.linear(0.5, begin=0, end=4), every=1)
    for number, (inputs, targets) in enumerate(batches(3)):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        with walk.follow() if number == 2 else contextlib.nullcontext():
            pruner.step()
        optimizer.zero_grad()


def prune(walk: Walk) -> None:
    """`sc.prune(model, batches, rounds=5, reconstruct="every")` on a small transformer."""
    model, data = Transformer(), batches(4)
    function = sc.prune  # imported on first use, which is no part of the walk
    with walk.follow():
        function(model, data, rounds=5, reconstruct="every")


GRID = """
[base]
model = "lenet5"
data = "digits"
batch = 32
steps = 4
sparsity = 0.5
every = 1
evaluate_every = 2
[axes]
score = ["magnitude", "variance"]
"""


def sweep(walk: Walk) -> None:
    """`secateur sweep` of two cells, then `secateur compare` with its page."""
    with tempfile.TemporaryDirectory() as folder:
        grid, runs, page = (str(Path(folder) / name) for name in ("grid.toml", "runs", "compare.html"))
        Path(grid).write_text(GRID)
        for arguments in (["sweep", grid, "--out", runs], ["compare", runs, "--out", page]):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), walk.follow():
                code = command_line(arguments)
            if code:
                raise SystemExit(f"secateur {' '.join(arguments)} failed:\n{said.getvalue()}")


JOBS: dict[str, Callable[[Walk], None]] = {"step": step, "prune": prune, "sweep": sweep}


def walked(name: str) -> Walk:
    """The walk of a job."""
    torch.manual_seed(0)
    walk = Walk()
    JOBS[name](walk)
    return walk


def counts(walks: dict[str, Walk]) -> str:
    """A table of files and changes of file, before the modules were moved into packages and now."""
    lines = ["| job | files before | files now | changes of file before | now |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, walk in walks.items():
        files, changes = BEFORE[name]
        lines.append(f"| {JOBS[name].__doc__} | {files} | {len(walk.first)} | {changes:,} | {walk.changes:,} |")
    return "\n".join(lines)


def written(text: str, walks: dict[str, Walk]) -> str:
    """The page with its generated parts made again."""
    parts = {name: f"{len(walk.first)} files: {walk.folders()}." for name, walk in walks.items()}
    parts = {f"walk {name}": f"{parts[name]}\n\n```text\n{walk.text()}\n```" for name, walk in walks.items()}
    for name, part in {**parts, "walk counts": counts(walks)}.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{', '.join(JOBS)} (all)")
    parser.add_argument("--counts", action="store_true", help="print the counts alone")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="rewrite the generated parts of this page")
    options = parser.parse_args()
    if unknown := set(options.jobs) - set(JOBS):
        parser.error(f"no job {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
    walks = {name: walked(name) for name in (JOBS if options.write else options.jobs or JOBS)}
    if options.write:
        options.write.write_text(written(options.write.read_text(encoding="utf-8"), walks), encoding="utf-8")
        return
    for name, walk in walks.items():
        print(f"{name}: {len(walk.first)} files ({walk.folders()}), {walk.changes} changes of file")
        if not options.counts:
            print(f"\n{walk.text()}\n")


if __name__ == "__main__":
    main()
