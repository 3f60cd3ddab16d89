"""One writer per study: an advisory lock that names its holder and dies with it."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import json
import os
import socket
import time
from io import FileIO
from pathlib import Path
from typing import Any

from tuner.commands import command
from tuner.errors import StudyLockedError


class StudyLock:
    """Holds `study.lock` for as long as this process lives or until `release`.

    The operating system drops the lock with its holder, so a killed process leaves nothing to clean up; the text
    in the file only tells others whom to look for.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            StudyLockedError: Another live process holds it.
        """
        # Inheritable descriptors would keep the lock alive in child processes that outlive this one.
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - held open on purpose
        os.set_inheritable(self._file.fileno(), False)
        if not _acquire(self._file):
            self._file.close()
            raise StudyLockedError(
                f"study {path.parent.name!r} is being run by {describe(holder(path))}",
                f"Watch it with `{command('status', path.parent)}`, or end that process first.",
            )
        self._file.truncate(0)
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, without a name
            self._file.write(json.dumps(myself()).encode())

    def release(self) -> None:
        """Give the lock back; releasing twice is harmless."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()


def holder(path: Path) -> dict[str, Any] | None:
    """Who holds the lock at `path` right now: {host, pid, since}; None when nobody does."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return read_text(file.read())
    return None


def describe(who: dict[str, Any] | None) -> str:
    """One phrase for messages: which process on which host, since when."""
    if not who or "pid" not in who:
        return "another process"
    return f"process {who['pid']} on {who.get('host')} since {who.get('since')}"


def _acquire(file: FileIO, timeout_s: float = 0.5) -> bool:
    # A reader looking whether the study runs holds the lock for an instant; that is no holder.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def read_text(text: bytes) -> dict[str, Any]:
    """What a lock says; empty where that makes no sense."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def myself() -> dict[str, Any]:
    """This process, as a lock names it; `since` is ISO 8601, UTC."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": now}
