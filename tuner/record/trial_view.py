"""Everything about one trial: what the record says, and what lies on disk."""

from __future__ import annotations

import datetime as dt
import math
from typing import TYPE_CHECKING, Any

from trainables.checkpoint_dir import is_complete, step_of
from tuner.commands import command
from tuner.display import outcomes
from tuner.record.log_view import log_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.record.record import TrialRecord
    from tuner.record.study import Study


def describe(study: Study, record: TrialRecord) -> dict[str, Any]:
    """The JSON shape of `tune show`: that of a trial, and more."""
    return record.to_json() | {
        "default_value": study.default_value,
        "seconds": seconds(record),
        "attempts": record.attempts,
        "workers": list(record.workers) or [study.spec.scaling.max_workers],
        "failure": failure(record),
        "reports": {str(step): value if math.isfinite(value) else None for step, value in record.reports.items()},
        "checkpoints": [_checkpoint(path) for path in _checkpoint_dirs(study, record.number)],
        "logs": [str(study.log_path(record.number, rank).absolute()) for rank in log_ranks(study, record.number)],
        "mlflow": outcomes.mlflow_place(study, record),
        "reproduce": command("reproduce", study.dir, str(record.number), "--run"),
    }


def seconds(record: TrialRecord) -> float | None:
    """From a trial's start to its end, or until now while it runs."""
    if record.started is None:
        return None
    ended = dt.datetime.fromisoformat(record.ended) if record.ended else dt.datetime.now(dt.UTC)
    return round((ended - dt.datetime.fromisoformat(record.started)).total_seconds(), 3)


def failure(record: TrialRecord) -> str | None:
    """The class of a failed trial's failure: diverged, out of memory, error, lost or preempted."""
    if record.state != "FAILED" or record.reason is None:
        return None
    return "diverged" if record.reason.startswith("diverged") else record.reason.partition(":")[0]


def _checkpoint_dirs(study: Study, number: int) -> list[Path]:
    root = study.dir.absolute() / "checkpoints" / str(number)
    return sorted((path for path in root.glob("step_*") if path.suffix == ""), key=step_of)


def _checkpoint(path: Path) -> dict[str, Any]:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return {"path": str(path), "step": step_of(path), "bytes": size, "complete": is_complete(path)}
