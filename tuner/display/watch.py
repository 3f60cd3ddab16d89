"""A study that another process runs, watched through its record: the same display, without Ray."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tuner.planning.plan import make_plan

if TYPE_CHECKING:
    from tuner.display.live import Lines
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study

EVERY_S = 1.0


def watch(study: Study, display: Lines | None, pause: Callable[[float], None] = time.sleep) -> None:
    """Show a study until nobody runs it any more.

    Args:
        study: Open to read.
        display: Gets the study's events; None to wait in silence.
        pause: Waits that many seconds.
    """
    news = _News(study, display)
    while study.is_running:
        news.tell()
        pause(EVERY_S)
    news.tell()
    if display is not None:
        display.study_ended(study)


class _News:
    """What has changed in the record since it was last told of."""

    def __init__(self, study: Study, display: Lines | None) -> None:
        self._study, self._display = study, display
        self._steps: dict[int, int] = {}
        self._ended = {record.number for record in study.trials() if record.state != "RUNNING"}
        if display is not None:
            display.study_started(study, make_plan(study.spec, None))

    def tell(self) -> None:
        if self._display is None:
            return
        for record in self._study.trials():
            if record.state == "RUNNING":
                self._tell_running(record, self._display)
            elif record.number not in self._ended:
                self._ended.add(record.number)
                self._display.trial_ended(record)
        self._display.tick((self._study.sessions() or [{}])[-1].get("training_share", 0.0))

    def _tell_running(self, record: TrialRecord, display: Lines) -> None:
        if record.number not in self._steps:
            display.trial_started(record.number, record.params, record.step)
            display.started_earlier(record.number, age_s(record.started))
        if record.step > self._steps.get(record.number, 0):
            metric = self._study.spec.objective.metric
            display.reported(record.number, {"step": record.step, metric: record.reports[record.step]})
        self._steps[record.number] = record.step


def age_s(moment: str | None) -> float:
    """Seconds since an ISO 8601 time."""
    if moment is None:
        return 0.0
    return max(0.0, (dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(moment)).total_seconds())
