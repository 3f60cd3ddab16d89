"""A search through warm slots, timed in the workers; prints what its record says."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks import timeline
from tests.benchmarks.common import HIGH_RATE, LOW_RATE, Workload
from tuner.execution import search, tune_loop
from tuner.execution.slot import TrialSlot
from tuner.study_file.spec import StudySpec, make_spec


def serve_timed(serve: Callable[[dict[str, Any]], None], service: dict[str, Any]) -> None:
    """What runs in each worker in place of `serve`."""
    # Imported in the worker: the slot's own process is to stay as it is.
    from tests.benchmarks.timed_line import TimedLine
    from tuner.execution import worker

    worker.Line = TimedLine
    serve(service)


class TimedSlot(TrialSlot):
    """A slot whose workers are timed: whatever it has a trainer run, it runs through `serve_through`."""

    serve_through = staticmethod(serve_timed)

    def setup(self, config: dict[str, Any]) -> None:
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        plain, serve_through = DataParallelTrainer.__init__, self.serve_through

        def timed(
            self: DataParallelTrainer, serve: Callable[[dict[str, Any]], None], *rest: Any, **options: Any
        ) -> None:
            plain(self, partial(serve_through, serve), *rest, **options)

        DataParallelTrainer.__init__ = timed
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
    os.environ[timeline.VARIABLE] = str(workload.timeline)
    tune_loop.TrialSlot = TimedSlot
    study = search.run(study_spec(workload), source_text="study: benchmark\n", root=Path(workload.folder, "studies"))
    states = Counter(trial.state for trial in study.trials())
    result = {
        "states": states,
        "last_steps": {trial.number: trial.step for trial in study.trials()},
        "training_share": study.sessions()[-1]["training_share"],
        "state": study.status()["state"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
