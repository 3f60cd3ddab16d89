"""A kill -9 at each touch of the disk in turn: whatever it leaves can be gone on with. No Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.killed_writes import killed_at_each_write
from tests.studies import study_spec
from tests.test_controller import open_controller
from tuner.errors import StudyDamagedError, StudyExistsError
from tuner.study import Study
from tuner.study_dir import list_studies


@pytest.fixture(autouse=True)
def _imported() -> None:
    """A child that is forked has the heavy modules already."""
    optuna.storages.RDBStorage("sqlite://")


def spec(folder: Path, *, in_database: bool) -> Any:
    search = {"storage": f"sqlite:///{folder}/record.db"} if in_database else {}
    return study_spec(folder, search={"num_trials": 3, **search})


def create(folder: Path, *, in_database: bool) -> Study:
    return Study.create(spec(folder, in_database=in_database), "", folder / "studies")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("in_database", "every"), [(False, 2), pytest.param(True, 1, marks=pytest.mark.slow)])
def test_a_study_that_was_killed_in_the_making_goes_on_or_can_be_made_again(
    tmp_path: Path, in_database: bool, every: int
) -> None:
    seen = set()
    for folder in killed_at_each_write(tmp_path, lambda folder: create(folder, in_database=in_database).close(), every):
        root = folder / "studies"
        if not list_studies(root):
            seen.add("not there")
            study = create(folder, in_database=in_database)
        else:
            seen.add(state(root))
            with pytest.raises(StudyExistsError, match="tune resume tiny"):
                create(folder, in_database=in_database)
            study = Study.open(root, "tiny", writable=True)
        assert open_controller(study).next_assignment("a") is not None
        study.close()
        assert len(Study.open(root, "tiny").trials()) == 1
    assert seen == {"not there", "interrupted", *(["cut off"] if in_database else [])}


def state(root: Path) -> str:
    """What a reader is told."""
    try:
        return str(Study.open(root, "tiny").status()["state"])
    except StudyDamagedError as error:
        return "cut off" if f"tune resume tiny --root {root}" in error.remedy else str(error)
