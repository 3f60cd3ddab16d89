"""Reports that a kill may have kept from the record: a loop runs ahead of the driver while no verdict is due.

Every checkpoint carries the newest reports, so that resuming from it leaves no gap in the record.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from trainables.checkpoint_dir import read_manifest
from tuner.execution.channel import Reported

# A loop runs ahead by what is under way to the driver: a few reports, unless the machine is choking.
NUM_KEPT = 64


class RecentReports:
    """The newest reports of one trial."""

    def __init__(self) -> None:
        self._reports: deque[dict[str, Any]] = deque(maxlen=NUM_KEPT)

    def add(self, report: Reported) -> None:
        """Keep a report in mind."""
        self._reports.append({"step": report.step, "metrics": report.metrics, "history": list(report.history)})

    def notes(self) -> dict[str, Any]:
        """What to keep with a checkpoint."""
        return {"reports": list(self._reports)}


def unrecorded(checkpoint: Path, number: int, reported_step: int) -> list[Reported]:
    """The reports a checkpoint carries that came after `reported_step`, oldest first."""
    kept = ((read_manifest(checkpoint) or {}).get("notes") or {}).get("reports", [])
    return [
        Reported(number, report["step"], report["metrics"], tuple(report["history"]), 0.0, waits=False)
        for report in kept
        if report["step"] > reported_step
    ]
