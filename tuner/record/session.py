"""One sitting of a study: how long it has run, how busy its slots were, when its time is up."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tuner.commands import command
from tuner.errors import InputError

if TYPE_CHECKING:
    from tuner.record.study import Study

TICK_S = 1.0
NOTE_EVERY_S = 30.0
SECONDS_PER_HOUR = 3600.0
# From the word that a study ends until its GPUs are free: 20 s that a trial has for its next step, and the end of its
# processes.
LETTING_GO_S = 30.0


class Session:
    """Keeps the time of this run or resume, and writes it into the study's record.

    Args:
        study: Open for writing.
        num_slots: Trials at once.
        num_gpus: GPUs that they hold together.
    """

    def __init__(self, study: Study, num_slots: int, num_gpus: float = 0.0) -> None:
        earlier = study.sessions()
        self._study = study
        self._key = f"session:{len(earlier)}"
        self._earlier_s = sum(session["elapsed_s"] for session in earlier)
        self._earlier_gpu_s = gpu_hours(earlier) * SECONDS_PER_HOUR
        self._started = time.time()
        # Since when there have been so many slots, which hold so many GPUs.
        self._sizes = [(self._started, num_slots, num_gpus)]
        self._first_step_at: float | None = None
        self._last_report_at: float | None = None
        self._busy_s = 0.0
        self._next_tick = self._next_note = 0.0
        self._write()

    def add_busy(self, busy_s: float) -> None:
        """Count the seconds a slot spent in steps and evaluation until now."""
        now = time.time()
        if self._first_step_at is None:
            self._first_step_at = now - busy_s
        self._last_report_at = now
        self._busy_s += busy_s

    @property
    def size(self) -> tuple[int, float]:
        """Slots now, and the GPUs that they hold."""
        _, num_slots, num_gpus = self._sizes[-1]
        return num_slots, num_gpus

    def resize(self, num_slots: int, num_gpus: float) -> None:
        """There are more or fewer slots from now on."""
        self._sizes.append((time.time(), num_slots, num_gpus))
        self._write()

    def training_share(self) -> float:
        """Share of the slots' time since the first step that was spent training, 0 to 1."""
        if self._first_step_at is None or self._last_report_at is None:
            return 0.0
        available_s, _ = self._held(self._first_step_at, self._last_report_at)
        return min(1.0, self._busy_s / available_s) if available_s > 0 else 0.0

    def is_due(self) -> bool:
        """Whether a second has passed since this was last asked with success."""
        now = time.monotonic()
        if now < self._next_tick:
            return False
        self._next_tick = now + TICK_S
        return True

    def used_up(self) -> str | None:
        """The limit of the study that is used up, counted over all sessions; None while it may go on."""
        limits = self._study.spec.search
        if limits.max_hours is not None and self._elapsed_s() + self._earlier_s >= limits.max_hours * SECONDS_PER_HOUR:
            return "max_hours"
        _, held_gpu_s = self._held(self._started, time.time())
        gpu_s = self._earlier_gpu_s + held_gpu_s + self.size[1] * LETTING_GO_S
        if limits.max_gpu_hours is not None and gpu_s >= limits.max_gpu_hours * SECONDS_PER_HOUR:
            return "max_gpu_hours"
        return None

    def note_progress(self) -> None:
        """Write the record now and then, so that a kill loses no more than that."""
        if time.monotonic() >= self._next_note:
            self._write()

    def end(self, reason: str | None) -> None:
        """Write how it ended: finished, interrupted, or stopped by a limit or an error."""
        words = {None: "finished", "interrupted": "interrupted"}
        self._write(end=words.get(reason, "stopped"), ended=time.time(), reason=reason)

    def _elapsed_s(self) -> float:
        return time.time() - self._started

    def _held(self, start: float, end: float) -> tuple[float, float]:
        """Seconds of slots, and of GPUs, between two times."""
        ends = [*(since for since, _, _ in self._sizes[1:]), end]
        lasted = [
            max(0.0, min(until, end) - max(since, start))
            for (since, _, _), until in zip(self._sizes, ends, strict=True)
        ]
        slot_s = sum(seconds * slots for seconds, (_, slots, _) in zip(lasted, self._sizes, strict=True))
        gpu_s = sum(seconds * gpus for seconds, (_, _, gpus) in zip(lasted, self._sizes, strict=True))
        return slot_s, gpu_s

    def _write(self, **more: Any) -> None:
        self._next_note = time.monotonic() + NOTE_EVERY_S
        now = time.time()
        slot_s, gpu_s = self._held(self._started, now)
        num_slots, num_gpus = self.size
        note = {
            "started": self._started,
            "elapsed_s": now - self._started,
            "slots": num_slots,
            "gpus": num_gpus,
            "slot_s": slot_s,
            "gpu_s": gpu_s,
            "training_share": self.training_share(),
        }
        self._study.note_study(self._key, note | more)


def gpu_hours(sessions: Iterable[Mapping[str, Any]]) -> float:
    """GPU-hours of sessions as `Study.sessions()` has them."""
    return sum(_gpu_s(session) for session in sessions) / SECONDS_PER_HOUR


def slot_hours(sessions: Iterable[Mapping[str, Any]]) -> float:
    """Hours of sessions, each times its slots."""
    return sum(float(each.get("slot_s", each["elapsed_s"] * each["slots"])) for each in sessions) / SECONDS_PER_HOUR


def _gpu_s(session: Mapping[str, Any]) -> float:
    return float(session.get("gpu_s", session["elapsed_s"] * session.get("gpus", 0.0)))


def refuse_spent(study: Study) -> None:
    """See that a study may use its GPUs for longer than it takes to let go of them.

    Raises:
        InputError: `search.max_gpu_hours` does not allow it.
    """
    limit, sessions = study.spec.search.max_gpu_hours, study.sessions()
    if limit is None or not sessions:
        return
    used = gpu_hours(sessions)
    if used + sessions[-1].get("gpus", 0.0) * LETTING_GO_S / SECONDS_PER_HOUR >= limit:
        more = command("resume", study.dir, "--set", f"search.max_gpu_hours={2 * limit:g}")
        raise InputError(
            f"search.max_gpu_hours: {used:.3g} of {limit:g} GPU-hours are used; what is left is too little to go on",
            f"Allow more: {more}",
        )
