"""Brings a trial's log off a node that does not see the study's folder: rank 0's to the slot, others' to the URL."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tuner.errors import StorageError
from tuner.storage.bucket import Bucket
from tuner.storage.files import whole_lines

# A message to the slot costs next to nothing, an upload a request of all there is.
SEND_EVERY_S, UPLOAD_EVERY_S = 1.0, 5.0


class LogCourier:
    """Ships what is printed every few seconds, from a thread of its own, and whenever asked to.

    Args:
        path: Of the log, on this node; begins anew, or as it was when another node wrote it.
        load: Puts there what an earlier attempt has left elsewhere.
        ship: Called with the path when something may be new.
        every_s: Seconds between two calls.
    """

    def __init__(self, path: Path, load: Callable[[Path], None], ship: Callable[[Path], None], every_s: float) -> None:
        self._path, self._ship, self._every_s = path, ship, every_s
        path.unlink(missing_ok=True)
        load(path)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_shipping, daemon=True, name="log-courier")
        self._thread.start()

    def ship(self) -> None:
        """Ship what has been printed; what cannot be is tried again, and never a trial's fault."""
        with self._lock, suppress(StorageError, OSError):
            self._ship(self._path)

    def close(self) -> None:
        """Ship the rest, and leave nothing of the log on this node."""
        self._ended.set()
        self._thread.join()
        self.ship()
        self._path.unlink(missing_ok=True)

    def _keep_shipping(self) -> None:
        while not self._ended.wait(self._every_s):
            self.ship()


class Increments:
    """Hands on what is new in a log, whole lines.

    Args:
        send: Takes it.
    """

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send, self._position = send, 0

    def __call__(self, path: Path) -> None:
        with open(path, "rb") as file:
            file.seek(self._position)
            new = whole_lines(file.read())
        if new:
            self._send(new.decode("utf-8", "replace"))
            self._position += len(new)


class Uploads:
    """Uploads a log that has grown.

    Args:
        url: Of the logs' folder.
    """

    def __init__(self, url: str) -> None:
        self._bucket, self._size = Bucket(url), 0

    def load(self, path: Path) -> None:
        """Download what there is of it, as objects cannot be appended to."""
        with suppress(FileNotFoundError):
            self._bucket.download(path.name, path)
            self._size = path.stat().st_size

    def __call__(self, path: Path) -> None:
        size = path.stat().st_size
        if size != self._size:
            self._bucket.upload(path, path.name)
            self._size = size
