"""P10: what deciding costs. Trials that only wait, through a real study in warm slots on a Ray of its own.

    python -m tests.benchmarks.controller [--trials 500] [--seconds 1] [--many 2000]

First `--trials` trials of a second each on two slots: the time from the first trial's begin to the last one's end,
beside what they wait. Then `--many` short ones: the driver's CPU seconds for each result around the 100th and at the
end, and its resident memory after the first 200 and at the end. Proposals by TPE over five parameters, the journal,
a checkpoint of each trial and MLflow are as in any study. The goals are 1.10, 1.5 times and less than 5 % of growth.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import timeline
from tests.benchmarks.common import Workload, machine, print_result, significant
from tests.benchmarks.processes import measure

MIB = 1 << 20
SLOTS = 2
# Results over which a cost is averaged, and the trial around which the first such are.
WINDOW, EARLY, WARM = 100, 100, 200
OVERHEAD_GOAL, COST_GOAL, GROWTH_GOAL = 1.10, 1.5, 1.05
START_S, TRIAL_S = 120.0, 0.5
# What is short enough to have many of, and long enough that the driver is not what a slot waits for.
SHORT_S = 0.1


class Bench:
    """Runs studies, and keeps what is wrong with their figures."""

    def __init__(self, folder: Path, *, mlflow: bool) -> None:
        self._folder, self._mlflow = folder, mlflow
        self.faults: list[str] = []

    def run(self, num_trials: int, seconds: float) -> dict[str, Any]:
        """A study of trials that wait so long each."""
        folder = self._folder / str(num_trials)
        folder.mkdir(parents=True)
        workload = Workload(str(folder), batch_size=8, num_trials=num_trials, slots=SLOTS, mlflow=self._mlflow)
        limit_s = START_S + num_trials * (seconds / SLOTS + TRIAL_S)
        arguments = (workload.to_json(), str(seconds))
        cost = measure("tests.benchmarks.idle", *arguments, timeout_s=limit_s, log=folder / "stderr.log")
        name = f"{num_trials} trials"
        self.faults += cost.faults(name)
        if cost.result.get("states") != {"COMPLETE": num_trials}:
            self.faults.append(f"{name}: {cost.result.get('states')}")
        seen = timeline.summary(timeline.read(workload.timeline), SLOTS)
        kept = {key: significant(seen[key]) for key in ("wall_s", "turnover_s", "turnover_p95_s") if key in seen}
        ideal_s = num_trials * seconds / SLOTS
        over = significant(kept["wall_s"] / ideal_s) if kept else None
        driver = driver_figures(cost.result.get("costs", []))
        warnings = cost.result.get("warnings")
        return {"trials": num_trials, "seconds": seconds, "over_ideal": over, **kept, **driver, "warnings": warnings}


def driver_figures(costs: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """What (CPU seconds so far, resident bytes) at the end of each trial say; less where there are few trials."""
    if len(costs) < WARM + WINDOW:
        return {}
    early_s, late_s = _cost(costs, EARLY + WINDOW // 2), _cost(costs, len(costs) - 1)
    warm, last = costs[WARM][1], costs[-1][1]
    return {
        "early_cpu_s": significant(early_s),
        "late_cpu_s": significant(late_s),
        "late_over_early": significant(late_s / early_s),
        "warm_mib": round(warm / MIB, 1),
        "last_mib": round(last / MIB, 1),
        "growth": significant(last / warm),
        "bytes_a_trial": round((last - warm) / (len(costs) - 1 - WARM)),
    }


def _cost(costs: Sequence[tuple[float, int]], last: int) -> float:
    return (costs[last][0] - costs[last - WINDOW][0]) / WINDOW


def main() -> None:
    """Measure, then print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500, help="trials of a second; 0: none")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--many", type=int, default=2000, help="short trials; 0: none")
    parser.add_argument("--no-mlflow", action="store_true", help="without tracking")
    parser.add_argument("--folder", type=Path, help="keep everything here; absent: a temporary folder")
    options, host = parser.parse_args(), machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        bench = Bench(options.folder or Path(temporary), mlflow=not options.no_mlflow)
        slow = bench.run(options.trials, options.seconds) if options.trials else {}
        short = bench.run(options.many, SHORT_S) if options.many else {}
    reaches = {
        "over_ideal": _reaches(slow.get("over_ideal"), OVERHEAD_GOAL),
        "late_over_early": _reaches(short.get("late_over_early"), COST_GOAL),
        "growth": _reaches(short.get("growth"), GROWTH_GOAL),
    }
    print_result("controller", bench.faults, machine=host, slow=slow, short=short, reaches_goals=reaches)


def _reaches(figure: float | None, goal: float) -> bool | None:
    return None if figure is None else figure <= goal


if __name__ == "__main__":
    main()
