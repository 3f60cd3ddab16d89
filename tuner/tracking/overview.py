"""What the MLflow run of a study shows beyond its status: a leaderboard and a description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner import text
from tuner.display import outcomes
from tuner.record.record import ranked
from tuner.tracking.views import LEADERBOARD, NOTE

if TYPE_CHECKING:
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study

_ROWS = 200


def overview(study: Study) -> dict[str, Any]:
    """What the parent run shows beyond a study's status: its leaderboard and a description."""
    records = study.trials()
    leaders = ranked(records, study.spec.objective)
    others = [record for record in records if record not in leaders]
    return {"leaderboard": _table([*leaders, *others][:_ROWS], study), NOTE: _description(study, leaders)}


def _table(records: Sequence[TrialRecord], study: Study) -> dict[str, Any]:
    names = list(study.spec.search_space.parameters)
    rows = [
        [r.number, r.state, r.value, r.step, *(r.params.get(name) for name in names), r.reason, r.mlflow_run_id]
        for r in records
    ]
    metric = study.spec.objective.metric
    return {"columns": ["trial", "state", metric, "step", *names, "reason", "run"], "data": rows}


def _description(study: Study, leaders: Sequence[TrialRecord]) -> str:
    if not leaders:
        return "No trial has a value yet."
    best = leaders[0]
    rows = "\n".join(f"| `{name}` | {text.parameter(value, width=80)} |" for name, value in best.params.items())
    state = f"{text.counts(study.status()['counts'])}. Leaderboard: the artifact `{LEADERBOARD}`."
    return f"**{outcomes.gain(study, best)}**\n\n| parameter | best |\n|---|---|\n{rows}\n\n{state}"
