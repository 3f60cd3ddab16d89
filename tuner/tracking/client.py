"""An MLflow client that fails fast, stays quiet, and shares a new store with others. Background thread only."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING
from urllib.parse import quote

import filelock

from tuner.tracking.database import LOCK_TIMEOUT_S, make_database, relocate_artifacts
from tuner.tracking.target import Target

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# A call on a dead server must not hang for minutes: the tracker retries by itself. MLflow would also print the
# address of every run on stdout, and report its use over the network.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}
SEARCH_PAGE = 5000


def set_environment() -> None:
    """Settle what MLflow reads when it is imported, but for what the user has settled."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)


def open_client(target: Target) -> MlflowClient:
    """Import mlflow and connect; a new SQLite file gets its tables.

    Raises:
        OSError: or MLflow's own exceptions, when the store cannot be reached now.
    """
    set_environment()
    from mlflow import MlflowClient

    # Its errors come back as exceptions and are told once; its log would repeat each with a traceback.
    for name, level in (("mlflow", logging.CRITICAL), ("alembic", logging.ERROR), ("urllib3", logging.ERROR)):
        logging.getLogger(name).setLevel(level)
    if target.database is not None:
        target.database.parent.mkdir(parents=True, exist_ok=True)
    # Two processes that make the tables of one file at once both fail; MLflow guards only its own server.
    with filelock.FileLock(f"{target.database}.lock", LOCK_TIMEOUT_S) if target.database else nullcontext():
        if target.database is not None:
            make_database(target.database)
        client = MlflowClient(tracking_uri=target.uri)
        if target.database is not None:
            relocate_artifacts(target.database)
    return client


def experiment_id(client: MlflowClient, target: Target) -> str:
    """The id of the experiment, which is made if there is none of that name."""
    if target.experiment_id is not None:
        return str(client.get_experiment(target.experiment_id).experiment_id)
    assert target.experiment is not None
    found = client.get_experiment_by_name(target.experiment)
    if found is not None and found.lifecycle_stage != "active":
        restore = f"mlflow experiments restore --experiment-id {found.experiment_id}"
        raise RuntimeError(f"the experiment {target.experiment} has been deleted there ({restore})")
    if found is not None:
        return str(found.experiment_id)
    place = None if target.artifacts is None else str(target.artifacts / quote(target.experiment, safe=" "))
    try:
        return str(client.create_experiment(target.experiment, artifact_location=place))
    except Exception as error:
        # Another study made it in the meantime.
        found = client.get_experiment_by_name(target.experiment) if is_refusal(error) else None
        if found is None:
            raise
        return str(found.experiment_id)


def is_active_experiment(client: MlflowClient, identifier: str) -> bool:
    """Whether there is an experiment of that id that has not been deleted."""
    try:
        return bool(client.get_experiment(identifier).lifecycle_stage == "active")
    except Exception as error:
        if not is_refusal(error):
            raise
        return False


def search_runs(client: MlflowClient, experiment: str, tags: Mapping[str, str]) -> list[Run]:
    """All runs with these tags, oldest first."""
    query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    found: list[Run] = []
    token = None
    while True:
        page = client.search_runs(
            [experiment], query, max_results=SEARCH_PAGE, order_by=["start_time"], page_token=token
        )
        found.extend(page)
        token = page.token
        if not token:
            return found


def is_refusal(error: Exception) -> bool:
    """Whether sending the same again can never work; anything else may pass, like a server that is down."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code in REFUSALS
    return not isinstance(error, OSError)
