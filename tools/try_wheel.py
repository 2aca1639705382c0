"""Install the built wheel into an empty environment outside the clone, and use it as a stranger would.

    python tools/try_wheel.py dist

First with torch alone: import, prune while training, run packed layers in native code, `secateur --help`. Then with the
extra [demo]: the demo.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN = """
import sys, torch, secateur as sc
assert not sc.__file__.startswith(sys.argv[1]), sc.__file__
layer = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(layer.parameters())
pruner = sc.Pruner(layer, optimizer, sparsity=0.5, every=1)
layer(torch.randn(4, 64)).sum().backward()
optimizer.step()
pruner.step()
assert int((layer.weight == 0).sum()) == 2048
print("secateur", sc.__version__, "with torch", torch.__version__, "prunes", pruner.sparsity)
"""

# The C library of the wheel is loaded, and computes what a dense layer does.
PACK = """
import torch
from secateur.inference import cpu
from secateur.inference.packed import PackedLinear
found = cpu.library()
assert isinstance(found, cpu.Library), found
layer = torch.nn.Linear(300, 200).requires_grad_(False)
layer.weight[torch.rand(200, 300) < 0.8] = 0
packed, x = PackedLinear.from_linear(layer).eval(), torch.randn(1, 300)
assert torch.allclose(packed(x), layer(x), atol=1e-5)
print("packed layers run in native code:", cpu.LEVELS[found.level])
"""
NATIVE = "secateur/inference/native/packed_linear"


def check_contents(wheel: Path) -> None:
    """The wheel holds the package and nothing that only the repository needs; its name says what it runs on."""
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"secateur", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}, folders
    assert "secateur/py.typed" in names
    assert f"{NATIVE}.c" in names
    assert (f"{NATIVE}.so" in names) == ("manylinux" in wheel.name) == (not wheel.name.endswith("any.whl")), wheel.name
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "secateur").rglob("*.py")}
    assert sources <= set(names), sources - set(names)


def has_library(wheel: Path) -> bool:
    """Whether the C kernel is in the wheel; where a compiler is found it must be."""
    there = f"{NATIVE}.so" in zipfile.ZipFile(wheel).namelist()
    can = sys.platform == "linux" and platform.machine() == "x86_64" and shutil.which(os.environ.get("CC", "cc"))
    assert there or not can, "there is a C compiler, but the wheel has no C library"
    print(
        "C library in the wheel" if there else "no C compiler for this system: the wheel has no C library", flush=True
    )
    return there


def main(folder: Path) -> int:
    """Try the newest wheel in the folder; the exit code."""
    wheel = max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime).resolve()
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as place:

        def run(*words: str) -> None:
            began = time.perf_counter()
            subprocess.run(words, check=True, cwd=place)
            print(f"{' '.join(words[1:4])[:70]:70} {time.perf_counter() - began:6.1f} s", flush=True)

        run(sys.executable, "-m", "venv", "env")
        binaries = Path(place, "env", "Scripts" if sys.platform == "win32" else "bin")
        python, secateur = str(binaries / "python"), str(binaries / "secateur")
        install = (python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"))
        run(*install, "torch", str(wheel))
        run(python, "-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", TRAIN, str(ROOT))
        if has_library(wheel):
            run(python, "-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", PACK)
        run(secateur, "--help")
        run(*install, f"{wheel}[demo]")
        run(secateur, "demo", "--steps", "20")
        assert Path(place, "report.html").stat().st_size > 10_000
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
