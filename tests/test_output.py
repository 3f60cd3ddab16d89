"""What is printed: stable JSON and CSV, tables that fit the screen, progress in lines and in place."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from tuner import text
from tuner.display import outcomes, output, tables
from tuner.display.board import Board
from tuner.display.formats import Format, to_csv, to_json
from tuner.display.live import Lines, LiveTable, Quiet
from tuner.planning.plan import make_plan
from tuner.record.record import TrialRecord

if TYPE_CHECKING:
    from tuner.record.study import Study

Capture = pytest.CaptureFixture[str]
SHAPE = ["number", "state", "value", "step", "params", "reason", "checkpoint", "mlflow_run_id", "started", "ended"]


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def record(number: int, value: float | None = 2.0, state: str = "COMPLETE", **changes: Any) -> TrialRecord:
    params = {"learning_rate": 3.14159e-5, "optimizer": "adamw"}
    plain = TrialRecord(number, state, value, 27, params, None, None, None, "2026-01-01T00:00:00.000+00:00", None)
    return replace(plain, **changes)


def rendered(renderable: Any, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


# -- text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0523456, "0.05235"), (3.14159e-5, "3.142e-05"), (0.0, "0"), (8192, "8192"), (None, "-")],
)
def test_hyperparameters_keep_four_digits(value: float | None, shown: str) -> None:
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(3.0, "3.0000"), (2.13456, "2.1346"), (1.5e-7, "1.5000e-07"), (1e9, "1.0000e+09"), (None, "-")]
)
def test_metrics_line_up_at_four_decimals(value: float | None, shown: str) -> None:
    assert text.measured(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.4, "0 s"),
        (42, "42 s"),
        (60, "1 min"),
        (192, "3 min 12 s"),
        (7500, "2 h 5 min"),
        (273600, "3 d 4 h"),
        (None, "-"),
    ],
)
def test_durations_show_their_two_largest_units(seconds: float | None, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_long_names_are_cut_in_the_middle() -> None:
    assert text.shorten("organisation/model-7B-instruct", 15) == "organis…nstruct"
    assert text.shorten("short", 15) == "short"


def test_a_very_long_table_is_plain_lines() -> None:
    table = tables.trials([record(number) for number in range(1200)], metric="loss", width=40)
    assert isinstance(table, str)
    head, first, *rest = table.splitlines()
    assert (head.split()[:3], len(rest)) == (["trial", "state", "loss"], 1199)
    assert first.index("COMPLETE") == head.index("state")


# -- JSON and CSV -----------------------------------------------------------------------------------------------


def test_json_is_strict_where_numbers_are_not_finite() -> None:
    assert json.loads(to_json({"a": [float("nan"), 1.5], "b": {"c": float("inf")}})) == {
        "a": [None, 1.5],
        "b": {"c": None},
    }


def test_csv_gives_conditional_parameters_a_column_each_in_the_place_of_params() -> None:
    rows = [
        {"n": 0, "params": {"lr": 0.1, "beta2": 0.9}, "end": None},
        {"n": 1, "params": {"lr": 0.2, "m": [1]}, "end": "x"},
    ]
    assert to_csv(rows, ["n", "params", "end"]).splitlines() == [
        "n,params.lr,params.beta2,params.m,end",
        "0,0.1,0.9,,",
        "1,0.2,,[1],x",
    ]


def test_csv_without_rows_is_a_header() -> None:
    assert to_csv([], output.STATUS_KEYS) == "study,state,counts,best,slots,elapsed_s,training_share"


def test_the_keys_of_a_trial_are_those_of_its_record() -> None:
    assert list(output.TRIAL_KEYS) == SHAPE == list(record(0).to_json())


def test_trials_json_is_a_list_of_the_stable_shape(demo_study: Study, capsys: Capture) -> None:
    output.trials(demo_study, Format.JSON)
    shown = json.loads(capsys.readouterr().out)
    assert [list(trial) for trial in shown] == [SHAPE] * 4
    assert [(trial["state"], trial["value"], trial["step"]) for trial in shown] == [
        ("COMPLETE", 4.0, 27), ("COMPLETE", 3.0, 27), ("PRUNED", 6.5, 3), ("FAILED", None, 0),
    ]  # fmt: skip
    assert shown[3]["reason"] == "diverged at step 2"


@pytest.mark.parametrize("as_list", [False, True])
def test_best_json_is_one_trial_and_with_top_a_list(demo_study: Study, capsys: Capture, as_list: bool) -> None:
    output.best(demo_study, demo_study.best(), Format.JSON, as_list=as_list)
    shown = json.loads(capsys.readouterr().out)
    assert isinstance(shown, list) is as_list
    one = shown[0] if as_list else shown
    assert list(one) == [*SHAPE, "default_value", "confirmation"]
    assert (one["number"], one["value"], one["default_value"], one["confirmation"]) == (1, 3.0, 4.0, None)


def test_status_json_has_the_stable_shape(demo_study: Study, capsys: Capture) -> None:
    output.status(demo_study.status(), Format.JSON)
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == list(output.STATUS_KEYS)
    assert shown["counts"] == {"RUNNING": 0, "COMPLETE": 2, "PRUNED": 1, "FAILED": 1}
    assert (shown["state"], shown["best"]["number"], shown["slots"]) == ("finished", 1, 2)


def test_trials_csv_has_one_row_a_trial(demo_study: Study, capsys: Capture) -> None:
    output.trials(demo_study, Format.CSV)
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["params.optimizer"] for row in rows] == ["adamw", "adafactor", "adafactor", "adamw"]
    assert rows[1]["params.beta2"] == ""


# -- tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_fit_the_screen_whatever_is_in_them(width: int) -> None:
    params = {f"optimizer.a_rather_long_name_{i}": "organisation/a-model-with-a-long-name" for i in range(6)}
    records = [
        record(0, params=params),
        record(1234, None, "FAILED", params=params, reason="RuntimeError: " + "x" * 300),
    ]
    lines = rendered(tables.trials(records, metric="a_metric_with_a_long_name", width=width), width).splitlines()
    assert max(map(len, lines)) <= width


def test_a_number_is_not_folded_where_names_are_long() -> None:
    params = {"warmup_ratio_of_it": 2.729e-4, "another_one": 3}
    shown = rendered(tables.trials([record(0, params=params)], metric="eval_loss", width=60), 60)
    assert "warmup…of_it=0.0002729" in shown


def test_parameters_have_columns_of_their_own_where_that_fits() -> None:
    wide = rendered(tables.trials([record(0)], metric="eval_loss", width=100), 100)
    narrow = rendered(tables.trials([record(0)], metric="eval_loss", width=55), 55)
    assert "learning_rate" in wide.splitlines()[0]
    assert "parameters" in narrow.splitlines()[0]


def test_brackets_in_values_are_text_and_not_markup(capsys: Capture) -> None:
    output.screen().print(tables.trials([record(0, params={"split": "train[:80]"})], metric="eval_loss", width=100))
    assert "train[:80]" in capsys.readouterr().out


def test_the_default_trial_is_marked() -> None:
    table = tables.trials([record(0)], metric="eval_loss", width=100, default=0)
    assert rendered(table, 100).splitlines()[-1].endswith("default")


# -- the end of a search ----------------------------------------------------------------------------------------


def test_the_outcome_names_gain_failures_and_the_next_commands(demo_study: Study, capsys: Capture) -> None:
    output.outcome(demo_study)
    shown = capsys.readouterr()
    assert "best eval_loss 3.0000: trial 1, 25.0 % better than the default trial's 4.0000" in shown.out
    assert "1 of 4 trials failed; the first: trial 3: diverged at step 2" in shown.err
    root = demo_study.dir.parent
    for command in (
        f"tune resume demo --root {root} --set search.num_trials=16",
        f"tune best demo --root {root}",
        f"tune report demo --root {root}",
        f"tune ui demo --root {root}",
    ):
        assert f"  {command}\n" in shown.err


def test_no_gain_is_claimed_over_a_default_trial_that_was_stopped_early(demo_study: Study) -> None:
    longer = replace(demo_study.best()[0], step=81)
    assert outcomes.gain(demo_study, longer).endswith("; the default trial ended at step 27, at 4.0000")


def test_a_trial_that_was_stopped_early_compares_with_what_the_default_one_had_by_then(demo_study: Study) -> None:
    words = outcomes.against_default(demo_study, demo_study.trial(2))
    assert words == ", 30.0 % worse than the default trial's 5.0000 after as many steps"


def test_a_default_trial_that_is_best_is_said_to_be(demo_study: Study) -> None:
    assert outcomes.gain(demo_study, demo_study.trial(0)).endswith("the default trial: nothing tried was better")


@pytest.mark.parametrize(
    ("store", "shown"),
    [
        ("sqlite:////data/runs.db", "tune ui demo --root {root}"),
        ("http://me:secret@tracking:5000", "MLflow: http://***@tracking:5000"),
    ],
)
def test_the_mlflow_command_follows_the_store(
    demo_study: Study, monkeypatch: pytest.MonkeyPatch, store: str, shown: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    assert outcomes.mlflow_command(demo_study) == shown.format(root=demo_study.dir.parent)


# -- progress ---------------------------------------------------------------------------------------------------


def shown_by(kind: type[Quiet], clock: Clock, *, terminal: bool = False) -> tuple[Any, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=terminal, markup=False, highlight=False)
    return kind(console, clock), stream


def test_each_event_is_one_plain_line(demo_study: Study) -> None:
    display, stream = shown_by(Lines, Clock())
    display.study_started(demo_study, make_plan(demo_study.spec, None))
    display.trial_started(4, {"learning_rate": 3.14159e-5, "optimizer": "adamw"}, 0)
    display.reported(4, {"step": 3, "eval_loss": 6.0})
    display.trial_ended(record(4, 6.0, "PRUNED", step=3))
    display.trial_started(5, {"optimizer": "adamw"}, 9)
    display.trial_ended(record(5, 2.5))
    display.trial_started(6, {"optimizer": "adamw"}, 0)
    display.trial_ended(record(6, None, "FAILED", step=2, reason="diverged at step 2"))
    display.warning("the MLflow server is slow")
    assert stream.getvalue().splitlines()[1:] == [
        "trial 4 starts: learning_rate=3.142e-05 optimizer=adamw",
        "trial 4 PRUNED at step 3: eval_loss 6.0000",
        "trial 5 goes on from step 9: optimizer=adamw",
        "trial 5 COMPLETE at step 27: eval_loss 2.5000, best so far",
        "trial 6 starts: optimizer=adamw",
        "trial 6 FAILED at step 2: diverged at step 2",
        "warning: the MLflow server is slow",
    ]


def test_a_summary_follows_every_half_minute(demo_study: Study) -> None:
    clock = Clock()
    display, stream = shown_by(Lines, clock)
    display.study_started(demo_study, make_plan(demo_study.spec, None))
    for _ in range(61):
        clock.now_s += 1
        display.tick(0.9)
    summaries = [line for line in stream.getvalue().splitlines() if "trials ended" in line]
    assert len(summaries) == 2
    assert summaries[0].startswith(
        "4/8 trials ended; 2 COMPLETE, 1 PRUNED, 1 FAILED; best eval_loss 3.0000 (trial 1); 90 % of"
    )


def test_time_left_follows_the_rate_of_this_session(demo_study: Study) -> None:
    clock = Clock()
    board = Board(demo_study, 8, clock)
    assert board.eta_s is None
    board.start(4, 0)
    clock.now_s += 100
    assert board.eta_s is None, "the workers' start tells nothing"
    board.report(4, {"step": 3})
    clock.now_s += 30
    board.end(record(4))
    assert board.eta_s == pytest.approx(30 * 3)


def test_what_takes_long_before_the_first_step_is_a_line_now_and_then(demo_study: Study) -> None:
    clock = Clock()
    display, stream = shown_by(Lines, clock)
    display.study_started(demo_study, make_plan(demo_study.spec, None))
    display.trial_started(4, {}, 0)
    for second in range(25):
        clock.now_s += 1
        display.preparing(4, f"tokenises 9000 examples: {second} %")
        display.tick(0.0)
    display.reported(4, {"step": 3, "eval_loss": 6.0})
    for _ in range(4):
        clock.now_s += 1
        display.tick(0.0)
    told = [line for line in stream.getvalue().splitlines() if "tokenises" in line]
    assert told == [f"trial 4 tokenises 9000 examples: {share} %" for share in (9, 19)]


def test_slots_that_come_and_go_are_a_line(demo_study: Study) -> None:
    display, stream = shown_by(Lines, Clock())
    display.study_started(demo_study, make_plan(demo_study.spec, None))
    display.resized(1, 2)
    assert stream.getvalue().splitlines()[-1] == "1 slot -> 2 slots"


def test_verbose_shows_every_report(demo_study: Study) -> None:
    display, stream = shown_by(Lines, Clock())
    display.is_verbose = True
    display.study_started(demo_study, make_plan(demo_study.spec, None))
    display.trial_started(4, {}, 0)
    display.reported(4, {"step": 3, "eval_loss": 6.0, "learning_rate": 1e-5})
    assert stream.getvalue().splitlines()[-1] == "trial 4 at step 3: eval_loss 6, learning_rate 1e-05"
    # A loop of the user's own reports what it likes.
    display.reported(4, {"step": 6, "eval_loss": 5.0, "phase": "warm up", "rates": [0.1, 0.2], "best": None})
    assert stream.getvalue().splitlines()[-1] == (
        "trial 4 at step 6: eval_loss 5, phase warm up, rates [0.1, 0.2], best None"
    )


def test_quiet_prints_warnings_only(demo_study: Study) -> None:
    display, stream = shown_by(Quiet, Clock())
    display.study_started(demo_study, make_plan(demo_study.spec, None))
    display.trial_started(4, {}, 0)
    display.trial_ended(record(4))
    display.tick(0.5)
    display.warning("no room")
    assert stream.getvalue() == "warning: no room\n"


def test_the_live_table_shows_running_trials_and_leaves_the_screen(demo_study: Study) -> None:
    clock = Clock()
    display, stream = shown_by(LiveTable, clock, terminal=True)
    with display:
        display.study_started(demo_study, make_plan(demo_study.spec, None))
        display.trial_started(4, {}, 0)
        clock.now_s += 5
        display.preparing(4, "loads a/model: 40%, 0.2 MB/s, about 3 s left")
        clock.now_s += 5
        display.is_verbose = True
        display.reported(4, {"step": 3, "eval_loss": 6.25, "learning_rate": "two rates"})
        display.tick(0.5)
        before = len(stream.getvalue())
        display.trial_ended(record(4, 6.25, "PRUNED", step=3))
        assert "3/27" not in stream.getvalue()[before:], "an ended trial leaves the table with the line that says so"
    shown = stream.getvalue()
    assert "trial 4 loads a/model: 40%" in shown
    assert "3/27" in shown
    assert "6.2500" in shown
    assert "two rates" in shown
    assert "\x1b[?25h" in shown, "the cursor must come back"
