"""A kill -9 at each touch of the disk in turn: whatever it leaves can be gone on with. No Ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.killed_writes import killed_at_each_write
from tests.studies import study_spec
from tests.test_controller import open_controller
from trainables.checkpoint import Draft, _commit
from trainables.checkpoint_dir import MANIFEST, complete_checkpoints, step_dir, step_of
from tuner.errors import StudyDamagedError, StudyExistsError
from tuner.execution.damage import clear_damage
from tuner.record.study import Study
from tuner.record.study_dir import list_studies
from tuner.study_file.spec import override_spec


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
@pytest.mark.parametrize(("in_database", "every"), [(False, 2), pytest.param(True, 8, marks=pytest.mark.slow)])
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


def test_a_draft_that_a_kill_left_under_the_same_process_id_is_in_nobodys_way(tmp_path: Path) -> None:
    """In a container every run may have the same one."""
    leftover = tmp_path / "studies" / f".tiny.{os.getpid()}.new"
    leftover.mkdir(parents=True)
    (leftover / "spec.json").write_text("{")
    create(tmp_path, in_database=False).close()
    assert list_studies(tmp_path / "studies") == ["tiny"]
    assert not leftover.exists()


def write_parts(folder: Path, step: int) -> tuple[Draft, Path]:
    """A checkpoint of which all is there but the manifest, and where its parts are."""
    draft = Draft(step_dir(folder / "checkpoints", step), step, {}, {}, keep=1)
    partial = draft.partial(rank=0)
    partial.mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata"):
        (partial / name).write_bytes(bytes([step]) * 100)
    return draft, partial


def commit(folder: Path) -> None:
    """The second checkpoint of a trial, then the second one again, which replaces it."""
    _commit(*write_parts(folder, 1))
    (folder / "has one").touch()
    for _ in range(2):
        _commit(*write_parts(folder, 2))


def test_a_kill_in_the_commit_of_a_checkpoint_leaves_a_whole_one(tmp_path: Path) -> None:
    newest = []
    for folder in killed_at_each_write(tmp_path, commit):
        root = folder / "checkpoints"
        if (folder / "has one").exists():
            assert clear_damage(root, 0) is None, "a kill is no damage"
            whole = complete_checkpoints(root)
            assert [path.name for path in whole] == sorted(path.name for path in root.iterdir())
            newest.append(step_of(whole[-1]))
            contents = {file.read_bytes() for file in whole[-1].iterdir() if file.name != MANIFEST}
            assert contents == {bytes([newest[-1]]) * 100}
    assert newest == sorted(newest), "never back to an older one"
    assert set(newest) == {1, 2}


def test_a_kill_in_the_extension_of_a_study_leaves_the_old_one_or_the_new(tmp_path: Path) -> None:
    def extend(folder: Path) -> None:
        study = Study.open(folder / "studies", "tiny", writable=True)
        study.replace_spec(override_spec(study.spec, ["search.num_trials=5"]))
        study.close()

    def step(folder: Path) -> None:
        create(folder, in_database=False).close()
        (folder / "made").touch()
        extend(folder)

    seen = []
    for folder in killed_at_each_write(tmp_path, step):
        if (folder / "made").exists():
            seen.append(Study.open(folder / "studies", "tiny").spec.search.num_trials)
            extend(folder)
            assert Study.open(folder / "studies", "tiny").spec.search.num_trials == 5
    assert set(seen) == {3, 5}
