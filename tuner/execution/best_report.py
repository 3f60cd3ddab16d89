"""Which report of a trial is its best so far: with `objective.scope: best` its checkpoint must stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainables.checkpoint_dir import step_dir
from tuner.execution.channel import Assignment
from tuner.study_file.sections import sign_of


class BestReport:
    """Follows the reports of one trial; with `scope: last` no report is special.

    Args:
        assignment: The trial; its best report of earlier attempts counts.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._root = Path(assignment.checkpoint_dir)
        self._is_wanted = assignment.keep_best_report
        self._metric = assignment.metric
        self._sign = sign_of(assignment.mode)
        self._step: int | None = None
        self._value = math.inf * self._sign
        if assignment.best_report is not None:
            self._step, self._value = assignment.best_report

    def improves(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Take a report in; whether it is the best so far and its checkpoint is to be kept."""
        value = metrics.get(self._metric)
        if not self._is_wanted or not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        # A loop that passes its best report again has lost the checkpoint of it.
        if step != self._step and not self._sign * value < self._sign * self._value:
            return False
        self._step, self._value = step, value
        return True

    @property
    def report(self) -> tuple[int, float] | None:
        """Step and value of the best report, for the next attempt."""
        return None if self._step is None else (self._step, self._value)

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        """The folder that must stay, if any."""
        return () if self._step is None or not self._is_wanted else (step_dir(self._root, self._step),)
