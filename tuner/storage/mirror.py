"""Uploads what a running study writes: from a thread of its own, every few seconds and at the end.

At every moment the URL holds a study that can be opened: the record is uploaded before the traces of its trials, a
checkpoint's manifest after its files, and a new checkpoint before old ones are deleted.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainables.checkpoint_dir import MANIFEST, read_manifest, step_of
from tuner.commands import command
from tuner.errors import StudyLockedError
from tuner.record.storage import JOURNAL
from tuner.storage.bucket import Bucket
from tuner.storage.files import (
    CHECKPOINTS,
    HOLDER,
    checkpoint_dirs,
    checkpoint_of,
    is_away,
    is_mirrored,
    log_files,
    read_tags,
    record_files,
    whole_at,
    whole_checkpoints,
    whole_lines,
    write_tags,
)
from tuner.storage.owner import STOP, Ownership
from tuner.storage.place import url_of

EVERY_S, LAST_TRIES, STAGED = 3.0, 3, ".upload"
# Uploading takes no more than this share of the time, so that a long record does not keep a slow line busy.
BUSY_SHARE = 0.2

Stamp = tuple[int, int]


class Mirror:
    """Keeps a study at its URL as it is on this machine; does nothing where its root is a folder.

    Args:
        study_dir: The study's folder, which need not exist yet.
        warn: Called with one line, from the mirror's thread too.

    Raises:
        StudyLockedError: Another live process holds the study at the URL.
        StorageError: The URL cannot be used.
    """

    def __init__(self, study_dir: Path, warn: Callable[[str], None]) -> None:
        self._dir, self._warn = study_dir, warn
        self._url = url_of(study_dir)
        self._sent: dict[str, Stamp] = {}
        self._there: set[str] = set()
        self._ended, self._has_warned = threading.Event(), False
        self._thread: threading.Thread | None = None
        if self._url is None:
            return
        self._bucket = Bucket(self._url)
        self._owner = Ownership(self._bucket, study_dir)

    @property
    def taken(self) -> StudyLockedError | None:
        """Why this process may no longer run the study; None while all is well."""
        return None if self._url is None else self._owner.taken

    def start(self) -> None:
        """Begin to upload; the study is open for writing."""
        if self._url is None:
            return
        listed = {name: seen for name, seen in self._bucket.listing().items() if is_mirrored(name)}
        self._there = set(listed)
        for name, tag in read_tags(self._dir).items():
            # Of what never changes but in size; the rest is uploaded once more.
            path, seen = self._dir / name, listed.get(name)
            if "/" in name and seen is not None and seen.tag == tag and path.exists():
                self._sent |= {name: _stamp(path)} if path.stat().st_size == seen.size else {}
        self._bucket.delete(STOP)
        # Whoever was seen to hold it has been this process, or is dead.
        (self._dir / HOLDER).unlink(missing_ok=True)
        self.push()
        self._thread = threading.Thread(target=self._keep_pushing, daemon=True, name="mirror")
        self._thread.start()

    def finish(self) -> None:
        """Upload what is left, or say in one line what is not, and give the study back; twice is harmless."""
        if self._url is None or self._ended.is_set():
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._push_last()
        self._owner.release()

    def push(self) -> None:
        """Upload all that has changed.

        Raises:
            StorageError: Something could not be; it is tried again with the next call.
        """
        # Seen before the journal is read: what a trial leaves is never ahead of the record.
        logs, checkpoints = log_files(self._dir), whole_checkpoints(self._dir)
        for name in sorted(record_files(self._dir), key=lambda name: name == JOURNAL):
            self._send(name)
        for name in logs:
            self._send(name)
        for name in checkpoints:
            self._send_checkpoint(name)
        if any(is_away(self._dir / name) for name in checkpoint_dirs(self._dir)):
            self._see_others()
        self._delete_gone()

    def _keep_pushing(self) -> None:
        took_s = 0.0
        while not self._ended.wait(max(EVERY_S, took_s / BUSY_SHARE)) and self.taken is None:
            started = time.monotonic()
            try:
                self.push()
                self._hear_stop()
            except Exception as error:  # whatever it is, training goes on
                self._warn_once(error)
            took_s = time.monotonic() - started

    def _hear_stop(self) -> None:
        """Whoever wants the study to end may be on another machine."""
        if self._bucket.exists(STOP):
            (self._dir / STOP).touch()
            self._bucket.delete(STOP)

    def _warn_once(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{getattr(error, 'message', error)}; the study goes on, and uploading is tried again")

    def _push_last(self) -> None:
        for trial in range(LAST_TRIES):
            if self.taken is not None:
                return
            try:
                self._see_others()
                self.push()
                self._note_tags()
                return
            except Exception as error:  # the study has its end all the same
                if trial == LAST_TRIES - 1:
                    there = f"{self._dir} has it, upload it with: {command('resume', self._dir)}"
                    self._warn(f"not all of the study is uploaded: {getattr(error, 'message', error)}; {there}")

    def _note_tags(self) -> None:
        listed = self._bucket.listing()
        # A log that workers upload has grown there since it was alike here.
        alike = {name for name, (size, _) in self._sent.items() if name in listed and listed[name].size == size}
        write_tags(self._dir, {name: listed[name].tag for name in alike})

    # -- files --------------------------------------------------------------------------------------------------

    def _send(self, name: str) -> None:
        path = self._dir / name
        try:
            stamp = _stamp(path)
            if self._sent.get(name) == stamp:
                return
            if name != JOURNAL:
                self._upload(path, name)
                return
            self._bucket.write(name, whole_lines(path.read_bytes()))
        except FileNotFoundError:
            # It was deleted meanwhile.
            return
        self._sent[name] = stamp
        self._there.add(name)

    def _see_others(self) -> None:
        """Take in what workers have uploaded or deleted that do not see this folder."""
        self._there = {name for name in self._there if not name.startswith(f"{CHECKPOINTS}/")}
        self._there |= {f"{CHECKPOINTS}/{name}" for name in Bucket(f"{self._url}/{CHECKPOINTS}").listing()}

    def _send_checkpoint(self, name: str) -> None:
        last = f"{name}/{MANIFEST}"
        try:
            if self._sent.get(last) == _stamp(self._dir / last) or self._is_there(last):
                return
            folder = _staged(self._dir, name)
            for file in [*(read_manifest(folder) or {"files": ()})["files"], MANIFEST]:
                self._upload(folder / file, f"{name}/{file}")
        except FileNotFoundError:
            # The trial has deleted it for a newer one, before it could be held.
            return
        finally:
            shutil.rmtree(self._dir / STAGED, ignore_errors=True)

    def _is_there(self, manifest: str) -> bool:
        """Whether a checkpoint is there already; another one of its name is none from now on."""
        if manifest not in self._there:
            return False
        if self._bucket.read(manifest) == (self._dir / manifest).read_bytes():
            self._sent[manifest] = _stamp(self._dir / manifest)
            return True
        self._bucket.delete(manifest)
        self._there.discard(manifest)
        return False

    def _upload(self, path: Path, name: str) -> None:
        stamp = _stamp(path)
        self._bucket.upload(path, name)
        self._there.add(name)
        self._sent[name] = stamp

    def _delete_gone(self) -> None:
        """Delete at the URL what is no longer here."""
        here = {*record_files(self._dir), *log_files(self._dir)}
        folders = {*checkpoint_dirs(self._dir), *self._spared(), *self._on_their_way()}
        gone = [
            name
            for name in self._there
            if (checkpoint_of(name) not in folders if name.startswith(f"{CHECKPOINTS}/") else name not in here)
        ]
        # A checkpoint without its manifest is none: half-deleted, it is not taken for one.
        for name in sorted(gone, key=lambda name: not name.endswith(f"/{MANIFEST}")):
            self._bucket.delete(name)
            self._there.discard(name)
            self._sent.pop(name, None)

    def _spared(self) -> Iterator[str]:
        """The newest checkpoint there of each trial whose newer ones are not there yet."""
        there = whole_at(self._there)
        for trial in {name.rpartition("/")[0] for name in checkpoint_dirs(self._dir)}:
            of_trial = [name for name in there if name.rpartition("/")[0] == trial]
            if of_trial and not any((self._dir / name).exists() for name in of_trial):
                yield max(of_trial)

    def _on_their_way(self) -> Iterator[str]:
        """What is newer than all that is here of a trial: its workers may be uploading it."""
        newest = dict.fromkeys((path.name for path in (self._dir / CHECKPOINTS).glob("*")), -1)
        for name in checkpoint_dirs(self._dir):
            # One that was found damaged there is no more: its trial has gone back to an older one.
            if not is_away(self._dir / name) or f"{name}/{MANIFEST}" in self._there:
                # In the order of their steps.
                newest[name.split("/")[1]] = step_of(Path(name))
        for name in filter(None, set(map(checkpoint_of, self._there))):
            if step_of(Path(name)) > newest.get(name.split("/")[1], math.inf):
                yield name


@contextmanager
def mirrored(study_dir: Path, warn: Callable[[str], None]) -> Iterator[Mirror]:
    """A mirror that ends with the block, however it ends."""
    mirror = Mirror(study_dir, warn)
    try:
        yield mirror
    finally:
        mirror.finish()


def _staged(study_dir: Path, name: str) -> Path:
    """A checkpoint under other names, which stay when the trial deletes it for a newer one meanwhile."""
    stage = study_dir / STAGED
    shutil.rmtree(stage, ignore_errors=True)
    try:
        shutil.copytree(study_dir / name, stage, copy_function=os.link)
    except (OSError, shutil.Error):
        # A file system without links.
        return study_dir / name
    return stage


def _stamp(path: Path) -> Stamp:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
