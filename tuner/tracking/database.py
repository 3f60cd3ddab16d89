"""The SQLite file that MLflow keeps its runs in: made as a whole, by copying what was made once on this machine."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import filelock

from tuner.storage.place import cache_folder
from tuner.tracking.target import ARTIFACTS_NAME, newest_schema, sqlite_uri
from tuner.tracking.values import version

LOCK_TIMEOUT_S = 120


def make_database(path: Path) -> None:
    """Make a SQLite file with MLflow's tables where there is none, as a whole.

    MLflow takes a second for the tables, and a file that a kill or a full disk has left with some of them is refused
    ever after.
    """
    if path.exists() and path.stat().st_size:
        return
    draft, template = path.with_name(f"{path.name}.new"), _template()
    if not _copied(template, draft):
        # Where there is no room for it the tables are made in place.
        with suppress(Exception):
            _make_template(template)
        if not _copied(template, draft):
            _make_tables(draft)
    draft.replace(path)


def relocate_artifacts(database: Path) -> None:
    """Make the artifact folders beside `database` known under their present path.

    MLflow stores absolute paths, so a studies folder that was moved would go on writing to its old place.
    """
    here = f"{database.parent / ARTIFACTS_NAME}/"
    marker = f"/{ARTIFACTS_NAME}/"
    query = "SELECT DISTINCT artifact_location FROM experiments WHERE artifact_location LIKE ?"
    with closing(sqlite3.connect(database, timeout=20)) as connection, connection:
        for (location,) in connection.execute(query, (f"/%{marker}%",)).fetchall():
            old = location[: location.index(marker) + len(marker)]
            if old == here or Path(old).exists():
                continue
            for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                moved = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                connection.execute(moved, (here, len(old) + 1, len(old), old))


def _template() -> Path:
    return cache_folder() / "mlflow" / f"{version('mlflow')}-{newest_schema()}.db"


def _make_template(template: Path) -> None:
    template.parent.mkdir(parents=True, exist_ok=True)
    draft = template.with_name(f"{template.name}.new")
    with filelock.FileLock(f"{template}.lock", LOCK_TIMEOUT_S):
        # MLflow would try for 100 seconds where nothing can be written.
        draft.touch()
        _make_tables(draft)
        draft.replace(template)


def _make_tables(path: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.unlink(missing_ok=True)
    store: Any = SqlAlchemyStore(sqlite_uri(path), str(path.parent / ARTIFACTS_NAME))  # type: ignore[no-untyped-call]
    store.engine.dispose()


def _copied(template: Path, draft: Path) -> bool:
    """Whether `draft` is a whole database of this MLflow's schema now."""
    try:
        shutil.copyfile(template, draft)
        with closing(sqlite3.connect(draft)) as connection, connection:
            is_whole = connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
            schema = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            made = {"now": time.time_ns() // 1_000_000}
            connection.execute("UPDATE experiments SET creation_time = :now, last_update_time = :now", made)
        relocate_artifacts(draft)
    except (OSError, sqlite3.Error):
        return False
    return is_whole and bool(schema == (newest_schema(),))
