"""MLflow: one parent run a study, one child run a trial, as a view for people; nothing is read back to decide anything.

Training never waits for MLflow. Each call leaves an event in `<study>/mlflow_pending.jsonl` and in a queue, and
returns; one background thread imports mlflow and sends what is queued about once a second. What cannot be sent stays
in the file, through a kill as well, and is sent when the study is opened again.

One experiment holds one study unless the study file, MLFLOW_EXPERIMENT_NAME, MLFLOW_EXPERIMENT_ID or MLFLOW_RUN_ID
say otherwise. States: COMPLETE is FINISHED, PRUNED is KILLED, FAILED is FAILED; a trial of an interrupted study is
KILLED with the tag `interrupted` until it goes on. The metric `objective` is the value that the record has.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.tracking_pending import Event, PendingLog
from tuner.tracking_target import Target, check_target, resolve_target
from tuner.tracking_values import points

if TYPE_CHECKING:
    from tuner.record import TrialRecord
    from tuner.spec import StudySpec
    from tuner.tracking_runs import StudyRuns

PENDING = "mlflow_pending.jsonl"
FLUSH_S = 1.0
CHUNK = 500
RETRY_S, MAX_RETRY_S, CLOSING_RETRY_S, CLOSING_ATTEMPTS = 1.0, 60.0, 0.5, 3
SLOW_S = 60.0
# Importing mlflow takes seconds of this process's only interpreter lock: it waits until training has begun.
IMPORT_DELAY_S = 60.0


class MlflowTracker:
    """Tells MLflow what happens in a study. Methods return at once, except `check`, `child_environment` and `close`."""

    def __init__(
        self,
        spec: StudySpec,
        study_dir: Path,
        *,
        on_run_id: Callable[[int, str], None],
        on_warning: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Settle where the study's runs go; nothing is opened yet.

        Args:
            spec: The study; `spec.mlflow.enabled: false` makes every method do nothing.
            study_dir: Its folder; need not exist before `start_study`. The default store lies beside it.
            on_run_id: Called with (trial number, run id) on the background thread once the trial's run exists.
            on_warning: Called with one line, on either thread, when something is wrong that training survives.
        """
        self._spec, self._dir = spec, study_dir.absolute()
        self._on_run_id, self._on_warning = on_run_id, on_warning
        self._target = resolve_target(spec, self._dir.parent)
        self._pending = PendingLog(self._dir / PENDING)
        self._changed = threading.Condition()
        self._queue: list[Event] = []
        self._old_events: list[Event] | None = None
        self._environments: dict[int, dict[str, str]] = {}
        self._is_urgent = self._is_closing = self._is_abandoned = False
        self._has_started_training = threading.Event()
        self._thread: threading.Thread | None = None
        self._steps: dict[int, int] = {}  # of the trials that run
        self._is_study_open = False
        self._warned: set[str] = set()
        self._artifact_failures: dict[tuple[str, str], int] = {}

    @property
    def target(self) -> Target:
        """Where the runs go: `.uri`, `.experiment`."""
        return self._target

    def check(self) -> None:
        """See that the store can be used, without importing mlflow; a server that does not answer is a warning.

        Raises:
            TrackingError: Nothing could ever be written there as configured.
        """
        if self._spec.mlflow.enabled:
            for text in check_target(self._target):
                self._warn("unreachable", text)

    # -- what happens -------------------------------------------------------------------------------------------

    def start_study(self, tags: Mapping[str, Any], records: Iterable[TrialRecord] = ()) -> None:
        """The study begins or goes on; its folder exists.

        Args:
            tags: Tags of the parent run: world size, resume count, command line. They may change with a resume.
            records: What the study's record says of its trials; an ended one whose run is missing or still open
                (a kill fell between the two) is brought up to date.
        """
        if not self._spec.mlflow.enabled:
            return
        self._is_study_open = True
        metric = self._spec.objective.metric
        ended = [_ended_event(record, metric) for record in records if record.state != "RUNNING"]
        self._put("study", tags=_plain(tags), ended=ended)
        self._thread = threading.Thread(target=self._serve, name="mlflow", daemon=True)
        self._thread.start()

    def start_trial(self, number: int, params: Mapping[str, Any], tags: Mapping[str, Any] | None = None) -> None:
        """A trial begins or goes on; `params` are written once, `tags` each time."""
        self._steps[number] = 0
        self._put("trial", number=number, params=_plain(params), tags=_plain(tags or {}))

    def log_report(self, number: int, metrics: Mapping[str, Any], history: Sequence[Mapping[str, Any]] = ()) -> None:
        """Points of a trial: `history` has one entry a step, and its keys take precedence over those in `metrics`."""
        found, is_diverged = points(metrics, history)
        self._steps[number] = max([self._steps.get(number, 0), *(step for step, _ in found)])
        self._put("report", number=number, points=found, diverged=is_diverged)
        self._has_started_training.set()

    def end_trial(
        self, number: int, state: str, reason: str | None = None, value: float | None = None, checkpoint: Any = None
    ) -> None:
        """A trial is COMPLETE, PRUNED or FAILED; or RUNNING or INTERRUPTED when a resume is to go on with it."""
        self._put(
            "end",
            number=number,
            state="INTERRUPTED" if state == "RUNNING" else state,
            reason=reason,
            value=value if value is not None and math.isfinite(value) else None,
            diverged=_is_diverged(reason, value),
            checkpoint=None if checkpoint is None else str(checkpoint),
            step=self._steps.pop(number, 0),
        )
        self._has_started_training.set()

    def end_study(self, summary: Mapping[str, Any], artifacts: Iterable[Path] = ()) -> None:
        """No trial runs any more.

        Args:
            summary: What `Study.status()` gives (`state`, `counts`, `best`, ...) and any further numbers and texts.
            artifacts: Files to keep with the parent run, such as the report; those that do not exist are left out.
        """
        self._interrupt_trials()
        self._is_study_open = False
        self._put("study_end", summary=_plain(summary), artifacts=[str(path.absolute()) for path in artifacts])

    def child_environment(self, number: int, timeout_s: float = 30.0) -> dict[str, str]:
        """The environment that makes MLflow calls inside the trial's workers land in the trial's run.

        Waits until the run exists; empty, with a warning, when it does not within `timeout_s`.
        """
        if not self._spec.mlflow.enabled:
            return {}
        with self._changed:
            self._is_urgent = True
            self._has_started_training.set()
            self._changed.notify_all()
            self._changed.wait_for(lambda: number in self._environments, timeout_s)
            found = self._environments.get(number, {})
        if not found:
            self._warn("environment", f"MLflow has no run for trial {number} yet; what it logs itself goes elsewhere")
        return dict(found)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Send what is left and stop; trials and a study that were not ended are closed as interrupted.

        Returns:
            Whether MLflow has everything; else it is kept in the study's folder and a warning says so.
        """
        if self._thread is None:
            return True
        if self._is_study_open:
            self.end_study({"state": "interrupted"})
        with self._changed:
            self._is_closing = True
            self._has_started_training.set()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            self._is_abandoned = True
            unsent = [*(self._old_events or []), *self._queue]
            self._keep(unsent)
        self._thread = None
        return not unsent

    # -- the queue ----------------------------------------------------------------------------------------------

    def _put(self, op: str, **content: Any) -> None:
        if not self._spec.mlflow.enabled:
            return
        event = {"op": op, "time": time.time_ns() // 1_000_000} | content
        with self._changed:
            self._read_old_events()
            try:
                self._pending.append(event)
            except OSError as error:
                self._warn("disk", f"{self._pending.path} cannot be written ({error}); MLflow may miss points")
            self._queue.append(event)
            self._changed.notify_all()

    def _read_old_events(self) -> None:
        # Before the first event of this session goes into the same file.
        if self._old_events is None:
            self._old_events, damaged = self._pending.read()
            if damaged:
                self._warn("damaged", f"{self._pending.path}: {damaged} unreadable lines are left out")

    def _interrupt_trials(self) -> None:
        for number in list(self._steps):
            self.end_trial(number, "INTERRUPTED")

    def _keep(self, unsent: Sequence[Event]) -> None:
        try:
            self._pending.rewrite(unsent)
        except OSError as error:
            self._warn("kept", f"{len(unsent)} updates for MLflow are lost ({error})")
            return
        if unsent:
            text = f"{len(unsent)} updates could not be sent to MLflow at {self._target.shown}; {self._pending.path}"
            self._warn("kept", f"{text} keeps them until `tune resume {self._spec.study}`")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._on_warning(text)

    # -- the background thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._has_started_training.wait(IMPORT_DELAY_S)
        runs: StudyRuns | None = None
        retry_s, closing_attempts = RETRY_S, CLOSING_ATTEMPTS
        while (chunk := self._next_chunk()) is not None:
            try:
                runs = runs or self._open()
                runs.apply(chunk)
            except Exception as error:
                # The runs are looked up again: a call that failed here may have been carried out there.
                runs = None
                self._warn("unreachable", f"MLflow at {self._target.shown}: {error}; training goes on, points are kept")
                if self._is_closing and (closing_attempts := closing_attempts - 1) <= 0:
                    return
                self._pause(CLOSING_RETRY_S if self._is_closing else retry_s, is_retry=True)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
                continue
            retry_s = RETRY_S
            self._sent(len(chunk))
            self._pause(FLUSH_S)

    def _open(self) -> StudyRuns:
        from tuner.tracking_runs import StudyRuns

        return StudyRuns(
            self._target,
            self._spec,
            self._dir,
            on_run=self._run_exists,
            on_warning=lambda text: self._warn(text, text),
            artifact_failures=self._artifact_failures,
        )

    def _run_exists(self, number: int, run_id: str, experiment_id: str) -> None:
        names = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID")
        with self._changed:
            self._environments[number] = dict(zip(names, (self._target.uri, run_id, experiment_id), strict=True))
            self._changed.notify_all()
        self._on_run_id(number, run_id)

    def _next_chunk(self) -> list[Event] | None:
        """The events to send next, oldest first; waits for some. None when all is done."""
        with self._changed:
            self._is_urgent = False
            self._changed.wait_for(lambda: self._old_events or self._queue or self._is_closing)
            if self._is_abandoned:
                return None
            if self._old_events:
                return self._old_events[:CHUNK]
            chunk = self._queue[:CHUNK]
        if chunk and time.time() - chunk[0]["time"] / 1000 > SLOW_S and self._steps:
            self._warn("slow", f"MLflow at {self._target.shown} is slow: {len(self._queue)} updates wait for it")
        return chunk or None

    def _sent(self, count: int) -> None:
        with self._changed:
            # After `close` gave up, the file belongs to whoever opens the study next.
            if self._is_abandoned:
                return
            if self._old_events:
                del self._old_events[:count]
            else:
                del self._queue[:count]
            try:
                self._pending.sent([*(self._old_events or []), *self._queue])
            except OSError as error:
                self._warn("disk", f"{self._pending.path} cannot be written ({error}); MLflow may miss points")

    def _pause(self, seconds: float, *, is_retry: bool = False) -> None:
        with self._changed:
            was_closing = self._is_closing
            if not is_retry and (was_closing or len(self._queue) >= CHUNK):
                return
            self._changed.wait_for(lambda: self._is_urgent or self._is_closing != was_closing, seconds)


def _ended_event(record: TrialRecord, metric: str) -> Event:
    """An ended trial of the record as one event: the parameters, the objective's points and the end."""
    ended = dt.datetime.fromisoformat(record.ended) if record.ended else dt.datetime.now(dt.UTC)
    reports = {step: value for step, value in record.reports.items() if math.isfinite(value)}
    return {
        "number": record.number,
        "time": int(ended.timestamp() * 1000),
        "params": _plain(record.params),
        "points": [[step, {metric: value}] for step, value in reports.items()],
        "diverged": _is_diverged(record.reason, record.value),
        "state": record.state,
        "reason": record.reason,
        "value": record.value if record.value is not None and math.isfinite(record.value) else None,
        "step": record.step,
        "checkpoint": record.checkpoint,
    }


def _is_diverged(reason: str | None, value: float | None) -> bool:
    return (reason or "").startswith("diverged") or (value is not None and not math.isfinite(value))


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same as it comes back from the file of pending events."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(content), default=str))
    return plain
