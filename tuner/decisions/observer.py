"""Who watches a search: the engine tells an Observer what happens, printing and tracking listen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.errors import ClusterError
    from tuner.execution.channel import Reported
    from tuner.planning.plan import Plan
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study


class Observer:
    """Hears of every event of a search; each method does nothing unless overridden.

    Called on the driver's main thread between two decisions: a method must return at once and must not raise.
    """

    def study_started(self, study: Study, plan: Plan) -> None:
        """The study is open and its plan settled; no trial has started yet."""

    def trial_started(self, number: int, params: Mapping[str, Any], resumed_from_step: int) -> None:
        """A trial begins, or goes on from a checkpoint when `resumed_from_step` > 0."""

    def preparing(self, number: int, text: str) -> None:
        """What a trial does before its first step, with its rate and the time left; heard now and then."""

    def reported(self, number: int, metrics: Mapping[str, float]) -> None:
        """A running trial reported; `metrics` holds `step` and the objective's metric among others."""

    def timed(self, report: Reported) -> None:
        """What a report cost: its seconds in steps, evaluation and saving; heard right after `reported`."""

    def trial_ended(self, record: TrialRecord) -> None:
        """A trial is COMPLETE, PRUNED or FAILED, and the record says so."""

    def warning(self, text: str) -> None:
        """Something went wrong that the study survives; `text` is one line."""

    def resized(self, before: int, after: int) -> None:
        """Another number of trials runs at once from now on, since nodes have joined the cluster or left it."""

    def tick(self, training_share: float) -> None:
        """Called about once a second with the share of slot time spent in training steps, 0 to 1."""

    def cluster_lost(self, error: ClusterError) -> None:
        """The cluster is gone; called in another thread after `study_ended`, and the process ends right after."""

    def study_ended(self, study: Study) -> None:
        """No trial runs any more: finished, stopped or interrupted, as `study.status()` says."""
