"""Where MLflow's pages show a study and its trials. Imports no mlflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from tuner.tracking_target import Target, resolve_target

if TYPE_CHECKING:
    from tuner.study import Study

IDENTITY = "mlflow.json"


def study_target(study: Study) -> Target:
    """The store of a study."""
    return resolve_target(study.spec, study.dir.absolute().parent)


def server_url(target: Target) -> str | None:
    """The address of a store that is a server with pages of its own; None for a database."""
    return target.shown.rstrip("/") if target.scheme in ("http", "https") else None


def study_url(study: Study, base: str) -> str:
    """The page of a study's runs on the server at `base`; all experiments while the study has no run there yet."""
    identity = _identity(study.dir)
    if "experiment_id" not in identity:
        return base
    url = f"{base}/#/experiments/{identity['experiment_id']}/runs"
    # An experiment of several studies (mlflow.experiment names it) shows this one's runs alone.
    wanted = f"tags.`tune.study_id` = '{identity.get('study_id', '')}'"
    return f"{url}?searchFilter={quote(wanted)}"


def run_url(study: Study, base: str, run_id: str) -> str:
    """The page of a trial's run on the server at `base`."""
    return f"{base}/#/experiments/{_identity(study.dir).get('experiment_id', 0)}/runs/{run_id}"


def _identity(study_dir: Path) -> dict[str, str]:
    try:
        found = json.loads((study_dir / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
