"""What is sent to MLflow, as MLflow takes it: keys, parameters, points, tags and summaries. Imports no mlflow."""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import math
import os
import platform
import posixpath
import re
import subprocess
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.study_file.spec import StudySpec

CONFIG = "config.json"
# MLflow's limit for a parameter, and well under its limit for a tag.
PARAM_CHARS, TAG_CHARS, KEY_CHARS = 6000, 5000, 250
VERSIONS = ("ray", "torch", "transformers", "optuna", "mlflow")

Points = list[tuple[int, dict[str, float]]]


def points(metrics: Mapping[str, Any], history: Iterable[Mapping[str, Any]]) -> tuple[Points, bool]:
    """The points of one report, and whether anything in it was not finite.

    A metric that `history` has for every step is taken from there alone, so that no step has two values; NaN and
    infinities are left out, MLflow would store them as 0 and the largest double.

    Args:
        metrics: One report: `step` and its values.
        history: One entry a step since the last report: `step` and its values.
    """
    rows = [dict(row) for row in history]
    covered = set().union(*rows) if rows else set()
    rows.append({key: value for key, value in metrics.items() if key not in covered or key == "step"})
    found, is_finite = [], True
    for row in rows:
        step = row.pop("step", None)
        if step is None:
            continue
        numbers = {metric_key(key): number for key, value in row.items() if (number := _number(value)) is not None}
        kept = {key: number for key, number in numbers.items() if math.isfinite(number)}
        is_finite = is_finite and len(kept) == len(numbers)
        found.append((int(step), kept))
    return found, not is_finite


def metric_key(name: str) -> str:
    """The nearest name MLflow accepts for a metric, parameter or tag."""
    allowed = re.sub(r"[^\w\-. :/]", "_", str(name), flags=re.ASCII)[:KEY_CHARS]
    return posixpath.normpath(allowed).lstrip("./") or "_"


def params(values: Mapping[str, Any]) -> dict[str, str]:
    """Searched parameters as text; one longer than MLflow takes becomes a pointer to the configuration artifact."""
    return {metric_key(key): _param(value) for key, value in values.items()}


def tags(values: Mapping[str, Any]) -> dict[str, str]:
    """Tags as text; those that are None are left out."""
    return {metric_key(key): _text(value)[:TAG_CHARS] for key, value in values.items() if value is not None}


def whole_config(spec: StudySpec, searched: Mapping[str, Any]) -> str:
    """The trial's complete training configuration as JSON, every default of a built-in trainable written out."""
    if spec.is_custom:
        values: Any = spec.train_values(dict(searched))
    else:
        values = spec.train_config(dict(searched)).model_dump(mode="json")
    return json.dumps(values, indent=1, default=str)


def environment_tags(spec: StudySpec) -> dict[str, str]:
    """Code, versions, hardware and seed; costs a call of git and reads package metadata, imports nothing."""
    found = {
        "mlflow.user": getpass.getuser(),
        "seed": spec.search.seed,
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "version.python": platform.python_version(),
    }
    return tags(found | git_tags() | {f"version.{name}": version(name) for name in VERSIONS})


def git_tags() -> dict[str, Any]:
    """The commit checked out in the working directory and whether tracked files differ; empty outside git."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    commit = done.stdout.strip()
    if not commit:
        return {}
    return {"mlflow.source.git.commit": commit.removesuffix("-dirty"), "git.dirty": commit.endswith("-dirty")}


def parent_status(summary: Mapping[str, Any]) -> str:
    """MLflow's status of the parent run: FINISHED, KILLED when the study was cut short, FAILED when no trial worked."""
    counts = summary.get("counts") or {}
    if counts.get("FAILED") and not counts.get("COMPLETE") and not counts.get("PRUNED"):
        return "FAILED"
    return "FINISHED" if summary.get("state", "finished") == "finished" else "KILLED"


def flat_summary(summary: Mapping[str, Any], metric: str) -> tuple[dict[str, float], dict[str, str], int]:
    """What a study came to: metrics, tags, and the number of ended trials, which serves as the metrics' step.

    Parameters of a run cannot change in MLflow, but the best trial can when a study goes on: its parameters are tags.
    """
    counts = summary.get("counts") or {}
    best = summary.get("best") or {}
    numbers = {f"trials_{state.lower()}": count for state, count in counts.items()}
    numbers |= {key: value for key, value in summary.items() if _number(value) is not None}
    numbers |= {f"best_{metric}": best.get("value"), "hours": (_number(summary.get("elapsed_s")) or 0.0) / 3600}
    texts: dict[str, Any] = {key: value for key, value in summary.items() if isinstance(value, str)}
    texts |= {"best_trial": best.get("number"), "best_checkpoint": best.get("checkpoint")}
    texts |= {f"best.{key}": value for key, value in (best.get("params") or {}).items()}
    found = {metric_key(key): number for key, value in numbers.items() if (number := _number(value)) is not None}
    finite = {key: number for key, number in found.items() if math.isfinite(number)}
    return finite, tags(texts), sum(count for state, count in counts.items() if state != "RUNNING")


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, str):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _param(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= PARAM_CHARS else f"({len(text)} characters: see {CONFIG})"


def _text(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, dict | list | tuple) else str(value)


def version(package: str) -> str | None:
    """Installed version of a package, None when it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
