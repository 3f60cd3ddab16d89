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
from tuner.execution import cluster

POLL_S, CONNECT_TIMEOUT_S = 2.0, 5.0


@contextmanager
def leaving_lost_cluster(observer: Observer, study_dir: Path) -> Iterator[ExitStack]:
    """While the block runs, end the process in good order when the cluster's head is gone.

    Yields:
        What to call before that, last one first.
    """
    endings = ExitStack()

    def leave() -> None:
        again = command("resume", study_dir) if study_dir.exists() else "tune run"
        error = ClusterError("the head of the Ray cluster is gone", f"Once there is a cluster again: {again}")
        try:
            endings.close()
            observer.cluster_lost(error)
        finally:
            # Neither Ray nor a main thread that waits inside of it lets the interpreter end.
            os._exit(error.exit_code)

    with watching(*cluster.head(), leave):
        yield endings


@contextmanager
def watching(address: str, patience_s: float, on_lost: Callable[[], None]) -> Iterator[None]:
    """While the block runs, look whether the head answers.

    Args:
        address: `host:port` of the head's control service.
        patience_s: How long it may be away; a head that is fault tolerant comes back.
        on_lost: Called once, in a thread of its own, as the main one may wait for the head inside of Ray.
    """
    has_ended = threading.Event()

    def watch() -> None:
        answered_at = time.monotonic()
        while not has_ended.wait(POLL_S):
            if answers(address):
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
