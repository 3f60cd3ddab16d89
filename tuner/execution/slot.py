"""A slot: the Tune actor that keeps one group of Ray Train workers warm and feeds it one trial after another.

Tune sees an ordinary Trainable whose actor is reused. Behind it ONE TorchTrainer run outlives the trials: its worker
processes, process group, device context and data stay, so that the next trial starts in milliseconds. A worker group
that dies is started anew and the trial goes on from its newest complete checkpoint; Tune never hears of it. Where the
cluster says that a node will be taken away, the trial saves after its next step and goes on from there on another one;
likewise where the number of workers is elastic and there has come to be room for more.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ray import tune
from ray.experimental import internal_kv

from tuner.decisions.failures import Cause, Failure
from tuner.execution.best_report import BestReport
from tuner.execution.channel import (
    Assignment,
    Ended,
    Go,
    Heard,
    Logged,
    Preparing,
    Reported,
    Saved,
    Start,
    Stop,
    Warned,
)
from tuner.execution.worker_group import PATIENCE_S, SlotSettings, WorkerGroup

POLL_S = 0.2
# How often a slot looks whether the study is being interrupted, or a node of its workers is about to be taken away.
LOOK_S = 0.5
# How long a trial trains before it is worth a new start to have more workers.
GROW_EVERY_S = 60.0


class TrialSlot(tune.Trainable):
    """Serves trials to Tune; each `step` is one or more reports of the current trial, or its end.

    A result holds `heard` (a `Heard`) and, for Tune, `step`.
    """

    _logged: tuple[Logged, ...] = ()

    def setup(self, config: dict[str, Any]) -> None:
        """Start the workers; they come up while Tune goes on."""
        self._settings: SlotSettings = config["slot"]
        self._workers = WorkerGroup(self._settings)
        self._next_look_at = 0.0
        self._is_waiting = False
        self._begin(config["assignment"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Let go of the trial Tune has stopped and begin the next."""
        self._let_go(save=False)
        self._begin(new_config["assignment"])
        return True

    def step(self) -> dict[str, Any]:
        """Wait for the current trial's next reports or its end."""
        if self._is_waiting:
            self._workers.send(Go(self._assignment.number))
            self._is_waiting = False
        heard = self._listen()
        return {"heard": heard, "step": self._step, "done": False}

    def cleanup(self) -> None:
        """End the workers; a trial still running is asked for a checkpoint when the study is being interrupted."""
        self._let_go(save=self._is_interrupted())
        self._workers.close()

    # -- one trial ----------------------------------------------------------------------------------------------

    def _begin(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._step = assignment.reported_step
        self._saved_step = 0
        self._best = BestReport(assignment)
        self._is_running, self._is_waiting = True, False
        self._asked_to_stop_at: float | None = None
        self._failures: list[str] = []
        self._shrunk_after: set[str] = set()
        self._warnings: list[str] = []
        self._start()

    def _start(self) -> None:
        # Handed over as soon as there are workers to take it; see _receive.
        self._is_started = False
        self._moves_because = ""
        self._grows_at = time.monotonic() + GROW_EVERY_S
        self._workers.make_ready()

    def _listen(self) -> Heard:
        """Gather what the worker says until it waits, ends, or falls silent for the moment."""
        reports: list[Reported] = []
        saved: list[Saved] = []
        while True:
            # The end follows the last report closely: one round trip serves both.
            may_leave = bool(reports) and not reports[-1].is_last
            message = self._receive(0.0 if may_leave else POLL_S)
            if message is None and may_leave:
                return self._heard(reports, saved)
            if isinstance(message, Logged):
                self._logged += (message,)
                if not reports:
                    return self._heard(reports, saved)
                continue
            if message is None or message.number != self._assignment.number:
                continue
            if isinstance(message, Saved):
                saved.append(message)
                self._saved_step = message.step
            elif isinstance(message, Preparing):
                return replace(self._heard(reports, saved), preparing=message.text)
            elif isinstance(message, Warned):
                self._warnings.append(message.text)
            elif isinstance(message, Ended):
                if self._moves(message) or self._retries(message):
                    return self._heard(reports, saved)
                self._is_running = False
                return self._heard(reports, saved, message)
            elif isinstance(message, Reported) and message.step > self._step:
                self._step, self._is_waiting = message.step, message.waits
                self._best.improves(message.step, message.metrics)
                reports.append(message)
                if message.waits:
                    return self._heard(reports, saved)
            elif isinstance(message, Reported) and message.waits:
                # A retried loop passes again what it had reported before its last checkpoint was left behind.
                self._workers.send(Go(message.number))

    def _heard(self, reports: list[Reported], saved: list[Saved], ended: Ended | None = None) -> Heard:
        warnings, self._warnings = tuple(self._warnings), []
        logged, self._logged = self._logged, ()
        size = self._workers.size if self._is_started else 0
        return Heard(
            self._assignment.number, tuple(reports), tuple(saved), ended, warnings, num_workers=size, logged=logged
        )

    def _receive(self, timeout_s: float) -> Any:
        """The next message; where there is nobody to speak, an `Ended` that says why."""
        number = self._assignment.number
        if self._has_to_stop():
            return Ended(number, "stopped")
        if not self._is_started and self._workers.is_ready:
            self._is_started = True
            self._workers.note_placement_group(number)
            self._workers.send(Start(self._assignment))
        message = self._workers.receive(timeout_s)
        if message is None and not self._workers.is_alive:
            return Ended(number, "failed", cause=self._workers.cause_of_end)
        return message

    def _has_to_stop(self) -> bool:
        """Whether the trial is to be left as it is; asks the worker for a checkpoint first, and waits for a while."""
        now = time.monotonic()
        if self._asked_to_stop_at is not None:
            return now - self._asked_to_stop_at > PATIENCE_S
        if now < self._next_look_at:
            return False
        self._next_look_at = now + LOOK_S
        if not self._is_interrupted():
            self._move_in_time(now)
            return False
        self._asked_to_stop_at = now
        self._workers.send(Stop(self._assignment.number, save=True))
        return not self._is_started

    def _move_in_time(self, now: float) -> None:
        """Ask for a checkpoint once it is known that a node of the workers goes; what is lost later is tried again."""
        if not self._is_started or self._moves_because:
            return
        if self._workers.is_on_leaving_node:
            self._moves_because = "a node it trained on is about to be taken away"
        elif self._settings.is_warm and now > self._grows_at:
            self._grows_at = now + GROW_EVERY_S
            self._moves_because = "there is room for more workers" if self._workers.can_grow else ""
        if self._moves_because:
            self._workers.send(Stop(self._assignment.number, save=True))

    def _moves(self, ended: Ended) -> bool:
        """Start the trial again elsewhere, from the checkpoint that it was asked for; costs no attempt."""
        if not self._moves_because or ended.outcome != "stopped" or self._asked_to_stop_at is not None:
            return False
        why = f"{self._moves_because}; it was saved at step {self._saved_step}"
        self._warnings.append(f"trial {ended.number} moves: {why}")
        # Warm workers on the other nodes would wait for a rank that is gone.
        self._workers.end()
        self._start_again()
        return True

    def _retries(self, ended: Ended) -> bool:
        """Start the trial again after a failure, while it has attempts left and no error came twice."""
        if ended.cause is None or ended.outcome == "unsaved" or self._asked_to_stop_at is not None:
            return False
        if self._costs_an_attempt(ended.cause):
            repeated = ended.cause.failure is Failure.ERROR and ended.cause.reason in self._failures
            self._failures.append(ended.cause.reason)
            if repeated or len(self._failures) > self._settings.max_failures:
                return False
        self._warnings.append(f"trial {ended.number} starts again: {ended.cause.reason}")
        self._start_again()
        return True

    def _start_again(self) -> None:
        self._assignment = replace(self._assignment, reported_step=self._step, best_report=self._best.report)
        self._start()

    def _costs_an_attempt(self, cause: Cause) -> bool:
        if cause.failure is Failure.TOO_LARGE and cause.reason not in self._shrunk_after:
            # The next attempt makes smaller passes, so this cannot go on for ever.
            self._shrunk_after.add(cause.reason)
            return False
        if self._moves_because and cause.failure.is_innocent:
            # Announced, and too soon for a report.
            return False
        # A worker that is lost again and again without getting any further is lost for a reason.
        return not cause.failure.is_innocent or self._step == self._assignment.reported_step

    def _let_go(self, *, save: bool) -> None:
        """Have the worker leave the trial; one that does not is ended with its group."""
        if not self._is_running or not self._is_started:
            return
        self._is_running = False
        self._workers.send(Stop(self._assignment.number, save=save))
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            message = self._workers.receive(POLL_S)
            if isinstance(message, Logged):
                self._logged += (message,)
            if isinstance(message, Ended) and message.number == self._assignment.number:
                return
            if message is None and not self._workers.is_alive:
                return
        self._workers.end()

    def _is_interrupted(self) -> bool:
        return bool(internal_kv._internal_kv_exists(self._settings.stop_key.encode()))
