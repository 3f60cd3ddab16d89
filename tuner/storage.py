"""Where the record lives: Optuna's journal file in the study folder, or a database the study names."""

from __future__ import annotations

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
    # Imported here, since only the verbs that need the record shall pay for Optuna.
    from tuner.journal import cut_torn_line, open_journal

    if writable:
        cut_torn_line(path)
    return open_journal(path)


def create_journal(study_dir: Path) -> BaseStorage:
    """Start the journal of a new study."""
    from tuner.journal import open_journal

    return open_journal(study_dir / JOURNAL)


def _open_database(url: str) -> BaseStorage:
    from optuna.storages import RDBStorage

    try:
        return RDBStorage(url)
    except Exception as error:  # SQLAlchemy, the driver and the server each raise their own kinds
        summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StudyDamagedError(
            f"search.storage: cannot open {url}: {summary}", "Check the URL and that the server is up."
        ) from error
