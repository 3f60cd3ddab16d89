"""Optuna's own loop in one process: the floor of orchestration, without Ray, isolation, scale or tracking.

`calibrate` as the only argument prints the batch size with which a step takes about 0.16 s here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median

import optuna
import torch
from optuna.pruners import NopPruner, SuccessiveHalvingPruner

from tests.benchmarks import timeline
from tests.benchmarks.common import DEFAULT_RATE, HIGH_RATE, LOW_RATE, Workload
from trainables.checkpoint import save_checkpoint
from trainables.checkpoint_dir import keep_last, step_dir
from trainables.config import TrainConfig
from trainables.errors import Diverged
from trainables.finetune import Warm, Worker, finetune

STEP_S = 0.16
FIRST_GUESS = 64
WORKER = Worker(rank=0, world_size=1, device=torch.device("cpu"))


class Objective:
    """One trial after another through the same loop, with a checkpoint at each report."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._config = TrainConfig.model_validate(workload.train())
        self._warm = Warm()

    def __call__(self, trial: optuna.Trial) -> float:
        rate = trial.suggest_float("learning_rate", LOW_RATE, HIGH_RATE, log=True)
        checkpoints = Path(self._workload.folder, "checkpoints", str(trial.number))
        cache_dir = Path(self._workload.folder, "data")
        loss = float("nan")
        with closing(
            finetune(self._config.with_params({"learning_rate": rate}), WORKER, cache_dir=cache_dir, warm=self._warm)
        ) as loop:
            for report in loop:
                loss = report.metrics["eval_loss"]
                busy_s, is_default = report.train_s + report.eval_s, rate == DEFAULT_RATE
                timeline.note_report(self._workload.timeline, trial.number, report.step, busy_s, loss, is_default)
                if self._workload.saves_at(report.step):
                    save_checkpoint(report.state, step_dir(checkpoints, report.step), WORKER)
                    keep_last(checkpoints, 1)
                trial.report(loss, report.step)
                if trial.should_prune() and not report.is_last and not is_default:
                    raise optuna.TrialPruned
        return loss


def search(workload: Workload) -> optuna.Study:
    """The whole search."""
    pruner = SuccessiveHalvingPruner(min_resource=workload.unit, reduction_factor=3)
    study = optuna.create_study(
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=pruner if workload.stops_early else NopPruner(),
    )
    study.enqueue_trial({"learning_rate": DEFAULT_RATE})
    study.optimize(Objective(workload), n_trials=workload.num_trials, catch=(Diverged,))
    return study


def calibrate() -> int:
    """Examples per step for steps of STEP_S; even, so that two workers share them."""
    batch_size = FIRST_GUESS
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            step_s = step_seconds(batch_size, Path(folder))
            batch_size = max(4, 4 * round(batch_size * STEP_S / step_s / 4))
    return batch_size


def step_seconds(batch_size: int, cache_dir: Path) -> float:
    """Median of some steps, the first ones left out."""
    workload = Workload(folder=str(cache_dir), batch_size=batch_size, num_trials=1)
    config = TrainConfig.model_validate({**workload.train(), "max_steps": 10, "eval_every": 1})
    seconds = [report.train_s for report in finetune(config, WORKER, cache_dir=cache_dir)]
    return median(seconds[3:])


def main() -> None:
    """Run the workload given as JSON."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    if sys.argv[1] == "calibrate":
        print(json.dumps({"batch_size": calibrate()}))
        return
    study = search(Workload.from_json(sys.argv[1]))
    print(json.dumps({"last_steps": {trial.number: trial.last_step for trial in study.trials}}))


if __name__ == "__main__":
    main()
