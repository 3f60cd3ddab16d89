"""An all-reduce between the nodes of a cluster, as training does at every step: by NCCL with GPUs, else by gloo."""

from __future__ import annotations

import datetime as dt
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

TIMEOUT_S = 90.0
JOIN_TIMEOUT_S = 30.0
REPEATS = 5
NUM_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}


@dataclass(frozen=True)
class Network:
    """What came of it.

    Attributes:
        backend: "nccl" or "gloo".
        num_ranks: Workers that took part, one a node; two on a cluster of one node.
        bytes_a_s: Bus bandwidth as nccl-tests count it, 2 (n - 1) / n times the bytes over the time; 0 after a fault.
        fault: Why it failed.
        gpu_fault: Where a worker was given a GPU that torch cannot use.
        is_busy: The GPUs are in use, so that it was done without them.
    """

    backend: str
    num_ranks: int
    bytes_a_s: float = 0.0
    fault: str = ""
    gpu_fault: str = ""
    is_busy: bool = False


@ray.remote(num_cpus=0, max_restarts=0)
class _Rank:
    def address(self) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"  # type: ignore[no-untyped-call]

    def has_gpu(self) -> bool:
        import torch

        return bool(torch.cuda.is_available())

    def reduce(self, address: str, rank: int, num_ranks: int, backend: str) -> float:
        """Seconds of an all-reduce, the fastest of some; what it makes is checked."""
        import torch
        import torch.distributed as dist

        device = torch.device("cuda" if backend == "nccl" else "cpu")
        timeout = dt.timedelta(seconds=JOIN_TIMEOUT_S)
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=num_ranks, timeout=timeout)
        try:
            return min(_timed(torch.ones(NUM_BYTES[backend] // 4, device=device), num_ranks) for _ in range(REPEATS))
        finally:
            dist.destroy_process_group()


def _timed(ones: Any, num_ranks: int) -> float:
    import torch.distributed as dist

    began = time.perf_counter()
    dist.all_reduce(ones)
    # Reading a number waits for the device.
    total = float(ones[0])
    elapsed_s = time.perf_counter() - began
    if total != num_ranks:
        raise ValueError(f"the sum of {num_ranks} ones came out as {total}")
    return elapsed_s


def measure(free_gpus: Mapping[str, float], total_gpus: Mapping[str, float]) -> Network:
    """Run it between the nodes with GPUs, or between all where none has any.

    Args:
        free_gpus: GPUs that nobody holds, by the id of the node.
        total_gpus: GPUs in all.
    """
    nodes = [node for node, gpus in total_gpus.items() if gpus] or list(total_gpus)
    needed = 1 if len(nodes) > 1 else 2
    has_gpus = min(total_gpus[node] for node in nodes) >= needed
    is_busy = has_gpus and min(free_gpus.get(node, 0.0) for node in nodes) < needed
    takes_gpus = has_gpus and not is_busy
    ranks = [_start(node, takes_gpus) for node in nodes for _ in range(needed)]
    try:
        return _run(ranks, takes_gpus, is_busy)
    except (RayError, GetTimeoutError) as error:
        backend = "nccl" if takes_gpus else "gloo"
        return Network(backend, len(ranks), fault=_last_line(error), is_busy=is_busy)
    finally:
        for rank in ranks:
            ray.kill(rank)


def _run(ranks: Sequence[Any], takes_gpus: bool, is_busy: bool) -> Network:
    backend, gpu_fault = "gloo", ""
    if takes_gpus:
        able = ray.get([rank.has_gpu.remote() for rank in ranks], timeout=TIMEOUT_S)
        backend = "nccl" if all(able) else "gloo"
        gpu_fault = (
            "" if all(able) else f"torch finds no GPU in {able.count(False)} of {len(able)} workers that hold one"
        )
    address = ray.get(ranks[0].address.remote(), timeout=TIMEOUT_S)
    pending = [rank.reduce.remote(address, number, len(ranks), backend) for number, rank in enumerate(ranks)]
    slowest_s = max(ray.get(pending, timeout=TIMEOUT_S))
    moved = 2 * (len(ranks) - 1) / len(ranks) * NUM_BYTES[backend]
    return Network(backend, len(ranks), moved / slowest_s, gpu_fault=gpu_fault, is_busy=is_busy)


def _start(node: str, takes_gpu: bool) -> Any:
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return _Rank.options(scheduling_strategy=place, num_gpus=1 if takes_gpu else 0).remote()  # type: ignore[attr-defined]


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
