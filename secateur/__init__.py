"""Secateur makes PyTorch networks sparse while they train: exact masks from scores read off the optimizer's state."""

from secateur import optim, selection
from secateur.errors import SecateurError
from secateur.patterns import select
from secateur.pruner import Pruner
from secateur.report import Report
from secateur.schedules import constant, cubic, late_cubic, linear
from secateur.scores import score, scores

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
    "score",
    "scores",
    "select",
    "selection",
]
