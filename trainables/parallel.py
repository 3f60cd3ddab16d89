"""Data parallelism, applied from outside to single-device model code."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Worker:
    """One process of a trial.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: Processes of the trial; above 1 torch.distributed is initialised.
        device: Where this process computes.
        local_rank: Rank among the processes of the same host.
    """

    rank: int
    world_size: int
    device: torch.device
    local_rank: int = 0


def ddp(model: nn.Module, worker: Worker) -> nn.Module:
    """Wraps a model so that backward averages gradients over ranks; a single process needs no wrapper.

    The ranks must hold equal weights: nothing is sent to make them so.
    """
    if worker.world_size == 1:
        return model
    device_ids = [worker.device.index] if worker.device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=device_ids, init_sync=False, forward_sync_buffers=False, gradient_as_bucket_view=True
    )


def accumulating(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Holds gradients back from the other ranks until the last forward pass of a step."""
    if is_last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clips to a global L2 norm, in place.

    Args:
        parameters: Their gradients are the same on every rank.
        max_norm: The norm to clip to; 0 leaves the gradients alone.

    Returns:
        The norm before clipping, a scalar on the parameters' device.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if max_norm > 0:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def sum_over_ranks(values: torch.Tensor, worker: Worker) -> torch.Tensor:
    """Adds up a tensor over all ranks, in place."""
    if worker.world_size > 1:
        dist.all_reduce(values)
    return values


def least_over_ranks(value: int, worker: Worker) -> int:
    """The smallest of all ranks' values."""
    if worker.world_size == 1:
        return value
    least = torch.tensor(value, device=worker.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def barrier(worker: Worker) -> None:
    """Waits for all ranks."""
    if worker.world_size > 1:
        dist.barrier()
