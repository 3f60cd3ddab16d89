"""A search through warm slots, timed in the workers; prints what its record says."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.benchmarks import timeline
from tests.benchmarks.common import HIGH_RATE, LOW_RATE, Workload
from trainables.finetune import Worker
from tuner import search, slot, worker
from tuner.channel import Address, Ended, Go, Reported, Saved, Start, Stop
from tuner.slot import TrialSlot
from tuner.spec import StudySpec, make_spec

# The workers of a local cluster inherit it.
TIMELINE = "TUNER_BENCHMARK_TIMELINE"


class TimedLine(worker.Line):
    """Notes when reports leave the loop, how long verdicts take, and what lies between."""

    def __init__(self, address: Address, known: Worker) -> None:
        super().__init__(address, known)
        self._path = Path(os.environ[TIMELINE]) if known.rank == 0 else None
        self._trial = -1
        self._since = time.time()

    def send(self, message: Any) -> None:
        if isinstance(message, Reported) and self._path:
            loss = message.metrics["eval_loss"]
            timeline.note_report(
                self._path, message.number, message.step, message.busy_s, loss, is_default=message.number == 0
            )
        elif isinstance(message, Saved):
            self._note("save")
        elif isinstance(message, Ended):
            self._note("close")
        self._since = time.time()
        super().send(message)

    def receive(self) -> Any:
        command = super().receive()
        if isinstance(command, Start):
            self._note("idle")
            self._trial = command.assignment.number
        elif isinstance(command, (Go, Stop)):
            self._note("decision", stops=isinstance(command, Stop))
        self._since = time.time()
        return command

    def _note(self, kind: str, **values: Any) -> None:
        if self._path:
            timeline.note(self._path, kind, self._trial, s=time.time() - self._since, **values)


def serve_timed(service: dict[str, Any]) -> None:
    """What runs in each worker instead of `tuner.slot._serve`."""
    worker.Line = TimedLine
    worker.serve(service)


class TimedSlot(TrialSlot):
    """A slot whose workers are timed."""

    def setup(self, config: dict[str, Any]) -> None:
        slot._serve = serve_timed
        super().setup(config)


def study_spec(workload: Workload) -> StudySpec:
    """The workload as a study."""
    scheduler = {"type": "asha" if workload.stops_early else "none", "reduction_factor": 3}
    if workload.stops_early:
        scheduler["grace_period"] = workload.unit
    return make_spec(
        {
            "study": "benchmark",
            "train": workload.train(),
            "search_space": {"learning_rate": {"type": "float", "low": LOW_RATE, "high": HIGH_RATE, "log": True}},
            "search": {"num_trials": workload.num_trials, "seed": 0},
            "scheduler": scheduler,
            "scaling": {"num_workers": workload.workers, "gpus_per_worker": 0, "slots": workload.slots},
            "checkpoint": {"every": workload.unit * workload.save_every, "keep_last": 1, "keep_best_trials": 1},
            "mlflow": {"enabled": workload.mlflow},
        }
    )


def main() -> None:
    """Run the workload given as JSON."""
    workload = Workload.from_json(sys.argv[1])
    os.environ[TIMELINE] = str(workload.timeline)
    search.TrialSlot = TimedSlot
    study = search.run(study_spec(workload), source_text="study: benchmark\n", root=Path(workload.folder, "studies"))
    states = Counter(trial.state for trial in study.trials())
    share = study.sessions()[-1]["training_share"]
    print(json.dumps({"states": states, "training_share": share, "state": study.status()["state"]}))


if __name__ == "__main__":
    main()
