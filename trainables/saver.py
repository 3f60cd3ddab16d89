"""Saves checkpoints beside the training loop: it stops for a copy of its state and goes on while that is written."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainables.checkpoint import NOISE, Draft, TrainState, contents, write
from trainables.errors import CheckpointError
from trainables.parallel import Worker

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
        self._group = dist.new_group(backend="gloo") if worker.world_size > 1 else None
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
    ) -> None:
        """Begins a checkpoint; the state may change as soon as this returns. Waits for the one before.

        Args:
            state: What to save.
            path: The final folder, on a file system that all ranks share; what was there before is replaced.
            notes: Kept in the manifest for whoever resumes.
            keep_last: When it is complete, delete all but so many checkpoints beside it; None: delete none.
            protected: Checkpoints that stay in any case.

        Raises:
            CheckpointError: The one before could not be written; this one is not begun then.
        """
        self.wait()
        draft = Draft(path, state.step, dict(state.metrics), notes or {}, keep_last, tuple(protected))
        self._writing = _Writing(draft, self._copy(draft, state), self._worker, self._group)

    def _copy(self, draft: Draft, state: TrainState) -> _Copied:
        try:
            if self._worker.rank == 0:
                # Not in the thread: it must not bring back the folder of a trial that has ended.
                draft.path.parent.mkdir(parents=True, exist_ok=True)
            return _Copied(self._snapshot.take(contents(state, self._worker)), self._snapshot.event)
        except Exception as error:  # the other ranks must learn of it
            return _Copied({}, failure=error)

    def poll(self) -> list[Path]:
        """The checkpoints completed since the last call, oldest first. Does not wait, does not raise."""
        if self._writing is not None and self._writing.is_done and self._writing.error is None:
            self._finish(self._writing)
        completed, self._completed = self._completed, []
        return completed

    def wait(self) -> None:
        """Waits until what was begun is on disk.

        Raises:
            CheckpointError: It could not be written; on every rank alike.
        """
        if self._writing is None:
            return
        writing = self._writing
        writing.join()
        self._finish(writing)
        if writing.error is not None and not writing.is_abandoned:
            raise writing.error

    def _finish(self, writing: _Writing) -> None:
        self._writing = None
        if writing.error is None and not writing.is_abandoned:
            self._completed.append(writing.path)

    def abandon(self) -> None:
        """Gives up what is not complete yet, without waiting: nobody asks for its outcome, its folder may vanish."""
        self._completed = []
        if self._writing is not None:
            self._writing.abandon()

    def close(self) -> None:
        """Gives up what is not complete yet and waits a moment for the thread."""
        self.abandon()
        if self._writing is not None:
            self._writing.join(CLOSING_S)


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
    """The thread that writes one checkpoint."""

    def __init__(self, draft: Draft, copied: _Copied, worker: Worker, group: dist.ProcessGroup | None) -> None:
        self._draft = draft
        self.error: CheckpointError | None = None
        # A daemon: a process that ends for another reason leaves an unfinished checkpoint behind, never a wrong one.
        self._thread = threading.Thread(
            target=self._write, args=(copied, worker, group), daemon=True, name="checkpoint-writer"
        )
        self._thread.start()

    def _write(self, copied: _Copied, worker: Worker, group: dist.ProcessGroup | None) -> None:
        try:
            write(self._draft, copied.ready, worker, group)
        except CheckpointError as error:
            self.error = error

    @property
    def path(self) -> Path:
        return self._draft.path

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_abandoned(self) -> bool:
        return self._draft.is_abandoned.is_set()

    def abandon(self) -> None:
        self._draft.is_abandoned.set()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)


class _Snapshot:
    """A copy in host memory that is written over by the next one: to allocate it takes longer than to fill it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_pinned = device.type == "cuda"
        self._buffers: dict[str, torch.Tensor] = {}
        self.event: torch.cuda.Event | None = None

    def take(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """Copies nested mappings of tensors.

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
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(self._device))
        return copied

    def _on_host(self, name: str, value: Any, kept: Mapping[str, torch.Tensor], sources: list[torch.Tensor]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._on_host(f"{name}.{key}", item, kept, sources) for key, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        source = (value.to_local() if isinstance(value, DTensor) else value).detach()
        buffer = kept.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._is_pinned)
        self._buffers[name] = buffer
        sources.append(source)
        # As torch's own staging does it; from_local would move the buffer back to the mesh's device.
        return DTensor(buffer, value._spec, requires_grad=False) if isinstance(value, DTensor) else buffer
