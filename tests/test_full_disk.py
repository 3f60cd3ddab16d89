"""Studies on a disk of a few megabytes that fills up while they run. Each starts its own `tune`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.small_disk import Disk, small_disk
from tests.studies import study_data
from tests.test_interruptions import Tune, trials

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_TRIALS, NUM_STEPS = 12, 40


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """The root of studies on a disk of its own, with MLflow's store: what a full disk leaves of its making is no store.

    It is made ahead since nothing says when the process of low priority that would make it gets to it.
    """
    with small_disk(tmp_path / "studies", "24m") as made:
        MlflowClient(tracking_uri=f"sqlite:///{made.path}/mlflow.db").search_experiments()
        yield made


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    data = study_data(
        tmp_path,
        "long",
        train={"max_steps": NUM_STEPS},
        search={"num_trials": NUM_TRIALS},
        scheduler={"type": "none"},
        scaling={"slots": 1},
        mlflow={"enabled": True},
    )
    path = tmp_path / "long.yaml"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_disk_that_is_full_ends_the_study_in_one_line_and_it_goes_on_once_there_is_room(
    tmp_path: Path, study_file: Path, disk: Disk
) -> None:
    tune = Tune(tmp_path, "run", str(study_file))
    tune.wait_for(trains(tmp_path))
    disk.fill()
    assert tune.end(120) == 1, tune.text
    assert tune.wait_until_gone() == []
    assert "Traceback" not in tune.text
    assert "No space left on device" in tune.text
    assert "tune resume long" in tune.text
    refused = Tune(tmp_path, "resume", "long")
    assert refused.end(120) == 1, refused.text
    assert "No space left on device" in refused.text
    assert "Traceback" not in refused.text
    disk.grow()
    finishes(tmp_path)


def test_a_study_that_cannot_be_written_is_refused_and_leaves_nothing(
    tmp_path: Path, study_file: Path, disk: Disk
) -> None:
    disk.fill()
    tune = Tune(tmp_path, "run", str(study_file), "--set", "mlflow.enabled=false")
    assert tune.end(120) == 2, tune.text
    assert "studies has 0.0 MB free" in tune.text
    assert "Make room, choose another --root" in tune.text
    assert "Traceback" not in tune.text
    assert {path.name for path in disk.path.iterdir()} == {"filler", "mlflow.db"}


def test_a_checkpoint_that_does_not_fit_costs_no_trial_its_record(tmp_path: Path, study_file: Path, disk: Disk) -> None:
    """There is room for the record, but not for a checkpoint."""
    tune = Tune(tmp_path, "run", str(study_file))
    tune.wait_for(trains(tmp_path))
    disk.fill(leave_bytes=400_000)
    assert tune.end(180) in (0, 1), tune.text
    assert tune.wait_until_gone() == []
    assert "Traceback" not in tune.text
    for trial in trials(tmp_path):
        assert trial.state != "FAILED" or "No space left on device" in trial.reason
    disk.grow()
    finishes(tmp_path, failed_before=sum(trial.state == "FAILED" for trial in trials(tmp_path)))


def trains(folder: Path) -> Callable[[], bool]:
    """Whether a trial trains after another one has ended."""

    def look() -> bool:
        found = trials(folder)
        return len(found) > 1 and found[-1].step >= 3

    return look


def finishes(folder: Path, failed_before: int = 0) -> None:
    """Resuming ends every trial that had not failed, with each step once."""
    tune = Tune(folder, "resume", "long")
    assert tune.end(180) == 0, tune.text
    ended = trials(folder)
    assert len(ended) == NUM_TRIALS
    assert sum(trial.state == "FAILED" for trial in ended) == failed_before
    for trial in ended:
        if trial.state != "FAILED":
            assert (trial.state, trial.step) == ("COMPLETE", NUM_STEPS)
            assert list(trial.reports) == list(range(1, NUM_STEPS + 1))
