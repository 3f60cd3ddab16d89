"""P1, P2 and P3: how much of the slots' time is training, how fast trials change, how long a verdict takes.

    python -m tests.benchmarks.study [--only ours] [--pairs 5] [--scaling 2x1] [--long-rungs]

One search (24 trials of a tiny model, steps of about 0.16 s, ASHA 3/9/27, a checkpoint at every report, MLflow on)
through warm slots, through Ray's documented pattern as it comes and tuned, and in one process without Ray. Each runs
in a process of its own with a fresh Ray, in turn. Peers run fewer trials, since stock takes 25 to 60 s for each; the
share of time does not depend on their number but for the ragged end, which counts against fewer trials a little more.

The figures count only when the default trial's losses are equal in all, and when nobody else used the machine.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks import timeline
from tests.benchmarks.common import Workload, in_turn, machine, medians, print_result, ratio, significant
from tests.benchmarks.processes import measure

CONTENDERS = {
    "ours": ("tests.benchmarks.ours",),
    "stock": ("tests.benchmarks.stock",),
    "tuned-stock": ("tests.benchmarks.stock", "tuned"),
    "in-process": ("tests.benchmarks.in_process",),
}
SCALINGS = {"2x1": (2, 1), "1x2": (1, 2)}
TOLERANCE = 1e-5
# Stock takes up to a minute for a trial; what takes longer hangs.
START_TIMEOUT_S, TRIAL_TIMEOUT_S, STEP_TIMEOUT_S = 120.0, 60.0, 1.0


@dataclass
class Bench:
    """What has been measured at one scaling, (slots, workers of a trial)."""

    slots: int
    workers: int
    options: argparse.Namespace
    batch_size: int
    folder: Path
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def run(self, name: str) -> None:
        """Run a contender once."""
        folder = self.folder / f"{self.slots}x{self.workers}-{name}-{len(self.runs.get(name, ()))}"
        folder.mkdir()
        workload = self.workload(name, folder)
        module, *arguments = CONTENDERS[name]
        timeout_s = START_TIMEOUT_S + workload.num_trials * (TRIAL_TIMEOUT_S + STEP_TIMEOUT_S * workload.max_steps)
        cost = measure(module, workload.to_json(), *arguments, timeout_s=timeout_s, log=folder / "stderr.log")
        events = timeline.read(workload.timeline)
        figures = timeline.summary(events, workload.slots, cost.result.get("last_steps"))
        share = {"training_share": cost.result["training_share"]} if "training_share" in cost.result else {}
        whole = {
            "whole_process_s": cost.wall_s,
            "cpu_s": cost.cpu_s,
            "others": cost.others,
            "lingering": cost.lingering,
        }
        self.runs.setdefault(name, []).append({**figures, **share, **whole})
        self.faults += cost.faults(name)
        self._check(name, cost.result, figures, workload)
        self._compare_losses(name, timeline.default_losses(events))

    def workload(self, name: str, folder: Path) -> Workload:
        """What a contender is given."""
        return Workload(
            folder=str(folder),
            # A step takes as long as with one worker when each has as many examples.
            batch_size=self.batch_size * self.workers,
            num_trials=self.options.trials if name == "ours" else self.options.peer_trials,
            slots=1 if name == "in-process" else self.slots,
            workers=1 if name == "in-process" else self.workers,
            unit=30 if self.options.long_rungs else 3,
            save_every=self.options.save_every,
        )

    def _check(self, name: str, result: dict[str, Any], figures: dict[str, Any], workload: Workload) -> None:
        if figures.get("trials") != workload.num_trials:
            self.faults.append(f"{name}: {figures.get('trials')} of {workload.num_trials} trials reported")
        if result.get("errors") or "FAILED" in result.get("states", {}):
            self.faults.append(f"{name}: trials failed: {result}")
        if name == "ours" and figures.get("processes") != workload.slots:
            self.faults.append(f"ours: {figures.get('processes')} processes served {workload.slots} slots")

    def _compare_losses(self, name: str, losses: dict[int, float]) -> None:
        """The default trial may have been stopped early in some: what it reported in both must be equal."""
        for other, expected in self.losses.items():
            for step in losses.keys() & expected.keys():
                if not math.isclose(losses[step], expected[step], rel_tol=TOLERANCE):
                    self.faults.append(f"loss at step {step}: {name} {losses[step]}, {other} {expected[step]}")
        if not losses:
            self.faults.append(f"{name}: no report of the default trial")
        self.losses.setdefault(name, losses)

    def summary(self) -> dict[str, Any]:
        """Medians of each contender, their ratios to ours, and every run's efficiency."""
        middle = {name: medians(runs) for name, runs in self.runs.items()}
        ours = middle.get("ours", {})
        ratios = {
            f"over_{name}": {"efficiency": ratio(ours, peer, "efficiency"), "cpu_a_step": _cpu_ratio(ours, peer)}
            for name, peer in middle.items()
            if name != "ours" and ours
        }
        turnover = {f"{name}_over_ours": ratio(peer, ours, "turnover_s") for name, peer in middle.items()}
        return {
            **middle,
            "ratios": {**ratios, "turnover": turnover},
            "efficiencies": {
                name: [significant(run["efficiency"]) for run in runs if "efficiency" in run]
                for name, runs in self.runs.items()
            },
            "shares": {name: runs[-1].get("shares") for name, runs in self.runs.items()},
        }


def _cpu_ratio(ours: dict[str, Any], peer: dict[str, Any]) -> float | None:
    if not ours.get("steps") or not peer.get("steps"):
        return None
    return significant((ours["cpu_s"] / ours["steps"]) / (peer["cpu_s"] / peer["steps"]))


def calibrated_batch_size(folder: Path) -> int:
    """Examples a worker and step for steps of about 0.16 s on this machine."""
    cost = measure("tests.benchmarks.in_process", "calibrate", timeout_s=120, log=folder / "calibrate.log")
    if cost.error:
        raise SystemExit(f"calibration: {cost.error}")
    return int(cost.result["batch_size"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--scaling", nargs="+", choices=SCALINGS, default=list(SCALINGS), help="slots x workers")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--peer-trials", type=int, default=6)
    parser.add_argument("--batch-size", type=int, help="examples a worker and step; absent: calibrated")
    parser.add_argument("--save-every", type=int, default=1, help="reports between checkpoints; 9: one a full trial")
    parser.add_argument("--long-rungs", action="store_true", help="ten times the steps")
    parser.add_argument("--folder", type=Path, help="keep everything here; absent: a temporary folder")
    return parser.parse_args()


def main() -> None:
    """Measure, then print one line."""
    options, host = _options(), machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        batch_size = options.batch_size or calibrated_batch_size(folder)
        benches = {name: Bench(*SCALINGS[name], options, batch_size, folder) for name in options.scaling}
        for bench in benches.values():
            in_turn(options.only, options.pairs, bench.run)
    faults = [f"{name}: {fault}" for name, bench in benches.items() for fault in bench.faults]
    settings = {name: getattr(options, name) for name in ("pairs", "trials", "peer_trials", "save_every", "long_rungs")}
    settings["batch_size"] = batch_size
    figures = {name: bench.summary() for name, bench in benches.items()}
    print_result("study", faults, machine=host, settings=settings, **figures)


if __name__ == "__main__":
    main()
