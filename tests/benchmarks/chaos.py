"""A study that is killed again and again must end as if nothing had happened.

    python -m tests.benchmarks.chaos [--kills 5] [--seed 0] [--slots 1] [--folder DIR]

Twelve trials of a tiny model (ASHA 1/3/9 of 27 steps, a report and a checkpoint at every step, MLflow on) run once
undisturbed and once under kills: of the driver, of a worker, of everything at once, of the slot's actor, Ctrl-C, and
of Ray's head, in turn and at random moments, a `tune resume` following at once on each that ends the process. With
one slot the two must be equal bit for bit. With several the early stops depend on timing; then no trial may be lost,
come twice, or fall behind its newest complete checkpoint. Prints one line of JSON; the exit code is 1 when anything
differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.chaos_sittings import (
    END_TIMEOUT_S,
    FATAL,
    INTERRUPT_TIMEOUT_S,
    Kill,
    Progress,
    Sitting,
    last_lines,
    plan_kills,
)
from tests.benchmarks.common import DEFAULT_RATE, HIGH_RATE, LOW_RATE, MODEL
from tuner.record.lock import holder
from tuner.record.storage import JOURNAL
from tuner.record.study import Study
from tuner.record.study_dir import LOCK

NAME, NUM_TRIALS, MAX_STEPS = "chaos", 12, 27
STATUS = {"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAILED": "FAILED"}


def study_data(slots: int) -> dict[str, Any]:
    """The study file."""
    return {
        "study": NAME,
        "train": {
            "model": MODEL,
            "dataset": {"path": "python-docstrings", "limit": 64},
            "max_length": 64,
            "batch_size": 4,
            "max_steps": MAX_STEPS,
            "eval_every": 1,
            "eval_batches": 1,
            "precision": "fp32",
            "learning_rate": DEFAULT_RATE,
        },
        "search_space": {"learning_rate": {"type": "float", "low": LOW_RATE, "high": HIGH_RATE, "log": True}},
        "search": {"num_trials": NUM_TRIALS, "seed": 0},
        "scheduler": {"type": "asha", "grace_period": 1, "reduction_factor": 3},
        "scaling": {"gpus_per_worker": 0, "slots": slots},
        # Trials that are killed often are not what this is about.
        "failures": {"max_failures": 100},
    }


@dataclass
class Run:
    """A study in a folder of its own, with what went wrong while it ran."""

    folder: Path
    slots: int
    faults: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    sittings: list[Sitting] = field(default_factory=list)

    @property
    def study_dir(self) -> Path:
        return self.folder / "studies" / NAME

    @property
    def record_size(self) -> int:
        path = self.study_dir / JOURNAL
        return path.stat().st_size if path.exists() else 0

    def start(self) -> Sitting:
        """A new study, or on with the one that is there."""
        if not self.sittings:
            (self.folder / "chaos.yaml").write_text(json.dumps(study_data(self.slots)), encoding="utf-8")
        arguments = ("resume", NAME) if self.study_dir.exists() else ("run", "chaos.yaml")
        self.sittings.append(Sitting(self.folder, len(self.sittings), *arguments))
        return self.sittings[-1]

    def finish(self) -> None:
        """Let the last sitting end by itself, and see what is left."""
        self.expect_end(0, END_TIMEOUT_S)
        for sitting in self.sittings:
            if lingering := sitting.num_lingering():
                self.faults.append(f"{sitting.name}: {lingering} processes outlived it")
            if "Traceback" in sitting.text:
                self.faults.append(f"{sitting.name} printed a traceback")

    def expect_end(self, code: int, timeout_s: float) -> None:
        sitting = self.sittings[-1]
        found = sitting.end(timeout_s)
        if found != code:
            how = f"not over after {timeout_s:.0f} s" if found is None else f"exit code {found} instead of {code}"
            self.faults.append(f"{sitting.name}: {how}: {' | '.join(last_lines(sitting.text))}")


def undisturbed(folder: Path, slots: int) -> Run:
    """Run the study in one go."""
    folder.mkdir(parents=True)
    run = Run(folder, slots)
    run.start()
    run.finish()
    return run


def killed(folder: Path, slots: int, kills: list[Kill], whole_size: int, seed: int) -> Run:
    """Run the study under kills."""
    folder.mkdir(parents=True)
    run, source = Run(folder, slots), random.Random(seed)
    progress = Progress(run.study_dir, MAX_STEPS)
    sitting = run.start()
    for kill in kills:
        if not _is_due(run, kill, whole_size):
            break
        progress.note()
        if not sitting.hit(kill.kind, source):
            run.faults.append(f"{sitting.name}: there was no {kill.kind} to kill")
            continue
        run.kills[kill.kind] += 1
        _tell(f"{sitting.name}: {kill.kind} killed at {run.record_size / whole_size:.0%}")
        if kill.kind in FATAL:
            # Ray itself takes half a minute to notice that its head died while it started.
            run.expect_end(FATAL[kill.kind], END_TIMEOUT_S if kill.kind == "head" else INTERRUPT_TIMEOUT_S)
            sitting = run.start()
    run.finish()
    run.faults += progress.setbacks()
    return run


def _is_due(run: Run, kill: Kill, whole_size: int) -> bool:
    """Wait for the moment of a kill; False when the sitting ends before."""
    sitting = run.sittings[-1]
    if kill.growth is not None and not sitting.wait_until(lambda: run.record_size >= (kill.growth or 0) * whole_size):
        if not sitting.is_over:
            run.faults.append(f"{sitting.name}: stands still at {run.record_size / whole_size:.0%}")
        return False
    since = sitting.started if kill.growth is None else time.monotonic()
    return sitting.wait_until(lambda: time.monotonic() - since >= kill.delay_s)


# -- what came of it --------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a study's record and MLflow say.

    Attributes:
        trials: By number: state, params, value, step and reports.
        runs: MLflow's runs by trial number: status and train_loss as (step, value) of each point.
        parents: Statuses of the study's own runs.
        faults: What does not agree in itself.
    """

    trials: dict[int, dict[str, Any]]
    runs: dict[int, list[dict[str, Any]]]
    parents: list[str]
    faults: list[str]


def outcome(run: Run) -> Outcome:
    """Read what a finished study has left."""
    study = Study.open(run.folder / "studies", NAME)
    keys = ("state", "params", "value", "step", "reports")
    trials = {trial.number: {key: getattr(trial, key) for key in keys} for trial in study.trials()}
    runs, parents = _mlflow_runs(run.folder / "studies" / "mlflow.db")
    faults = [*_disagreements(trials, runs, parents)]
    if study.status()["state"] != "finished":
        faults.append(f"the study is {study.status()['state']}")
    if holder(run.study_dir / LOCK) is not None or (run.study_dir / LOCK).read_bytes():
        faults.append("the lock is still held")
    return Outcome(trials, runs, parents, faults)


def _mlflow_runs(store: Path) -> tuple[dict[int, list[dict[str, Any]]], list[str]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs: dict[int, list[dict[str, Any]]] = {}
    parents: list[str] = []
    for run in client.search_runs(experiments, max_results=1000):
        if "tune.trial" not in run.data.tags:
            parents.append(run.info.status)
            continue
        points = client.get_metric_history(run.info.run_id, "train_loss")
        losses = sorted((point.step, point.value) for point in points)
        runs.setdefault(int(run.data.tags["tune.trial"]), []).append({"status": run.info.status, "train_loss": losses})
    return runs, parents


def _disagreements(
    trials: dict[int, dict[str, Any]], runs: dict[int, list[dict[str, Any]]], parents: list[str]
) -> Iterator[str]:
    if sorted(trials) != list(range(NUM_TRIALS)):
        yield f"trials {sorted(trials)} instead of {NUM_TRIALS}"
    if parents != ["FINISHED"]:
        yield f"MLflow's runs of the study are {parents}"
    if sorted(runs) != sorted(trials):
        yield f"MLflow has runs of trials {sorted(runs)}"
    for number, trial in trials.items():
        steps = list(range(1, trial["step"] + 1))
        if trial["state"] not in ("COMPLETE", "PRUNED"):
            yield f"trial {number} is {trial['state']}"
        if list(trial["reports"]) != steps:
            yield f"trial {number} reported {list(trial['reports'])}"
        found = runs.get(number, [])
        if [run["status"] for run in found] != [STATUS.get(trial["state"])]:
            yield f"trial {number} is {trial['state']}, in MLflow {[run['status'] for run in found]}"
        for run in found:
            if [step for step, _ in run["train_loss"]] != steps:
                yield f"trial {number} of {trial['step']} steps: MLflow has {[step for step, _ in run['train_loss']]}"


def differences(whole: Outcome, survivor: Outcome) -> Iterator[str]:
    """Where a killed study ended unlike the undisturbed one."""
    for number in sorted(whole.trials.keys() | survivor.trials.keys()):
        old, new = whole.trials.get(number, {}), survivor.trials.get(number, {})
        for key in old.keys() | new.keys():
            if old.get(key) != new.get(key):
                yield f"trial {number}: {key} {new.get(key)!r} instead of {old.get(key)!r}"
        if whole.runs.get(number) != survivor.runs.get(number):
            yield f"trial {number}: MLflow has {survivor.runs.get(number)} instead of {whole.runs.get(number)}"


def run_chaos(folder: Path, num_kills: int, seed: int, slots: int) -> dict[str, Any]:
    """Run both, compare, and return the figures."""
    started = time.monotonic()
    first = undisturbed(folder / "undisturbed", slots)
    _tell(f"undisturbed: {time.monotonic() - started:.0f} s, {first.faults or 'well'}")
    second = killed(folder / "killed", slots, plan_kills(num_kills, seed), first.record_size, seed)
    whole, survivor = outcome(first), outcome(second)
    faults = [f"undisturbed: {fault}" for fault in [*first.faults, *whole.faults]] + second.faults + survivor.faults
    if slots == 1:
        faults += differences(whole, survivor)
    return {
        "kills": second.kills.total(),
        "by_kind": dict(second.kills),
        "resumes": len(second.sittings) - 1,
        "identical": not faults,
        "differences": faults,
        "trials": len(survivor.trials),
        "mlflow_runs": sum(map(len, survivor.runs.values())) + len(survivor.parents),
        "seconds": round(time.monotonic() - started, 1),
    }


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Run it and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep everything here; absent: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        figures = run_chaos(options.folder or Path(temporary), options.kills, options.seed, options.slots)
    print(json.dumps({"benchmark": "chaos", "slots": options.slots, "seed": options.seed, **figures}))
    return 0 if figures["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
