"""The import law of the package, read from its source: rooms in order, no cycle, nothing hidden in a function."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from secateur.bench import NAMES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "secateur"

# A module may import those of its own level and of earlier ones. The longest matching name decides.
LEVELS = [
    ("errors", "schedules", "scores", "files", "settings", "progress"),
    ("selection.exact", "selection.masks", "selection.tiles"),
    ("kernels",),
    ("selection",),
    ("model",),
    ("pruner", "regrowth", "optim", "report", "oneshot", "inference"),
    ("__init__",),  # the list of public names
    ("integrations",),
    ("lab",),
    ("bench",),
    ("cli", "__main__"),
]
CORE = 6  # levels up to this one need torch alone
MOST_AT_THE_TOP = 12
SHORT = 60  # lines; a shorter module with one importer belongs into that importer


@dataclass(frozen=True)
class Import:
    """One import statement's target, in the module it stands in. Package modules are named without `secateur.`."""

    importer: str
    target: str
    ours: bool
    hidden: bool  # inside a function


def named(path: Path) -> str:
    """A module's name without `secateur.`; the package itself is `__init__`, a room is its folder's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def sources() -> dict[str, Path]:
    return {named(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def resolved(name: str) -> str:
    """The package's module that an absolute name means: the longest part of it that is a module."""
    inner = name.removeprefix("secateur").removeprefix(".")
    while inner and inner not in sources():
        inner = inner.rpartition(".")[0]
    return inner or "__init__"


def named_in(node: ast.AST) -> list[str]:
    """Absolute names that a statement or a call of import_module imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.JoinedStr):
            first = first.values[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value.rstrip(".")]
    return []


def imports_in(importer: str, tree: ast.AST, hidden: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        for name in named_in(node):
            ours = name.partition(".")[0] == "secateur"
            yield Import(importer, resolved(name) if ours else name.partition(".")[0], ours, hidden)
        inside = hidden or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports_in(importer, node, inside)


@cache
def imports() -> list[Import]:
    found = []
    for name, path in sources().items():
        found += imports_in(name, ast.parse(path.read_text(encoding="utf-8")))
    return found


def graph(hidden: bool) -> dict[str, set[str]]:
    """What each module imports of the package; with `hidden` also inside functions."""
    found: dict[str, set[str]] = {name: set() for name in sources()}
    for one in imports():
        if one.ours and one.target != one.importer and (hidden or not one.hidden):
            found[one.importer].add(one.target)
    return found


def level(module: str) -> int:
    matches = [
        (len(prefix), number)
        for number, prefixes in enumerate(LEVELS)
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    assert matches, f"secateur/{module.replace('.', '/')}.py has no level: put it into LEVELS"
    return max(matches)[1]


def cycle_in(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring, or nothing."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(edges.get(module, ())):
            if ring := visit(target, [*path, module]):
                return ring
        done.add(module)
        return []

    return next((ring for module in sorted(edges) if (ring := visit(module, []))), [])


def needs_triton() -> set[str]:
    """Modules that import triton, by themselves or through another, as soon as they are imported."""
    found = {one.importer for one in imports() if one.target == "triton" and not one.hidden}
    while more := {name for name, targets in graph(hidden=False).items() if targets & found} - found:
        found |= more
    return found


def test_imports_go_one_way() -> None:
    wrong = {
        f"{importer} -> {target}"
        for importer, targets in graph(hidden=True).items()
        for target in targets
        if level(target) > level(importer)
    }
    assert not wrong


def test_no_modules_import_each_other_in_a_ring() -> None:
    ring = cycle_in(graph(hidden=False))
    assert not ring, " -> ".join(ring)


def test_no_import_of_the_package_hides_in_a_function() -> None:
    """The CLI imports a verb's modules when the verb runs, and kernels import Triton's modules when they launch."""
    with_triton, wrong = needs_triton(), set()
    for one in imports():
        if not (one.ours and one.hidden) or level(one.importer) == level("cli"):
            continue
        if level(one.importer) != level("kernels") or one.target not in with_triton:
            wrong.add(f"{one.importer} -> {one.target}")
    assert not wrong


def test_the_core_needs_torch_alone() -> None:
    allowed = {"torch", "filelock", *sys.stdlib_module_names}  # torch itself needs filelock
    with_triton = needs_triton()
    wrong = [
        f"{one.importer} imports {one.target}"
        for one in imports()
        if not one.ours and not one.hidden and level(one.importer) <= CORE
        if one.target not in allowed and not (one.target == "triton" and one.importer in with_triton)
    ]
    assert not wrong, wrong
    assert {level(name) for name in with_triton} == {level("kernels")}, with_triton


def test_only_one_module_imports_torch_distributed() -> None:
    found = set()
    for name, path in sources().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        words = [word for node in ast.walk(tree) for word in named_in(node)]
        found |= {name for word in words if f"{word}.".startswith("torch.distributed.")}
    assert found == {"model.distributed"}


def test_short_modules_have_more_than_one_importer() -> None:
    importers = Counter(target for targets in graph(hidden=True).values() for target in targets)
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in sources().items()}
    benchmarks = {f"bench.{name}" for name in NAMES}  # `secateur bench NAME` finds the module by its name, as a verb's
    splinters = {
        name
        for name, path in sources().items()
        if lines[name] < SHORT and importers[name] <= 1 and level(name) != level("cli") and path.name != "__init__.py"
    }
    splinters -= benchmarks
    assert not splinters


def test_few_modules_lie_outside_the_rooms() -> None:
    top = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(top) <= MOST_AT_THE_TOP, top


@pytest.mark.parametrize("name", sorted(name for name in sources() if (PACKAGE / name.replace(".", "/")).is_dir()))
def test_every_room_says_what_it_is_for_in_one_line(name: str) -> None:
    text = ast.get_docstring(ast.parse(sources()[name].read_text(encoding="utf-8")))
    assert text, name
    assert text.splitlines()[0].endswith("."), text.splitlines()[0]


def test_mutation_testing_knows_every_module_it_names() -> None:
    tool = ast.parse((ROOT / "tools" / "mutate.py").read_text(encoding="utf-8"))
    tables = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in tool.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("NEAREST", "ISSUED")
    }
    equivalent = tomllib.loads((ROOT / "tools" / "equivalent.toml").read_text(encoding="utf-8"))["mutant"]
    assert set(tables["ISSUED"]) | {entry["module"] for entry in equivalent} <= tables["NEAREST"].keys()
    tests = {test for names in tables["NEAREST"].values() for test in names}
    missing = [f"secateur/{name}.py" for name in tables["NEAREST"]] + [f"tests/test_{name}.py" for name in tests]
    missing = [path for path in missing if not (ROOT / path).is_file()]
    assert not missing, missing
    lines = {
        m: {line.strip() for line in (PACKAGE / f"{m}.py").read_text("utf-8").splitlines()} for m in tables["NEAREST"]
    }
    gone = [entry["before"] for entry in equivalent if entry["before"].strip() not in lines[entry["module"]]]
    assert not gone, gone


# The reader itself: each rule above must be able to fail.


def test_the_reader_finds_every_form_of_import() -> None:
    text = """
from secateur import kernels
import torch.distributed as dist
from secateur.scores import resolve
def late():
    from secateur.selection.masks import pack
    importlib.import_module(f"secateur.bench.{name}")
"""
    found = list(imports_in("x", ast.parse(text)))
    assert [(one.target, one.ours, one.hidden) for one in found] == [
        ("kernels", True, False),
        ("torch", False, False),
        ("scores", True, False),
        ("selection.masks", True, True),
        ("bench", True, True),
    ]


def test_a_ring_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_levels_are_those_of_the_longest_name() -> None:
    assert level("selection.masks") < level("kernels.table") < level("selection.allocation") == level("selection")
    with pytest.raises(AssertionError, match="no level"):
        level("somewhere")
