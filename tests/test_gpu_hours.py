"""Studies on GPUs that Ray only believes in: the limit on their hours, and what a worker says that finds none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.studies import study_data
from tuner.record.session import LETTING_GO_S, gpu_hours
from tuner.record.study import Study

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

FUNCTIONS = Path(__file__).parent / "train_functions.py"
NUM_GPUS, NUM_STEPS = 2, 60
# What the study stops early by, so that it has let go of its GPUs within the limit; about 40 s of both in a sitting.
EARLY_S = NUM_GPUS * LETTING_GO_S
LIMIT_S, MORE_S = EARLY_S + 80.0, EARLY_S + 170.0


def tune(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fake_gpus", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def study_file(folder: Path, **sections: Any) -> str:
    path = folder / "gpus.yaml"
    path.write_text(json.dumps(study_data(folder, "gpus", scaling={"gpus_per_worker": "auto"}, **sections)))
    return str(path)


def hours(seconds: float) -> str:
    return f"search.max_gpu_hours={seconds / 3600:.5f}"


def test_max_gpu_hours_ends_a_study_that_trains_and_counts_over_its_sittings(tmp_path: Path) -> None:
    file = study_file(
        tmp_path,
        objective={"metric": "loss", "mode": "min"},
        trainable=f"{FUNCTIONS}:steady",
        train={"x": 0.5},
        search_space={"x": {"type": "float", "low": -1.0, "high": 1.0}},
        search={"num_trials": 500},
        scheduler={"type": "none", "max_t": NUM_STEPS},
    )
    began = time.monotonic()
    is_ended_by_the_limit(tmp_path, tune(tmp_path, "run", file, "--set", hours(LIMIT_S)), LIMIT_S)
    left = [trial for trial in Study.open(tmp_path / "studies", "gpus").trials() if trial.state == "RUNNING"]
    assert len(left) == NUM_GPUS
    refused = tune(tmp_path, "resume", "gpus")
    assert refused.returncode == 2
    assert "GPU-hours are used; what is left is too little to go on" in refused.stderr
    assert "tune resume gpus --set search.max_gpu_hours=" in refused.stderr
    is_ended_by_the_limit(tmp_path, tune(tmp_path, "resume", "gpus", "--set", hours(MORE_S)), MORE_S)
    study = Study.open(tmp_path / "studies", "gpus")
    assert gpu_hours(study.sessions()) * 3600 < NUM_GPUS * (time.monotonic() - began)
    for trial in left:
        again = study.trial(trial.number)
        assert (again.attempts, again.state != "FAILED", again.step > trial.step) == (2, True, True)
        assert list(again.reports) == list(range(1, again.step + 1))


def is_ended_by_the_limit(folder: Path, done: subprocess.CompletedProcess[str], limit_s: float) -> None:
    """As by `max_hours`: its trials have saved, it is stopped, and it has used what it may."""
    study = Study.open(folder / "studies", "gpus")
    has_completed = any(trial.state == "COMPLETE" for trial in study.trials())
    assert done.returncode == (0 if has_completed else 1), done.stderr
    assert study.status()["state"] == "stopped"
    assert "gpus stopped: " in done.stderr
    last = study.sessions()[-1]
    assert (last["reason"], last["gpus"]) == ("max_gpu_hours", NUM_GPUS)
    assert limit_s - EARLY_S <= gpu_hours(study.sessions()) * 3600 <= limit_s
    assert all(trial.checkpoint for trial in study.trials() if trial.state == "RUNNING" and trial.step)


def test_a_gpu_that_torch_does_not_see_is_said_and_ends_the_study(tmp_path: Path) -> None:
    done = tune(tmp_path, "--honest", "run", study_file(tmp_path, failures={"max_failures": 0}))
    assert done.returncode == 1, done.stderr
    assert (
        "3 trials in a row failed alike: error: RuntimeError: Ray has given this worker a GPU, but torch" in done.stderr
    )
    assert "Traceback (most recent call last)" not in done.stderr
