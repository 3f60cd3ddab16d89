"""The state of a running search: Tune asks it for trials and tells it what the slots heard.

Optuna decides, Ray executes, MLflow shows; `StudyController` stands between them. It records everything in the study
first and only then answers, so that whatever was decided is known after a kill. It knows no Ray, and its methods that
Tune calls never raise: an error ends the study in an orderly way and is raised by whoever runs it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainables.checkpoint_dir import step_of
from tuner.commands import command
from tuner.decisions.early_stopping import make_rule
from tuner.decisions.failures import Cause, Failure
from tuner.decisions.objective import objective_of, reaches_target
from tuner.decisions.observer import Observer
from tuner.decisions.sampling import Proposer
from tuner.errors import StudyAbortedError
from tuner.execution.channel import Assignment, Ended, Heard, Reported
from tuner.record.checkpoints import Checkpoints
from tuner.record.record import TrialRecord, best_report
from tuner.record.session import Session
from tuner.record.study import Study
from tuner.text import plural
from tuner.tracking.tracker import MlflowTracker

# The same failure this often in a row means that the study, not a trial, is at fault.
MAX_IDENTICAL_FAILURES = 3


@dataclass
class _Running:
    number: int
    reported_step: int
    workers: tuple[int, ...] = ()


class StudyController:
    """Decides what each slot does next.

    Args:
        study: Open for writing.
        num_slots: How many trials run at once, until `resize`.
        tracker: MLflow.
        observer: Hears of every event.
        stop_slots: Called once when the running trials are to save and let go.
        free_slot: Called with the number of a trial whose slot was lost, to give back what its workers held.
        num_gpus: GPUs that the slots hold together.

    Attributes:
        ended_by: Why no further trial is started: "interrupted", "stopped" (from another terminal), "max_hours",
            "max_gpu_hours", "target" or "failure"; None while it goes on.
        failure: The error that ended the study, to be raised by whoever runs it.
    """

    def __init__(
        self,
        study: Study,
        num_slots: int,
        tracker: MlflowTracker,
        observer: Observer,
        stop_slots: Callable[[], None],
        free_slot: Callable[[int], None],
        num_gpus: float = 0.0,
    ) -> None:
        self.study = study
        self.spec = study.spec
        self.failure: BaseException | None = None
        self.ended_by: str | None = None
        self.session = Session(study, num_slots, num_gpus)
        self._num_slots = num_slots
        self._tracker = tracker
        self._observer = observer
        self._stop_slots = stop_slots
        self._free_slot = free_slot
        self._sign = self.spec.objective.sign
        self._rule = make_rule(self.spec)
        self._proposer = Proposer(self.spec, study.sampler_attrs)
        self._checkpoints = Checkpoints(study)
        self._left: deque[int] = deque()
        self._running: dict[str, _Running] = {}
        self._default = study.default_trial
        self._num_trials = len(study.frozen_trials())
        self._is_space_exhausted = False
        self._losses: Counter[int] = Counter()
        self._judged: dict[int, int] = {}
        self._warned: set[str] = set()
        self._last_failures: deque[str] = deque(maxlen=MAX_IDENTICAL_FAILURES)
        self._settle()

    def _settle(self) -> None:
        """Rebuild the rule from the record, and queue what was left running to go on before anything new."""
        records = self.study.trials()
        for record in records:
            self._judged[record.number] = record.judged_step
            judged = {
                step: self._sign * value
                for step, value in record.reports.items()
                if step <= record.judged_step and math.isfinite(value)
            }
            self._rule.replay(record.number, judged)
            if record.state == "FAILED" and (record.reason or "").startswith("diverged"):
                self._rule.diverged(record.number)
        for record in records:
            if record.state == "RUNNING" and all(
                self._judge(record.number, step, value)
                for step, value in record.reports.items()
                if step > record.judged_step
            ):
                self._left.append(record.number)

    # -- asked by Tune ------------------------------------------------------------------------------------------

    def next_assignment(self, tune_id: str) -> Assignment | None:
        """The next trial for a free slot; None when no slot is free or nothing is left."""
        try:
            if self.ended_by is not None or len(self._running) >= self._num_slots:
                return None
            number = self._next_number()
            return None if number is None else self._start(tune_id, number)
        except Exception as error:
            self.abort(error)
            return None

    @property
    def is_exhausted(self) -> bool:
        """Whether no further trial will be started; while one runs it may yet have to be started again."""
        return not self._running

    @property
    def has_next(self) -> bool:
        """Whether a slot whose trial has ended will be given another one, as far as that is known."""
        if self.ended_by is not None or self._is_space_exhausted or len(self._running) >= self._num_slots:
            return False
        return bool(self._left) or self._num_trials < self.spec.search.num_trials

    def hear(self, tune_id: str, heard: Heard) -> bool:
        """Take in what a slot heard; returns whether its trial goes on."""
        try:
            running = self._running[tune_id]
            for logged in heard.logged:
                self.study.take_log(logged.number, logged.text)
            for text in heard.warnings:
                self._observer.warning(text)
            if heard.preparing:
                self._observer.preparing(running.number, heard.preparing)
            self._note_workers(running, heard.num_workers)
            self._checkpoints.note_saved(running.number, heard.saved)
            goes_on = all(self._take_report(running, report) for report in heard.reports)
            if goes_on and heard.ended is not None:
                goes_on = self._take_end(running, heard.ended)
        except Exception as error:
            self.abort(error)
            goes_on = False
        if not goes_on:
            self._running.pop(tune_id, None)
        return goes_on

    def lost(self, tune_id: str) -> None:
        """A slot died with its trial: the trial goes on in another one, as often as failures are allowed."""
        running = self._running.pop(tune_id, None)
        if running is None or self.ended_by is not None:
            return
        try:
            self._free_slot(running.number)
            # Losses of this session alone: a driver that was killed is no fault of the trial's.
            self._losses[running.number] += 1
            if self._losses[running.number] > self.spec.failures.max_failures:
                self._finish(running.number, "FAILED", Cause(Failure.LOST, "its slot's process died").reason)
            else:
                self._left.append(running.number)
        except Exception as error:
            self.abort(error)

    def resize(self, num_slots: int, num_gpus: float) -> None:
        """From now on the cluster holds so many trials at once; those that run go on, wherever there is room."""
        if (num_slots, num_gpus) == self.session.size:
            return
        try:
            before, self._num_slots = self._num_slots, num_slots
            self.session.resize(num_slots, num_gpus)
            if before != num_slots:
                self._observer.resized(before, num_slots)
        except Exception as error:
            self.abort(error)

    def tick(self) -> None:
        """To be called often: watches the clock and tells the observer how busy the slots are."""
        try:
            if self.session.is_due():
                self._observer.tick(self.session.training_share())
                self._warn_once(self._checkpoints.make_room(self._num_slots))
                if self.study.is_asked_to_stop:
                    self.stop("stopped")
                self.session.note_progress()
                if (limit := self.session.used_up()) is not None:
                    self.stop(limit)
        except Exception as error:
            self.abort(error)

    def _warn_once(self, text: str) -> None:
        kind = text.split(":")[0]
        if text and kind not in self._warned:
            self._warned.add(kind)
            self._observer.warning(text)

    def stop(self, reason: str) -> None:
        """Start no further trial and have the running ones save and let go; the study stays resumable."""
        if self.ended_by is None:
            self.ended_by = reason
            self._stop_slots()

    def close(self) -> None:
        """Settle the books once Tune has ended: what still runs in the record is resumable."""
        try:
            for running in self._running.values():
                self._track_interrupted(running.number)
            self.session.end(self.ended_by)
        finally:
            self._checkpoints.close()

    # -- trials -------------------------------------------------------------------------------------------------

    def _next_number(self) -> int | None:
        if self._left:
            return self._left.popleft()
        if self._num_trials >= self.spec.search.num_trials or self._is_space_exhausted:
            return None
        self._proposer.learn(self.study.frozen_trials())
        proposal = self._proposer.propose(self._num_trials)
        if proposal is None:
            self._warn_exhausted(self._num_trials)
            return None
        number = self.study.add_trial(proposal)
        self._num_trials += 1
        if proposal.is_default:
            self._default = number
        return number

    def _warn_exhausted(self, count: int) -> None:
        self._is_space_exhausted = True
        self._observer.warning(f"nothing new is left to try after {count} of {self.spec.search.num_trials} trials")

    def _start(self, tune_id: str, number: int) -> Assignment:
        record = self.study.trial(number)
        resumed_from = max(record.step, 0 if record.checkpoint is None else step_of(Path(record.checkpoint)))
        self._running[tune_id] = _Running(number, record.step, record.workers)
        self._checkpoints.begin(number)
        self.study.note(number, attempts=record.attempts + 1)
        self._observer.trial_started(number, record.params, resumed_from)
        self._tracker.start_trial(number, record.params, {"attempts": str(record.attempts + 1)})
        # A loop of the user's own may log to MLflow itself: into this trial's run, and no other.
        environment = self._tracker.child_environment(number) if self.spec.is_custom else {}
        return self._assignment(record, environment)

    def _assignment(self, record: TrialRecord, environment: dict[str, str]) -> Assignment:
        spec, number = self.spec, record.number
        # The baseline is worth its full length: a gain over a stopped trial would say nothing.
        steps = () if number == self._default else self._rule.decision_steps(number)
        return Assignment(
            number=number,
            values=spec.train_values(record.params),
            decision_steps=None if steps is None else tuple(steps),
            max_t=spec.max_t,
            reported_step=record.step,
            checkpoint_dir=str(self._checkpoints.directory(number)),
            log_dir=str(self.study.log_path(number).parent.absolute()),
            checkpoint_every=spec.checkpoint.every or 1,
            keep_last=spec.checkpoint.keep_last,
            metric=spec.objective.metric,
            mode=spec.objective.mode,
            keep_best_report=spec.objective.scope == "best",
            best_report=best_report(record.reports, spec.objective),
            environment=environment,
        )

    def _note_workers(self, running: _Running, num_workers: int) -> None:
        """Record on how many workers an elastic trial goes on, where that is news."""
        number, before = running.number, running.workers[-1:]
        if not self.spec.scaling.is_elastic or not num_workers or before == (num_workers,):
            return
        running.workers = (*running.workers, num_workers)
        self.study.note(number, workers=running.workers)
        tags = {"num_workers": ", ".join(map(str, running.workers))}
        self._tracker.tag_trial(number, self.study.trial(number).params, tags)
        if before:
            now = plural(num_workers, "worker")
            self._observer.warning(f"trial {number} goes on with {now} instead of {before[0]}")

    def _take_report(self, running: _Running, report: Reported) -> bool:
        number, step = running.number, report.step
        if step <= running.reported_step:
            return True
        value = objective_of(report, self.spec)
        running.reported_step = step
        self.session.add_busy(report.busy_s)
        # First: what a kill keeps from the record is reported again, what it keeps from MLflow is not.
        self._tracker.log_report(number, report.metrics, report.history)
        self.study.report(number, step, value)
        self._observer.reported(number, report.metrics)
        self._observer.timed(report)
        return self._judge(number, step, value)

    def _judge(self, number: int, step: int, value: float) -> bool:
        """Whether a trial goes on after this report; ends it when it does not. Known after a kill either way."""
        if not math.isfinite(value):
            return self._diverged(number, step)
        keeps = self._rule.keeps(number, step, self._sign * value) or number == self._default
        if not keeps and step < self.spec.max_t:
            return self._finish(number, "PRUNED", f"{self.spec.scheduler.type} stopped it at step {step}")
        steps = self._rule.decision_steps(number)
        # A loop of the user's own may pass a rung between two reports.
        if steps is None or any(self._judged.get(number, 0) < level <= step for level in steps):
            self._judged[number] = step
            self.study.note(number, judged_step=step)
        return True

    def _diverged(self, number: int, step: int) -> bool:
        self._rule.diverged(number)
        return self._finish(number, "FAILED", f"diverged at step {step}")

    def _take_end(self, running: _Running, ended: Ended) -> bool:
        number = running.number
        if ended.outcome == "stopped":
            self._track_interrupted(number)
            return False
        if ended.outcome == "unsaved" and ended.cause is not None:
            self._track_interrupted(number)
            raise StudyAbortedError(
                f"trial {number} cannot be saved: {ended.cause.summary}",
                f"Make room, then: {command('resume', self.study.dir)}   It goes on from its newest checkpoint.",
            )
        if ended.outcome == "completed" and running.reported_step > 0:
            return self._finish(number, "COMPLETE")
        if ended.outcome == "diverged":
            return self._diverged(number, ended.step)
        cause = ended.cause or Cause(Failure.ERROR, "it ended without a report")
        self.study.write_log(number, cause.detail)
        self._finish(number, "FAILED", cause.reason)
        self._stop_when_all_alike(number, cause.reason)
        return False

    def _finish(self, number: int, state: str, reason: str | None = None) -> bool:
        """End a trial; always False, since it does not go on."""
        self._checkpoints.settle(number, state)
        record = self.study.finish(number, state, reason)
        if state == "COMPLETE":
            self._checkpoints.keep_best()
        if state != "FAILED":
            self._last_failures.clear()
        self._observer.trial_ended(record)
        self._tracker.end_trial(number, state, reason, record.value, record.checkpoint)
        self.session.note_progress()
        if state == "COMPLETE" and reaches_target(record.value, self.spec):
            self.stop("target")
        return False

    def _stop_when_all_alike(self, number: int, reason: str) -> None:
        self._last_failures.append(reason)
        if self._last_failures.count(reason) == MAX_IDENTICAL_FAILURES:
            raise StudyAbortedError(
                f"{MAX_IDENTICAL_FAILURES} trials in a row failed alike: {reason}",
                f"Traceback: {self.study.log_path(number)}. Mend the cause, then: {command('resume', self.study.dir)}",
            )

    def _track_interrupted(self, number: int) -> None:
        record = self.study.trial(number)
        self._tracker.end_trial(number, "RUNNING", "interrupted", record.value, record.checkpoint)

    def abort(self, error: BaseException) -> None:
        """End the study for an error; the running trials save and let go, and whoever runs it raises the first one."""
        self.failure = self.failure or error
        self.stop("failure")
