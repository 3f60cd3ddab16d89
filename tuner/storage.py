"""Where the record lives: Optuna's journal file in the study folder, or a database the study names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import StudyDamagedError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

JOURNAL = "optuna.journal"


def open_storage(study_dir: Path, url: str | None, *, writable: bool) -> BaseStorage:
    """Open the storage of a study.

    Args:
        study_dir: The study's folder.
        url: A database URL as SQLAlchemy writes it, or None for the journal in the folder.
        writable: Whether this process writes; it must hold the study's lock then.

    Raises:
        StudyDamagedError: The journal is gone, empty or holds a line that cannot be read.
    """
    if url is not None:
        return _open_database(url)
    path = study_dir / JOURNAL
    if not path.exists() or path.stat().st_size == 0:
        raise StudyDamagedError(
            f"{path} is missing or empty, but the study's folder exists: its record was lost",
            f"Put the file back from a copy, or move {study_dir} away and run the study file again.",
        )
    if writable:
        cut_torn_line(path)
    return _open_journal(path)


def create_journal(study_dir: Path) -> BaseStorage:
    """Start the journal of a new study."""
    return _open_journal(study_dir / JOURNAL)


def cut_torn_line(path: Path) -> None:
    """Drop an unfinished last line, which a process killed in mid-write leaves and Optuna would stumble over."""
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        tail = b""
        while size > 0 and b"\n" not in tail:
            step = min(size, 65536)
            size = file.seek(size - step)
            tail = file.read(step) + tail
            file.seek(size)
        file.truncate(size + tail.rfind(b"\n") + 1)


def _open_journal(path: Path) -> BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.storages.journal._file import BaseJournalFileLock

    class HeldElsewhere(BaseJournalFileLock):
        """The study's lock admits one writer already; a second lock file could only be left behind by a kill."""

        def acquire(self) -> bool:
            return True

        def release(self) -> None:
            return None

    try:
        return JournalStorage(JournalFileBackend(str(path), lock_obj=HeldElsewhere()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise StudyDamagedError(
            f"{path}:{_damaged_line(path)}: the study's record cannot be read ({type(error).__name__})",
            "Put the file back from a copy; every line must be one JSON object as Optuna writes it.",
        ) from error


def _damaged_line(path: Path) -> int:
    with open(path, "rb") as file:
        number = 0
        for number, line in enumerate(file, start=1):
            try:
                json.loads(line)
            except ValueError:
                return number
    return number


def _open_database(url: str) -> BaseStorage:
    from optuna.storages import RDBStorage

    try:
        return RDBStorage(url)
    except Exception as error:  # SQLAlchemy, the driver and the server each raise their own kinds
        summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StudyDamagedError(
            f"search.storage: cannot open {url}: {summary}", "Check the URL and that the server is up."
        ) from error
