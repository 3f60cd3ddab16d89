"""Studies that are interrupted for real: signals, kills, and what is left behind. Each starts its own `tune`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.studies import study_data
from tuner.execution.sweeper import orphans
from tuner.record.study import Study

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

REPOSITORY = Path(__file__).parents[1]


class Tune:
    """`tune` as a process of its own, with everything it starts."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tuner", *arguments],
            process_group=0,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TUNE_TEST_STUDY": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.text = ""

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Until something is seen in the study."""
        deadline = time.monotonic() + timeout_s
        while not is_there():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "it was not seen in time"
            time.sleep(0.1)

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait for the end; returns the exit code."""
        self.text, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode

    def left_behind(self) -> list[str]:
        """Processes that this `tune` or anything it started still runs."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline"]):
            try:
                if process.environ().get("TUNE_TEST_STUDY") == str(self.folder) and process.status() != "zombie":
                    found.append(" ".join(process.info["cmdline"] or [])[:80])
            except psutil.Error:
                continue
        return found

    def wait_until_gone(self, timeout_s: float = 20.0) -> list[str]:
        """What is left behind after a moment of grace."""
        deadline = time.monotonic() + timeout_s
        while (left := self.left_behind()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    """Trials of many steps that are reported and saved at each step."""
    data = study_data(
        tmp_path,
        "long",
        train={"max_steps": 400},
        search={"num_trials": 4},
        scheduler={"type": "none"},
        mlflow={"enabled": True},
    )
    path = tmp_path / "long.yaml"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.fixture
def tune_process(tmp_path: Path) -> Iterator[Callable[..., Tune]]:
    started: list[Tune] = []

    def start(*arguments: str) -> Tune:
        started.append(Tune(tmp_path, *arguments))
        return started[-1]

    yield start
    for tune in started:
        if tune.process.poll() is None:
            tune.process.kill()
            tune.process.communicate()


def trials(folder: Path, name: str = "long") -> list[Any]:
    """The study's trials as read from outside; none while it is being made."""
    if not (folder / "studies" / name).exists():
        return []
    return Study.open(folder / "studies", name).trials()


def has_reported(folder: Path, num_trials: int, step: int) -> Callable[[], bool]:
    """Whether that many trials have reported that step."""
    return lambda: sum(trial.step >= step for trial in trials(folder)) >= num_trials


def mlflow_statuses(folder: Path) -> dict[str, str]:
    """Status of each run by its trial number; the parent's under `parent`."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'studies' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("long")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    numbers = {trial.mlflow_run_id: str(trial.number) for trial in trials(folder)}
    return {numbers.get(run.info.run_id, "parent"): run.info.status for run in runs}


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_one_signal_saves_every_trial_and_the_study_goes_on_later(
    tmp_path: Path, study_file: Path, tune_process: Callable[..., Tune], signum: signal.Signals
) -> None:
    tune = tune_process("run", str(study_file))
    tune.wait_for(has_reported(tmp_path, 2, 5))
    second = tune_process("resume", "long")
    assert second.end() == 2
    assert f"process {tune.process.pid}" in second.text, "it names who holds the study"
    started = time.monotonic()
    # A terminal and a batch system signal the whole group.
    os.killpg(tune.process.pid, signum)
    assert tune.end() == 130
    assert time.monotonic() - started < 30
    assert "tune resume long" in tune.text
    assert tune.wait_until_gone() == []
    left = trials(tmp_path)
    assert [trial.state for trial in left] == ["RUNNING", "RUNNING"]
    for trial in left:
        assert trial.checkpoint is not None
        assert int(trial.checkpoint.rpartition("_")[2]) == trial.step
    assert "RUNNING" not in mlflow_statuses(tmp_path).values()
    if signum == signal.SIGTERM:
        return
    resumed = tune_process("resume", "long", "--set", "search.num_trials=2")
    assert resumed.end(180) == 0, resumed.text
    for trial in trials(tmp_path):
        assert (trial.state, trial.step) == ("COMPLETE", 400)
        assert list(trial.reports) == list(range(1, 401))
    assert mlflow_statuses(tmp_path) == {"0": "FINISHED", "1": "FINISHED", "parent": "FINISHED"}


@pytest.mark.slow
def test_a_trial_that_reports_only_at_its_end_is_saved_at_its_next_step(
    tmp_path: Path, study_file: Path, tune_process: Callable[..., Tune]
) -> None:
    num_steps = 3000
    lengths = ["--set", f"train.max_steps={num_steps}", "--set", f"train.eval_every={num_steps}"]
    tune = tune_process("run", str(study_file), *lengths, "--set", "search.num_trials=1")
    tune.wait_for((tmp_path / "studies" / "long" / "logs" / "0.rank0.log").exists)
    os.killpg(tune.process.pid, signal.SIGINT)
    assert tune.end() == 130
    [left] = trials(tmp_path)
    assert (left.state, left.step, left.reports) == ("RUNNING", 0, {})
    saved = int((left.checkpoint or "").rpartition("_")[2])
    assert 0 < saved < num_steps
    resumed = tune_process("resume", "long")
    assert resumed.end(180) == 0, resumed.text
    assert f"goes on from step {saved}" in resumed.text
    [trial] = trials(tmp_path)
    assert (trial.state, list(trial.reports)) == ("COMPLETE", [num_steps])
    again = tune_process("reproduce", "long", "0", "--run")
    assert again.end(180) == 0, again.text
    assert "equals the record bit for bit at all 1 reports" in again.text


def test_stop_from_another_terminal_saves_every_trial_and_leaves_the_study_resumable(
    tmp_path: Path, study_file: Path, tune_process: Callable[..., Tune]
) -> None:
    tune = tune_process("run", str(study_file))
    tune.wait_for(has_reported(tmp_path, 2, 2))
    stop = tune_process("stop", "long")
    assert stop.end() == 0, stop.text
    assert "long stopped: 2 RUNNING" in stop.text
    assert tune.end(30) == 1, "no trial has completed"
    assert tune.wait_until_gone() == []
    assert all(trial.checkpoint for trial in trials(tmp_path))
    assert not (tmp_path / "studies" / "long" / "stop").exists()
    again = tune_process("stop", "long")
    assert again.end() == 2
    assert "not running" in again.text


def test_two_signals_end_everything_at_once(
    tmp_path: Path, study_file: Path, tune_process: Callable[..., Tune]
) -> None:
    tune = tune_process("run", str(study_file))
    tune.wait_for(has_reported(tmp_path, 1, 1))
    tune.process.send_signal(signal.SIGINT)
    tune.process.send_signal(signal.SIGINT)
    assert tune.end(20) == 130
    assert tune.wait_until_gone() == []


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("delay_s", [1.5, 2.5, 3.5, 5.0, 7.0])
def test_nothing_is_left_of_a_ray_that_was_cut_off_in_its_start(
    tmp_path: Path, study_file: Path, tune_process: Callable[..., Tune], signum: signal.Signals, delay_s: float
) -> None:
    tune = tune_process("run", str(study_file))
    with pytest.raises(subprocess.TimeoutExpired):
        tune.process.wait(delay_s)
    started = psutil.Process(tune.process.pid).children(recursive=True)
    tune.process.send_signal(signum)
    assert tune.end() in (130, -signum)
    assert "Traceback" not in tune.text
    gone, left = psutil.wait_procs(started, timeout=20)
    assert len(gone) == len(started), left
    assert tune.wait_until_gone() == []
    assert orphans(os.getsid(0)) == []


def test_a_killed_driver_leaves_no_process_and_resume_repeats_nothing(
    tmp_path: Path, study_file: Path, tune_process: Callable[..., Tune]
) -> None:
    tune = tune_process("run", str(study_file), "--set", "train.max_steps=40", "--set", "scheduler.max_t=40")
    tune.wait_for(lambda: any(trial.state == "COMPLETE" for trial in trials(tmp_path)))
    tune.process.kill()
    tune.end()
    assert tune.wait_until_gone() == []
    before = trials(tmp_path)
    resumed = tune_process("resume", "long")
    assert resumed.end(180) == 0, resumed.text
    after = trials(tmp_path)
    assert len(after) == 4
    for trial in after:
        assert (trial.state, trial.step) == ("COMPLETE", 40)
        assert list(trial.reports) == list(range(1, 41))
    for trial in before:
        assert after[trial.number].params == trial.params
        if trial.state == "COMPLETE":
            # Its checkpoint may have made room for those of better trials; MLflow may not have told its run yet.
            assert replace(after[trial.number], checkpoint=None, mlflow_run_id=trial.mlflow_run_id) == replace(
                trial, checkpoint=None
            )
    assert set(mlflow_statuses(tmp_path).values()) == {"FINISHED"}
    assert len(mlflow_statuses(tmp_path)) == 5


@pytest.mark.slow
def test_a_second_ray_on_the_host_is_left_alone(
    tmp_path: Path, study_file: Path, tune_process: Callable[..., Tune], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cluster runs, and RAY_ADDRESS does not name it: the study starts its own and finishes there."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # of a cluster that the tests before have left up
    source = "import ray, sys; ray.init(num_cpus=1, include_dashboard=False); print('up', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    while "up" not in other.stdout.readline():
        assert other.poll() is None
    try:
        settings = ["--set", "train.max_steps=3", "--set", "scheduler.max_t=3", "--set", "search.num_trials=3"]
        tune = tune_process("run", str(study_file), *settings)
        assert tune.end(120) == 0, tune.text
        assert [trial.state for trial in trials(tmp_path)] == ["COMPLETE"] * 3
        assert other.poll() is None
    finally:
        other.communicate("")
