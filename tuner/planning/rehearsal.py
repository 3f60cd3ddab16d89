"""A study played through without training: its own stopping rule, trials whose losses are drawn, slots that take time.

What asynchronous halving lets through depends on the order in which trials arrive: the first at a rung always goes on.
So it is played many times, each with trials in another random order, and the outcomes are averaged.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuner.decisions.early_stopping import StoppingRule
from tuner.planning.pace import Pace
from tuner.study_file.rules import constant
from tuner.study_file.spec import StudySpec

# Trials played in all, over all repetitions.
NUM_PLAYED, MAX_TURNS, MIN_TURNS = 6000, 300, 5


@dataclass(frozen=True)
class Course:
    """How one study went.

    Attributes:
        lengths: Steps of each trial.
        busy_s: From the first step to the last report.
    """

    lengths: tuple[int, ...]
    busy_s: float

    @property
    def steps(self) -> int:
        """Optimizer steps of all trials."""
        return sum(self.lengths)


def rehearse(
    spec: StudySpec, make: Callable[[], StoppingRule], *, num_trials: int, num_slots: int, pace: Pace
) -> list[Course]:
    """Plays a study many times, the same each time it is asked.

    Args:
        spec: The study.
        make: Its stopping rule, empty.
        num_trials: Trials that will run.
        num_slots: Trials at once.
        pace: What its parts take.
    """
    turns = max(MIN_TURNS, min(MAX_TURNS, NUM_PLAYED // num_trials))
    source = random.Random(spec.search.seed)
    return [
        _Play(spec, make(), pace, [source.random() for _ in range(num_trials)]).run(num_slots) for _ in range(turns)
    ]


class _Play:
    """One study. A trial has one value at all rungs: that it keeps its place among the others is assumed."""

    def __init__(self, spec: StudySpec, rule: StoppingRule, pace: Pace, values: Sequence[float]) -> None:
        self._rule, self._pace, self._values = rule, pace, values
        self._max_t, self._save_every = spec.max_t, spec.checkpoint.every or 1
        self._eval_every = 0 if spec.is_custom else int(constant(spec.train, "eval_every")[1] or 100)
        # The default trial runs first, and in full.
        self._default = None if spec.default_params() is None else 0
        self._lengths = [0] * len(values)
        self._events: list[tuple[float, int, int]] = []
        self._next = 0

    def run(self, num_slots: int) -> Course:
        """Play it to its end."""
        now = 0.0
        for _ in range(num_slots):
            self._begin(now)
        while self._events:
            now, number, step = heapq.heappop(self._events)
            self._lengths[number] = step
            keeps = self._rule.keeps(number, step, self._values[number]) or number == self._default
            if keeps and step < self._max_t:
                self._go_on(now, number, step)
            else:
                self._begin(now + self._pace.turnover_s)
        return Course(tuple(self._lengths), now)

    def _begin(self, now: float) -> None:
        if self._next < len(self._values):
            self._go_on(now, self._next, 0)
            self._next += 1

    def _go_on(self, now: float, number: int, step: int) -> None:
        """To where the trial is judged next, or to its end."""
        later = [level for level in self._rule.decision_steps(number) or () if level > step]
        until = min([*later, self._max_t])
        heapq.heappush(self._events, (now + self._seconds(step, until), number, until))

    def _seconds(self, begin: int, end: int) -> float:
        pace = self._pace
        evaluations = _multiples(self._eval_every, begin, end)
        # What is saved at the very end counts as the turnover's.
        saves = _multiples(self._save_every, begin, end - 1)
        return (end - begin) * pace.step_s + evaluations * pace.eval_s + saves * pace.save_s


def _multiples(every: int, begin: int, end: int) -> int:
    """How many there are above begin, up to end."""
    return end // every - begin // every if every else 0
