"""When each trial trained: events that the loops of a measurement note, and what follows from them.

Every contender notes the same events into one file, so that one function computes its figures. An event is a line
of JSON: {kind, trial, pid, ...}. kind `report` has step, begin and end (seconds since the epoch, of the steps and the
evaluation since the trial's last report), loss and is_default; `decision` and `save` have s, the seconds that a
loop waited for a verdict (`stops`: for its end) and spent on a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Event = dict[str, Any]

# Names the file where it cannot be passed on; the workers of a local cluster inherit it.
VARIABLE = "TUNER_BENCHMARK_TIMELINE"


def note(path: Path, kind: str, trial: int | str, **values: Any) -> None:
    """Append an event; one write, so that processes do not mix their lines."""
    line = json.dumps({"kind": kind, "trial": trial, "pid": os.getpid(), **values}) + "\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)


def note_report(path: Path, trial: int | str, step: int, busy_s: float, loss: float, is_default: bool) -> None:
    """Note a report that leaves the loop now."""
    end = time.time()
    note(path, "report", trial, step=step, begin=end - busy_s, end=end, loss=loss, is_default=is_default)


def read(path: Path) -> list[Event]:
    """All events, by time of being written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def default_losses(events: Sequence[Event]) -> dict[int, float]:
    """Loss at each reported step of the default trial."""
    return {event["step"]: event["loss"] for event in events if event["kind"] == "report" and event["is_default"]}


def summary(events: Sequence[Event], slots: int, last_steps: Mapping[str, int] | None = None) -> dict[str, Any]:
    """What the events say.

    Args:
        events: All of a run.
        slots: Trials at once.
        last_steps: The step at which each trial was stopped or complete; what it trained after that was of no use.

    Returns:
        efficiency: useful seconds of training of all slots / (slots x wall), wall from the first step to the last.
        past_stop: share of the steps that were run after a trial's stop.
        wall_s, trials, steps, step_s (median, evaluation included), processes (that trained, ranks other than 0 aside).
        turnover_s, turnover_p95_s: from a trial's last step to the first step of the next one in the slot.
        decision_s, decision_p95_s: from a report's leaving the loop to the verdict, where the loop waits for it.
        save_s, save_p95_s: of a checkpoint.
        shares: where the slots' time went.
    """
    reports = [event for event in events if event["kind"] == "report"]
    if not reports:
        return {}
    begin, end = min(event["begin"] for event in reports), max(event["end"] for event in reports)
    useful = [event for event in reports if event["step"] <= (last_steps or {}).get(str(event["trial"]), math.inf)]
    useful_s = sum(event["end"] - event["begin"] for event in useful)
    available_s = slots * (end - begin)
    turnovers = turnover_seconds(reports, slots)
    steps = _steps(reports)
    return {
        "efficiency": useful_s / available_s,
        "past_stop": 1 - _steps(useful) / steps,
        "wall_s": end - begin,
        "trials": len({event["trial"] for event in reports}),
        "steps": steps,
        "step_s": median(_step_seconds(reports)),
        "processes": len({event["pid"] for event in reports}),
        **_spread("turnover", turnovers),
        **_spread("decision", _decision_seconds(events)),
        **_spread("save", [event["s"] for event in events if event["kind"] == "save"]),
        "shares": _shares(reports, available_s, turnovers),
    }


def turnover_seconds(reports: Sequence[Event], slots: int) -> list[float]:
    """Each trial but the first of each slot takes the place that has been free the longest."""
    spans = [(of_trial[0]["begin"], of_trial[-1]["end"]) for of_trial in by_trial(reports).values()]
    ends = sorted(end for _, end in spans)
    begins = sorted(begin for begin, _ in spans)[slots:]
    return [begin - end for begin, end in zip(begins, ends, strict=False)]


def by_trial(reports: Sequence[Event]) -> dict[int | str, list[Event]]:
    """The reports of each trial in order of their steps."""
    trials: dict[int | str, list[Event]] = defaultdict(list)
    for event in sorted(reports, key=lambda event: event["step"]):
        trials[event["trial"]].append(event)
    return trials


def _steps(reports: Sequence[Event]) -> int:
    return sum(of_trial[-1]["step"] for of_trial in by_trial(reports).values())


def _step_seconds(reports: Sequence[Event]) -> list[float]:
    seconds = []
    for of_trial in by_trial(reports).values():
        steps = [0, *(event["step"] for event in of_trial)]
        for event, before in zip(of_trial, steps, strict=False):
            seconds.append((event["end"] - event["begin"]) / (event["step"] - before))
    return seconds


def _decision_seconds(events: Sequence[Event]) -> list[float]:
    """Without the last trial of a process that is stopped: nothing waits for that verdict, and it is not hurried."""
    last_trial = {event["pid"]: event["trial"] for event in events if event["kind"] == "report"}
    decisions = [event for event in events if event["kind"] == "decision"]
    return [event["s"] for event in decisions if not event["stops"] or event["trial"] != last_trial[event["pid"]]]


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"{name}_s": median(seconds), f"{name}_p95_s": percentile(seconds, 0.95)}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _shares(reports: Sequence[Event], available_s: float, turnovers: Sequence[float]) -> dict[str, float]:
    """Of the slots' time: training, decisions and checkpoints between a trial's reports, turnovers, ragged ends."""
    training_s = sum(event["end"] - event["begin"] for event in reports)
    trials_s = sum(of_trial[-1]["end"] - of_trial[0]["begin"] for of_trial in by_trial(reports).values())
    seconds = {"training": training_s, "between_reports": trials_s - training_s, "turnover": sum(turnovers)}
    shares = {name: value / available_s for name, value in seconds.items()}
    return {name: round(share, 4) for name, share in [*shares.items(), ("ends", 1.0 - sum(shares.values()))]}
