"""Secateur makes PyTorch networks sparse, exact to the weight: while they train, with scores read off the optimizer's
state, and after they are trained, from a few batches of data."""

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
