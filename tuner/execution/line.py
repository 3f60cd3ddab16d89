"""How the ranks of a worker group hear a slot, and each other."""

from __future__ import annotations

import datetime as dt
from typing import Any

import torch.distributed as dist

from trainables.parallel import Worker
from tuner.execution.channel import Address, Wire, connect

# A slot may wait long for its next trial; the other ranks wait in a broadcast meanwhile.
IDLE = dt.timedelta(days=365)
# Ranks that meet the same error meet it at about the same time.
TOGETHER = dt.timedelta(seconds=5)


class Line:
    """A worker's end of the channel: rank 0 talks to the slot and passes on what it hears.

    Args:
        address: Of the slot.
        worker: This rank; all of them make one.

    Attributes:
        connection: To the slot; rank 0 alone has it.
        group: All ranks, for what is said here; None for a single one.
    """

    def __init__(self, address: Address, worker: Worker) -> None:
        self.connection: Wire | None = connect(address) if worker.rank == 0 else None
        # Commands are small Python objects: they travel by gloo also where tensors travel by NCCL.
        self.group = dist.new_group(backend="gloo", timeout=IDLE) if worker.world_size > 1 else None

    def send(self, message: Any) -> None:
        """Tell the slot; only rank 0 does."""
        if self.connection is not None:
            self.connection.send(message)

    def receive(self) -> Any:
        """Wait for the slot's next command."""
        return self.share(self.connection.recv() if self.connection is not None else None)

    def poll(self) -> Any | None:
        """A command that has come unasked, else None."""
        return self.share(self._unasked())

    def look(self, next_step: int) -> tuple[Any | None, int]:
        """The same, and the step at which rank 0 wants all ranks to look again."""
        seen: tuple[Any | None, int] = self.share((self._unasked(), next_step))
        return seen

    def _unasked(self) -> Any | None:
        is_there = self.connection is not None and self.connection.poll(0)
        return self.connection.recv() if self.connection is not None and is_there else None

    def is_every_rank_here(self) -> bool:
        """Whether all ranks have come to this point within a few seconds."""
        try:
            dist.monitored_barrier(self.group, timeout=TOGETHER)
        except RuntimeError:
            return False
        return True

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values = [value]
        if self.group is not None:
            values = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(values, value, group=self.group)
        return values

    def share(self, command: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.group is None:
            return command
        box = [command]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


def this_worker() -> Worker:
    """Rank, world size and device as Ray Train set them up."""
    from ray import train
    from ray.train.torch import get_device

    context = train.get_context()
    return Worker(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        device=get_device(),
        local_rank=context.get_local_rank(),
    )
