"""SIGKILL at random moments of `train`, `sweep` and `prune`: nothing is lost, and the next start ends as if there had
been no kill.

A command runs in a child that is forked from a process that has imported everything, so a run takes a second. Half of
the kills come at a random moment of the run, the other half at a random operation on the output folder (a file opened
for writing, renamed or removed), where saving is most delicate.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.fuzzing import TRAIN, Broken, check, home, saved_model

TIMED = ("seconds", "breakdown_ms", "gpu", "load_at_start", "stages", "updates", "versions", "commit")
TIMED += ("peak_bytes", "cpu_load")  # of the process that ended the run
TIMED += ("churn", "cut")  # of the last update of the masks, which a resumed process did not make
BITS = ("model", "optimizer", "masks", "pruner", "tokenizer")  # files that must be the same to the bit
LATE = 24  # operations at the end of a run, the renames and the removal of what was there before among them
WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "shutil.copyfile"}


class Stop:
    """Counts operations on files below a folder and kills this process at the one that is named."""

    def __init__(self, folder: str, at: int | None) -> None:
        self.folder, self.at, self.count = folder, at, 0

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(given[1], str) or not set(given[1]) & set("wax+"):
                return
        elif event not in WRITES:
            return
        if isinstance(given[0], str | os.PathLike) and os.fspath(given[0]).startswith(self.folder):  # type: ignore[arg-type]
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1


def start(words: list[str], folder: Path, at: int | None = None) -> tuple[int, int]:
    """Run a command in a child; its process id, and a pipe that gives the number of operations when it ends."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        return child, read
    try:
        from secateur.cli import main

        silence = os.open(os.devnull, os.O_WRONLY)
        log = os.open(folder.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        tqdm.set_lock(threading.RLock())  # the lock that is there is shared: a process killed in it would keep it
        os.dup2(silence, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        stop = Stop(str(folder.parent), at)
        sys.addaudithook(stop)
        code = main(words)
        sys.stderr.flush()
        os.write(write, str(stop.count).encode())
        os._exit(code)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


def finish(child: int, read: int) -> tuple[int, int]:
    """Exit code and number of operations."""
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), int(text or 0)


def complete(words: list[str], folder: Path) -> tuple[float, int]:
    """Run to the end; how long it took, and how many operations on the folder."""
    began = time.monotonic()
    code, operations = finish(*start(words, folder))
    check(code == 0, f"exit code {code}: {(folder.parent / 'log.txt').read_text()[-500:]}")
    return time.monotonic() - began, operations


def contents(folder: Path) -> dict[str, Any]:
    """All files below a folder: what they hold, but for times, which differ from run to run."""
    return {
        str(path.relative_to(folder)): _told(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".lock", "report.html", "report.md")
    }


def _told(path: Path) -> Any:
    if path.suffix in (".json", ".jsonl"):
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        return [_timeless(json.loads(line)) for line in lines]
    if path.name.startswith(BITS):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return path.stat().st_size > 0  # how far a run is, which counts seconds


def _timeless(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _timeless(value) for key, value in found.items() if key not in TIMED}
    return [_timeless(value) for value in found] if isinstance(found, list) else found


def kill(words: list[str], folder: Path, draw: random.Random, seconds: float, operations: int) -> bool:
    """Run and kill somewhere; whether it was killed before it ended."""
    if draw.random() < 0.5 and operations:
        late = draw.random() < 0.5  # where the new takes the place of the old
        at = draw.randrange(max(0, operations - LATE), operations) if late else draw.randrange(operations)
        code, _ = finish(*start(words, folder, at))
        return code == -signal.SIGKILL
    child, read = start(words, folder)
    until = time.monotonic() + draw.uniform(0, seconds)
    while time.monotonic() < until:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return finish(child, read)[0] == -signal.SIGKILL


def litter(folder: Path, reference: set[str]) -> set[str]:
    """What stands beside or in the result and should not."""
    return {path.name for path in folder.iterdir()} - reference


def failures(name: str, seed: int, count: int, until: float, case: Callable[[random.Random, Path], None]) -> list[str]:
    """Try a case so many times, or until the time is up, each with an output folder of its own; what went wrong."""
    wrong = []
    for number in range(count):
        if time.monotonic() > until:
            break
        place = home() / name / str(number)
        place.mkdir()
        try:
            case(random.Random(f"{name} {seed} {number}"), place / "out")
        except Exception as error:  # whatever it is, the other cases can still be tried
            wrong.append(f"{name} --seed {seed} --case {number}: {error}"[:500])
        shutil.rmtree(place)
    return wrong


def resumed(
    name: str, words: Callable[[Path], list[str]], seed: int, count: int, until: float, found: Counter[str]
) -> list[str]:
    """Kill a command that goes on where it stopped, start it again, and compare with one that was left alone."""
    base = home() / name
    (base / "reference").mkdir(parents=True)
    whole = base / "reference" / "out"
    seconds, operations = complete(words(whole), whole)
    expected = contents(whole)

    def case(draw: random.Random, out: Path) -> None:
        for _ in range(draw.choice((1, 1, 2))):
            found["killed" if kill(words(out), out, draw, seconds, operations) else "ended first"] += 1
        complete(words(out), out)
        now = contents(out)
        found["resumed"] += 1
        differing = [key for key in {*now, *expected} if now.get(key) != expected.get(key)]
        check(not differing, f"differs after resuming: {sorted(differing)[:5]}")
        more = litter(out, {path.name for path in whole.iterdir()}) | litter(out.parent, {"out", "log.txt"})
        check(not more, f"left behind: {sorted(more)[:5]}")

    return failures(name, seed, count, until, case)


def pruned(seed: int, count: int, until: float, found: Counter[str]) -> list[str]:
    """Kill `prune --overwrite`: the old result or the new one is there, and after the next start only the new one."""
    base = home() / "kill-prune"
    base.mkdir()
    text = base / "text.txt"
    text.write_text("the quick brown fox jumps over a lazy dog while seven wizards box " * 40)

    def words(out: Path, sparsity: str) -> list[str]:
        sizes = ["--context", "8", "--calibration", "2", "--evaluation", "2", "--device", "cpu"]
        return ["prune", str(saved_model()), "--data", str(text), "--recipe", "magnitude", "--overwrite", *sizes,
                "--sparsity", sparsity, "--out", str(out)]  # fmt: skip

    results = {}
    for name, sparsity in (("old", "0.3"), ("new", "0.6")):
        (base / name).mkdir()
        if name == "new":
            shutil.copytree(base / "old" / "out", base / "new" / "out")  # so that it is overwritten here too
        seconds, operations = complete(words(base / name / "out", sparsity), base / name / "out")
        results[name] = weights(base / name / "out")

    def case(draw: random.Random, out: Path) -> None:
        shutil.copytree(base / "old" / "out", out)
        dead = kill(words(out, "0.6"), out, draw, seconds, operations)
        found["killed" if dead else "ended first"] += 1
        now = weights(out)
        kept = next((name for name in results if results[name] == now), None)
        if kept is None:  # between two renames the old one has another name, until the next start
            hidden = [weights(path) for path in out.parent.iterdir() if path.is_dir() and path != out]
            check(not out.exists(), "the folder holds half a result")
            check(any(one in results.values() for one in hidden), "the result is lost")
        found[f"{kept or 'moved aside'} result found"] += 1
        complete(words(out, "0.6"), out)
        check(weights(out) == results["new"], "the next run has another result")
        more = litter(out.parent, {"out", "log.txt"})
        check(not more, f"left behind: {sorted(more)[:5]}")

    return failures(base.name, seed, count, until, case)


def weights(folder: Path) -> dict[str, Any]:
    """The files of a saved model that depend on nothing but its weights and masks."""
    return (
        {key: value for key, value in contents(folder).items() if not key.startswith("report")}
        if folder.is_dir()
        else {}
    )


def kill_train(seed: int, count: int, until: float, found: Counter[str]) -> list[str]:
    return resumed("kill-train", lambda out: [*TRAIN, "--out", str(out)], seed, count, until, found)


def kill_sweep(seed: int, count: int, until: float, found: Counter[str]) -> list[str]:
    grid = home() / "grid.toml"
    grid.write_text(
        '[base]\nmodel = "gpt-1x16"\ndata = "python"\nsteps = 6\nbatch = 4\ncontext = 8\nwarmup = 2\nevery = 2\n'
        'evaluate_every = 3\nevaluation = 2\nsparsity = 0.5\n[axes]\nscore = ["magnitude", "variance"]\nseed = [0]\n'
    )
    words = ["sweep", str(grid), "--cpu", "--checkpoint-every", "2"]
    return resumed("kill-sweep", lambda out: [*words, "--out", str(out)], seed, count, until, found)


KILLS = {"kill-train": kill_train, "kill-sweep": kill_sweep, "kill-prune": pruned}
__all__ = ["KILLS", "Broken"]
