"""The Ray cluster a study runs on: start or join it, count what it has, leave it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import ray

from tuner.errors import ClusterError
from tuner.plan import Capacity

# Read by Tune and Train when they start; a study never needs what they turn off. See each name's documentation.
ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # results live in the study's record, not in Tune's files
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # an interruption is ours to handle: checkpoints first
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # Tune's own experiment state is never read back
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # the search checks metrics itself and says which were reported
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1000000000",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "30",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def connect(address: str | None = None) -> None:
    """Join the cluster at `address`, or start one on this machine.

    Raises:
        ClusterError: Ray cannot be started or reached.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    if ray.is_initialized():
        return
    try:
        ray.init(
            # "local" keeps a cluster that happens to run on the host from being picked up.
            address=address or "local",
            include_dashboard=False if address is None else None,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=True,
            runtime_env={"env_vars": worker_environment()},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = address or "on this machine"
        raise ClusterError(f"cannot start or reach Ray {where}: {str(error).splitlines()[0]}") from error
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends."""
    os.environ.pop("RAY_ADDRESS", None)
    ray.shutdown()


def capacity() -> Capacity:
    """CPUs and GPUs of the cluster as a whole and of each live node."""
    nodes = tuple(_node_capacity(node["Resources"]) for node in ray.nodes() if node["Alive"])
    return Capacity(cpus=sum(cpus for cpus, _ in nodes), gpus=sum(gpus for _, gpus in nodes), nodes=nodes)


def worker_environment() -> dict[str, str]:
    """Variables every process of the study gets."""
    source = str(Path(__file__).resolve().parent.parent)
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]} if "OMP_NUM_THREADS" in os.environ else {}
    return {**ENVIRONMENT, **threads, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "TOKENIZERS_PARALLELISM": "false"}


def _node_capacity(resources: dict[str, Any]) -> tuple[float, float]:
    return float(resources.get("CPU", 0.0)), float(resources.get("GPU", 0.0))
