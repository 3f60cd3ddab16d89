"""The MLflow runs of one study: finds them by tag, makes what is missing, and applies events to them.

Everything here may be done twice with the same outcome, so that after any failure the events are simply sent again:
runs are looked up in the store, parameters are written once, and points that the store has are skipped. Used on the
tracker's background thread only.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tuner import tracking_values as values
from tuner.tracking_client import experiment_id, is_active_experiment, is_refusal, open_client, search_runs
from tuner.tracking_pending import Event
from tuner.tracking_target import Target

if TYPE_CHECKING:
    from mlflow.entities import Run

    from tuner.spec import StudySpec

IDENTITY = "mlflow.json"
STATUS = {"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAILED": "FAILED", "INTERRUPTED": "KILLED"}
# MLflow takes 1000 entities in a call, of which 100 parameters and 100 tags.
BATCH_METRICS, BATCH_OTHERS = 800, 100
ARTIFACT_ATTEMPTS = 3


@dataclass
class TrackedRun:
    """One run as the store had it when it was looked up, and what has been sent since.

    Attributes:
        run_id: Its id.
        status: RUNNING, FINISHED, KILLED or FAILED.
        params: Keys of the parameters it has.
        is_interrupted: It carries the tag `interrupted`.
        keys: Metrics the store may hold points of.
        steps: Steps the store holds of a metric; asked for when that metric is to be sent for the first time.
        batch: What is to be sent next.
    """

    run_id: str
    status: str = "RUNNING"
    params: set[str] = field(default_factory=set)
    is_interrupted: bool = False
    keys: set[str] = field(default_factory=set)
    steps: dict[str, set[int]] = field(default_factory=dict)
    batch: Batch = field(default_factory=lambda: Batch())

    @classmethod
    def found(cls, run: Run) -> TrackedRun:
        """A run that is in the store."""
        data = run.data
        return cls(run.info.run_id, run.info.status, set(data.params), "interrupted" in data.tags, set(data.metrics))


@dataclass
class Batch:
    """Entities for one run, sent in as few calls as possible; points are (key, step) -> (value, time in ms)."""

    points: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


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
            on_run: Called with (trial number, run id, experiment id) whenever a trial starts.
            on_warning: Called with one line when MLflow refuses something for good.
            artifact_failures: How often each artifact has failed, kept by the caller over several objects.

        Raises:
            OSError: or MLflow's own exceptions; the store cannot be reached now.
        """
        self._spec, self._dir, self._on_run, self._on_warning = spec, study_dir, on_run, on_warning
        self._artifact_failures = artifact_failures
        self._client = open_client(target)
        self._environment = values.environment_tags(spec)
        self._parent: TrackedRun | None = None
        self._outer_run: dict[str, str] = {}
        self._trials: dict[int, TrackedRun] = {}
        self._find(target)

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
        run.batch.tags.update(self._environment | values.tags(event["tags"]))
        for name in ("study.yaml", "spec.json"):
            self._artifact(run, self._dir / name)
        for ended in event["ended"]:
            self._settle(ended)

    def _settle(self, event: Event) -> None:
        # A kill can fall between the record of a trial's end and its event.
        run = self._trials.get(event["number"])
        if run is None or run.status == "RUNNING" or run.is_interrupted:
            self._trial_run(event)
            self._reported(event)
            self._trial_ended(event)

    def _trial_started(self, event: Event) -> None:
        run = self._trial_run(event)
        self._reopen(run)
        run.batch.tags.update(values.tags(event["tags"]))
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
        run.batch.tags.update(values.tags({key: event[key] for key in ("reason", "checkpoint")}))
        run.batch.tags["tune.state"] = event["state"]
        if event["diverged"]:
            run.batch.tags["diverged"] = "true"
        if event["value"] is not None:
            self._add(run, event["step"], {"objective": event["value"]}, event["time"])
        self._close(run, STATUS[event["state"]], event["time"], is_interrupted=event["state"] == "INTERRUPTED")

    def _study_ended(self, event: Event) -> None:
        run = self._parent_run(event["time"])
        summary = event["summary"]
        metrics, tags, num_ended = values.flat_summary(summary, self._spec.objective.metric)
        best = self._trials.get((summary.get("best") or {}).get("number", -1))
        if best is not None:
            tags["best_run_id"] = best.run_id
        self._add(run, num_ended, metrics, event["time"])
        run.batch.tags.update(tags)
        for path in event["artifacts"]:
            self._artifact(run, Path(path))
        is_interrupted = summary.get("state") == "interrupted"
        self._close(run, values.parent_status(summary), event["time"], is_interrupted=is_interrupted)

    # -- finding and making runs --------------------------------------------------------------------------------

    def _find(self, target: Target) -> None:
        """Find the study's experiment and runs, wherever an earlier session made them."""
        known = _read_identity(self._dir / IDENTITY)
        stored = (known or {}).get("experiment_id")
        is_there = stored is not None and is_active_experiment(self._client, stored)
        self._experiment_id = stored if is_there and stored else experiment_id(self._client, target)
        self._study_id = self._identity(known)
        self._load()
        if self._parent is None and is_there:
            # Ids mean something else in another store.
            self._experiment_id = experiment_id(self._client, target)
            self._load()
        if self._parent is None and target.run_id is not None:
            self._adopt_parent(target.run_id)
        _write_identity(self._dir / IDENTITY, {"study_id": self._study_id, "experiment_id": self._experiment_id})

    def _identity(self, known: Mapping[str, str] | None) -> str:
        if known is None or "study_id" in known:
            return (known or {}).get("study_id") or uuid.uuid4().hex
        # The file is there but damaged: the store still knows who wrote from this folder.
        where = {"tune.kind": "study", "tune.folder": _quoted(self._dir)}
        found = search_runs(self._client, self._experiment_id, where)
        return str(found[-1].data.tags["tune.study_id"]) if found else uuid.uuid4().hex

    def _load(self) -> None:
        for run in search_runs(self._client, self._experiment_id, {"tune.study_id": self._study_id}):
            number = int(run.data.tags.get("tune.trial", -1))
            taken = self._parent if number < 0 else self._trials.get(number)
            if taken is not None:
                # A call that timed out on this side was carried out after all.
                self._client.delete_run(run.info.run_id)
            elif number < 0:
                self._parent = TrackedRun.found(run)
            else:
                self._trials[number] = TrackedRun.found(run)

    def _adopt_parent(self, run_id: str) -> None:
        try:
            run = self._client.get_run(run_id)
        except Exception as error:
            if not is_refusal(error):
                raise
            self._on_warning(f"MLflow has no run {run_id} (MLFLOW_RUN_ID); the study gets a run of its own")
            return
        self._experiment_id = run.info.experiment_id
        if run.data.tags.get("tune.study_id", self._study_id) != self._study_id:
            # Two studies inside one outer run: only the first can be that run itself.
            self._outer_run = {"mlflow.parentRunId": run_id}
            return
        self._parent = TrackedRun.found(run)
        self._parent.batch.tags.update(self._study_tags("study"))
        self._flush(self._parent)

    def _study_tags(self, kind: str) -> dict[str, str]:
        tags = {"tune.study_id": self._study_id, "tune.study": self._spec.study, "tune.kind": kind}
        return tags | ({"tune.folder": _quoted(self._dir)} if kind == "study" else {})

    def _parent_run(self, time_ms: int) -> TrackedRun:
        if self._parent is None:
            self._parent = self._create(self._spec.study, self._study_tags("study") | self._outer_run, time_ms)
        return self._parent

    def _trial_run(self, event: Event) -> TrackedRun:
        """The trial's run, made if needed; its parameters and whole configuration are written once."""
        number, time_ms = event["number"], event["time"]
        run = self._trials.get(number)
        if run is None:
            parent = {"mlflow.parentRunId": self._parent_run(time_ms).run_id, "tune.trial": str(number)}
            run = self._create(f"{self._spec.study}-{number}", self._study_tags("trial") | parent, time_ms)
            self._trials[number] = run
        missing = {key: text for key, text in values.params(event["params"]).items() if key not in run.params}
        run.batch.params.update(missing)
        if missing or not run.params:
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


def _quoted(path: Path) -> str:
    # Quotes would end the search filter's string.
    return str(path).replace("'", "_").replace('"', "_")


def _read_identity(path: Path) -> dict[str, str] | None:
    """What an earlier session wrote; None when there was none, empty when it cannot be read."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _write_identity(path: Path, content: Mapping[str, str]) -> None:
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)
