"""What seeds can tell: mean and deviation, paired differences with Student's interval, a word for them, and scatter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from secateur.optional import library

CONFIDENCE = 0.95
BETTER, WORSE, UNKNOWN = "better", "worse", "cannot be told"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Spread:
    """Of a sample: its mean, its standard deviation (n-1; None for one value) and its size."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Estimate:
    """A number and its confidence interval, if one can be given."""

    mean: float
    interval: Interval | None


@dataclass(frozen=True)
class Difference(Estimate):
    """Mean of the differences between pairs. No interval for fewer than two pairs, or where one is not finite."""

    pairs: int
    base: float  # mean of what was compared with, over the same pairs


@dataclass(frozen=True)
class Scatter:
    """What is left of runs once the means of their rows and of their seeds are taken off: how far a run falls from
    where its row and seed put it. All rows vouch for it, where an interval of one row has a few pairs only."""

    deviation: float
    freedom: int
    seeds: int

    @property
    def reach(self) -> float:
        """How far apart the means of two rows over these seeds must be before scatter alone is a poor explanation."""
        return student(self.freedom) * self.deviation * math.sqrt(2 / self.seeds)


def scatter(rows: Sequence[Mapping[int, float]]) -> Scatter | None:
    """Of the seeds that all rows have, as in an analysis of variance by row and seed; None where rows or
    seeds are fewer than two, or not all is finite."""
    seeds = sorted(set.intersection(*(set(row) for row in rows))) if rows else []
    values = [[row[seed] for seed in seeds] for row in rows]
    if min(len(rows), len(seeds)) < 2 or not all(math.isfinite(value) for row in values for value in row):
        return None
    of_rows = [statistics.fmean(row) for row in values]
    of_seeds = [statistics.fmean(column) for column in zip(*values, strict=True)]
    whole = statistics.fmean(of_rows)
    left = [
        value - row_mean - seed_mean + whole
        for row, row_mean in zip(values, of_rows, strict=True)
        for value, seed_mean in zip(row, of_seeds, strict=True)
    ]
    freedom = (len(rows) - 1) * (len(seeds) - 1)
    return Scatter(math.sqrt(math.fsum(one * one for one in left) / freedom), freedom, len(seeds))


def spread(values: Sequence[float]) -> Spread:
    """Mean, deviation and size of a sample that is not empty."""
    if not all(map(math.isfinite, values)):
        return Spread(math.nan, None, len(values))
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def difference(values: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Values minus base, paired by the seeds both have; None where they have none in common."""
    common = sorted(values.keys() & base.keys())
    if not common:
        return None
    found = spread([values[seed] - base[seed] for seed in common])
    reach = 0.0
    if found.deviation is not None:
        reach = student(found.count - 1) * found.deviation / math.sqrt(found.count)
    interval = None if found.deviation is None else (found.mean - reach, found.mean + reach)
    return Difference(found.mean, interval, found.count, spread([base[seed] for seed in common]).mean)


def student(freedom: int, confidence: float = CONFIDENCE) -> float:
    """How many standard errors an interval of this confidence reaches to either side."""
    special = library("scipy.special", "A confidence interval", "'secateur[lab]'")
    return float(special.stdtrit(freedom, 0.5 + confidence / 2))


def verdict(found: Difference | None, higher_is_better: bool) -> str:
    """What the interval allows to say."""
    if found is None or found.interval is None or found.interval[0] <= 0 <= found.interval[1]:
        return UNKNOWN
    return BETTER if (found.mean > 0) == higher_is_better else WORSE


def mapped(found: Estimate, change: Callable[[float], float]) -> Estimate:
    """The same on another scale; `change` must rise."""
    interval = None if found.interval is None else (change(found.interval[0]), change(found.interval[1]))
    return Estimate(change(found.mean), interval)


def ratio(found: Difference) -> Estimate:
    """A difference of logarithms as the ratio of what they are logarithms of."""
    return mapped(found, exponential)


def percent(found: Difference, *, logarithmic: bool) -> Estimate:
    """A difference in percent of the base, whose own spread is not counted; of logarithms, that of the ratio."""
    if logarithmic:
        return mapped(ratio(found), lambda times: 100 * (times - 1))
    return mapped(found, lambda value: 100 * value / abs(found.base) if found.base else math.nan)


def exponential(value: float) -> float:
    """exp, and infinity where that is too large for a float."""
    return math.inf if value >= 700 else math.exp(value)
