"""MLflow: one parent run a study, one child run a trial, as a view for people; nothing is read back to decide anything.

Training never waits for MLflow. Each call leaves an event in `<study>/mlflow_pending.jsonl` and in a queue, and
returns; one background thread passes what is queued every few seconds to a process that imports mlflow. What cannot
be sent stays in the file, through a kill as well, and is sent when the study is opened again.

One experiment holds one study unless the study file, MLFLOW_EXPERIMENT_NAME, MLFLOW_EXPERIMENT_ID or MLFLOW_RUN_ID
say otherwise. States: COMPLETE is FINISHED, PRUNED is KILLED, FAILED is FAILED; a trial of an interrupted study is
KILLED with the tag `interrupted` until it goes on. The metric `objective` is the value that the record has.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.commands import command
from tuner.tracking.pending import Event, PendingLog
from tuner.tracking.process import Listener, StoreProcess
from tuner.tracking.sender import Sender
from tuner.tracking.target import Target, check_target, resolve_target
from tuner.tracking.values import points

if TYPE_CHECKING:
    from tuner.record.record import TrialRecord
    from tuner.study_file.spec import StudySpec

PENDING = "mlflow_pending.jsonl"
WARNING_CHARS = 500


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
        listener = Listener(self._run_exists, lambda text: self._warn(text, text))
        store = StoreProcess(self._target, spec, self._dir, listener)
        self._sender = Sender(store, PendingLog(self._dir / PENDING), self._target.shown, self._warn)
        self._environments: dict[int, dict[str, str]] = {}
        self._steps: dict[int, int] = {}  # of the trials that run
        self._is_study_open = False
        self._warned: set[str] = set()

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
        self._sender.start()

    def start_trial(self, number: int, params: Mapping[str, Any], tags: Mapping[str, Any] | None = None) -> None:
        """A trial begins or goes on; `params` are written once, `tags` each time."""
        self._steps[number] = 0
        self._put("trial", number=number, params=_plain(params), tags=_plain(tags or {}))

    def tag_trial(self, number: int, params: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        """Something more is known of a trial that runs."""
        self._put("trial", number=number, params=_plain(params), tags=_plain(tags))

    def log_report(self, number: int, metrics: Mapping[str, Any], history: Sequence[Mapping[str, Any]] = ()) -> None:
        """Points of a trial: `history` has one entry a step, and its keys take precedence over those in `metrics`."""
        found, is_diverged = points(metrics, history)
        self._steps[number] = max([self._steps.get(number, 0), *(step for step, _ in found)])
        self._put("report", number=number, points=found, diverged=is_diverged)
        self._sender.training_has_begun()

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
        self._environments.pop(number, None)
        self._sender.training_has_begun()

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
        self._sender.wait_for(lambda: number in self._environments, timeout_s)
        found = self._environments.get(number, {})
        if not found:
            self._warn("environment", f"MLflow has no run for trial {number} yet; what it logs itself goes elsewhere")
        return dict(found)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Send what is left and stop; trials and a study that were not ended are closed as interrupted.

        Returns:
            Whether MLflow has everything; else it is kept in the study's folder and a warning says so.
        """
        if self._is_study_open:
            self.end_study({"state": "interrupted"})
        num_kept, num_lost = self._sender.close(timeout_s)
        if num_kept:
            where = f"{num_kept} updates could not be sent to MLflow at {self._target.shown}; {self._dir / PENDING}"
            self._warn("kept", f"{where} keeps them until `{command('resume', self._dir)}`")
        return num_kept == num_lost == 0

    def _put(self, op: str, **content: Any) -> None:
        if self._spec.mlflow.enabled:
            self._sender.put({"op": op, "time": time.time_ns() // 1_000_000} | content)

    def _interrupt_trials(self) -> None:
        for number in list(self._steps):
            self.end_trial(number, "INTERRUPTED")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._on_warning(" ".join(text.split())[:WARNING_CHARS])

    # -- on the background thread -------------------------------------------------------------------------------

    def _run_exists(self, number: int, run_id: str, experiment_id: str) -> None:
        if number in self._steps:
            names = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID")
            self._environments[number] = dict(zip(names, (self._target.uri, run_id, experiment_id), strict=True))
            self._sender.notify()
        self._on_run_id(number, run_id)


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
