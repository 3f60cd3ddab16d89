"""A KubeRay RayJob: a head that runs the study, and workers that train."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from tuner.errors import InputError
from tuner.remote.launch import Launch
from tuner.study_file.yaml_text import to_yaml

_FILES = "/etc/tune"
_RETRIES = 3
# Trials save when their pod is told to go.
_GRACE_S = 60


@dataclass(frozen=True)
class KubernetesOptions:
    """What Kubernetes wants to know.

    Attributes:
        image: Holds this project, Ray and torch.
        claim: Persistent volume claim of the studies; all pods mount it at the studies' root.
        memory: Of each worker.
        namespace: Empty: the current one.
        secret: Secret that holds the study's secrets under their names.
    """

    image: str
    claim: str
    memory: str
    namespace: str = ""
    secret: str = ""


def kubernetes_manifest(launch: Launch, options: KubernetesOptions) -> str:
    """The study file as a ConfigMap, and the RayJob that runs it, as YAML.

    Raises:
        InputError: The studies' root is not a place where a volume can be mounted, or a variable of `env` is not set.
    """
    if not PurePosixPath(launch.root).is_absolute():
        raise InputError(
            f"--root must be the path of a volume in the pods, got {launch.root}", "Such as: --root /studies"
        )
    documents = [_config_map(launch, options), _ray_job(launch, options)]
    secret = options.secret or f"{_name(launch)}-secrets"
    literals = "".join(f' --from-literal={name}="${name}"' for name in launch.spec.secrets)
    make = f"# Its secrets: kubectl create secret generic {secret}{literals}\n" if literals else ""
    return f"# {launch.title}\n{make}" + "---\n".join(map(to_yaml, documents))


def _name(launch: Launch) -> str:
    """The study's name as Kubernetes takes names (RFC 1123), short enough for what KubeRay appends."""
    return re.sub("[^a-z0-9]+", "-", launch.spec.study.lower()).strip("-")[:40].strip("-")


def _file(launch: Launch) -> str:
    return f"{launch.spec.study}.yaml"


def _metadata(launch: Launch, options: KubernetesOptions) -> dict[str, Any]:
    place = {"namespace": options.namespace} if options.namespace else {}
    return {"name": _name(launch), **place, "labels": {"app.kubernetes.io/managed-by": "tune"}}


def _config_map(launch: Launch, options: KubernetesOptions) -> dict[str, Any]:
    data = {_file(launch): launch.file.read_text(encoding="utf-8")}
    place, _, _ = launch.spec.trainable.rpartition(":")
    if place.endswith(".py"):
        # Beside the study file it is found.
        data[Path(place).name] = Path(place).read_text(encoding="utf-8")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(launch, options), "data": data}


def _ray_job(launch: Launch, options: KubernetesOptions) -> dict[str, Any]:
    file = PurePosixPath(_FILES, _file(launch))
    worker = _resources(launch.cpus, options.memory, launch.gpus)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(launch, options),
        "spec": {
            "entrypoint": f"{launch.run(file)} --address auto",
            "backoffLimit": _RETRIES,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": {
                "rayVersion": metadata.version("ray"),
                "headGroupSpec": {
                    # Trials are for the workers: the study itself must not be short of memory.
                    "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
                    "template": _pod(launch, options, "ray-head", _resources(4, "16Gi", 0)),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": launch.nodes,
                        "minReplicas": launch.nodes,
                        "maxReplicas": launch.nodes,
                        "rayStartParams": {"num-cpus": str(launch.cpus), "num-gpus": str(launch.gpus)},
                        "template": _pod(launch, options, "ray-worker", worker),
                    }
                ],
            },
        },
    }


def _resources(cpus: int, memory: str, gpus: int) -> dict[str, Any]:
    amounts = {"cpu": str(cpus), "memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {"requests": amounts, "limits": dict(amounts)}


def _pod(launch: Launch, options: KubernetesOptions, name: str, resources: dict[str, Any]) -> dict[str, Any]:
    volumes = {
        "study": ({"configMap": {"name": _name(launch)}}, _FILES),
        "studies": ({"persistentVolumeClaim": {"claimName": options.claim}}, launch.root),
        # Workers of one node pass each other gradients here; a container's own is 64 MB.
        "memory": ({"emptyDir": {"medium": "Memory"}}, "/dev/shm"),
    }
    container = {
        "name": name,
        "image": options.image,
        "env": _variables(launch, options),
        "resources": resources,
        "volumeMounts": [{"name": volume, "mountPath": place} for volume, (_, place) in volumes.items()],
    }
    return {
        "spec": {
            "terminationGracePeriodSeconds": _GRACE_S,
            "containers": [container],
            "volumes": [{"name": volume, **source} for volume, (source, _) in volumes.items()],
        }
    }


def _variables(launch: Launch, options: KubernetesOptions) -> list[dict[str, Any]]:
    secret = options.secret or f"{_name(launch)}-secrets"
    plain = [{"name": name, "value": value} for name, value in launch.environment().items()]
    return plain + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}} for name in launch.spec.secrets
    ]
