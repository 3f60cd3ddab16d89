"""What MLflow has not been told yet, on disk: a log of events that survives a kill of the driver.

Each event is one JSON line, written before it is queued. Events may be sent twice (MLflow is asked what it has), so
nothing marks single lines as sent: the file is emptied whenever all of them are.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
REWRITE_BYTES = 4 << 20


class PendingLog:
    """The events in one file, in the order they happened; the caller serialises the calls."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._size = 0

    def read(self) -> tuple[list[Event], int]:
        """The events an earlier session left, and the number of lines that cannot be read."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [], 0
        parsed = [_parse(line) for line in lines if line.strip()]
        events = [event for event in parsed if event is not None]
        return events, len(parsed) - len(events)

    def append(self, event: Event) -> None:
        """Keep one more event; it is safe from a kill of this process on return, not from a power cut.

        Raises:
            OSError: The disk is full or the folder is gone.
        """
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._descriptor).st_size
        # The line break comes first, so that a line torn by a kill or a full disk cannot spoil the next one.
        line = b"\n" + json.dumps(event, separators=(",", ":")).encode()
        written = os.write(self._descriptor, line)
        self._size += written
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def sent(self, remaining: Iterable[Event]) -> None:
        """Everything but `remaining` has been sent: forget it, at once or when the file has grown."""
        rest = list(remaining)
        if rest and self._size < REWRITE_BYTES:
            return
        if rest or self._descriptor is None:
            self.rewrite(rest)
        else:
            os.ftruncate(self._descriptor, 0)
            self._size = 0

    def rewrite(self, events: Iterable[Event]) -> None:
        """Make the file hold exactly these events; it does not exist when there are none.

        Raises:
            OSError: The disk is full or the folder is gone; the file is as it was.
        """
        self.close()
        text = "".join(f"\n{json.dumps(event, separators=(',', ':'))}" for event in events)
        if not text:
            self.path.unlink(missing_ok=True)
            return
        draft = self.path.with_name(f"{self.path.name}.new")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(self.path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._size = len(text)

    def close(self) -> None:
        """Release the file; a later `append` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "op" in event else None
