"""Install the built wheel into an empty environment outside the clone, and use it as a stranger would.

    python tools/try_wheel.py dist

First with torch alone: import, prune while training, `secateur --help`. Then with the extra [demo]: the demo.
"""

from __future__ import annotations

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


def check_contents(wheel: Path) -> None:
    """The wheel holds the package and nothing that only the repository needs."""
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"secateur", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}, folders
    assert "secateur/py.typed" in names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "secateur").rglob("*.py")}
    assert sources <= set(names), sources - set(names)


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
        run(secateur, "--help")
        run(*install, f"{wheel}[demo]")
        run(secateur, "demo", "--steps", "20")
        assert Path(place, "report.html").stat().st_size > 10_000
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
