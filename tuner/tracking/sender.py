"""A queue of events and the background thread that sends them to MLflow, whatever state the store is in.

Every event is in the pending file before it is in the queue, and leaves both once the store has it. One for which the
disk had no room is in the queue alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tuner.tracking.pending import Event, PendingLog

# Every call costs about 6 ms of processor time per run that has news: fewer calls when there are many runs.
FLUSH_S, MAX_FLUSH_S, MAX_PROCESSOR_SHARE = 2.0, 15.0, 0.02
CHUNK = 500
RETRY_S, MAX_RETRY_S, CLOSING_RETRY_S, CLOSING_ATTEMPTS = 1.0, 60.0, 0.5, 3
SLOW_S = 60.0
# Importing mlflow takes seconds of processor time, which the start of the workers needs more.
IMPORT_DELAY_S = 60.0


class Store(Protocol):
    """What takes the events."""

    def apply(self, events: Sequence[Event]) -> None:
        """Take all of them, or raise; taking one twice changes nothing."""

    def hurry(self) -> None:
        """Somebody waits from now on."""

    def close(self) -> None:
        """Give up what is being written, in another thread."""


class Sender:
    """Takes events at once and sends them, in order, when the store allows."""

    def __init__(self, store: Store, pending: PendingLog, name: str, warn: Callable[[str, str], None]) -> None:
        """Nothing is read or started yet.

        Args:
            store: Where the events go, once training has begun.
            pending: Where unsent events are kept.
            name: The store, for messages.
            warn: Takes a kind, of which only the first warning is shown, and a text.
        """
        self._store, self._pending, self._name, self._warn = store, pending, name, warn
        self._changed = threading.Condition()
        self._queue: list[Event] = []
        self._old_events: list[Event] | None = None
        self._unwritten: dict[int, Event] = {}
        self._is_urgent = self._is_closing = self._is_abandoned = self._is_failing = False
        self._may_import = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._serve, name="mlflow", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Keep and queue one event."""
        with self._changed:
            self._read_old_events()
            try:
                self._pending.append(event)
            except OSError as error:
                self._unwritten[id(event)] = event
                self._warn("disk", f"{self._pending.path} cannot be written ({error}); MLflow may miss points")
            self._queue.append(event)
            self._changed.notify_all()

    def training_has_begun(self) -> None:
        """From now on the thread may take the time that importing mlflow needs."""
        self._may_import.set()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Send without delay until `condition` holds, which `notify` has looked at again, or the store fails."""
        with self._changed:
            self._is_urgent = True
            self._may_import.set()
            self._store.hurry()
            self._changed.notify_all()
            # A store that is down must not hold up every trial anew.
            self._changed.wait_for(lambda: condition() or self._is_failing, timeout_s)

    def notify(self) -> None:
        """Something that `wait_for` may wait for has changed."""
        with self._changed:
            self._changed.notify_all()

    def close(self, timeout_s: float) -> tuple[int, int]:
        """Send what can be sent in that time and stop.

        Returns:
            The number of events that stay in the pending file, and of those that are lost.
        """
        if self._thread is None:
            return 0, 0
        with self._changed:
            self._is_closing = True
            self._may_import.set()
            self._store.hurry()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._thread = None
        with self._changed:
            self._is_abandoned = True
            num_unsent, num_lost = self._keep([*(self._old_events or []), *self._queue])
        self._store.close()
        return num_unsent - num_lost, num_lost

    def _keep(self, unsent: Sequence[Event]) -> tuple[int, int]:
        """Leave what was not sent in the pending file: (how many, how many of them are not there)."""
        try:
            self._pending.rewrite(unsent)
        except OSError as error:
            # The file is as it was: it has all but what did not fit into it, and some that was sent.
            num_lost = sum(id(event) in self._unwritten for event in unsent)
            if num_lost:
                self._warn("lost", f"{num_lost} updates for MLflow are lost ({error})")
            return len(unsent), num_lost
        return len(unsent), 0

    def _read_old_events(self) -> None:
        # Before the first event of this session goes into the same file.
        if self._old_events is None:
            self._old_events, damaged = self._pending.read()
            if damaged:
                self._warn("damaged", f"{self._pending.path}: {damaged} unreadable lines are left out")

    # -- the background thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._may_import.wait(IMPORT_DELAY_S)
        retry_s, closing_attempts = RETRY_S, CLOSING_ATTEMPTS
        while (chunk := self._next_chunk()) is not None:
            begin = time.monotonic()
            try:
                self._store.apply(chunk)
            except Exception as error:
                if self._is_abandoned:
                    return
                self._set_failing(True)
                self._warn("unreachable", f"MLflow at {self._name}: {error}; training goes on, points are kept")
                if self._is_closing and (closing_attempts := closing_attempts - 1) <= 0:
                    return
                self._pause(CLOSING_RETRY_S if self._is_closing else retry_s, is_retry=True)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
                continue
            retry_s = RETRY_S
            self._set_failing(False)
            self._sent(len(chunk))
            self._pause(max(FLUSH_S, min((time.monotonic() - begin) / MAX_PROCESSOR_SHARE, MAX_FLUSH_S)))

    def _set_failing(self, is_failing: bool) -> None:
        with self._changed:
            self._is_failing = is_failing
            self._changed.notify_all()

    def _next_chunk(self) -> list[Event] | None:
        """The events to send next, oldest first; waits for some. None when all is done."""
        with self._changed:
            self._is_urgent = False
            self._changed.wait_for(lambda: self._old_events or self._queue or self._is_closing)
            if self._is_abandoned:
                return None
            if self._old_events:
                return self._old_events[:CHUNK]
            chunk = self._queue[:CHUNK]
        if chunk and time.time() - chunk[0]["time"] / 1000 > SLOW_S and not self._is_closing:
            self._warn("slow", f"MLflow at {self._name} is slow: {len(self._queue)} updates wait for it")
        return chunk or None

    def _sent(self, count: int) -> None:
        with self._changed:
            # After `close` gave up, the file belongs to whoever opens the study next.
            if self._is_abandoned:
                return
            if self._old_events:
                del self._old_events[:count]
            else:
                del self._queue[:count]
            try:
                self._pending.sent([*(self._old_events or []), *self._queue])
            except OSError as error:
                self._warn("disk", f"{self._pending.path} cannot be written ({error}); MLflow may miss points")

    def _pause(self, seconds: float, *, is_retry: bool = False) -> None:
        with self._changed:
            was_closing = self._is_closing
            if not is_retry and (was_closing or len(self._queue) >= CHUNK):
                return
            self._changed.wait_for(lambda: self._is_urgent or self._is_closing != was_closing, seconds)
