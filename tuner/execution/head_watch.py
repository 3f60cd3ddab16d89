"""Notices that the head of the Ray cluster is gone, while the study's books can still be closed.

Ray itself waits for a head that does not answer for a minute, and then ends the driver where it stands.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tuner.commands import command
from tuner.decisions.observer import Observer
from tuner.errors import ClusterError

POLL_S, CONNECT_TIMEOUT_S = 2.0, 5.0


class LostCluster:
    """Ends the process in good order when the cluster's head is gone.

    Args:
        observer: Told of it last.
        study_dir: Of the study that was to run.

    Attributes:
        endings: What to call before that, last one first.
    """

    def __init__(self, observer: Observer, study_dir: Path) -> None:
        self.endings = ExitStack()
        self._observer = observer
        self._dir = study_dir

    def leave(self) -> None:
        """Never returns."""
        again = command("resume", self._dir) if self._dir.exists() else "tune run"
        error = ClusterError("the head of the Ray cluster is gone", f"Once there is a cluster again: {again}")
        try:
            self.endings.close()
            self._observer.cluster_lost(error)
        finally:
            # Neither Ray nor a main thread that waits inside of it lets the interpreter end.
            os._exit(error.exit_code)


@contextmanager
def watching(find_head: Callable[[], tuple[str | None, float]], on_lost: Callable[[], None]) -> Iterator[None]:
    """While the block runs, look whether the head answers.

    Args:
        find_head: Returns `host:port` of the head's control service, None while there is none yet, and for how many
            seconds it may be away: one that is fault tolerant comes back.
        on_lost: Called once, in a thread of its own, as the main one may wait for the head inside of Ray.
    """
    has_ended = threading.Event()

    def watch() -> None:
        answered_at = time.monotonic()
        while not has_ended.wait(POLL_S):
            address, patience_s = find_head()
            if address is None or answers(address):
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at > patience_s:
                on_lost()
                return

    threading.Thread(target=watch, daemon=True, name="head-watch").start()
    try:
        yield
    finally:
        has_ended.set()


def answers(address: str) -> bool:
    """Whether somebody takes connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
