"""Secateur makes PyTorch networks sparse, exact to the weight: while they train, with scores read off the optimizer's
state, and after they are trained, from a few batches of data.

Public names are imported on first use, so that `import secateur` and `secateur --help` do not wait for torch. Once both
this package and transformers are imported, in whatever order, transformers loads packed models.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secateur import optim, selection
    from secateur.errors import SecateurError
    from secateur.inference.packed import pack, unpack
    from secateur.inference.saving import load, save
    from secateur.oneshot.probe import probe, probe_until
    from secateur.oneshot.prune import prune
    from secateur.pruner import Pruner
    from secateur.report import Report
    from secateur.schedules import constant, cubic, late_cubic, linear
    from secateur.scores import score, scores
    from secateur.selection import select

__version__ = "0.1.0"

__all__ = [
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

# Where each name is defined; optim and selection are modules themselves. `scores` is a property of the package, below.
_HOMES = {
    "Pruner": "pruner",
    "Report": "report",
    "SecateurError": "errors",
    "constant": "schedules",
    "cubic": "schedules",
    "late_cubic": "schedules",
    "linear": "schedules",
    "load": "inference.saving",
    "optim": "",
    "pack": "inference.packed",
    "probe": "oneshot.probe",
    "probe_until": "oneshot.probe",
    "prune": "oneshot.prune",
    "save": "inference.saving",
    "score": "scores",
    "select": "selection",
    "selection": "",
    "unpack": "inference.packed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if not home:
        return importlib.import_module(f"{__name__}.{name}")
    found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals().setdefault(name, found)  # the next access does not come here
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The package, in which `scores` is always the function.

    There is a submodule of the same name, and importing a submodule assigns it to its package. The setter ignores that.
    """

    @property
    def scores(self) -> Any:
        return importlib.import_module(f"{__name__}.scores").scores

    @scores.setter
    def scores(self, module: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package


class _AfterImport:
    """Runs a function once, right after another library's module was imported, without importing it itself."""

    def __init__(self, module: str, run: Callable[[], object]) -> None:
        self.module, self.run = module, run

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)  # once, and the other finders find it below
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute, run = spec.loader.exec_module, self.run

            def executed(module: ModuleType) -> None:
                execute(module)
                run()

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _register_with_transformers(module: str = "transformers.quantizers.auto") -> None:
    def register() -> object:
        return importlib.import_module(f"{__name__}.integrations.quantizer")

    if module in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _AfterImport(module, register))


_register_with_transformers()
