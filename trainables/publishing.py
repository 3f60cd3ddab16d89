"""A checkpoint of ranks that share no file system: each publishes its own files, and rank 0 the manifest at last.

A publisher brings files to a place that all ranks reach. A checkpoint is complete there when its manifest is; what a
rank has written stays on its own disk as well, so that its node need not fetch it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from trainables.checkpoint_dir import MANIFEST, is_step_dir, manifest_of, store_manifest
from trainables.errors import CheckpointError
from trainables.parallel import Worker

T = TypeVar("T")


class Publisher(Protocol):
    """Where the checkpoints of a trial are complete; what it raises fails the save on every rank."""

    def put(self, file: Path, name: str) -> None:
        """Bring a file there, under a name such as `step_00000009/manifest.json`."""

    def keep(self, newest: str, num: int | None, protected: Collection[str]) -> Collection[str]:
        """Once a checkpoint is complete: delete what is there no longer to be kept. Does not raise.

        Args:
            newest: Name of the new checkpoint.
            num: How many complete ones stay, the new one among them; None: all.
            protected: Names of those that stay in any case.

        Returns:
            Names of the complete checkpoints there now.
        """


def publish(
    publisher: Publisher,
    part: Path,
    path: Path,
    about: Mapping[str, Any],
    worker: Worker,
    group: dist.ProcessGroup | None,
    *,
    keep: int | None = None,
    protected: Collection[Path] = (),
    check_wanted: Callable[[], None] = lambda: None,
) -> None:
    """Makes a checkpoint complete of what each rank has written; called on every rank.

    Args:
        publisher: Takes it.
        part: Folder of the files that this rank has written; gone afterwards.
        path: Folder of the checkpoint on this node, which several ranks may share.
        about: What its manifest says beside the files.
        worker: This rank.
        group: All ranks.
        keep: How many complete ones stay there, this one among them; None: all.
        protected: Those that stay in any case.
        check_wanted: Called before each file; what it raises ends this.

    Raises:
        CheckpointError: A rank could not bring its files there; on every rank alike.
    """
    name = path.name

    def put_part() -> dict[str, Any]:
        found = manifest_of(part)
        for file in found["files"]:
            check_wanted()
            publisher.put(part / file, f"{name}/{file}")
        return found

    parts = on_every_rank(put_part, worker, group)
    files = {key: {file: value for each in parts for file, value in each[key].items()} for key in ("files", "crc32")}
    manifest = {**about, **files}

    def complete() -> Collection[str]:
        check_wanted()
        store_manifest(part, manifest)
        publisher.put(part / MANIFEST, f"{name}/{MANIFEST}")
        return publisher.keep(name, keep, {each.name for each in protected})

    kept = on_rank_zero(complete, worker, group)
    # It is complete: a rank whose own disk fails now can fetch it.
    with suppress(OSError):
        _settle(part, path, manifest, kept)


def _settle(part: Path, path: Path, manifest: dict[str, Any], kept: Collection[str]) -> None:
    """Moves this rank's files to those of its node, and deletes there what is kept nowhere."""
    store_manifest(part, manifest)
    path.mkdir(exist_ok=True)
    for file in sorted(part.rglob("*"), key=lambda file: file.name == MANIFEST):
        if file.is_file():
            (path / file.relative_to(part)).parent.mkdir(parents=True, exist_ok=True)
            file.replace(path / file.relative_to(part))
    shutil.rmtree(part)
    for other in path.parent.iterdir():
        if is_step_dir(other) and other.name not in kept:
            # The other ranks of this node do the same.
            shutil.rmtree(other, ignore_errors=True)


def on_every_rank(action: Callable[[], T], worker: Worker, group: dist.ProcessGroup | None) -> list[T]:
    """What an action returns on each rank, by rank; returns when all have done it.

    Raises:
        CheckpointError: It failed on one of them; on every rank alike.
    """
    result: T | None = None
    failure: str | None = None
    try:
        result = action()
    except Exception as error:  # the other ranks must learn of it
        failure = str(error) or type(error).__name__
    outcomes: list[Any] = [(result, failure)] * worker.world_size
    if worker.world_size > 1:
        dist.all_gather_object(outcomes, (result, failure), group=group)
    for _, reason in outcomes:
        if reason is not None:
            raise CheckpointError(reason)
    return [returned for returned, _ in outcomes]


def on_rank_zero(action: Callable[[], T], worker: Worker, group: dist.ProcessGroup | None) -> T:
    """What an action returns on rank 0, on every rank; the others wait, and learn of a failure.

    Raises:
        CheckpointError: It failed; on every rank alike.
    """
    outcome: list[Any] = [None, None]
    if worker.rank == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = str(error) or type(error).__name__
    if worker.world_size > 1:
        device = worker.device if group is None else torch.device("cpu")
        dist.broadcast_object_list(outcome, src=0, group=group, device=device)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    returned: T = outcome[0]
    return returned
