"""Every example and notebook runs on the CPU, from another folder, with torch alone."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
# One process for all of them, because most of a script's time is importing torch. Warnings are errors.
RUN_ALL = """
import contextlib, io, json, runpy, sys, traceback
found = {}
for path in sys.argv[1:]:
    printed, error = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    found[path] = [printed.getvalue(), error]
print(json.dumps(found))
"""


def program(notebook: Path) -> str:
    """The code cells in order, which is what "restart and run all" runs where no cell uses magics."""
    found = json.loads(notebook.read_text(encoding="utf-8"))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code), "clear the outputs"
    return "\n\n".join("".join(cell["source"]) for cell in code)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What every example printed and how it failed, by file name."""
    folder = tmp_path_factory.mktemp("examples")
    for example in SCRIPTS:
        (folder / example.name).write_text(example.read_text(encoding="utf-8"), encoding="utf-8")
    for example in NOTEBOOKS:
        (folder / example.name).write_text(program(example), encoding="utf-8")
    alone = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    names = [example.name for example in (*SCRIPTS, *NOTEBOOKS)]
    command = [sys.executable, "-W", "error", "-c", RUN_ALL, *names]
    done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: (printed, error) for name, (printed, error) in json.loads(done.stdout).items()}


def test_there_are_six_scripts_and_two_notebooks() -> None:
    assert (len(SCRIPTS), len(NOTEBOOKS)) == (6, 2)
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{example.name}`" in listed for example in (*SCRIPTS, *NOTEBOOKS))


@pytest.mark.parametrize("example", [*SCRIPTS, *NOTEBOOKS], ids=lambda example: example.name)
def test_examples_run(example: Path, ran: dict[str, tuple[str, str]]) -> None:
    printed, error = ran[example.name]
    assert not error, error
    assert printed.strip()


@pytest.mark.parametrize("example", [*SCRIPTS, *NOTEBOOKS], ids=lambda example: example.name)
def test_examples_need_torch_alone(example: Path) -> None:
    text = program(example) if example.suffix == ".ipynb" else example.read_text(encoding="utf-8")
    assert imported(text) <= {"copy", "pathlib", "secateur", "tempfile", "torch"}
    assert example.suffix == ".ipynb" or len(text.splitlines()) < 60


def imported(text: str) -> set[str]:
    """Names of the packages a program imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found
