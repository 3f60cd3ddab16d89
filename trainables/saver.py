"""Saves checkpoints beside the training loop: it stops for a copy of its state and goes on while that is written."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainables.checkpoint import NOISE, Draft, with_unreported, write
from trainables.errors import CheckpointError
from trainables.parallel import Worker
from trainables.publishing import Publisher
from trainables.train_state import TrainState, contents

CLOSING_S = 5.0


class CheckpointSaver:
    """Writes one checkpoint at a time in a thread of its own; outlives the trials of a worker process.

    Every rank makes one at the same point and makes the same calls in the same order, all from one thread. Ranks
    agree on a checkpoint through a process group of the saver's own, so that the loop's collectives are not disturbed.

    Args:
        worker: This rank.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        group = dist.new_group(backend="gloo") if worker.world_size > 1 else None
        self._writer = _Writer(worker, group)
        self._snapshot = _Snapshot(worker.device)
        self._writing: _Writing | None = None
        self._completed: list[Path] = []
        # For good: the filters belong to the process, and to change them in two threads at once can lose some.
        warnings.filterwarnings("ignore", message=NOISE)

    def save(
        self,
        state: TrainState,
        path: Path,
        notes: Mapping[str, Any] | None = None,
        *,
        keep_last: int | None = None,
        protected: Collection[Path] = (),
        publisher: Publisher | None = None,
    ) -> None:
        """Begins a checkpoint; the state may change as soon as this returns. Waits for the one before.

        Args:
            state: What to save.
            path: The final folder, on a file system that all ranks share, but for those with a publisher; what was
                there before is replaced.
            notes: Kept in the manifest for whoever resumes.
            keep_last: When it is complete, delete all but so many checkpoints beside it; None: delete none.
            protected: Checkpoints that stay in any case.
            publisher: Where ranks share no file system, brings it to where they all find it; from the thread.

        Raises:
            CheckpointError: The one before could not be written; this one is not begun then.
        """
        self.wait()
        told = with_unreported(state, notes)
        draft = Draft(path, state.step, dict(state.metrics), told, keep_last, tuple(protected), publisher)
        self._writing = _Writing(draft, self._copy(draft, state))
        self._writer.begin(self._writing)

    def _copy(self, draft: Draft, state: TrainState) -> _Copied:
        try:
            if self._worker.rank == 0 or draft.publisher is not None:
                # Not in the thread: it must not bring back the folder of a trial that has ended.
                draft.path.parent.mkdir(parents=True, exist_ok=True)
            return _Copied(self._snapshot.take(contents(state, self._worker)), self._snapshot.event)
        except Exception as error:  # the other ranks must learn of it
            return _Copied({}, failure=error)

    @property
    def is_busy(self) -> bool:
        """Whether this rank still writes a checkpoint; another rank may see it end a little earlier or later."""
        return self._writing is not None and not self._writing.done.is_set()

    def poll(self) -> list[Path]:
        """The checkpoints completed since the last call, oldest first. Does not wait, does not raise."""
        if self._writing is not None and self._writing.is_complete:
            self._completed.append(self._writing.draft.path)
            self._writing = None
        completed, self._completed = self._completed, []
        return completed

    def wait(self) -> None:
        """Waits until what was begun is on disk.

        Raises:
            CheckpointError: It could not be written; on every rank alike.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.done.wait()
        if writing.is_complete:
            self._completed.append(writing.draft.path)
        elif writing.error is not None and not writing.is_abandoned:
            raise writing.error

    def abandon(self) -> None:
        """Gives up what is not complete yet, without waiting: nobody asks for its outcome, its folder may vanish."""
        self._completed = []
        if self._writing is not None:
            self._writing.draft.is_abandoned.set()

    def close(self) -> None:
        """Gives up what is not complete yet; the saver can save no more."""
        self.abandon()
        self._writer.close()


@dataclass(frozen=True)
class _Copied:
    contents: dict[str, Any]
    event: torch.cuda.Event | None = None
    failure: Exception | None = None

    def ready(self) -> dict[str, Any]:
        """The contents, once they have arrived."""
        if self.failure is not None:
            raise self.failure
        if self.event is not None:
            self.event.synchronize()
        return self.contents


class _Writing:
    """One checkpoint on its way."""

    def __init__(self, draft: Draft, copied: _Copied) -> None:
        self.draft = draft
        self.error: CheckpointError | None = None
        self.done = threading.Event()
        self._copied = copied

    def run(self, worker: Worker, group: dist.ProcessGroup | None) -> None:
        """Writes it; never raises."""
        try:
            write(self.draft, self._copied.ready, worker, group)
        except CheckpointError as error:
            self.error = error
        finally:
            self.done.set()

    @property
    def is_abandoned(self) -> bool:
        return self.draft.is_abandoned.is_set()

    @property
    def is_complete(self) -> bool:
        return self.done.is_set() and self.error is None and not self.is_abandoned


class _Writer:
    """The thread: one for all checkpoints, as to start one means to wait until it runs."""

    def __init__(self, worker: Worker, group: dist.ProcessGroup | None) -> None:
        self._orders: queue.SimpleQueue[_Writing | None] = queue.SimpleQueue()
        # A daemon: a process that ends for another reason leaves an unfinished checkpoint behind, never a wrong one.
        self._thread = threading.Thread(target=self._run, args=(worker, group), daemon=True, name="checkpoint-writer")
        self._thread.start()

    def begin(self, writing: _Writing) -> None:
        self._orders.put(writing)

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join(CLOSING_S)

    def _run(self, worker: Worker, group: dist.ProcessGroup | None) -> None:
        while (writing := self._orders.get()) is not None:
            writing.run(worker, group)
            # Waiting for the next, a thread would keep this one's copies alive.
            del writing


class _Snapshot:
    """A copy in host memory that is written over by the next one: to allocate it takes longer than to fill it.

    It stays as long as the saver: as many bytes as this rank writes of a checkpoint; pinned, beside a GPU, up to twice
    as many, as torch rounds each tensor's up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_pinned = device.type == "cuda"
        self._buffers: dict[str, torch.Tensor] = {}
        self.event: torch.cuda.Event | None = None

    def take(self, contents: dict[str, Any]) -> dict[str, Any]:
        """Copies the tensors in nested dicts and lists.

        Returns:
            The same with copies, which are complete; those from a GPU are once `event` has come to pass, and are of
            the tensors as they are now in the order of the current stream.
        """
        kept, self._buffers = self._buffers, {}
        sources: list[torch.Tensor] = []
        copied: dict[str, Any] = self._on_host("", contents, kept, sources)
        with torch.no_grad():
            torch._foreach_copy_(list(self._buffers.values()), sources, non_blocking=True)
        if self._is_pinned:
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream(self._device))
        return copied

    def _on_host(self, name: str, value: Any, kept: Mapping[str, torch.Tensor], sources: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            source = value.to_local() if isinstance(value, DTensor) else value
            self._buffers[name] = buffer = self._buffer_like(source, kept.get(name))
            sources.append(source)
            return _as_shard(buffer, value) if isinstance(value, DTensor) else buffer
        if isinstance(value, dict):
            return {key: self._on_host(f"{name}.{key}", item, kept, sources) for key, item in value.items()}
        if isinstance(value, list):
            return [self._on_host(f"{name}.{index}", item, kept, sources) for index, item in enumerate(value)]
        return value

    def _buffer_like(self, source: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        if kept is not None and kept.dtype == source.dtype and kept.is_same_size(source):
            return kept
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=self._is_pinned)


def _as_shard(buffer: torch.Tensor, like: DTensor) -> DTensor:
    # As torch's own staging does it; from_local would move the buffer to the mesh's device.
    return DTensor(buffer, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]
