"""A few real steps of a study in its own slots, timed: what a forecast would otherwise have to assume.

The probe is a study of its own in a temporary folder, run by the same engine on the same cluster with as many trials at
once, so that what slots take from each other is in the numbers. Its trials are cut short; it ends after some seconds of
training, as soon as each slot has begun a second trial.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.decisions.observer import Observer
from tuner.errors import StudyAbortedError, TuneError
from tuner.execution.channel import Reported
from tuner.planning.pace import Pace, named
from tuner.planning.plan import Plan
from tuner.planning.space import checkpoint_bytes
from tuner.record.record import TrialRecord
from tuner.record.study import Study
from tuner.study_file.rules import constant
from tuner.study_file.spec import StudySpec, override_spec
from tuner.study_file.yaml_text import to_yaml

# Training that is timed; a slot's second trial is waited for in any case.
ENOUGH_S = 5.0
MAX_EVAL_EVERY, MAX_TRIALS_A_SLOT = 3, 30


def probe(
    spec: StudySpec,
    *,
    address: str | None = None,
    observer: Observer | None = None,
    command_s: float = 0.0,
    enough_s: float = ENOUGH_S,
) -> Pace:
    """Run the first steps of a study and time them.

    Args:
        spec: The study; nothing of it is created.
        address: A Ray cluster to join; None starts one on this machine.
        observer: Hears warnings.
        command_s: What a command takes before it comes to the search: to start, and to read the study.
        enough_s: Seconds of training to be timed in each slot.

    Raises:
        TuneError: As `search.run` would refuse the study, or no trial got far enough.
    """
    short, stopwatch = _shortened(spec), Stopwatch(observer or Observer(), time.monotonic() - command_s, enough_s)
    with tempfile.TemporaryDirectory(prefix="tune-probe-") as folder:
        study = _run(short, Path(folder), stopwatch, address)
        ended_at = time.monotonic()
        size = max((checkpoint_bytes(path) for path in study.dir.glob("checkpoints/*/*")), default=0)
        is_interrupted = study.state_at_rest() == "interrupted"
    if is_interrupted:
        raise KeyboardInterrupt
    if not stopwatch.has_measured:
        raise TuneError("the probe got no trial far enough to time it", "Plan without --probe.")
    return stopwatch.pace(ended_at, size)


def _run(spec: StudySpec, root: Path, stopwatch: Stopwatch, address: str | None) -> Study:
    from tuner.execution import search

    source = to_yaml(spec.model_dump(mode="json", exclude_none=True))
    try:
        return search.run(spec, source_text=source, root=root, observer=stopwatch, address=address)
    except StudyAbortedError as error:
        raise TuneError(f"the probe failed: {error.message}", "The study would fail alike: mend the cause.") from error


def _shortened(spec: StudySpec) -> StudySpec:
    """The same study with short trials that nothing stops, recorded nowhere but beside itself."""
    eval_every = 0 if spec.is_custom else min(MAX_EVAL_EVERY, int(constant(spec.train, "eval_every")[1] or 100))
    every = eval_every or spec.scheduler.grace_period
    slots = spec.scaling.slots
    at_once = spec.search.num_trials if slots == "auto" else min(slots, spec.search.num_trials)
    changes: dict[str, Any] = {
        "scheduler.type": "none",
        "scheduler.max_t": min(spec.max_t, 2 * every),
        "checkpoint.every": every,
        "search.num_trials": MAX_TRIALS_A_SLOT * at_once,
        "scaling.slots": at_once,
        "search.storage": None,
        "search.target": None,
        "search.max_hours": None,
        "search.max_gpu_hours": None,
        "mlflow.tracking_uri": None,
    }
    if eval_every:
        changes["train.eval_every"] = eval_every
        # The schedule of learning rates costs nothing, but a trial must not be longer than it.
        changes["train.max_steps"] = max(spec.max_t, int(constant(spec.train, "max_steps")[1] or 0))
    return override_spec(spec, [f"{key}={'null' if value is None else value}" for key, value in changes.items()])


class Stopwatch(Observer):
    """Times what it hears, and has the study stop once it has heard enough.

    A trial that starts takes the slot that has been free for longest; which slot that is does not matter for a mean.
    """

    def __init__(self, listener: Observer, began_at: float, enough_s: float) -> None:
        self._warm: list[Reported] = []
        self._listener, self._enough_s = listener, enough_s
        self._began_at = self._last_at = began_at
        self._num_slots, self._num_ended = 1, 0
        self._free_since: list[float] = []
        self._begun_at: dict[int, float] = {}
        self._step: dict[int, int] = {}
        self._steps_of: list[int] = []
        self._first: dict[int, tuple[float, Reported]] = {}
        self._cycles: list[tuple[float, int]] = []
        self._peak_bytes = 0
        self._study: Study | None = None

    def study_started(self, study: Study, plan: Plan) -> None:
        self._study, self._num_slots = study, plan.slots or 1

    def trial_started(self, number: int, params: Mapping[str, Any], resumed_from_step: int) -> None:
        if self._free_since:
            self._begun_at[number] = self._free_since.pop(0)

    def warning(self, text: str) -> None:
        self._listener.warning(text)

    def timed(self, report: Reported) -> None:
        self._last_at = time.monotonic()
        self._peak_bytes = max(self._peak_bytes, report.peak_bytes)
        before = self._step.get(report.number, 0)
        self._step[report.number] = report.step
        if before == 0 and report.number not in self._begun_at:
            # The first report of a slot: start-up, and whatever is slow only once.
            self._first[report.number] = (self._last_at, report)
        else:
            self._warm.append(report)
            self._steps_of.append(report.step - before)
        self._stop_when_enough()

    def trial_ended(self, record: TrialRecord) -> None:
        now = time.monotonic()
        self._num_ended += 1
        self._free_since.append(now)
        if record.number in self._begun_at and record.state == "COMPLETE":
            self._cycles.append((now - self._begun_at[record.number], record.number))
        self._stop_when_enough()

    def _stop_when_enough(self) -> None:
        slots, busy_s = self._num_slots, sum(report.busy_s for report in self._warm)
        is_timed = len(self._cycles) >= slots and busy_s >= self._enough_s * slots
        # Where trials fail at once there is not more to learn from more of them.
        if self._study is not None and (is_timed or self._num_ended >= MAX_TRIALS_A_SLOT * slots):
            self._study.ask_to_stop()

    @property
    def has_measured(self) -> bool:
        """Whether any report came that tells a pace."""
        return bool(self._warm)

    def pace(self, ended_at: float, size: int) -> Pace:
        """What was measured, given when it all was over and the size of a checkpoint."""
        reports, steps = self._warm, sum(self._steps_of)
        eval_s = _mean([report.eval_s for report in reports])
        step_s = sum(report.busy_s - report.eval_s for report in reports) / steps
        saves = [report.save_s for report in reports if report.save_s]
        # A first report at the pace of later ones would have come after so many seconds of training.
        starts = [at - self._began_at - first.step * step_s - eval_s for at, first in self._first.values()]
        trials = len(self._cycles)
        seconds = {
            "start_s": max(0.0, _mean(starts)),
            "step_s": step_s,
            "eval_s": eval_s,
            "save_s": _mean(saves),
            "turnover_s": self._turnover_s(),
            "end_s": ended_at - self._last_at,
        }
        many = f"{len(reports)} reports of {self._num_slots} trials at a time"
        why = dict.fromkeys(seconds, f"mean over {many}")
        why |= {
            "start_s": f"mean over {len(starts)} slots",
            "turnover_s": f"mean over {trials} trials",
            "end_s": "once",
        }
        why |= {"step_s": f"mean over {steps} steps in {many}", "save_s": f"mean over {len(saves)} saves"}
        return Pace(
            **seconds,
            checkpoint_bytes=size or None,
            peak_bytes=self._peak_bytes or None,
            assumptions=named(seconds, why, is_measured=True),
        )

    def _turnover_s(self) -> float:
        """What a trial takes of its slot beyond steps, evaluation and saves."""
        if not self._cycles:
            return 0.0
        whole = {number for _, number in self._cycles}
        used_s = sum(report.busy_s + report.save_s for report in self._warm if report.number in whole)
        return max(0.0, (sum(seconds for seconds, _ in self._cycles) - used_s) / len(self._cycles))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
