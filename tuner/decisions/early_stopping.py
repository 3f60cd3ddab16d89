"""The rules that stop poor trials early: asynchronous successive halving, Hyperband and the median rule.

A rule sees one number at a time, (trial, step, value), and answers whether the trial goes on. It keeps only what it
has seen, so that replaying the recorded values of a study rebuilds it exactly. No Ray and no Optuna here.

A value that is not finite counts as the worst there is: it never passes, and it takes a place in its rung.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import median

from tuner.planning.plan import rungs
from tuner.study_file.spec import StudySpec


class StoppingRule(ABC):
    """Decides after each report of a trial whether it goes on."""

    @abstractmethod
    def keeps(self, number: int, step: int, value: float) -> bool:
        """Take a report in and decide.

        Args:
            number: The trial.
            step: Optimizer steps done; more than at the trial's last report.
            value: The objective, in the direction where smaller is better.

        Returns:
            Whether the trial goes on.
        """

    @abstractmethod
    def diverged(self, number: int) -> None:
        """Take in that a trial diverged after its last report: the worst there is where it would be judged next."""

    def decision_steps(self, number: int) -> Sequence[int] | None:
        """Steps at which this trial can be stopped; None when it can be at any report."""
        return None

    def replay(self, number: int, values: Mapping[int, float]) -> None:
        """Take in what a trial reported in an earlier run of the study."""
        for step, value in sorted(values.items()):
            self.keeps(number, step, value)


class NeverStop(StoppingRule):
    """Every trial runs to its full length."""

    def keeps(self, number: int, step: int, value: float) -> bool:
        return True

    def diverged(self, number: int) -> None:
        return

    def decision_steps(self, number: int) -> Sequence[int]:
        return ()


class SuccessiveHalving(StoppingRule):
    """ASHA's stopping variant (Li et al., 2020, "A System for Massively Parallel Hyperparameter Tuning").

    At each rung a trial goes on when it is among the best 1/eta of all that have reached the rung so far, itself
    included; while fewer than eta have, the best of them goes on.
    """

    def __init__(self, levels: Sequence[int], reduction_factor: int) -> None:
        self._levels = tuple(levels)
        self._eta = reduction_factor
        self._rungs: dict[int, list[float]] = {level: [] for level in self._levels}
        self._passed: dict[int, int] = {}

    def decision_steps(self, number: int) -> Sequence[int]:
        return self._levels

    def keeps(self, number: int, step: int, value: float) -> bool:
        # A loop that reports rarely can reach several rungs at once: it is judged at the highest, and counts in all.
        reached = [level for level in self._levels if self._passed.get(number, 0) < level <= step]
        verdict = True
        for level in reached:
            verdict = self._enter(level, value)
            self._passed[number] = level
        return verdict

    def diverged(self, number: int) -> None:
        following = [level for level in self._levels if level > self._passed.get(number, 0)]
        if following:
            self.keeps(number, following[0], math.inf)

    def _enter(self, level: int, value: float) -> bool:
        value = value if math.isfinite(value) else math.inf
        rung = self._rungs[level]
        insort(rung, value)
        places = max(1, len(rung) // self._eta)
        return value <= rung[places - 1] and value < math.inf


class Brackets(StoppingRule):
    """Several successive halvings with ever later first rungs; each trial belongs to one of them.

    The share of trials a bracket gets falls with its budget a trial, as in Hyperband (Li et al., 2018). Which trial
    goes where depends on the seed and its number alone, so that a resumed study puts every trial where it was.
    """

    def __init__(self, levels: Sequence[int], reduction_factor: int, num_brackets: int, seed: int) -> None:
        count = max(1, min(num_brackets, len(levels)))
        self._seed = seed
        self._brackets = [SuccessiveHalving(levels[first:], reduction_factor) for first in range(count)]
        self._weights = [
            math.ceil(count / (count - first) * reduction_factor ** (count - 1 - first)) for first in range(count)
        ]

    def bracket(self, number: int) -> int:
        """Index of the trial's bracket; 0 stops earliest."""
        # A string seed is hashed stably by `random`, unlike a tuple.
        rng = random.Random(f"{self._seed}:{number}")
        return rng.choices(range(len(self._brackets)), weights=self._weights)[0]

    def decision_steps(self, number: int) -> Sequence[int] | None:
        return self._brackets[self.bracket(number)].decision_steps(number)

    def keeps(self, number: int, step: int, value: float) -> bool:
        return self._brackets[self.bracket(number)].keeps(number, step, value)

    def diverged(self, number: int) -> None:
        self._brackets[self.bracket(number)].diverged(number)


class MedianStopping(StoppingRule):
    """Stops a trial whose best value so far is worse than the median of the others' running means at that step.

    The rule of Google Vizier (Golovin et al., 2017), as Ray Tune's MedianStoppingRule implements it.
    """

    def __init__(self, grace_period: int, min_samples: int) -> None:
        self._grace_period = grace_period
        self._min_samples = min_samples
        self._curves: dict[int, _Curve] = {}

    def keeps(self, number: int, step: int, value: float) -> bool:
        curve = self._curves.setdefault(number, _Curve())
        curve.add(step, value if math.isfinite(value) else math.inf)
        if step < self._grace_period:
            return True
        found = (other.mean_until(step) for each, other in self._curves.items() if each != number)
        others = [mean for mean in found if mean is not None]
        if len(others) < self._min_samples:
            return math.isfinite(value)
        return curve.best <= median(others)

    def diverged(self, number: int) -> None:
        curve = self._curves.setdefault(number, _Curve())
        curve.add(max(curve.steps, default=0) + 1, math.inf)


@dataclass
class _Curve:
    """A trial's steps in order and the means of its values until each; any other trial's report asks for one."""

    steps: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    best: float = math.inf
    has_diverged: bool = False
    # Exact, as ten times 0.1 add up to less than 1.0: a trial that equals all others would be stopped.
    _total: Fraction = Fraction(0)

    def add(self, step: int, value: float) -> None:
        self.best = min(self.best, value)
        self.has_diverged |= value == math.inf
        self.steps.append(step)
        if self.has_diverged:
            self.means.append(math.inf)
        else:
            self._total += Fraction(value)
            self.means.append(float(self._total / len(self.steps)))

    def mean_until(self, step: int) -> float | None:
        """None where it did not come so far; one that diverged stays the worst from there on."""
        count = bisect_right(self.steps, step)
        is_known = count > 0 and (self.steps[-1] >= step or self.has_diverged)
        return self.means[count - 1] if is_known else None


def make_rule(spec: StudySpec) -> StoppingRule:
    """The rule a study asks for, empty; replay the study's record into it."""
    scheduler = spec.scheduler
    if scheduler.type == "none":
        return NeverStop()
    if scheduler.type == "median":
        return MedianStopping(scheduler.grace_period, scheduler.min_samples)
    levels = rungs(scheduler.grace_period, spec.max_t, scheduler.reduction_factor)
    if scheduler.type == "hyperband":
        return Brackets(levels, scheduler.reduction_factor, len(levels), spec.search.seed)
    return Brackets(levels, scheduler.reduction_factor, scheduler.brackets, spec.search.seed)
