"""A study whose trials do nothing but wait, in warm slots; prints what it cost its driver, trial by trial."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks import timeline
from tests.benchmarks.common import Workload
from tests.benchmarks.ours import TimedSlot, serve_timed
from tests.benchmarks.processes import resident_bytes
from tuner.decisions.observer import Observer
from tuner.execution import search, tune_loop
from tuner.record.record import TrialRecord
from tuner.study_file.spec import StudySpec, make_spec

# How long a trial waits; workers of a local cluster inherit it.
SECONDS = "TUNER_BENCHMARK_IDLE_S"
# What a fine-tune may search; the sampler's cost grows with it.
SPACE = {
    "learning_rate": {"type": "float", "low": 1e-5, "high": 1e-1, "log": True},
    "weight_decay": {"type": "float", "low": 0.0, "high": 0.2},
    "warmup_ratio": {"type": "float", "low": 0.0, "high": 0.2},
    "beta2": {"type": "float", "low": 0.9, "high": 0.999},
    "lr_schedule": {"type": "categorical", "choices": ["constant", "linear", "cosine"]},
}


def serve_idle(serve: Callable[[dict[str, Any]], None], service: dict[str, Any]) -> None:
    """What runs in each worker: all of it but the training."""
    from tuner.execution import worker

    worker.LOOPS["ddp"] = wait
    serve_timed(serve, service)


def wait(config: Any, worker: Any, **options: Any) -> Iterator[Any]:
    """A loop that reports once, after a while."""
    import torch

    from trainables.finetune import Report
    from trainables.train_state import TrainState

    model, began = torch.nn.Linear(1, 1), time.perf_counter()
    time.sleep(float(os.environ[SECONDS]))
    metrics = {"step": 1.0, "train_loss": 1.0, "eval_loss": 1.0 + abs(config.learning_rate - 1e-3)}
    state = TrainState(model, torch.optim.SGD(model.parameters()), step=1, metrics=metrics)
    yield Report(1, metrics, (), time.perf_counter() - began, 0.0, is_last=True, state=state)


class IdleSlot(TimedSlot):
    """A slot whose workers wait."""

    serve_through = staticmethod(serve_idle)


class Meter(Observer):
    """Notes what the driver has cost at the end of each trial: (CPU seconds, resident bytes)."""

    def __init__(self) -> None:
        self.costs: list[tuple[float, int]] = []
        self.warnings: list[str] = []

    def trial_ended(self, record: TrialRecord) -> None:
        self.costs.append((time.process_time(), resident_bytes(os.getpid())))

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def idle_spec(workload: Workload) -> StudySpec:
    """The workload as a study of trials of one step."""
    return make_spec(
        {
            "study": "benchmark",
            "train": {**workload.train(), "max_steps": 1, "eval_every": 1},
            "search_space": SPACE,
            "search": {"num_trials": workload.num_trials},
            "scheduler": {"type": "none"},
            "scaling": {"gpus_per_worker": 0, "slots": workload.slots},
            "mlflow": {"enabled": workload.mlflow},
        }
    )


def main() -> None:
    """Run as many trials as the workload, given as JSON, has."""
    workload, seconds = Workload.from_json(sys.argv[1]), sys.argv[2]
    os.environ.update({timeline.VARIABLE: str(workload.timeline), SECONDS: seconds})
    tune_loop.TrialSlot = IdleSlot
    meter = Meter()
    root = Path(workload.folder, "studies")
    study = search.run(idle_spec(workload), source_text="study: benchmark\n", root=root, observer=meter)
    states = Counter(trial.state for trial in study.trials())
    print(json.dumps({"states": states, "costs": meter.costs, "warnings": meter.warnings}))


if __name__ == "__main__":
    main()
