"""The few statistics that verdicts rest on: ranks, rank correlation, Kruskal and Wallis' test, Student's interval.

SciPy is imported when a tail probability is asked for: reading verbs that need none start without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and how far off it may be.

    Attributes:
        mean: Of the values.
        half_width: Half of the confidence interval of the mean; None for a single value.
        n: Number of values.
    """

    mean: float
    half_width: float | None
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the mean is distinguishable from 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width


@dataclass(frozen=True)
class Effect:
    """How far groups of values differ in rank.

    Attributes:
        share: Share of the ranks' spread that the groups explain beyond chance (epsilon squared), 0 to 1.
        p: Probability of groups at least this unlike if they did not differ.
        limit: The share below which an effect would go unseen with so few values, at the 5 % level.
        n: Number of values.
    """

    share: float
    p: float
    limit: float
    n: int


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            found[index] = (start + 1 + end) / 2
        start = end
    return found


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None where one side does not vary or there are fewer than 3 pairs."""
    if len(left) < 3 or len(set(left)) == 1 or len(set(right)) == 1:
        return None
    a, b = ranks(left), ranks(right)
    mean = (len(left) + 1) / 2
    products = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return products / math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))


def group_effect(groups: Sequence[Sequence[float]]) -> Effect | None:
    """Kruskal and Wallis' test (1952) with their correction for ties; None where there is nothing to compare."""
    filled = [list(group) for group in groups if group]
    values = [value for group in filled for value in group]
    n, k = len(values), len(filled)
    if k < 2 or n <= k or len(set(values)) == 1:
        return None
    ranked, h, start = ranks(values), 0.0, 0
    for group in filled:
        h += sum(ranked[start : start + len(group)]) ** 2 / len(group)
        start += len(group)
    h = 12 / (n * (n + 1)) * h - 3 * (n + 1)
    ties = sum(count**3 - count for count in _counts(ranked))
    h /= 1 - ties / (n**3 - n)
    from scipy.special import chdtrc, chdtri

    critical = float(chdtri(k - 1, 1 - CONFIDENCE))
    share, limit = ((statistic - k + 1) / (n - k) for statistic in (h, critical))
    return Effect(min(1.0, max(0.0, share)), float(chdtrc(k - 1, h)), min(1.0, limit), n)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Mean and Student's confidence interval of values drawn independently from a normal distribution."""
    n = len(values)
    if n < 2:
        return Interval(fmean(values), None, n)
    from scipy.special import stdtrit

    quantile = float(stdtrit(n - 1, (1 + confidence) / 2))
    return Interval(fmean(values), quantile * stdev(values) / math.sqrt(n), n)


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int] | None:
    """Standard deviation within groups and its degrees of freedom; None where no group has two values."""
    repeated = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    if not freedom:
        return None
    squares = sum((value - fmean(group)) ** 2 for group in repeated for value in group)
    return math.sqrt(squares / freedom), freedom


def separation(low: Sequence[float], high: Sequence[float]) -> float | None:
    """Probability that a value of `high` is above one of `low`, ties counting half; None where one is empty."""
    if not low or not high:
        return None
    ranked = ranks([*low, *high])
    above = sum(ranked[len(low) :]) - len(high) * (len(high) + 1) / 2
    return above / (len(low) * len(high))


def _counts(values: Sequence[float]) -> list[int]:
    found: dict[float, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return list(found.values())
