"""Shell scripts: for nodes that nobody schedules, and for Slurm."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.remote.launch import Launch

# Time between Slurm's notice and its end: trials save after their next step.
_NOTICE_S = 180


@dataclass(frozen=True)
class SlurmOptions:
    """What Slurm wants to know.

    Attributes:
        time: Limit of one sitting, as sbatch takes it.
        partition: Where to run; empty: the default one.
        account: Who pays; empty: the default one.
        extra: Further options of sbatch, `--qos=high`.
    """

    time: str
    partition: str = ""
    account: str = ""
    extra: tuple[str, ...] = ()


def nodes_script(launch: Launch, name: str) -> str:
    """A script to run on every node; `name` is that of its file."""
    return launch.fill("launch_nodes.sh", {"script": name}) + launch.fill("launch_node.sh", {})


def slurm_script(launch: Launch, name: str, options: SlurmOptions) -> str:
    """A batch script; `name` is that of its file."""
    values = {"script": name, "options": "\n".join(f"#SBATCH {option}" for option in _options(launch, options))}
    return launch.fill("launch_slurm.sh", values | {"stop": launch.verb("stop"), "status": launch.verb("status")})


def _options(launch: Launch, options: SlurmOptions) -> list[str]:
    given = {
        "job-name": launch.spec.study,
        "nodes": str(launch.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(launch.gpus or ""),
        "cpus-per-task": str(launch.cpus),
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": f"B:TERM@{_NOTICE_S}",
    }
    # Ray's `symmetric-run` ends every Ray of its node.
    return [f"--{key}={value}" for key, value in given.items() if value] + ["--exclusive", "--requeue", *options.extra]
