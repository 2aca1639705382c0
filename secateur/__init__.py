"""Secateur makes PyTorch networks sparse, exact to the weight: while they train, with scores read off the optimizer's
state, and after they are trained, from a few batches of data.

Public names are imported on first use, so that `import secateur` and `secateur --help` do not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secateur import optim, selection
    from secateur.errors import SecateurError
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
    "optim",
    "probe",
    "probe_until",
    "prune",
    "score",
    "scores",
    "select",
    "selection",
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
    "optim": "",
    "probe": "oneshot.probe",
    "probe_until": "oneshot.probe",
    "prune": "oneshot.prune",
    "score": "scores",
    "select": "selection",
    "selection": "",
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
