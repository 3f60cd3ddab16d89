"""P9: what tracking costs. The same study with and without MLflow, wall from the first step to the last, in turn.

    python -m tests.benchmarks.tracking [--pairs 5] [--long-rungs]

No trial is stopped early, so that both do the same steps; both slots are busy, so that what tracking computes is
taken from training. Long rungs are ten times the steps, and ten times the points of each trial: studies last hours, and
what MLflow costs once does not grow with them.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks import timeline
from tests.benchmarks.common import Workload, in_turn, machine, medians, print_result, ratio
from tests.benchmarks.processes import measure
from tests.benchmarks.study import TOLERANCE, calibrated_batch_size

START_TIMEOUT_S, STEP_TIMEOUT_S = 120.0, 1.0


def run(name: str, workload: Workload, log: Path) -> tuple[dict[str, Any], dict[int, float], list[str]]:
    """One study: (figures, losses of the default trial, faults)."""
    timeout_s = START_TIMEOUT_S + STEP_TIMEOUT_S * workload.num_trials * workload.max_steps
    cost = measure("tests.benchmarks.ours", workload.to_json(), timeout_s=timeout_s, log=log)
    events = timeline.read(workload.timeline)
    figures = timeline.summary(events, workload.slots)
    faults = cost.faults(name)
    if figures.get("steps") != workload.num_trials * workload.max_steps:
        faults.append(f"{name}: {figures.get('steps')} steps, not {workload.num_trials * workload.max_steps}")
    whole = {"cpu_s": cost.cpu_s, "whole_process_s": cost.wall_s, "others": cost.others}
    return {**figures, **whole}, timeline.default_losses(events), faults


def main() -> None:
    """Measure, then print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--batch-size", type=int, help="examples a step; absent: calibrated")
    parser.add_argument("--long-rungs", action="store_true", help="ten times the steps")
    options, host = parser.parse_args(), machine()
    runs: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    losses: dict[str, dict[int, float]] = {}
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        batch_size = options.batch_size or calibrated_batch_size(Path(temporary))

        def measured(name: str) -> None:
            folder = Path(temporary, f"{name}-{len(runs[name])}")
            folder.mkdir()
            tracked, unit = name == "with", 30 if options.long_rungs else 3
            workload = Workload(
                str(folder), batch_size, options.trials, slots=2, unit=unit, stops_early=False, mlflow=tracked
            )
            figures, losses[name], found = run(name, workload, folder / "stderr.log")
            runs[name].append(figures)
            faults.extend(found)

        in_turn(list(runs), options.pairs, measured)
    for step in losses["with"].keys() | losses["without"].keys():
        pair = losses["with"].get(step, math.nan), losses["without"].get(step, math.nan)
        if not math.isclose(*pair, rel_tol=TOLERANCE):
            faults.append(f"loss at step {step}: {pair[0]} with, {pair[1]} without")
    middle = {name: medians(of_name) for name, of_name in runs.items()}
    ratios = {key: ratio(middle["with"], middle["without"], key) for key in ("wall_s", "cpu_s", "whole_process_s")}
    walls = {name: [round(figures.get("wall_s", math.nan), 2) for figures in of_name] for name, of_name in runs.items()}
    settings = {name: getattr(options, name) for name in ("pairs", "trials", "long_rungs")} | {"batch_size": batch_size}
    print_result("tracking", faults, machine=host, settings=settings, **middle, ratios=ratios, walls_s=walls)


if __name__ == "__main__":
    main()
