"""Whether a slot grows: resident memory of each process after 20 trials and after 200, through one slot.

    python -m tests.benchmarks.memory [--trials 200]

Trials are of three small steps, with a checkpoint each and MLflow on. The goal is less than 5 % of growth in each.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.common import Workload, machine, print_result, significant
from tests.benchmarks.ours import study_spec
from tests.benchmarks.processes import MARKER, ONE_THREAD, all_pids, is_marked, read_process_file, resident_bytes
from tuner.decisions.observer import Observer
from tuner.execution import search
from tuner.record.record import TrialRecord
from tuner.study_file.spec import StudySpec

MIB = 1 << 20
GOAL = 1.05


class Watch(Observer):
    """Takes stock after some trials, while the slot is alive."""

    def __init__(self, at: set[int], mark: str) -> None:
        self._at, self._mark = at, mark
        self._count = 0
        self.first_end = self.last_end = 0.0
        self.samples: dict[int, dict[str, int]] = {}
        self.warnings: list[str] = []

    def trial_ended(self, record: TrialRecord) -> None:
        self._count += 1
        self.last_end = time.time()
        self.first_end = self.first_end or self.last_end
        if self._count in self._at:
            self.samples[self._count] = resident(self._mark)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def resident(mark: str) -> dict[str, int]:
    """Resident bytes of this process and of Ray's named ones that it started, by name."""
    found = {"driver": resident_bytes(os.getpid())}
    for pid in all_pids():
        title = read_process_file(pid, "cmdline").decode(errors="replace").strip("\0 ")
        if title.startswith("ray::") and "IDLE" not in title and is_marked(pid, mark):
            name = title.removeprefix("ray::").partition(".")[0].partition(" ")[0]
            found[f"{name} {pid}"] = resident_bytes(pid)
    return found


def short_trials(folder: str, num_trials: int) -> StudySpec:
    """Trials of three steps, none stopped early."""
    workload = Workload(folder, batch_size=8, num_trials=num_trials, unit=1, stops_early=False)
    spec = study_spec(workload)
    scheduler = spec.scheduler.model_copy(update={"max_t": 3})
    return spec.model_copy(update={"train": {**spec.train, "max_steps": 3}, "scheduler": scheduler})


def main() -> None:
    """Measure, then print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--warm-trials", type=int, default=20)
    options, host = parser.parse_args(), machine()
    # A process sees its own new environment only in what it starts, which is what is to be found.
    mark = f"memory-{os.getpid()}"
    os.environ.update({**ONE_THREAD, MARKER: mark})
    middle = (options.warm_trials + options.trials) // 2
    watch = Watch({options.warm_trials, middle, options.trials}, mark)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        spec = short_trials(folder, options.trials)
        study = search.run(spec, source_text="study: benchmark\n", root=Path(folder, "studies"), observer=watch)
        failed = [trial.number for trial in study.trials() if trial.state != "COMPLETE"]
    first, last = watch.samples.get(options.warm_trials, {}), watch.samples.get(options.trials, {})
    growth = {name: significant(last[name] / first[name]) for name in first.keys() & last.keys()}
    faults = [*watch.warnings, *(f"trial {number} is not complete" for number in failed)]
    if first.keys() != last.keys():
        faults.append(f"processes changed: {sorted(first.keys() ^ last.keys())}")
    sizes: dict[int, Any] = {
        count: {name: round(size / MIB, 1) for name, size in sample.items()} for count, sample in watch.samples.items()
    }
    seconds = (watch.last_end - watch.first_end) / max(1, options.trials - 1)
    print_result(
        "memory",
        faults,
        machine=host,
        settings={"trials": options.trials},
        resident_mib=sizes,
        growth=growth,
        grown=sorted(name for name, value in growth.items() if value >= GOAL),
        seconds_a_trial=significant(seconds),
    )


if __name__ == "__main__":
    main()
