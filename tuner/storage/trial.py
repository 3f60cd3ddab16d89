"""A trial's checkpoints at its study's URL, as its workers keep them where they do not see the driver's working copy.

Each node has a folder of its own for them, which may hold a part of a checkpoint: what the node's ranks have written.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from trainables.checkpoint_dir import MANIFEST, damaged_file, is_complete, is_step_dir, read_manifest, step_of
from tuner.errors import StorageError
from tuner.storage.bucket import Bucket
from tuner.storage.files import is_step

FETCHING = ".fetching"
# A store may be away for a moment: a trial that fails for that loses more than it waits here.
PATIENCE_S, PAUSE_S = 60.0, 1.0

T = TypeVar("T")


class TrialAtUrl:
    """Publishes checkpoints and fetches them; see `trainables.publishing.Publisher`.

    Args:
        url: Of the trial's checkpoints.

    Attributes:
        kept: Names of the complete ones after the last change made here, oldest first.

    Raises:
        StorageError: The URL cannot be used; so does every method but `keep`.
    """

    def __init__(self, url: str) -> None:
        self._bucket = Bucket(url)
        self.kept: tuple[str, ...] = ()

    def put(self, file: Path, name: str) -> None:
        """Upload a file of a checkpoint."""
        _patiently(lambda: self._bucket.upload(file, name))

    def keep(self, newest: str, num: int | None, protected: Collection[str]) -> tuple[str, ...]:
        """Delete all but the newest complete checkpoints and those protected; what cannot be deleted is later."""
        try:
            names = list(self._bucket.listing())
            whole = _whole(names)
            last = whole if num is None else whole[-max(num, 1) :]
            stay = {newest, *last, *(name for name in whole if name in protected)}
            self._delete(name for name in names if name.split("/")[0] not in stay)
            self.kept = _in_order(stay)
        except StorageError:
            self.kept = _in_order({*self.kept, newest})
        return self.kept

    def clean(self) -> tuple[str, ...]:
        """Delete what a killed attempt left; no process may be uploading. Returns the complete ones, oldest first."""
        names = list(_patiently(self._bucket.listing))
        self.kept = tuple(_whole(names))
        self._delete(name for name in names if name.split("/")[0] not in self.kept)
        return self.kept

    def condemn(self, name: str) -> None:
        """Make a checkpoint an incomplete one."""
        self._bucket.delete(f"{name}/{MANIFEST}")

    def fetch(self, name: str, folder: Path) -> bool:
        """Bring to a node what it lacks of a checkpoint; of several processes of the node one does.

        Args:
            name: Of the checkpoint.
            folder: Of the trial's checkpoints on this node; other checkpoints in it are deleted.

        Returns:
            Whether it is as it was written, as far as can be seen.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / FETCHING):
            manifest = self._bucket.read(f"{name}/{MANIFEST}")
            for other in folder.iterdir():
                if is_step_dir(other) and not (other.name == name and _begins_with(other, manifest)):
                    shutil.rmtree(other)
            # A second time, should what was here already be damaged.
            return any(self._complete(name, folder / name, manifest) for _ in range(2))

    def _complete(self, name: str, path: Path, manifest: bytes) -> bool:
        path.mkdir(exist_ok=True)
        # First: it says what is to be there.
        (path / MANIFEST).write_bytes(manifest)
        files = (read_manifest(path) or {"files": {}})["files"]
        # A manifest may say anything; nothing leads out of the folder.
        for file, size in files.items() if all(map(_is_inside, files)) else ():
            if not (path / file).exists() or (path / file).stat().st_size != size:
                with suppress(FileNotFoundError):
                    self._bucket.download(f"{name}/{file}", path / file)
        if all(map(_is_inside, files)) and is_complete(path) and damaged_file(path) is None:
            return True
        shutil.rmtree(path)
        return False

    def _delete(self, names: Iterable[str]) -> None:
        # A checkpoint without its manifest is none: half-deleted, it is not taken for one.
        for name in sorted(names, key=lambda name: not name.endswith(f"/{MANIFEST}")):
            self._bucket.delete(name)


def _patiently(action: Callable[[], T]) -> T:
    """What an action returns, tried again for a while where the URL cannot be used."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            return action()
        except StorageError:
            if time.monotonic() > give_up_at:
                raise
        time.sleep(PAUSE_S)


def _whole(names: Iterable[str]) -> list[str]:
    found = {name.split("/")[0] for name in names if name.split("/")[1:] == [MANIFEST]}
    return sorted((name for name in found if is_step(name)), key=lambda name: step_of(Path(name)))


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: step_of(Path(name))))


def _is_inside(file: str) -> bool:
    return not {"", ".", ".."} & set(file.split("/"))


def _begins_with(path: Path, manifest: bytes) -> bool:
    """Whether what a node has of a checkpoint is of this very one, and not of an earlier one of its name."""
    try:
        return (path / MANIFEST).read_bytes() == manifest
    except OSError:
        return False
