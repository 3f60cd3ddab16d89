"""The search as Tune's Searcher: Tune asks it for the next trial to run and tells it when one is over."""

from __future__ import annotations

from typing import Any

from ray.tune.search import Searcher

from tuner.decisions.controller import StudyController
from tuner.execution.worker_group import SlotSettings


class StudySearcher(Searcher):
    """Hands out trials of the study. Nothing is saved or restored here: the study is the record."""

    def __init__(self, controller: StudyController, settings: SlotSettings) -> None:
        super().__init__()
        self._controller = controller
        self._settings = settings

    def suggest(self, trial_id: str) -> Any:
        """The next trial's config (a dict), None to be asked again, or FINISHED."""
        assignment = self._controller.next_assignment(trial_id)
        if assignment is not None:
            return {"slot": self._settings, "assignment": assignment}
        return Searcher.FINISHED if self._controller.is_exhausted else None

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Reports reach the search through the scheduler, which must answer them."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Learn of a trial that is over; one that ended in its slot's death goes back to the queue."""
        if error:
            self._controller.lost(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Tune's snapshots are never read."""

    def restore(self, checkpoint_path: str) -> None:
        """Tune's snapshots are never read."""
