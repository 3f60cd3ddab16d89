"""What is known of one trial, and how Optuna's record of it is read."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from tuner.record.journal_view import RecordedTrial
    from tuner.study_file.spec import Objective

# Optuna's states in the words of this project. WAITING trials are never made here.
STATES = {"RUNNING": "RUNNING", "COMPLETE": "COMPLETE", "PRUNED": "PRUNED", "FAIL": "FAILED", "WAITING": "RUNNING"}


@dataclass(frozen=True)
class TrialRecord:
    """One trial as `tune trials --format json` shows it.

    Attributes:
        number: Position in the study, from 0.
        state: RUNNING, COMPLETE, PRUNED or FAILED.
        value: The objective of its last (or best, see `objective.scope`) report; None before the first.
        step: Optimizer steps done at the last report.
        params: The searched parameters.
        reason: Why it ended, in one line; None while it runs and for a complete trial.
        checkpoint: Folder of the checkpoint to use, None when there is none.
        mlflow_run_id: Its run in MLflow, None before it is known.
        started: ISO 8601 time, UTC.
        ended: ISO 8601 time, UTC; None while it runs.
        reports: Objective at each reported step; not part of the JSON shape.
        attempts: How often it was started.
        judged_step: The last report that the scheduler is known to have let pass, or the last of an ended trial.
        workers: On how many workers it ran, one after the other, where that is elastic.
    """

    number: int
    state: str
    value: float | None
    step: int
    params: dict[str, Any]
    reason: str | None
    checkpoint: str | None
    mlflow_run_id: str | None
    started: str | None
    ended: str | None
    reports: dict[int, float] = field(default_factory=dict, repr=False)
    attempts: int = 0
    judged_step: int = 0
    workers: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The stable JSON shape: every attribute but the last four."""
        shape = asdict(self)
        del shape["reports"], shape["attempts"], shape["judged_step"], shape["workers"]
        return shape

    @classmethod
    def from_optuna(cls, trial: FrozenTrial | RecordedTrial, objective: Objective) -> TrialRecord:
        """Read one trial of the Optuna study, or of a view of its journal."""
        notes = trial.user_attrs
        reports = dict(sorted(trial.intermediate_values.items()))
        return cls(
            number=trial.number,
            state=STATES[trial.state.name],
            value=objective_value(reports, objective),
            step=max(reports, default=0),
            params=dict(trial.params),
            reason=notes.get("reason"),
            checkpoint=notes.get("checkpoint"),
            mlflow_run_id=None,
            started=_utc(trial.datetime_start),
            ended=_utc(trial.datetime_complete),
            reports=reports,
            attempts=notes.get("attempts", 0),
            judged_step=max(reports, default=0) if trial.state.is_finished() else notes.get("judged_step", 0),
            workers=tuple(notes.get("workers", ())),
        )


def objective_value(reports: Mapping[int, float], objective: Objective) -> float | None:
    """The value of a trial with these reports: the last one's or the best one's, whichever `scope` asks for."""
    finite = {step: value for step, value in reports.items() if math.isfinite(value)}
    if not finite:
        return None
    return finite[value_step(finite, objective)]


def value_step(reports: Mapping[int, float], objective: Objective) -> int:
    """The step whose report gives the trial's value; the earliest one where several are equally good."""
    if objective.scope == "last":
        return max(reports)
    best = min if objective.mode == "min" else max
    return best(sorted(reports), key=lambda step: reports[step])


def best_report(reports: Mapping[int, float], objective: Objective) -> tuple[int, float] | None:
    """(step, value) of the best finite report so far; None when there is none."""
    finite = {step: value for step, value in reports.items() if math.isfinite(value)}
    best = min if objective.mode == "min" else max
    return best(sorted(finite.items()), key=lambda report: report[1], default=None)


def ranked(records: Iterable[TrialRecord], objective: Objective) -> list[TrialRecord]:
    """Best first. Only COMPLETE trials compete, unless there is none; a trial without a value never does."""
    valued = [record for record in records if record.value is not None and record.state != "FAILED"]
    field_ = [record for record in valued if record.state == "COMPLETE"] or valued
    sign = objective.sign
    return sorted(field_, key=lambda record: (sign * (record.value or 0.0), record.number))


def _utc(time: dt.datetime | None) -> str | None:
    # Optuna stores naive local times.
    return None if time is None else time.astimezone(dt.UTC).isoformat(timespec="milliseconds")
