"""The objective: its value in a report, and whether that is good enough."""

from __future__ import annotations

from tuner.errors import StudyAbortedError
from tuner.execution.channel import Reported
from tuner.study_file.spec import StudySpec


def objective_of(report: Reported, spec: StudySpec) -> float:
    """The objective's value in a report.

    Raises:
        StudyAbortedError: The trainable reports something else.
    """
    metric = spec.objective.metric
    missing = [key for key in ("step", metric) if key not in report.metrics]
    if missing:
        found = ", ".join(sorted(report.metrics)) or "nothing"
        raise StudyAbortedError(
            f"the trainable does not report {missing[0]!r}; it reports {found}",
            "Every report needs `step` (optimizer steps done) and objective.metric. Change the trainable or set "
            f"objective.metric to one of these, then start again: --name {spec.study}-2",
        )
    value: object = report.metrics[metric]
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise StudyAbortedError(
            f"metric {metric!r} of trial {report.number} is {value!r}, not a number",
            f"Report objective.metric as one number, then start again: --name {spec.study}-2",
        ) from None


def reaches_target(value: float | None, spec: StudySpec) -> bool:
    """Whether a trial with this value is all that the study is for."""
    target = spec.search.target
    return target is not None and value is not None and spec.objective.sign * value <= spec.objective.sign * target
