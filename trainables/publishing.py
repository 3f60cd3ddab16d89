"""A checkpoint of ranks that share no file system: each publishes its own files, and rank 0 the manifest at last.

A publisher brings files to a place that all ranks reach. A checkpoint is complete there when its manifest is; what a
rank has written stays on its own disk as well, so that its node need not fetch it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol, TypeVar

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


def publish(publisher: Publisher, part: Path, name: str, check_wanted: Callable[[], None]) -> dict[str, Any]:
    """Brings this rank's files of a checkpoint there.

    Args:
        publisher: Takes them.
        part: Folder of the files that this rank has written.
        name: Of the checkpoint.
        check_wanted: Called before each; what it raises ends this.

    Returns:
        What a manifest says of them.
    """
    found = manifest_of(part)
    for file in found["files"]:
        check_wanted()
        publisher.put(part / file, f"{name}/{file}")
    return found


def seal(publisher: Publisher, part: Path, name: str, manifest: dict[str, Any]) -> None:
    """Completes a checkpoint all of whose files are there; rank 0 alone does."""
    store_manifest(part, manifest)
    publisher.put(part / MANIFEST, f"{name}/{MANIFEST}")


def settle(part: Path, path: Path, manifest: dict[str, Any], kept: Collection[str]) -> None:
    """Moves this rank's files to those of its node, and deletes there what is kept nowhere.

    Args:
        part: Folder of the files; gone afterwards.
        path: Folder of the checkpoint on this node, which several ranks may share.
        manifest: Of the whole checkpoint.
        kept: Names of the complete checkpoints where it was published.
    """
    store_manifest(part, manifest)
    path.mkdir(exist_ok=True)
    for file in sorted(part.iterdir(), key=lambda file: file.name == MANIFEST):
        file.replace(path / file.name)
    part.rmdir()
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
