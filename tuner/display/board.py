"""How a search stands, told by its events alone: counts, the best trial so far, the time left."""

from __future__ import annotations

import datetime as dt
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner import text
from tuner.record.record import TrialRecord, ranked

if TYPE_CHECKING:
    from tuner.record.study import Study


@dataclass
class RunningTrial:
    """A trial as last heard of."""

    started_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    preparing: str = ""


class Board:
    """The state of a search as its events tell it, without a look at the study's files.

    Args:
        study: Read once, for what ended before this session.
        num_trials: Trials that will run in all.
        clock: Seconds that only grow.
    """

    def __init__(self, study: Study, num_trials: int, clock: Callable[[], float]) -> None:
        self.objective = study.spec.objective
        self.num_trials = num_trials
        self.max_t = study.spec.max_t
        self.max_s = None if study.spec.search.max_hours is None else study.spec.search.max_hours * 3600
        self.running: dict[int, RunningTrial] = {}
        self.training_share: float | None = None
        self._clock, self._started_s, self._num_ended_here = clock, clock(), 0
        self._trains_since_s: float | None = None
        ended = [record for record in study.trials() if record.state != "RUNNING"]
        # Not their records: there may be thousands, each with its reports.
        self._ended = {record.number: record.state for record in ended}
        self.best: TrialRecord | None = self._leader(*ended)
        if study.is_running:
            self._count_from(study.sessions()[-1:], ended)

    def _count_from(self, sessions: Sequence[Mapping[str, Any]], ended: Sequence[TrialRecord]) -> None:
        """Count time and ended trials from the session's begin, which is long past for whoever looks in on it."""
        for session in sessions:
            age_s = time.time() - session["started"]
            self._started_s -= age_s
            self._num_ended_here = sum(_ended_s(record) >= session["started"] for record in ended)
            self._trains_since_s = self._started_s if self._num_ended_here else None

    def _leader(self, *records: TrialRecord) -> TrialRecord | None:
        return next(iter(ranked(records, self.objective)), None)

    def start(self, number: int, step: int) -> None:
        """A trial begins, or goes on from `step`."""
        self.running[number] = RunningTrial(self._clock(), {"step": step})

    def started_earlier(self, number: int, age_s: float) -> None:
        """A running trial began that many seconds ago."""
        if number in self.running:
            self.running[number].started_s = self._clock() - age_s

    def report(self, number: int, metrics: Mapping[str, float]) -> None:
        """A running trial reported."""
        if self._trains_since_s is None:
            self._trains_since_s = self._clock()
        if number in self.running:
            self.running[number].metrics = dict(metrics)
            self.running[number].preparing = ""

    def prepare(self, number: int, text: str) -> None:
        """A running trial tells what it does before its first step."""
        if number in self.running:
            self.running[number].preparing = text

    def end(self, record: TrialRecord) -> None:
        """A trial is over."""
        self.running.pop(record.number, None)
        self._ended[record.number] = record.state
        self._num_ended_here += 1
        self.best = self._leader(record, *([self.best] if self.best else []))

    @property
    def states(self) -> Counter[str]:
        """How many trials are in each state."""
        return Counter(self._ended.values()) + Counter(RUNNING=len(self.running))

    @property
    def elapsed_s(self) -> float:
        """Seconds since this process began or resumed the search."""
        return self._clock() - self._started_s

    @property
    def eta_s(self) -> float | None:
        """Seconds left at this session's rate of trials or until `max_hours`; None before either is known."""
        limits = [] if self.max_s is None else [max(0.0, self.max_s - self.elapsed_s)]
        if self._num_ended_here and self._trains_since_s is not None:
            # The start of the workers comes once; it says nothing about the trials to come.
            remaining = max(0, self.num_trials - len(self._ended))
            limits.append((self._clock() - self._trains_since_s) / self._num_ended_here * remaining)
        return min(limits, default=None)

    def summary(self) -> str:
        """One line: counts, best so far, time left, share of time in training."""
        parts = [f"{len(self._ended)}/{self.num_trials} trials ended", text.counts(self.states)]
        if self.best is not None:
            parts.append(f"best {self.objective.metric} {text.measured(self.best.value)} (trial {self.best.number})")
        if self.training_share is not None:
            parts.append(f"{text.percent(self.training_share)} of the time training")
        parts.append(f"{text.duration(self.elapsed_s)} so far")
        if self.eta_s is not None:
            parts.append(f"about {text.duration(self.eta_s)} left")
        return "; ".join(parts)


def _ended_s(record: TrialRecord) -> float:
    return 0.0 if record.ended is None else dt.datetime.fromisoformat(record.ended).timestamp()
