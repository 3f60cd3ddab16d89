"""A journal read without Optuna says what Optuna says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.decisions.sampling import Proposal, distribution
from tuner.errors import StudyDamagedError
from tuner.record.study import Study
from tuner.study_file.spec import make_spec

KINDS = ["a", 2, 0.5, True, None]
STATES = ["COMPLETE", "PRUNED", "FAILED", "RUNNING", "RUNNING"]
SPACE = {
    "x": {"type": "float", "low": 0.0, "high": 1.0},
    "n": {"type": "int", "low": 1, "high": 9},
    "kind": {"type": "categorical", "choices": KINDS},
}


@pytest.fixture
def written(tmp_path: Path) -> Study:
    """A study open for writing, with a trial of every kind of value and end."""
    data = {
        "study": "seen",
        "trainable": "tests.train_functions:quadratic",
        "objective": {"metric": "loss"},
        "search_space": SPACE,
        "search": {"num_trials": 9},
        "scheduler": {"max_t": 9},
    }
    study = Study.create(make_spec(data), "", tmp_path)
    spaces = {name: distribution(parameter) for name, parameter in study.spec.search_space.parameters.items()}
    for index, (kind, state) in enumerate(zip(KINDS, STATES, strict=True)):
        number = study.add_trial(Proposal({"x": 0.1, "n": 3, "kind": kind}, spaces, is_default=index == 0))
        study.note(number, attempts=1)
        study.report(number, 1, 0.1 + 0.2)
        study.report(number, 3, float("nan"))
        if state != "RUNNING":
            study.finish(number, state, None if state == "COMPLETE" else "error: it ended")
    study.note_mlflow_run(1, "abc")
    return study


def test_a_view_has_the_trials_that_optuna_has(written: Study) -> None:
    seen = Study.open(written.dir.parent, "seen")
    assert list(map(repr, seen.trials())) == list(map(repr, written.trials()))
    assert [list(map(repr, trial.reports.items())) for trial in seen.trials()] == [
        list(map(repr, trial.reports.items())) for trial in written.trials()
    ]
    assert (seen.default_trial, seen.status()) == (written.default_trial, written.status() | {"elapsed_s": 0.0})


def test_a_view_takes_in_what_is_written_later(written: Study) -> None:
    seen = Study.open(written.dir.parent, "seen")
    assert seen.trial(3).state == "RUNNING"
    written.report(3, 9, 0.5)
    written.finish(3, "COMPLETE")
    assert (seen.trial(3).state, seen.trial(3).value) == ("COMPLETE", 0.5)


@pytest.mark.parametrize("damage", [b'{"op_code":7}{"op_code":7}', b'{"op_code":7}\n{"op', b"7", b""])
def test_lines_that_only_together_are_json_are_damage(written: Study, damage: bytes) -> None:
    path = written.dir / "optuna.journal"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:3], damage, *lines[3:]]) + b"\n")
    with pytest.raises(StudyDamagedError, match=r"optuna\.journal:[45]"):
        Study.open(written.dir.parent, "seen")
