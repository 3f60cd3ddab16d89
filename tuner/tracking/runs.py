"""The MLflow runs of one study: finds them by tag, makes what is missing, and applies events to them.

Everything here may be done twice with the same outcome, so that after any failure the events are simply sent again:
runs are looked up in the store, parameters are written once, and points that the store has are skipped. Used on the
tracker's background thread only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.study_file.database_url import without_password
from tuner.tracking import values, views
from tuner.tracking.client import is_refusal, open_client
from tuner.tracking.lookup import Batch, FoundRuns, TrackedRun, folder_tag, note_identity
from tuner.tracking.pending import Event
from tuner.tracking.target import Target

if TYPE_CHECKING:
    from tuner.study_file.spec import StudySpec

STATUS = {"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAILED": "FAILED", "INTERRUPTED": "KILLED"}
# MLflow takes 1000 entities in a call, of which 100 parameters and 100 tags.
BATCH_METRICS, BATCH_OTHERS = 800, 100
ARTIFACT_ATTEMPTS = 3
# A longer log stays where it is.
LOG_BYTES = 10_000_000


class StudyRuns:
    """The parent run of a study and the runs of its trials. After an exception, make a new one."""

    def __init__(
        self,
        target: Target,
        spec: StudySpec,
        study_dir: Path,
        *,
        on_run: Callable[[int, str, str], None],
        on_warning: Callable[[str], None],
        artifact_failures: dict[tuple[str, str], int],
    ) -> None:
        """Open the store and look the study's runs up.

        Args:
            target: Where to write.
            spec: The study.
            study_dir: Its folder.
            on_run: Called with (trial number, run id, experiment id) whenever a trial starts or is brought up to date.
            on_warning: Called with one line when MLflow refuses something for good.
            artifact_failures: How often each artifact has failed, kept by the caller over several objects.

        Raises:
            OSError: or MLflow's own exceptions; the store cannot be reached now.
        """
        self._spec, self._dir, self._on_run, self._on_warning = spec, study_dir, on_run, on_warning
        self._artifact_failures = artifact_failures
        self._client = open_client(target)
        self._environment = values.environment_tags(spec)
        found = FoundRuns(self._client, target, study_dir, on_warning)
        self._parent, self._trials, self._outer_run = found.parent, found.trials, found.outer_run
        self._experiment_id, self._study_id = found.experiment_id, found.study_id

    def apply(self, events: Iterable[Event]) -> None:
        """Bring the store up to date with `events`, in order.

        Raises:
            OSError: or MLflow's own exceptions; none of the events counts as sent.
        """
        handlers = {
            "study": self._study_started,
            "trial": self._trial_started,
            "report": self._reported,
            "end": self._trial_ended,
            "study_end": self._study_ended,
        }
        for event in events:
            self._tolerate(partial(handlers[event["op"]], event))
        for run in [*self._trials.values(), *([self._parent] if self._parent else [])]:
            self._tolerate(partial(self._flush, run))

    def _tolerate(self, action: Callable[[], None]) -> None:
        # What MLflow refuses for good (a run deleted in its page) must not hold up everything behind it.
        try:
            action()
        except Exception as error:
            if not is_refusal(error):
                raise
            self._on_warning(f"MLflow refused an update: {error}")

    # -- events -------------------------------------------------------------------------------------------------

    def _study_started(self, event: Event) -> None:
        run = self._parent_run(event["time"])
        self._reopen(run)
        run.batch.tags.update(self._study_tags("study") | self._environment | values.tags(event["tags"]))
        for name in ("study.yaml", "spec.json"):
            self._study_file(run, self._dir / name)
        for ended in event["ended"]:
            self._settle(ended)
        self._tolerate(self._share_view)

    def _study_file(self, run: TrackedRun, path: Path) -> None:
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            self._artifact(run, path.name, partial(without_password, text, self._spec.search.storage))

    def _share_view(self) -> None:
        key = f"{views.SHARED_VIEW}{self._study_id}"
        self._client.set_experiment_tag(self._experiment_id, key, views.shared_view(self._study_id, self._spec))
        note_identity(self._dir, view=self._study_id)

    def _settle(self, event: Event) -> None:
        # A kill can fall between the record of a trial's end and its event.
        run = self._trials.get(event["number"])
        if run is None or run.status == "RUNNING" or run.is_interrupted:
            run = self._trial_run(event, {})
            self._reported(event)
            self._trial_ended(event)
            # The record may have been killed before it heard of it.
            self._on_run(event["number"], run.run_id, self._experiment_id)

    def _trial_started(self, event: Event) -> None:
        run = self._trial_run(event, values.tags(event["tags"]))
        self._reopen(run)
        self._on_run(event["number"], run.run_id, self._experiment_id)

    def _reported(self, event: Event) -> None:
        run = self._trials.get(event["number"])
        if run is None:
            return
        for step, metrics in event["points"]:
            self._add(run, step, metrics, event["time"])
        if event["diverged"]:
            run.batch.tags["diverged"] = "true"

    def _trial_ended(self, event: Event) -> None:
        run = self._trials.get(event["number"])
        if run is None:
            return
        is_interrupted = event["state"] == "INTERRUPTED"
        # Why and with what it ended is not known yet for one that goes on: tags and points would stay behind.
        kept = ("checkpoint",) if is_interrupted else ("reason", "checkpoint")
        run.batch.tags.update(values.tags({key: event[key] for key in kept} | {"tune.state": event["state"]}))
        if event["diverged"]:
            run.batch.tags["diverged"] = "true"
        if event["value"] is not None and not is_interrupted:
            self._add(run, event["step"], {"objective": event["value"]}, event["time"])
        self._keep_log(run, self._dir / "logs" / f"{event['number']}.rank0.log")
        self._close(run, STATUS[event["state"]], event["time"], is_interrupted=is_interrupted)

    def _keep_log(self, run: TrackedRun, log: Path) -> None:
        if log.exists() and log.stat().st_size <= LOG_BYTES:
            self._artifact(run, log)

    def _study_ended(self, event: Event) -> None:
        run = self._parent_run(event["time"])
        summary = event["summary"]
        metrics, tags, num_ended = values.flat_summary(summary, self._spec.objective.metric)
        best = self._trials.get((summary.get("best") or {}).get("number", -1))
        if best is not None:
            tags["best_run_id"] = best.run_id
        self._add(run, num_ended, metrics, event["time"])
        run.batch.tags.update(tags)
        self._show_leaderboard(run, summary.get("leaderboard"))
        for path in event["artifacts"]:
            self._artifact(run, Path(path))
        for trial in self._trials.values():
            # Left by a kill, and not gone on with since.
            if trial.status == "RUNNING":
                self._close(trial, "KILLED", event["time"], is_interrupted=True)
        is_interrupted = summary.get("state") == "interrupted"
        self._close(run, values.parent_status(summary), event["time"], is_interrupted=is_interrupted)

    def _show_leaderboard(self, run: TrackedRun, table: Mapping[str, Any] | None) -> None:
        if table is not None:
            self._artifact(run, views.LEADERBOARD, partial(json.dumps, table))
            run.batch.tags[views.TABLES] = json.dumps([{"path": views.LEADERBOARD, "type": "table"}])

    # -- runs ---------------------------------------------------------------------------------------------------

    def _study_tags(self, kind: str) -> dict[str, str]:
        tags = {"tune.study_id": self._study_id, "tune.study": self._spec.study, "tune.kind": kind}
        return tags | ({"tune.folder": folder_tag(self._dir)} if kind == "study" else {})

    def _parent_run(self, time_ms: int) -> TrackedRun:
        if self._parent is None:
            self._parent = self._create(self._spec.study, self._study_tags("study") | self._outer_run, time_ms)
        return self._parent

    def _trial_run(self, event: Event, tags: Mapping[str, str]) -> TrackedRun:
        """The trial's run, made if needed; its parameters and whole configuration are written once."""
        number, time_ms = event["number"], event["time"]
        run = self._trials.get(number)
        if run is None:
            parent = {"mlflow.parentRunId": self._parent_run(time_ms).run_id, "tune.trial": str(number)}
            own = {**self._study_tags("trial"), **tags, **parent}
            run = self._trials[number] = self._create(f"{self._spec.study}-{number}", own, time_ms)
        else:
            run.batch.tags.update(tags)
        known = run.params | run.batch.params.keys()
        missing = {key: text for key, text in values.params(event["params"]).items() if key not in known}
        run.batch.params.update(missing)
        if missing or not known:
            self._artifact(run, values.CONFIG, partial(values.whole_config, self._spec, event["params"]))
        return run

    def _create(self, name: str, tags: dict[str, str], time_ms: int) -> TrackedRun:
        tags = self._environment | tags
        run = self._client.create_run(self._experiment_id, start_time=time_ms, tags={**tags}, run_name=name)
        return TrackedRun(run.info.run_id)

    # -- writing ------------------------------------------------------------------------------------------------

    def _reopen(self, run: TrackedRun) -> None:
        if run.status != "RUNNING":
            self._client.update_run(run.run_id, status="RUNNING")
            run.status = "RUNNING"
        if run.is_interrupted:
            self._client.delete_tag(run.run_id, "interrupted")
            run.is_interrupted = False

    def _close(self, run: TrackedRun, status: str, time_ms: int, *, is_interrupted: bool) -> None:
        if is_interrupted:
            run.batch.tags["interrupted"] = "true"
        self._flush(run)
        self._client.set_terminated(run.run_id, status=status, end_time=time_ms)
        run.status, run.is_interrupted = status, is_interrupted
        run.keys |= run.steps.keys()
        run.steps.clear()

    def _add(self, run: TrackedRun, step: int, metrics: Mapping[str, float], time_ms: int) -> None:
        for key, value in metrics.items():
            if step not in self._steps(run, key):
                run.batch.points.setdefault((key, step), (value, time_ms))

    def _steps(self, run: TrackedRun, key: str) -> set[int]:
        if key not in run.steps:
            history = self._client.get_metric_history(run.run_id, key) if key in run.keys else []
            run.steps[key] = {point.step for point in history}
        return run.steps[key]

    def _flush(self, run: TrackedRun) -> None:
        if run.batch == Batch():
            return
        from mlflow.entities import Metric, Param, RunTag

        batch, run.batch = run.batch, Batch()
        points = [Metric(key, value, time, step) for (key, step), (value, time) in batch.points.items()]
        params = [Param(key, text) for key, text in batch.params.items()]
        tags = [RunTag(key, text) for key, text in batch.tags.items()]
        while points or params or tags:
            sent = points[:BATCH_METRICS], params[:BATCH_OTHERS], tags[:BATCH_OTHERS]
            self._client.log_batch(run.run_id, *sent, synchronous=True)
            points, params, tags = points[BATCH_METRICS:], params[BATCH_OTHERS:], tags[BATCH_OTHERS:]
        for key, step in batch.points:
            self._steps(run, key).add(step)
        run.params |= batch.params.keys()

    def _artifact(self, run: TrackedRun, name: Path | str, text: Callable[[], str] | None = None) -> None:
        """Write a file, or `text` under a name. An artifact store out of order must not hold up the metrics."""
        key = (run.run_id, str(name))
        if self._artifact_failures.get(key, 0) >= ARTIFACT_ATTEMPTS or (text is None and not Path(name).exists()):
            return
        try:
            if text is None:
                self._client.log_artifact(run.run_id, str(name))
            else:
                self._client.log_text(run.run_id, text(), str(name))
        except Exception as error:
            self._artifact_failures[key] = self._artifact_failures.get(key, 0) + 1
            if self._artifact_failures[key] < ARTIFACT_ATTEMPTS and not is_refusal(error):
                raise
            self._artifact_failures[key] = ARTIFACT_ATTEMPTS
            self._on_warning(f"MLflow does not take the artifact {Path(name).name}: {error}")
