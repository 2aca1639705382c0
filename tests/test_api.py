"""The public names, what importing costs, and that optional things stay optional."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import secateur as sc

PUBLIC = [
    "Pruner",
    "Report",
    "SecateurError",
    "constant",
    "cubic",
    "late_cubic",
    "linear",
    "load",
    "optim",
    "pack",
    "probe",
    "probe_until",
    "prune",
    "save",
    "score",
    "scores",
    "select",
    "selection",
    "unpack",
]
OPTIONAL = [
    "PIL", "accelerate", "matplotlib", "numpy", "psutil", "ray", "safetensors", "scipy", "sklearn", "tensorboard",
    "tokenizers", "transformers", "triton",
]  # fmt: skip


def test_public_names_are_these_and_no_others() -> None:
    assert sc.__all__ == PUBLIC
    assert all(hasattr(sc, name) for name in PUBLIC)
    assert set(PUBLIC) <= set(dir(sc))
    with pytest.raises(AttributeError, match="module 'secateur' has no attribute 'sellect'"):
        sc.sellect  # noqa: B018


def test_what_type_checkers_see_is_what_resolves() -> None:
    """The imports under TYPE_CHECKING name the same objects as the table of lazy imports."""
    tree = ast.parse(Path(sc.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        home = importlib.import_module(str(node.module))
        seen |= {alias.name: getattr(home, alias.name) for alias in node.names}
    assert seen == {name: getattr(sc, name) for name in PUBLIC}


WITHOUT_TORCH = "import secateur as sc, sys; sc.__version__; assert 'torch' not in sys.modules"
ORDERS = [
    "import secateur.scores; secateur.scores()",
    "import secateur; secateur.scores(); import secateur.scores; secateur.scores()",
    "import secateur.scores; from secateur import scores; scores()",
    "from secateur import scores; import secateur.scores; scores(); secateur.scores()",
    "from secateur.scores import resolve; import secateur; secateur.scores(); resolve('variance')",
    "import secateur.pruner; secateur.scores()",
    "from secateur import *; scores(); Pruner; optim.AdamW; assert selection.select is select",
    "import secateur.optim; secateur.optim.AdamW; secateur.scores()",
    "import secateur as sc; sc.selection.select; sc.optim.AdamW; sc.scores()",
]
FORK_EACH = """
import os, torch
for code in {codes!r}:
    assert not any(name.startswith("secateur") for name in sys.modules)
    if (child := os.fork()) == 0:
        try:
            exec(code, {{}})
        except BaseException as error:
            print(code, repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


def test_names_in_every_order_of_imports() -> None:
    """`secateur.scores` is the function, whether or not the module of the same name was imported.

    Each order in a process without any module of Secateur, forked from one that has imported torch.
    """
    for code in (WITHOUT_TORCH, FORK_EACH.format(codes=ORDERS)):
        done = run_blocked(code, [])
        assert done.returncode == 0, done.stderr


def test_the_version_stands_in_one_place() -> None:
    root = Path(__file__).parent.parent
    assert 'dynamic = ["version"]' in (root / "pyproject.toml").read_text(encoding="utf-8")
    assert f"## {sc.__version__}" in (root / "CHANGELOG.md").read_text(encoding="utf-8")


def test_everything_public_is_documented() -> None:
    for name in PUBLIC:
        thing = getattr(sc, name)
        assert thing.__doc__, name
    for name, member in vars(sc.Pruner).items():
        assert name.startswith("_") or member.__doc__, f"Pruner.{name}"


BLOCKER = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *rest):
        return None if name.split(".")[0] in {blocked!r} else self.finder.find_spec(name, *rest)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def run_blocked(code: str, blocked: list[str]) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter in which none of these can be found."""
    command = [sys.executable, "-W", "ignore", "-c", BLOCKER.format(blocked=blocked) + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)


TRAIN = """
import torch, secateur as sc
layer = torch.nn.Linear(8, 8)
optimizer = {optimizer}
pruner = sc.Pruner(layer, optimizer, every=1)
for _ in range(3):
    optimizer.zero_grad()
    layer(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    pruner.step()
assert pruner.sparsity == 0.5
assert int((layer.weight == 0).sum()) == 32
print(pruner.report())
"""
PRUNE = """
import torch, secateur as sc
for how in (sc.prune, sc.probe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(2)]
    loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    print(how(model, batches, sparsity=0.5, loss=loss))
    assert sum(int((p == 0).sum()) for p in model.parameters() if p.ndim == 2) > 0
"""


ALONE = [
    TRAIN.format(optimizer="torch.optim.AdamW(layer.parameters())"),
    TRAIN.format(optimizer="sc.optim.AdamW(layer.parameters())"),
    TRAIN.format(optimizer="sc.optim.AdamW(layer.parameters(), spam='paper')"),
    PRUNE,
]


def test_the_core_needs_torch_only() -> None:
    """Training with torch's AdamW, with ours and with SPAM, and pruning after training."""
    done = run_blocked(f"for code in {ALONE!r}: exec(code, {{}})", OPTIONAL)
    assert done.returncode == 0, done.stderr


def test_training_with_spam_needs_no_triton(tmp_path: Path) -> None:
    for name in ("accelerate", "safetensors", "sklearn"):
        pytest.importorskip(name)
    settings = [part for one in ("model=lenet5", "data=digits", "steps=3", "batch=8") for part in ("--set", one)]
    line = [
        "train",
        *settings,
        "--optimizer",
        "adamwspam",
        "--cpu",
        "--tracker",
        "none",
        "--out",
        str(tmp_path / "run"),
    ]
    done = run_blocked(f"from secateur.cli import main; sys.exit(main({line!r}))", ["triton"])
    assert done.returncode == 0, done.stderr


def test_the_blocker_blocks() -> None:
    for name in OPTIONAL:
        assert "ModuleNotFoundError" in run_blocked(f"import {name}", OPTIONAL).stderr


def test_importing_is_quick_beside_torch() -> None:
    code = "import time, torch; began = time.process_time(); {}; print(time.process_time() - began)"
    timed = (float(run_blocked(code.format("from secateur import *"), []).stdout) for _ in range(3))
    assert any(seconds < 0.5 for seconds in timed)  # the best of three; the first is mostly enough
    heavy = "import sys; from secateur import *; print('torch.distributed.tensor' in sys.modules and 'loaded')"
    assert "loaded" not in run_blocked(heavy, []).stdout


def test_the_demo_needs_its_extra_and_nothing_else(tmp_path: Path) -> None:
    for needed in ("accelerate", "matplotlib", "psutil"):
        pytest.importorskip(needed)
    page = tmp_path / "report.html"
    code = f"""
from dataclasses import replace
from secateur.cli import main
from secateur.lab import demo
demo.DENSE, demo.GENERATED = replace(demo.DENSE, model="gpt-1x16", batch=2, evaluation=2), 5
sys.exit(main(["demo", "--steps", "20", "--out", {str(page)!r}]))
"""
    others = ["datasets", "peft", "ray", "scipy", "sklearn", "tensorboard", "tokenizers", "transformers", "triton"]
    done = run_blocked(code, others)
    assert done.returncode == 0, done.stderr
    assert page.is_file()


@pytest.mark.parametrize("missing", ["accelerate", "matplotlib", "psutil"])
def test_the_demo_says_what_it_needs(missing: str) -> None:
    for other in {"accelerate", "matplotlib", "psutil"} - {missing}:
        pytest.importorskip(other)
    page = str(Path(tempfile.gettempdir()) / "secateur-test-never-written.html")
    code = f"from secateur.cli import main; sys.exit(main(['demo', '--steps', '20', '--out', {page!r}]))"
    done = run_blocked(code, [missing])
    assert done.returncode == 2
    assert done.stderr.strip() == f'secateur: The demo needs {missing}: pip install "secateur[demo]".'
