"""Which MLflow store and experiment a study writes to, and whether they can be used. Imports no mlflow.

`import mlflow` takes over a second, so what can be known without it is found out here, before anything starts.
"""

from __future__ import annotations

import base64
import functools
import http.client
import importlib.metadata
import importlib.util
import json
import os
import re
import sqlite3
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from tuner.errors import TrackingError

if TYPE_CHECKING:
    from tuner.study_file.spec import StudySpec

DATABASE_NAME, ARTIFACTS_NAME = "mlflow.db", "mlartifacts"
SERVER_TIMEOUT_S = 3.0
# SQLAlchemy's default driver of each database; `postgresql+psycopg` names another.
DRIVERS = {"postgresql": "psycopg2", "mysql": "MySQLdb", "mssql": "pyodbc"}


@dataclass(frozen=True)
class Target:
    """Where the runs of one study go.

    Attributes:
        uri: Tracking URI, absolute where it names a file.
        experiment: Name of the experiment; made when it does not exist. None when `experiment_id` is given.
        experiment_id: Id of an existing experiment.
        run_id: An existing run to use as the study's parent run; its experiment then holds the trials too.
        database: The SQLite file, None for any other store.
        artifacts: Folder for the artifacts of new experiments; None where a server decides.
    """

    uri: str
    experiment: str | None
    experiment_id: str | None
    run_id: str | None
    database: Path | None
    artifacts: Path | None

    @property
    def scheme(self) -> str:
        """`http`, `sqlite`, `postgresql`, ...; empty for a plain path."""
        return self.uri.split(":")[0].split("+")[0] if ":" in self.uri else ""

    @property
    def shown(self) -> str:
        """The URI without a password, for messages."""
        return re.sub(r"//[^/@]*@", "//***@", self.uri)


def resolve_target(spec: StudySpec | None, root: Path, environ: Mapping[str, str] = os.environ) -> Target:
    """Settle the precedence: the study file, then MLflow's environment variables, then a SQLite file in `root`.

    Without any name the experiment is called like the study: `tune ui` and MLflow's own page then show one study
    at a time, and two runs of the same study in different roots still meet on a shared server. Without a study the
    target names no experiment.
    """
    uri = (
        (spec and spec.mlflow.tracking_uri)
        or environ.get("MLFLOW_TRACKING_URI")
        or sqlite_uri(root.absolute() / DATABASE_NAME)
    )
    named = (spec and spec.mlflow.experiment) or environ.get("MLFLOW_EXPERIMENT_NAME")
    experiment_id = None if named else environ.get("MLFLOW_EXPERIMENT_ID") or None
    database = _database(uri)
    if database is not None:
        uri = sqlite_uri(database)
    home = database.parent if database else root.absolute()
    return Target(
        uri=uri,
        experiment=None if experiment_id else named or (None if spec is None else spec.study),
        experiment_id=experiment_id,
        run_id=environ.get("MLFLOW_RUN_ID") or None,
        database=database,
        # A client of a database keeps artifacts itself, and MLflow's default is ./mlruns wherever one stands.
        artifacts=None if uri.startswith(("http", "databricks")) else home / ARTIFACTS_NAME,
    )


def sqlite_uri(path: Path) -> str:
    """The URI of a SQLite file; SQLAlchemy unquotes the path and ends it at a question mark."""
    return "sqlite:///" + str(path).replace("%", "%25").replace("?", "%3F")


def check_target(target: Target) -> list[str]:
    """See whether the store can be used; takes milliseconds, or `SERVER_TIMEOUT_S` for a server that is silent.

    Returns:
        Warnings: a server that does not answer now holds up nothing.

    Raises:
        TrackingError: Writing there can never work.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise TrackingError("mlflow is not installed", "pip install mlflow, or set mlflow.enabled: false.")
    if target.scheme in ("", "file") and not target.uri.startswith(("databricks", "uc")):
        _refuse_file_store(target)
    elif target.database is not None:
        _check_sqlite(target, target.database)
    elif target.scheme in ("http", "https"):
        return _check_server(target)
    elif target.uri.startswith("sqlite:"):
        raise TrackingError(f"mlflow: {target.uri} keeps nothing", "Name a file: sqlite:///mlflow.db")
    else:
        _check_driver(target)
    return []


def _database(uri: str) -> Path | None:
    if not uri.startswith("sqlite:///"):
        return None
    path = unquote(uri.removeprefix("sqlite:///").split("?")[0])
    return None if path in ("", ":memory:") else Path(path).absolute()


def _refuse_file_store(target: Target) -> None:
    if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1"):
        return
    path = unquote(urllib.parse.urlsplit(target.uri).path) if target.uri.startswith("file:") else target.uri
    folder = Path(path).absolute()
    new = sqlite_uri(folder.parent / DATABASE_NAME)
    raise TrackingError(
        f"mlflow: {target.uri} is a file store, which MLflow no longer writes to",
        f"Leave mlflow.tracking_uri and MLFLOW_TRACKING_URI out to use a SQLite file. To keep the old runs:\n"
        f"  mlflow migrate-filestore --source {folder} --target {new}\n"
        f"and set the tracking URI to {new}",
    )


def _check_driver(target: Target) -> None:
    plugins = {entry.name for entry in importlib.metadata.entry_points(group="mlflow.tracking_store")}
    if target.scheme in plugins or target.uri.startswith(("databricks", "uc")):
        return
    if target.scheme not in DRIVERS:
        known = ", ".join(["http", "https", "sqlite", *DRIVERS, "databricks", *sorted(plugins)])
        raise TrackingError(f"mlflow: {target.shown}: unknown kind of store", f"Known: {known}.")
    dialect = target.uri.split(":")[0]
    driver = dialect.partition("+")[2] or DRIVERS[target.scheme]
    if importlib.util.find_spec(driver) is None:
        raise TrackingError(f"mlflow: {target.shown} needs the Python package {driver}", f"pip install {driver}")


# -- SQLite --------------------------------------------------------------------------------------------------------


def _check_sqlite(target: Target, path: Path) -> None:
    # MLflow itself would retry a file that cannot be opened for 100 seconds.
    folder = next(parent for parent in path.parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise TrackingError(f"mlflow: {path} cannot be written", "Set mlflow.tracking_uri to a writable place.")
    if not path.exists() or path.stat().st_size == 0:
        return
    if not os.access(path, os.W_OK):
        raise TrackingError(f"mlflow: {path} is read-only", "Make it writable or set mlflow.tracking_uri.")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=1.0)) as connection:
            _check_tables(connection, target, path)
    except sqlite3.OperationalError:
        return  # locked by another writer just now: it is in use, so it works
    except sqlite3.DatabaseError as error:
        raise TrackingError(
            f"mlflow: {path} is not a readable SQLite database ({error})", "Restore it, or move it away to begin anew."
        ) from None


def _check_tables(connection: sqlite3.Connection, target: Target, path: Path) -> None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "alembic_version" in tables:
        current = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        if current is not None and current[0] != newest_schema():
            raise TrackingError(
                f"mlflow: {path} was written by another version of MLflow (schema {current[0]})",
                f"Back it up, then: mlflow db upgrade {sqlite_uri(path)}",
            )
    if "experiments" in tables and target.run_id is None:
        column, value = ("experiment_id", target.experiment_id) if target.experiment_id else ("name", target.experiment)
        query = f"SELECT experiment_id, lifecycle_stage FROM experiments WHERE {column} = ?"
        found = connection.execute(query, (value,)).fetchone()
        _check_experiment(target, None if found is None else {"experiment_id": found[0], "lifecycle_stage": found[1]})


@functools.cache
def newest_schema() -> str | None:
    """The schema that the installed MLflow reads and writes; None when that cannot be told."""
    # Alembic's head is the revision that no other one names as its predecessor; reading them costs 10 ms.
    package = importlib.util.find_spec("mlflow")
    assert package is not None
    assert package.origin is not None
    texts = [file.read_text() for file in (Path(package.origin).parent / "store/db_migrations/versions").glob("*.py")]
    found = {key: {m for text in texts for m in re.findall(rf'^{key} = "(\w+)"', text, re.M)} for key in _REVISIONS}
    heads = found["revision"] - found["down_revision"]
    return heads.pop() if len(heads) == 1 else None


_REVISIONS = ("revision", "down_revision")


def _check_experiment(target: Target, found: Mapping[str, object] | None) -> None:
    if found is None and target.experiment_id is not None:
        raise TrackingError(
            f"mlflow: there is no experiment {target.experiment_id} in {target.shown}",
            "Correct MLFLOW_EXPERIMENT_ID, or unset it.",
        )
    if found is not None and found.get("lifecycle_stage") == "deleted":
        raise TrackingError(
            f"mlflow: the experiment {target.experiment or target.experiment_id} has been deleted in {target.shown}",
            f"mlflow experiments restore --experiment-id {found['experiment_id']}, or set mlflow.experiment.",
        )


# -- a server ------------------------------------------------------------------------------------------------------


def _check_server(target: Target) -> list[str]:
    by_id = ("get", {"experiment_id": target.experiment_id})
    method, query = by_id if target.experiment_id else ("get-by-name", {"experiment_name": target.experiment})
    url = f"{target.uri.rstrip('/')}/api/2.0/mlflow/experiments/{method}?{urllib.parse.urlencode(query)}"
    try:
        request = urllib.request.Request(url, headers=_credentials())
    except ValueError as error:
        raise TrackingError(f"mlflow: {target.shown} is not a URL: {error}", "Correct mlflow.tracking_uri.") from error
    try:
        with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as answer:
            found = json.loads(answer.read())["experiment"]
    except urllib.error.HTTPError as error:
        return _refusal(target, error)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        return [f"MLflow at {target.shown} does not answer ({error}); training goes on, its runs are sent later"]
    if target.run_id is None:
        _check_experiment(target, found)
    return []


def _refusal(target: Target, error: urllib.error.HTTPError) -> list[str]:
    if error.code in (401, 403):
        # MLflow also finds credentials in files and plugins that are not looked at here.
        if _has_other_credentials():
            return []
        raise TrackingError(
            f"mlflow: {target.shown} refuses these credentials (HTTP {error.code})",
            "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN.",
        )
    if error.code == 404:
        if b"RESOURCE_DOES_NOT_EXIST" not in error.read():
            raise TrackingError(f"mlflow: {target.shown} is not an MLflow server", "Correct mlflow.tracking_uri.")
        if target.run_id is None:
            _check_experiment(target, None)
        return []
    return [f"MLflow at {target.shown} answers HTTP {error.code}; training goes on, its runs are sent later"]


def _credentials() -> dict[str, str]:
    token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
    if user:
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _has_other_credentials() -> bool:
    files = (Path.home() / ".mlflow" / "credentials", Path.home() / ".netrc")
    return "MLFLOW_TRACKING_AUTH" in os.environ or any(file.exists() for file in files)
