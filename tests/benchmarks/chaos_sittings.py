"""One sitting of a study that is to be killed: a `tune` process with all it starts, and the ways to hit it."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.processes import (
    MARKER,
    ONE_THREAD,
    REPOSITORY,
    all_pids,
    end_marked,
    is_marked,
    read_process_file,
)
from trainables.checkpoint_dir import newest_complete, step_of

# In turn. The driver alone, everything at once (a power cut), Ctrl-C in a terminal, Ray's head, or one process that
# is replaced.
KINDS = ("driver", "worker", "tree", "slot", "interrupt", "head")
# What the command ends with.
FATAL = {"driver": -9, "tree": -9, "interrupt": 130, "head": 3}
TITLES = {"worker": b"RayTrainWorker", "slot": b"ray::TrialSlot", "head": b"gcs_server"}
# None of these is reached unless something hangs.
MOMENT_TIMEOUT_S, INTERRUPT_TIMEOUT_S, END_TIMEOUT_S, LINGER_S = 180.0, 30.0, 300.0, 30.0
POLL_S = 0.02


@dataclass(frozen=True)
class Kill:
    """A kill to come.

    Attributes:
        kind: One of `KINDS`.
        growth: It falls when the record has grown to this share of the uninterrupted one; None: while `tune` starts.
        delay_s: Seconds after that, or after the start.
    """

    kind: str
    growth: float | None
    delay_s: float


def plan_kills(num: int, seed: int) -> list[Kill]:
    """Kills of each kind in turn, at random moments of the search; some fall into the start of a resume."""
    source = random.Random(seed)
    moments = sorted(source.uniform(0.02, 0.8) for _ in range(num))
    kills: list[Kill] = []
    for number, growth in enumerate(moments):
        kind = KINDS[number % len(KINDS)]
        is_early = kind in FATAL and number > 0 and kills[-1].kind in FATAL and source.random() < 0.5
        delay_s = source.uniform(0, 10) if is_early else source.uniform(0, 0.3)
        kills.append(Kill(kind, None if is_early else growth, delay_s))
    return kills


class Sitting:
    """`tune run` or `tune resume`, as a process of its own that knows what it has started."""

    def __init__(self, folder: Path, number: int, *arguments: str) -> None:
        self.name = f"sitting {number} (tune {arguments[0]})"
        self.started = time.monotonic()
        self._log = folder / f"sitting-{number}.log"
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        environment = {**os.environ, **ONE_THREAD, MARKER: self._mark, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"}
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tuner", *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    @property
    def text(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, is_time: Callable[[], bool], timeout_s: float = MOMENT_TIMEOUT_S) -> bool:
        """Returns False when it has ended before, or it takes too long."""
        deadline = time.monotonic() + timeout_s
        while not is_time():
            if self.is_over or time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return not self.is_over

    def hit(self, kind: str, source: random.Random) -> bool:
        """Deal a kill; returns whether there was anything to hit."""
        if kind == "interrupt":
            # As a terminal does it: every process in its group hears.
            os.killpg(self._process.pid, signal.SIGINT)
            return True
        if kind in TITLES:
            self.wait_until(lambda: bool(self._pids(TITLES[kind])), 60)
            pids = self._pids(TITLES[kind])
            return bool(pids) and _kill(source.choice(pids))
        victims = [self._process.pid] if kind == "driver" else self._pids()
        return any([_kill(pid) for pid in victims])  # noqa: C419 - every one of them

    def end(self, timeout_s: float) -> int | None:
        """Wait for its end; returns the exit code, None when it had to be ended."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end_marked(self._mark, 0)
            self._process.wait()
            return None

    def num_lingering(self) -> int:
        """Processes that had to be ended some time after it was over."""
        return end_marked(self._mark, LINGER_S)

    def _pids(self, title: bytes = b"") -> list[int]:
        return [pid for pid in all_pids() if title in read_process_file(pid, "cmdline") and is_marked(pid, self._mark)]


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Progress:
    """What each trial had saved when a kill came: nothing it does afterwards may lie behind that.

    Attributes:
        study_dir: The study's folder.
        max_steps: A trial that had been saved there repeats its last report, and no step.
    """

    study_dir: Path
    max_steps: int
    seen: list[tuple[int, int, int]] = field(default_factory=list)

    def note(self) -> None:
        """To be called before a kill."""
        for root in (self.study_dir / "checkpoints").glob("[0-9]*"):
            newest, log = newest_complete(root), self._log(int(root.name))
            if newest is not None and log.exists():
                self.seen.append((int(root.name), step_of(newest), log.stat().st_size))

    def setbacks(self) -> list[str]:
        """Each trial that trained a step again which a complete checkpoint had."""
        found = []
        for number, step, offset in self.seen:
            text = self._log(number).read_bytes()[offset:].decode(errors="replace")
            behind = min(step, self.max_steps - 1)
            again = [int(done) for done in re.findall(r"\bstep=(\d+)", text) if int(done) <= behind]
            if again:
                found.append(f"trial {number} went back to step {min(again)} behind its checkpoint at {step}")
        return sorted(set(found))

    def _log(self, number: int) -> Path:
        return self.study_dir / "logs" / f"{number}.rank0.log"


def last_lines(text: str, num: int = 6) -> Sequence[str]:
    return [line for line in text.splitlines() if line.strip()][-num:]
