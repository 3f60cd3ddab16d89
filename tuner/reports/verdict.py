"""One statement about a study, and how the values of its trials are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tuner.record.record import TrialRecord

GOOD, NOTE, WARN = "good", "note", "warn"
# A group of fewer trials is not spoken of.
MIN_IN_GROUP = 3


@dataclass(frozen=True)
class Verdict:
    """One statement about a study.

    Attributes:
        about: gain, confirmed, edge, effect, rungs, diverged or noise.
        tone: good, note or warn.
        figure: The number it rests on, as text.
        text: The statement.
    """

    about: str
    tone: str
    figure: str
    text: str


def at_step(record: TrialRecord, step: int, worst: float = math.inf) -> float | None:
    """The first report from `step` on, `worst` where it diverged there; None where the trial did not get there."""
    for at, value in record.reports.items():
        if at >= step:
            return value if math.isfinite(value) else worst
    return None


def final(record: TrialRecord) -> float | None:
    """The value of a complete trial; a loop of the user's own may end before max_t."""
    return record.value if record.state == "COMPLETE" else None
