"""Processes of a measurement: run one with all it starts, and know what they cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
# Every process of a measurement inherits this, also those that no longer have a parent.
MARKER = "TUNER_BENCHMARK"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
SAMPLE_S = 0.5
# Processes that outlive their measurement by more than this are killed: the next one needs a clean machine.
LINGER_S = 15.0
# CPUs that others may keep busy while something is measured; short-lived processes of its own count among them.
OTHERS_LIMIT = 0.25
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Cost:
    """What a process and all it started took.

    Attributes:
        wall_s: Until it ended.
        cpu_s: Of all of them.
        others: CPUs that everybody else on the machine kept busy meanwhile; what this costs is not in the figures.
        result: What it printed.
        error: None when it ended well.
        lingering: Processes that had to be killed after its end.
    """

    wall_s: float
    cpu_s: float
    others: float
    result: dict[str, Any]
    error: str | None
    lingering: int

    def faults(self, name: str) -> list[str]:
        """Why the figures do not count."""
        busy = self.others > OTHERS_LIMIT
        return [
            *([f"{name}: {self.error}"] if self.error else []),
            *([f"{name}: others kept {self.others:.2f} CPUs busy meanwhile"] if busy else []),
        ]


def measure(
    module: str, *arguments: str, timeout_s: float, environment: Mapping[str, str] = os.environ, log: Path
) -> Cost:
    """Run `python -m module arguments` and all it starts; the last line of its output is a JSON object."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    started, busy_before_s = time.perf_counter(), machine_cpu_seconds()
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            env={**environment, **ONE_THREAD, MARKER: mark},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        watch = CpuWatch(mark)
        try:
            output, _ = process.communicate(timeout=timeout_s)
            error = None if process.returncode == 0 else f"exit code {process.returncode}, see {log}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, error = process.communicate()[0], f"not done after {timeout_s:.0f} s"
    wall_s = time.perf_counter() - started
    lingering = end_marked(mark, LINGER_S if error is None else 0.0)
    busy_s, cpu_s = machine_cpu_seconds() - busy_before_s, watch.stop()
    others = max(0.0, busy_s - cpu_s) / (time.perf_counter() - started)
    lines = output.strip().splitlines()
    result = json.loads(lines[-1]) if lines and error is None else {}
    return Cost(wall_s, cpu_s, others, result, error, lingering)


class CpuWatch:
    """CPU seconds of all marked processes; one that lives for less than a sample may be missed."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._seconds: dict[int, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        self._done.set()
        self._thread.join()
        return sum(self._seconds.values())

    def _watch(self) -> None:
        strangers: set[int] = set()
        while not self._done.wait(SAMPLE_S):
            for pid in set(all_pids()) - strangers:
                if pid not in self._seconds and not is_marked(pid, self._mark):
                    strangers.add(pid)
                else:
                    self._seconds[pid] = max(self._seconds.get(pid, 0.0), cpu_seconds(pid))


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def is_marked(pid: int, mark: str) -> bool:
    return f"{MARKER}={mark}".encode() in read_process_file(pid, "environ").split(b"\0")


def read_process_file(pid: int, name: str) -> bytes:
    """A file of /proc/PID; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def cpu_seconds(pid: int) -> float:
    fields = read_process_file(pid, "stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def machine_cpu_seconds() -> float:
    """CPU seconds of all processes since the machine started; neither idle nor waiting for a disk."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / TICKS_PER_S


def resident_bytes(pid: int) -> int:
    fields = read_process_file(pid, "statm").split()
    return int(fields[1]) * PAGE_BYTES if fields else 0


def end_marked(mark: str, patience_s: float) -> int:
    """Wait for marked processes to end, then kill those left; returns how many had to be."""
    deadline = time.monotonic() + patience_s
    while (left := [pid for pid in all_pids() if is_marked(pid, mark)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(left)
