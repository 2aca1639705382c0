"""The public names, what importing costs, and that optional things stay optional."""

from __future__ import annotations

import subprocess
import sys
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
    "optim",
    "probe",
    "probe_until",
    "prune",
    "score",
    "scores",
    "select",
    "selection",
]
OPTIONAL = [
    "PIL", "accelerate", "matplotlib", "numpy", "ray", "rich", "safetensors", "scipy", "sklearn", "tensorboard",
    "tokenizers", "transformers", "triton",
]  # fmt: skip


def test_public_names_are_these_and_no_others() -> None:
    assert sc.__all__ == PUBLIC
    assert all(hasattr(sc, name) for name in PUBLIC)
    assert sc.__version__ == "0.1.0"


def test_everything_public_is_documented() -> None:
    for name in PUBLIC:
        thing = getattr(sc, name)
        assert thing.__doc__, name
    for name, member in vars(sc.Pruner).items():
        assert name.startswith("_") or member.__doc__, f"Pruner.{name}"


def run_blocked(code: str, blocked: list[str]) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter in which none of these can be found."""
    blocker = f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n"
    command = [sys.executable, "-W", "ignore", "-c", blocker + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)


TRAIN = """
import torch, secateur as sc
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(layer.parameters())
pruner = sc.Pruner(layer, optimizer, every=1)
layer(torch.randn(2, 8)).sum().backward()
optimizer.step()
pruner.step()
assert pruner.sparsity == 0.5
print(pruner.report())
"""


def test_the_core_needs_torch_only() -> None:
    done = run_blocked(TRAIN, OPTIONAL)
    assert done.returncode == 0, done.stderr


def test_the_blocker_blocks() -> None:
    for name in OPTIONAL:
        assert "ModuleNotFoundError" in run_blocked(f"import {name}", OPTIONAL).stderr


def test_importing_is_quick_beside_torch() -> None:
    code = "import time, torch; began = time.perf_counter(); import secateur; print(time.perf_counter() - began)"
    best = min(float(run_blocked(code, []).stdout) for _ in range(3))
    assert best < 0.5
    heavy = "import sys, secateur; print('torch.distributed.tensor' in sys.modules and 'loaded')"
    assert "loaded" not in run_blocked(heavy, []).stdout


@pytest.mark.parametrize("missing", ["matplotlib", "rich"])
def test_the_demo_says_what_it_needs(missing: str) -> None:
    code = "from secateur.cli import main; sys.exit(main(['demo', '--steps', '20', '--out', '/dev/null']))"
    done = run_blocked(code, [missing])
    assert done.returncode == 2
    assert done.stderr.strip() == f"secateur: The demo needs {missing}: pip install 'secateur[demo]'."
