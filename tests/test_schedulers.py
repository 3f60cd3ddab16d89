"""Tune's books, kept by Tune's own controller, without a cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.train._internal.storage import StorageContext
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial

from tuner.execution.schedulers import StudyScheduler

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "4")  # otherwise it asks the cluster
    storage = StorageContext(storage_path=str(tmp_path), experiment_dir_name="tune")
    monkeypatch.setattr(Trial, "local_path", None)  # a file of its errors would go to a cluster's folder
    controller: Any = SimpleNamespace(has_next=True)
    return TuneController(scheduler=StudyScheduler(controller), storage=storage, callbacks=[])


def running_trial(tune: Any, number: int) -> Trial:
    assignment = SimpleNamespace(number=number)
    trial = Trial("slot", config={"assignment": assignment}, stub=True, max_failures=0, storage=tune._storage)
    tune.add_trial(trial)
    tune._set_trial_status(trial, Trial.RUNNING)
    return trial


def next_trial(tune: Any) -> Trial | None:
    found: Trial | None = tune._scheduler_alg.choose_trial_to_run(tune._wrapped())
    return found


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_trial_that_is_over_is_in_none_of_tunes_books(tune: Any, is_lost: bool) -> None:
    trial, other = running_trial(tune, 0), running_trial(tune, 1)
    if is_lost:
        tune._process_trial_failure(trial, RayActorError())
    else:
        tune.stop_trial(trial)
    assert next_trial(tune) is None
    assert tune.get_trials() == [other]
    tune._pending_trials_list.clear()  # Tune goes through it by itself at every turn
    books = [name for name, value in vars(tune).items() if isinstance(value, (list, set, dict)) and trial in value]
    assert books == []
    assert trial.trial_id not in tune._trial_metadata


def test_a_trial_whose_end_is_told_twice_is_forgotten_once(tune: Any) -> None:
    trial = running_trial(tune, 0)
    tune._scheduler_alg.on_trial_complete(tune, trial, {})
    tune._process_trial_failure(trial, RayActorError())
    assert next_trial(tune) is None
    assert tune.get_trials() == []


def test_a_trial_that_tune_starts_again_stays_in_its_books(tune: Any) -> None:
    """What a cloud preempts is no failure to Tune, which has its trial wait for another actor."""
    trial = running_trial(tune, 0)
    tune._process_trial_failure(trial, RayActorError(preempted=True))
    assert next_trial(tune) is trial
    assert tune.get_trials() == [trial]
    tune._set_trial_status(trial, Trial.RUNNING)
    tune.stop_trial(trial)
    assert next_trial(tune) is None
    assert tune.get_trials() == []
