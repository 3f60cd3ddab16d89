"""Data parallelism, applied from outside to single-device model code."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainables.config import FsdpConfig, TrainConfig

# Every rank holds the model (ddp), or a part of it (fsdp).
Parallelism = Literal["ddp", "fsdp"]


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


def fsdp(model: nn.Module, config: TrainConfig, worker: Worker) -> nn.Module:
    """Divides a model among the ranks, in place, layer by layer; backward averages gradients as `ddp` does.

    Weights, gradients and optimizer stay in float32, and so are gradients added up; with precision bf16 a layer is
    gathered and computed in bfloat16.
    """
    settings = config.fsdp or FsdpConfig()
    options: dict[str, Any] = {"mesh": init_device_mesh(worker.device.type, (worker.world_size,))}
    if config.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if settings.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=worker.device.type == "cuda")
    for layer in transformer_layers(model):
        fully_shard(layer, reshard_after_forward=settings.reshard_after_forward, **options)
    # What is left, embedding and head, is needed again right after the forward pass.
    fully_shard(model, **options)
    return model


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model in their order: of its module lists the one with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(dict.fromkeys(max(lists, key=_count_parameters, default=())))


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def is_sharded(model: nn.Module) -> bool:
    """Whether `fsdp` has divided the model."""
    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Lets go of gathered weights: after a forward pass without a backward pass some are still there."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def accumulating(model: nn.Module, config: TrainConfig, *, is_last: bool) -> AbstractContextManager[None]:
    """Holds gradients back from the other ranks until the last forward pass of a step."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last or (config.fsdp is not None and config.fsdp.reduce_every_pass))
    if is_last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def average_whole_gradients(model: nn.Module, worker: Worker) -> None:
    """Averages over the ranks what FSDP does not know of: gradients of adapters, which every rank holds whole."""
    parameters = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = torch.split(flat / worker.world_size, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clips to a global L2 norm, in place.

    Args:
        parameters: Their gradients are the same on every rank, or each rank's shard of them.
        max_norm: The norm to clip to; 0 leaves the gradients alone.

    Returns:
        The norm before clipping, a scalar on the parameters' device.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [shard_of(gradient) for gradient in gradients]
    norm = nn.utils.get_total_norm(shards)
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        squares = norm.square()
        dist.all_reduce(squares)
        norm = squares.sqrt()
    if max_norm > 0:
        # As torch's clip_grad_norm_, which would go through every shard's layout.
        torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


def leave_group() -> None:
    """Ends this process's part in the process group, and the threads of the group with it.

    Nothing may hold a model in shards any more: a thread that is left when Python ends can end the process with a
    signal.
    """
    gc.collect()
    # Where the driver of a GPU asks for an older torch than ours there may be none.
    with suppress(ImportError):
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        # What torch notes of operations on shards holds their mesh, and that the group.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    dist.destroy_process_group()


def barrier(worker: Worker) -> None:
    """Waits for all ranks."""
    if worker.world_size > 1:
        dist.barrier()
