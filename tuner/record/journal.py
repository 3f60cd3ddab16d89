"""Optuna's journal file as the record of a study: one writer at a time, whole lines, damage told by its line."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend

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


class _WholeLines(BaseJournalBackend):
    """The file as Optuna writes it, by one writer: the study's lock admits no second one.

    Optuna's own backend keeps the position of every line for the life of the process, and locks the file by a second
    one, which a kill would leave behind. Here a write that fails, on a full disk say, leaves no half line for the next
    one to run into.
    """

    def __init__(self, path: Path) -> None:
        path.touch()
        self._path = path
        self.num_read = self._num_bytes = 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        if log_number_from < self.num_read:
            self.num_read = self._num_bytes = 0
        with open(self._path, "rb") as file:
            file.seek(self._num_bytes)
            lines = iter(file)
            for line in lines:
                if not line.endswith(b"\n"):
                    return  # its writer was killed, or is not done
                try:
                    entry = json.loads(line)
                except ValueError:
                    if next(lines, None) is not None:
                        raise
                    return  # a power cut garbled the last one
                self._num_bytes += len(line)
                self.num_read += 1
                if self.num_read > log_number_from:
                    yield entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        text = "".join(f"{json.dumps(log, separators=(',', ':'))}\n" for log in logs)
        try:
            size = self._path.stat().st_size
            if size < self._num_bytes:
                raise OSError(errno.ESTALE, "it was cut short by somebody else")
            self._append_or_take_back(text.encode(), size)
        except OSError as error:
            raise StudyAbortedError(
                f"{self._path} cannot be written: {error.strerror or error}",
                f"What it holds is safe. Mend the cause, then: {command('resume', self._path.parent)}",
            ) from error

    def _append_or_take_back(self, text: bytes, size: int) -> None:
        try:
            with open(self._path, "ab") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            os.truncate(self._path, size)
            raise


def _damaged_line(path: Path) -> int | None:
    with open(path, "rb") as file:
        return next((number for number, line in enumerate(file, start=1) if not is_entry(line)), None)
