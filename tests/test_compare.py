"""Studies side by side."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tune
from tuner.record.record import TrialRecord
from tuner.record.study import Study
from tuner.reports import compare


def ended(number: int, value: float | None, step: int, state: str = "COMPLETE") -> TrialRecord:
    time = f"2026-01-01T00:{number:02}:00"
    return TrialRecord(number, state, value, step, {}, None, None, None, time, time)


@pytest.fixture
def other_study(demo_study: Study) -> Study:
    """As the demo study, with a longer grace period, another batch size, one trial, and no default trial."""
    changes: dict[str, Any] = {
        "study": "other",
        "train": {**demo_study.spec.train, "batch_size": 16},
        "scheduler": demo_study.spec.scheduler.model_copy(update={"grace_period": 9}),
    }
    study = Study.create(demo_study.spec.model_copy(update=changes), "", demo_study.dir.parent)
    study.close()
    return study


def test_studies_stand_side_by_side_with_the_keys_in_which_they_differ(other_study: Study, tune: Tune) -> None:
    done = tune("compare", "demo", "other", "--format", "json", interpreter="-X importtime")
    assert done.returncode == 0
    assert not {"ray", "torch", "optuna", "plotly"} & {
        line.rpartition("|")[2].strip() for line in done.stderr.split("\n")
    }
    demo, other = json.loads(done.stdout)
    assert list(demo) == list(compare.COMPARED_KEYS)
    assert (demo["best"], demo["trial"], demo["default_value"], demo["gain"]) == (3.0, 1, 4.0, 0.25)
    assert demo["counts"] == {"RUNNING": 0, "COMPLETE": 2, "PRUNED": 1, "FAILED": 1}
    assert (other["best"], other["gain"], other["hours"], other["params"]) == (None, None, 0.0, {})
    assert demo["differences"] == {"train.batch_size": None, "scheduler.grace_period": 3}
    assert other["differences"] == {"train.batch_size": 16, "scheduler.grace_period": 9}


def test_the_table_shows_each_study_in_a_column_and_csv_in_a_row(other_study: Study, tune: Tune) -> None:
    table = tune("compare", "demo", "other").stdout
    assert next(line.split() for line in table.splitlines() if "train.batch_size" in line) == [
        "train.batch_size",
        "-",
        "16",
    ]
    rows = list(csv.DictReader(io.StringIO(tune("compare", "demo", "other", "--format", "csv").stdout)))
    assert [row["study"] for row in rows] == ["demo", "other"]
    assert rows[1]["differences.train.batch_size"] == "16"


def test_a_page_of_curves_is_written_on_demand(other_study: Study, tune: Tune, tmp_path: Path) -> None:
    done = tune("compare", "demo", "other", "--to", "both.html")
    assert (done.returncode, done.stderr.strip()) == (0, "written: both.html")
    assert "plot-progress-steps" in (tmp_path / "both.html").read_text(encoding="utf-8")


def test_one_study_is_nothing_to_compare(demo_study: Study, tune: Tune) -> None:
    done = tune("compare", "demo")
    assert (done.returncode, "two studies or more" in done.stderr) == (2, True)


def test_values_under_another_meaning_are_warned_of() -> None:
    keys = ["train.dataset.limit", "train.batch_size", "objective.metric", "scheduler.max_t", "train.datasets"]
    assert compare.unlike(keys) == ["train.dataset.limit", "objective.metric", "scheduler.max_t"]


@pytest.mark.parametrize(
    ("records", "mode", "curve"),
    [
        ([], "min", []),
        (
            [ended(0, 3.0, 9), ended(1, 2.0, 3, "PRUNED"), ended(2, 2.5, 9)],
            "min",
            [(1, 9, 3.0), (3, 21, 2.5), (3, 21, 2.5)],
        ),
        ([ended(0, 3.0, 9), ended(1, 2.0, 9)], "max", [(1, 9, 3.0), (2, 18, 3.0)]),
        ([ended(0, None, 2, "FAILED")], "min", []),
    ],
)
def test_only_complete_trials_are_the_best_so_far(records: list[TrialRecord], mode: str, curve: Any) -> None:
    assert compare.best_so_far(records, mode) == curve
