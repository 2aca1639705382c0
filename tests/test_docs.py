"""Every Python block in README and docs runs, every command parses, generated parts are up to date, links lead
somewhere, and the API reference has every public name."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import secateur
from secateur.cli import main as command_line
from tools import walk
from tools.tables import filled

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples" / "README.md"
PAGES = [ROOT / "README.md", EXAMPLES, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("reference/*.md"))]


def blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)):
            found.append((f"{page.name}-{number}", code))
    return found


# One process for all blocks, because most of a block's time is importing torch.
RUN_ALL = """
import contextlib, io, json, runpy, sys, traceback
errors = {}
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(path)
        except BaseException:
            errors[path] = traceback.format_exc()
print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How every block that fails does so, by name."""
    folder = tmp_path_factory.mktemp("blocks")
    for name, code in blocks():
        (folder / f"{name}.py").write_text(code)
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN_ALL, *(f"{name}.py" for name, _ in blocks())]
    done = subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", [name for name, _ in blocks()])
def test_blocks_run(name: str, errors: dict[str, str]) -> None:
    assert not errors.get(f"{name}.py"), errors[f"{name}.py"]


def test_there_are_blocks_to_run() -> None:
    assert {name.rpartition("-")[0] for name, _ in blocks()} >= {"README.md", "selection.md", "add-a-score.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert filled(text) == text, "run `make readme`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_first_screen_shows_the_diff_and_the_two_commands() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:30])
    assert all(part in first_screen for part in ("pruner.step()", "make demo", "make test"))


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


def commands() -> list[tuple[str, str]]:
    """Every `secateur ...` command of the pages, from blocks of shell commands and from inline code."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
        lines = [part.strip() for block in blocks for part in re.split(r"\n|&&", block.replace("\\\n", " "))]
        inline = re.findall(r"`(secateur [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for line in [*lines, *(" ".join(one.split()) for one in inline)]:
            command = re.sub(r"^.*-m secateur ", "secateur ", line).partition("  #")[0]
            if command.startswith("secateur ") and not {"NAME", "VERB", "..."} & set(command.split()):
                found.append((page.name, command))
    return list(dict.fromkeys(found))


class Parsed(Exception):  # noqa: N818
    """The command line was understood."""


@pytest.mark.parametrize(("page", "command"), commands(), ids=lambda value: value)
def test_commands_parse(page: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *arguments: Any, **named: Any) -> Any:
        parse(self, *arguments, **named)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    words = shlex.split(command, comments=True)[1:]
    if all(re.fullmatch(r"[a-z]+", word) for word in words):  # a verb alone, as prose names it
        with pytest.raises((SystemExit, Parsed)) as ended:
            command_line([*words, "--help"])
        assert ended.type is Parsed or ended.value.code == 0, f"{page}: {command}"
        return
    try:
        with pytest.raises(Parsed):
            command_line(words)
    except SystemExit:
        pytest.fail(f"{page}: `{command}` is not a command: {capsys.readouterr().err}")


def test_recipes_exist() -> None:
    for page, command in commands():
        for word in command.split():
            assert not word.startswith("recipes/") or (ROOT / word).exists(), f"{page}: {command}"


def test_there_are_commands_to_parse() -> None:
    assert len(commands()) > 30
    assert {page for page, _ in commands()} >= {"README.md", "lab.md", "benchmarks.md", "after-training.md"}


def public() -> list[str]:
    """Every public name, and the public methods and properties of public classes, as the reference writes them."""
    names = []
    for name in secateur.__all__:
        one = getattr(secateur, name)
        if inspect.ismodule(one):
            continue  # its own names stand in the reference where they are public: see MODULES
        names.append(f"secateur.{name}")
    return names + MODULES


MODULES = ["secateur.optim.AdamW", "secateur.optim.Spam"]  # public names of public modules


def documented() -> dict[str, str]:
    """Names the reference documents, each with the options that follow it."""
    text = "\n".join(page.read_text() for page in sorted(DOCS.glob("reference/*.md")))
    return dict(re.findall(r"^::: (\S+)\n((?:    .*\n)*)", text, flags=re.MULTILINE))


@pytest.mark.parametrize("name", public())
def test_the_reference_has_every_public_name(name: str) -> None:
    assert name in documented(), f"add `::: {name}` to docs/reference"
    assert "members: false" not in documented()[name]
    one: Any = secateur
    for part in name.split(".")[1:]:
        one = getattr(one, part)
    members = [one] if not inspect.isclass(one) else [one, *own_members(one)]
    for member in members:
        assert inspect.getdoc(member), f"{name}: {member} has no docstring"


def own_members(kind: type) -> list[Any]:
    """Public methods and properties that a class of this package defines."""
    named = [(name, member) for name, member in vars(kind).items() if not name.startswith("_")]
    return [member for _, member in named if inspect.isfunction(member) or isinstance(member, property)]


def test_the_reference_documents_nothing_private() -> None:
    for name in documented():
        module, _, attribute = name.rpartition(".")
        assert not any(part.startswith("_") for part in name.split(".")), name
        assert hasattr(importlib.import_module(module), attribute), f"{name} does not exist"


@pytest.mark.parametrize("job", ["step", "prune"])
def test_the_architecture_page_has_the_files_a_job_enters(job: str) -> None:
    text = (DOCS / "architecture.md").read_text()
    part = text.partition(f"<!-- begin walk {job} -->")[2].partition(f"<!-- end walk {job} -->")[0]
    listed = part.partition("```text\n")[2].partition("\n\n")[0].split()
    assert listed == list(walk.walked(job).first), "run `python tools/walk.py --write docs/architecture.md`"


def test_every_file_of_the_architecture_page_exists() -> None:
    text = (DOCS / "architecture.md").read_text()
    for file in re.findall(r"[`\s]([\w/]+\.py)", text):
        roots = (ROOT, ROOT / "secateur")
        assert any((root / file).exists() for root in roots), file
