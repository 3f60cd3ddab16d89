"""Ray's documented pattern for searching over distributed training, timed in the workers.

https://docs.ray.io/en/latest/train/user-guides/hyperparameter-optimization.html: a Tuner over a driver function that
calls `TorchTrainer.fit()` once a trial, with ASHA, OptunaSearch and the MLflow callback. `tuned` as the second argument
makes its controllers poll every 0.1 s and turns the file loggers off.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.tune
from ray.air.integrations.mlflow import MLflowLoggerCallback
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from tests.benchmarks import timeline
from tests.benchmarks.common import DEFAULT_RATE, HIGH_RATE, LOW_RATE, Workload
from tests.benchmarks.processes import REPOSITORY
from trainables.config import TrainConfig
from trainables.finetune import Report, Worker, finetune

TUNED = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}


def train_worker(config: dict[str, Any]) -> None:
    """The `train_loop_per_worker`: the same loop, its reports go to Ray Train with a checkpoint each."""
    workload, rate = Workload(**config["workload"]), config["learning_rate"]
    context = ray.train.get_context()
    worker = Worker(context.get_world_rank(), context.get_world_size(), get_device(), context.get_local_rank())
    train_config = TrainConfig.model_validate({**workload.train(), "learning_rate": rate})
    for report in finetune(train_config, worker, cache_dir=Path(workload.folder, "data")):
        if worker.rank == 0:
            busy_s, loss = report.train_s + report.eval_s, report.metrics["eval_loss"]
            is_default = rate == DEFAULT_RATE
            timeline.note_report(workload.timeline, config["trial"], report.step, busy_s, loss, is_default)
        saves = worker.rank == 0 and workload.saves_at(report.step)
        report_with_checkpoint(report) if saves else ray.train.report(report.metrics)


def report_with_checkpoint(report: Report) -> None:
    """As the guide saves under DDP: rank 0 alone, into a temporary folder that Ray copies."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        state = {"model": report.state.model.state_dict(), "optimizer": report.state.optimizer.state_dict()}
        torch.save(state, Path(folder, "checkpoint.pt"))
        ray.train.report(report.metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def drive_trial(config: dict[str, Any]) -> None:
    """One trial: a TorchTrainer of its own."""
    trial, workload = ray.tune.get_context().get_trial_id(), Workload(**config["workload"])
    TorchTrainer(
        train_worker,
        train_loop_config={**config, "trial": trial},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workload.workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            name=f"train-{trial}",
            storage_path=str(Path(workload.folder, "ray")),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
            callbacks=[TuneReportCallback()],
        ),
    ).fit()


def search(workload: Workload) -> ray.tune.ResultGrid:
    """The Tuner of the guide."""
    folder = Path(workload.folder)
    mlflow = MLflowLoggerCallback(tracking_uri=f"sqlite:///{folder}/mlflow.db", experiment_name="stock")
    tuner = ray.tune.Tuner(
        drive_trial,
        param_space={
            "learning_rate": ray.tune.loguniform(LOW_RATE, HIGH_RATE),
            "workload": json.loads(workload.to_json()),
        },
        tune_config=ray.tune.TuneConfig(
            metric="eval_loss",
            mode="min",
            num_samples=workload.num_trials,
            max_concurrent_trials=workload.slots,
            search_alg=OptunaSearch(seed=0, points_to_evaluate=[{"learning_rate": DEFAULT_RATE}]),
            scheduler=ASHAScheduler(
                time_attr="step", grace_period=workload.unit, max_t=workload.max_steps, reduction_factor=3
            ),
        ),
        run_config=ray.tune.RunConfig(
            name="tune", storage_path=str(folder / "ray"), callbacks=[mlflow] if workload.mlflow else [], verbose=0
        ),
    )
    return tuner.fit()


def start_ray(num_cpus: int) -> None:
    """Start a Ray of its own under which the pattern does not hang.

    A stopped trial's resources are freed by an actor that asks the dashboard, so there must be one; it finds it through
    RAY_ADDRESS alone when another Ray runs on the host, so every process must inherit it and the port be known before.

    Args:
        num_cpus: A driver function takes one in Ray's books, beside those of the workers.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    os.environ["RAY_GCS_SERVER_PORT"] = str(port)
    os.environ["RAY_ADDRESS"] = f"{ray.util.get_node_ip_address()}:{port}"
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=True, log_to_driver=False)
    assert ray.get_runtime_context().gcs_address == os.environ["RAY_ADDRESS"], "Ray started under another address"


def main() -> None:
    """Run the workload given as JSON."""
    workload = Workload.from_json(sys.argv[1])
    os.environ.update(TUNED if "tuned" in sys.argv[2:] else {})
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    start_ray(workload.slots * (workload.workers + 1))
    results = search(workload)
    last_steps = {result.metrics["trial_id"]: result.metrics["step"] for result in results if result.metrics}
    print(json.dumps({"errors": results.num_errors, "last_steps": last_steps}))
    ray.shutdown()


if __name__ == "__main__":
    main()
