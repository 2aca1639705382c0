"""What is meant by the settings of a call after training: who competes, and how much goes."""

from __future__ import annotations

from collections.abc import Callable

from secateur.patterns import check_choice, choose
from secateur.registry import Score
from secateur.targets import Selection, Target
from secateur.tiles import Pattern

Select = Callable[[list[Target], float, bool], Selection]  # targets, sparsity, and whether masks are bits
BY_ROW, BY_LAYER = ("wanda",), ("magnitude",)  # scores that are published with another scope than the whole model


def scope_for(score: Score, scope: str | None, pattern: Pattern | None, allocation: str | None) -> str:
    """The scope that is meant when none is given: that of the score's paper."""
    if scope is not None:
        return scope
    if pattern is not None or allocation is not None:
        return "model"
    return "row" if score.name in BY_ROW else "layer" if score.name in BY_LAYER else "model"


def selector(
    scope: str, pattern: Pattern | None, allocation: str | None, sparsity: float | None
) -> tuple[float, Select]:
    """The sparsity that is meant, and a function that selects at any."""
    wanted = check_choice(sparsity, scope, pattern, allocation)

    def select(targets: list[Target], asked: float, packed: bool) -> Selection:
        return choose(targets, asked, scope=scope, pattern=pattern, allocation=allocation, packed=packed)

    return wanted, select
