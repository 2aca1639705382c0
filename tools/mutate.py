"""Mutation testing: change the code one small step at a time and see whether the nearest tests notice.

    python tools/mutate.py [--modules selection/exact] [--sample 25] [--seed 0] [--jobs 2] [--out benchmarks/results]

Each mutant is one change in one module: a comparison, an arithmetic operator, a constant, `and` for `or`, a removed
statement, a negated condition, `min` for `max`, a lost return value. It is run in a copy of the tree against those
tests of the module's nearest files that call the changed function. A mutant that no test notices survives and is listed
as a diff. Those that change nothing anyone could see are listed with the reason in tools/equivalent.toml.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("secateur", "tests", "recipes", "pyproject.toml", "README.md")
NEAREST = {
    "selection/__init__": ("patterns", "selection", "allocation"),
    "selection/exact": ("selection", "patterns", "masks"),
    "selection/tiles": ("patterns", "selection"),
    "selection/allocation": ("allocation",),
    "selection/masks": ("masks", "patterns", "regrowth", "pruner"),
    "model/facts": ("pruner", "scores", "resume", "optim", "optimizers", "prune"),
    "model/masks": ("masks", "hold", "pruner"),
    "model/state": ("resume", "pruner"),
    "model/hooks": ("pruner", "optimizers"),
    "model/kinds": ("prunable", "odd_models"),
    "model/prunable": ("prunable", "odd_models"),
    "oneshot/probe": ("probe",),
    "oneshot/reconstruct": ("reconstruction", "prune"),
    "oneshot/veto": ("probe",),
    "optim": ("optim", "spam"),
    "pruner": ("pruner", "resume", "regrowth", "api", "optimizers", "optim"),
    "regrowth": ("regrowth",),
    "schedules": ("schedules", "regrowth", "pruner"),
    "scores": ("scores", "default_dtype"),
}
ISSUED = ("selection/__init__", "selection/exact", "selection/masks", "model/facts", "model/state", "oneshot/probe",
          "oneshot/reconstruct", "oneshot/veto", "pruner", "regrowth")  # fmt: skip
SLOW = 6.0  # seconds; tests that take longer are left out where quicker ones call the function too
EXAMPLES = 400  # of a property test at most, so that one mutant takes seconds
COMPARISONS = {"Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">", "Eq": "!=", "NotEq": "==", "Is": "is not",
               "IsNot": "is", "In": "not in", "NotIn": "in"}  # fmt: skip
OPERATORS = {"Add": "-", "Sub": "+", "Mult": "//", "Div": "*", "FloorDiv": "*", "Mod": "//", "LShift": ">>",
             "RShift": "<<", "BitAnd": "|", "BitOr": "&", "BitXor": "&", "Pow": "*", "MatMult": "*"}  # fmt: skip
SIGNS = {"Add": "+", "Sub": "-", "Mult": "*", "Div": "/", "FloorDiv": "//", "Mod": "%", "LShift": "<<", "RShift": ">>",
         "BitAnd": "&", "BitOr": "|", "BitXor": "^", "Pow": "**", "MatMult": "@"}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: where, and the text before and after. `first` and `last` are the lines of the function around it."""

    module: str
    line: int
    kind: str
    start: int  # in bytes of the file
    end: int
    before: str
    after: str
    first: int = 0
    last: int = 0

    def diff(self, source: bytes) -> str:
        lines, changed = source.decode().splitlines(), mutated(source, self).decode().splitlines()
        same = next((n for n, pair in enumerate(zip(lines, changed, strict=False)) if pair[0] != pair[1]), 0)
        tail = 0
        while tail < min(len(lines), len(changed)) - same - 1 and lines[-1 - tail] == changed[-1 - tail]:
            tail += 1
        old, new = lines[same : len(lines) - tail], changed[same : len(changed) - tail]
        shown = "".join(f"-{line.strip()}\n" for line in old) + "".join(f"+{line.strip()}\n" for line in new)
        return f"secateur/{self.module}.py:{self.line} ({self.kind})\n{shown}"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: killed, timeout, survived, unreached (no test calls the function) or equivalent."""

    mutant: Mutant
    fate: str
    seconds: float = 0.0
    by: str = ""


def mutated(source: bytes, mutant: Mutant) -> bytes:
    return source[: mutant.start] + mutant.after.encode() + source[mutant.end :]


class Finder(ast.NodeVisitor):
    """Walks a module and notes every change that could be made. Texts of errors, annotations and docstrings are left
    alone."""

    def __init__(self, module: str, source: bytes) -> None:
        self.module, self.source = module, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.around: list[tuple[int, int]] = []

    def place(self, node: Any) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.AST) -> str:
        start, end = self.place(node)
        return self.source[start:end].decode()

    def add(self, kind: str, node: Any, after: str, start: int | None = None, end: int | None = None) -> None:
        where = self.place(node)
        start, end = where[0] if start is None else start, where[1] if end is None else end
        before = self.source[start:end].decode()
        first, last = self.around[0] if self.around else (0, 0)
        if after != before:
            self.found.append(Mutant(self.module, node.lineno, kind, start, end, before, after, first, last))

    def between(self, kind: str, left: Any, right: Any, sign: str, instead: str) -> None:
        """Replace an operator between two operands; brackets and blanks around it stay."""
        start, end = self.place(left)[1], self.place(right)[0]
        gap = self.source[start:end].decode()
        if gap.count(sign) and "#" not in gap:
            place = gap.index(sign)
            after = gap[:place] + instead + gap[place + len(sign) :]
            self.add(kind, left, after, start, end)

    def visit_body(self, nodes: list[Any]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_FunctionDef(self, node: Any) -> None:
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        self.around.append((first, node.end_lineno))
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self.visit_body(node.body)
        self.around.pop()

    def visit_ClassDef(self, node: Any) -> None:
        self.visit_body(node.body)

    def visit_AnnAssign(self, node: Any) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: Any) -> None:
        self.add("removed statement", node, "pass")

    def visit_JoinedStr(self, node: Any) -> None:
        pass

    def visit_Assert(self, node: Any) -> None:
        pass

    def visit_Expr(self, node: Any) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            self.add("removed statement", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: Any) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.add("removed statement", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: Any) -> None:
        self.add("removed statement", node, "pass")
        name = type(node.op).__name__
        if not isinstance(node.value, ast.JoinedStr | ast.List | ast.ListComp):
            self.between("operator", node.target, node.value, SIGNS[name] + "=", OPERATORS[name] + "=")
        self.generic_visit(node)

    def visit_Continue(self, node: Any) -> None:
        self.add("removed statement", node, "pass")

    def visit_Return(self, node: Any) -> None:
        if node.value is not None and not isinstance(node.value, ast.JoinedStr):
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                self.add("return value", node, "return None")
            self.visit(node.value)

    def visit_Compare(self, node: Any) -> None:
        words = {"Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!=", "Is": "is",
                 "IsNot": "is not", "In": "in", "NotIn": "not in"}  # fmt: skip
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            name = type(op).__name__
            self.between("comparison", left, right, words[name], COMPARISONS[name])
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: Any) -> None:
        name = type(node.op).__name__
        texts = any(
            isinstance(side, ast.JoinedStr | ast.List)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        if not texts:
            self.between("operator", node.left, node.right, SIGNS[name], OPERATORS[name])
        self.generic_visit(node)

    def visit_BoolOp(self, node: Any) -> None:
        sign, instead = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between("and/or", left, right, sign, instead)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: Any) -> None:
        if isinstance(node.op, ast.Not | ast.Invert) or not isinstance(node.operand, ast.Constant):
            self.add("negation", node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_If(self, node: Any) -> None:
        self.add("condition", node.test, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: Any) -> None:
        self.add("condition", node.test, f"(not ({self.text(node.test)}))")
        self.generic_visit(node)

    def visit_Call(self, node: Any) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self.add("min/max", node.func, "max" if node.func.id == "min" else "min")
        if isinstance(node.func, ast.Name) and node.func.id in ("any", "all"):
            self.add("any/all", node.func, "all" if node.func.id == "any" else "any")
        self.generic_visit(node)

    def visit_keyword(self, node: Any) -> None:
        if node.arg not in ("strict", "device", "dtype", "stacklevel", "encoding"):
            self.visit(node.value)

    def visit_Constant(self, node: Any) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add("constant", node, str(not value))
        elif isinstance(value, int):
            self.add("constant", node, str(value + 1))
            self.add("constant", node, f"({value - 1})" if value < 1 else str(value - 1))
        elif isinstance(value, float):
            self.add("constant", node, repr(value * 2 + 1))


def mutants_of(module: str, source: bytes) -> list[Mutant]:
    finder = Finder(module, source)
    finder.visit(ast.parse(source))
    good = []
    for mutant in finder.found:
        try:
            ast.parse(mutated(source, mutant))
        except SyntaxError:
            continue
        good.append(mutant)
    return good


def known_equivalent(mutant: Mutant, source: bytes, table: list[dict[str, str]]) -> str | None:
    """The reason why this mutant changes nothing, if it was given: an entry names the line before and after."""
    shown = mutant.diff(source)
    for entry in table:
        if entry["module"] == mutant.module and all(f"\n{sign}{entry[word]}\n" in "\n" + shown.split("\n", 1)[1]
                                                    for sign, word in (("-", "before"), ("+", "after"))):  # fmt: skip
            return entry["reason"]
    return None


# What follows runs in children, which are forked from a parent that has imported the large libraries once.


class Calls:
    """A pytest plugin: which lines functions begin at that each test calls, in files of the package."""

    def __init__(self, package: str) -> None:
        self.package, self.found, self.spent = package, {}, {}  # type: ignore[var-annotated]

    def pytest_runtest_call(self, item: Any) -> None:
        seen: set[tuple[str, int]] = set()

        def trace(frame: Any, event: str, _: Any) -> None:
            code = frame.f_code
            if code.co_filename.startswith(self.package):
                seen.add((code.co_filename[len(self.package) + 1 :], code.co_firstlineno))

        self.found[item.nodeid] = seen
        self.spent[item.nodeid] = time.perf_counter()
        sys.settrace(trace)

    def pytest_runtest_teardown(self, item: Any) -> None:
        sys.settrace(None)
        if item.nodeid in self.spent:
            self.spent[item.nodeid] = time.perf_counter() - self.spent[item.nodeid]


def in_child(tree: Path, words: list[str], log: Path, calls: Path | None, examples: int) -> int:
    """Fork; the child runs pytest inside a copy of the tree. Its process id."""
    if child := os.fork():
        return child
    try:
        os.setsid()
        os.chdir(tree)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.path[:0] = [str(tree)]
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        sys.dont_write_bytecode = True
        import hypothesis
        import pytest

        limit_examples(hypothesis, examples)
        plugin = Calls(str(tree / "secateur"))
        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-m", "not gpu"]
        if calls is not None:
            options.remove("-x")
        code = int(pytest.main([*options, *words], plugins=[plugin] if calls is not None else []))
        if calls is not None:
            text = {name: [sorted(seen), plugin.spent.get(name, 0)] for name, seen in plugin.found.items()}
            calls.write_text(json.dumps(text), encoding="utf-8")
        sys.stdout.flush()
        os._exit(code)
    except BaseException as error:
        print("mutate:", repr(error), flush=True)
        os._exit(70)


def limit_examples(hypothesis: Any, most: int) -> None:
    """Property tests try fewer examples and do not look for the smallest one that fails."""
    plain = hypothesis.settings.__init__

    def limited(self: Any, parent: Any = None, **options: Any) -> None:
        phases = hypothesis.Phase
        options["phases"], options["database"] = (phases.explicit, phases.generate), None
        if isinstance(options.get("max_examples"), int):
            options["max_examples"] = min(options["max_examples"], most)
        plain(self, parent, **options)

    hypothesis.settings.__init__ = limited


def wait(child: int, limit: float) -> int | None:
    """The exit code; None if it took longer than the limit, and was killed with all it had started."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Slot:
    """A copy of the tree in which one mutant at a time is tried."""

    def __init__(self, base: Path, number: int) -> None:
        self.tree = base / f"tree{number}"
        self.log = base / f"log{number}"
        self.tree.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, self.tree / name)
        self.child: int | None = None

    def put(self, module: str, source: bytes) -> None:
        (self.tree / "secateur" / f"{module}.py").write_bytes(source)

    def start(self, mutant: Mutant, source: bytes, tests: list[str], limit: float) -> None:
        self.mutant, self.source, self.began, self.limit = mutant, source, time.monotonic(), limit
        self.put(mutant.module, mutated(source, mutant))
        self.child = in_child(self.tree, tests, self.log, None, EXAMPLES)

    def poll(self) -> Outcome | None:
        assert self.child is not None
        done, status = os.waitpid(self.child, os.WNOHANG)
        spent = time.monotonic() - self.began
        if not done and spent < self.limit:
            return None
        if not done:
            os.killpg(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
        self.child = None
        self.put(self.mutant.module, self.source)
        if not done:
            return Outcome(self.mutant, "timeout", spent)
        code = os.waitstatus_to_exitcode(status)
        text = self.log.read_text(encoding="utf-8", errors="replace")
        by = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        return Outcome(self.mutant, "survived" if code == 0 else "killed", spent, by[1] if by else f"exit {code}")


def survey(base: Path, files: list[str], jobs: int) -> tuple[dict[str, set[tuple[str, int]]], dict[str, float]]:
    """Which functions each test calls, and how long it takes; the tests must pass as they are."""
    slots = [(Slot(base, 90 + number), files[number::jobs]) for number in range(jobs) if files[number::jobs]]
    children = [in_child(slot.tree, mine, slot.log, slot.tree / "calls.json", 60) for slot, mine in slots]
    called: dict[str, set[tuple[str, int]]] = {}
    spent: dict[str, float] = {}
    for (slot, _), child in zip(slots, children, strict=True):
        if (code := wait(child, 1800)) != 0:
            raise SystemExit(f"The tests do not pass without mutants ({code}):\n{slot.log.read_text()[-3000:]}")
        for name, (seen, seconds) in json.loads((slot.tree / "calls.json").read_text(encoding="utf-8")).items():
            called[name], spent[name] = {(file, line) for file, line in seen}, seconds
    return called, spent


def tests_for(
    mutant: Mutant, files: list[str], called: dict[str, set[tuple[str, int]]], spent: dict[str, float]
) -> list[str]:
    """Tests of these files that call the function around the mutant, quick ones first; all, if it is in none."""
    mine = [name for name in called if name.partition("::")[0] in files]
    if mutant.first:
        path = f"{mutant.module}.py"
        mine = [n for n in mine if any(f == path and mutant.first <= at <= mutant.last for f, at in called[n])]
    quick = [name for name in mine if spent[name] < SLOW]
    return sorted(quick or mine, key=lambda name: spent[name])


def preload() -> None:
    """Libraries that every child needs and no mutant touches."""
    os.environ |= {"TRITON_INTERPRET": "1", "SECATEUR_KERNELS": "off", "OMP_NUM_THREADS": "1"}
    import hypothesis.strategies
    import pytest
    import torch

    torch.set_num_threads(1)
    assert pytest
    assert hypothesis
    for name in ("numpy", "scipy.stats", "safetensors.torch", "transformers", "triton"):
        try:
            __import__(name)
        except ImportError:
            continue


def run_all(work: list[tuple[Mutant, bytes, list[str], float]], base: Path, jobs: int) -> Iterator[Outcome]:
    """All mutants, so many at a time."""
    slots = [Slot(base, number) for number in range(jobs)]
    left = collections.deque(work)
    while left or any(slot.child is not None for slot in slots):
        for slot in slots:
            if slot.child is None and left:
                slot.start(*left.popleft())
            elif slot.child is not None and (outcome := slot.poll()) is not None:
                yield outcome
        time.sleep(0.02)


def sampled(module: str, source: bytes, options: argparse.Namespace) -> list[Mutant]:
    found = mutants_of(module, source)
    if options.lines:
        wanted = {int(line) for name, _, line in (w.partition(":") for w in options.lines.split(",")) if name == module}
        return [mutant for mutant in found if mutant.line in wanted]
    draw = random.Random(f"{options.seed} {module}")
    draw.shuffle(found)
    return sorted(found[: options.sample or None], key=lambda m: m.start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", default=",".join(ISSUED), help="paths in secateur/ without .py, or all")
    parser.add_argument("--sample", type=int, default=8, help="mutants of each module; 0: all (8)")
    parser.add_argument("--lines", help="all mutants of these lines alone, such as selection/masks:27,pruner:51")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60, help="seconds for one mutant (60)")
    parser.add_argument("--out", type=Path, help="folder for the record; nothing is recorded without")
    options = parser.parse_args()
    if options.lines:
        options.modules = ",".join(dict.fromkeys(word.partition(":")[0] for word in options.lines.split(",")))
    modules = list(NEAREST) if options.modules == "all" else options.modules.split(",")
    preload()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutate") as temporary:
        outcomes = campaign(modules, options, Path(temporary))
    sources = {module: (ROOT / "secateur" / f"{module}.py").read_bytes() for module in modules}
    report(outcomes, sources)
    print(f"{len(outcomes)} mutants in {time.monotonic() - began:.0f} s")
    if options.out:
        record(outcomes, sources, options)
    return 1 if any(one.fate in ("survived", "unreached") for one in outcomes) else 0


def campaign(modules: list[str], options: argparse.Namespace, base: Path) -> list[Outcome]:
    files = {m: [f"tests/test_{name}.py" for name in NEAREST[m]] for m in modules}
    called, spent = survey(base, sorted({file for names in files.values() for file in names}), options.jobs)
    print(f"{len(called)} tests pass without mutants", file=sys.stderr, flush=True)
    table = tomllib.loads((ROOT / "tools" / "equivalent.toml").read_text(encoding="utf-8"))["mutant"]
    work, outcomes = [], []
    for module in modules:
        source = (ROOT / "secateur" / f"{module}.py").read_bytes()
        for mutant in sampled(module, source, options):
            if reason := known_equivalent(mutant, source, table):
                outcomes.append(Outcome(mutant, "equivalent", by=reason))
            elif tests := tests_for(mutant, files[module], called, spent):
                work.append((mutant, source, tests, options.limit))
            else:
                outcomes.append(Outcome(mutant, "unreached"))
    for number, one in enumerate(run_all(work, base, options.jobs), 1):
        outcomes.append(one)
        if one.fate == "survived":
            print(one.mutant.diff((ROOT / "secateur" / f"{one.mutant.module}.py").read_bytes()), flush=True)
        if number % 20 == 0:
            print(f"{number} of {len(work)}", file=sys.stderr, flush=True)
    return outcomes


def totals(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """A line for every module."""
    rows = []
    for module in dict.fromkeys(one.mutant.module for one in outcomes):
        fates = collections.Counter(one.fate for one in outcomes if one.mutant.module == module)
        noticed = fates["killed"] + fates["timeout"]
        rows.append({"module": module, "mutants": fates.total(), "noticed": noticed, "equivalent": fates["equivalent"],
                     "survived": fates["survived"] + fates["unreached"]})  # fmt: skip
    return rows


def report(outcomes: list[Outcome], sources: dict[str, bytes]) -> None:
    print("\nSurvivors:")
    for one in outcomes:
        if one.fate in ("survived", "unreached"):
            print(f"[{one.fate}] {one.mutant.diff(sources[one.mutant.module])}")
    for row in totals(outcomes):
        print(row)


def record(outcomes: list[Outcome], sources: dict[str, bytes], options: argparse.Namespace) -> None:
    """Write the record as the benchmarks do."""
    sys.path[:0] = [str(ROOT)]
    import torch

    from secateur.lab import record as records

    options.invocation = shlex.join(["python", "tools/mutate.py", *sys.argv[1:]])
    survivors = [
        {"diff": one.mutant.diff(sources[one.mutant.module]), "fate": one.fate}
        for one in outcomes
        if one.fate in ("survived", "unreached")
    ]
    data = {"seed": options.seed, "modules": totals(outcomes), "survivors": survivors}
    data["mutants"] = [asdict(one) for one in outcomes]
    print(records.save("mutants", data, options, torch.device("cpu")))


if __name__ == "__main__":
    sys.exit(main())
