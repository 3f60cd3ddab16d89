"""One writer per study at a URL: an object that names its holder, whose beat shows that it lives."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from tuner.commands import command
from tuner.errors import StorageError, StudyLockedError
from tuner.record.lock import describe, myself, read_text
from tuner.storage.bucket import Bucket
from tuner.storage.files import HOLDER
from tuner.storage.place import url_of

OBJECT, STOP = "study.lock", "stop"
BEAT_S, STALE_S, SETTLE_S = 10.0, 60.0, 1.0


class Ownership:
    """Holds a study at its URL until `release`, or until it is found in other hands.

    A file system that can make a file exclusively decides between two that come at once. A holder that is dead, or
    whose beat is old, is no holder.

    Attributes:
        taken: The error that says who has taken the study over; None as long as it is ours.
    """

    def __init__(self, bucket: Bucket, study_dir: Path) -> None:
        """Take it.

        Raises:
            StudyLockedError: Another live process holds it.
            StorageError: The URL cannot be used.
        """
        self.taken: StudyLockedError | None = None
        self._bucket, self._dir = bucket, study_dir
        self._me = {**myself(), "space": _process_space(), "token": uuid.uuid4().hex}
        self._ended = threading.Event()
        if not bucket.create(OBJECT, self._text()):
            self._take_over()
        self._thread = threading.Thread(target=self._keep_beating, daemon=True, name="study-owner")
        self._thread.start()

    def release(self) -> None:
        """Give it back; releasing twice is harmless."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(StorageError):
            if self.taken is None and read_holder(self._bucket).get("token") == self._me["token"]:
                self._bucket.delete(OBJECT)

    def _take_over(self) -> None:
        who = read_holder(self._bucket)
        if is_alive(who):
            raise StudyLockedError(
                f"study {self._dir.name!r} is being run by {describe(who)}",
                f"Watch it with `{command('status', self._dir)}`, or end that process first.",
            )
        self._bucket.write(OBJECT, self._text())
        # Of two that found the same dead holder, the one that wrote last has it.
        time.sleep(SETTLE_S)
        self.beat()
        if self.taken is not None:
            raise self.taken

    def _keep_beating(self) -> None:
        while self.taken is None and not self._ended.wait(BEAT_S):
            # Who cannot be reached for long is taken for dead, and finds so at the next beat.
            with contextlib.suppress(StorageError):
                self.beat()

    def beat(self) -> None:
        """Show that the holder lives, or find that another one holds the study."""
        who = read_holder(self._bucket)
        if who and who.get("token") != self._me["token"]:
            self.taken = StudyLockedError(
                f"study {self._dir.name!r} has been taken over by {describe(who)}: this process ends its part",
                f"What was not uploaded by then is in {self._dir}. See: {command('status', self._dir)}",
            )
            return
        self._bucket.write(OBJECT, self._text())

    def _text(self) -> bytes:
        return json.dumps({**self._me, "beat": time.time()}).encode()


def read_holder(bucket: Bucket) -> dict[str, Any]:
    """What the lock at the URL says; empty where there is none."""
    try:
        return read_text(bucket.read(OBJECT))
    except FileNotFoundError:
        return {}


def is_alive(who: dict[str, Any]) -> bool:
    """Whether a holder still runs, as far as can be known here."""
    if who.get("space") == _process_space():
        return _runs(int(who.get("pid", 0)))
    return time.time() - float(who.get("beat", 0)) < STALE_S


def runs_elsewhere(study_dir: Path) -> bool:
    """Whether a process of another machine ran a study when it was last looked at its URL."""
    try:
        return is_alive(json.loads((study_dir / HOLDER).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def stop_elsewhere(study_dir: Path) -> None:
    """Have the process that runs a study on another machine end it.

    Raises:
        StorageError: The URL cannot be used.
    """
    url = url_of(study_dir)
    if url is not None and runs_elsewhere(study_dir):
        Bucket(url).write(STOP, b"")


def _process_space() -> str:
    # A process id says something only where it was given: the same start of the system, the same container.
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {os.getppid()}"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0
