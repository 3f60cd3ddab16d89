"""What a study is foreseen to take, and the accounting of its GPU-hours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tune
from tests.studies import study_spec
from tests.test_imports import heavy_imports
from tuner.decisions.controller import StudyController
from tuner.decisions.early_stopping import NeverStop, make_rule
from tuner.decisions.observer import Observer
from tuner.errors import InputError, SpecError
from tuner.execution.channel import Reported
from tuner.planning.forecast import Forecast, make_forecast
from tuner.planning.pace import Pace, assumed_pace
from tuner.planning.plan import Capacity
from tuner.planning.probe import Stopwatch
from tuner.planning.rehearsal import rehearse
from tuner.record.session import Session, gpu_hours, refuse_spent, slot_hours
from tuner.record.study import Study
from tuner.study_file.extension import extend_spec
from tuner.study_file.spec import StudySpec, make_spec
from tuner.tracking.tracker import MlflowTracker

TWO_CORES = Capacity(2, 0)
EIGHT_GPUS = Capacity(64, 8)
MODEL = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DATA: dict[str, Any] = {
    "study": "demo",
    "train": {
        "model": {**MODEL, "intermediate_size": 128, "vocab_size": 1000},
        "dataset": {"path": "d", "eval_split": "train[100:300]"},
        "max_steps": 27,
        "eval_every": 3,
    },
    "search_space": {"learning_rate": {"type": "float", "low": 1e-5, "high": 1e-2, "log": True}},
    "search": {"num_trials": 12},
}
PACE = Pace(start_s=10.0, step_s=1.0, eval_s=2.0, save_s=0.5, turnover_s=0.25, end_s=3.0, checkpoint_bytes=1000)


def spec_of(**sections: Any) -> StudySpec:
    return make_spec(
        {name: {**DATA.get(name, {}), **values} for name, values in sections.items()}
        | {name: values for name, values in DATA.items() if name not in sections}
    )


def forecast(spec: StudySpec, capacity: Capacity = TWO_CORES, **options: Any) -> Forecast:
    return make_forecast(spec, capacity, "here", **{"measured": PACE, **options})


def test_without_stopping_the_time_is_that_of_the_parts() -> None:
    spec = spec_of(scheduler={"type": "none"}, checkpoint={"every": 9})
    [course, *others] = rehearse(spec, NeverStop, num_trials=4, num_slots=2, pace=PACE)
    # 27 steps, 9 evaluations and 2 saves; the save at the end belongs to the turnover.
    assert course.busy_s == 2 * (27 * 1.0 + 9 * 2.0 + 2 * 0.5) + 0.25
    assert {other.busy_s for other in others} == {course.busy_s}
    assert course.lengths == (27,) * 4


@pytest.mark.parametrize(("num_trials", "eta"), [(12, 3), (40, 3), (40, 4)])
def test_a_rung_lets_through_what_arrivals_in_random_order_make_of_it(num_trials: int, eta: int) -> None:
    """The k-th to arrive is as likely in any place, and the best max(1, k // eta) go on."""
    spec = spec_of(
        search={"num_trials": num_trials},
        scheduler={"grace_period": 9, "reduction_factor": eta},
        # No default trial, which is never stopped: this key has no default that the space holds.
        search_space={"batch_size": {"type": "int", "low": 16, "high": 512}},
    )
    assert spec.default_params() is None
    courses = rehearse(spec, lambda: make_rule(spec), num_trials=num_trials, num_slots=1, pace=PACE)
    passed = sum(length > 9 for course in courses for length in course.lengths) / len(courses)
    expected = sum(max(1, k // eta) / k for k in range(1, num_trials + 1))
    assert passed == pytest.approx(expected, rel=0.1)


def test_the_default_trial_is_never_stopped() -> None:
    spec = spec_of(train={"learning_rate": 1e-3})
    courses = rehearse(spec, lambda: make_rule(spec), num_trials=12, num_slots=2, pace=PACE)
    assert {course.lengths[0] for course in courses} == {27}
    assert min(course.lengths[1] for course in courses) == 3


def test_a_forecast_is_the_same_each_time() -> None:
    assert forecast(spec_of()) == forecast(spec_of())


@pytest.mark.parametrize("scheduler", ["asha", "hyperband"])
def test_stopping_saves_time_and_steps(scheduler: str) -> None:
    found = forecast(spec_of(scheduler={"type": scheduler}))
    assert found.wall_s is not None
    assert found.full_wall_s is not None
    assert found.wall_s.low <= found.wall_s.expected <= found.wall_s.high < found.full_wall_s
    assert found.steps.expected < 12 * 27
    assert found.reaching[3] == 12
    assert list(found.reaching.values()) == sorted(found.reaching.values(), reverse=True)


def test_the_median_rule_is_foreseen_as_if_it_stopped_nothing() -> None:
    found = forecast(spec_of(scheduler={"type": "median"}))
    assert found.wall_s is not None
    assert found.wall_s.expected == found.full_wall_s
    assert "stopped by the median" in {assumption.name for assumption in found.assumptions}


def test_gpu_hours_are_the_time_of_all_gpus_that_the_slots_hold() -> None:
    spec = spec_of(scaling={"num_workers": 2, "slots": 3})
    shape = forecast(spec, EIGHT_GPUS, price=2.5).to_json()
    assert (shape["trials_at_once"], shape["gpus"]) == (3, 6)
    assert shape["gpu_hours"] == pytest.approx(shape["wall_s"]["expected"] / 3600 * 6)
    assert shape["money"] == pytest.approx(2.5 * shape["gpu_hours"])
    assert shape["money_without_stopping"] > shape["money"]


def test_without_gpus_the_hours_are_those_of_slots() -> None:
    found = forecast(spec_of(), price=1.0)
    shape = found.to_json()
    assert shape["gpu_hours"] == 0
    assert shape["money"] == pytest.approx(shape["slot_hours"])
    assert "an hour of a slot" in found.facts()["money"]


def test_money_is_named_only_when_a_price_is() -> None:
    assert forecast(spec_of()).to_json()["money"] is None
    assert "money" not in forecast(spec_of()).facts()


def test_a_cluster_too_small_for_a_trial_is_replaced_by_one_that_holds_it_and_both_are_named() -> None:
    found = forecast(spec_of(scaling={"num_workers": 2, "gpus_per_worker": 1, "slots": 2}))
    assert (found.num_slots, found.num_gpus) == (2, 4)
    assert found.facts()["  cluster"] == "4 CPUs, 4 GPUs, assumed: here has 2 CPUs, 0 GPUs: too little"


def test_limits_that_end_a_study_early_are_named() -> None:
    found = forecast(spec_of(search={"max_hours": 0.001, "max_gpu_hours": 0.01}), EIGHT_GPUS)
    assert [warning.split(" is ")[0] for warning in found.warnings] == ["search.max_hours", "search.max_gpu_hours"]


def test_a_model_whose_numbers_are_not_here_leaves_the_time_open() -> None:
    found = forecast(spec_of(train={"model": "nobody/nothing"}), measured=None)
    assert found.wall_s is None
    assert "--probe" in found.facts()["time"]
    assert found.steps.expected > 0


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"batch_size": 16}, "step_s"),
        ({"max_length": 2048}, "step_s"),
        ({"gradient_checkpointing": "full"}, "step_s"),
        ({"dataset": {"path": "d", "eval_split": "train[100:900]"}}, "eval_s"),
    ],
)
def test_what_costs_more_is_assumed_to_take_longer(changes: dict[str, Any], part: str) -> None:
    small, large = assumed_pace(spec_of(), 0), assumed_pace(spec_of(train=changes), 0)
    assert small is not None
    assert large is not None
    assert getattr(large, part) > getattr(small, part)


def test_every_number_of_a_pace_is_named_among_the_assumptions() -> None:
    shape = forecast(spec_of(), measured=None).to_json()
    named = {assumption["name"]: assumption for assumption in shape["assumptions"]}
    assert {"cluster", "seconds a step", "seconds an evaluation", "seconds between trials", "failures"} <= set(named)
    assert not named["seconds a step"]["is_measured"]
    assert all(assumption["why"] for assumption in shape["assumptions"])


def test_the_verb_prints_json_and_loads_nothing_heavy(tune: Tune, demo_file: Path, tmp_path: Path) -> None:
    done = tune("plan", demo_file, "--set", "search.num_trials=5", "--format", "json", interpreter="-X importtime")
    assert done.returncode == 0, done.stderr
    assert heavy_imports(done.stderr) == set()
    assert json.loads(done.stdout)["trials"] == 5
    assert not (tmp_path / "studies").exists()


def test_a_probe_takes_the_means_of_what_slots_say_once_they_are_warm() -> None:
    watch = Stopwatch(Observer(), began_at=0.0, enough_s=9e9)
    for number in (0, 1):
        watch.trial_started(number, {}, 0)
        # A slot's first report is slow in ways that do not come again.
        watch.timed(Reported(number, 3, {}, (), 60.0, waits=False, eval_s=30.0))
        watch.timed(Reported(number, 6, {}, (), 3.0 + 2 * number, waits=False, eval_s=number, save_s=0.5))
    found = watch.pace(ended_at=9e9, size=1000)
    assert (found.step_s, found.eval_s, found.save_s) == ((3.0 + 4.0) / 6, 0.5, 0.5)
    assert (found.checkpoint_bytes, found.peak_bytes) == (1000, None)
    assert all(assumption.is_measured for assumption in found.assumptions)


# -- search.max_gpu_hours ---------------------------------------------------------------------------------------


def study_with(folder: Path, *sittings: dict[str, Any], **search: Any) -> Study:
    spec = study_spec(folder, search={"num_trials": 6, **search}, scaling={"gpus_per_worker": 1})
    study = Study.create(spec, "", folder / "studies")
    for index, sitting in enumerate(sittings):
        study.note_study(f"session:{index}", {"started": 0.0, "slots": 2, "training_share": 1.0, **sitting})
    return study


HALF = {"elapsed_s": 900.0, "gpus": 2.0}


@pytest.mark.parametrize(
    ("sittings", "limit", "expected"),
    [
        ([HALF], 1.0, None),
        ([HALF, HALF], 1.0, "max_gpu_hours"),
        ([HALF, HALF], 2.0, None),
        ([HALF, {**HALF, "elapsed_s": 871.0}], 1.0, "max_gpu_hours"),  # saving takes until then
        ([HALF, {**HALF, "elapsed_s": 860.0}], 1.0, None),
        ([{"elapsed_s": 9e9}], 1.0, None),  # held no GPUs
        ([{**HALF, "gpus": 0.5}], 0.125, "max_gpu_hours"),
    ],
)
def test_gpu_hours_count_over_all_sittings_and_leave_room_for_the_end(
    tmp_path: Path, sittings: list[dict[str, Any]], limit: float, expected: str | None
) -> None:
    study = study_with(tmp_path, *sittings, max_gpu_hours=limit)
    assert Session(study, 2, 2.0).used_up() == expected


def test_the_session_of_a_limited_study_keeps_what_it_held(tmp_path: Path) -> None:
    study = study_with(tmp_path, max_gpu_hours=1.0)
    session = Session(study, 2, 2.0)
    session.end(None)
    [noted] = study.sessions()
    assert noted["gpus"] == 2.0


def test_what_slots_hold_is_counted_as_long_as_they_are_there(tmp_path: Path) -> None:
    study = study_with(tmp_path, max_gpu_hours=1.0)
    session = Session(study, 2, 2.0)
    session.resize(3, 6.0)
    session.end(None)
    [noted] = study.sessions()
    assert (noted["slots"], noted["gpus"]) == (3, 6.0)
    assert 2 * noted["elapsed_s"] < noted["slot_s"] < 3 * noted["elapsed_s"]
    assert 2 * noted["elapsed_s"] < noted["gpu_s"] < 6 * noted["elapsed_s"]
    assert gpu_hours([noted]) == noted["gpu_s"] / 3600
    assert slot_hours([noted]) == noted["slot_s"] / 3600


def test_the_limit_ends_a_study_that_an_extended_one_goes_on_with(tmp_path: Path) -> None:
    study = study_with(tmp_path, HALF, max_gpu_hours=0.51)
    tracker = MlflowTracker(study.spec, study.dir, on_run_id=lambda number, run_id: None)

    def controller() -> StudyController:
        return StudyController(study, 2, tracker, Observer(), lambda: None, lambda number: None, num_gpus=2.0)

    ended = controller()
    assert ended.next_assignment("a") is not None
    ended.tick()
    assert (ended.ended_by, ended.next_assignment("b")) == ("max_gpu_hours", None)
    ended.close()
    assert study.sessions()[-1]["reason"] == "max_gpu_hours"
    assert study.state_at_rest() == "stopped"
    study.replace_spec(extend_spec(study.spec, ["search.max_gpu_hours=1"]))
    refuse_spent(study)
    extended = controller()
    extended.tick()
    assert extended.ended_by is None
    assignment = extended.next_assignment("c")
    assert assignment is not None
    # The trial that was left goes on before any new one.
    assert assignment.number == 0


def test_a_study_without_gpu_hours_left_is_not_resumed_and_the_command_that_allows_more_is_named(
    tmp_path: Path,
) -> None:
    study = study_with(tmp_path, HALF, max_gpu_hours=1.0)
    refuse_spent(study)
    study.note_study("session:1", HALF)
    with pytest.raises(InputError) as caught:
        refuse_spent(study)
    assert "1 of 1 GPU-hours are used" in caught.value.message
    assert "search.max_gpu_hours=2" in caught.value.remedy


def test_a_study_that_uses_no_gpu_cannot_limit_gpu_hours() -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(search={"max_gpu_hours": 1.0}, scaling={"gpus_per_worker": 0})
    assert "use search.max_hours" in str(caught.value)
