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

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> str:
        """CONTINUE or STOP."""
        goes_on = self._controller.hear(trial.trial_id, result.pop("heard"))
        if goes_on:
            return TrialScheduler.CONTINUE
        # Tune would keep an idle slot, whose worker holds the trial's memory until it hears of the next one. What
        # a scheduler is given is a wrapper, which would keep the flag to itself.
        wrapper: Any = tune_controller
        wrapper._tune_controller._reuse_actors = self._controller.has_next
        return TrialScheduler.STOP

    def choose_trial_to_run(self, tune_controller: TuneController) -> Trial | None:
        """The first that waits; Tune's own looks through all that have ever run, ten times a second."""
        untyped: Any = tune_controller
        waiting = [trial for trial in untyped.get_live_trials() if trial.status == Trial.PENDING]
        return min(waiting, key=lambda trial: trial.config["assignment"].number, default=None)

    def debug_string(self) -> str:
        """One line for Tune's own display, which is off."""
        return "StudyScheduler"
