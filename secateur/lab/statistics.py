"""Statistics over seeds: mean and deviation, paired differences with Student's t interval, verdicts, scatter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from secateur.errors import LAB_EXTRA, library

CONFIDENCE = 0.95
OUTLIER = 10.0  # times the median row's sum of squares; with three seeds, chance exceeds it in one row of a thousand
ROUNDING = 1e-12  # spread of equal numbers after a subtraction, relative to the largest of them; seeds spread far more
BETTER, WORSE, UNKNOWN = "better", "worse", "inconclusive"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation (n-1; None for one value) and size of a sample."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Estimate:
    """A number and its confidence interval, if it has one."""

    mean: float
    interval: Interval | None


@dataclass(frozen=True)
class Difference(Estimate):
    """Mean of paired differences. Without an interval for fewer than two pairs, if a value is not finite, and if all
    differences are equal: an interval of no width would be a certainty that a few pairs cannot give."""

    pairs: int
    base: float  # mean of the baseline over the same pairs


@dataclass(frozen=True)
class Scatter:
    """Residual standard deviation of runs after the means of rows and seeds are removed.

    It pools all rows, where the interval of one row has only a few pairs.
    """

    deviation: float
    freedom: int
    seeds: int
    left_out: tuple[str, ...]  # rows that are far noisier than others, or have too few finite values

    @property
    def reach(self) -> float:
        """The difference between two row means above which chance is an unlikely explanation."""
        return student(self.freedom) * self.deviation * math.sqrt(2 / self.seeds)


def scatter(rows: Mapping[str, Mapping[int, float]]) -> Scatter | None:
    """Two-way analysis of variance by row and seed, over the seeds that all rows share; None for fewer than two, and
    where the rows differ by the same amount at every seed.

    It assumes that rows are equally noisy, so outliers are left out.
    """
    clear = {name: row for name, row in rows.items() if len(row) > 1 and all(map(math.isfinite, row.values()))}
    seeds = sorted(set.intersection(*(set(row) for row in clear.values()))) if clear else []
    if min(len(clear), len(seeds)) < 2:
        return None
    values = {name: [row[seed] for seed in seeds] for name, row in clear.items()}
    squares = dict(zip(values, _squares_left(list(values.values())), strict=True))
    usual = statistics.median(squares.values())
    kept = {name: row for name, row in values.items() if squares[name] <= OUTLIER * usual} if usual > 0 else values
    freedom = (len(kept) - 1) * (len(seeds) - 1)
    deviation = math.sqrt(math.fsum(_squares_left(list(kept.values()))) / freedom)
    if _vanishes(deviation, [value for row in kept.values() for value in row]):
        return None
    return Scatter(deviation, freedom, len(seeds), tuple(name for name in rows if name not in kept))


def _squares_left(values: Sequence[Sequence[float]]) -> list[float]:
    """For each row the sum of squared residuals after row and column means are removed."""
    of_rows = [statistics.fmean(row) for row in values]
    of_columns = [statistics.fmean(column) for column in zip(*values, strict=True)]
    whole = statistics.fmean(of_rows)
    return [
        math.fsum((value - mean - column + whole) ** 2 for value, column in zip(row, of_columns, strict=True))
        for row, mean in zip(values, of_rows, strict=True)
    ]


def spread(values: Sequence[float]) -> Spread:
    """Mean, deviation and size of a nonempty sample."""
    if not all(map(math.isfinite, values)):
        return Spread(math.nan, None, len(values))
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def difference(values: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Values minus base, paired by the seeds both have; None if they share no seed."""
    common = sorted(values.keys() & base.keys())
    if not common:
        return None
    found = spread([values[seed] - base[seed] for seed in common])
    mean = spread([base[seed] for seed in common]).mean
    everything = [side[seed] for side in (values, base) for seed in common]
    if found.deviation is None or _vanishes(found.deviation, everything):
        return Difference(found.mean, None, found.count, mean)
    reach = student(found.count - 1) * found.deviation / math.sqrt(found.count)
    return Difference(found.mean, (found.mean - reach, found.mean + reach), found.count, mean)


def _vanishes(deviation: float, values: Sequence[float]) -> bool:
    """Whether a deviation of sums and differences of these values is no more than rounding."""
    return deviation <= ROUNDING * max(map(abs, values))


def student(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Half the width of a confidence interval in standard errors, by Student's t."""
    special = library("scipy.special", "A confidence interval", LAB_EXTRA)
    return float(special.stdtrit(freedom, 0.5 + confidence / 2))


def verdict(found: Difference | None, higher_is_better: bool) -> str:
    """Better or worse if there is an interval and it excludes zero, otherwise inconclusive."""
    if found is None or found.interval is None or found.interval[0] <= 0 <= found.interval[1]:
        return UNKNOWN
    return BETTER if (found.mean > 0) == higher_is_better else WORSE


def mapped(found: Estimate, change: Callable[[float], float]) -> Estimate:
    """The estimate on another scale; `change` must be increasing."""
    interval = None if found.interval is None else (change(found.interval[0]), change(found.interval[1]))
    return Estimate(change(found.mean), interval)


def ratio(found: Difference) -> Estimate:
    """The ratio that a difference of logarithms stands for."""
    return mapped(found, exponential)


def percent(found: Difference, *, logarithmic: bool) -> Estimate:
    """A difference in percent of the base, which is taken as exact; for logarithms, of the ratio."""
    if logarithmic:
        return mapped(ratio(found), lambda times: 100 * (times - 1))
    return mapped(found, lambda value: 100 * value / abs(found.base) if found.base else math.nan)


def exponential(value: float) -> float:
    """exp, or infinity where it would overflow."""
    return math.inf if value >= 700 else math.exp(value)
