"""Try every recipe of this repository: two small steps of each on random data.

python -m tools.recipes
"""

from __future__ import annotations

import sys

from secateur.errors import SecateurError
from secateur.lab.config import read_experiment
from secateur.lab.record import ROOT
from secateur.lab.trainer import dry_run


def main() -> int:
    """A line for every recipe; the exit code says whether all of them work."""
    for recipe in sorted((ROOT / "recipes").glob("*.toml")):
        try:
            print(f"{recipe.stem}: {dry_run(read_experiment(recipe, {}))}", flush=True)
        except SecateurError as error:
            print(f"{recipe.stem}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
