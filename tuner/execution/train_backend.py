"""What Ray Train's controller gets of a slot: how its workers join a process group, and whom it asks for nodes.

The controller only passes messages, but unpickling Ray's own TorchConfig would have it import torch, a second and a
half and 200 MB for every slot. Here torch is imported where tensors are: in the workers, with all that they will need.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import ray
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.util import TrainingFramework

from tuner.processes import without_collections


@dataclass
class ProcessGroupConfig(BackendConfig):
    """As `ray.train.torch.TorchConfig`.

    Attributes:
        backend: Of torch.distributed, `cpu:gloo,cuda:nccl`.
        timeout_s: Of a collective.
        imports: Modules that the workers will need, beside torch.
    """

    backend: str = "gloo"
    timeout_s: int = 1800
    imports: tuple[str, ...] = ()

    @property
    def backend_cls(self) -> type[Backend]:
        return ProcessGroup

    @property
    def train_func_context(self) -> type[AbstractContextManager[Any]]:
        from ray.train.torch.config import TorchConfigContextManager

        return TorchConfigContextManager

    @property
    def framework(self) -> TrainingFramework:
        return TrainingFramework.TORCH

    def to_dict(self) -> dict[str, Any]:
        return {"backend": self.backend, "timeout_s": self.timeout_s}


class ProcessGroup(Backend):
    """Has the workers join one process group before they train, and leave it afterwards."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        try:
            _join_all(worker_group, backend_config)
        except Exception:
            # Ray Train forgets workers that fail here, with all that they hold of the cluster.
            worker_group.abort()
            raise

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        # A worker that hangs is killed right after; nothing is owed to it.
        ray.wait(worker_group.execute_async(_leave), num_returns=len(worker_group), timeout=5.0)


def _join_all(workers: Any, config: BackendConfig) -> None:
    address, port = workers.execute_single(0, get_address_and_port)
    size = len(workers)
    ray.get([workers.execute_single_async(rank, _join, config, rank, size, address, port) for rank in range(size)])


def _join(config: ProcessGroupConfig, rank: int, size: int, address: str, port: int) -> None:
    with without_collections():
        import torch
        from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group

        for name in config.imports:
            # What is wrong with one is told by the trial that needs it.
            with suppress(Exception):
                import_module(name)
    if "nccl" in config.backend and not torch.cuda.is_available():
        raise RuntimeError("Ray has given this worker a GPU, but torch sees none: `tune doctor` says what is there")
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    _set_torch_distributed_env_vars()  # type: ignore[no-untyped-call]
    _setup_torch_process_group(config.backend, rank, size, init_method="env://", timeout_s=config.timeout_s)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


class FixedCluster(FixedScalingPolicy):
    """Asks no autoscaler for nodes: the cluster is as large as it is."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Starts no coordinator."""

    def _maybe_send_resource_request(self) -> None:
        pass

    def _send_resource_request(self) -> None:
        pass

    def _cancel_resource_request(self) -> None:
        pass


class NoBarrier:
    """Stands for the actor at which workers meet in ray.train.report; the built-in loops meet in torch.distributed."""

    @classmethod
    def options(cls, **options: Any) -> type[NoBarrier]:
        """Of an actor."""
        return cls

    @classmethod
    def remote(cls, **options: Any) -> NoBarrier:
        """Starts nothing."""
        return cls()
