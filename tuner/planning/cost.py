"""What a study cost, and what early stopping saved of it. Pure functions of the record."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.record.record import TrialRecord
from tuner.record.session import slot_hours

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Cost:
    """Time and steps of a study.

    Attributes:
        hours: Of all sittings together.
        slot_hours: Hours of the sittings, each times its slots.
        trial_hours: From start to end of the ended trials, summed; waits for a resume count in.
        steps: Optimizer steps by state of their trial.
        steps_saved: Steps that pruned trials did not run.
        hours_saved: Slot hours these would have taken at the study's own pace; None where that is not known.
    """

    hours: float
    slot_hours: float
    trial_hours: float
    steps: Mapping[str, int]
    steps_saved: int
    hours_saved: float | None


def study_cost(records: Sequence[TrialRecord], sessions: Iterable[Mapping[str, Any]], max_t: int) -> Cost:
    """Adds up a study.

    Args:
        records: Its trials.
        sessions: Its sittings, as `Study.sessions()` has them.
        max_t: Steps of a full trial.
    """
    sittings = list(sessions)
    steps: dict[str, int] = {}
    for record in records:
        steps[record.state] = steps.get(record.state, 0) + record.step
    saved = sum(max(0, max_t - record.step) for record in records if record.state == "PRUNED")
    pace = _hours_a_step(records)
    return Cost(
        hours=sum(sitting["elapsed_s"] for sitting in sittings) / SECONDS_PER_HOUR,
        slot_hours=slot_hours(sittings),
        trial_hours=sum(filter(None, map(_hours, records))),
        steps=steps,
        steps_saved=saved,
        hours_saved=None if pace is None else pace * saved,
    )


def reached(records: Iterable[TrialRecord], steps: Sequence[int]) -> dict[int, int]:
    """Number of trials that reached each step."""
    lengths = [record.step for record in records]
    return {step: sum(length >= step for length in lengths) for step in steps}


def _hours_a_step(records: Iterable[TrialRecord]) -> float | None:
    # A trial that was interrupted has a wait between its start and its end.
    timed = [(hours, record.step) for record in records if record.attempts <= 1 and (hours := _hours(record))]
    steps = sum(count for _, count in timed)
    return sum(hours for hours, _ in timed) / steps if steps else None


def _hours(record: TrialRecord) -> float | None:
    if record.started is None or record.ended is None:
        return None
    return (dt.datetime.fromisoformat(record.ended) - dt.datetime.fromisoformat(record.started)) / dt.timedelta(hours=1)
