"""The journal file under Optuna's storage: who reads it while it is written, and what a failed write leaves."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tests.small_disk import small_disk
from tuner.errors import StudyAbortedError
from tuner.record.journal import _WholeLines, cut_torn_line, open_journal

pytestmark = pytest.mark.timeout(20)
ENTRIES: list[dict[str, Any]] = [{"n": 1}, {"text": "L\u00f6ss \u2028 \u2713"}, {"value": float("inf")}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    _WholeLines(tmp_path / "journal").append_logs(ENTRIES)
    return tmp_path / "journal"


def append(path: Path, text: bytes) -> None:
    with open(path, "ab") as file:
        file.write(text)


def test_entries_are_read_from_any_number_on_also_from_an_earlier_one(path: Path) -> None:
    backend = _WholeLines(path)
    for first in (0, 2, 1, 3, 0):
        assert list(backend.read_logs(first)) == ENTRIES[first:]


def test_whoever_stops_reading_goes_on_where_he_stopped(path: Path) -> None:
    backend = _WholeLines(path)
    assert next(iter(backend.read_logs(0))) == ENTRIES[0]
    assert list(backend.read_logs(1)) == ENTRIES[1:]


def test_two_storages_of_one_process_see_what_the_other_writes(path: Path) -> None:
    one, other = _WholeLines(path), _WholeLines(path)
    assert list(other.read_logs(0)) == ENTRIES
    one.append_logs([{"n": 4}])
    assert list(other.read_logs(3)) == [{"n": 4}]
    other.append_logs([{"n": 5}])
    assert list(one.read_logs(3)) == [{"n": 4}, {"n": 5}]


def test_a_line_that_is_half_there_is_read_once_it_is_whole(path: Path) -> None:
    backend = _WholeLines(path)
    for part in (b'{"n"', b": 4"):
        append(path, part)
        assert list(backend.read_logs(0)) == ENTRIES
    append(path, b"}\n")
    assert list(backend.read_logs(3)) == [{"n": 4}]


def test_a_line_that_becomes_whole_while_it_is_read_is_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer goes on between two looks of the reader."""

    class Unhurried(io.BufferedReader):
        def __init__(self, path: Path, _: str) -> None:
            super().__init__(io.FileIO(path))

        def __next__(self) -> bytes:
            line = super().__next__()
            if not line.endswith(b"\n"):
                append(path, b": 4}\n")
            return line

    append(path, b'{"n"')
    backend = _WholeLines(path)
    monkeypatch.setattr("tuner.record.journal.open", Unhurried, raising=False)
    assert list(backend.read_logs(0)) == ENTRIES
    assert list(backend.read_logs(3)) == [{"n": 4}]


def test_a_damaged_line_is_told_unless_it_is_the_last(path: Path) -> None:
    append(path, b"\0\0\xff\n")
    assert list(_WholeLines(path).read_logs(0)) == ENTRIES
    append(path, b'{"n": 4}\n')
    with pytest.raises(ValueError, match="Expecting value"):
        list(_WholeLines(path).read_logs(0))


def test_a_journal_that_was_cut_short_takes_nothing_more(path: Path) -> None:
    backend = _WholeLines(path)
    assert list(backend.read_logs(0)) == ENTRIES
    os.truncate(path, 3)
    with pytest.raises(StudyAbortedError, match="cut short"):
        backend.append_logs([{"n": 4}])
    assert path.stat().st_size == 3


def test_a_full_disk_leaves_whole_lines_and_takes_more_once_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        backend = _WholeLines(tmp_path / "disk" / "journal")
        backend.append_logs(ENTRIES)
        disk.fill()
        with pytest.raises(StudyAbortedError, match="No space left"):
            backend.append_logs([{"text": "x" * 10_000}] * 2)
        assert list(backend.read_logs(0)) == ENTRIES
        disk.grow()
        backend.append_logs([{"n": 4}])
        assert list(_WholeLines(tmp_path / "disk" / "journal").read_logs(3)) == [{"n": 4}]


def test_optunas_own_backend_and_this_one_read_what_the_other_writes(tmp_path: Path) -> None:
    path, name = tmp_path / "journal", "\u0142oss"
    optunas: Any = JournalStorage(JournalFileBackend(str(path)))
    study = optuna.create_study(study_name=name, storage=optunas)
    study.add_trial(optuna.trial.create_trial(value=1.0))
    ours = optuna.load_study(study_name=name, storage=open_journal(path))
    ours.set_user_attr("note", "\u2713")
    ours.add_trial(optuna.trial.create_trial(value=float("inf")))
    append(path, b'{"op_code": 4, "stu')
    cut_torn_line(path)
    assert all(json.loads(line) for line in path.read_bytes().splitlines())
    for storage in (optunas, JournalStorage(JournalFileBackend(str(path))), open_journal(path)):
        again = optuna.load_study(study_name=name, storage=storage)
        assert ([trial.value for trial in again.trials], again.user_attrs) == ([1.0, float("inf")], {"note": "\u2713"})
