"""What the controller decides, driven by a stand-in for the slots: no Ray, no training, real records on disk."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tune
from tests.studies import Recorder, study_spec
from tuner.decisions.controller import StudyController
from tuner.decisions.failures import Cause, Failure
from tuner.errors import StudyAbortedError
from tuner.execution import search
from tuner.execution.channel import Assignment, Ended, Heard, Reported
from tuner.record.study import Study
from tuner.tracking.tracker import PENDING, MlflowTracker

MAX_T = 9


def open_controller(study: Study, num_slots: int = 1, observer: Recorder | None = None) -> StudyController:
    tracker = MlflowTracker(study.spec, study.dir, on_run_id=lambda number, run_id: None)
    return StudyController(study, num_slots, tracker, observer or Recorder(), lambda: None, lambda number: None)


def new_study(folder: Path, name: str = "tiny", **sections: Any) -> Study:
    return Study.create(study_spec(folder, name, **sections), "", folder / "studies")


def loss(assignment: Assignment, step: int) -> float:
    """Falls with the step, fastest at a learning rate of 3e-3."""
    distance = abs(math.log10(assignment.values["learning_rate"]) - math.log10(3e-3))
    return distance + 1 / step


def reports(assignment: Assignment) -> Iterator[Heard]:
    """What a slot hears of a trial that is saved at every step, from where it was left."""
    number = assignment.number
    for step in range(assignment.reported_step + 1, MAX_T + 1):
        waits = assignment.decision_steps is None or step in assignment.decision_steps
        metrics = {"step": float(step), "eval_loss": loss(assignment, step)}
        last = step == MAX_T
        report = Reported(number, step, metrics, (), 0.1, waits=waits and not last, is_last=last)
        yield Heard(number, (report,), (), Ended(number, "completed") if last else None)
    if assignment.reported_step >= MAX_T:
        yield Heard(number, (), (), Ended(number, "completed"))


def heard(number: int, step: int, value: Any) -> Heard:
    """A single report."""
    report = Reported(number, step, {"step": float(step), "eval_loss": value}, (), 0.1, waits=True)
    return Heard(number, (report,), (), None)


def drive(study: Study, num_calls: float = math.inf, observer: Recorder | None = None) -> bool:
    """Run a study through one slot; returns False when it is killed after so many calls."""
    controller = open_controller(study, observer=observer)
    for turn in range(10_000):
        assignment = controller.next_assignment(str(turn))
        num_calls -= 1
        if num_calls < 0:
            return False
        if assignment is None:
            controller.close()
            return True
        for heard in reports(assignment):
            goes_on = controller.hear(str(turn), heard)
            num_calls -= 1
            if num_calls < 0:
                return False
            if not goes_on:
                break
    raise AssertionError("the study does not end")


def table(study: Study) -> list[tuple[Any, ...]]:
    return [(trial.number, trial.state, trial.params, trial.value, trial.reports) for trial in study.trials()]


@pytest.mark.parametrize("scheduler", ["asha", "hyperband", "median", "none"])
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_study_killed_at_any_point_and_resumed_ends_like_the_uninterrupted_one(
    tmp_path: Path, scheduler: str, sampler: str
) -> None:
    sections: dict[str, Any] = {
        "search": {"num_trials": 8, "sampler": sampler},
        "scheduler": {"type": scheduler, "grace_period": 1, "reduction_factor": 3},
    }
    whole = new_study(tmp_path, "whole", **sections)
    assert drive(whole)
    expected = table(whole)
    for num_calls in range(1, 70, 3):
        study = new_study(tmp_path, f"killed-{num_calls}", **sections)
        if drive(study, num_calls):
            break
        study.close()
        reopened = Study.open(tmp_path / "studies", f"killed-{num_calls}", writable=True)
        assert drive(reopened)
        assert table(reopened) == expected, f"killed after {num_calls} calls"
        reopened.close()


def test_no_kill_keeps_from_mlflow_what_the_record_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = new_study(tmp_path, mlflow={"enabled": True})

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "report", killed)
    with pytest.raises(KeyboardInterrupt):
        drive(study)
    events = [json.loads(line) for line in (study.dir / PENDING).read_text().split("\n") if line]
    assert [event["points"][0][0] for event in events if event["op"] == "report"] == [1]


def test_a_verdict_that_was_not_recorded_is_given_again(tmp_path: Path) -> None:
    """A kill between a rung's report and its verdict must not let the trial slip through."""
    study = new_study(tmp_path, search={"num_trials": 8})
    drive(study)
    pruned = next(trial for trial in study.trials() if trial.state == "PRUNED")
    again = new_study(tmp_path, "again", search={"num_trials": 8})
    drive(again, num_calls=sum(len(trial.reports) + 1 for trial in study.trials()[: pruned.number]))
    again.report(pruned.number, 1, pruned.reports[1])
    recorder = Recorder()
    drive(again, observer=recorder)
    assert table(again) == table(study)
    assert recorder.ended[0].number == pruned.number
    assert pruned.number not in dict(recorder.started)


def test_a_rung_that_was_passed_between_two_reports_is_not_judged_again(tmp_path: Path) -> None:
    study = new_study(tmp_path, scheduler={"grace_period": 4})
    controller = open_controller(study, num_slots=3)
    for number in range(3):
        controller.next_assignment(str(number))
    for number, step, value in ((1, 5, 3.0), (1, 6, 3.0), (2, 4, 2.0)):
        assert controller.hear(str(number), heard(number, step, value))
    open_controller(study)
    assert [trial.state for trial in study.trials()] == ["RUNNING"] * 3


@pytest.mark.parametrize("scheduler", ["asha", "median"])
@pytest.mark.parametrize("is_reported", [True, False])
def test_a_diverged_trial_is_the_worst_to_the_scheduler_also_after_a_kill(
    tmp_path: Path, scheduler: str, is_reported: bool
) -> None:
    study = new_study(
        tmp_path, search={"num_trials": 9}, scheduler={"type": scheduler, "grace_period": 4, "min_samples": 3}
    )
    controller = open_controller(study, num_slots=9)
    for number in range(7):
        controller.next_assignment(str(number))
    for number in range(1, 4):
        ended = Heard(number, (), (), Ended(number, "diverged", 2))
        assert not controller.hear(str(number), heard(number, 2, math.nan) if is_reported else ended)
    for number, value in ((4, 1.0), (5, 2.0)):
        # Second of five arrivals, and one place; with the median, better than three of the four others.
        assert controller.hear(str(number), heard(number, 4, value)) == (number == 4 or scheduler == "median")
    for each in (controller, open_controller(study)):
        assert each._rule.keeps(7, 4, 1.5), "second of six"


@pytest.mark.parametrize("value", [None, "abc", [1.0, 2.0]])
def test_a_metric_that_is_no_number_ends_the_study_and_is_shown(tmp_path: Path, value: Any) -> None:
    controller = open_controller(new_study(tmp_path))
    controller.next_assignment("a")
    assert not controller.hear("a", heard(0, 1, value))
    assert isinstance(controller.failure, StudyAbortedError)
    assert controller.failure.message == f"metric 'eval_loss' of trial 0 is {value!r}, not a number"
    controller.study.close()


def test_trials_left_running_are_handed_out_before_new_ones(tmp_path: Path) -> None:
    study = new_study(tmp_path, search={"num_trials": 4}, scheduler={"type": "none"})
    drive(study, num_calls=4)
    assignment = open_controller(study).next_assignment("first")
    assert assignment is not None
    assert (assignment.number, assignment.reported_step) == (0, 4)


def test_no_more_trials_run_at_once_than_there_are_slots(tmp_path: Path) -> None:
    controller = open_controller(new_study(tmp_path), num_slots=2)
    assert controller.next_assignment("a") is not None
    assert controller.next_assignment("b") is not None
    assert controller.next_assignment("c") is None
    assert not controller.is_exhausted


def test_slots_come_and_go_with_the_cluster_and_a_surplus_one_gets_no_next_trial(tmp_path: Path) -> None:
    controller = open_controller(new_study(tmp_path), num_slots=1)
    assert controller.next_assignment("a") is not None
    assert controller.next_assignment("b") is None
    controller.resize(2, 0.0)
    assert controller.next_assignment("b") is not None
    controller.resize(1, 0.0)
    controller.hear("a", Heard(0, (), (), Ended(0, "diverged", 1)))
    assert not controller.has_next
    assert controller.next_assignment("c") is None
    controller.hear("b", Heard(1, (), (), Ended(1, "diverged", 1)))
    assert controller.has_next
    assert controller.next_assignment("c") is not None


def test_a_slot_is_kept_for_a_next_trial_only_while_there_is_one(tmp_path: Path) -> None:
    controller = open_controller(new_study(tmp_path, search={"num_trials": 3}), num_slots=2)
    controller.next_assignment("a")
    controller.next_assignment("b")
    controller.hear("a", Heard(0, (), (), Ended(0, "diverged", 1)))
    assert controller.has_next
    controller.next_assignment("c")
    assert not controller.has_next
    controller.lost("b")
    assert controller.has_next, "it starts again"
    controller.stop("interrupted")
    assert not controller.has_next


def test_every_class_of_failure_is_shown_with_its_line(tmp_path: Path, tune: Tune) -> None:
    study = new_study(tmp_path, search={"num_trials": 9})
    controller = open_controller(study)
    for number, failure in enumerate(Failure):
        controller.next_assignment(str(number))
        cause = Cause(failure, "what happened", "Traceback ...")
        controller.hear(str(number), Heard(number, (), (), Ended(number, "failed", cause=cause)))
    controller.next_assignment("last")
    controller.hear("last", Heard(len(Failure), (), (), Ended(len(Failure), "diverged", 7)))
    study.close()
    shown = tune("trials", "tiny").stdout
    assert [failure for failure in Failure if f"{failure}: what happened" not in shown] == []
    assert "diverged at step 7" in shown


@pytest.mark.parametrize("reason", ["stopped", "max_hours", "target", "failure"])
def test_a_second_signal_ends_a_study_at_once_whatever_stopped_it_before(tmp_path: Path, reason: str) -> None:
    controller = open_controller(new_study(tmp_path))
    controller.stop(reason)
    with search._interruptible(controller):
        signal.raise_signal(signal.SIGTERM)
        assert controller.ended_by == reason
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_lost_slot_hands_its_trial_on_until_failures_are_used_up(tmp_path: Path) -> None:
    controller = open_controller(new_study(tmp_path, failures={"max_failures": 1}))
    for attempt in range(2):
        assignment = controller.next_assignment(str(attempt))
        assert assignment is not None
        assert assignment.number == 0
        controller.lost(str(attempt))
    trial = controller.study.trial(0)
    assert trial.state == "FAILED"
    assert "lost" in (trial.reason or "")


def test_kills_of_the_driver_are_no_failures_of_a_trial(tmp_path: Path) -> None:
    study = new_study(tmp_path, failures={"max_failures": 1})
    for _ in range(3):
        open_controller(study).next_assignment("a")
        study.close()
        study = Study.open(tmp_path / "studies", "tiny", writable=True)
    controller = open_controller(study)
    controller.next_assignment("a")
    controller.lost("a")
    assert study.trial(0).state == "RUNNING"


def test_an_error_inside_the_controller_ends_the_study_and_is_kept_for_its_caller(tmp_path: Path) -> None:
    controller = open_controller(new_study(tmp_path))
    assignment = controller.next_assignment("a")
    assert assignment is not None
    report = Reported(0, 1, {"step": 1.0, "loss": 1.0}, (), 0.1, waits=True)
    assert not controller.hear("a", Heard(0, (report,), (), None))
    assert isinstance(controller.failure, StudyAbortedError)
    assert "'eval_loss'" in controller.failure.message
    assert controller.next_assignment("b") is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_fails_the_trial(tmp_path: Path, value: float) -> None:
    controller = open_controller(new_study(tmp_path))
    controller.next_assignment("a")
    report = Reported(0, 2, {"step": 2.0, "eval_loss": value}, (), 0.1, waits=True)
    assert not controller.hear("a", Heard(0, (report,), (), None))
    assert controller.study.trial(0).reason == "diverged at step 2"
    assert controller.study.best() == []


def test_failures_that_differ_do_not_end_a_study(tmp_path: Path) -> None:
    controller = open_controller(new_study(tmp_path, search={"num_trials": 6}))
    for number in range(6):
        assert controller.next_assignment(str(number)) is not None
        controller.hear(
            str(number), Heard(number, (), (), Ended(number, "failed", cause=Cause(Failure.ERROR, f"{number % 2}")))
        )
    assert controller.failure is None
    assert [trial.state for trial in controller.study.trials()] == ["FAILED"] * 6


def test_three_failures_alike_in_a_row_end_a_study_and_name_the_log(tmp_path: Path) -> None:
    controller = open_controller(new_study(tmp_path, search={"num_trials": 6}))
    for number in range(3):
        controller.next_assignment(str(number))
        cause = Cause(Failure.ERROR, "the same", "Traceback ...")
        controller.hear(str(number), Heard(number, (), (), Ended(number, "failed", cause=cause)))
    assert isinstance(controller.failure, StudyAbortedError)
    assert "2.rank0.log" in controller.failure.remedy
    assert "Traceback" in controller.study.log_path(2).read_text(encoding="utf-8")
