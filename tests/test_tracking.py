"""MLflow tracking, against a real SQLite store, a real server and a server that accepts and never answers."""

from __future__ import annotations

import functools
import http.server
import json
import math
import multiprocessing
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.tracking._tracking_service.utils import _artifact_repos_cache

import tuner.tracking.sender
import tuner.tracking.tracker
from tests.small_disk import small_disk
from tuner.errors import TrackingError
from tuner.record.record import TrialRecord
from tuner.study_file.spec import StudySpec, load_spec
from tuner.tracking.database import make_database
from tuner.tracking.preload import has_plugins
from tuner.tracking.process import NICENESS, LocalStore, StoreProcess
from tuner.tracking.tracker import PENDING, MlflowTracker

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _settings(_empty_store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MLFLOW_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TUNE_CACHE_DIR", str(Session.cache))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(tuner.tracking.sender, "FLUSH_S", 0.02)
    monkeypatch.setattr(tuner.tracking.sender, "MAX_FLUSH_S", 0.02)
    monkeypatch.setattr(tuner.tracking.sender, "RETRY_S", 0.05)
    # The same store without a process of its own, whose start would take most of each test; some tests undo this.
    monkeypatch.setattr(tuner.tracking.tracker, "StoreProcess", LocalStore)


STUDY = """
study: lr
trainable: {trainable}
train: {{max_steps: 27, eval_every: 3, model: org/tiny, dataset: {{path: org/text, eval_split: test}}}}
search_space:
  learning_rate: {{type: float, low: 1e-6, high: 1e-3, log: true}}
search: {{num_trials: 4, seed: 7}}
scheduler: {{grace_period: 3, max_t: 27}}
"""


@functools.cache
def loaded(trainable: str) -> StudySpec:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(STUDY.format(trainable=trainable))
        file.flush()
        return load_spec(Path(file.name))


def make_spec(
    uri: str | None = None,
    experiment: str | None = None,
    enabled: bool = True,
    study: str = "lr",
    trainable: str = "a:b",
) -> StudySpec:
    spec = loaded(trainable)
    where = spec.mlflow.model_copy(update={"enabled": enabled, "tracking_uri": uri, "experiment": experiment})
    return spec.model_copy(update={"study": study, "mlflow": where})


@pytest.fixture(scope="session", autouse=True)
def _empty_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A store with tables and no runs, copied by most tests: making the tables takes a second."""
    Session.empty_store = tmp_path_factory.mktemp("empty") / "mlflow.db"
    Session.cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TUNE_CACHE_DIR", str(Session.cache))
        make_database(Session.empty_store)


class Session:
    """A tracker with what it called back."""

    empty_store: Path
    cache: Path

    def __init__(self, root: Path, spec: StudySpec | None = None, *, is_store_new: bool = False) -> None:
        self.spec = spec or make_spec()
        self.dir = root / self.spec.study
        self.dir.mkdir(parents=True, exist_ok=True)
        if not is_store_new and not (root / "mlflow.db").exists():
            shutil.copy(self.empty_store, root / "mlflow.db")
        (self.dir / "study.yaml").write_text("study: lr\n")
        (self.dir / "spec.json").write_text("{}")
        self.warnings: list[str] = []
        self.run_ids: dict[int, str] = {}
        self.tracker = MlflowTracker(
            self.spec, self.dir, on_run_id=self.run_ids.__setitem__, on_warning=self.warnings.append
        )

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.tracker.target.uri)

    def runs(self) -> list[Run]:
        client = self.client
        experiments = [found.experiment_id for found in client.search_experiments()]
        return list(client.search_runs(experiments, order_by=["attributes.start_time"]))

    def parent(self) -> Run:
        (run,) = [run for run in self.runs() if run.data.tags["tune.kind"] == "study"]
        return run

    def trial(self, number: int) -> Run:
        (run,) = [run for run in self.runs() if run.data.tags.get("tune.trial") == str(number)]
        return run

    def steps(self, number: int, key: str) -> list[int]:
        return sorted(point.step for point in self.client.get_metric_history(self.trial(number).info.run_id, key))


def report(session: Session, number: int, first: int, last: int) -> None:
    history = [{"step": step, "train_loss": 3.0 / step, "grad_norm": 1.0} for step in range(first, last + 1)]
    session.tracker.log_report(number, {"step": last, "eval_loss": 2.0 / last, "train_loss": 9.0, "tokens": 5}, history)


def run_trial(session: Session, number: int, steps: int = 6) -> None:
    session.tracker.start_trial(number, {"learning_rate": 1e-4 * (number + 1)}, {"world_size": 2})
    for last in range(3, steps + 1, 3):
        report(session, number, last - 2, last)
    session.tracker.end_trial(number, "COMPLETE", value=2.0 / steps, checkpoint="/c/step_6")


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


# -- one parent, one child a trial -----------------------------------------------------------------------------------


def test_a_study_is_one_parent_run_with_one_child_run_a_trial(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.tracker.check()
    session.tracker.start_study({"world_size": 2})
    for number in range(3):
        run_trial(session, number)
    best = {"number": 2, "value": 0.3, "params": {"learning_rate": 3e-4}, "checkpoint": "/c/2"}
    counts = {"RUNNING": 0, "COMPLETE": 3, "PRUNED": 0, "FAILED": 0}
    page = session.dir / "report.html"
    page.write_text("<html>")
    session.tracker.end_study(
        {"study": "lr", "state": "finished", "counts": counts, "best": best, "default_value": 0.5}, [page]
    )
    assert session.tracker.close(20)
    parent = session.parent()
    assert len(session.runs()) == 4
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["best_eval_loss"] == 0.3
    assert parent.data.metrics["default_value"] == 0.5
    assert parent.data.metrics["trials_complete"] == 3
    assert parent.data.tags["best.learning_rate"] == "0.0003"
    assert parent.data.tags["best_run_id"] == session.run_ids[2]
    names = {file.path for file in session.client.list_artifacts(parent.info.run_id)}
    assert names == {"study.yaml", "spec.json", "report.html"}
    assert (tmp_path / "mlartifacts").is_dir()
    assert session.client.get_experiment(parent.info.experiment_id).name == "lr"
    assert not (session.dir / PENDING).exists()
    assert session.warnings == []


def test_a_trials_run_has_its_parameters_points_tags_and_whole_configuration(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.tracker.start_study({})
    run_trial(session, 0)
    assert session.tracker.close(20)
    run = session.trial(0)
    assert run.data.params == {"learning_rate": "0.0001"}
    assert run.data.tags["mlflow.parentRunId"] == session.parent().info.run_id
    assert run.data.tags["world_size"] == "2"
    assert run.data.tags["checkpoint"] == "/c/step_6"
    assert run.data.tags["seed"] == "7"
    assert run.data.tags["version.optuna"]
    assert session.steps(0, "train_loss") == [1, 2, 3, 4, 5, 6]
    assert session.steps(0, "eval_loss") == [3, 6]
    assert run.data.metrics["train_loss"] == 0.5
    assert run.data.metrics["objective"] == pytest.approx(1 / 3)
    text = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/config.json")
    assert json.loads(text) == session.spec.train | {"learning_rate": 1e-4}


def test_the_configuration_of_a_built_in_trainable_has_every_default_written_out(tmp_path: Path) -> None:
    session = Session(tmp_path, make_spec(trainable="ddp"))
    session.tracker.start_study({})
    run_trial(session, 0)
    assert session.tracker.close(20)
    config = json.loads(mlflow.artifacts.load_text(f"{session.trial(0).info.artifact_uri}/config.json"))
    assert {"learning_rate": 1e-4, "max_steps": 27}.items() <= config.items()
    assert {"weight_decay", "batch_size", "seed"} <= config.keys()
    assert session.warnings == []


@pytest.mark.parametrize(
    ("state", "status"), [("COMPLETE", "FINISHED"), ("PRUNED", "KILLED"), ("FAILED", "FAILED"), ("RUNNING", "KILLED")]
)
def test_states_map_to_mlflows(tmp_path: Path, state: str, status: str) -> None:
    session = Session(tmp_path)
    session.tracker.start_study({})
    session.tracker.start_trial(0, {}, {})
    session.tracker.end_trial(0, state, "because")
    assert session.tracker.close(20)
    assert session.trial(0).info.status == status
    assert session.trial(0).data.tags.get("reason") == (None if state == "RUNNING" else "because")


# -- resuming --------------------------------------------------------------------------------------------------------


def test_an_interrupted_study_leaves_no_run_open_and_goes_on_in_the_same_runs(tmp_path: Path) -> None:
    first = Session(tmp_path)
    first.tracker.start_study({"resumes": 0})
    first.tracker.start_trial(0, {"learning_rate": 1e-4}, {})
    report(first, 0, 1, 6)
    assert first.tracker.close(20)
    assert first.trial(0).info.status == first.parent().info.status == "KILLED"
    assert first.trial(0).data.tags["interrupted"] == "true"

    again = Session(tmp_path)
    again.tracker.start_study({"resumes": 1})
    again.tracker.start_trial(0, {"learning_rate": 1e-4, "added": 1}, {"host": "other"})
    report(again, 0, 4, 9)
    wait_for(lambda: 0 in again.run_ids)
    assert again.trial(0).info.status == again.parent().info.status == "RUNNING"
    assert "interrupted" not in again.trial(0).data.tags
    again.tracker.end_trial(0, "COMPLETE", value=0.2)
    run_trial(again, 1)
    again.tracker.end_study({"state": "finished"})
    assert again.tracker.close(20)
    assert len(again.runs()) == 3
    assert again.run_ids[0] == first.run_ids[0]
    assert again.trial(0).data.params["learning_rate"] == "0.0001"
    assert again.trial(0).data.tags["host"] == "other"
    assert again.parent().data.tags["resumes"] == "1"
    assert again.parent().info.status == "FINISHED"
    for key in ("train_loss", "grad_norm"):
        assert again.steps(0, key) == list(range(1, 10))


def test_a_trial_that_goes_back_to_its_checkpoint_doubles_no_step(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.tracker.start_study({})
    session.tracker.start_trial(0, {}, {})
    report(session, 0, 1, 6)
    session.tracker.start_trial(0, {}, {"attempt": 2})
    report(session, 0, 4, 9)
    assert session.tracker.close(20)
    assert session.steps(0, "train_loss") == list(range(1, 10))
    assert session.steps(0, "eval_loss") == [6, 9]


def _driver_that_is_killed(root: Path) -> None:
    session = Session(root)
    session.tracker.start_study({})
    session.tracker.start_trial(0, {"learning_rate": 1.0}, {})
    report(session, 0, 1, 3)
    wait_for(lambda: 0 in session.run_ids)
    report(session, 0, 4, 6)
    os.kill(os.getpid(), signal.SIGKILL)


def test_points_queued_when_the_driver_is_killed_are_sent_by_the_next_session(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_driver_that_is_killed, args=(tmp_path,))
    process.start()
    process.join(40)
    assert process.exitcode == -signal.SIGKILL
    session = Session(tmp_path)
    session.tracker.start_study({})
    session.tracker.start_trial(0, {"learning_rate": 1.0}, {})
    report(session, 0, 7, 9)
    session.tracker.end_trial(0, "PRUNED")
    assert session.tracker.close(20)
    assert len(session.runs()) == 2
    assert session.steps(0, "train_loss") == list(range(1, 10))
    assert session.trial(0).info.status == "KILLED"


def test_an_ended_trial_that_the_store_knows_as_running_or_not_at_all_is_settled_at_resume(tmp_path: Path) -> None:
    first = Session(tmp_path)
    first.tracker.start_study({})
    first.tracker.start_trial(0, {"learning_rate": 1.0}, {})
    first.tracker.start_trial(5, {}, {})
    assert first.tracker.close(20)
    for number in (0, 5):
        first.client.update_run(first.run_ids[number], status="RUNNING")

    def record(number: int, state: str) -> TrialRecord:
        ended = "2026-01-02T03:04:05+00:00"
        return TrialRecord(
            number, state, 0.4, 6, {"learning_rate": 1.0}, None, None, None, ended, ended, {3: 0.5, 6: 0.4}
        )

    again = Session(tmp_path)
    again.tracker.start_study({}, [record(0, "COMPLETE"), record(1, "PRUNED"), record(2, "RUNNING")])
    assert again.tracker.close(20)
    assert [again.trial(number).info.status for number in (0, 1)] == ["FINISHED", "KILLED"]
    assert again.steps(1, "eval_loss") == [3, 6]
    assert again.trial(5).info.status == "KILLED"
    assert len(again.runs()) == 4


def test_a_damaged_identity_or_pending_file_finds_the_same_runs(tmp_path: Path) -> None:
    first = Session(tmp_path)
    first.tracker.start_study({})
    run_trial(first, 0)
    assert first.tracker.close(20)
    (first.dir / "mlflow.json").write_text("")
    (first.dir / PENDING).write_text('{"op": "report", "numb')
    again = Session(tmp_path)
    again.tracker.start_study({})
    run_trial(again, 1)
    assert again.tracker.close(20)
    assert len(again.runs()) == 3
    assert any("unreadable" in text for text in again.warnings)


def test_the_password_of_a_database_stays_out_of_the_artifacts(tmp_path: Path) -> None:
    url = "postgresql://user:secret@host/name"
    spec = make_spec()
    session = Session(tmp_path, spec.model_copy(update={"search": spec.search.model_copy(update={"storage": url})}))
    (session.dir / "study.yaml").write_text(f"search: {{storage: {url}}}\n")
    session.tracker.start_study({})
    assert session.tracker.close(20)
    kept = Path(session.client.download_artifacts(session.parent().info.run_id, "study.yaml", str(tmp_path)))
    assert kept.read_text() == "search: {storage: postgresql://user:***@host/name}\n"


def test_a_new_study_under_an_old_name_gets_runs_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        session = Session(tmp_path)
        session.tracker.start_study({})
        run_trial(session, 0)
        assert session.tracker.close(20)
        (session.dir / "mlflow.json").unlink()
    assert len(session.runs()) == 4


def test_a_run_made_twice_by_a_call_that_timed_out_is_removed(tmp_path: Path) -> None:
    first = Session(tmp_path)
    first.tracker.start_study({})
    run_trial(first, 0)
    assert first.tracker.close(20)
    original = first.trial(0)
    kept = {key: original.data.tags[key] for key in ("tune.study_id", "tune.trial", "tune.kind", "mlflow.parentRunId")}
    first.client.create_run(original.info.experiment_id, tags=kept)
    again = Session(tmp_path)
    again.tracker.start_study({})
    assert again.tracker.close(20)
    assert again.trial(0).info.run_id == original.info.run_id


def test_a_moved_root_writes_only_in_its_new_place(tmp_path: Path) -> None:
    old = Session(tmp_path / "old")
    old.tracker.start_study({})
    run_trial(old, 0)
    assert old.tracker.close(20)
    (tmp_path / "old").rename(tmp_path / "new")
    # MLflow keeps artifact folders in memory; a resume is a new process.
    _artifact_repos_cache.clear()
    new = Session(tmp_path / "new")
    new.tracker.start_study({})
    run_trial(new, 1)
    assert new.tracker.close(20)
    assert not (tmp_path / "old").exists()
    assert len(new.runs()) == 3
    for run in new.runs():
        assert run.info.artifact_uri.startswith(str(tmp_path / "new"))
        assert new.client.list_artifacts(run.info.run_id)


# -- values ----------------------------------------------------------------------------------------------------------


def test_values_that_are_not_finite_become_a_tag(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.tracker.start_study({})
    session.tracker.start_trial(0, {}, {})
    session.tracker.log_report(
        0, {"step": 3, "eval_loss": math.nan, "tokens": 4}, [{"step": 3, "train_loss": math.inf}]
    )
    session.tracker.end_trial(0, "FAILED", "diverged at step 3", math.nan)
    assert session.tracker.close(20)
    assert session.trial(0).data.metrics == {"tokens": 4}
    assert session.trial(0).data.tags["diverged"] == "true"


def test_long_and_odd_parameters_are_whole_in_the_configuration(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.tracker.start_study({})
    template = "x" * 7000
    session.tracker.start_trial(0, {"template": template, "targets": ["q", "v"], "odd@key": None}, {})
    session.tracker.log_report(0, {"step": 1, "eval@loss": 1, "text": "no number", "none": None}, ())
    assert session.tracker.close(20)
    run = session.trial(0)
    assert run.data.params["template"] == "(7000 characters: see config.json)"
    assert run.data.params["targets"] == '["q", "v"]'
    assert run.data.params["odd_key"] == "None"
    assert run.data.metrics == {"eval_loss": 1.0}
    assert json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/config.json"))["template"] == template


def test_more_points_than_one_call_takes_arrive_whole(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.tracker.start_study({})
    session.tracker.start_trial(0, {f"p{n}": n for n in range(150)}, {})
    report(session, 0, 1, 1500)
    assert session.tracker.close(20)
    assert session.steps(0, "train_loss") == list(range(1, 1501))
    assert len(session.trial(0).data.params) == 150


def test_a_run_deleted_by_a_user_holds_up_nothing_else(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.tracker.start_study({})
    session.tracker.start_trial(0, {}, {})
    assert session.tracker.child_environment(0)
    session.client.delete_run(session.run_ids[0])
    report(session, 0, 1, 3)
    run_trial(session, 1)
    assert session.tracker.close(20)
    assert session.trial(1).info.status == "FINISHED"
    assert any("refused" in text for text in session.warnings)


# -- where runs go ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_file", "in_environment", "name"),
    [
        (None, {}, "lr"),
        (None, {"MLFLOW_EXPERIMENT_NAME": "env"}, "env"),
        ("file", {"MLFLOW_EXPERIMENT_NAME": "env", "MLFLOW_EXPERIMENT_ID": "0"}, "file"),
        (None, {"MLFLOW_EXPERIMENT_ID": "0"}, None),
    ],
)
def test_the_study_file_names_the_experiment_before_the_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_file: str | None,
    in_environment: dict[str, str],
    name: str | None,
) -> None:
    for key, value in in_environment.items():
        monkeypatch.setenv(key, value)
    target = Session(tmp_path, make_spec(experiment=in_file)).tracker.target
    assert target.experiment == name
    assert target.experiment_id == (None if name else "0")


def test_the_study_file_names_the_store_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Session(tmp_path).tracker.target.uri == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://env:1")
    assert Session(tmp_path).tracker.target.uri == "http://env:1"
    assert Session(tmp_path, make_spec("http://file:1")).tracker.target.uri == "http://file:1"
    monkeypatch.chdir(tmp_path)
    relative = Session(tmp_path, make_spec("sqlite:///a.db")).tracker.target
    assert relative.uri == f"sqlite:///{tmp_path}/a.db"


def test_mlflow_run_id_is_the_parent_and_its_experiment_holds_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.create_experiment("outer", artifact_location=str(tmp_path / "outer"))
    outer = client.create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", outer)
    session = Session(tmp_path)
    session.tracker.check()
    session.tracker.start_study({})
    run_trial(session, 0)
    assert session.tracker.close(20)
    monkeypatch.delenv("MLFLOW_RUN_ID")
    again = Session(tmp_path)
    again.tracker.start_study({})
    run_trial(again, 1)
    assert again.tracker.close(20)
    assert again.parent().info.run_id == outer
    assert {run.info.experiment_id for run in again.runs()} == {experiment}
    assert len(again.runs()) == 3


def test_a_root_with_spaces_and_signs_works(tmp_path: Path) -> None:
    session = Session(tmp_path / "my 100% root?#1", is_store_new=True)
    session.tracker.check()
    session.tracker.start_study({})
    run_trial(session, 0)
    assert session.tracker.close(20)
    session.tracker.check()
    assert len(session.runs()) == 2
    assert (session.dir.parent / "mlflow.db").exists()


def test_a_trainable_that_logs_itself_lands_in_its_trials_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(tmp_path)
    session.tracker.start_study({})
    session.tracker.start_trial(0, {}, {})
    environment = session.tracker.child_environment(0)
    assert environment["MLFLOW_RUN_ID"] == session.run_ids[0]
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with mlflow.start_run():
        mlflow.log_metric("own", 1.0, step=1)
    session.tracker.end_trial(0, "COMPLETE")
    assert session.tracker.close(20)
    assert session.trial(0).data.metrics["own"] == 1.0
    assert len(session.runs()) == 2


def test_a_study_without_mlflow_touches_nothing(tmp_path: Path) -> None:
    session = Session(tmp_path, make_spec("./mlruns", enabled=False), is_store_new=True)
    session.tracker.check()
    session.tracker.start_study({})
    run_trial(session, 0)
    session.tracker.end_study({})
    assert session.tracker.child_environment(0) == {}
    assert session.tracker.close(20)
    assert {path.name for path in session.dir.iterdir()} == {"study.yaml", "spec.json"}
    assert not (tmp_path / "mlflow.db").exists()


# -- what is refused before anything starts --------------------------------------------------------------------------


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "mlruns", "/tmp/mlruns"])
def test_a_file_store_is_refused_and_the_migration_named(tmp_path: Path, uri: str) -> None:
    with pytest.raises(
        TrackingError, match=r"mlflow migrate-filestore --source /.*mlruns --target sqlite:////.*mlflow.db"
    ):
        Session(tmp_path, make_spec(uri)).tracker.check()


def test_a_file_store_that_mlflow_was_told_to_allow_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    session = Session(tmp_path, make_spec(f"file://{tmp_path}/mlruns"))
    session.tracker.check()
    session.tracker.start_study({})
    run_trial(session, 0)
    assert session.tracker.close(20)
    assert session.steps(0, "train_loss") == list(range(1, 7))
    assert session.warnings == []


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("sqlite:///:memory:", "keeps nothing"),
        ("ftp://host/x", "unknown kind of store"),
        ("postgresql+nodriver://u:secret@h/db", r"\*\*\*@h/db needs the Python package nodriver"),
        ("sqlite:////dev/null/none/mlflow.db", "cannot be written"),
        ("http://[", "is not a URL"),
    ],
)
def test_a_store_that_can_never_work_is_refused(tmp_path: Path, uri: str, message: str) -> None:
    with pytest.raises(TrackingError, match=message):
        Session(tmp_path, make_spec(uri)).tracker.check()


def test_a_damaged_an_old_and_a_deleted_store_are_refused_by_name(tmp_path: Path) -> None:
    session = Session(tmp_path)
    database = tmp_path / "mlflow.db"
    database.write_bytes(b"not a database" * 100)
    with pytest.raises(TrackingError, match="not a readable SQLite database"):
        session.tracker.check()
    database.unlink()
    session.client.delete_experiment(session.client.create_experiment("lr"))
    with pytest.raises(TrackingError, match=r"has been deleted(.|\n)*mlflow experiments restore --experiment-id 1"):
        session.tracker.check()
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'abc'")
    with pytest.raises(TrackingError, match="mlflow db upgrade sqlite:///"):
        session.tracker.check()


def test_an_experiment_id_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "99")
    session = Session(tmp_path)
    assert session.client.search_experiments()
    with pytest.raises(TrackingError, match="MLFLOW_EXPERIMENT_ID"):
        session.tracker.check()


def test_checking_and_building_a_tracker_import_no_mlflow(tmp_path: Path) -> None:
    assert Session(tmp_path).client.search_experiments()
    code = (
        "import sys; from types import SimpleNamespace as N; from pathlib import Path\n"
        "from tuner.tracking.tracker import MlflowTracker\n"
        "spec = N(study='lr', mlflow=N(enabled=True, tracking_uri=None, experiment=None))\n"
        f"MlflowTracker(spec, Path({str(tmp_path / 'lr')!r}), on_run_id=print).check()\n"
        "assert not {'mlflow', 'sqlalchemy', 'torch', 'ray', 'optuna'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


# -- several at once -------------------------------------------------------------------------------------------------


def _small_study(root: Path, name: str, experiment: str) -> None:
    session = Session(root, make_spec(experiment=experiment, study=name), is_store_new=True)
    session.tracker.start_study({})
    for number in range(3):
        run_trial(session, number)
    sys.exit(0 if session.tracker.close(40) and not session.warnings else 1)


def test_studies_that_start_at_once_share_a_new_store_and_a_new_experiment(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_small_study, args=(tmp_path, f"s{n}", "shared")) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(50)
    assert [process.exitcode for process in processes] == [0] * 4
    session = Session(tmp_path, is_store_new=True)
    names = [found.name for found in session.client.search_experiments(view_type=ViewType.ALL)]
    assert sorted(names) == ["Default", "shared"]
    assert len(session.runs()) == 16


def test_a_kill_while_the_store_is_made_leaves_none_that_is_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_CACHE_DIR", str(tmp_path / "cache"))
    command = (
        "from pathlib import Path; from tuner.tracking.database import make_database as make; make(Path('mlflow.db'))"
    )
    process = subprocess.Popen([sys.executable, "-c", command], cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_for(lambda: any(path.stat().st_size for path in tmp_path.rglob("*.db.new")))
    process.kill()
    process.wait()
    assert not (tmp_path / "mlflow.db").exists()
    session = Session(tmp_path, is_store_new=True)
    session.tracker.check()
    session.tracker.start_study({})
    run_trial(session, 0)
    assert session.tracker.close(20)
    assert session.warnings == []
    assert len(session.runs()) == 2
    assert not list(tmp_path.rglob("*.db.new"))


def test_the_tables_are_made_once_on_a_machine(tmp_path: Path) -> None:
    (template,) = (Session.cache / "mlflow").glob("*.db")
    made_at = template.stat().st_mtime_ns
    begin_ms = time.time() * 1000
    session = Session(tmp_path, is_store_new=True)
    make_database(tmp_path / "mlflow.db")
    assert template.stat().st_mtime_ns == made_at
    (default,) = session.client.search_experiments()
    assert default.artifact_location == f"{tmp_path}/mlartifacts/0"
    assert default.creation_time >= int(begin_ms)


@pytest.mark.parametrize("damage", [b"", b"not a database" * 100])
def test_a_damaged_copy_of_the_tables_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    (sound,) = (Session.cache / "mlflow").glob("*.db")
    template = tmp_path / "cache" / "mlflow" / sound.name
    template.parent.mkdir(parents=True)
    template.write_bytes(damage)
    monkeypatch.setenv("TUNE_CACHE_DIR", str(tmp_path / "cache"))
    make_database(tmp_path / "mlflow.db")
    assert template.stat().st_size == sound.stat().st_size
    Session(tmp_path, is_store_new=True).tracker.check()


def test_a_machine_without_room_for_the_copy_makes_the_tables_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("TUNE_CACHE_DIR", str(tmp_path / "cache"))
    session = Session(tmp_path, is_store_new=True)
    make_database(tmp_path / "mlflow.db")
    session.tracker.check()
    assert [found.artifact_location for found in session.client.search_experiments()] == [f"{tmp_path}/mlartifacts/0"]


# -- the process that writes -----------------------------------------------------------------------------------------


def test_the_process_that_writes_may_be_killed_and_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner.tracking.tracker, "StoreProcess", StoreProcess)
    session = Session(tmp_path, make_spec(trainable="ddp"))
    session.tracker.start_study({})
    session.tracker.start_trial(0, {"learning_rate": 1e-4}, {})
    # Waits for the run, and is what has the process hurry.
    assert session.tracker.child_environment(0)["MLFLOW_RUN_ID"]
    (writer,) = writers()
    writer.kill()
    run_trial(session, 0)
    run_trial(session, 1)
    assert session.tracker.close(30)
    assert [session.steps(number, "train_loss") for number in (0, 1)] == [list(range(1, 7))] * 2
    assert {session.trial(number).info.run_id for number in (0, 1)} == set(session.run_ids.values())
    assert writers() == []


def test_mlflow_is_imported_without_what_writing_runs_has_no_use_for() -> None:
    code = (
        "import sys; from tuner.tracking.preload import preload; preload(has_database=True)\n"
        "assert 'mlflow.store.tracking.sqlalchemy_store' in sys.modules\n"
        "assert not {'pandas', 'numpy'} & set(sys.modules); import numpy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=40)


def test_an_mlflow_that_needs_them_is_imported_with_them(tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text("import mlflow.part\nimport numpy\n")
    (tmp_path / "mlflow" / "part.py").touch()
    code = (
        "import sys; from tuner.tracking.preload import preload; preload(has_database=False)\n"
        "assert 'mlflow.part' not in sys.modules; import mlflow; assert mlflow.numpy\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20, env={**os.environ, "PYTHONPATH": paths})


def test_a_plugin_of_mlflow_may_need_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_plugins()
    (tmp_path / "plugin-1.dist-info").mkdir()
    (tmp_path / "plugin-1.dist-info" / "METADATA").write_text("Name: plugin\nVersion: 1\n")
    (tmp_path / "plugin-1.dist-info" / "entry_points.txt").write_text("[mlflow.request_header_provider]\nx = x:X\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert has_plugins()


def test_the_process_that_writes_gives_way_to_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner.tracking.tracker, "StoreProcess", StoreProcess)
    session = Session(tmp_path, make_spec(trainable="ddp"))
    session.tracker.start_study({})
    run_trial(session, 0)
    wait_for(lambda: len(writers()) == 1 and set(nicenesses(writers()[0])) == {NICENESS})
    assert session.tracker.close(60)


def nicenesses(process: psutil.Process) -> list[int]:
    """A process's own niceness and, where Linux keeps one, its session's; they are set one after the other."""
    session = Path(f"/proc/{process.pid}/autogroup")
    return [process.nice(), *([int(session.read_text().split()[-1])] if session.exists() else [])]


def writers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "tuner.tracking.process" in child.cmdline()]


# -- a server --------------------------------------------------------------------------------------------------------


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_silent_server_holds_up_nothing_and_the_points_are_kept(
    tmp_path: Path, silent_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.tracking.target.SERVER_TIMEOUT_S", 0.3)
    session = Session(tmp_path, make_spec(silent_server))
    session.tracker.check()
    begin = time.monotonic()
    session.tracker.start_study({})
    run_trial(session, 0)
    assert session.tracker.child_environment(0, timeout_s=0.1) == {}
    assert time.monotonic() - begin < 1
    assert not session.tracker.close(1.0)
    assert time.monotonic() - begin < 4
    assert sum("does not answer" in text for text in session.warnings) == 1
    assert any(PENDING in text and "tune resume lr" in text for text in session.warnings)
    kept = [json.loads(line) for line in (session.dir / PENDING).read_text().split("\n") if line]
    assert [event["op"] for event in kept] == ["study", "trial", "report", "report", "end", "study_end"]


def test_no_trial_waits_for_a_store_that_is_known_to_be_down(tmp_path: Path) -> None:
    session = Session(tmp_path, make_spec("http://127.0.0.1:9"))
    session.tracker.start_study({})
    session.tracker.start_trial(0, {}, {})
    assert session.tracker.child_environment(0, timeout_s=40) == {}
    begin = time.monotonic()
    assert session.tracker.child_environment(0, timeout_s=40) == {}
    assert time.monotonic() - begin < 1
    session.tracker.close(1)


def test_what_a_full_disk_has_no_room_for_is_told_apart_from_what_it_keeps(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        session = Session(disk.path, make_spec("http://127.0.0.1:9"))
        session.tracker.start_study({})
        run_trial(session, 0)
        disk.fill()
        run_trial(session, 1, steps=300)
        assert not session.tracker.close(1)
        lines = (session.dir / PENDING).read_text().split("\n")
        assert [path.name for path in session.dir.glob(f"{PENDING}*")] == [PENDING]
    kept = [line for line in lines if line.endswith("}")]
    num_lost = 5 + 102 + 1 - len(kept)
    assert 0 < num_lost <= 102
    assert sum(f"{num_lost} updates for MLflow are lost (" in text for text in session.warnings) == 1
    assert sum(f"{len(kept)} updates could not be sent" in text for text in session.warnings) == 1


def test_a_store_that_lags_behind_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner.tracking.sender, "SLOW_S", 0.0)
    session = Session(tmp_path)
    session.tracker.start_study({})
    session.tracker.start_trial(0, {}, {})
    for last in (3, 6, 9):
        report(session, 0, last - 2, last)
        assert session.tracker.child_environment(0)
    assert session.tracker.close(20)
    assert ["is slow" in text for text in session.warnings] == [True]


@pytest.mark.parametrize(
    ("status", "refusal"), [(401, "refuses these credentials"), (404, "is not an MLflow server"), (500, None)]
)
def test_a_server_that_refuses_is_an_error_and_one_in_trouble_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, refusal: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as listener:
        threading.Thread(target=listener.handle_request, daemon=True).start()
        session = Session(tmp_path, make_spec(f"http://127.0.0.1:{listener.server_port}"))
        if refusal:
            with pytest.raises(TrackingError, match=refusal):
                session.tracker.check()
        else:
            session.tracker.check()
            assert "HTTP 500" in session.warnings[0]


def test_what_a_dead_server_missed_arrives_at_the_next_opening_once(tmp_path: Path) -> None:
    down = Session(tmp_path, make_spec("http://127.0.0.1:9"))
    down.tracker.start_study({})
    run_trial(down, 0)
    begin = time.monotonic()
    assert not down.tracker.close(20)
    assert time.monotonic() - begin < 15
    up = Session(tmp_path)
    up.tracker.start_study({})
    run_trial(up, 1)
    assert up.tracker.close(20)
    assert len(up.runs()) == 3
    assert [up.steps(number, "train_loss") for number in (0, 1)] == [list(range(1, 7))] * 2
    assert up.trial(0).info.status == "FINISHED"
    assert not (up.dir / PENDING).exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", f"{tmp_path}/kept"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
    uri = f"http://127.0.0.1:{port}"
    wait_for(lambda: _answers(uri), 120)
    yield uri
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answers(uri: str) -> bool:
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=1):
            return True
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_server_keeps_runs_points_and_artifacts(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A server that has just started answers its first calls slowly.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    monkeypatch.setattr("tuner.tracking.target.SERVER_TIMEOUT_S", 30.0)
    session = Session(tmp_path, make_spec(server))
    session.tracker.check()
    session.tracker.start_study({})
    run_trial(session, 0)
    session.tracker.end_study({"state": "finished"})
    assert session.tracker.close(30)
    again = Session(tmp_path, make_spec(server))
    again.tracker.check()
    again.tracker.start_study({})
    run_trial(again, 1)
    assert again.tracker.close(30)
    assert len(again.runs()) == 3
    assert again.steps(0, "train_loss") == list(range(1, 7))
    assert {file.path for file in again.client.list_artifacts(again.trial(1).info.run_id)} == {"config.json"}
    assert again.warnings == session.warnings == []
    with pytest.raises(TrackingError, match="is not an MLflow server"):
        Session(tmp_path, make_spec(f"{server}/elsewhere")).tracker.check()
