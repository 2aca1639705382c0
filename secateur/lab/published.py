"""What AdamWPrune published for each of its variants: ramp, training budget, and the layers it prunes.

The preset "as-published" takes these instead of Secateur's defaults. The sources disagree here and there; the variants
note of AdamWPrune comes first, its trainer's code where the note says "TBD":

- Ramp: the note has linear for bitter0 to bitter2 and p^3, which it calls cubic, for bitter3 and bitter4, from the
  warm-up to the last step of the normal budget. bitter5 to bitter9 were trained with p^3. The warm-up is 100 steps of
  10,000. Of the two baselines, magnitude had p^3 and movement a linear ramp.
- Budget: the note lists 21 % more steps for bitter2, 30 % for bitter3 and bitter4, 70 % for bitter7, and the standard
  number for bitter8. It leaves bitter5, bitter6 and bitter9 open, which the code gives 30 %.
- Layers: every nn.Linear and nn.Conv2d. The head is one of them, and with it the token embedding it is tied to.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from secateur.errors import SecateurError, nearest

AS_PUBLISHED = "as-published"
PRESETS = (AS_PUBLISHED,)
EVERY_LAYER = "adamwprune"  # a value of the setting `prunable`
WARM_UP = 0.01  # of the steps, before the ramp begins
LINEAR, LATE = "linear", "late_cubic"


@dataclass(frozen=True)
class Variant:
    """The ramp of a variant and its training budget, as a multiple of the normal one."""

    schedule: str
    budget: float = 1.0


VARIANTS = {
    "bitter0": Variant(LINEAR),
    "bitter1": Variant(LINEAR),
    "bitter2": Variant(LINEAR, 1.21),
    "bitter3": Variant(LATE, 1.3),
    "bitter4": Variant(LATE, 1.3),
    "bitter5": Variant(LATE, 1.3),
    "bitter6": Variant(LATE, 1.3),
    "bitter7": Variant(LATE, 1.7),
    "bitter8": Variant(LATE),
    "bitter9": Variant(LATE, 1.3),
    "magnitude": Variant(LATE),
    "movement": Variant(LINEAR),
}


def variant_of(score: Any) -> Variant | None:
    """The variant that a score is, options or not: "bitter3(eps=1e-6)" is bitter3."""
    return VARIANTS.get(score.partition("(")[0].strip()) if isinstance(score, str) else None


def budget_of(score: Any) -> float:
    """How many times the normal steps the extended budget gives this score."""
    found = variant_of(score)
    return found.budget if found else 1.0


def preset_settings(preset: str, score: Any) -> dict[str, Any]:
    """The settings that a preset means for a score; an error if there are none."""
    if preset not in PRESETS:
        raise SecateurError(f"There is no preset {preset!r}.{nearest(preset, PRESETS)} Use {', '.join(PRESETS)}.")
    found = variant_of(score)
    if found is None:
        said = "no score" if score is None else f"score {score!r}"
        raise SecateurError(f"preset {preset} needs a score of AdamWPrune: {', '.join(VARIANTS)}. It got {said}.")
    settings: dict[str, Any] = {"schedule": found.schedule, "begin": WARM_UP, "end": 1.0, "prunable": EVERY_LAYER}
    return settings | ({"budget": "extended"} if found.budget > 1 else {})


def every_layer(model: nn.Module) -> tuple[str, ...]:
    """The paths of all linear layers and 2-d convolutions, which AdamWPrune prunes; a tied head is one of them."""
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d)
    if (transformers := sys.modules.get("transformers.pytorch_utils")) is not None:
        kinds += (transformers.Conv1D,)  # what GPT-2's layers are there
    return tuple(name for name, module in model.named_modules() if isinstance(module, kinds))
