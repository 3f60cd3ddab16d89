"""A workload of Databricks AI Runtime: every node runs the same command, which makes a Ray cluster of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tuner.errors import InputError
from tuner.remote.launch import Launch, version
from tuner.study_file.yaml_text import to_yaml


@dataclass(frozen=True)
class DatabricksOptions:
    """What AI Runtime wants to know.

    Attributes:
        accelerator: Its name of a node's GPUs.
        scope: Secret scope that holds the study's secrets under their names; empty: there are none.
        experiment: MLflow experiment.
        environment: Version of the environment.
        dependencies: What to install; empty: this project.
        max_retries: Further attempts, each of which goes on with the study.
        timeout_minutes: Limit of one attempt.
    """

    accelerator: str
    scope: str
    experiment: str
    environment: str
    dependencies: tuple[str, ...]
    max_retries: int
    timeout_minutes: int


def databricks_workload(launch: Launch, options: DatabricksOptions) -> str:
    """The workload as YAML, for `databricks air run`.

    AI Runtime sets NODE_RANK and MASTER_ADDR on every node, and MLFLOW_RUN_ID, whose run becomes the study's parent.

    Raises:
        InputError: The study is not in the folder that is sent, its root is not on a volume, its secrets have no
            scope, or the accelerator has another number of GPUs.
    """
    _check(launch, options)
    secrets = launch.spec.secrets or (("HF_TOKEN",) if options.scope else ())
    workload: dict[str, Any] = {
        "experiment_name": options.experiment or launch.spec.study,
        "environment": {
            "version": options.environment,
            "dependencies": list(options.dependencies) or [f"tuner-llm=={version()}"],
        },
        "compute": {"num_accelerators": launch.nodes * launch.gpus, "accelerator_type": options.accelerator},
        "code_source": {"type": "snapshot", "snapshot": {"root_path": str(Path.cwd())}},
        "env_variables": {"NCCL_SOCKET_IFNAME": "eth0", **launch.environment()},
        "secrets": {name: f"{options.scope}/{name}" for name in secrets},
        "max_retries": options.max_retries,
        "timeout_minutes": options.timeout_minutes,
        "command": _command(launch),
    }
    return f"# {launch.title}\n" + to_yaml({key: value for key, value in workload.items() if value != {}})


def _check(launch: Launch, options: DatabricksOptions) -> None:
    if launch.file.is_absolute() or ".." in launch.file.parts:
        raise InputError(f"{launch.file} is not in the folder that is sent to the nodes", f"cd {launch.file.parent}")
    if not PurePosixPath(launch.root).is_absolute():
        remedy = "Such as: --root /Volumes/main/default/tune/studies"
        raise InputError(f"--root must be on a volume that every node sees, got {launch.root}", remedy)
    if launch.spec.secrets and not options.scope:
        raise InputError(f"no scope for the secrets {', '.join(launch.spec.secrets)}", "Name it: --scope NAME")
    found = re.match(r"GPU_(\d+)x", options.accelerator)
    if found and int(found[1]) != launch.gpus:
        remedy = f"Ask for --gpus {found[1]}, or for another --accelerator."
        raise InputError(f"{options.accelerator} has {found[1]} GPUs a node, not {launch.gpus}", remedy)


def _command(launch: Launch) -> str:
    lines = ["set -euo pipefail", 'cd "$CODE_SOURCE_PATH"', "export HEAD=$MASTER_ADDR", launch.setup]
    return "".join(f"{line}\n" for line in lines if line) + launch.fill("launch_node.sh", {})
