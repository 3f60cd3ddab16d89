"""How MLflow's pages show a study: names that they know, and the view of its trials. Imports no mlflow."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tuner.tracking.values import TAG_CHARS, metric_key

if TYPE_CHECKING:
    from tuner.study_file.spec import StudySpec

LEADERBOARD = "leaderboard.json"
SHARED_VIEW = "mlflow.sharedViewState."
NOTE = "mlflow.note.content"
# MLflow shows a JSON file of columns and rows as a table when this tag names it.
TABLES = "mlflow.loggedArtifacts"


def shared_view(study_id: str, spec: StudySpec) -> str:
    """The page of a study's trials, best first, with what was searched, in the form that MLflow's own pages share.

    Kept as a tag of the experiment, named `SHARED_VIEW` and the study's id.
    """
    parameters = [f"params.`{metric_key(name)}`" for name in spec.search_space.parameters]
    view: dict[str, Any] = {
        "searchFilter": trials_filter(study_id),
        "orderByKey": "metrics.`objective`",
        "orderByAsc": spec.objective.mode == "min",
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": ["attributes.`Duration`", "tags.`tune.state`", "metrics.`objective`", *parameters],
    }
    while len(json.dumps(view)) > TAG_CHARS:
        view["selectedColumns"] = view["selectedColumns"][:-1]
    return json.dumps(view)


def trials_filter(study_id: str) -> str:
    """A search that finds the trials of one study."""
    return f"tags.`tune.study_id` = '{study_id}' and tags.`tune.kind` = 'trial'"
