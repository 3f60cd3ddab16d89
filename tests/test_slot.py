"""What a slot makes of the messages of its workers, without Ray."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.studies import assignment
from tuner.decisions.failures import Cause, Failure
from tuner.execution.channel import Ended, Go, Logged, Reported, Saved, Start, Stop
from tuner.execution.slot import TrialSlot


class ScriptedWorkers:
    """Workers that are there and say what they are to say."""

    is_ready = is_alive = True
    is_on_leaving_node = can_grow = False
    size = 1

    def __init__(self, messages: list[Any]) -> None:
        self.told: list[Any] = []
        self._messages = deque(messages)

    def make_ready(self) -> None:
        pass

    def note_placement_group(self, number: int) -> None:
        pass

    def send(self, message: Any) -> None:
        self.told.append(message)

    def receive(self, timeout_s: float) -> Any | None:
        return self._messages.popleft() if self._messages else None

    def end(self) -> None:
        self.can_grow = False

    def close(self) -> None:
        pass


class UndisturbedSlot(TrialSlot):
    """A slot of a study that nobody interrupts."""

    def __init__(self, *messages: Any) -> None:
        self.workers = ScriptedWorkers([*messages, Ended(0, "completed")])
        self._workers: Any = self.workers
        self._next_look_at, self._is_waiting = 0.0, False
        self._settings: Any = SimpleNamespace(max_failures=2, is_warm=True)
        self._begin(assignment(Path(), reported_step=2, keep_best_report=True))

    def _is_interrupted(self) -> bool:
        return False


def reported(step: int, loss: float = 1.0) -> Reported:
    return Reported(0, step, {"step": step, "loss": loss}, (), 0.0, waits=True)


def test_a_report_that_waits_is_answered_also_when_it_is_no_news() -> None:
    slot = UndisturbedSlot(reported(1), reported(2), reported(3))
    heard = slot.step()["heard"]
    assert [report.step for report in heard.reports] == [3]
    assert slot.workers.told[1:] == [Go(0), Go(0)], "after Start; step 3 has to wait for its verdict"
    assert slot.step()["heard"].ended == Ended(0, "completed")


def test_another_attempt_knows_the_best_report_of_the_ones_before() -> None:
    failed = Ended(0, "failed", cause=Cause(Failure.ERROR, "error: once"))
    slot = UndisturbedSlot(reported(3, 0.5), reported(4, 0.9), failed)
    for _ in range(4):
        slot.step()
    starts = [message.assignment for message in slot.workers.told if isinstance(message, Start)]
    assert [(start.reported_step, start.best_report) for start in starts] == [(2, None), (4, (3, 0.5))]


def test_a_trial_that_could_have_more_workers_is_saved_and_goes_on_with_them() -> None:
    slot = UndisturbedSlot(reported(3), Saved(0, 3, "step_3"), Ended(0, "stopped"))
    slot.step()
    slot.workers.can_grow = True
    slot._grows_at = slot._next_look_at = 0.0
    heard = slot.step()["heard"]
    assert heard.warnings == ("trial 0 moves: there is room for more workers; it was saved at step 3",)
    assert slot.workers.told[1:] == [Go(0), Stop(0, save=True)]
    slot.step()
    assert isinstance(slot.workers.told[3], Start)


def test_what_a_trial_printed_before_it_was_stopped_is_told_with_the_next_one() -> None:
    first, last = Logged(0, "step=3\n"), Logged(0, "left after step 3\n")
    slot = UndisturbedSlot(first, reported(3), last, Ended(0, "stopped"), reported(3))
    assert slot.step()["heard"].logged == (first,)
    assert slot.step()["heard"].logged == ()
    slot.reset_config({"assignment": assignment(Path(), reported_step=2)})
    assert slot.step()["heard"].logged == (last,)
