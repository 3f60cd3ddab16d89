"""What tables say of a trial and of a study: names and words, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tuner import text
from tuner.display import outcomes, tables

if TYPE_CHECKING:
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study
    from tuner.reports.confirmation import Confirmation


def of_best(study: Study, record: TrialRecord, found: Confirmation | None) -> dict[str, Any]:
    """The best trial, and what came of its confirmation."""
    facts = {
        "study": study.name,
        "trial": f"{record.number}, {record.state} at step {record.step}",
        study.spec.objective.metric: f"{text.measured(record.value)}{outcomes.against_default(study, record)}",
    }
    facts |= {f"  {name}": text.parameter(value, width=80) for name, value in record.params.items()}
    if found is not None:
        facts["confirmed"] = " ".join(outcomes.confirmed_words(study, found))
    place = outcomes.mlflow_place(study, record)
    run = " ".join(filter(None, [record.mlflow_run_id, place and f"({place})"]))
    return facts | {"checkpoint": record.checkpoint or text.MISSING, "mlflow run": run or text.MISSING}


def of_trial(study: Study, record: TrialRecord, known: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that `trial_view` knows of a trial, without what is empty."""
    metric, tries = study.spec.objective.metric, record.attempts
    facts: dict[str, Any] = {
        "study": study.spec.study,
        "trial": f"{record.number}, {record.state} at step {record.step} of {study.spec.max_t}",
        metric: f"{text.measured(record.value)}{outcomes.against_default(study, record)}",
        "reason": record.reason,
    }
    facts |= {f"  {name}": text.parameter(value, width=80) for name, value in record.params.items()}
    facts |= {
        "curve": _curve(record),
        "time": f"{text.duration(known['seconds'])}{'' if tries < 2 else f', started {tries} times'}",
        "workers": ", then ".join(map(str, record.workers)),
        "started": record.started,
        "checkpoints": "\n".join(map(_checkpoint_words, known["checkpoints"])),
        "logs": "\n".join(known["logs"]),
        "mlflow run": record.mlflow_run_id,
        "  see it": known["mlflow"],
        "again": known["reproduce"],
    }
    return {name: value for name, value in facts.items() if value}


def _curve(record: TrialRecord) -> str:
    (first, *_), values = (list(record.reports) or [0]), list(record.reports.values())
    if len(values) < 2:
        return ""
    ends = f"{text.measured(values[0])} at step {first}, {text.measured(values[-1])} at step {record.step}"
    return f"{text.curve(values)}\n{ends}"


def _checkpoint_words(found: Mapping[str, Any]) -> str:
    return f"{found['path']}  {text.num_bytes(found['bytes'])}{'' if found['complete'] else ', not complete'}"


def of_status(state: Mapping[str, Any]) -> dict[str, Any]:
    """A study's status in words."""
    return {
        "study": state["study"],
        "state": tables.state(state["state"]),
        "trials": text.counts(state["counts"]),
        "best": _best_words(state["best"]),
        "slots": text.MISSING if state["slots"] is None else state["slots"],
        "elapsed": text.duration(state["elapsed_s"]),
        "time training": text.percent(state["training_share"]),
    }


def _best_words(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return text.MISSING
    return f"{text.measured(record['value'])} (trial {record['number']})"
