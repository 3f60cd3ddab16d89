"""Finds the MLflow runs of a study by their tags, in whichever experiment an earlier session made them.

The study's id is in `<study>/mlflow.json`, so that a folder that was moved or renamed keeps its runs and a new study
under an old name gets its own.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.tracking.client import experiment_id, is_active_experiment, is_refusal, search_runs
from tuner.tracking.target import Target

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

IDENTITY = "mlflow.json"


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


class FoundRuns:
    """What the store has of a study.

    Attributes:
        experiment_id: The experiment that holds or shall hold the runs.
        study_id: The value of the tag `tune.study_id` on all of them.
        parent: The study's run, if there is one.
        trials: The trials' runs by number.
        outer_run: Tags that put a new parent run under MLFLOW_RUN_ID, where another study has taken that run.
    """

    def __init__(
        self, client: MlflowClient, target: Target, study_dir: Path, on_warning: Callable[[str], None]
    ) -> None:
        """Look the runs up.

        Args:
            client: The store.
            target: Which experiment to use when there are no runs yet; it is made if needed.
            study_dir: Where the study's id is kept.
            on_warning: Called when MLFLOW_RUN_ID names no run.
        """
        self._client, self._dir, self._on_warning = client, study_dir, on_warning
        self.parent: TrackedRun | None = None
        self.trials: dict[int, TrackedRun] = {}
        self.outer_run: dict[str, str] = {}
        self._find(target)

    def _find(self, target: Target) -> None:
        """Find the study's experiment and runs, wherever an earlier session made them."""
        known = _read_identity(self._dir / IDENTITY)
        stored = (known or {}).get("experiment_id")
        is_there = stored is not None and is_active_experiment(self._client, stored)
        self.experiment_id = stored if is_there and stored else experiment_id(self._client, target)
        self.study_id = self._identity(known)
        self._load()
        if self.parent is None and is_there:
            # Ids mean something else in another store.
            self.experiment_id = experiment_id(self._client, target)
            self._load()
        if self.parent is None and target.run_id is not None:
            self._adopt_parent(target.run_id)
        _write_identity(self._dir / IDENTITY, {"study_id": self.study_id, "experiment_id": self.experiment_id})

    def _identity(self, known: Mapping[str, str] | None) -> str:
        if known is None or "study_id" in known:
            return (known or {}).get("study_id") or uuid.uuid4().hex
        # The file is there but damaged: the store still knows who wrote from this folder.
        where = {"tune.kind": "study", "tune.folder": folder_tag(self._dir)}
        found = search_runs(self._client, self.experiment_id, where)
        return str(found[-1].data.tags["tune.study_id"]) if found else uuid.uuid4().hex

    def _load(self) -> None:
        for run in search_runs(self._client, self.experiment_id, {"tune.study_id": self.study_id}):
            number = int(run.data.tags.get("tune.trial", -1))
            taken = self.parent if number < 0 else self.trials.get(number)
            if taken is not None:
                # A call that timed out on this side was carried out after all.
                self._client.delete_run(run.info.run_id)
            elif number < 0:
                self.parent = TrackedRun.found(run)
            else:
                self.trials[number] = TrackedRun.found(run)

    def _adopt_parent(self, run_id: str) -> None:
        try:
            run = self._client.get_run(run_id)
        except Exception as error:
            if not is_refusal(error):
                raise
            self._on_warning(f"MLflow has no run {run_id} (MLFLOW_RUN_ID); the study gets a run of its own")
            return
        self.experiment_id = run.info.experiment_id
        if run.data.tags.get("tune.study_id", self.study_id) != self.study_id:
            # Two studies inside one outer run: only the first can be that run itself.
            self.outer_run = {"mlflow.parentRunId": run_id}
            return
        # Tagged at once: the next session must find it without MLFLOW_RUN_ID.
        self._client.set_tag(run_id, "tune.study_id", self.study_id)
        self.parent = TrackedRun.found(run)


def folder_tag(path: Path) -> str:
    """The study's folder as a tag that can be searched for."""
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


def note_identity(study_dir: Path, **more: str) -> None:
    """Add to what is known of a study's runs."""
    path = study_dir / IDENTITY
    _write_identity(path, (_read_identity(path) or {}) | more)


def _write_identity(path: Path, content: Mapping[str, str]) -> None:
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)
