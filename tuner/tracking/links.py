"""Where MLflow's pages show a study and its trials. Imports no mlflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from tuner.commands import command
from tuner.errors import InputError
from tuner.tracking.target import Target, resolve_target
from tuner.tracking.views import trials_filter

if TYPE_CHECKING:
    from tuner.record.study import Study

IDENTITY = "mlflow.json"


def study_target(study: Study) -> Target:
    """The store of a study."""
    return resolve_target(study.spec, study.dir.absolute().parent)


def target_to_show(root: Path, study: Study | None) -> Target:
    """The store of a study, or the one that studies under `root` use unless they name another.

    Raises:
        InputError: There is nothing to show.
    """
    if study is not None and not study.spec.mlflow.enabled:
        raise InputError(
            f"study {study.dir.name!r} has mlflow.enabled: false", f"See it: {command('trials', study.dir)}"
        )
    target = resolve_target(None, root) if study is None else study_target(study)
    # A server would make an empty one.
    if target.database is not None and not target.database.exists():
        raise InputError(f"there is no MLflow store at {target.database} yet", "A study makes it: tune run FILE")
    return target


def server_url(target: Target) -> str | None:
    """The address of a store that is a server with pages of its own; None for a database."""
    return target.shown.rstrip("/") if target.scheme in ("http", "https") else None


def study_url(study: Study, base: str, *, charts: bool = False) -> str:
    """The page of a study's trials, best first, on the server at `base`; all experiments while it has none there.

    Args:
        study: The study.
        base: Address of the server.
        charts: Their learning curves instead of the table.
    """
    identity = _identity(study.dir)
    if "experiment_id" not in identity:
        return base
    query = {"workflowType": "machine_learning"}
    if "view" in identity and not charts:
        query |= {"viewStateShareKey": identity["view"]}
    else:
        query |= {"searchFilter": trials_filter(identity.get("study_id", "")), "orderByKey": "metrics.`objective`"}
        query |= {"orderByAsc": "true" if study.spec.objective.mode == "min" else "false"}
        query |= {"compareRunsMode": "CHART"} if charts else {}
    return f"{base}/#/experiments/{identity['experiment_id']}/runs?{urlencode(query, quote_via=quote)}"


def run_url(study: Study, base: str, run_id: str) -> str:
    """The page of a trial's run on the server at `base`."""
    experiment = _identity(study.dir).get("experiment_id", "0")
    return f"{base}/#/experiments/{experiment}/runs/{run_id}?workflowType=machine_learning"


def _identity(study_dir: Path) -> dict[str, str]:
    try:
        found = json.loads((study_dir / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
