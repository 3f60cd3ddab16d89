"""The search as Tune's TrialScheduler: every report is answered with go on or stop."""

from __future__ import annotations

from typing import Any

from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from tuner.decisions.controller import StudyController


class StudyScheduler(FIFOScheduler):
    """Asks the study's stopping rule; trials are started in the order the searcher proposes them."""

    def __init__(self, controller: StudyController) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._controller = controller
        self._over: list[Trial] = []

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> str:
        """CONTINUE or STOP."""
        goes_on = self._controller.hear(trial.trial_id, result.pop("heard"))
        if goes_on:
            return TrialScheduler.CONTINUE
        # Tune would keep an idle slot, whose worker holds the trial's memory until it hears of the next one.
        _unwrapped(tune_controller)._reuse_actors = self._controller.has_next
        return TrialScheduler.STOP

    def on_trial_complete(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> None:
        """Note a trial to be forgotten."""
        self._over.append(trial)

    def on_trial_error(self, tune_controller: TuneController, trial: Trial) -> None:
        """Note a trial to be forgotten."""
        self._over.append(trial)

    def choose_trial_to_run(self, tune_controller: TuneController) -> Trial | None:
        """The first that waits; Tune's own looks through all that have ever run, ten times a second."""
        tune = _unwrapped(tune_controller)
        while self._over:
            _forget(tune, self._over.pop())
        waiting = [trial for trial in tune.get_live_trials() if trial.status == Trial.PENDING]
        return min(waiting, key=lambda trial: trial.config["assignment"].number, default=None)

    def debug_string(self) -> str:
        """One line for Tune's own display, which is off."""
        return "StudyScheduler"


def _unwrapped(tune_controller: Any) -> Any:
    """Tune's own controller: what a scheduler is given is a wrapper, which keeps to itself what is set on it."""
    return tune_controller._tune_controller


def _forget(tune: Any, trial: Trial) -> None:
    """Take a trial that is over out of Tune's books: it would stay there with 20 KB, and the study is the record."""
    # Tune starts a trial again by itself where its slot was preempted, and tells some ends twice.
    if trial.status not in (Trial.ERROR, Trial.TERMINATED) or trial not in tune._trials:
        return
    tune._trials.remove(trial)
    tune._live_trials.discard(trial)
    tune._stopped_trials.discard(trial)
    tune._failed_trials.discard(trial)
    tune._trials_to_cache.discard(trial)
    tune._trial_metadata.pop(trial.trial_id, None)
