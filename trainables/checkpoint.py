"""Saves and loads a trial's state with torch.distributed.checkpoint: every rank writes its part, any number reads it.

A checkpoint is written to a folder beside its place and renamed when all ranks are done, so what has the final name
is whole. Errors are the same on every rank: one that cannot write must not leave the others waiting.

`save_checkpoint` returns when all is on disk; `saver.CheckpointSaver` writes beside the loop.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from trainables.checkpoint_dir import PARTIAL_SUFFIX, is_complete, keep_last, read_manifest, write_manifest
from trainables.checkpoint_files import CheckpointReader, CheckpointWriter
from trainables.errors import CheckpointError, DamagedCheckpointError
from trainables.parallel import Worker
from trainables.publishing import Publisher, on_every_rank, on_rank_zero, publish
from trainables.train_state import TrainState, contents, restore, to_be_read, trained

# The note of a checkpoint between two reports.
UNREPORTED = "unreported"
# What torch says of every save and load of a single process.
NOISE = ".*(torch.distributed is disabled|TypedStorage is deprecated).*"


@dataclass(frozen=True)
class Draft:
    """A checkpoint on its way to disk; the same on every rank, but for where a path leads with a publisher.

    Attributes:
        path: The final folder.
        step: Optimizer steps done.
        metrics: Values of the last report.
        notes: Kept in the manifest for whoever resumes.
        keep: How many complete checkpoints may be beside it and itself in the end; None: all.
        protected: Checkpoints that stay in any case.
        publisher: Makes it complete where ranks share no file system; each writes on its own disk. None: they share
            the folder.
        is_abandoned: Set when nobody wants it any more; it is given up at the next tensor then.
    """

    path: Path
    step: int
    metrics: Mapping[str, float]
    notes: Mapping[str, Any]
    keep: int | None = None
    protected: Collection[Path] = ()
    publisher: Publisher | None = None
    is_abandoned: threading.Event = field(default_factory=threading.Event)

    def partial(self, rank: int) -> Path:
        """Where a rank writes it before it is whole."""
        own = "" if self.publisher is None else f".{rank}"
        return self.path.with_name(f"{self.path.name}{own}{PARTIAL_SUFFIX}")

    def check_wanted(self) -> None:
        """Raises when it is abandoned."""
        if self.is_abandoned.is_set():
            raise RuntimeError("abandoned")


def save_checkpoint(state: TrainState, path: Path, worker: Worker, notes: Mapping[str, Any] | None = None) -> None:
    """Writes a checkpoint; called on every rank. What was at the path before is replaced.

    Args:
        state: What to save.
        path: The final folder, on a file system that all ranks share.
        worker: This rank.
        notes: Kept in the manifest for whoever resumes.

    Raises:
        CheckpointError: A rank could not write; nothing is at the path then but what was there before.
    """
    draft = Draft(path, state.step, state.metrics, with_unreported(state, notes))
    if worker.rank == 0:
        # Where this fails, so does what `write` does there, on all ranks.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NOISE)
        write(draft, lambda: contents(state, worker), worker)


def with_unreported(state: TrainState, notes: Mapping[str, Any] | None) -> dict[str, Any]:
    """The notes, and what only the next report will tell."""
    return {**(notes or {}), **({UNREPORTED: list(state.unreported)} if state.unreported else {})}


def write(
    draft: Draft, make_contents: Callable[[], dict[str, Any]], worker: Worker, group: dist.ProcessGroup | None = None
) -> None:
    """Writes a checkpoint; called on every rank, in any thread. The folder around it must be there.

    Args:
        draft: What to write beside the contents, and where.
        make_contents: Returns what this rank writes; where it raises, every rank fails.
        worker: This rank.
        group: All ranks, in a group that no other thread uses; None: the default one.

    Raises:
        CheckpointError: A rank could not write; nothing is at the path then but what was there before.
    """
    partial = draft.partial(worker.rank)
    try:
        _begin(draft, partial, worker, group)
        state_dict_saver.save(
            {},
            storage_writer=CheckpointWriter(partial),
            planner=_Planner(draft, make_contents),
            process_group=group,
            no_dist=worker.world_size == 1,
        )
        _end(draft, partial, worker, group)
    except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
        if worker.rank == 0 or draft.publisher is not None:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{draft.path}: cannot be written: {_cause(error)}") from error


def _begin(draft: Draft, partial: Path, worker: Worker, group: dist.ProcessGroup | None) -> None:
    on_their_ranks = on_rank_zero if draft.publisher is None else on_every_rank
    on_their_ranks(lambda: _make_empty(partial), worker, group)


def _end(draft: Draft, partial: Path, worker: Worker, group: dist.ProcessGroup | None) -> None:
    if draft.publisher is None:
        on_rank_zero(lambda: _commit(draft, partial), worker, group)
        return
    publish(
        draft.publisher,
        partial,
        draft.path,
        {"step": draft.step, "metrics": draft.metrics, "notes": draft.notes},
        worker,
        group,
        keep=draft.keep,
        protected=draft.protected,
        check_wanted=draft.check_wanted,
    )


class _Planner(DefaultSavePlanner):
    """Asks for the contents where torch passes an exception on to all ranks."""

    def __init__(self, draft: Draft, make_contents: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._draft = draft
        self._make_contents = make_contents

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(self._make_contents(), storage_meta, is_coordinator)

    def resolve_data(self, write_item: Any) -> Any:
        self._draft.check_wanted()
        return super().resolve_data(write_item)


def _commit(draft: Draft, partial: Path) -> None:
    path = draft.path
    # Each rank has waited for its own files to reach the disk.
    write_manifest(partial, draft.step, draft.metrics, draft.notes, are_files_synced=True)
    draft.check_wanted()
    replaced = path.with_name(f"{path.name}.replaced{PARTIAL_SUFFIX}")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)
    if draft.keep is not None:
        keep_last(path.parent, draft.keep, draft.protected)


def load_checkpoint(state: TrainState, path: Path, worker: Worker) -> None:
    """Reads a checkpoint into a state; called on every rank, and the number of ranks may differ from the saving one.

    A rank that did not exist when it was saved keeps its own random state.

    Raises:
        DamagedCheckpointError: What is read is not what was written. The state is of no use then.
        CheckpointError: The checkpoint is not complete or does not fit the model or the optimizer.
    """
    if not is_complete(path):
        raise CheckpointError(f"{path}: not a complete checkpoint")
    try:
        _read(state, path, worker)
    except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
        kind = DamagedCheckpointError if _is_damage(error) else CheckpointError
        raise kind(f"{path}: cannot be read: {_cause(error)}") from error


def load_weights(model: nn.Module, path: Path) -> None:
    """Reads what was trained of a model, and nothing else, in this process alone; any number of ranks has saved it.

    Raises:
        CheckpointError: The checkpoint is not complete or does not fit the model.
    """
    if not is_complete(path):
        raise CheckpointError(f"{path}: not a complete checkpoint")
    try:
        _load({"model": trained(model, model.state_dict())}, CheckpointReader(path), no_dist=True)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path}: cannot be read: {_cause(error)}") from error


def _load(contents: dict[str, Any], reader: CheckpointReader, *, no_dist: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NOISE)
        state_dict_loader.load(contents, storage_reader=reader, no_dist=no_dist)


def _read(state: TrainState, path: Path, worker: Worker) -> None:
    reader = CheckpointReader(path)
    saved = to_be_read(state, worker, reader.read_metadata().state_dict_metadata)
    _load(saved, reader, no_dist=worker.world_size == 1)
    restore(state, saved, worker)
    manifest = read_manifest(path) or {}
    state.metrics = manifest.get("metrics", {})
    state.unreported = tuple((manifest.get("notes") or {}).get(UNREPORTED, ()))


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _is_damage(error: BaseException) -> bool:
    return any(isinstance(reason, DamagedCheckpointError) for reason in _reasons(error))


def _reasons(error: BaseException) -> list[BaseException]:
    """An error, or what torch says that befell each rank."""
    failures = getattr(error, "failures", None)
    return [reason for reason, _ in failures.values()] if failures else [error]


def _cause(error: BaseException) -> str:
    # torch lists every rank and its traceback; a user needs the first line of one reason.
    reason = _reasons(error)[0]
    return f"{reason}".strip().splitlines()[0] if f"{reason}".strip() else type(reason).__name__
