"""Optuna's journal file as the record of a study: one writer at a time, whole lines, damage told by its line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import BaseJournalFileLock

from tuner.commands import command
from tuner.errors import StudyAbortedError
from tuner.record.journal_view import is_entry, unreadable


def open_journal(path: Path) -> JournalStorage:
    """Open a journal, or start one where there is none.

    Raises:
        StudyDamagedError: A line cannot be read; the file is left as it is.
    """
    backend = _WholeLines(path)
    try:
        return JournalStorage(backend)
    except Exception as error:  # whatever Optuna makes of a line that it has not written
        raise unreadable(path, _damaged_line(path) or backend.num_read, error) from error


def cut_torn_line(path: Path) -> None:
    """Drop one unfinished or garbled last line: what a kill or a power cut in mid-write leaves.

    Optuna would stumble over it at the next write. A file with further damage is left as it is.
    """
    *lines, torn = path.read_bytes().split(b"\n")
    if not torn and lines and not is_entry(lines[-1]):
        torn = lines.pop() + b"\n"
    if torn and lines and is_entry(lines[-1]):
        os.truncate(path, path.stat().st_size - len(torn))


class _WholeLines(JournalFileBackend):
    """A write that fails, on a full disk say, leaves no half line for the next one to run into."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), lock_obj=_HeldElsewhere())
        self._path = path
        self.num_read = 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        for self.num_read, entry in enumerate(super().read_logs(log_number_from), start=log_number_from + 1):
            yield entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        try:
            size = self._path.stat().st_size
            # The newest is the last: a study of thousands of trials has tens of thousands.
            if size < next(reversed(self._log_number_offset.values())):
                raise OSError(errno.ESTALE, "it was cut short by somebody else")
            self._append_or_take_back(logs, size)
        except OSError as error:
            raise StudyAbortedError(
                f"{self._path} cannot be written: {error.strerror or error}",
                f"What it holds is safe. Mend the cause, then: {command('resume', self._path.parent)}",
            ) from error

    def _append_or_take_back(self, logs: list[dict[str, Any]], size: int) -> None:
        try:
            super().append_logs(logs)
        except OSError:
            os.truncate(self._path, size)
            raise


class _HeldElsewhere(BaseJournalFileLock):
    """The study's lock admits one writer already; a second lock file could only be left behind by a kill."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


def _damaged_line(path: Path) -> int | None:
    with open(path, "rb") as file:
        return next((number for number, line in enumerate(file, start=1) if not is_entry(line)), None)
