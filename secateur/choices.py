"""What is meant by the settings of a call after training: who competes, and how much goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from secateur.patterns import check_choice, choose
from secateur.registry import Score
from secateur.sites import Site
from secateur.targets import Selection, Target
from secateur.tiles import Pattern

BY_ROW, BY_LAYER = ("wanda",), ("magnitude",)  # scores that are published with another scope than the whole model


@dataclass(frozen=True)
class Select:
    """Selects at any sparsity, within one scope, pattern and allocation."""

    scope: str
    pattern: Pattern | None
    allocation: str | None

    def __call__(self, targets: list[Target], asked: float, packed: bool) -> Selection:
        return choose(targets, asked, scope=self.scope, pattern=self.pattern, allocation=self.allocation, packed=packed)

    @property
    def together(self) -> bool:
        """Whether weights of all layers compete with each other."""
        by_group = self.pattern is not None and self.pattern.kept is not None
        return self.scope == "model" and self.allocation is None and not by_group


def scope_for(
    score: Score, scope: str | None, pattern: Pattern | None, allocation: str | None, sites: Sequence[Site]
) -> str:
    """The scope that is meant when none is given: that of the score's paper. Rows of WANDA are for linear layers; in
    convolutional networks, where they do worse than magnitude, all weights compete."""
    if scope is not None:
        return scope
    if pattern is not None or allocation is not None:
        return "model"
    kernels = [site for site in sites if site.parameter.ndim > 3]  # one of them may cut pictures for a transformer
    if score.name in BY_ROW:
        return "row" if len(kernels) < 2 else "model"
    return "layer" if score.name in BY_LAYER else "model"


def selector(
    scope: str, pattern: Pattern | None, allocation: str | None, sparsity: float | None
) -> tuple[float, Select]:
    """The sparsity that is meant, and what selects at any."""
    return check_choice(sparsity, scope, pattern, allocation), Select(scope, pattern, allocation)
