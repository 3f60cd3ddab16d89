"""State files damaged, folders moved, writes that fail: what a study goes on from, and what it refuses by name."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.conftest import REPOSITORY, Tune
from tests.studies import Recorder, study_spec
from tests.test_controller import drive, new_study, open_controller, table
from trainables.checkpoint_dir import step_dir, write_manifest
from tuner.decisions.failures import Cause, Failure
from tuner.errors import StudyAbortedError, StudyDamagedError, StudyExistsError, StudyLockedError, TuneError
from tuner.execution.channel import Assignment, Ended, Heard, Reported, Saved
from tuner.planning.space import checkpoint_bytes
from tuner.record.checkpoints import Checkpoints
from tuner.record.storage import UNRECORDED
from tuner.record.study import Study
from tuner.record.study_dir import list_studies
from tuner.tracking.tracker import PENDING

STATE_FILES = ("optuna.journal", "spec.json", "study.yaml", "study.lock", "mlflow_pending.jsonl")
READING_VERBS = ("status", "trials", "best")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three of six trials ended, the fourth left running."""
    study = new_study(tmp_path)
    drive(study, num_calls=14)
    study.close()
    states = [trial.state for trial in study.trials()]
    assert states == ["COMPLETE", "PRUNED", "PRUNED", "RUNNING"], states
    return tmp_path / "studies"


@pytest.fixture
def expected(tmp_path: Path) -> list[Any]:
    """The table of the study that nothing happened to."""
    study = new_study(tmp_path, "whole")
    drive(study)
    study.close()
    return table(study)


def resume(root: Path, name: str = "tiny") -> Study:
    """Go on to the end, without Ray."""
    study = Study.open(root, name, writable=True)
    try:
        assert drive(study)
    finally:
        study.close()
    return study


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- the record -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 7, 60, 100])
def test_a_record_torn_in_its_last_lines_can_be_read_and_gone_on_with(
    root: Path, expected: list[Any], num_bytes: int
) -> None:
    before = table(Study.open(root, "tiny"))
    journal = root / "tiny" / "optuna.journal"
    os.truncate(journal, journal.stat().st_size - num_bytes)
    after = table(Study.open(root, "tiny"))
    assert after[:3] == before[:3]
    assert table(resume(root)) == expected


@pytest.mark.parametrize(
    "garbage", [b'{"op_code": 6, "tri', b"\0" * 4096, b"\0\0\0\n", b"oops\n", b"{}\n", b"\xff\xfe"]
)
def test_garbage_at_the_end_of_the_record_is_dropped(root: Path, expected: list[Any], garbage: bytes) -> None:
    journal = root / "tiny" / "optuna.journal"
    journal.write_bytes(journal.read_bytes() + garbage)
    assert table(resume(root)) == expected
    assert garbage not in journal.read_bytes()


@pytest.mark.parametrize("damage", [b"oops", b'{"op_code": 99}', b"{}", b"null", b'{"op_code": 6}', b"\xff\xfe\0", b""])
@pytest.mark.parametrize("writable", [False, True])
def test_a_damaged_line_inside_the_record_is_refused_with_its_number_and_left_alone(
    root: Path, damage: bytes, writable: bool
) -> None:
    journal = root / "tiny" / "optuna.journal"
    lines = journal.read_bytes().split(b"\n")
    lines[7] = damage
    journal.write_bytes(b"\n".join(lines))
    before = contents(root)
    with pytest.raises(StudyDamagedError, match=r"optuna\.journal:8: "):
        Study.open(root, "tiny", writable=writable)
    assert contents(root) == before | {"tiny/study.lock": b""}


def test_two_torn_lines_in_a_row_are_damage_not_a_torn_end(root: Path) -> None:
    journal = root / "tiny" / "optuna.journal"
    damaged = journal.read_bytes() + b'{"op_code"\n{"op_co'
    journal.write_bytes(damaged)
    for writable in (False, True):
        with pytest.raises(StudyDamagedError, match=r"optuna\.journal:\d+"):
            Study.open(root, "tiny", writable=writable)
    assert journal.read_bytes() == damaged


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.7])
def test_a_record_that_has_lost_trials_is_refused_while_anything_shows_that_they_were_started(
    root: Path, share: float
) -> None:
    for number in range(4):
        (root / "tiny" / "logs").mkdir(exist_ok=True)
        (root / "tiny" / "logs" / f"{number}.rank0.log").touch()
    journal = root / "tiny" / "optuna.journal"
    os.truncate(journal, int(journal.stat().st_size * share))
    before = contents(root)
    for writable in (False, True):
        with pytest.raises(StudyDamagedError, match=r"optuna\.journal|no study named"):
            Study.open(root, "tiny", writable=writable)
    after = contents(root)
    assert len(after["tiny/optuna.journal"]) <= len(before["tiny/optuna.journal"])
    assert before["tiny/optuna.journal"].startswith(after["tiny/optuna.journal"])


def test_a_failed_write_leaves_a_record_that_goes_on(root: Path, expected: list[Any]) -> None:
    """A file size limit fails a write half-way, as a full disk does."""
    source = """
import resource, signal, sys
from pathlib import Path
from tuner.errors import StudyAbortedError
from tuner.planning.space import checkpoint_bytes
from tuner.record.storage import UNRECORDED
from tuner.record.study import Study
study = Study.open(Path(sys.argv[1]), "tiny", writable=True)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = (study.dir / "optuna.journal").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, resource.RLIM_INFINITY))
try:
    study.note_study("long", "x" * 100)
except StudyAbortedError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
study.note_study("after", 1)
"""
    done = run_python(source, str(root))
    assert "optuna.journal cannot be written: File too large" in done.stdout
    assert "tune resume tiny" in done.stdout
    assert Study.open(root, "tiny").optuna_study.user_attrs["after"] == 1
    assert table(resume(root)) == expected


def test_a_record_removed_or_cut_short_under_a_running_study_is_not_written_over(root: Path) -> None:
    study = Study.open(root, "tiny", writable=True)
    journal = root / "tiny" / "optuna.journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StudyAbortedError, match="cannot be written"):
        study.note_study("key", 1)
    assert journal.read_bytes() == whole[: len(whole) // 2]
    journal.unlink()
    with pytest.raises(StudyAbortedError, match="cannot be written"):
        study.note_study("key", 1)
    assert not journal.exists()
    study.close()


# -- every state file, through the command line -------------------------------------------------------------------


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [emptied, halved, removed])
def test_a_spec_that_cannot_be_read_is_refused_by_name_by_every_verb(
    tune: Tune, root: Path, damage: Callable[[Path], None]
) -> None:
    damage(root / "tiny" / "spec.json")
    before = contents(root)
    for verb in ("status", "resume"):
        done = tune(verb, "tiny")
        assert done.returncode == 1, done.stderr
        assert "studies/tiny/spec.json" in done.stderr
        assert "Traceback" not in done.stderr
    listed = json.loads(tune("list", "--format", "json").stdout)
    assert [(study["study"], study["state"]) for study in listed] == [("tiny", "damaged")]
    assert contents(root) == before


@pytest.mark.parametrize("damage", [emptied, removed])
def test_a_record_that_is_gone_is_refused_by_name_and_never_begun_anew(
    tune: Tune, root: Path, damage: Callable[[Path], None]
) -> None:
    damage(root / "tiny" / "optuna.journal")
    before = contents(root)
    for verb in ("trials", "resume"):
        done = tune(verb, "tiny")
        assert done.returncode == 1, done.stderr
        assert "studies/tiny/optuna.journal is missing or empty" in done.stderr
    assert contents(root) == before | {"tiny/study.lock": b""}


def test_a_taken_name_is_refused_whatever_is_left_of_the_study(tune: Tune, root: Path, demo_file: Path) -> None:
    for name in STATE_FILES:
        (root / "tiny" / name).unlink(missing_ok=True)
    done = tune("run", demo_file, "--name", "tiny")
    assert done.returncode == 2
    assert "exists already" in done.stderr


def test_neither_the_study_file_nor_leftovers_are_needed(root: Path, expected: list[Any]) -> None:
    folder = root / "tiny"
    (folder / "study.yaml").unlink()
    (folder / "study.lock").write_bytes(b"\xff\xfe garbage {")
    for leftover in ("optuna.journal.lock", "spec.json.new", "mlflow_pending.jsonl.new", ".optuna.journal.lock"):
        (folder / leftover).write_bytes(b"left by a kill")
    (root / ".tiny.4711.new").mkdir()
    assert list_studies(root) == ["tiny", "whole"]
    assert Study.open(root, "tiny").status()["state"] == "interrupted"
    assert table(resume(root)) == expected
    assert Study.open(root, "tiny").status()["state"] == "finished"


def test_a_torn_line_in_what_mlflow_is_owed_loses_nothing_else(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    study = new_study(tmp_path, mlflow={"enabled": True}, search={"num_trials": 3})
    controller = open_controller(study)
    drive_one(controller)
    study.close()  # killed: nothing was sent
    pending = study.dir / PENDING
    assert pending.stat().st_size
    os.truncate(pending, pending.stat().st_size - 20)
    study = Study.open(tmp_path / "studies", "tiny", writable=True)
    controller = open_controller(study)
    controller._tracker.start_study({}, study.trials())
    while (assignment := controller.next_assignment("a")) is not None:
        hear_all(controller, "a", assignment)
    controller._tracker.end_study(study.status())
    assert controller._tracker.close(60)
    client = MlflowClient(f"sqlite:///{tmp_path / 'studies' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 4
    assert "RUNNING" not in {run.info.status for run in runs}


# -- places -------------------------------------------------------------------------------------------------------


def test_a_moved_study_goes_on_and_writes_only_in_its_new_place(
    tmp_path: Path, root: Path, expected: list[Any]
) -> None:
    new_root = tmp_path / "elsewhere"
    new_root.mkdir()
    (root / "tiny").rename(new_root / "renamed")
    shutil.rmtree(root)
    checkpoint = make_checkpoint(new_root / "renamed" / "checkpoints" / "3", 1)
    study = Study.open(new_root, "renamed", writable=True)
    note_saved(study, 3, checkpoint)
    study.close()
    (new_root / "renamed").rename(new_root / "again")
    study = Study.open(new_root, "again", writable=True)
    assert study.trial(3).checkpoint == str(new_root / "again" / "checkpoints" / "3" / "step_00000001")
    assignment = open_controller(study).next_assignment("a")
    assert assignment is not None
    for place in (assignment.checkpoint_dir, assignment.log_dir):
        assert Path(place).is_relative_to(new_root / "again")
    study.close()
    assert table(resume(new_root, "again")) == expected
    assert not root.exists()
    assert sorted(path.name for path in new_root.iterdir()) == ["again"]


def test_a_study_is_found_by_its_path_and_by_way_of_a_link(tmp_path: Path, root: Path, expected: list[Any]) -> None:
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    assert table(resume(tmp_path / "link")) == expected
    assert Study.open(tmp_path, str(root / "tiny")).status()["state"] == "finished"


def test_another_host_name_changes_nothing(root: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    assert table(resume(root)) == expected


# -- several at once --------------------------------------------------------------------------------------------


def test_reading_never_fails_while_the_study_is_written(tmp_path: Path) -> None:
    source = """
import sys
from pathlib import Path
from tests.test_controller import drive, new_study
drive(new_study(Path(sys.argv[1]), search={"num_trials": 40}, scheduler={"type": "none"}))
"""
    writer = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], cwd=REPOSITORY)
    num_read, most = 0, 0
    while writer.poll() is None:
        if (tmp_path / "studies" / "tiny").exists():
            records = Study.open(tmp_path / "studies", "tiny").trials()
            assert len(records) >= most, "a reader never goes back"
            num_read, most = num_read + 1, len(records)
    assert writer.returncode == 0
    assert num_read > 5
    assert len(Study.open(tmp_path / "studies", "tiny").trials()) == 40


def test_a_second_writer_is_refused_and_told_who_the_first_is(root: Path) -> None:
    first = Study.open(root, "tiny", writable=True)
    with pytest.raises(StudyLockedError, match=rf"process {os.getpid()} on {socket.gethostname()}"):
        Study.open(root, "tiny", writable=True)
    assert Study.open(root, "tiny").status()["state"] == "running"
    first.close()
    Study.open(root, "tiny", writable=True).close()


def test_of_many_writers_at_once_exactly_one_wins(root: Path) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(8)
    held: list[Study] = []

    def try_it() -> None:
        barrier.wait()
        try:
            held.append(Study.open(root, "tiny", writable=True))
            outcomes.append("won")
        except StudyLockedError:
            outcomes.append("refused")

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 7 + ["won"]
    held[0].close()


def test_a_writer_that_was_refused_a_damaged_study_lets_go_of_it(root: Path) -> None:
    journal = root / "tiny" / "optuna.journal"
    whole = journal.read_bytes()
    journal.write_bytes(b"oops\n" + whole)
    with pytest.raises(StudyDamagedError) as kept:
        Study.open(root, "tiny", writable=True)
    journal.write_bytes(whole)
    Study.open(root, "tiny", writable=True).close()
    assert kept.value.exit_code == 1


# -- checkpoints ------------------------------------------------------------------------------------------------


def make_checkpoint(root: Path, step: int) -> Path:
    path = step_dir(root, step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"weights")
    write_manifest(path, step, {"eval_loss": 1.0})
    return path


def note_saved(study: Study, number: int, path: Path) -> None:
    checkpoints = Checkpoints(study)
    checkpoints.note_saved(number, (Saved(number, int(path.name[5:]), str(path)),))
    checkpoints.close()


def complete_trials(folder: Path, losses: list[float], **checkpoint: Any) -> Study:
    """A study whose trials completed with these losses, each with a checkpoint."""
    study = new_study(folder, search={"num_trials": len(losses)}, checkpoint=checkpoint)
    controller = open_controller(study)
    for value in losses:
        assignment = controller.next_assignment("a")
        assert assignment is not None
        path = make_checkpoint(Path(assignment.checkpoint_dir), 9)
        number = assignment.number
        report = Reported(number, 9, {"step": 9.0, "eval_loss": value}, (), 0.1, waits=False, is_last=True)
        controller.hear("a", Heard(number, (report,), (Saved(number, 9, str(path)),), Ended(number, "completed")))
    controller.close()
    return study


@pytest.mark.parametrize(("keep", "kept"), [(1, {1}), (2, {0, 1}), (9, {0, 1, 2, 3})])
def test_the_best_trials_keep_their_checkpoints(tmp_path: Path, keep: int, kept: set[int]) -> None:
    study = complete_trials(tmp_path, [2.0, 1.0, 4.0, 3.0], keep_best_trials=keep)
    assert {trial.number for trial in study.trials() if trial.checkpoint is not None} == kept
    assert {path.name for path in (study.dir / "checkpoints").iterdir()} == set(map(str, kept))


def test_a_disk_that_fills_up_costs_all_but_the_best_checkpoint_and_is_told_of_once(tmp_path: Path) -> None:
    study = complete_trials(tmp_path, [2.0, 1.0, 3.0], keep_best_trials=3)
    recorder = Recorder()
    controller = open_controller(study, observer=recorder)
    huge = step_dir(study.dir / "checkpoints" / "1", 18)
    huge.mkdir()
    with open(huge / "__0_0.distcp", "wb") as file:
        file.truncate(1 << 43)
    write_manifest(huge, 18, {})
    controller._checkpoints._size = checkpoint_bytes(huge)
    for _ in range(2):
        controller.session._next_tick = 0.0
        controller.tick()
    controller.close()
    assert {trial.number for trial in study.trials() if trial.checkpoint is not None} == {1}
    [warning] = recorder.warnings
    assert warning.startswith("the disk is filling up: the next checkpoints need 8796.1 GB")
    assert warning.endswith("deleted those of trial 0, 2, which are not the best")


def test_a_damaged_checkpoint_does_not_cost_the_last_good_one(tmp_path: Path) -> None:
    study = complete_trials(tmp_path, [2.0, 1.0], keep_best_trials=2)
    (study.dir / "checkpoints" / "1" / "step_00000009" / "__0_0.distcp").write_bytes(b"wei")
    study.replace_spec(study_spec(tmp_path, checkpoint={"keep_best_trials": 1}, search={"num_trials": 2}))
    checkpoints = Checkpoints(study)
    checkpoints.keep_best()
    checkpoints.close()
    assert study.trial(0).checkpoint is not None


def test_what_a_kill_left_of_a_deletion_is_deleted_and_hinders_no_other(tmp_path: Path) -> None:
    study = complete_trials(tmp_path, [2.0, 1.0], keep_best_trials=2)
    leftover = study.dir / "checkpoints" / ".0.deleted" / "step_00000003"
    leftover.mkdir(parents=True)
    Checkpoints(study).close()
    assert sorted(path.name for path in (study.dir / "checkpoints").iterdir()) == ["0", "1"]


# -- without Ray --------------------------------------------------------------------------------------------------


def drive_one(controller: Any) -> None:
    assignment = controller.next_assignment("a")
    assert assignment is not None
    hear_all(controller, "a", assignment)


def hear_all(controller: Any, tune_id: str, assignment: Assignment) -> None:
    for heard in heard_of(assignment):
        if not controller.hear(tune_id, heard):
            return


def heard_of(assignment: Assignment) -> Iterator[Heard]:
    from tests.test_controller import reports

    return reports(assignment)


def run_python(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )


# -- a record in a database -----------------------------------------------------------------------------------------


def in_database(folder: Path) -> dict[str, Any]:
    return {"storage": f"sqlite:///{folder}/record.db"}


def test_a_name_that_the_database_knows_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    new_study(tmp_path / "a", search=in_database(tmp_path)).close()
    with pytest.raises(StudyExistsError, match="--name tiny-2"):
        new_study(tmp_path / "b", search=in_database(tmp_path))
    assert list((tmp_path / "b").glob("studies/*")) == []


def test_a_study_that_was_killed_before_the_database_knew_it_is_gone_on_with(tmp_path: Path) -> None:
    study = new_study(tmp_path, search=in_database(tmp_path))
    optuna.delete_study(study_name="tiny", storage=study.optuna_study._storage)
    (study.dir / UNRECORDED).write_text("token")
    study.close()
    remedy = str(refused(StudyDamagedError, lambda: Study.open(tmp_path / "studies", "tiny")))
    assert f"tune resume tiny --root {tmp_path / 'studies'}" in remedy
    Study.open(tmp_path / "studies", "tiny", writable=True).close()
    assert Study.open(tmp_path / "studies", "tiny").status()["state"] == "interrupted"
    assert not (study.dir / UNRECORDED).exists()


def test_a_study_cut_off_in_its_making_does_not_take_over_another_one(tmp_path: Path) -> None:
    study = new_study(tmp_path, search=in_database(tmp_path))
    (study.dir / UNRECORDED).write_text("of another folder")
    study.close()
    with pytest.raises(StudyExistsError, match="holds a study 'tiny' already"):
        Study.open(tmp_path / "studies", "tiny", writable=True)


def test_a_database_that_has_lost_the_study_is_refused_and_not_begun_anew(tmp_path: Path) -> None:
    study = new_study(tmp_path, search=in_database(tmp_path))
    study.close()
    (tmp_path / "record.db").unlink()
    for writable in (False, True):
        with pytest.raises(StudyDamagedError, match=r"record\.db: the record holds no study named 'tiny'"):
            Study.open(tmp_path / "studies", "tiny", writable=writable)


# -- names ------------------------------------------------------------------------------------------------------


def test_every_remedy_of_a_renamed_study_names_the_folder_it_has_now(tmp_path: Path, root: Path) -> None:
    (root / "tiny").rename(root / "renamed")
    place = f"renamed --root {root}"
    study = Study.open(root, "renamed", writable=True)
    assert study.status()["study"] == "renamed"
    remedies = [str(refused(StudyLockedError, lambda: Study.open(root, "renamed", writable=True)))]
    controller = open_controller(study)
    assignment = controller.next_assignment("a")
    assert assignment is not None
    cause = Cause(Failure.ERROR, "No space left on device")
    controller.hear("a", Heard(assignment.number, (), (), Ended(assignment.number, "unsaved", cause=cause)))
    remedies.append(str(controller.failure))
    os.truncate(study.dir / "optuna.journal", 10)
    remedies.append(str(refused(StudyAbortedError, lambda: study.note_study("key", 1))))
    study.close()
    assert [place in remedy for remedy in remedies] == [True] * 3, remedies


def test_the_remedy_after_failures_alike_names_the_folder_of_now(root: Path) -> None:
    (root / "tiny").rename(root / "renamed")
    controller = open_controller(Study.open(root, "renamed", writable=True))
    for turn in range(3):
        assignment = controller.next_assignment(str(turn))
        assert assignment is not None
        cause = Cause(Failure.ERROR, "the same")
        ended = Ended(assignment.number, "failed", cause=cause)
        controller.hear(str(turn), Heard(assignment.number, (), (), ended))
    assert f"tune resume renamed --root {root}" in str(controller.failure)
    controller.study.close()


def refused(kind: type[TuneError], action: Callable[[], Any]) -> TuneError:
    with pytest.raises(kind) as kept:
        action()
    return kept.value
